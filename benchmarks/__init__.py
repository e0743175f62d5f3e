"""Scripts that measure quire, run as `python -m benchmarks.folder.name` in the repository's root.

A package, so that another of this name in the environment of a peer cannot hide it.
"""
