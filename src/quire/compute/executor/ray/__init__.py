"""Ranks of one model on several hosts. Ray places, starts and watches a process on each host.
Messages between the engine and its ranks use a socket of our own."""

from quire.compute.executor.ray.group import RayRankGroup

__all__ = ["RayRankGroup"]
