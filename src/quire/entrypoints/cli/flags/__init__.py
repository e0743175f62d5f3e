"""Command-line flags, made from the settings that they set."""

__all__: list[str] = []
