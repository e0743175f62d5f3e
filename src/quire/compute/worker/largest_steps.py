"""The largest steps that an engine may be asked for, made up to see what they take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.config.kv_layout import KVLayout
from quire.protocol.pooling_params import Pooling
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import EnterRow, StepPlan

__all__ = ["LargestSteps"]


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """A step of as many tokens as there may be, dealt out to as many rows as there may be, then one
    in which each row decodes; all rows sample in both. pooling: method of rows that draw nothing,
    such as those of encoders; then there is no second step.

    All rows have the same blocks, so that a small pool serves: their contents do not matter.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    layout: KVLayout
    pooling: Pooling | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool that the steps need."""
        return self.layout.blocks_for(self._longest_row)

    def plans(self) -> tuple[StepPlan, ...]:
        counts, slots = self._counts(), np.arange(self.max_num_seqs, dtype=np.int32)
        blocks = self.layout.first_blocks(self._longest_row)
        tables = tuple(np.array(each, np.int32) for each in blocks)
        params = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.95, top_k=50)
        rows = tuple(
            EnterRow(
                slot=slot,
                token_ids=np.zeros(count, np.int32),
                num_prompt_tokens=count,
                num_computed_tokens=0,
                block_tables=tables,
                params=params,
                seed=slot,
                sample_index=0,
                pooling=self.pooling,
            )
            for slot, count in enumerate(counts.tolist())
        )
        first = StepPlan(0, enter=rows, delta_slot=slots, delta_tokens=counts)
        if self.pooling is not None:
            return (first,)
        return first, StepPlan(1, delta_slot=slots, delta_tokens=np.ones_like(slots))

    def _counts(self) -> np.ndarray:
        """Tokens of each row in the first step, int32 [rows]."""
        most = self.max_num_seqs * (self.max_model_len - 1)  # a row decodes one more after these
        each, more = divmod(min(self.max_num_batched_tokens, most), self.max_num_seqs)
        return each + (np.arange(self.max_num_seqs) < more).astype(np.int32)

    @property
    def _longest_row(self) -> int:
        """Tokens after both steps."""
        return int(self._counts().max()) + 1
