"""Prompts that are embeddings: rows of the table give the tokens of their ids, to the bit,
and the laws hold as for ids."""

from __future__ import annotations

import functools
import io
import math
import zipfile
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from quire import LLM, BeamSearchParams, RequestError, SamplingParams
from quire.protocol import EngineRequest, FinishReason
from quire.protocol.media import Media
from quire.protocol.step import MediaSpan
from tests.engine.greedy import chosen_names
from tests.engine.test_captured import captured_steps
from tests.engine.test_laws import (  # noqa: F401  a fixture
    DEPTHS,
    NAMES,
    WITH_STATES,
    Maker,
    Prompt,
    assert_same,
    has_kernels,
    make,
    params,
    run,
    workload,
    written,
)
from tests.pairs import LAWS_BY_PAIRS
from tests.runner.late_device import keep_rows_on_device

pytestmark = LAWS_BY_PAIRS


MODELS = ("bundled", *(name for name in NAMES if name not in WITH_STATES))
"""Without Gemma 4, which refuses embeddings (tests/models/test_gemma4.py), and models with states,
which do not run on a device."""
KINDS = ("qwen2-mixed", "opt")
BY_KIND = (
    "test_enqueued_embeddings_are_forgotten",
    "test_samples_beams_and_streams",
    "test_a_repetition_penalty_counts_no_tokens_that_nobody_knows",
    "test_a_row_whose_embeddings_are_gone_fails_alone",
    "test_a_stream_that_slept_goes_on",
    "test_they_are_off_unless_asked_for",
)
"""Laws of engines with embeddings, which models keep or break alike."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        names = chosen_names(metafunc, MODELS, KINDS, BY_KIND)
        metafunc.parametrize("model", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str | None:
    return written(request.param, tmp_path_factory)


def worker_of(llm: LLM) -> Any:
    client: Any = llm.engine.client
    return client._core._executor._worker


def rows_of(llm: LLM, prompt: Prompt) -> torch.Tensor:
    """Return the rows of the model's table for these ids."""
    with torch.inference_mode():
        return worker_of(llm)._loaded.model.embed(torch.tensor(prompt, dtype=torch.int32)).clone()


def run_embeds(llm: LLM, prompts: list[Prompt], **more: Any) -> list[Any]:
    asks = [{"prompt_embeds": rows_of(llm, prompt)} for prompt in prompts]
    return llm.generate(asks, [params(i, **more) for i in range(len(asks))], use_tqdm=False)


def is_empty(llm: LLM) -> bool:
    """Return whether the engine has forgotten all media, in the order of its steps."""
    executor: Any = llm.engine.client._core._executor  # type: ignore[attr-defined]
    executor._launcher.submit(lambda: None).result()
    return not worker_of(llm)._media._rows


@DEPTHS
@pytest.mark.parametrize("budget", [11, 512])
def test_rows_of_the_table_are_their_ids(make: Maker, depth: int, budget: int) -> None:  # noqa: F811
    """Batched, chunked, beside ids and alone."""
    llm = make(
        depth=depth,
        enable_prompt_embeds=True,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    expected = run(llm, workload())
    assert_same(run_embeds(llm, workload()), expected)
    mixed: list[Any] = [{"prompt_token_ids": prompt} for prompt in workload()]
    for i in range(0, 8, 3):
        mixed[i] = {"prompt_embeds": rows_of(llm, workload()[i])}
    assert_same(llm.generate(mixed, [params(i) for i in range(8)], use_tqdm=False), expected)
    alone = [
        llm.generate({"prompt_embeds": rows_of(llm, p)}, params(i), use_tqdm=False)[0]
        for i, p in enumerate(workload())
    ]
    assert_same(alone, expected)
    assert alone[0].prompt_token_ids == [0] * 17
    assert is_empty(llm)


def test_enqueued_embeddings_are_forgotten(make: Maker) -> None:  # noqa: F811
    llm = make(enable_prompt_embeds=True)
    llm.enqueue([{"prompt_embeds": rows_of(llm, prompt)} for prompt in workload(3)], params(0))
    assert not is_empty(llm)
    assert len(llm.wait_for_completion(use_tqdm=False)) == 3
    assert is_empty(llm)


@DEPTHS
def test_prefix_hit_is_cold(make: Maker, depth: int) -> None:  # noqa: F811
    llm = make(depth=depth, enable_prompt_embeds=True)
    expected = run(llm, workload())
    cold, warm = run_embeds(llm, workload()), run_embeds(llm, workload())
    assert_same(cold, expected)
    assert_same(warm, expected)
    assert [o.num_cached_tokens for o in cold] == [0] * 8
    assert [o.num_cached_tokens for o in warm] == [16, 0, 28, 4, 8, 20, 0, 8]


@DEPTHS
def test_preempted_is_not(make: Maker, depth: int) -> None:  # noqa: F811
    llm = make(depth=depth, num_kv_blocks=64, max_model_len=48, enable_prompt_embeds=True)
    roomy = make(depth=depth, enable_prompt_embeds=True)
    expected = run(roomy, workload(), max_tokens=18)
    assert_same(run_embeds(llm, workload(), max_tokens=18), expected)


def test_decode_steps_are_captured_all_the_same(make: Maker) -> None:  # noqa: F811
    if not has_kernels():
        pytest.skip("plain torch is not captured")
    llm = make(enable_prompt_embeds=True)
    run_embeds(llm, workload(3))
    assert captured_steps(llm).drawing.recorded


@DEPTHS
def test_rows_on_a_device(
    make: Maker,  # noqa: F811
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_rows_on_device(monkeypatch)
    llm = make(depth=depth, enable_prompt_embeds=True)
    expected = run(llm, workload())
    assert_same(run_embeds(llm, workload()), expected)
    assert_same(run_embeds(llm, workload()), expected)


def test_samples_beams_and_streams(make: Maker) -> None:  # noqa: F811
    llm = make(enable_prompt_embeds=True)
    prompt = workload(1)[0]
    ids, embeds = {"prompt_token_ids": prompt}, {"prompt_embeds": rows_of(llm, prompt)}
    sampling = SamplingParams(n=4, temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
    for_ids, for_embeds = (llm.generate(ask, sampling, use_tqdm=False) for ask in (ids, embeds))
    assert_same(for_embeds, for_ids)
    search = BeamSearchParams(beam_width=3, max_tokens=6)
    found, expected = (llm.beam_search(ask, search, use_tqdm=False)[0] for ask in (embeds, ids))
    length = len(prompt)
    for one, other in zip(found.sequences, expected.sequences, strict=True):
        assert one.tokens[length:] == other.tokens[length:]
    whole = llm.generate(ids, params(0), use_tqdm=False)
    (*_, last) = llm.stream(embeds, params(0))
    assert_same([last], whole)
    for _ in llm.stream(embeds, params(0)):
        break  # and so ends it
    assert is_empty(llm)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rows_of_quantized_tables(make: Maker, quantization: str) -> None:  # noqa: F811
    llm = make(quantization=quantization, enable_prompt_embeds=True)
    assert_same(run_embeds(llm, workload()), run(llm, workload()))


def test_a_repetition_penalty_counts_no_tokens_that_nobody_knows(make: Maker) -> None:  # noqa: F811
    """The prompt counts as empty: only outputs are penalised. Turns red when placeholders count."""
    llm = make(enable_prompt_embeds=True)
    prompt = workload(1)[0]
    embeds = {"prompt_embeds": rows_of(llm, prompt)}
    seen: list[torch.Tensor] = []

    def note(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return logits

    plain = SamplingParams(temperature=0.0, max_tokens=1, logits_processors=[note])
    llm.generate(embeds, plain, use_tqdm=False)
    penalised = SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=5.0)
    output = llm.generate(embeds, penalised, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == [int(seen[0].argmax())]


def saved(tensor: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def packed(data: bytes) -> bytes:
    """The same archive, compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item), zipfile.ZIP_DEFLATED)
    return file.getvalue()


class Code:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.fixture(scope="module")
def bundled() -> Any:
    with LLM(
        enable_prompt_embeds=True, quiet=True, num_kv_blocks=64, max_model_len=64, dtype="float32"
    ) as llm:
        yield llm


def width_of(llm: LLM) -> int:
    return llm.engine.spec.hidden_size


def test_all_ways_to_give_embeddings_are_one(bundled: LLM) -> None:
    rows = rows_of(bundled, workload(1)[0])
    ways: list[Any] = [
        rows,
        rows.numpy(),
        rows.double(),
        rows.tolist(),
        saved(rows),
        safetensors.torch.save({"prompt_embeds": rows}),
        torch.cat((rows, rows))[: len(rows)],
        rows.t().contiguous().t(),
    ]
    outputs = [
        bundled.generate({"prompt_embeds": way}, params(0), use_tqdm=False)[0] for way in ways
    ]
    assert_same(outputs, [outputs[0]] * len(ways))
    assert [output.num_cached_tokens for output in outputs] == [0, *[16] * (len(ways) - 1)]


@functools.cache
def bad_embeds(width: int) -> dict[str, tuple[Any, str]]:
    good = torch.zeros(3, width)
    nan = good.clone()
    nan[1, 0] = math.nan
    many = torch.zeros(100_000, width)
    return {
        "another width": (torch.zeros(3, width + 1), f"takes \\[N, {width}\\]"),
        "no rows": (torch.zeros(0, width), "shape"),
        "one row without its axis": (torch.zeros(width), "shape"),
        "a batch": (torch.zeros(1, 3, width), "shape"),
        "more than the context": (torch.zeros(64, width), "1 to 63 rows"),
        "not finite": (nan, "finite"),
        "not finite in the model's dtype": (good.double() + 1e300, "finite"),
        "integers": (good.int(), "int32"),
        "complex": (good.to(torch.complex64), "complex64"),
        "sparse": (good.to_sparse(), "sparse"),
        "sparse on disk": (saved(good.to_sparse()), "sparse|read"),
        "without data": (good.to("meta"), "without data"),
        "text": ("abc", "str"),
        "nothing": (b"", "read"),
        "no file at all": (b"123456789", "read"),
        "cut off": (saved(good)[:-40], "read"),
        "safetensors cut off": (safetensors.torch.save({"a": good})[:-1], "read"),
        "two tensors": (safetensors.torch.save({"a": good, "b": good + 1}), "2 tensors"),
        "no tensor": (saved([1, 2]), "holds a list"),
        "code": (saved(Code()), "read"),
        "a small file of a large tensor": (packed(saved(many)), "not compressed"),
        "a tensor larger than its data": (saved(good[:1].expand(10**9, width)), "shape"),
    }


@pytest.mark.parametrize("kind", bad_embeds(1))
def test_embeddings_that_are_none_fail_alone(bundled: LLM, kind: str) -> None:
    bad, message = bad_embeds(width_of(bundled))[kind]
    with pytest.raises(RequestError, match=message):
        bundled.generate({"prompt_embeds": bad}, params(0), use_tqdm=False)
    good = {"prompt_token_ids": [5, 6, 7]}
    first, second = bundled.generate([{"prompt_embeds": bad}, good], params(0), use_tqdm=False)
    assert first.error is not None
    assert second.error is None
    assert len(second.outputs[0].token_ids) == 16
    assert is_empty(bundled)


def test_what_cannot_be_asked_of_embeddings(bundled: LLM) -> None:
    embeds = {"prompt_embeds": np.zeros((3, width_of(bundled)), np.float32)}
    for attempt in (
        lambda: bundled.generate(embeds, SamplingParams(prompt_logprobs=1), use_tqdm=False),
        lambda: bundled.pin_prefix(embeds),
        lambda: bundled.generate({**embeds, "prompt": "abc"}, use_tqdm=False),
        lambda: bundled.generate({"prompt_embeds": None}, use_tqdm=False),
        lambda: bundled.engine.renderer.count(embeds),
    ):
        with pytest.raises(RequestError):
            attempt()
    assert is_empty(bundled)


def test_a_row_whose_embeddings_are_gone_fails_alone(make: Maker) -> None:  # noqa: F811
    llm = make(enable_prompt_embeds=True, depth=1)
    client: Any = llm.engine.client
    prompts = workload(3)
    expected = run(llm, prompts)
    handles = [client.put_media(90 + i, rows_of(llm, p)) for i, p in enumerate(prompts)]
    client.drop_media([91])
    for i, (prompt, info) in enumerate(zip(prompts, handles, strict=True)):
        media = (Media(info.digest, MediaSpan(0, info.num_tokens, 90 + i)),)
        ids = np.full(len(prompt), 10**6, np.int32)
        client.add(EngineRequest(str(i), i, ids, params(i), i, media=media))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    finished: dict[int, Any] = {}
    while client.has_unfinished:
        output = client.step()
        finished.update({finish.handle: finish for finish in output.finished})
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            tokens[handle].append(token)
    assert finished[1].reason is FinishReason.ERROR
    assert "handle 91" in finished[1].message
    if has_kernels():
        assert [tokens[0], tokens[2]] == [expected[i].outputs[0].token_ids for i in (0, 2)]


@pytest.mark.parametrize("level", [1, 2])
def test_a_stream_that_slept_goes_on(make: Maker, level: int) -> None:  # noqa: F811
    """Its prompt is computed again, from embeddings that outlive the model."""
    llm = make(enable_prompt_embeds=True)
    prompt = {"prompt_embeds": rows_of(llm, workload(1)[0])}
    whole = llm.generate(prompt, params(0), use_tqdm=False)
    outputs = []
    for output in llm.stream(prompt, params(0)):
        outputs.append(output)
        if len(outputs) == 3:
            llm.sleep(level, mode="keep")
            llm.wake_up()
    assert_same(outputs[-1:], whole)
    assert is_empty(llm)


def test_they_are_off_unless_asked_for(make: Maker) -> None:  # noqa: F811
    llm = make()
    with pytest.raises(RequestError, match="--enable-prompt-embeds"):
        llm.generate({"prompt_embeds": torch.zeros(3, 8)}, params(0), use_tqdm=False)


def test_text_after_embeddings_is_that_of_the_output(bundled: LLM) -> None:
    tokenizer = bundled.get_tokenizer()
    assert tokenizer is not None
    rows = rows_of(bundled, tokenizer.encode("Once upon a time", add_special_tokens=True))
    output = bundled.generate({"prompt_embeds": rows}, params(0), use_tqdm=False)[0]
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
