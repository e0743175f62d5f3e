"""The flight recorder: a log of an engine's last steps, always on, in memory of one size.

`record` has the ring and its layout, `stacks` what the threads of a process do, and `dump` the file
that holds both.
"""

__all__: list[str] = []
