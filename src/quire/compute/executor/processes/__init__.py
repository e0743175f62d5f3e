"""Ranks of one model as processes of one host, behind the executor's door."""

__all__: list[str] = []
