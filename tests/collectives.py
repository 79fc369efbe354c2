"""Where a compiled program exchanges data between devices."""

from __future__ import annotations

import re

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


def collectives_in_loops(text: str) -> dict[str, int]:
    """Collective operations in each loop of a compiled program, by the loop's name, with those of
    the loops inside of it."""
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for each in text.splitlines():
        if each.endswith("{") and (found := re.match(r"(?:ENTRY )?%?([\w.-]+) ", each)):
            lines = bodies[found[1]] = []
        lines.append(each)

    def inside(name: str, seen: set[str]) -> int:
        if name in seen or name not in bodies:
            return 0
        seen.add(name)
        count = 0
        for line in bodies[name]:
            count += bool(_COLLECTIVE.search(line))
            called = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", line)
            for names in re.findall(r"(?:branch_computations|calls)=\{([^}]*)\}", line):
                called += [name.strip().lstrip("%") for name in names.split(",")]
            count += sum(inside(other, seen) for other in called)
        return count

    result: dict[str, int] = {}
    for lines in bodies.values():
        for line in lines:
            loop = re.search(r" while\(.*body=%?([\w.-]+)", line)
            if loop:
                name = re.search(r'op_name="([^"]*)"', line)
                key = f"{name[1] if name else ''} {loop[1]}"
                result[key] = inside(loop[1], set())
    return result
