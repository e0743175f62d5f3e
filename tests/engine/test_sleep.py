"""Sleep, pause, new weights and profiles of the real engine."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, EngineError, EngineUnavailableError, RequestError
from quire.bundled import bundled_model_path
from quire.compute.worker import worker
from quire.compute.worker.weight_stash import WeightStash

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
PROMPT = "The capital of France is"
QUIET: dict[str, Any] = {
    "quiet": True, "max_model_len": 256, "num_kv_blocks": 64, "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}  # fmt: skip


@pytest.fixture(params=[1, 2])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**QUIET, depth=request.param, swap_space="1MiB") as engine:
        yield engine


@pytest.fixture(scope="module")
def unchanged() -> Iterator[LLM]:
    """An engine for tests that leave it as it is."""
    with LLM(**QUIET) as engine:
        yield engine


def text(llm: LLM, params: SamplingParams = PARAMS) -> str:
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("how", ["pause", "sleep 1", "sleep 2"])
def test_a_kept_stream_continues_to_the_byte(llm: LLM, how: str) -> None:
    expected = text(llm)
    stream = llm.stream(PROMPT, PARAMS)
    for _ in range(5):
        next(stream)
    if how == "pause":
        llm.pause("keep")
    else:
        llm.sleep(int(how[-1]), mode="keep")
    assert llm.is_sleeping == (how != "pause")
    llm.resume() if how == "pause" else llm.wake_up()
    *_, last = stream
    assert last.outputs[0].text == expected
    assert text(llm) == expected


def test_a_stream_is_not_read_while_the_engine_is_paused(llm: LLM) -> None:
    """Turns red when a reader turns for ever."""
    expected = text(llm)
    llm.pause("keep")
    with pytest.raises(EngineError, match="is paused or sleeps"):
        text(llm)
    llm.resume()
    assert text(llm) == expected
    llm.sleep()
    with pytest.raises(EngineUnavailableError, match="level 1"):
        text(llm)
    with pytest.raises(RequestError, match="wake it up instead"):
        llm.resume()
    llm.wake_up()
    assert text(llm) == expected


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_streams_that_are_not_kept_end(llm: LLM, mode: Any) -> None:
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    llm.pause(mode)
    *_, last = stream
    assert last.outputs[0].finish_reason == ("length" if mode == "wait" else "abort")
    llm.resume()
    assert llm.engine.client.stats().num_used_blocks == 0


def test_a_stop_string_ends_a_stream_while_a_pause_waits_for_it(llm: LLM) -> None:
    """Turns red when such a stream is computed to its last token."""
    whole = text(llm)
    params = PARAMS.clone(stop=whole[-6:-3], max_tokens=200)
    before = llm.engine.client.stats().steps_total
    stream = llm.stream(PROMPT, params)
    next(stream)
    llm.pause("wait")
    assert llm.engine.client.stats().steps_total - before < 40
    *_, last = stream
    assert last.outputs[0].finish_reason == "stop"
    llm.resume()
    assert text(llm) == whole


def test_a_reset_forgets_prefixes_but_not_pins(llm: LLM) -> None:
    ids = [5 + 7 * i % 400 for i in range(60)]
    llm.pin_prefix({"prompt_token_ids": ids[:20]})
    for _ in range(2):
        (output,) = llm.generate({"prompt_token_ids": ids}, PARAMS, use_tqdm=False)
    assert output.num_cached_tokens >= 48
    assert llm.reset_prefix_cache()
    (output,) = llm.generate({"prompt_token_ids": ids}, PARAMS, use_tqdm=False)
    assert output.num_cached_tokens == 20


def resident_bytes() -> int:
    """Memory of this process but for pages of files, which the system takes as it likes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {name: size for name, _, size in (line.partition(":") for line in lines)}
    return sum(int(sizes[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of a Llama of about 60 MB; its weights are random."""
    folder = tmp_path_factory.mktemp("large")
    config = json.loads((bundled_model_path() / "config.json").read_text())
    config.update(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, vocab_size=2048, max_position_embeddings=2048,
        tie_word_embeddings=True,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("level", "takes_adapters"), [(1, False), (2, True)])
def test_memory_falls_by_what_is_dropped(
    large_model: Path, level: int, takes_adapters: bool
) -> None:
    """Within 5 %, and comes back on waking up. All of the pool is written before; nothing is
    captured, since what that keeps goes with the pool."""
    llm = LLM(
        str(large_model), load_format="dummy", skip_tokenizer_init=True, quiet=True,
        num_kv_blocks=2048, max_model_len=512, max_num_seqs=8, dtype="bfloat16",
        enforce_eager=True, max_num_batched_tokens=256, enable_lora=takes_adapters, max_lora_rank=1,
    )  # fmt: skip
    with llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
        prompts = [{"prompt_token_ids": [3 + i] * 50} for i in range(4)]
        before = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        with torch.inference_mode():
            llm.engine.client._core._executor._worker._assembly.runner._changes._pages.fill_(1)  # type: ignore[attr-defined]
        llm.reset_prefix_cache()
        resolved = llm.engine.resolved
        dropped = 2048 * resolved.layout.page_bytes
        if level == 2:
            dropped += resolved.memory.fixed.weights
        gc.collect()
        awake = resident_bytes()
        llm.sleep(level)
        assert awake - resident_bytes() == pytest.approx(dropped, rel=0.05)
        llm.wake_up()
        after = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        assert after == before


def test_new_weights_are_those_of_another_checkpoint(tmp_path: Path) -> None:
    """Turns red when a tensor stays, or a prefix from before is hit."""
    source = bundled_model_path()
    tensors = load_file(source / "model.safetensors")
    changed = {name: t.flip(0).contiguous() for name, t in tensors.items() if "mlp" in name}
    for file in source.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({**tensors, **changed}, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), **QUIET) as other:
        expected = text(other)
    with LLM(**QUIET) as llm:
        old = text(llm)
        assert old != expected
        stream = llm.stream(PROMPT, PARAMS)
        next(stream)
        assert llm.update_weights(changed) == 1
        assert text(llm) == expected
        assert len(list(stream)) > 0
        llm.sleep(2)
        llm.wake_up()  # they outlive the weights of the checkpoint
        assert text(llm) == expected
        assert llm.update_weights({name: tensors[name] for name in changed}) == 2
        assert text(llm) == old


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.nothing": torch.zeros(3)}, "no tensor 'model.nothing'"),
        (
            {"model.norm.weight": torch.zeros(3)},
            "give floating-point numbers of shape",
        ),
        ({"model.norm.weight": np.zeros(3, np.int64)}, "int64"),
        ({"model.norm.weight": "text"}, "'model.norm.weight' cannot be read"),
        ({"model.norm.weight": np.array([None])}, "'model.norm.weight' cannot be read"),
    ],
)
def test_wrong_weights_change_nothing(
    unchanged: LLM, tensors: dict[str, Any], message: str
) -> None:
    expected = text(unchanged)
    with pytest.raises(ConfigError, match=message):
        unchanged.update_weights(tensors)
    assert text(unchanged) == expected
    unchanged.sleep(1)
    with pytest.raises(RequestError, match="sleeps"):
        unchanged.update_weights({})
    unchanged.wake_up()
    assert text(unchanged) == expected


@pytest.mark.parametrize("place", ["load", "assemble"])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_weights_that_do_not_fit_leave_the_old_ones(
    place: str, num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: cached prefixes are read from the new, empty pool; or the new weights stay, whose KV
    pool did not fit; or the engine sleeps and cannot be woken up."""
    part, failures = getattr(worker, place), [1] * num_failures

    def fails(*args: Any, **options: Any) -> Any:
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("no memory. x")
        return part(*args, **options)

    ids = {"prompt_token_ids": [5 + 7 * i % 400 for i in range(60)]}
    name = "model.norm.weight"
    with LLM(**QUIET) as llm:
        (expected,) = llm.generate(ids, PARAMS, use_tqdm=False)
        tensor = load_file(bundled_model_path() / "model.safetensors")[name].flip(0)
        monkeypatch.setattr(worker, place, fails)
        with pytest.raises(EngineError, match="new weights cannot be loaded"):
            llm.update_weights({name: tensor})
        assert llm.is_sleeping == (num_failures == 2)
        llm.wake_up()
        (output,) = llm.generate(ids, PARAMS, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert llm.update_weights({name: tensor}) == 1


def test_weights_that_do_not_fit_are_gone_before_the_old_ones_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: the error of the failure keeps the new model alive, and memory holds both."""
    load, assemble = worker.load, worker.assemble
    models: list[weakref.ref[Any]] = []
    num_alive: list[int] = []

    def loads(*args: Any) -> Any:
        num_alive.append(sum(model() is not None for model in models))
        loaded = load(*args)
        models.append(weakref.ref(loaded.model))
        return loaded

    def fails_first(*args: Any) -> Any:
        if len(models) == 1:
            raise torch.OutOfMemoryError("no memory. x")
        return assemble(*args)

    with LLM(**QUIET) as llm:
        monkeypatch.setattr(worker, "load", loads)
        monkeypatch.setattr(worker, "assemble", fails_first)
        with pytest.raises(EngineError, match="goes on with the old ones"):
            llm.update_weights({})
    assert num_alive == [0, 0]


def test_a_profile_is_written(tmp_path: Path, llm: LLM) -> None:
    with pytest.raises(RequestError, match="start one first"):
        llm.stop_profile()
    llm.start_profile(str(tmp_path / "traces"))
    with pytest.raises(RequestError, match="stop it first"):
        llm.start_profile(str(tmp_path))
    text(llm)
    trace = json.loads(Path(llm.stop_profile()).read_text())
    assert trace["traceEvents"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        llm.start_profile(str(tmp_path / "file"))


def test_the_report_of_a_start_names_kernels_and_numerics(llm: LLM) -> None:
    report = llm.engine.client.report
    assert report.kernel_family
    assert report.numerics == ("fast" if report.kernel_family == "reference" else "invariant")
    assert report.kernel_family in report.kernels


def test_weights_wait_in_host_memory() -> None:
    """A GPU's sleep on tensors of a CPU: views stay views, and shared storages stay one."""
    layer = WeightStash.__new__(WeightStash)  # any object of ours with attributes
    whole = torch.arange(12.0)
    layer._kept = {"part": whole[3:7], "parts": [whole, (whole.view(3, 4),)]}  # type: ignore[assignment]
    stash = WeightStash(layer)
    assert whole.untyped_storage().nbytes() == 0
    stash.restore()
    assert whole.tolist() == list(range(12))
    assert layer._kept["part"].tolist() == [3, 4, 5, 6]  # type: ignore[call-overload]
    assert whole.data_ptr() + 12 == layer._kept["part"].data_ptr()  # type: ignore[call-overload]
