"""A row that gives candidates and has drafts gives some for each position, as rows without drafts
give them at that place; on the fake executor and on the real one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config.kv_layout import KVFormat, KVLayout
from quire.protocol.step import (
    EnterRow,
    IntArray,
    LateInput,
    StepPlan,
    StepResult,
    TokenCandidates,
)
from tests.executor.fake import FakeExecutor, FakeModel
from tests.models.families import CASES, write_checkpoint
from tests.pairs import LAWS_BY_PAIRS
from tests.runner.late_device import keep_rows_on_device
from tests.small_engines import SMALL

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
CANDIDATES, DRAWING, PROBE = 0, 1, 2
PROMPT = [5, 6, 7, 9, 3, 4]
DRAFTS = [11, 12, 13]
BLOCKS_PER_ROW = 10
EDITED = SamplingParams(logprobs=2, presence_penalty=1.0, repetition_penalty=1.3)


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


class Door:
    """An executor with up to `depth` plans in flight, written by hand."""

    def __init__(self, executor: Any, num_groups: int, depth: int, vocab: int) -> None:
        self.vocab = vocab
        self._executor = executor
        self._num_groups = num_groups
        self._depth = depth
        self._next = 1000
        self._in_flight: deque[Future[StepResult]] = deque()
        self.results: dict[int, StepResult] = {}

    def row(self, slot: int, tokens: Sequence[int], **more: Any) -> EnterRow:
        first = 1 + slot * BLOCKS_PER_ROW * self._num_groups
        tables = tuple(
            np.arange(first + i * BLOCKS_PER_ROW, first + (i + 1) * BLOCKS_PER_ROW, dtype=np.int32)
            for i in range(self._num_groups)
        )
        options: dict[str, Any] = {"num_candidates": 4, "params": EDITED, **more}
        return EnterRow(
            slot=slot,
            token_ids=ints(*tokens),
            num_prompt_tokens=len(PROMPT),
            num_computed_tokens=0,
            block_tables=tables,
            seed=3,
            sample_index=0,
            **options,
        )

    def give(self, late: LateInput | None = None, **difference: Any) -> int:
        """Execute a plan; its number. Results are awaited as the depth wants it."""
        step_id, self._next = self._next, self._next + 1
        self._in_flight.append(self._executor.execute(StepPlan(step_id, **difference)))
        if late is not None:
            self._executor.late(replace(late, step_id=step_id))
        while len(self._in_flight) >= self._depth:
            self._take()
        return step_id

    def _take(self) -> None:
        result = self._in_flight.popleft().result(60)
        assert not result.failed, result.failed
        self.results[result.step_id] = result

    def result(self, step_id: int) -> StepResult:
        while step_id not in self.results:
            self._take()
        return self.results[step_id]

    def close(self) -> None:
        while self._in_flight:
            self._take()
        self._executor.execute(StepPlan(self._next, leave=ints(CANDIDATES, DRAWING, PROBE))).result(
            60
        )


@pytest.fixture(params=["fake", "llama", "mistral-window", "llama-on-device"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    engines: list[LLM] = []

    def door(depth: int) -> Door:
        if request.param == "fake":
            layout = KVLayout.of_windows((None, 5), 4, KVFormat(1, 1, 1, 4))
            executor = FakeExecutor(
                FakeModel([None, 5], 50),
                num_blocks=96,
                layout=layout,
                max_num_seqs=8,
                max_model_len=64,
            )
            return Door(executor, 2, depth, 50)
        name = request.param.removesuffix("-on-device")
        if name != request.param:
            keep_rows_on_device(monkeypatch)
        write_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
        llm = LLM(str(tmp_path), **SMALL)
        engines.append(llm)
        client: Any = llm.engine.client
        groups = llm.engine.resolved.layout.groups
        return Door(client._core._executor, len(groups), depth, llm.engine.spec.vocab_size)

    yield door
    for engine in engines:
        engine.shutdown()


def assert_same(one: TokenCandidates, other: TokenCandidates) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.scores.tolist() == other.scores.tolist()
    assert [(e.token_id, e.logprob, e.rank) for e in one.logprobs] == [
        (e.token_id, e.logprob, e.rank) for e in other.logprobs
    ]
    assert len(one.logprobs) == len(one.token_ids) == 4


def alone(door: Door, tokens: Sequence[int], late: LateInput | None = None) -> TokenCandidates:
    """Return the candidates of a row that enters with these tokens."""
    step = door.give(
        late and replace(late, slots=ints(PROBE)),
        enter=(door.row(PROBE, tokens, waits_for_masks=late is not None),),
        delta_slot=ints(PROBE),
        delta_tokens=ints(len(tokens)),
    )
    (found,) = door.result(step).candidates[PROBE]
    door.give(leave=ints(PROBE))
    return found


@DEPTHS
def test_each_position_has_its_candidates(make: Any, depth: int) -> None:
    """Fault: the logits or the history of another position; drafts that are forgotten, or counted
    twice; a rewind to a wrong place."""
    door = make(depth)
    expected = [alone(door, [*PROMPT, 10, *DRAFTS[:n]]) for n in range(4)]
    after = [alone(door, [*PROMPT, 10, 11, 20]), alone(door, [*PROMPT, 10, 11, 20, 21])]
    first = alone(door, PROMPT)
    drawing = door.row(DRAWING, [8, 8, 8, 1, 2, 3], num_candidates=0, params=SamplingParams(seed=1))
    step = door.give(
        enter=(door.row(CANDIDATES, PROMPT), drawing),
        delta_slot=ints(CANDIDATES, DRAWING),
        delta_tokens=ints(len(PROMPT), 6),
    )
    door.give(delta_slot=ints(CANDIDATES, DRAWING), delta_tokens=ints(0, 1))
    (found,) = door.result(step).candidates[CANDIDATES]
    assert_same(found, first)
    step = door.give(
        append_slot=ints(CANDIDATES),
        append_token=ints(10),
        delta_slot=ints(CANDIDATES),
        delta_tokens=ints(1),
        draft_slot=ints(*[CANDIDATES] * 3),
        draft_token=ints(*DRAFTS),
    )
    door.give(delta_slot=ints(CANDIDATES), delta_tokens=ints(0))
    door.give()
    found = door.result(step).candidates[CANDIDATES]
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert door.result(step).slots.tolist() == [DRAWING]
    steps = [  # the first draft stays, and others follow
        door.give(
            rewind_slot=ints(CANDIDATES),
            rewind_tokens=ints(2),
            append_slot=ints(CANDIDATES),
            append_token=ints(20),
            delta_slot=ints(CANDIDATES),
            delta_tokens=ints(1),
        ),
        door.give(append_slot=ints(CANDIDATES), append_token=ints(21)),
    ]
    for step, other in zip(steps, after, strict=True):
        (found,) = door.result(step).candidates[CANDIDATES]
        assert_same(found, other)
    door.close()


@DEPTHS
def test_each_position_has_its_mask(make: Any, depth: int) -> None:
    door = make(depth)
    words = -(-door.vocab // 32)
    masks = np.zeros((2, words), np.uint32)
    masks[0, 0], masks[1, 0] = 0b11111100, 0b11111100000000
    none = ints()
    late = [LateInput(0, none, ints(1), ints(i), masks) for i in (0, 1, -1)]
    expected = [alone(door, [*PROMPT, *DRAFTS[:n]], late[n]) for n in range(3)]
    step = door.give(
        LateInput(0, ints(CANDIDATES), ints(3), ints(0, 1, -1), masks),
        enter=(door.row(CANDIDATES, PROMPT, waits_for_masks=True),),
        delta_slot=ints(CANDIDATES),
        delta_tokens=ints(len(PROMPT)),
        draft_slot=ints(*[CANDIDATES] * 2),
        draft_token=ints(*DRAFTS[:2]),
    )
    found = door.result(step).candidates[CANDIDATES]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert set(found[0].token_ids.tolist()) <= set(range(2, 8))
    door.close()


def test_a_guess_that_cannot_be_computed_costs_no_request(make: Any) -> None:
    door = make(1)
    if door.vocab == 50:
        pytest.skip("the fake model takes any token")
    expected = alone(door, PROMPT)
    step = door.give(
        enter=(door.row(CANDIDATES, PROMPT),),
        delta_slot=ints(CANDIDATES),
        delta_tokens=ints(len(PROMPT)),
        draft_slot=ints(CANDIDATES),
        draft_token=ints(10**6),
    )
    (found,) = door.result(step).candidates[CANDIDATES]
    assert_same(found, expected)
    door.close()
