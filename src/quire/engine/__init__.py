"""The engine: core, clients, and `build.py`, the one place where everything is wired."""

__all__: list[str] = []
