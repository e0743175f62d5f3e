"""Inputs of a forward besides tokens and positions; the only carrier of attention metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.compute.attention.kv_pool import KVPool
from quire.ops.kv.pages import EMPTY_BYTE

__all__ = ["GivenRows", "GroupInputs", "SequenceStates", "StateInputs", "StepInputs"]


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Attention metadata of one layer group for one step.

    block_table: int32 [R, M]; entry i of a row is the block of its tokens i·S … (i+1)·S - 1.
    slot_mapping: int64 [T]; place of token t's K/V: block · S + offset.
    window: sliding window in tokens, the query itself included, or None.
    plan: data that the attention backend prepared for this step and group.
    last_key: int32 [T], position of the last key that each token sees; None: its own.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    window: int | None
    plan: Any
    last_key: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Embeddings that requests brought. index: int64 [G], the tokens of the batch that they stand
    for; rows: [G, (1 + N) · E], of which the first E elements stand in place of the table's. The
    others are N vectors that layers add later."""

    index: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Recurrent states of one step. places: uint8 [P, bytes], of which each layer has its part.
    read, write, num_computed: int64, by slot: the places before and after the step, and the tokens
    that the state has seen. slots: int64 [R], of the rows of the batch. kept: uint8 [K, bytes],
    room for inputs of tokens that may be computed again, of which each layer has its part; None if
    the step keeps none. keep: int64, by slot: place there of a row's first token, -1 for none."""

    places: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    num_computed: torch.Tensor
    slots: torch.Tensor
    kept: torch.Tensor | None = None
    keep: torch.Tensor | None = None


class SequenceStates:
    """Recurrent states of sequences 0 … count - 1 that go through a model without a runner. They
    start as NaN."""

    def __init__(self, count: int, state_bytes: int, device: torch.device) -> None:
        self._places = torch.full((2 * count, state_bytes), EMPTY_BYTE, dtype=torch.uint8)
        self._places = self._places.to(device)
        self._read = torch.arange(count, device=device)
        self._write = self._read + count
        self._num_computed = torch.zeros(count, dtype=torch.int64, device=device)

    def inputs(self, starts: Mapping[int, int]) -> StateInputs:
        """Return the inputs of a step. starts: number of tokens that each of its sequences has
        before it. The state before the step is the one that the last step wrote."""
        slots = torch.tensor(list(starts), device=self._read.device)
        computed = torch.tensor(list(starts.values()), device=slots.device)
        self._num_computed[slots] = computed
        goes_on = slots[computed > 0]
        read = self._read[goes_on]
        self._read[goes_on], self._write[goes_on] = self._write[goes_on], read
        return StateInputs(self._places, self._read, self._write, self._num_computed, slots)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step of a flat batch: row r owns tokens query_start_loc[r] … query_start_loc[r+1] - 1.

    query_start_loc: int32 [R + 1]. seq_lens: int32 [R], tokens in the cache after this step's
    writes. max_query_len, max_seq_len: host integers. groups: metadata of each layer group.
    wanted_tokens: int64 [N], indices of the tokens whose hidden states are asked for; None for all
    of them. given: embeddings taken from requests instead of the token table; None: none. Only
    steps that are computed call by call have some. states: None if no layer has one.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    groups: tuple[GroupInputs, ...]
    kv: KVPool
    wanted_tokens: torch.Tensor | None = None
    given: GivenRows | None = None
    states: StateInputs | None = None
