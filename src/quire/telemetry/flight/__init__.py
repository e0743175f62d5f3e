"""The flight recorder: what the last steps of an engine did, always on, in memory of one size.

`record` has the ring and its layout, `stacks` what the threads of a process do, and `dump` the file
that holds both.
"""

__all__: list[str] = []
