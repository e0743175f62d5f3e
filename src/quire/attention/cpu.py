"""Attention by the C++ kernels of one instruction set."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.attention.kv_pool import LayerCache
from quire.attention.step_inputs import GroupInputs, StepInputs
from quire.errors import EngineError

__all__ = ["CpuAttention"]


class CpuAttention:
    """`AttentionBackend` over a C++ provider of `quire.ops.paged_attention`.

    The kernel cuts the work itself, from lengths alone; `plan` only checks once per step what the
    kernel takes on trust, for it reads raw memory.
    """

    def __init__(self, name: str, paged_attention: Callable[..., torch.Tensor]) -> None:
        self.name = name
        self._paged_attention = paged_attention

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        window: int | None,  # noqa: ARG002  the protocol's
    ) -> None:
        """Raises EngineError when metadata are not int32 with contiguous rows on the CPU."""
        for what, tensor in (
            ("query_start_loc", query_start_loc),
            ("seq_lens", seq_lens),
            ("block_table", block_table),
        ):
            if tensor.dtype != torch.int32 or tensor.device.type != "cpu" or tensor.stride(-1) != 1:
                raise EngineError(
                    f"{what} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}. "
                    "Give int32 on the CPU with contiguous rows."
                )

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        scale: float,
        step: StepInputs,
        group: GroupInputs,
    ) -> torch.Tensor:
        """q [T, H, D] over one layer's cache → [T, H, D]."""
        return self._paged_attention(
            q,
            cache.k,
            cache.v,
            group.block_table,
            step.query_start_loc,
            step.seq_lens,
            scale,
            group.window,
            cache.k_scale,
            cache.v_scale,
        )
