"""One prompt in the engine, from rendering to deltas of text."""

__all__: list[str] = []
