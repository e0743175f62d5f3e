"""Attention by the C++ kernels of one instruction set, or by those in Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.base.errors import EngineError
from quire.compute.attention.kv_pool import LayerCache
from quire.compute.attention.scores import PLAIN_SCORES, ScoreOptions
from quire.compute.attention.step_inputs import GroupInputs, StepInputs

__all__ = ["KernelAttention"]


class KernelAttention:
    """`AttentionBackend` over a provider of `quire.ops.attention.paged_attention`.

    The kernels cut the work themselves, from lengths alone; `plan` only checks once per step what
    they take on trust, for they read raw memory.
    """

    is_capturable = True

    def __init__(
        self,
        name: str,
        paged_attention: Callable[..., torch.Tensor],
        device_type: str | None = None,
        *,
        adds_biases: bool = False,
    ) -> None:
        """device_type: device that metadata must lie on; None where the kernels' launcher checks
        that."""
        self.name = name
        self.adds_biases = adds_biases
        self._paged_attention = paged_attention
        self._device_type = device_type

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        window: int | None,  # noqa: ARG002  the protocol's
    ) -> None:
        """Raises EngineError when metadata are not int32 with contiguous rows on the device."""
        for what, tensor in (
            ("query_start_loc", query_start_loc),
            ("seq_lens", seq_lens),
            ("block_table", block_table),
        ):
            is_here = self._device_type in (None, tensor.device.type)
            if tensor.dtype != torch.int32 or not is_here or tensor.stride(-1) != 1:
                raise EngineError(
                    f"{what} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}. "
                    f"Give int32 with contiguous rows on {self._device_type or 'the device'}."
                )

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        scale: float,
        step: StepInputs,
        group: GroupInputs,
        scores: ScoreOptions = PLAIN_SCORES,
    ) -> torch.Tensor:
        """q [T, H, D] over one layer's cache → [T, H, D]."""
        options = scores.given()
        if group.last_key is not None:  # not every provider takes it
            options["last_key"] = group.last_key
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
            max_query_len=step.max_query_len,
            **options,
        )
