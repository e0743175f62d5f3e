"""The doors through which fronts use the engine, in their process or another."""

__all__: list[str] = []
