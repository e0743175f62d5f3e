"""The laws of the design, on the device, with the model that comes with quire (its weights are
trained, so that greedy choices mean something).

Exact, in the batch-invariant mode: batched = alone, graphs on = off, depth 2 = depth 1. To the
numerics of the dtype: batched = alone and graphs on = off in the fastest mode, where the number of
rows, which graphs pad, chooses the kernels; and a preempted request = one that was not, whose keys
are computed by other kernels. There, where the tokens of two runs part, the two candidates must be
about as good: their log-probabilities, with the noise that a seeded draw adds to them, within
TOLERANCE.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.part import Part
from quire import LLM, SamplingParams
from quire.compute.runner.graphs.ladder import LazyGraphs
from quire.ops.sampling.draw.noise import gumbel, token_bits

__all__ = ["run"]

TEXTS = (
    "import os\n", "def main(", "class Reader:\n", "for i in range(", "The ", "with open(path) as",
    "return ", "if __name__ ==", "raise ValueError(", "from typing import", "x = [", "while True:",
)  # fmt: skip
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
CANDIDATES = 200

Tokens = list[list[int]]


def run(part: Part) -> None:
    """Each law for greedy and for seeded requests, in the model's 16-bit dtype and in float32."""
    dtypes = ("float32",) if part.is_dry else ("bfloat16", "float32")
    for dtype in dtypes[:1] if part.quick else dtypes:
        for seeded in (False, True):
            _laws(part, dtype, seeded)


def _laws(part: Part, dtype: str, seeded: bool) -> None:
    tokens = 12 if part.is_dry else 64
    temperature = 0.8 if seeded else 0.0
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        for i, _ in enumerate(TEXTS)
    ]
    base: dict[str, Any] = {"dtype": dtype, "device": part.device.type, "quiet": True}
    label = f"{dtype}, {'seeded' if seeded else 'greedy'}"
    with LLM(**base) as llm:
        alone = _alone(llm, params)
        _together(llm, params)  # a size is captured after it was wanted
        batched = _together(llm, params)
        if not part.is_dry:
            part.check(f"{label}: steps are graphs", *_graphs())
        _agree(part, f"{label}: batched = alone", alone, batched, Judge(llm, dtype, params))
    with LLM(**base, enforce_eager=True) as llm:
        eager = _together(llm, params)
        _agree(part, f"{label}: graphs on = off", batched, eager, Judge(llm, dtype, params))
    base["batch_invariant"] = True
    with LLM(**base) as llm:
        alone = _alone(llm, params)
        _together(llm, params)
        batched = _together(llm, params)
        _agree(part, f"{label}: batched = alone, batch-invariant", alone, batched, None)
    with LLM(**base, enforce_eager=True) as llm:
        eager = _together(llm, params)
        _agree(part, f"{label}: graphs on = off, batch-invariant", batched, eager, None)
    with LLM(**base, depth=1) as llm:
        slow = _together(llm, params)
        _agree(part, f"{label}: depth 2 = depth 1, batch-invariant", batched, slow, None)
    with LLM(**base, num_kv_blocks=4 + len(TEXTS), max_model_len=160) as llm:
        scarce = _together(llm, params)
        preempted = llm.engine.client.stats().preempted_total
        name = f"{label}: preempted ({preempted} times) = not"
        if not preempted:
            part.check(name, ["nobody was preempted: the pool is too large for this law"])
        _agree(part, name, batched, scarce, Judge(llm, dtype, params))


def _alone(llm: LLM, params: Sequence[SamplingParams]) -> Tokens:
    pairs = zip(TEXTS, params, strict=True)
    return [
        llm.generate(text, each, use_tqdm=False)[0].outputs[0].token_ids for text, each in pairs
    ]


def _together(llm: LLM, params: Sequence[SamplingParams]) -> Tokens:
    outputs = llm.generate(list(TEXTS), list(params), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _graphs() -> tuple[list[str], str]:
    """Return the faults of the open engine's graphs, and their sizes, for decode steps and mixed
    ones. Without graphs steps go on, only slower."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) is LazyGraphs]
    sizes = [sorted(each.recorded) for each in found]
    return [] if sizes and all(sizes) else ["steps of a kind are no graphs"], str(sizes)


def _agree(part: Part, name: str, one: Tokens, other: Tokens, judge: Judge | None) -> None:
    """judge: says how good two tokens are where runs part; None: all must be equal."""
    failures: list[str] = []
    worst = 0.0
    parted = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if list(a) != list(b)]
    for i in parted:
        at = next(k for k, (a, b) in enumerate(zip(one[i], other[i], strict=True)) if a != b)
        if judge is None:
            failures.append(f"{TEXTS[i]!r} parts at token {at}")
            continue
        gap = judge.gap(i, one[i][:at], one[i][at], other[i][at])
        worst = max(worst, gap)
        if gap > TOLERANCE[judge.dtype]:
            failures.append(f"{TEXTS[i]!r} parts at token {at}, by {gap:.3g} of log-probability")
    detail = f"{len(one) - len(parted)} of {len(one)} equal"
    part.check(name, failures, detail + (f", largest gap {worst:.3g}" if worst else ""))


@dataclass(frozen=True, slots=True)
class Judge:
    """llm: an engine that is open. params: parameters of each text."""

    llm: LLM
    dtype: str
    params: Sequence[SamplingParams]

    def gap(self, text: int, common: Sequence[int], one: int, other: int) -> float:
        """Return how much better one of two next tokens is; infinite if one is unlikely."""
        beginning = self.llm.engine.renderer.render_prompt(TEXTS[text]).token_ids
        tokens = [*beginning, *common]
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=CANDIDATES)
        prompt = {"prompt_token_ids": tokens}
        positions = self.llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].logprobs
        assert positions is not None
        found = {token: entry.logprob for token, entry in positions[0].items()}
        if one not in found or other not in found:
            return float("inf")
        drawn = self.params[text]
        first, second = _noise(drawn.seed or 0, len(tokens), (one, other))
        return abs(found[one] - found[other] + drawn.temperature * (first - second))


def _noise(seed: int, position: int, token_ids: Sequence[int]) -> list[float]:
    """Return what a draw of the first sample adds to log-probability / temperature."""
    numbers = torch.tensor((seed, 0, position))
    bits = token_bits(numbers[0], numbers[1], numbers[2], torch.tensor(token_ids))
    return gumbel(bits).tolist()
