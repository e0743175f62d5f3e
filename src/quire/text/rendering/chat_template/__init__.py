"""Chat templates: parsed, bounded and run in a sandbox."""

__all__: list[str] = []
