"""C++ kernels from Python: libraries, threads, packed memory and replay."""

__all__: list[str] = []
