"""New weights for several ranks and replicas: all of them get them, or none, also where one fails
or dies; and outputs say which weights computed them."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, BeamSearchParams, SamplingParams, SchedulingParams
from quire.base.errors import ConfigError, EngineError, EngineUnavailableError, RequestError
from quire.bundled import bundled_model_path
from quire.compute.worker import worker
from quire.engine.clients.open_requests import OpenRequests
from quire.engine.clients.process_client import ProcessEngineClient, _with_later
from quire.protocol.beam_search import BeamRules
from quire.protocol.control import AdminOp, Inspect, LoadWeights, Pause, Resume, Sleep, Wake
from quire.protocol.outputs import WeightHistory, WeightVersionSpan
from quire.protocol.request import (
    EMPTY_HANDLES,
    EngineOutput,
    EngineRequest,
    FinishReason,
    SequenceFinish,
    Weights,
    WholeSequence,
)
from quire.protocol.status import EngineState
from quire.protocol.step import no_ints
from quire.server.generation.weight_updates import WeightUpdates
from quire.server.requests.errors import RefusedError
from quire.server.requests.weight_bodies import WeightUpdateInfo
from tests.engine.fake_core_process import FakeCoreOptions
from tests.engine.process_harness import ask, collect, hosted, run
from tests.engine.test_replicas import clients_of, replicas, until_all_ready
from tests.models.families import Case, write_checkpoint
from tests.waiting import WAIT_S

SMALL: dict[str, Any] = {
    "max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "quiet": True,
}  # fmt: skip
BUNDLED = bundled_model_path()
PROMPT = [5, 17, 301, 42, 8, 11, 19, 23]


def changed_tensors(source: Path = BUNDLED) -> dict[str, torch.Tensor]:
    tensors = load_file(source / "model.safetensors")
    return {name: each.flip(0).contiguous() for name, each in tensors.items() if "mlp" in name}


def write_changed(folder: Path, source: Path = BUNDLED) -> str:
    """Write a model with the changed tensors."""
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, **changed_tensors(source)}, folder / "model.safetensors")
    return str(folder)


def answer(llm: LLM) -> tuple[list[int], float | None]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob


def test_ranks_get_new_weights_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when one rank stays behind, gets another part, or keeps new weights that another
    one could not load: its share of the sums would change the answer."""
    source = tmp_path / "source"
    write_checkpoint(Case("it", "llama", {"vocab_size": 512}), source)
    settings = {
        **SMALL, "max_model_len": 64, "skip_tokenizer_init": True, "tensor_parallel_size": 2,
        "num_threads": 1,
    }  # fmt: skip
    with LLM(model=write_changed(tmp_path / "changed", source), **settings) as other:
        expected = answer(other)
    with LLM(model=str(source), **settings) as llm:
        old = answer(llm)
        assert old != expected
        with pytest.raises(ConfigError, match=r"no tensor 'model\.nothing'"):
            llm.update_weights({"model.nothing": torch.zeros(3)})
        assert answer(llm) == old
        load, failures = worker.load, [1]

        def fails_once(*args: Any, **options: Any) -> Any:
            if failures:  # in rank 0; rank 1 has loaded them by then, or will
                failures.pop()
                raise torch.OutOfMemoryError("no memory. x")
            return load(*args, **options)

        monkeypatch.setattr(worker, "load", fails_once)
        with pytest.raises(EngineError, match="all ranks have the weights from before"):
            llm.update_weights(changed_tensors(source))
        assert not failures and answer(llm) == old
        assert llm.update_weights(changed_tensors(source), "two") >= 1
        assert answer(llm) == expected
        llm.sleep(2)
        llm.wake_up()  # the files that crossed to the ranks are not needed any more
        assert answer(llm) == expected


def test_an_output_that_spans_two_versions_says_so() -> None:
    """Turns red when tokens from before an update count as made by it, or a receipt is given for an
    answer of two models."""
    with LLM(**SMALL) as llm:
        params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0, deterministic=True)
        (before,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        assert before.outputs[0].weight_versions == [WeightVersionSpan("default", 0, 9)]
        stream = llm.stream({"prompt_token_ids": PROMPT}, params)
        num_old = len(next(stream).outputs[0].token_ids)
        llm.update_weights(changed_tensors(), "step-7")
        *_, last = stream
        spans = last.outputs[0].weight_versions
        assert spans is not None and [each.version for each in spans] == ["default", "step-7"]
        assert (spans[0].start, spans[1].end) == (0, 9)
        assert spans[0].end == spans[1].start >= num_old
        assert last.receipt is None
        (after,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        assert after.outputs[0].weight_versions == [WeightVersionSpan("step-7", 0, 9)]
        assert before.receipt is not None and after.receipt is not None
        assert after.receipt.evidence.weights_version == "step-7"
        stated = (before.receipt.statement, after.receipt.statement)
        assert stated[0].model["weights"] != stated[1].model["weights"]
        assert {**stated[0].model, "weights": ""} == {**stated[1].model, "weights": ""}
        llm.update_weights(changed_tensors(), "step-8")  # the same numbers under another name
        (again,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        assert again.receipt is not None and again.receipt.id == after.receipt.id


def test_histories_of_weights() -> None:
    """Fault: an update between two tokens makes an empty span, or one that goes nowhere."""
    old, new, third = Weights(), Weights("a", "1"), Weights("b", "2")
    history = WeightHistory(old)
    history.change(new, 0)
    assert history.only == new and history.spans(0) == []
    history.change(third, 4)
    history.change(new, 4)
    assert history.only == new and history.spans(6) == [WeightVersionSpan("a", 0, 6)]
    history.change(third, 6)
    assert history.spans(6) == [WeightVersionSpan("a", 0, 6)]
    assert history.spans(8)[1:] == [WeightVersionSpan("b", 6, 8)] and history.only is None
    history.came_whole()
    assert history.spans(8) == [] and history.only is None


def test_beams_say_which_weights_made_them() -> None:
    """Fault: nothing but the sequences of a search tells of new weights, and nobody looks there."""
    rules = BeamSearchParams(beam_width=2, max_tokens=4)
    params = rules.sampling.clone(deterministic=True)
    with LLM(**SMALL) as llm:
        llm.update_weights(changed_tensors(), "step-7")
        prompt = llm.engine.renderer.render_prompt({"prompt_token_ids": PROMPT})
        output = llm.llm_engine.add(prompt, params, SchedulingParams(), rules.rules)
        while not output.finished:
            llm.llm_engine.run_step()
    assert len(output.outputs) == 2
    for each in output.outputs:
        assert each.weight_versions == [WeightVersionSpan("step-7", 0, len(each.token_ids))]
    assert output.receipt is not None and output.receipt.evidence.weights_version == "step-7"


@pytest.mark.parametrize("begun_with", [None, Weights("1", "a")], ids=["old", "new"])
def test_searches_of_a_server_say_which_weights_made_them(begun_with: Weights | None) -> None:
    new, ids = Weights("1", "a"), np.array([4, 5], np.int32)
    client = OpenRequests(lambda _: 0, max_replays=1)
    params = SamplingParams(max_tokens=2)
    request = EngineRequest("search", 0, ids, params, 1, beams=BeamRules(2))
    stream = client.open(request, lambda _: None)
    first = EngineOutput(EMPTY_HANDLES, no_ints(), num_cached_tokens={0: 0}, weights=begun_with)
    client.take(first)
    whole = SequenceFinish(0, FinishReason.LENGTH, whole=WholeSequence(ids, -1.0))
    client.take(EngineOutput(EMPTY_HANDLES, no_ints(), finished=(whole,), weights=new))
    assert stream.weights(0).only == begun_with
    known = [WeightVersionSpan("1", 0, 2)]
    assert stream.weights(0).spans(2) == (known if begun_with == new else [])


async def versions(host: Any) -> list[str]:
    reports = [await each.control(Inspect()) for each in clients_of(host)]
    return [report.weights.version for report in reports]


@pytest.mark.parametrize("breaks", [0, 1])
def test_replicas_change_together_or_not_at_all(breaks: int) -> None:
    """Turns red when one replica serves weights that another one refused or could not load."""

    async def work() -> None:
        make_options = partial(FakeCoreOptions, breaks_weights=breaks)
        async with replicas(make_options=make_options) as host:
            report = await host.client.control(LoadWeights(("/first",), "1"))
            assert report.weights.version == "1" and await versions(host) == ["1", "1"]
            with pytest.raises(RequestError, match="refused"):
                await host.client.control(LoadWeights(("/refused",), "2"))
            assert await versions(host) == ["1", "1"]
            with pytest.raises(EngineError, match="all 2 go back to version '1'"):
                await host.client.control(LoadWeights(("/broken",), "2"))
            assert await versions(host) == ["1", "1"]
            trial = LoadWeights(("/third",), "3", is_trial=True)
            await host.client.control(trial)
            assert await versions(host) == ["1", "1"]

    run(work())


def test_a_replica_that_starts_again_has_the_weights_of_the_others() -> None:
    """Turns red when the next core of a replica serves the checkpoint, or weights change while one
    is away. Outputs tell the version."""

    async def work() -> None:
        async with replicas() as host:
            await host.client.control(LoadWeights(("/first",), "1"))
            first = clients_of(host)[0]
            kill(host)
            await _until(first, lambda: first.status.state is not EngineState.READY)
            with pytest.raises(EngineUnavailableError, match=r"replica 0 is .*all 2 or in none"):
                await host.client.control(LoadWeights(("/second",), "2"))
            await until_all_ready(host)
            assert await versions(host) == ["1", "1"]
            for each in clients_of(host):
                served = await ask(each, [3, 4], max_tokens=3)
                assert len((await collect(served)).finishes) == 1
                assert served.weights(0).spans(3) == [WeightVersionSpan("1", 0, 3)]
            await host.client.control(LoadWeights(("/second",), "2"))
            assert await versions(host) == ["2", "2"]

    run(work())


def kill(host: Any) -> None:
    """End the core of the first replica."""
    os.kill(host.supervisor.pid, signal.SIGKILL)


async def _until(client: ProcessEngineClient, holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await client.wait_for_change(client.status)


def test_weights_that_are_owed_come_before_all_else() -> None:
    """Fault: a replica that is to sleep forgets that it must go back to other weights first."""
    one, two = LoadWeights(("a",), "1"), LoadWeights(("b",), "2")
    owed: list[AdminOp] = [one]
    assert _with_later(owed, two) == [two]
    assert _with_later(owed, Sleep()) == [one, Sleep()]
    assert _with_later(_with_later(owed, Sleep()), Wake()) == [one, Wake(), Resume()]
    assert _with_later([Pause()], two) == [two, Pause()]


def test_a_real_engine_goes_on_with_new_weights_after_a_crash(tmp_path: Path) -> None:
    """Turns red when a core that takes the place of a killed one serves the checkpoint."""
    with LLM(model=write_changed(tmp_path / "changed"), **SMALL) as other:
        expected, _ = answer(other)
    names = changed_tensors()
    numbers = [each.view(torch.uint8).numpy().tobytes() for each in names.values()]
    info = WeightUpdateInfo(
        names=list(names),
        dtype_names=[str(each.dtype) for each in names.values()],
        shapes=[list(each.shape) for each in names.values()],
        tensors=numbers,
    )
    nan = torch.full_like(next(iter(names.values())), torch.nan).view(torch.uint8).numpy()
    wrong = msgspec.structs.replace(info, tensors=[nan.tobytes(), *numbers[1:]])
    settings = {"model": str(bundled_model_path()), **SMALL}

    async def tokens(client: ProcessEngineClient) -> list[int]:
        stream = await ask(client, PROMPT, max_tokens=12, ignore_eos=True)
        return (await collect(stream)).tokens[0]

    async def work() -> None:
        async with hosted(settings=settings) as host:
            old = await tokens(host.client)
            updates = WeightUpdates(host.client)
            await updates.start()
            with pytest.raises(RequestError, match="not finite"):
                await updates.add(wrong, None)
            folder = host.client.directories[0] / "weights"
            assert not [*folder.rglob("*.new")], "what is refused takes no room"
            await updates.add(info, None)
            assert await tokens(host.client) == old != expected
            assert await updates.finish(None) == "1"
            assert await tokens(host.client) == expected
            kill(host)
            await _until(host.client, lambda: host.client.status.state is not EngineState.READY)
            await _until(host.client, lambda: host.client.status.state is EngineState.READY)
            assert await tokens(host.client) == expected

    run(work())


def test_an_engine_that_falls_asleep_by_an_update_says_why(tmp_path: Path) -> None:
    """Fault: one that had no memory for weights any more was said to sleep and to refuse them, and
    the update stayed open, which no wake could have finished."""

    class Engine:
        directories = (tmp_path,)

        async def control(self, op: Any) -> Any:
            if isinstance(op, LoadWeights) and not op.is_trial:
                raise EngineError("they do not fit, so the engine sleeps")
            return SimpleNamespace(sleep_level=2, loaded=SimpleNamespace(files=()))

    async def work() -> None:
        client: Any = Engine()
        updates = WeightUpdates(client)
        await updates.start()
        (folder,) = (each for each in (tmp_path / "weights").iterdir() if each.is_dir())
        save_file({"a": torch.zeros(1)}, folder / "1.safetensors")
        with pytest.raises(EngineError, match="do not fit"):
            await updates.finish(None)
        with pytest.raises(RefusedError, match="No update of weights is open"):
            await updates.finish(None)

    run(work())
