"""Masks that come while the forward runs, on the real engine: rows on the host and on a device.

The oracle is a logits processor that bans the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams
from quire.base.errors import EngineError
from quire.compute.runner.late import LateInputs
from quire.compute.sampling import sampler
from quire.protocol import EngineRequest
from quire.protocol.step import EnterRow, LateInput, StepPlan
from tests.engine.hash_grammar import SPEC, HashGrammars, mask_after
from tests.engine.test_device_laws import assert_as_on_host
from tests.engine.test_laws import assert_same, has_kernels, workload
from tests.pairs import LAWS_BY_PAIRS
from tests.runner.late_device import keep_rows_on_device
from tests.runner.test_drafts import Watch
from tests.small_engines import SMALL
from tests.waiting import WAIT_S

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
PLACES = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
V = 4096
"""Size of the bundled model's vocabulary."""


class Constrained:
    """Requests whose prompts are among these state the grammar."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]]) -> None:
        self.core: Any = llm.engine.client._core  # type: ignore[attr-defined]
        self.core._grammars = HashGrammars(V)
        self._prompts = {tuple(prompt) for prompt in prompts}
        self._add = self.core.add
        self.core.add = self.add

    def add(self, request: EngineRequest) -> None:
        is_one = tuple(request.prompt_token_ids.tolist()) in self._prompts
        self._add(replace(request, grammar=SPEC if is_one else None))


def ban(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Ban the tokens that the grammar bans."""
    bits = np.unpackbits(mask_after(output, V).view(np.uint8), bitorder="little")
    return logits.masked_fill(torch.from_numpy(bits == 0), -torch.inf)


def asked(index: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        temperature=(0.0, 0.8, 1.3)[index % 3], seed=index, ignore_eos=True,
        top_k=20 * (index % 2), **{"max_tokens": 12, **more},
    )  # fmt: skip


def generate(llm: LLM, each: Sequence[SamplingParams]) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in workload()[: len(each)]]
    return llm.generate(prompts, each, use_tqdm=False)  # type: ignore[arg-type]


@DEPTHS
@PLACES
def test_masked_is_banned(depth, on_device, engines, monkeypatch):
    """Plain rows, samples, log-probabilities (before the mask) and penalties beside each other."""
    each = [asked(i) for i in range(7)]
    each[1] = asked(1, n=3)
    each[2] = asked(2, logprobs=2)
    each[3] = asked(3, presence_penalty=0.7, logit_bias={7: 3.0})
    masked = [1, 2, 3, 4]
    banned = [
        replace(params, logits_processors=[ban]) if i in masked else params
        for i, params in enumerate(each)
    ]
    engines.append(LLM(**SMALL, depth=depth))
    expected = generate(engines[0], banned)
    keep_rows_on_device(monkeypatch, lambda: on_device)
    engines.append(LLM(**SMALL, depth=depth))
    Constrained(engines[1], [workload()[i] for i in masked])
    got = generate(engines[1], each)
    check = assert_as_on_host if on_device else assert_same
    check(got, expected)
    entries = got[2].outputs[0].logprobs
    assert entries is not None
    ranks = [e[token].rank for e, token in zip(entries, got[2].outputs[0].token_ids, strict=True)]
    assert max(ranks) > 7, "the log-probabilities are those behind the mask"


@PLACES
def test_preempted_is_not(on_device, engines, monkeypatch):
    keep_rows_on_device(monkeypatch, lambda: on_device)
    each = [asked(i, max_tokens=18) for i in range(7)]
    results: list[list[RequestOutput]] = []
    for num_kv_blocks in (256, 40):
        engines.append(LLM(**{**SMALL, "num_kv_blocks": num_kv_blocks, "max_model_len": 48}))
        core = Constrained(engines[-1], workload()).core
        results.append(generate(engines[-1], each))
        num_preempted = core.stats().preempted_total
    assert num_preempted > 0
    assert_same(results[1], results[0])


@PLACES
def test_beams_find_what_is_allowed(on_device, engines, monkeypatch):
    keep_rows_on_device(monkeypatch, lambda: on_device)
    engines.append(LLM(**SMALL))
    prompt = workload()[1]
    Constrained(engines[0], [prompt])
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    constrained, plain = engines[0].beam_search(
        [{"prompt_token_ids": each} for each in (prompt, workload()[2])], params
    )
    assert len(constrained.sequences) == len(plain.sequences) == 3
    for sequence in constrained.sequences:
        output = sequence.tokens[-6:]
        for i, token in enumerate(output):
            assert mask_after(output[:i], V)[token // 32] >> (token % 32) & 1


class Wrong:
    """Drafts of every kind: right ones, one that no mask allows, and what follows it."""

    def __init__(self, expected: Sequence[RequestOutput]) -> None:
        self._outputs = {
            tuple(output.prompt_token_ids or ()): list(output.outputs[0].token_ids)
            for output in expected
        }
        self._num_right = 0

    def propose(
        self, sequence: Any, known: np.ndarray, num_in_flight: int, max_drafts: int
    ) -> np.ndarray:
        prompt = tuple(sequence.group.request.prompt_token_ids.tolist())
        self._num_right = (self._num_right + 1) % 4
        at = len(known) - len(prompt) + num_in_flight
        return np.array([*self._outputs[prompt][at:][: self._num_right], 5, 6][:max_drafts])


@DEPTHS
@PLACES
def test_drafts_on_is_off(depth, on_device, engines, monkeypatch):
    keep_rows_on_device(monkeypatch, lambda: on_device)
    each = [asked(i) for i in range(4)]
    engines.append(LLM(**SMALL, depth=depth))
    core = Constrained(engines[0], workload()[:3]).core
    expected = generate(engines[0], each)
    watch = Watch(engines[0], monkeypatch)
    core._scheduler._drafts._proposer = Wrong(expected)
    assert_same(generate(engines[0], each), expected)
    assert watch.most > 1


@pytest.mark.skipif(not has_kernels(), reason="plain torch is not captured")
def test_plain_rows_take_the_captured_path_and_keep_their_bits(engines, monkeypatch):
    """Beside constrained rows, before them and after them. A step without constrained rows awaits
    nothing and is replayed as often as in an engine that never had any."""
    counts: Counter[str] = Counter()
    runs: list[tuple[list[RequestOutput], int]] = []
    plain, constrained = [asked(i, logprobs=1) for i in range(3)], workload()[3:5]
    for i in range(2):
        engines.append(LLM(**SMALL, enable_prefix_caching=False))
        runner: Any = engines[i].engine.client._core._executor._worker._assembly.runner  # type: ignore[attr-defined]
        repeat, take = runner._repeat, runner.late_inputs.take
        counts.clear()

        def count(what: str, call: Any) -> Any:
            def counted(*arguments: Any) -> Any:
                counts[what] += 1
                return call(*arguments)

            return counted

        monkeypatch.setattr(runner, "_repeat", count("repeat", repeat))
        monkeypatch.setattr(runner.late_inputs, "take", count("take", take))
        if i:
            Constrained(engines[i], constrained)
            mixed = generate(engines[i], [*plain, asked(3), asked(4)])
            assert counts["take"] >= 12
            counts.clear()
        alone = generate(engines[i], plain)
        generate(engines[i], [replace(each, logprobs=None) for each in plain])
        assert counts["repeat"] > 8
        assert counts["take"] == 0
        runs.append((alone, counts["repeat"]))
        if i:
            assert_same(mixed[:3], alone)
    (expected, repeats), (got, repeats_after) = runs
    assert_same(got, expected)
    assert repeats_after == repeats


@pytest.mark.skipif(not has_kernels(), reason="plain torch is not captured")
def test_constrained_rows_are_replayed_and_drawn_where_their_logits_are(engines, monkeypatch):
    """Catches a step that leaves its graph because rows wait for masks, logits of a row that are
    copied to be masked or beside drafts, and a draw per row."""
    counts: Counter[str] = Counter()
    engines.append(LLM(**SMALL, enable_prefix_caching=False))
    core = Constrained(engines[0], workload()[:3]).core
    runner: Any = core._executor._worker._assembly.runner
    replay, edit, draw = runner._decode._replay, sampler.edit_row, runner._draws._sampler
    draw_tokens, compute = draw._draw_tokens, runner._forward.compute

    def count(what: str, call: Any) -> Any:
        def counted(*arguments: Any, **more: Any) -> Any:
            counts[what] += 1
            return call(*arguments, **more)

        return counted

    def drawn(logits: torch.Tensor, rows: torch.Tensor, *columns: Any, **more: Any) -> torch.Tensor:
        counts["draws"] += 1
        counts["copies"] += len(logits) == len(rows) > 1 and runner._rows.num_drafts.any()
        return draw_tokens(logits, rows, *columns, **more)

    monkeypatch.setattr(sampler, "edit_row", count("edits", edit))
    monkeypatch.setattr(runner._decode, "_replay", count("replays", replay))
    monkeypatch.setattr(runner._forward, "compute", count("uncaptured", compute))
    monkeypatch.setattr(draw, "_draw_tokens", drawn)
    graph_draws = runner._decode._draws
    under_masks = count("draws", graph_draws.under_masks)
    monkeypatch.setattr(graph_draws, "under_masks", under_masks)
    expected = generate(engines[0], [asked(i) for i in range(4)])
    assert counts["edits"] == 0
    assert counts["replays"] > 8
    assert counts["draws"] == counts["replays"] + counts["uncaptured"]
    core._scheduler._drafts._proposer = Wrong(expected)
    assert_same(generate(engines[0], [asked(i) for i in range(4)]), expected)
    assert counts["copies"] == 0


def test_a_row_without_a_token_fails_alone(engines):
    """The mask allows nothing: the request's own fault, with a sentence."""
    engines.append(LLM(**SMALL))
    core = Constrained(engines[0], workload()[:1]).core
    core._grammars.masks = lambda output, drafts: [np.zeros(V // 32, np.uint32)]
    bad, good = generate(engines[0], [asked(0), asked(1)])
    assert bad.error is not None
    assert "grammar" in bad.error
    assert good.error is None
    core._grammars.masks = lambda output, drafts: [np.zeros(3, np.uint32)]
    bad, good = generate(engines[0], [asked(0), asked(1)])
    assert bad.error is not None
    assert good.error is None


@PLACES
def test_a_shutdown_ends_a_step_that_awaits_masks(on_device, engines, monkeypatch):
    """Catches a thread that waits for ever for what nobody gives."""
    keep_rows_on_device(monkeypatch, lambda: on_device)
    engines.append(LLM(**SMALL))
    executor = engines[0].engine.client._core._executor  # type: ignore[attr-defined]
    row = EnterRow(
        0, np.array([1, 2], np.int32), 2, 0, (np.array([1], np.int32),), SamplingParams(), 0, 0,
        waits_for_masks=True,
    )  # fmt: skip
    plan = StepPlan(
        0, enter=(row,), delta_slot=np.zeros(1, np.int32), delta_tokens=np.array([2], np.int32)
    )
    future = executor.execute(plan)
    executor.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        future.result(timeout=WAIT_S)


def test_late_input_of_past_steps_is_dropped():
    inputs = LateInputs()
    none = np.zeros(0, np.int32)
    for step_id in (3, 4, 6):
        inputs.put(LateInput(step_id, none, none, none, np.zeros((0, 0), np.uint32)))
    assert inputs.take(4).failures([9])[0].slot == 9
    assert list(inputs._given) == [6]
    inputs.forget_before(7)
    assert not inputs._given


@PLACES
@pytest.mark.parametrize("edits", [{}, {"presence_penalty": 0.7}], ids=["plain", "edited"])
def test_a_mask_that_allows_everything_changes_nothing(edits, on_device, engines, monkeypatch):
    """Rows that have ended meanwhile get such a mask. If none of a step has another, no mask is
    sent at all."""
    keep_rows_on_device(monkeypatch, lambda: on_device)
    engines.append(LLM(**SMALL))
    each = [asked(0), asked(1, **edits), asked(2, logit_bias={7: 3.0} if edits else None)]
    expected = generate(engines[0], each)
    core = Constrained(engines[0], workload()[:2]).core
    core._grammars.masks = lambda output, drafts: [None] * (1 + len(drafts))
    assert_same(generate(engines[0], each), expected)
