"""Beam search: its rules (`search`), and how rows follow them (`intake`)."""

__all__: list[str] = []
