"""Pinned prefixes, and the operator's files of them."""

__all__: list[str] = []
