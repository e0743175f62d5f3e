"""A model on two ranks, each in a process, gives what it gives on one.

Every pair of values of two of the things below occurs in a case, so that what goes wrong only when
two of them meet is met. Sums over ranks round in another order, so float32 tells most tokens apart;
where the two best are closer than GAP a greedy request may take the other one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.bundled import bundled_model_path
from quire.executor.processes.group import RankGroup
from quire.layers.embedding import LMHead
from quire.lora.request import LoRARequest
from quire.sampling_params import StructuredOutputsParams
from tests.engine.hashing_rank import COMMAND, call_and_note
from tests.engine.test_laws import GAP, has_kernels, workload
from tests.lora.adapters import write_adapter
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
    """One value of each thing that may go wrong with another one. steps "hashed": ranks compare a
    hash of all logits in every step, which a captured one does not show."""

    model: Literal["dense", "mqa", "moe"]
    bits: Literal["16", "8", "4"]
    depth: Literal[1, 2, 3]
    memory: Literal["roomy", "recompute", "swap"]
    cache: Literal["cold", "prefix"]
    kv: Literal["16", "8"]
    work: Literal["sampled", "logprobs", "forked", "beams", "drafts", "grammar", "adapters"]
    steps: Literal["captured", "hashed"]


CASES = (
    Case("moe", "16", 1, "swap", "cold", "8", "forked", "hashed"),
    Case("mqa", "8", 2, "roomy", "prefix", "8", "beams", "captured"),
    Case("dense", "4", 3, "recompute", "cold", "16", "grammar", "captured"),
    Case("mqa", "4", 2, "swap", "prefix", "16", "sampled", "hashed"),
    Case("moe", "16", 3, "roomy", "prefix", "16", "adapters", "hashed"),
    Case("dense", "8", 1, "recompute", "prefix", "8", "drafts", "hashed"),
    Case("mqa", "16", 2, "recompute", "cold", "8", "logprobs", "hashed"),
    Case("moe", "4", 1, "roomy", "cold", "8", "drafts", "captured"),
    Case("mqa", "8", 3, "swap", "cold", "8", "adapters", "captured"),
    Case("dense", "16", 1, "roomy", "cold", "16", "sampled", "captured"),
    Case("moe", "8", 1, "roomy", "prefix", "16", "logprobs", "captured"),
    Case("moe", "8", 2, "roomy", "prefix", "8", "grammar", "hashed"),
    Case("dense", "8", 2, "swap", "prefix", "16", "forked", "captured"),
    Case("moe", "4", 1, "recompute", "cold", "16", "beams", "hashed"),
    Case("mqa", "16", 1, "swap", "cold", "8", "grammar", "hashed"),
    Case("dense", "4", 2, "recompute", "cold", "8", "adapters", "captured"),
    Case("moe", "8", 3, "recompute", "cold", "8", "sampled", "captured"),
    Case("mqa", "16", 3, "swap", "cold", "16", "drafts", "hashed"),
    Case("dense", "16", 3, "swap", "prefix", "16", "beams", "hashed"),
    Case("dense", "4", 3, "swap", "cold", "16", "logprobs", "hashed"),
    Case("mqa", "4", 3, "roomy", "cold", "16", "forked", "captured"),
    Case("mqa", "8", 2, "recompute", "prefix", "8", "drafts", "captured"),
    Case("moe", "8", 2, "recompute", "cold", "16", "forked", "captured"),
    Case("dense", "4", 1, "roomy", "prefix", "8", "adapters", "hashed"),
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
        "enforce_eager": case.steps == "hashed",
    }
    if case.memory == "swap":
        settings |= {"swap_space": "16MiB", "preemption_mode": "swap"}
    if case.work == "grammar":  # its tokens from 10 on are the characters of ASCII
        settings |= {"skip_tokenizer_init": False, "tokenizer": str(bundled_model_path())}
    if case.work == "adapters":
        settings |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
    if case.work == "drafts":
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    return settings


WORD = StructuredOutputsParams(regex="[a-p]{20}")
Tokens = list[list[list[int]]]


def ask(llm: LLM, case: Case, adapters: Sequence[LoRARequest]) -> tuple[Tokens, list[Any]]:
    """Tokens of each sample of each request, and their log-probabilities where asked for. adapters:
    of the case's model."""
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
            structured_outputs=WORD if case.work == "grammar" and i % 3 else None,
        )
        for i in range(len(prompts))
    ]
    chosen = None
    if case.work == "adapters":
        chosen = [[None, *adapters][i % 3] for i in range(len(prompts))]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
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
    settings = settings_of(Case("mqa", "16", 1, "roomy", "cold", "16", "sampled", "captured"))
    settings["dtype"] = "bfloat16"
    llm = stack.enter_context(LLM(folders["mqa"], tensor_parallel_size=2, **settings))
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    client: Any = llm.engine.client
    runner = client._core._executor._first._worker._assembly.runner
    assert set(runner._decode.drawing.recorded) == {1}
    assert runner._forward._model.graphs is not None


@pytest.fixture(scope="module")
def adapters(
    folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[LoRARequest]]:
    """Two adapters for each model: of its attention, and of all of it."""
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    found: dict[str, list[LoRARequest]] = {}
    for name, folder in folders.items():
        path = tmp_path_factory.mktemp(f"{name}-adapters")
        changed = [attention, [*attention, "gate_proj", "up_proj", "down_proj"]]
        made = [
            write_adapter(path / str(i), Path(folder), names, seed=i, strength=0.2)
            for i, names in enumerate(changed)
        ]
        found[name] = [LoRARequest(each.name, i + 1, str(each)) for i, each in enumerate(made)]
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_ranks_are_one(
    case: Case,
    folders: dict[str, str],
    adapters: dict[str, list[LoRARequest]],
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_of(case)
    one = stack.enter_context(LLM(folders[case.model], **settings))
    if case.steps == "hashed":
        hashing = partial(RankGroup, command=COMMAND)
        monkeypatch.setattr("quire.executor.processes.executor.RankGroup", hashing)
        monkeypatch.setattr(LMHead, "__call__", call_and_note)
    two = stack.enter_context(LLM(folders[case.model], tensor_parallel_size=2, **settings))
    for _ in range(2 if case.cache == "prefix" else 1):
        wanted, logprobs = ask(one, case, adapters[case.model])
        got, _ = ask(two, case, adapters[case.model])
        assert_same(got, wanted, logprobs, GAP if case.bits == case.kv == "16" else 0.05)
    stats = two.engine.client.stats()
    if case.memory == "recompute":
        assert stats.preempted_total > 0
    if case.memory == "swap":
        assert stats.swapped_in_total > 0
    assert stats.num_used_blocks == 0
