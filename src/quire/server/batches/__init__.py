"""Batches: files of requests, answered by the application without a socket."""

__all__: list[str] = []
