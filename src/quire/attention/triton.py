"""Attention on a GPU by the kernels in Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.attention.kv_pool import LayerCache
from quire.attention.step_inputs import GroupInputs, StepInputs
from quire.errors import EngineError

__all__ = ["TritonAttention"]


class TritonAttention:
    """`AttentionBackend` over `quire.ops.paged_attention` in Triton.

    The kernels cut the work themselves, from lengths that only the device knows; the host is never
    waited for.
    """

    name = "triton"

    def __init__(self, paged_attention: Callable[..., torch.Tensor]) -> None:
        self._paged_attention = paged_attention

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        window: int | None,  # noqa: ARG002  the protocol's
    ) -> None:
        """Raises EngineError when metadata are not int32 with contiguous rows."""
        for what, tensor in (
            ("query_start_loc", query_start_loc),
            ("seq_lens", seq_lens),
            ("block_table", block_table),
        ):
            if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
                raise EngineError(
                    f"{what} is {tensor.dtype} with strides {tensor.stride()}. Give int32 with "
                    "contiguous rows."
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
