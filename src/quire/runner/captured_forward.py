"""Forwards of any tokens, captured once and then replayed by one call."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from quire.attention import AttentionBackend, GroupInputs, KVPool, StepInputs
from quire.models import CausalLM
from quire.ops.capture import ArenaFullError, CaptureArena, SizedCalls, capture_sizes
from quire.ops.replay import NotCapturableError
from quire.ops.team import Team
from quire.runner.replay_failures import ReplayFailures

__all__ = ["CapturedForward"]

_log = logging.getLogger("quire.runner")


class CapturedForward:
    """A `Computes` that replays the model's forward for all steps of up to `max_tokens` tokens and
    `max_rows` rows: what they are, and which tokens are wanted, stands in buffers that stay, how
    many they are in the arguments.

    It is recorded at once. Of a model that does more than call kernels or needs more than the arena
    has, nothing is captured. Then, and when a replay fails, the model computes call by call.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: KVPool,
        backend: AttentionBackend,
        windows: Sequence[int | None],
        team: Team,
        arena: CaptureArena,
        *,
        max_tokens: int,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        """windows: per layer group. team: that computes the model's kernels. max_tokens: 0 to
        capture nothing. max_blocks: of a sequence."""
        self._model = model
        self._kv = kv
        self._backend = backend
        self._windows = tuple(windows)
        self._team = team
        self._arena = arena
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._failures = ReplayFailures("steps of prompts")
        tokens, rows, blocks = (n if max_tokens else 0 for n in (max_tokens, max_rows, max_blocks))
        self._token_ids = torch.zeros(tokens, dtype=torch.int32)
        self._positions = torch.zeros(tokens, dtype=torch.int64)
        self._starts = torch.zeros(rows + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32)
        self._wanted = torch.zeros(tokens, dtype=torch.int64)
        self._tables = [torch.zeros((rows, blocks), dtype=torch.int32) for _ in windows]
        self._slots = [torch.zeros(tokens, dtype=torch.int64) for _ in windows]
        self._calls = self._capture() if max_tokens else None
        self.logits = model.logits

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """As `CausalLM.forward`; the result is to be read before anything else is captured or
        replayed in the arena."""
        num_tokens, num_rows = len(token_ids), len(step.seq_lens)
        calls, wanted = self._calls, step.wanted_tokens
        if calls is None or num_tokens > self._max_tokens or num_rows > self._max_rows:
            return self._call_by_call(token_ids, positions, step)
        if wanted is None:
            wanted = torch.arange(num_tokens)
        try:
            self._fill(token_ids, positions, step, wanted)
            return calls.replay(num_tokens, num_rows, len(wanted))[: len(wanted)]
        except Exception:  # noqa: BLE001  whatever it is
            hidden = self._call_by_call(token_ids, positions, step)  # fails if rows are bad
            if self._failures.note():
                self._calls = None
            return hidden

    def _call_by_call(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """The memory plan counts the arena or what this takes, whichever is more."""
        if self._max_tokens:
            self._arena.give_back()
        return self._model.forward(token_ids, positions, step)

    def _fill(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepInputs,
        wanted: torch.Tensor,
    ) -> None:
        num_tokens, num_rows = len(token_ids), len(step.seq_lens)
        self._token_ids[:num_tokens] = token_ids
        self._positions[:num_tokens] = positions
        self._starts[: num_rows + 1] = step.query_start_loc
        self._seq_lens[:num_rows] = step.seq_lens
        self._wanted[: len(wanted)] = wanted
        for table, slots, group in zip(self._tables, self._slots, step.groups, strict=True):
            table[:num_rows, : group.block_table.shape[1]] = group.block_table
            slots[:num_tokens] = group.slot_mapping

    def _capture(self) -> SizedCalls | None:
        largest = (self._max_tokens, self._max_rows, self._max_tokens)
        try:
            return capture_sizes(self._team, self._arena, self._compute, largest)
        except ArenaFullError as error:
            _log.warning("steps of prompts are computed call by call: %s", error)
        except NotCapturableError as error:
            _log.info("steps of prompts are computed call by call: %s", error)
        except Exception:  # noqa: BLE001  it may well compute the rows of requests
            _log.warning("steps of prompts are computed call by call", exc_info=True)
        return None

    def _compute(self, num_tokens: int, num_rows: int, num_wanted: int) -> torch.Tensor:
        starts, seq_lens = self._starts[: num_rows + 1], self._seq_lens[:num_rows]
        groups: list[GroupInputs] = []
        for whole, slots, window in zip(self._tables, self._slots, self._windows, strict=True):
            table = whole[:num_rows]
            plan = self._backend.plan(starts, seq_lens, table, window)
            groups.append(GroupInputs(table, slots[:num_tokens], window, plan))
        longest = self._tables[0].shape[1]
        wanted = self._wanted[:num_wanted]
        step = StepInputs(starts, seq_lens, num_tokens, longest, tuple(groups), self._kv, wanted)
        return self._model.forward(self._token_ids[:num_tokens], self._positions[:num_tokens], step)
