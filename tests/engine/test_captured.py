"""Captured decode steps on the real engine: the bits of eager ones, and the same faults."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.compute.models.llama import LlamaModel
from quire.compute.runner.graphs.decode import DecodeSteps
from quire.compute.runner.graphs.failures import MAX_FAILURES
from tests.engine.test_laws import assert_same, has_kernels, params, workload
from tests.models.families import CASES, Case, write_checkpoint
from tests.models.harness import set_biases
from tests.processors import PROCESSORS, on_each_processor, pretend_processor
from tests.small_engines import SMALL
from tests.waiting import WAIT_S

pytestmark = pytest.mark.skipif(not has_kernels(), reason="plain torch is not captured")

BY_NAME = {case.name: case for case in CASES}


def runner_of(llm: LLM) -> Any:
    client: Any = llm.engine.client
    return client._core._executor._worker._assembly.runner


def captured_steps(llm: LLM) -> DecodeSteps:
    return runner_of(llm)._decode


def recorded(llm: LLM) -> dict[tuple[str, int], Any]:
    """Decode graphs, by their kind and number of rows."""
    steps = captured_steps(llm)
    assert steps.logits is not None
    kinds = {"drawing": steps.drawing, "logits": steps.logits}
    return {(kind, n): graph for kind, each in kinds.items() for n, graph in each.recorded.items()}


def captured_forward(llm: LLM) -> Any:
    return runner_of(llm)._forward._model


def generate(llm: LLM, logprobs: int | None = 2, dry: float = 0.0) -> list[RequestOutput]:
    """Requests of many lengths, so that a step has 8 rows at first and one at last; one forks. dry:
    strength of an edit that graphs leave to the host."""
    prompts = workload()
    lengths = [20, 3, 11, 16, 5, 8, 14]
    usual = {"logprobs": logprobs, "xtc_probability": 0.0, "dry_multiplier": dry}
    asked = [replace(params(i, n), **usual) for i, n in enumerate(lengths)]
    asked.append(SamplingParams(n=3, temperature=0.9, seed=4, max_tokens=9, ignore_eos=True))
    return llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)


@pytest.fixture
def engines() -> Iterator[list[LLM]]:
    """Engines that end with the test."""
    started: list[LLM] = []
    yield started
    for engine in started:
        engine.shutdown()


def engines_of_both_kinds(
    folder: Path | None, settings: Mapping[str, Any], started: list[LLM]
) -> tuple[LLM, LLM]:
    """Start an eager engine and one that captures, with the same kernels. Fault: on a busy machine
    one measured, the other could not, and they rounded differently."""
    model = None if folder is None else str(folder)
    started.append(LLM(model, enforce_eager=True, **settings))
    chosen = started[-1].engine.resolved.settings
    kernels = {"linear_isa": chosen.linear_isa, "attention_isa": chosen.attention_isa}
    started.append(LLM(model, enforce_eager=False, **settings, **kernels))
    return started[-2], started[-1]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8", "depth": 1}),
        ("qwen2-tied", {"kv_cache_dtype": "int8"}),
        ("mistral-window", {"depth": 3}),
        ("qwen3", {"dtype": "float16", "num_threads": 1}),
        ("qwen2-tied", {"quantization": "int8"}),
        ("qwen2-tied", {"quantization": "int4", "num_kv_blocks": 24}),
        ("opt", {}),
        ("gpt2", {"dtype": "bfloat16"}),
        ("qwen2-moe-mixed", {"depth": 3}),
        ("mixtral", {"dtype": "bfloat16", "quantization": "int8"}),
        ("gpt-oss", {}),
        ("gpt-oss", {"dtype": "bfloat16", "depth": 1}),
        ("olmoe", {"dtype": "bfloat16"}),
        ("granite-moe", {}),
        ("gemma3", {"depth": 3}),
        ("gemma2", {"depth": 3}),
        ("gemma2", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("bloom-6-heads", {"dtype": "bfloat16"}),
        ("mpt", {}),
        ("lfm2", {}),
        ("qwen3.5", {"dtype": "bfloat16", "depth": 3}),
        ("qwen3.5", {"depth": 1, "num_kv_blocks": 24}),
        ("qwen3-next", {"quantization": "int8"}),
        ("granite-4", {"dtype": "bfloat16", "kv_cache_dtype": "int8", "depth": 3}),
        ("granite-4-moe", {"quantization": "int8"}),
        ("mamba2", {"depth": 3, "num_kv_blocks": 24}),
        ("ministral3", {}),
        ("gemma4", {"dtype": "bfloat16", "kv_cache_dtype": "int8", "depth": 3}),
        ("gemma4-26b", {"quantization": "int8"}),
        ("falcon-40b", {}),
        ("nemotron-bias", {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_captured_is_eager(
    name: str, more: dict[str, Any], tmp_path: Path, engines: list[LLM]
) -> None:
    """Turns red when a replay reads what belonged to other rows, to a shorter block table or to
    another number of rows, or leaves an operation out."""
    write_checkpoint(BY_NAME[name], tmp_path)
    if more.get("kv_cache_dtype") == "int8":
        for part in "kv":
            set_biases(tmp_path, part, lambda bias: bias * 50)  # so that attention adds them
    settings = {**SMALL, **more}
    eager, captured = engines_of_both_kinds(tmp_path, settings, engines)
    expected = generate(eager)
    assert_same(generate(captured), expected, exact=True)
    assert len(recorded(captured)) > 3
    seen = recorded(captured)
    assert_same(generate(captured), expected, exact=True)
    assert seen.items() <= recorded(captured).items()  # used again, not made anew
    assert not recorded(eager)
    assert captured_forward(captured).graphs is not None
    assert captured_forward(eager).graphs is None
    if "num_kv_blocks" in more:
        assert captured.engine.client.stats().preempted_total > 0


@on_each_processor
@pytest.mark.parametrize(
    "more",
    [{"dtype": "bfloat16", "kv_cache_dtype": "int8"}, {"quantization": "int4"}],
    ids=["bfloat16", "int4"],
)
def test_steps_are_captured_on_each_processor(
    processor: str,
    more: dict[str, Any],
    tmp_path: Path,
    engines: list[LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns red when a step of some processor's kernels stays eager, or is another one."""
    pretend_processor(processor, detect_platform().cpu, monkeypatch)
    write_checkpoint(BY_NAME["qwen2-tied"], tmp_path)
    settings = {**SMALL, **more}
    eager, captured = engines_of_both_kinds(tmp_path, settings, engines)
    assert_same(generate(captured), generate(eager), exact=True)
    assert len(recorded(captured)) > 3
    used = captured.engine.resolved.settings
    assert {used.linear_isa, used.attention_isa} <= {
        isa for isa, flags in PROCESSORS.items() if flags <= PROCESSORS[processor]
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_family_is_captured(case: Case, tmp_path: Path, engines: list[LLM]) -> None:
    """Faults: factors on embeddings, caps of logits and scores, and ALiBi were computed in torch,
    so Gemma, Granite, Cohere, MPT and Bloom took twice the time. Turns red when a family computes
    in torch again."""
    write_checkpoint(case, tmp_path)
    engines.append(LLM(str(tmp_path), **SMALL))
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engines[0].generate([{"prompt_token_ids": [5, 6, 7]}] * 2, plain, use_tqdm=False)
    assert recorded(engines[0])


class TorchAtTheEnd:
    """A model that adds 1 to its logits in torch."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self._model.forward(*inputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden) + 1.0


def counted_draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each replay that draws."""
    counted: list[int] = []
    replay = DecodeSteps._replay

    def count(steps: DecodeSteps, known: Any) -> None:
        counted.extend([1] * (known in steps.drawing.recorded.values()))
        replay(steps, known)

    monkeypatch.setattr(DecodeSteps, "_replay", count)
    return counted


def test_captured_draws_are_those_of_the_sampler(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a replay draws with the parameters, or for the positions, of another row or
    step, or draws for rows that ask for more. Between the two passes that draw, slots have had
    other requests."""
    counted = counted_draws(monkeypatch)
    eager, captured = engines_of_both_kinds(None, SMALL, engines)
    for logprobs, dry in ((2, 0.5), (None, 0.0), (2, 0.0), (None, 0.5), (2, 0.0)):
        counted.clear()
        expected = generate(eager, logprobs, dry)
        assert not counted
        assert_same(generate(captured, logprobs, dry), expected, exact=True)
        assert bool(counted) == (dry == 0.0)
    filtered = [
        SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=1.3, top_p=0.8, seed=2, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, min_p=0.1, seed=3, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=1, max_tokens=11, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in workload(4)]
    for asked in (filtered, filtered[::-1]):
        expected = eager.generate(prompts, asked)
        assert_same(captured.generate(prompts, asked), expected, exact=True)


def test_steps_that_go_on_as_before_are_repeated(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a repeated step reads old block tables or positions, or one that fails leaves
    rows half changed."""
    eager, captured = engines_of_both_kinds(None, SMALL, engines)
    steps, counted = captured_steps(captured), itertools.count()
    repeat, left_out = steps.repeat, set[str]()

    def fail_at_times() -> Any:
        last = steps._last
        if next(counted) % 3 == 2 and last is not None:
            calls = last[0].graph.calls  # type: ignore[attr-defined]
            calls.run(len(calls) - 1)
            left_out.add(calls._names[-1][1])
            raise EngineError("a kernel failed")
        return repeat()

    expected = generate(eager, None)
    for each in (repeat, fail_at_times, repeat):
        monkeypatch.setattr(steps, "repeat", Mock(wraps=each))
        assert_same(generate(captured, None), expected, exact=True)
        assert steps.repeat.call_count > 3  # type: ignore[attr-defined]
    assert left_out == {"append_tokens"}  # which changes rows
    assert generate(captured, 2)[0].outputs[0].logprobs is not None


def test_a_row_without_a_token_fails_alone(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a replay takes the mark of a row that has no token for one."""
    counted = counted_draws(monkeypatch)
    engines.append(LLM(None, **SMALL, enable_prefix_caching=False))
    prompts: Sequence[list[int]] = workload(4)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in engines[0].generate(prompts, greedy)]
    runner = runner_of(engines[0])
    rows, launch = runner._rows, runner.launch

    @torch.inference_mode()
    def spoil(plan: Any) -> Any:
        done = rows.num_tokens - rows.num_prompt
        is_third = (rows.standing > 0) & (rows.num_prompt == len(prompts[2]))
        for slot in np.flatnonzero(is_third & (done == 5) & ~rows.failed):
            runner._changes._pages[:, rows.tables[0][slot, 0]] = 255  # in float32 no number
        return launch(plan)

    monkeypatch.setattr(runner, "launch", spoil)
    counted.clear()
    outputs = engines[0].generate(prompts, greedy)
    assert counted
    assert [output.error is None for output in outputs] == [True, True, False, True]
    assert "not finite" in (outputs[2].error or "")
    assert outputs[2].outputs[0].token_ids == expected[2][:5]
    for index in (0, 1, 3):
        assert outputs[index].outputs[0].token_ids == expected[index]
    assert engines[0].engine.client.stats().num_used_blocks == 0


def test_a_model_that_computes_in_torch_stays_eager(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when a replay leaves out what is not a kernel."""
    engines.append(LLM(None, **SMALL))
    for owner in (runner_of(engines[0])._forward, captured_steps(engines[0])):
        monkeypatch.setattr(owner, "_model", TorchAtTheEnd(owner._model))
    with caplog.at_level(logging.DEBUG, "quire.runner"):
        first, second = generate(engines[0]), generate(engines[0])
    assert_same(first, second, exact=True)
    assert not recorded(engines[0])
    assert [r.getMessage() for r in caplog.records if "captured" in r.getMessage()] == [
        "decode steps of this model are not captured: it computes aten.add.Tensor in torch"
    ]


def test_a_forward_that_computes_in_torch_stays_eager(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when a replay of a prompt leaves out what is not a kernel."""
    forward = LlamaModel.forward
    monkeypatch.setattr(LlamaModel, "forward", lambda *inputs: forward(*inputs) * 2.0)
    with caplog.at_level(logging.INFO, "quire.runner"):
        engines_of_both_kinds(None, SMALL, engines)
        expected, got = (generate(engine) for engine in engines)
    assert_same(got, expected, exact=True)
    assert [r.getMessage() for r in caplog.records if "call by call" in r.getMessage()] == [
        "steps of prompts are computed call by call: it computes aten.mul.Tensor in torch"
    ]


def test_a_recording_that_fails_fails_no_start_and_no_request(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when a model whose Python code fails over made-up rows is not served."""
    engines.append(LLM(None, **SMALL, enforce_eager=True))
    forward, calls = LlamaModel.forward, itertools.count()

    def fail_once(*inputs: Any) -> torch.Tensor:
        if next(calls) == 0:
            raise RuntimeError("no memory")
        return forward(*inputs)

    monkeypatch.setattr(LlamaModel, "forward", fail_once)
    with caplog.at_level(logging.INFO, "quire.runner"):
        engines.append(LLM(None, **SMALL))
        expected, got = (generate(engine) for engine in engines)
    assert_same(got, expected, exact=True)
    assert [r.getMessage() for r in caplog.records] == [
        "steps of prompts are computed call by call"
    ]
    assert captured_forward(engines[1]).graphs is None


def test_steps_are_replayed_whatever_tokens_are_wanted(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a prompt whose log-probabilities are asked for gives others the hidden states
    of wrong tokens, or when such a step, or any other, is computed call by call."""
    settings = {**SMALL, "max_num_batched_tokens": 11, "enable_prefix_caching": False}
    engines_of_both_kinds(None, settings, engines)
    by_call = Mock(wraps=captured_forward(engines[1])._call_by_call)
    monkeypatch.setattr(captured_forward(engines[1]), "_call_by_call", by_call)
    asked = [
        replace(params(i, 6), prompt_logprobs=1 if asks else None)
        for i, asks in enumerate([False, False, True, False, True, False, False, False])
    ]
    prompts: Sequence[list[int]] = workload()
    expected, got = (engine.generate(prompts, asked, use_tqdm=False) for engine in engines)
    assert_same(got, expected, exact=True)
    for output, other, sampling in zip(got, expected, asked, strict=True):
        assert output.prompt_logprobs == other.prompt_logprobs
        assert (output.prompt_logprobs is None) == (sampling.prompt_logprobs is None)
    by_call.assert_not_called()


def test_replays_that_fail_are_computed_anew_and_end(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines_of_both_kinds(None, SMALL, engines)
    generate(engines[1])
    calls = captured_forward(engines[1]).graphs.calls[()].calls
    gave_back = Mock(wraps=captured_forward(engines[1])._arena.give_back)
    monkeypatch.setattr(captured_forward(engines[1])._arena, "give_back", gave_back)

    def fail() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(calls, "run", fail)
    expected = generate(engines[0])
    with caplog.at_level(logging.WARNING, "quire.runner"):
        for _ in range(4):
            assert_same(generate(engines[1]), expected, exact=True)
    assert caplog.text.count("one of the captured steps of prompts failed") == MAX_FAILURES
    assert gave_back.call_count > MAX_FAILURES  # before each step that was computed call by call


def test_a_bad_prompt_fails_alone_and_ends_no_replays(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when the fault of a row is taken for one of the replay."""
    engines.append(LLM(None, **SMALL, enable_prefix_caching=False))
    prompts: Sequence[list[int]] = workload(4)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = engines[0].generate(prompts, greedy)
    rows = runner_of(engines[0])._rows
    enter = type(rows)._enter

    def spoil(row: Any) -> None:
        enter(rows, row)
        if row.num_prompt_tokens == len(prompts[2]):
            rows.token_ids[row.slot, 1] = 10**6  # outside the embedding

    monkeypatch.setattr(rows, "_enter", spoil)
    outputs = engines[0].generate(prompts, greedy)
    assert [output.error is None for output in outputs] == [True, True, False, True]
    for index in (0, 1, 3):
        assert outputs[index].outputs[0].token_ids == expected[index].outputs[0].token_ids
    assert captured_forward(engines[0]).failures.count == 0


def test_a_failing_kernel_fails_its_row_alone(
    engines: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when the code of a replayed kernel is dropped, or ends the whole step."""
    engines.append(LLM(None, **SMALL))
    prompts: Sequence[list[int]] = workload(4)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in engines[0].generate(prompts, greedy)]
    assert ("drawing", 4) in recorded(engines[0])
    runner = runner_of(engines[0])
    rows, launch = runner._rows, runner.launch

    def spoil(plan: Any) -> Any:
        done = rows.num_tokens - rows.num_prompt
        is_third = (rows.standing > 0) & (rows.num_prompt == len(prompts[2]))
        for slot in np.flatnonzero(is_third & (done == 5)):
            rows.token_ids[slot, rows.num_tokens[slot] - 1] = 10**6  # outside the embedding
        return launch(plan)

    monkeypatch.setattr(runner, "launch", spoil)
    outputs = engines[0].generate(prompts, greedy)
    assert [output.error is None for output in outputs] == [True, True, False, True]
    assert "failed with code 3" in (outputs[2].error or "")
    assert captured_steps(engines[0]).failures.count == 1
    for index in (0, 1, 3):
        assert outputs[index].outputs[0].token_ids == expected[index]


@pytest.mark.parametrize("num_rows", [100, 256])
def test_wide_steps_are_captured_with_the_same_bits(
    num_rows: int, tmp_path: Path, engines: list[LLM]
) -> None:
    """Turns red when the arena is too small for them, or a kernel takes other ways there."""
    write_checkpoint(BY_NAME["llama"], tmp_path)
    wide = {
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": 3 * num_rows,  # all prompts in one step
        "num_kv_blocks": 3 * num_rows,
    }
    prompts = [{"prompt_token_ids": [3 + i % 50, 7, 5 + i // 50]} for i in range(num_rows)]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs: list[list[RequestOutput]] = []
    for is_eager in (True, False):
        llm = LLM(model=str(tmp_path), **{**SMALL, **wide}, depth=1, enforce_eager=is_eager)
        engines.append(llm)
        outputs.append(llm.generate(prompts, greedy, use_tqdm=False))
    assert ("drawing", num_rows) in recorded(engines[1])
    assert [each.outputs for each in outputs[0]] == [each.outputs for each in outputs[1]]


def llama_of(hidden_size: int, num_heads: int, head_dim: int, intermediate_size: int) -> Case:
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 3,
    }
    return Case("llama", "llama", sizes)


WIDE_EMBEDDING = Case(
    "opt",
    "opt",
    {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "ffn_dim": 8,
        "num_hidden_layers": 2,
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 500,
    },
)


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(5, 1), (64, 8)])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(llama_of(512, 1, 8, 16), id="hidden states larger than all else"),
        pytest.param(llama_of(160, 2, 32, 112), id="wide gaps"),
        pytest.param(llama_of(8, 1, 4, 16), id="less than a cache line"),
        pytest.param(WIDE_EMBEDDING, id="embeddings wider than hidden states"),
    ],
)
def test_the_arena_has_room_for_any_shape(
    case: Case, num_tokens: int, num_rows: int, tmp_path: Path, engines: list[LLM]
) -> None:
    write_checkpoint(case, tmp_path)
    few = {"max_num_seqs": num_rows, "max_num_batched_tokens": num_tokens}
    for dtype in ("float32", "bfloat16"):
        engines.append(LLM(str(tmp_path), **{**SMALL, **few, "dtype": dtype}))
        generate(engines[-1], dry=0.5)
        assert captured_forward(engines[-1]).graphs is not None
        assert ("logits", num_rows) in recorded(engines[-1])


def test_a_capture_does_not_load_the_compiler() -> None:
    """In a process of its own: importing torch._dynamo would hold the first answer up."""
    code = (
        "import sys; from quire import LLM, SamplingParams;"
        "llm = LLM(quiet=True, max_model_len=64);"
        "llm.generate('a', SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False);"
        "print('torch._dynamo' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S
    )
    assert found.stdout.strip() == "False", found.stderr
