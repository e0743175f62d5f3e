"""Metrics, timelines and status of a running server."""

__all__: list[str] = []
