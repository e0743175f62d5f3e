"""What a device was asked to do, recorded once and asked again by one call."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

__all__ = ["CudaRecorder", "Graph", "GraphRecorder"]


class Graph(Protocol):
    """Work that reads and writes the memory that it read and wrote when it was recorded."""

    def replay(self) -> None:
        """Give it to the queue."""
        ...


class GraphRecorder(Protocol):
    """Between `begin` and `end`, work is recorded and not done. What it allocates stays its own, or
    belongs to a graph that was recorded after it: of one recorder, one graph works at a time."""

    def begin(self) -> None: ...

    def end(self) -> Graph:
        """What was recorded. Raises if something cannot be."""
        ...

    def abandon(self) -> None:
        """After an exception between the two: nothing is recorded any more. Raises nothing."""
        ...


class CudaRecorder:
    """CUDA graphs on the current stream, which must not be the default one, with one memory pool.

    The stream may be busy: what it was given before goes on. Work must have been done once without
    being recorded, so that kernels are compiled and the libraries' workspaces are there. Only calls
    of the recording thread are watched: another one may wait for results meanwhile.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Graph:
        graph, self._graph = self._graph, None
        assert graph is not None, "nothing is being recorded"
        graph.capture_end()
        return graph

    def abandon(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # it says that what failed has failed
                graph.capture_end()
