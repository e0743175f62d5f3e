"""Readers of config.json, one file per lineage of model families."""

__all__: list[str] = []
