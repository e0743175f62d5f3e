"""A recorder of graphs for CPU tensors: CUDA graphs without a GPU, and without the speed.

It records the operations of torch, and does them again on the same tensors. So a value of the host
that was baked in shows: results computed while recording are spoilt afterwards, state is put back,
and asking a tensor for its value is an error. Kernels are recorded as whole calls, if they are
called through `opaque`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CallRecorder"]

READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select")
EMPTY = ("aten::empty", "aten::new_empty")


class _Calls(TorchDispatchMode):
    """The graph as well: a list of things to do again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        assert not name.startswith(READS), f"{name}: a step asks a tensor for its value"
        result = func(*args, **(kwargs or {}))
        outputs = _tensors(result)
        if func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **(kwargs or {})))
            return result
        if _is_view(outputs, _tensors([*args, *(kwargs or {}).values()])):
            return result
        self.made += outputs
        if not name.startswith(EMPTY):
            self.calls.append(lambda: _again(outputs, func(*args, **(kwargs or {}))))
        return result

    def replay(self) -> None:
        for call in self.calls:
            call()


class CallRecorder:
    """kept: tensors that recording must not change, since on a GPU nothing is computed then."""

    def __init__(self, kept: Sequence[torch.Tensor]) -> None:
        self._kept = kept
        self._before: list[torch.Tensor] = []
        self._calls: _Calls | None = None
        self.num_graphs = 0

    def begin(self) -> None:
        self._before = [tensor.clone() for tensor in self._kept]
        self._calls = _Calls()
        self._calls.__enter__()

    def end(self) -> _Calls:
        calls = self._stop()
        for tensor in calls.made:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        self.num_graphs += 1
        return calls

    def result_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def abandon(self) -> None:
        if self._calls is not None:
            self._stop()

    def _stop(self) -> _Calls:
        calls, self._calls = self._calls, None
        assert calls is not None
        calls.__exit__(None, None, None)
        for tensor, before in zip(self._kept, self._before, strict=True):
            tensor.copy_(before)
        return calls

    def opaque(self, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The kernel as one call, which reads its tensors whenever it is done."""

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls = self._calls
            if calls is None:
                return kernel(*args, **kwargs)
            calls.__exit__(None, None, None)
            result = kernel(*args, **kwargs)
            calls.__enter__()
            calls.made.append(result)
            calls.calls.append(lambda: result.copy_(kernel(*args, **kwargs)))
            return result

        return call


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _is_view(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    places = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return any(tensor.untyped_storage().data_ptr() in places for tensor in outputs)


def _again(outputs: list[torch.Tensor], result: Any) -> None:
    for output, value in zip(outputs, _tensors(result), strict=True):
        output.copy_(value)
