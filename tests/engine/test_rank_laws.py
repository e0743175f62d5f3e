"""A model on two ranks, each in a process, gives what it gives on one.

Every pair of values of two of the things below occurs in a case, so that what goes wrong only when
two of them meet is met. Sums over ranks round in another order, so float32 tells most tokens apart;
where the two best are closer than GAP a greedy request may take the other one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from tests.engine.test_laws import GAP, has_kernels, workload
from tests.models.families import Case as Family
from tests.models.families import write_checkpoint

pytestmark = pytest.mark.timeout(360)

SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
"""Rows that two ranks can share in groups of 32, as 4 bits have them."""
FAMILIES = {
    "dense": Family("dense", "llama", SIZES),
    "mqa": Family("mqa", "llama", {**SIZES, "num_key_value_heads": 1, "vocab_size": 129}),
    "moe": Family("moe", "qwen3_moe", {**SIZES, "moe_intermediate_size": 64, "num_experts": 5}),
}


class Case(NamedTuple):
    """One value of each thing that may go wrong with another one."""

    model: Literal["dense", "mqa", "moe"]
    bits: Literal["16", "8", "4"]
    depth: Literal[1, 2, 3]
    memory: Literal["roomy", "recompute", "swap"]
    cache: Literal["cold", "prefix"]
    kv: Literal["16", "8"]
    work: Literal["sampled", "logprobs", "forked", "beams", "drafts"]


CASES = (
    Case("mqa", "8", 1, "recompute", "prefix", "8", "forked"),
    Case("moe", "4", 3, "swap", "prefix", "16", "logprobs"),
    Case("dense", "16", 3, "roomy", "cold", "8", "drafts"),
    Case("mqa", "16", 2, "swap", "cold", "16", "sampled"),
    Case("dense", "8", 2, "roomy", "prefix", "16", "beams"),
    Case("moe", "4", 1, "recompute", "cold", "8", "sampled"),
    Case("dense", "16", 1, "recompute", "prefix", "16", "beams"),
    Case("moe", "4", 2, "roomy", "prefix", "16", "drafts"),
    Case("mqa", "4", 3, "swap", "cold", "8", "beams"),
    Case("mqa", "8", 1, "roomy", "cold", "8", "logprobs"),
    Case("dense", "4", 1, "swap", "cold", "8", "forked"),
    Case("dense", "16", 2, "recompute", "cold", "8", "logprobs"),
    Case("moe", "8", 3, "roomy", "prefix", "8", "sampled"),
    Case("moe", "16", 3, "recompute", "prefix", "16", "forked"),
    Case("mqa", "8", 1, "recompute", "cold", "16", "drafts"),
    Case("moe", "4", 2, "roomy", "prefix", "8", "forked"),
    Case("dense", "8", 3, "swap", "cold", "8", "sampled"),
    Case("mqa", "16", 1, "swap", "cold", "8", "drafts"),
    Case("moe", "16", 3, "roomy", "prefix", "16", "beams"),
)


def pairs_of(case: Case) -> set[tuple[object, ...]]:
    values = case._asdict().items()
    return {(*one, *other) for one, other in itertools.combinations(values, 2)}


def test_every_pair_of_values_occurs() -> None:
    """Turns red when a value is added, or a case taken out, and two values never meet."""
    values = {name: get_args(kind) for name, kind in get_type_hints(Case).items()}
    wanted = {
        (one, x, other, y)
        for one, other in itertools.combinations(values, 2)
        for x in values[one]
        for y in values[other]
    }
    assert set().union(*map(pairs_of, CASES)) == wanted
    assert len(CASES) <= 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny random models, by their name in `Case`."""
    found: dict[str, str] = {}
    for name, family in FAMILIES.items():
        folder: Path = tmp_path_factory.mktemp(name)
        write_checkpoint(family, folder)
        found[name] = str(folder)
    return found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Engines that end with the test."""
    with ExitStack() as engines:
        yield engines


def settings_of(case: Case) -> dict[str, Any]:
    quantization = {"16": None, "8": "int8", "4": "int4"}[case.bits]
    settings: dict[str, Any] = {
        "dtype": "float32",
        "quantization": quantization,
        "kv_cache_dtype": "int8" if case.kv == "8" else "auto",
        "depth": case.depth,
        "quiet": True,
        "skip_tokenizer_init": True,
        "num_kv_blocks": 256 if case.memory == "roomy" else 24,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "enable_prefix_caching": case.cache == "prefix",
    }
    if case.memory == "swap":
        settings |= {"swap_space": "16MiB", "preemption_mode": "swap"}
    if case.work == "drafts":
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    return settings


Tokens = list[list[list[int]]]


def ask(llm: LLM, case: Case) -> tuple[Tokens, list[Any]]:
    """Tokens of each sample of each request, and their log-probabilities where asked for."""
    prompts = [{"prompt_token_ids": prompt} for prompt in workload()]
    if case.work == "beams":
        found = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=8))
        return [[list(each.tokens) for each in output.sequences] for output in found], []
    if case.work == "drafts":
        prompts = [{"prompt_token_ids": each["prompt_token_ids"] * 2} for each in prompts]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 == 0 else 0.8,
            seed=i,
            n=2 if case.work == "forked" and i % 2 else 1,
            max_tokens=10,
            ignore_eos=True,
            logprobs=2,
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not [each.error for each in outputs if each.error]
    samples = [each.outputs for each in outputs]
    tokens = [[list(one.token_ids) for one in each] for each in samples]
    return tokens, [[one.logprobs for one in each] for each in samples]


def assert_same(got: Tokens, wanted: Tokens, logprobs: Sequence[Any], gap: float) -> None:
    for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
        for j, (x, y) in enumerate(zip(one, other, strict=True)):
            if x == y:
                continue
            place = next(k for k, (a, b) in enumerate(zip(x, y, strict=False)) if a != b)
            assert logprobs, f"request {i} differs at token {place}: {x} or {y}"
            best = sorted((e.logprob for e in logprobs[i][j][place].values()), reverse=True)
            is_close = best[0] - best[1] < gap
            assert is_close, f"request {i} differs at token {place}: {x} or {y}, {best}"


@pytest.mark.skipif(not has_kernels(), reason="plain torch is not captured")
def test_steps_of_ranks_are_captured(folders: dict[str, str], stack: ExitStack) -> None:
    """Turns red when an exchange, or what stands around it, is computed by torch."""
    settings = settings_of(Case("mqa", "16", 1, "roomy", "cold", "16", "sampled"))
    settings["dtype"] = "bfloat16"
    llm = stack.enter_context(LLM(folders["mqa"], tensor_parallel_size=2, **settings))
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    client: Any = llm.engine.client
    runner = client._core._executor._first._worker._assembly.runner
    assert set(runner._decode.drawing.recorded) == {1}
    assert runner._forward._model.graphs is not None


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_ranks_are_one(case: Case, folders: dict[str, str], stack: ExitStack) -> None:
    settings = settings_of(case)
    one = stack.enter_context(LLM(folders[case.model], **settings))
    two = stack.enter_context(LLM(folders[case.model], tensor_parallel_size=2, **settings))
    for _ in range(2 if case.cache == "prefix" else 1):
        wanted, logprobs = ask(one, case)
        got, _ = ask(two, case)
        assert_same(got, wanted, logprobs, GAP if case.bits == case.kv == "16" else 0.05)
    stats = two.engine.client.stats()
    if case.memory == "recompute":
        assert stats.preempted_total > 0
    if case.memory == "swap":
        assert stats.swapped_in_total > 0
    assert stats.num_used_blocks == 0
