"""A model on two ranks, each in a process, gives what it gives on one: also where Ray starts them,
and in one of two replicas.

Every pair of values of two of the things below occurs in a case, so that what goes wrong only when
two of them meet is met; in CI every value does, since each case starts processes. Sums over ranks
round in another order, so float32 tells most tokens apart; where the two best are closer than GAP a
greedy request may take the other one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.bundled import bundled_model_path
from quire.compute.executor.processes.group import RankGroup
from quire.compute.layers.embedding import LMHead
from quire.config.settings import EngineSettings, setting_values
from quire.lora.request import LoRARequest
from quire.protocol import EngineRequest
from quire.protocol.control import Pause, Resume
from quire.protocol.status import EngineState
from quire.sampling_params import StructuredOutputsParams
from tests.engine.hashing_rank import COMMAND, NOTED, call_and_note
from tests.engine.process_harness import Collected, collect, hosted, run, until_idle, until_state
from tests.engine.test_laws import GAP, has_kernels, workload
from tests.executor.ray_cluster import ray_cluster
from tests.lora.adapters import write_adapter
from tests.models.families import Case as Family
from tests.models.families import write_checkpoint
from tests.pairs import cover, pairs_of
from tests.profiles import IS_CI
from tests.speculation.test_laws import eager_policy

SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
"""Rows that two ranks can share in groups of 32, as 4 bits have them."""
# The second has norms over the heads of all ranks, too.
FAMILIES = {
    "dense": Family("dense", "llama", SIZES),
    "mqa": Family("mqa", "olmo2", {**SIZES, "num_key_value_heads": 1, "vocab_size": 129}),
    "moe": Family("moe", "qwen3_moe", {**SIZES, "moe_intermediate_size": 64, "num_experts": 5}),
}


class Case(NamedTuple):
    """One value of each thing that may go wrong with another one. steps "hashed": ranks compare a
    hash of all logits and of the states they are of in every step, which a captured one does not
    show; replicas do not. place: home of the ranks: processes of this one; the same and then
    processes of Ray, where it is installed; processes of two replicas that share the requests."""

    model: Literal["dense", "mqa", "moe"]
    bits: Literal["16", "8", "4"]
    depth: Literal[1, 2, 3]
    memory: Literal["roomy", "recompute", "swap"]
    cache: Literal["cold", "prefix"]
    kv: Literal["16", "8"]
    work: Literal["sampled", "logprobs", "forked", "beams", "drafts", "grammar", "adapters"]
    steps: Literal["captured", "hashed"]
    place: Literal["processes", "ray", "replicas"]


CASES = (
    Case("moe", "16", 1, "swap", "cold", "8", "forked", "hashed", "replicas"),
    Case("mqa", "8", 2, "roomy", "prefix", "8", "beams", "captured", "ray"),
    Case("dense", "4", 3, "recompute", "cold", "16", "grammar", "captured", "processes"),
    Case("mqa", "4", 2, "swap", "prefix", "16", "sampled", "hashed", "processes"),
    Case("moe", "16", 3, "roomy", "prefix", "16", "adapters", "hashed", "processes"),
    Case("dense", "8", 1, "recompute", "prefix", "8", "drafts", "hashed", "ray"),
    Case("mqa", "16", 2, "recompute", "cold", "8", "logprobs", "hashed", "ray"),
    Case("moe", "4", 1, "roomy", "cold", "8", "drafts", "captured", "ray"),
    Case("mqa", "8", 3, "swap", "cold", "8", "adapters", "captured", "replicas"),
    Case("dense", "16", 1, "roomy", "cold", "16", "sampled", "captured", "ray"),
    Case("moe", "8", 1, "roomy", "prefix", "16", "logprobs", "captured", "processes"),
    Case("moe", "8", 2, "roomy", "prefix", "8", "grammar", "hashed", "replicas"),
    Case("dense", "8", 2, "swap", "prefix", "16", "forked", "captured", "ray"),
    Case("moe", "4", 1, "recompute", "cold", "16", "beams", "hashed", "processes"),
    Case("mqa", "16", 1, "swap", "cold", "8", "grammar", "hashed", "ray"),
    Case("dense", "4", 2, "recompute", "cold", "8", "adapters", "captured", "ray"),
    Case("moe", "8", 3, "recompute", "cold", "8", "sampled", "captured", "replicas"),
    Case("mqa", "16", 3, "swap", "cold", "16", "drafts", "hashed", "processes"),
    Case("dense", "16", 3, "swap", "prefix", "16", "beams", "hashed", "replicas"),
    Case("dense", "4", 3, "swap", "cold", "16", "logprobs", "hashed", "replicas"),
    Case("mqa", "4", 3, "roomy", "cold", "16", "forked", "captured", "ray"),
    Case("mqa", "8", 2, "recompute", "prefix", "8", "drafts", "captured", "replicas"),
    Case("moe", "8", 2, "recompute", "cold", "16", "forked", "captured", "processes"),
    Case("dense", "4", 1, "roomy", "prefix", "8", "adapters", "hashed", "processes"),
)
BY_NAME = [case._asdict() for case in CASES]
EACH_ONCE = [CASES[i] for i in cover(BY_NAME, size=1)]


def test_every_pair_of_values_occurs() -> None:
    """Turns red when a value is added, or a case taken out, and two values never meet."""
    values = {name: get_args(kind) for name, kind in get_type_hints(Case).items()}
    wanted = {
        ((one, x), (other, y))
        for one, other in itertools.combinations(values, 2)
        for x in values[one]
        for y in values[other]
    }
    assert {pair for case in BY_NAME for pair in pairs_of(case)} == wanted
    assert {value for case in EACH_ONCE for value in case._asdict().items()} == {
        (name, value) for name in values for value in values[name]
    }
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
FEW = [5, 6]
"""Tokens that repeat soon, so that n-grams make drafts."""
Tokens = list[list[list[int]]]


Answer = tuple[Tokens, list[Any]]


def ask_in_turns(llm: LLM, case: Case, adapters: Sequence[LoRARequest]) -> list[Answer]:
    """Return what `ask` gives, twice where prefixes are cached. The second time goes the other way
    round, since a small cache has only the last prompts of the first."""
    orders = (1, -1) if case.cache == "prefix" else (1,)
    return [ask(llm, case, adapters, workload()[::order]) for order in orders]


def ask(
    llm: LLM, case: Case, adapters: Sequence[LoRARequest], asked: Sequence[list[int]]
) -> Answer:
    """Tokens of each sample of each request, and their log-probabilities where asked for. adapters:
    adapters of the case's model. asked: prompts."""
    prompts = [{"prompt_token_ids": prompt} for prompt in asked]
    if case.work == "beams":
        found = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=8))
        starts = [len(each["prompt_token_ids"]) for each in prompts]
        sequences = zip((output.sequences for output in found), starts, strict=True)
        return [[list(each.tokens)[start:] for each in beams] for beams, start in sequences], []
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 == 0 else 0.8,
            seed=i,
            n=2 if case.work == "forked" and i % 2 else 1,
            max_tokens=20 if case.work == "drafts" else 10,
            ignore_eos=True,
            logprobs=2,
            structured_outputs=WORD if case.work == "grammar" and i % 3 else None,
            allowed_token_ids=FEW if case.work == "drafts" else None,
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


def assert_captured(llm: LLM, *, draws: bool) -> None:
    """Decode steps of any size with their draw, or without, and all others."""
    client: Any = llm.engine.client
    runner = client._core._executor._first._worker._assembly.runner
    graphs = runner._decode.drawing if draws else runner._decode.logits
    assert any(graphs.of_variants.values())
    assert runner._forward._model.graphs is not None


@pytest.mark.skipif(not has_kernels(), reason="plain torch is not captured")
@pytest.mark.parametrize(("bits", "vocabulary"), [("16", 128), ("8", 130)])
def test_captured_steps_draw_as_others_do(
    bits: Any, vocabulary: int, tmp_path: Path, stack: ExitStack
) -> None:
    """With experts and a network beside them in bfloat16, in which nothing is the same before and
    after it is rounded; ranks draw from parts of rows, or gather those with other shares. Turns red
    when an exchange, or what stands around it, is computed by torch, or a sampled token differs
    from that of whole rows, which others draw from."""
    sizes = {**SIZES, "shared_expert_intermediate_size": 64, "vocab_size": vocabulary}
    write_checkpoint(Family("shared", "qwen2_moe", sizes), tmp_path)
    case = Case("moe", bits, 1, "roomy", "cold", "16", "sampled", "captured", "processes")
    settings = {**settings_of(case), "dtype": "bfloat16", "tensor_parallel_size": 2}
    plain = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=1)
    filters = ({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.6})
    params = [replace(plain, **each) for each in filters]
    llm = stack.enter_context(LLM(str(tmp_path), **settings))
    captured = tokens_drawn(llm, params)
    assert_captured(llm, draws=True)
    assert len(set(map(tuple, captured))) == len(params)  # each filter has an effect
    llm.shutdown()
    eager = stack.enter_context(LLM(str(tmp_path), **settings | {"enforce_eager": True}))
    assert tokens_drawn(eager, params) == captured


def tokens_drawn(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    """Return the tokens of rows that begin alike."""
    prompts = [{"prompt_token_ids": [5, 6, 7]} for _ in params]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.fixture(scope="module")
def adapters(
    folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[LoRARequest]]:
    """Two adapters for each model: one of its attention, and one of all of it."""
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[bool]:
    """Yield whether Ray is installed; if so, a cluster runs."""
    if importlib.util.find_spec("ray") is None:
        yield False
        return
    with ray_cluster():
        yield True


def recorded(llm: LLM) -> list[EngineRequest]:
    """Requests of an engine from now on."""
    requests: list[EngineRequest] = []
    client: Any = llm.engine.client
    add = client.add
    client.add = lambda request: (requests.append(request), add(request))[1]
    return requests


def by_processes(
    folder: str, case: Case, adapters: Sequence[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> list[Answer]:
    NOTED.clear()
    with monkeypatch.context() as patched:
        if case.steps == "hashed":
            hashing = partial(RankGroup, command=COMMAND)
            patched.setattr("quire.compute.executor.processes.group.RankGroup", hashing)
            patched.setattr(LMHead, "__call__", call_and_note)
        with LLM(folder, tensor_parallel_size=2, **settings_of(case)) as llm:
            found = ask_in_turns(llm, case, adapters)
            assert bool(NOTED) == (case.steps == "hashed")
            is_captured = case.steps == "captured" and case.work not in ("beams", "adapters")
            if is_captured and has_kernels():
                assert_captured(llm, draws=False)
            assert_as_asked(case, llm.engine.client.stats())
    return found


def by_ray(folder: str, case: Case, adapters: Sequence[LoRARequest]) -> list[Tokens]:
    settings: dict[str, Any] = {**settings_of(case), "distributed_executor_backend": "ray"}
    with LLM(folder, tensor_parallel_size=2, num_threads=1, **settings) as llm:
        return [tokens for tokens, _ in ask_in_turns(llm, case, adapters)]


def by_replicas(folder: str, case: Case, turns: Sequence[Sequence[EngineRequest]]) -> list[Tokens]:
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    settings = EngineSettings.from_options({"model": folder, **sizes, **settings_of(case)})
    found: list[Tokens] = []

    async def work() -> None:
        async with hosted(settings=setting_values(settings)) as host:
            client: Any = host.client
            for each in client._replicas:
                await until_state(each, EngineState.READY)
            for turn in turns:
                await client.control(Pause(mode="keep"))
                streams = [
                    await client.add(
                        replace(each, first_handle=client.reserve_handles(each.params.n))
                    )
                    for each in turn
                ]
                await client.control(Resume())
                ends = await asyncio.gather(*map(collect, streams))
                found.append([tokens_of(each) for each in ends])
            for each in client._replicas:
                await until_idle(each)
                assert each.stats.requests_total > 0
            assert_as_asked(case, client.stats)

    run(work())
    return found


def tokens_of(collected: Collected) -> list[list[int]]:
    """Return the tokens of each sample."""
    ends = sorted(collected.finishes.items())
    wholes = [(index, end.whole) for index, end in ends]
    return [
        collected.tokens[index] if whole is None else list(map(int, whole.token_ids))
        for index, whole in wholes
    ]


def assert_as_asked(case: Case, stats: Any) -> None:
    """Check the totals of an engine that has nothing left to do."""
    if case.memory == "recompute":
        assert stats.preempted_total > 0
    if case.memory == "swap":
        assert stats.swapped_in_total > 0
    assert stats.num_used_blocks == 0
    assert case.cache == "cold" or stats.cached_tokens_total > 0
    assert case.work != "drafts" or stats.accepted_drafts_total > 0


def adds_integers(case: Case) -> bool:
    """Return whether all sums over ranks are of integers, so that each bit is that of one rank."""
    return case.model == "dense" and case.bits == "8"


@pytest.mark.parametrize(
    "case", EACH_ONCE if IS_CI else CASES, ids=lambda case: "-".join(map(str, case))
)
def test_two_ranks_are_one(
    case: Case,
    folders: dict[str, str],
    adapters: dict[str, list[LoRARequest]],
    cluster: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, chosen = folders[case.model], adapters[case.model]
    eager_policy(monkeypatch)  # what was measured beside others may make all drafts seem dear
    with LLM(folder, **settings_of(case)) as one:
        requests = recorded(one)
        wanted = ask_in_turns(one, case, chosen)
    if case.place == "replicas":
        count = len(requests) // len(wanted)
        turns = [requests[i : i + count] for i in range(0, len(requests), count)]
        found = by_replicas(folder, case, turns)
    else:
        answers = by_processes(folder, case, chosen, monkeypatch)
        assert answers == wanted or not adds_integers(case)
        found = [tokens for tokens, _ in answers]
    for got, (tokens, logprobs) in zip(found, wanted, strict=True):
        assert_same(got, tokens, logprobs, GAP if case.bits == case.kv == "16" else 0.05)
    if case.place == "ray" and cluster:
        assert by_ray(folder, case, chosen) == found
