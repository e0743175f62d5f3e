"""Ranks of one model on several hosts. Ray places and starts a process on each host, and watches
it; what an engine says to its ranks goes over a socket of our own, not through Ray."""

from quire.executor.ray.group import RayRankGroup

__all__ = ["RayRankGroup"]
