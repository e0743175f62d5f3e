"""Refused tokens on the real engine: outputs equal those of prompts that end as the check wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.protocol.step import StepPlan
from quire.scheduler.constraints.tails import Verdict
from tests.models.families import CASES, write_checkpoint
from tests.runner.test_drafts import SETTINGS

BY_NAME = {case.name: case for case in CASES}
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
NUM_OUTPUT = 14
PROMPTS = [[5, 6, 7], [9] * 11, list(range(8)), [3, 1, 4, 1, 5, 9, 2]]

Rule = Callable[[int, int], list[int] | None]
"""Number of tokens so far and the one drawn next → what comes in its place."""


def rule_of(count: int) -> Rule:
    def rule(length: int, drawn: int) -> list[int] | None:
        if length % 4 != 1:
            return None
        return [(drawn + i) % 50 for i in range(3, 3 + count)]

    return rule


class Editor:
    """As the rule says; and where `again`, each token is drawn twice."""

    def __init__(self, rule: Rule, *, again: bool) -> None:
        self._rule = rule
        self._again = again
        self._seen: set[tuple[int, int]] = set()

    def watches(self, request: Any) -> bool:
        return True

    def judge(self, sequence: Any, known: np.ndarray, drawn: np.ndarray) -> Verdict | None:
        for i, token in enumerate(drawn.tolist()):
            place = sequence.handle, len(known) + i
            if self._again and place not in self._seen:
                self._seen.add(place)
                return Verdict(i)
            instead = self._rule(len(known) + i, token)
            if instead is not None:
                return Verdict(i, np.array(instead, np.int32))
        return None


class Checked:
    """An engine with a check, and what its plans took back."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_rewinds = 0
        client: Any = llm.engine.client
        self._scheduler = client._core._scheduler
        plan = self._scheduler.plan

        def watch(now: float) -> StepPlan | None:
            found = plan(now)
            self.num_rewinds += 0 if found is None else len(found.rewind_slot)
            return found

        monkeypatch.setattr(self._scheduler, "plan", watch)

    def check(self, editor: Editor | None) -> None:
        self._scheduler._requests._check = editor
        self._scheduler._results._check = editor


def sampling(i: int, max_tokens: int) -> SamplingParams:
    temperature = 0.0 if i % 2 else 0.9
    return SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, ignore_eos=True)


def generate(llm: LLM, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    params = [sampling(i, count) for i, count in enumerate(counts)]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(out.outputs[0].token_ids) for out in llm.generate(asked, params, use_tqdm=False)]


def expected(llm: LLM, rule: Rule) -> list[list[int]]:
    """Each piece between two edits is the output of a prompt of its own."""
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    while any(len(output) < NUM_OUTPUT for output in outputs):
        known = [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]
        counts = [max(NUM_OUTPUT - len(output), 1) for output in outputs]
        for i, given in enumerate(generate(llm, known, counts)):
            for token in given:
                length = len(PROMPTS[i]) + len(outputs[i])
                instead = rule(length, token)
                outputs[i] += [token] if instead is None else instead
                if instead is not None:
                    break
            outputs[i] = outputs[i][:NUM_OUTPUT]
    return outputs


@DEPTHS
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("mistral-window", {}),
        ("qwen3", {"kv_cache_dtype": "int8"}),
        ("opt", {"enforce_eager": True, "max_num_batched_tokens": 9}),
    ],
    ids=str,
)
def test_refused_tokens_leave_no_trace(
    depth: int, name: str, more: dict[str, Any], on_device: bool, tmp_path: Path,
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Turns red when the row, its copy on a device or a decode graph goes on from a refused token,
    or from a wrong place."""
    write_checkpoint(BY_NAME[name], tmp_path)
    llm = LLM(str(tmp_path), **{**SETTINGS, **more, "depth": depth})
    engines.append(llm)
    checked = Checked(llm, monkeypatch)
    for count, again in ((1, False), (3, False), (2, True)):
        rule = rule_of(count)
        checked.check(None)
        wanted = expected(llm, rule)
        before = checked.num_rewinds
        checked.check(Editor(rule, again=again))
        assert generate(llm, PROMPTS, [NUM_OUTPUT] * len(PROMPTS)) == wanted, (count, again)
        assert checked.num_rewinds > before
    assert llm.engine.client.stats().num_used_blocks == 0
