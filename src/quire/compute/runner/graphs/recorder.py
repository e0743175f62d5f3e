"""Recorders of graphs: work that is captured once and replayed by one call."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

from quire.ops.native.capture import CaptureArena, record_calls, replay_list
from quire.ops.native.replay import KernelCall, ReplayList
from quire.ops.native.team import Team

__all__ = ["CudaRecorder", "Graph", "GraphRecorder", "NativeRecorder"]


class Graph(Protocol):
    """Work that reads and writes the memory that it read and wrote when it was recorded."""

    def replay(self) -> None:
        """Launch the recorded work."""
        ...


class GraphRecorder(Protocol):
    """Records work between `begin` and `end` instead of doing it. Memory allocated meanwhile stays
    allocated, or is shared with graphs recorded later: only one graph of a recorder runs at a
    time."""

    def begin(self) -> None: ...

    def end(self) -> Graph:
        """Return the recorded graph. Raises if something cannot be recorded."""
        ...

    def result_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor into which each replay writes the value of a tensor that was made while
        recording. Read it before anything else is recorded or replayed."""
        ...

    def abandon(self) -> None:
        """Stop recording after an exception between `begin` and `end`. Raises nothing."""
        ...


class NativeRecorder:
    """Records the calls of one team's C++ kernels, and replays them by one call. Torch computes
    nothing between them. Temporaries of all graphs share one arena, and no graph keeps any of
    them."""

    def __init__(self, team: Team, arena: CaptureArena) -> None:
        self._team = team
        self._arena = arena
        self._calls: list[KernelCall] = []
        self._recording: contextlib.ExitStack | None = None

    def begin(self) -> None:
        stack = contextlib.ExitStack()
        self._calls = stack.enter_context(record_calls(self._team, self._arena))
        self._recording = stack

    def end(self) -> Graph:
        self.abandon()
        return NativeGraph(replay_list(self._calls))

    def result_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._arena.borrowed(tensor)

    def abandon(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()


class NativeGraph:
    """One call into C++, without the interpreter lock."""

    __slots__ = ("calls", "replay")

    def __init__(self, calls: ReplayList) -> None:
        self.calls = calls
        self.replay = calls.run


class CudaRecorder:
    """CUDA graphs on the current stream, which must not be the default one, with one memory pool.
    The stream may still be busy. Work must have run once without recording, so that kernels are
    compiled and workspaces of libraries exist. Only calls of the recording thread are checked, so
    another thread may wait for results meanwhile."""

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

    def result_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def abandon(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # it says that what failed has failed
                graph.capture_end()
