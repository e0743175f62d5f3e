"""`step_inputs` for CPUs. It touches only the block table entries that the step needs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.base.platform import Platform
from quire.ops.native.team import ALONE, Team
from quire.ops.operation import FOR_CPUS, Provider

__all__ = ["PROVIDER"]


def _step_inputs(
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    row_tokens: torch.Tensor,
    row_blocks: torch.Tensor,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """Contract in `quire.ops.rows.step_inputs`."""
    rows, starts, tables = slots.numpy(), query_start_loc.numpy(), row_blocks.numpy()
    counts, computed = np.diff(starts), num_computed.numpy()[rows]
    num_tokens, num_padding = int(starts[-1]), len(token_ids) - int(starts[-1])
    if num_tokens == len(rows):  # one token each
        owners, places = rows, computed
    else:
        owners = np.repeat(rows, counts)
        places = np.arange(num_tokens) + np.repeat(computed - starts[:-1], counts)
    if num_padding:
        owners = np.concatenate((owners, np.full(num_padding, len(num_computed) - 1)))
        places = np.concatenate((places, np.zeros(num_padding, np.int64)))
    token_ids.numpy()[:] = row_tokens.numpy()[owners, places]
    positions.numpy()[:] = places
    blocks = tables[owners, places // block_size].astype(np.int64)
    slot_mapping.numpy()[:] = blocks * block_size + places % block_size
    lengths = computed + counts
    seq_lens.numpy()[:] = lengths
    num_blocks = -(-lengths // block_size)
    widest = int(num_blocks.max())
    used = np.arange(widest) < num_blocks[:, None]
    np.copyto(block_table.numpy()[:, :widest], tables[rows, :widest], where=used)


def _unavailable(platform: Platform) -> str | None:
    return None if platform.device == "cpu" else FOR_CPUS


def _load(team: Team = ALONE) -> Callable[..., None]:  # noqa: ARG001  the caller computes
    return _step_inputs


PROVIDER = Provider("numpy", _unavailable, _load)
