"""`LLM` as its users see it, with the bundled model."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch

from quire import (
    LLM,
    BeamSearchParams,
    ConfigError,
    EngineError,
    RequestError,
    SamplingParams,
    SchedulingParams,
)
from quire.bundled import bundled_model_path
from quire.plan.scheduler import KeyedPolicy, SequenceGroup

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(quiet=True, num_kv_blocks=256, max_model_len=512) as engine:
        yield engine


def test_outputs_have_the_shape_that_users_know(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, n=2, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate("import os\n", params)
    assert output.finished
    assert output.prompt == "import os\n"
    own = llm.get_tokenizer()
    assert own.decode(output.prompt_token_ids, skip_special_tokens=True) == "import os\n"
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, position in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert token in position
        assert 2 <= len(position) <= 3
    assert [sample.index for sample in output.outputs] == [0, 1]
    for sample in output.outputs:
        assert len(sample.token_ids) == len(sample.logprobs) == 6
        assert sample.finish_reason == "length"
        chosen = [p[t] for p, t in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert all(entry.rank == 1 for entry in chosen)
        assert sample.cumulative_logprob == pytest.approx(sum(e.logprob for e in chosen))
        assert sample.text == own.decode(sample.token_ids, skip_special_tokens=True)


def test_prompts_of_every_form(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("import os")
    forms = ["import os", {"prompt": "import os"}, ids, {"prompt_token_ids": ids}]
    texts = [llm.generate(form, GREEDY)[0].outputs[0].text for form in forms]
    texts += [output.outputs[0].text for output in llm.generate(forms, GREEDY)]
    assert len(set(texts)) == 1


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    lengths = [3, 1, 7]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    with pytest.raises(RequestError, match="3 prompts but 2 sampling_params"):
        llm.generate(["a", "b", "c"], params[:2])


def test_what_was_enqueued_is_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: outputs that nobody can have any more, of requests that hold memory."""
    prompts = ["import os", "def main("]
    expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    ids = llm.enqueue(prompts, GREEDY)
    llm.pause("keep")
    for _ in range(2):
        with pytest.raises(EngineError, match="paused"):
            llm.wait_for_completion(use_tqdm=False)
    llm.resume()
    found = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in found] == ids
    assert [output.outputs[0].text for output in found] == expected

    def presses_ctrl_c() -> NoReturn:
        raise KeyboardInterrupt

    llm.enqueue(prompts, GREEDY)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(llm.llm_engine, "run_step", presses_ctrl_c)
        llm.wait_for_completion(use_tqdm=False)
    llm.enqueue(prompts[:1], GREEDY)
    left, render = iter([True]), llm.llm_engine.requests.render

    def renders_once(*given: Any, **others: Any) -> Any:
        if not next(left, False):
            raise EngineError("no more")
        return render(*given, **others)

    with monkeypatch.context() as patched, pytest.raises(EngineError, match="no more"):
        patched.setattr(llm.llm_engine.requests, "render", renders_once)
        llm.enqueue(prompts, GREEDY)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].text == expected[0]
    stats = llm.engine.client.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_only_the_prompt_at_fault_fails(llm: LLM) -> None:
    vocab = llm.engine.spec.vocab_size
    outputs = llm.generate(
        [
            "import os",
            [1, vocab],
            [],
            [3] * 512,
            {"text": "x"},
            {"prompt": "x", "cache_salt": "\ud800"},
            torch.tensor([1.0]),  # type: ignore[list-item]
            "import os",
        ],
        GREEDY,
    )
    assert [output.error is None for output in outputs] == [True, *[False] * 6, True]
    assert f"Token id {vocab} at index 1" in outputs[1].error
    assert "has no tokens" in outputs[2].error
    assert "512 tokens" in outputs[3].error
    assert "text" in outputs[4].error
    assert "half of a surrogate pair" in outputs[5].error
    assert "index 0" in outputs[6].error
    for output in outputs[1:7]:  # what a loop over `outputs[0].text` reads
        (sample,) = output.outputs
        assert (sample.text, sample.token_ids, sample.finish_reason) == ("", [], "error")
        assert sample.error == output.error and output.finished
    assert outputs[0].outputs[0].text == outputs[7].outputs[0].text


def test_a_failed_search_has_one_empty_sequence(llm: LLM) -> None:
    bad, good = llm.beam_search([[], "import os"], BeamSearchParams(beam_width=2, max_tokens=3))
    (sequence,) = bad.sequences
    assert (sequence.text, sequence.tokens, sequence.finish_reason) == ("", [], "error")
    assert sequence.score == -math.inf and "has no tokens" in bad.error
    assert len(good.sequences) == 2 and good.error is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [({"prompt_token_ids": []}, "no tokens"), ([-1], "-1"), ([True], "True")],
)
def test_a_single_bad_prompt_raises(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY)


def test_a_request_that_can_never_fit_is_refused() -> None:
    with LLM(quiet=True, num_kv_blocks=4, block_size=16, max_model_len=64) as llm:
        ok, bad = llm.generate([[5] * 30, [5] * 60], SamplingParams(max_tokens=30, temperature=0))
        assert ok.error is None
        assert bad.error is None or "blocks" in bad.error


def test_a_failing_logits_processor_fails_its_request_only(llm: LLM) -> None:
    def broken(token_ids, logits):
        if len(token_ids) == 2:
            raise ValueError("no more")
        return logits

    def poisonous(token_ids, logits):
        logits[:] = float("nan")
        return logits

    alone = llm.generate("import os", GREEDY)[0].outputs[0].text
    params = [
        SamplingParams(temperature=0, max_tokens=12, logits_processors=[broken]),
        GREEDY,
        SamplingParams(temperature=0, max_tokens=12, logits_processors=[poisonous]),
    ]
    first, second, third = llm.generate(["import os"] * 3, params)
    assert "no more" in first.error
    assert len(first.outputs[0].token_ids) == 2
    assert (first.outputs[0].finish_reason, first.outputs[0].error) == ("error", first.error)
    assert second.error is None
    assert second.outputs[0].text == alone
    assert third.error is not None


def test_logits_processors_choose_tokens(llm: LLM) -> None:
    def always(token_ids, logits):
        logits[77] = 1e4
        return logits

    params = SamplingParams(temperature=0.7, max_tokens=4, logits_processors=[always])
    assert llm.generate("x", params)[0].outputs[0].token_ids == [77] * 4


def test_stop_strings_end_a_sequence_across_tokens(llm: LLM) -> None:
    whole = llm.generate("import os\n", SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    text = whole.text
    stop = text[5:9]
    cut = text.index(stop)
    for include in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=24, stop=[stop], include_stop_str_in_output=include
        )
        output = llm.generate("import os\n", params)[0].outputs[0]
        assert output.text == text[: cut + len(stop) * include]
        assert output.finish_reason == "stop"
        assert output.stop_reason == stop
    assert llm.engine.client.stats().num_used_blocks == 0


def test_stop_tokens_and_min_tokens(llm: LLM) -> None:
    base = llm.generate("import os\n", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
    stop = base.token_ids[2]
    first = base.token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop])
    output = llm.generate("import os\n", params)[0].outputs[0]
    assert output.token_ids == base.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=6, stop_token_ids=[stop])
    output = llm.generate("import os\n", params)[0].outputs[0]
    assert len(output.token_ids) >= 6
    assert stop not in output.token_ids[:6]


def test_bad_words_do_not_appear(llm: LLM) -> None:
    text = llm.generate("import os\n", SamplingParams(temperature=0, max_tokens=16))[0].outputs[0]
    word = "import"
    assert word in text.text, "the test needs a word that the model would write"
    params = SamplingParams(temperature=0, max_tokens=16, bad_words=[word])
    assert word not in llm.generate("import os\n", params)[0].outputs[0].text


def test_seeded_requests_repeat_in_any_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=10)
    (alone,) = llm.generate("def f(", params)
    crowd = llm.generate(
        ["x = 1", "def f(", "class A"], [SamplingParams(), params, SamplingParams(n=3)]
    )
    assert crowd[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_prefix_cache_serves_a_repeated_prompt(llm: LLM) -> None:
    prompt = [9] * 70
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 64
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_the_engine_survives_a_lost_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = llm.engine.client._core._executor._worker
    launch, lost = worker.launch, []

    def fail_once(plan):
        if plan.step_id % 4 == 3 and not lost:
            lost.append(plan.step_id)
            raise RuntimeError("device fault")
        return launch(plan)

    monkeypatch.setattr(worker, "launch", fail_once)
    outputs = llm.generate(["import os"] * 2, GREEDY)
    assert all("device fault" in output.error for output in outputs)
    again = llm.generate(["import os"] * 2, GREEDY)
    assert all(output.error is None for output in again)


def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    """Catches a look at the first prompt that takes it from the iterator."""
    outputs = llm.generate((text for text in ("a", "b", "c")), (GREEDY for _ in range(3)))
    assert [output.prompt for output in outputs] == ["a", "b", "c"]


@pytest.mark.parametrize("prompts", [None, 3])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)


def test_a_mapping_of_parameters_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("a", {"temperature": 0})


def test_a_second_thread_is_told(llm: LLM) -> None:
    stream = llm.stream("import os\n", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    failures: list[Exception] = []

    def other() -> None:
        try:
            llm.generate("a", GREEDY)
        except EngineError as error:
            failures.append(error)

    with llm.llm_engine.sole_use():  # as while the first thread is within a step
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    stream.close()
    assert "another thread" in str(failures[0])


def test_requests_by_id_beside_generate() -> None:
    """Catches outputs that steps of another call computed, and that nobody gave."""
    with LLM(quiet=True, num_kv_blocks=64) as llm:
        engine, short = llm.llm_engine, SamplingParams(max_tokens=3, ignore_eos=True)
        engine.add_request("mine", "Hello", short)
        llm.generate("Longer", SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert engine.has_unfinished_requests()
        (output,) = engine.step()
        assert output.finished
        assert len(output.outputs[0].token_ids) == 3
        assert not engine.has_unfinished_requests()
        assert engine.step() == []
        engine.add_request("mine", "Hello", short)
        engine.abort_request("mine")
        assert engine.get_num_unfinished_requests() == 0


def test_a_forked_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wait without end: the thread that computes does not exist in the child."""
    with LLM(quiet=True, num_kv_blocks=64) as engine:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineError, match="forked"):
            engine.generate("a", GREEDY)
        monkeypatch.undo()
        stream = engine.stream("a", SamplingParams(max_tokens=40, ignore_eos=True))
        next(stream)
        engine.enqueue(["b"])
        engine.llm_engine.add_request("1", "c", GREEDY)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        calls = [lambda: list(stream), engine.wait_for_completion, engine.llm_engine.step]
        for call in [*calls, engine.sleep, lambda: engine.pause("wait")]:
            with pytest.raises(EngineError, match="forked"):
                call()
        monkeypatch.undo()


def test_a_script_may_end_without_shutdown() -> None:
    """Fault: the thread that asks Ray for lost hosts ended with a traceback."""
    code = (
        "import atexit, time\n"
        "from quire.compute.executor.ray.group import RayRankGroup\n"
        "class Placed:\n"
        "    def ended(self): return ''\n"
        "    def end(self): print('ended')\n"
        "group = RayRankGroup(None, print, 0, 0)\n"
        "group._placed = Placed()\n"
        "atexit.register(group.shutdown)\n"  # as `AsyncLLM` does
        "atexit.register(time.sleep, 1.5)\n"  # the interpreter takes no work any more
        "group._run(group._watch)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "ended\n")


def test_the_bundled_model_refuses_what_it_cannot_read(llm: LLM) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for message in ({"role": "user", "content": [image]}, {"role": "xx", "content": "hi"}):
        with pytest.raises(RequestError, match=r"this model|text only"):
            llm.chat([message], GREEDY)


def test_two_engines_in_one_process() -> None:
    with LLM(quiet=True, num_kv_blocks=64) as one, LLM(quiet=True, num_kv_blocks=64) as two:
        texts = {engine.generate("import", GREEDY)[0].outputs[0].text for engine in (one, two)}
        assert len(texts) == 1
    with pytest.raises(Exception, match="shut down"):
        one.generate("import", GREEDY)


def test_an_engine_ends_its_threads() -> None:
    before = threading.active_count()
    with LLM(quiet=True, num_kv_blocks=64) as engine:
        engine.generate("import", GREEDY)
    assert threading.active_count() == before


def test_an_abandoned_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream("import os\n", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    stats = llm.engine.client.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_calls_while_a_stream_pauses_leave_it_alone(llm: LLM) -> None:
    """The end of a call must end its own requests only, and what a stream gained while others
    stepped the engine must still be yielded."""
    prompt, params = "import os\n", SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
    (whole,) = llm.generate(prompt, params)
    stream, other = llm.stream(prompt, params), llm.stream("def", GREEDY)
    next(stream)
    list(other)
    llm.generate("class", GREEDY)
    output = next(stream)
    llm.generate("class", params)  # long enough for the paused stream to end meanwhile
    assert output.finished
    assert len(list(stream)) == 1
    assert output.outputs == whole.outputs


def test_samples_that_run_on_their_own_do_not_count_as_cache_hits() -> None:
    """Four samples that do not fit the pool together share the first one's prompt; the request
    itself found nothing in the cache."""
    with LLM(quiet=True, num_kv_blocks=16, max_model_len=128) as engine:
        params = SamplingParams(n=4, max_tokens=40, ignore_eos=True)
        (output,) = engine.generate("import os\n" * 16, params)
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [None]])
def test_parameters_of_another_type_are_refused(llm: LLM, params) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("a", params)


def test_a_tensor_is_one_prompt(llm: LLM) -> None:
    """The numbers of a tensor have a length attribute, and are no prompts."""
    (output,) = llm.generate(torch.tensor([5, 6, 7]), GREEDY)
    assert output.prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize(
    "raised", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
def test_a_logits_processor_that_exits_fails_alone(llm: LLM, raised) -> None:
    def leave(token_ids, logits):
        raise raised(3)

    broken, sound = llm.generate(["a"] * 2, [SamplingParams(logits_processors=[leave]), GREEDY])
    assert raised.__name__ in broken.error
    assert sound.error is None


def test_an_empty_model_name_is_not_the_bundled_model() -> None:
    """Turns red when an unset variable of a script silently serves the demonstration model."""
    with pytest.raises(ConfigError):
        LLM("", quiet=True)


def test_the_tokenizers_end_of_sequence_ends_a_sequence(tmp_path: Path) -> None:
    """Chat models whose config.json names another end token, or none, end their turns with that
    of the tokenizer."""
    folder = shutil.copytree(bundled_model_path(), tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "eos_token_id": None}))
    with LLM(str(folder), quiet=True, num_kv_blocks=64) as engine:
        assert engine.engine.eos_token_ids == {engine.get_tokenizer().eos_token_id}


def test_without_a_tokenizer_token_ids_work() -> None:
    with LLM(quiet=True, num_kv_blocks=64, skip_tokenizer_init=True) as engine:
        (output,) = engine.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
        assert output.outputs[0].token_ids
        assert output.outputs[0].text == ""
        with pytest.raises(RequestError, match="tokenizer"):
            engine.generate("text", GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"max_num_seq": 8}, "max_num_seqs"),
        ({"max_model_len": 10**9}, "max_model_len"),
        ({"dtype": "float8"}, "float8"),
        ({"num_kv_blocks": 1, "max_model_len": 512}, "512"),
    ],
)
def test_settings_that_cannot_work_say_what_would(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"quiet": True, **settings})


def test_local_folders_need_no_network(tmp_path: Path) -> None:
    """A socket opened while a local model loads and answers would fail this."""
    code = f"""
import socket
def refuse(*a, **k): raise AssertionError("network")
socket.socket.connect = refuse; socket.getaddrinfo = refuse
from quire import LLM, SamplingParams
llm = LLM({str(bundled_model_path())!r}, quiet=True, num_kv_blocks=64)
assert llm.generate("import", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
import sys
assert "transformers" not in sys.modules and "huggingface_hub" not in sys.modules
"""
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """A script without a `__main__` guard, interrupted in `generate`: it can go on at once, and
    ends by itself."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it\n"
        "from quire import LLM, SamplingParams\n"
        "llm = LLM(quiet=True, num_kv_blocks=256)\n"
        "step = llm.engine.client.step\n"
        "count = []\n"
        "class Client:\n"
        "    def __getattr__(self, name): return getattr(inner, name)\n"
        "    def step(self):\n"
        "        count.append(1)\n"
        "        if len(count) == 5: signal.raise_signal(signal.SIGINT)\n"
        "        return inner.step()\n"
        "inner = llm.engine.client\n"
        "object.__setattr__(llm.engine, 'client', Client())\n"
        "try:\n"
        "    llm.generate(['import os'] * 4, SamplingParams(max_tokens=200, ignore_eos=True))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "stats = inner.stats()\n"
        "assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)\n"
        "print(len(llm.generate('import', SamplingParams(max_tokens=3))[0].outputs[0].token_ids))\n"
    )
    done = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.split() == ["interrupted", "3"]


def test_import_loads_neither_torch_nor_an_engine() -> None:
    late = {"torch", "quire.engine.build", "quire.plan", "llguidance"}
    code = f"import sys; from quire import LLM; sys.exit(len({late} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestScheduling:
    LATE = SchedulingParams(deadline_s=1e-9)

    def test_a_prompt_that_is_too_late_fails_alone(self, llm: LLM) -> None:
        params = [SchedulingParams(), self.LATE, SchedulingParams(deadline_s=600.0)]
        outputs = llm.generate(["a", "b", "c"], GREEDY, scheduling_params=params)
        assert [bool(output.error) for output in outputs] == [False, True, False]
        assert "deadline_s" in str(outputs[1].error)
        assert outputs[1].outputs[0].finish_reason == "deadline"
        with pytest.raises(RequestError, match="deadline_s"):
            llm.generate("b", GREEDY, scheduling_params=self.LATE)

    def test_priority_is_refused_by_fcfs(self, llm: LLM) -> None:
        assert llm.generate("a", GREEDY, priority=0)[0].error is None
        with pytest.raises(RequestError, match="does not look at priorities"):
            llm.generate("a", GREEDY, priority=1)

    def test_numbers_must_match(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="2 prompts but 3 priority"):
            llm.generate(["a", "b"], GREEDY, priority=[1, 2, 3])
        with pytest.raises(RequestError, match="2 prompts but 1 scheduling_params"):
            llm.generate(["a", "b"], GREEDY, scheduling_params=[SchedulingParams()])
        with pytest.raises(RequestError, match="give SchedulingParams objects"):
            llm.generate("a", GREEDY, scheduling_params={"priority": 1})

    def test_a_policy_of_ones_own_sees_priorities(self) -> None:
        RecordingPolicy.seen.clear()
        name = f"{__name__}:RecordingPolicy"
        with LLM(quiet=True, num_kv_blocks=64, max_model_len=256, scheduling_policy=name) as own:
            texts = [output.outputs[0].text for output in own.generate(["a"] * 3, GREEDY)]
            own.generate(["a", "b"], GREEDY, priority=[7, -2])
        assert RecordingPolicy.seen == [0, 0, 0, 7, -2]
        assert len(set(texts)) == 1

    def test_a_policy_that_does_not_exist_is_told(self) -> None:
        with pytest.raises(ConfigError, match="fcfs, priority, srtf, two_level, fair"):
            LLM(quiet=True, scheduling_policy="no_such_module:Policy")


class RecordingPolicy(KeyedPolicy):
    uses_priority = True
    seen: ClassVar[list[int]] = []

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        self.seen.append(group.request.scheduling.priority)
        return (0.0, group.number)
