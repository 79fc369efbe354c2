"""Settings of the C library's memory allocator for training on a CPU."""

from __future__ import annotations

from collections.abc import Mapping


def allocator_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that will train on a CPU, to be set before it starts.

    A training step allocates and frees hundreds of megabytes. By default the C library returns
    them to the system each time, and every step pays again for pages filled with zeros; with
    these settings it keeps them, in large pages. Changes nothing where the environment has
    settings of its own, or where the C library is not glibc.
    """
    if "GLIBC_TUNABLES" in environment:
        return {}
    settings = ("hugetlb=1", "mmap_max=0", "trim_threshold=100000000000")
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{each}" for each in settings)}
