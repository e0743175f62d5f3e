"""The core as a process: started, watched and replaced."""

__all__: list[str] = []
