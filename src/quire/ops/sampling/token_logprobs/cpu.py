"""`token_logprobs` by the C++ kernel (csrc/sampling/token_logprobs.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The operation on `library`; contract in `quire.ops.sampling.token_logprobs`."""
    call = library.call

    def token_logprobs(
        logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        count = len(rows)
        logprobs = torch.empty(count)
        ranks = torch.empty(count, dtype=torch.int32)
        top_ids = torch.empty(count, k, dtype=torch.int32)
        top_logprobs = torch.empty(count, k)
        call(
            "token_logprobs",
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            DTYPE_CODES[logits.dtype],
            rows.data_ptr(),
            token_ids.data_ptr(),
            count,
            k,
            logprobs.data_ptr(),
            ranks.data_ptr(),
            top_ids.data_ptr(),
            top_logprobs.data_ptr(),
        )
        return logprobs, ranks, top_ids, top_logprobs

    return token_logprobs
