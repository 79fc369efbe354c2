"""How steps lie on disk and in memory.

    files     chunk files with checked headers, and the directory that one writer may hold
    journal   the one number that says which steps count: a kill at any moment loses no batch
    memory    mapping chunks, preparing pages and reusing buffers, with the measured gain of each
    store     chunks as columns: write rows, copy sequences out, write values back

`store` knows chunks and steps, not streams or sequences; those are the index above it.
"""
