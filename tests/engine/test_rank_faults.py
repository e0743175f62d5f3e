"""Ranks of a model that die, hang or cannot start: streams go on, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, EngineError, RequestError
from quire.bundled import bundled_model_path
from quire.compute.executor.processes.group import RankGroup
from quire.compute.executor.processes.messages import RankMessage
from quire.compute.runner.graphs.failures import MAX_FAILURES
from quire.compute.runner.graphs.recorder import NativeRecorder
from quire.config.adapters.registry import AdapterFolders
from quire.engine.clients.process_client import ProcessEngineClient
from quire.ops.native.capture import ArenaFullError, NotCapturableError
from quire.protocol.status import EngineState
from quire.protocol.step_codec import encode_plan
from quire.server.routes.exposition import rank_metrics
from tests.engine.failing_rank import COMMAND, FATAL, REPLAYS_COMMAND
from tests.engine.hanging_rank import CORE_COMMAND, HANG, HANG_CORE
from tests.engine.process_harness import (
    Collected,
    ask,
    collect,
    hosted,
    run,
    until_begun,
    until_state,
)
from tests.engine.test_laws import has_kernels
from tests.forked import TEMPLATE, name_of
from tests.lora.adapters import write_adapter
from tests.models.families import Case, write_checkpoint
from tests.profiles import SCALE
from tests.waiting import WAIT_S, wait_for

STALL_S = 4.0
"""Time after which a step counts as hung: short, but longer than steps of a busy machine."""
NOTICED_S = WAIT_S if SCALE == 1 else 5.0
"""A soak has the machine for itself; a death is noticed within 1 s there."""
FAULTS = {
    "rank killed": (1, signal.SIGKILL, NOTICED_S),
    "rank stopped": (1, signal.SIGSTOP, NOTICED_S),
    "rank hung": (1, HANG, NOTICED_S + STALL_S),
    "core killed": (0, signal.SIGKILL, NOTICED_S),
    "core stopped": (0, signal.SIGSTOP, NOTICED_S + STALL_S),
    "core hung": (0, HANG_CORE, NOTICED_S + STALL_S),
}
"""The rank that a signal goes to, and until when it is noticed; rank 0 is in the core."""
NUM_FAULTS = 3 if SCALE == 1 else 10 * SCALE
SERVED_S = WAIT_S if SCALE == 1 else 5.0
"""Longest time from then to the end of the next request. A soak has the machine for itself."""
LENGTH = 60
SETTINGS: dict[str, Any] = {
    "model": str(bundled_model_path()),
    "max_model_len": 256,
    "num_kv_blocks": 128,
    "tensor_parallel_size": 2,
    "quiet": True,
}
PROMPTS = [[5 + i, 17, 301, 42, 8] * (2 + i) for i in range(4)]


def children_of(pid: int) -> list[int]:
    """Process ids of the ranks that a core has started."""
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
            found.update(map(int, (task / "children").read_text().split()))
    return sorted(each for each in found if name_of(each) not in ("", TEMPLATE))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return True


@pytest.fixture(scope="module")
def uncut() -> list[list[int]]:
    """Tokens of `PROMPTS` where nothing fails."""
    with LLM(**{**SETTINGS, "skip_tokenizer_init": True}) as llm:
        params = [
            SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.8, seed=i)
            for i in range(len(PROMPTS))
        ]
        prompts = [{"prompt_token_ids": each} for each in PROMPTS]
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def runner_of(llm: LLM) -> Any:
    """The runner of rank 0."""
    client: Any = llm.engine.client
    return client._core._executor._first._worker._assembly.runner


async def start_all(client: ProcessEngineClient) -> tuple[list[Any], list[Collected]]:
    founds = [Collected() for _ in PROMPTS]
    options: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.8}
    tasks = [
        asyncio.ensure_future(collect(await ask(client, prompt, seed=i, **options), founds[i]))
        for i, prompt in enumerate(PROMPTS)
    ]
    return tasks, founds


def test_streams_survive_the_end_of_a_rank(
    uncut: list[list[int]], record_property: Callable[[str, object], None]
) -> None:
    """Ranks are killed, stopped or hang at random points under load: each stream goes on to the
    byte, and the next request is served. Turns red when a rank that computes no more is not
    noticed, a stream gets no end, or something stays."""
    seen = set[int]()
    seconds = defaultdict[str, list[float]](list)
    memory, directories = set(os.listdir("/dev/shm")), set[Path]()

    async def work() -> None:
        rng = random.Random(2)
        faults = itertools.cycle(FAULTS.items())
        async with hosted(
            settings=SETTINGS, command=CORE_COMMAND, stall_s=STALL_S, max_replays=NUM_FAULTS + 2
        ) as host:
            directories.add(host.directory)
            for name, (rank, number, limit) in itertools.islice(faults, NUM_FAULTS):
                tasks, founds = await start_all(host.client)
                cut = rng.randrange(1, 40)
                await until_begun(founds, cut)
                core = host.supervisor.pid
                assert core is not None
                pids = (core, *children_of(core))
                seen.update(pids)
                os.kill(pids[rank], number)
                # A hang shows in a step, and all streams may have ended by now.
                more = asyncio.ensure_future(
                    collect(await ask(host.client, PROMPTS[0], max_tokens=LENGTH, ignore_eos=True))
                )
                started = time.monotonic()
                await until_state(host.client, EngineState.RESTARTING)
                noticed = time.monotonic()
                seconds[f"{name}, noticed"].append(noticed - started)
                assert noticed - started < limit, name
                await until_state(host.client, EngineState.READY)
                again = await collect(await ask(host.client, PROMPTS[0], max_tokens=3))
                seconds[f"{name}, next served"].append(time.monotonic() - noticed)
                assert len(again.tokens[0]) == 3
                assert [(await task).tokens[0] for task in tasks] == uncut
                assert len((await more).tokens[0]) == LENGTH
            last = host.supervisor.pid
            assert last is not None
            seen.update((last, *children_of(last)))

    run(work(), 240 * SCALE)
    wait_for(lambda: all(map(is_gone, seen)), "end of all processes")
    assert not any(each.exists() for each in directories)
    for name, found in seconds.items():
        record_property(name, {"runs": len(found), "slowest": round(max(found), 3)})
    served = [found for name, found in seconds.items() if "served" in name]
    assert max(map(max, served)) < SERVED_S
    assert SCALE == 1 or set(os.listdir("/dev/shm")) == memory


def test_two_replicas_of_two_ranks(uncut: list[list[int]]) -> None:
    """Four processes that compute: replicas give what one gives, and the death of a rank moves the
    streams of its replica to the other one at once."""

    async def work() -> None:
        settings = {**SETTINGS, "data_parallel_size": 2}
        async with hosted(settings=settings, max_replays=4) as host:
            client: Any = host.client
            for each in client._replicas:
                await until_state(each, EngineState.READY)
            tasks, founds = await start_all(client)
            assert [each.num_unfinished for each in client._replicas] == [2, 2]
            await until_begun(founds, 3)
            (rank,) = children_of(host.supervisor.pid or 0)
            os.kill(rank, signal.SIGKILL)
            await until_state(client._replicas[0], EngineState.RESTARTING)
            assert client.status.state is EngineState.READY
            assert [(await task).tokens[0] for task in tasks] == uncut

    run(work())


def test_an_idle_engine_notices_too() -> None:
    """Turns red when only a step notices that a rank is gone."""

    async def work() -> None:
        async with hosted(settings=SETTINGS) as host:
            core = host.supervisor.pid
            assert core is not None
            (rank,) = children_of(core)
            os.kill(rank, signal.SIGSTOP)
            await until_state(host.client, EngineState.RESTARTING)
            await until_state(host.client, EngineState.READY)
            assert len((await collect(await ask(host.client, [5], max_tokens=3))).tokens[0]) == 3

    run(work())


def test_metrics_tell_the_ranks_apart() -> None:
    """Turns red when a rank is missing, or a dead process counts."""

    async def work() -> None:
        async with hosted(settings=SETTINGS) as host:
            await collect(await ask(host.client, [5], max_tokens=3))
            client: Any = host.client
            while len(client.stats.rank_resident_bytes) < 2:
                await asyncio.sleep(0.05)
            samples = [each for found in rank_metrics(client.stats) for each in found.samples]
            assert [each.labels["rank"] for each in samples] == ["0", "1"] * 2
            assert min(each.value for each in samples) > 0.0

    run(work())


def test_ranks_end_with_their_core() -> None:
    """Turns red when a killed core leaves processes, even stopped ones."""

    async def work() -> None:
        async with hosted(settings=SETTINGS) as host:
            core = host.supervisor.pid
            assert core is not None
            (rank,) = children_of(core)
            os.kill(rank, signal.SIGSTOP)
            os.kill(core, signal.SIGKILL)
            await asyncio.to_thread(wait_for, lambda: is_gone(rank), "end of the rank")

    run(work())


def held() -> list[str]:
    """List what this process has open without a name in the file system: memory of ranks, also
    where it is only mapped, pipes, sockets, events."""
    found = [
        line.split(maxsplit=5)[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:quire" in line
    ]
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            found += [target] * (not target.startswith("/") or "memfd:quire" in target)
    return sorted(found)


def lose_a_rank() -> None:
    with LLM(**{**SETTINGS, "skip_tokenizer_init": True}) as llm:
        client: Any = llm.engine.client
        (rank,) = client._core._executor.pids
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        ask_one: Callable[[], Any] = lambda: llm.generate(  # noqa: E731
            {"prompt_token_ids": [5, 6]}, params, use_tqdm=False
        )
        assert len(ask_one()[0].outputs[0].token_ids) == 4
        assert any("memfd:quire" in each for each in held())
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: client._core._executor._group._lost, "notice")
        with pytest.raises(EngineError, match=r"rank 1 .*killed by signal 9: start a new engine"):
            ask_one()
    assert is_gone(rank)


def test_an_engine_in_this_process_says_what_it_has_lost() -> None:
    """Turns red when a caller waits for ever, or when processes, memory or descriptors stay after
    `shutdown`."""
    gc.collect()  # what other tests have left may go meanwhile
    before = Counter(held())
    lose_a_rank()
    gc.collect()
    assert not Counter(held()) - before


def test_a_step_that_fails_on_one_rank_fails_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank fails between two exchanges of a step with several rows; all ranks compute the rows
    again in the same halves, and only the row at fault fails. Turns red when the other rank waits
    in an exchange, or reads what was given for another one."""
    failing = partial(RankGroup, command=COMMAND)
    monkeypatch.setattr("quire.compute.executor.processes.group.RankGroup", failing)
    settings = {**SETTINGS, "skip_tokenizer_init": True, "enforce_eager": True}
    prompts = [[5, 17, 30], [6, FATAL, 31], [8, 19, 32, 4], [9]]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
    with LLM(**{**settings, "tensor_parallel_size": 1}) as one:
        wanted = [list(o.outputs[0].token_ids) for o in one.generate(asked, params, use_tqdm=False)]
    with LLM(**settings) as two:
        for _ in range(2):
            found = two.generate(asked, params, use_tqdm=False)
            assert "another rank" in (found[1].error or "")
            good = [0, 2, 3]
            assert [list(found[i].outputs[0].token_ids) for i in good] == [wanted[i] for i in good]


def greedy_tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert not [each.error for each in outputs if each.error]
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.fixture(scope="module")
def greedy() -> list[list[int]]:
    """`greedy_tokens` of two ranks whose steps are captured."""
    with LLM(**{**SETTINGS, "skip_tokenizer_init": True}) as llm:
        found = greedy_tokens(llm)
        assert bool(runner_of(llm)._decode.drawing.recorded) == has_kernels()
    return found


@pytest.mark.skipif(not has_kernels(), reason="plain torch is not captured")
@pytest.mark.parametrize(
    "fault", [NotCapturableError("no"), ArenaFullError("no room"), RuntimeError("a bug")]
)
def test_a_capture_that_fails_on_one_rank_fails_on_all(
    fault: Exception, greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 cannot record its steps, rank 1 could. Turns red when rank 1 replays and meets nobody:
    the call hangs."""

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(NativeRecorder, "result_of", fail)
    with LLM(**{**SETTINGS, "skip_tokenizer_init": True}) as llm:
        assert greedy_tokens(llm) == greedy
        assert not runner_of(llm)._decode.drawing.recorded


@pytest.mark.skipif(not has_kernels(), reason="plain torch is not captured")
def test_a_replay_that_fails_on_one_rank_fails_on_all(
    greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 makes half of the calls of a captured step, and then fails. Turns red when rank 0
    waits in an exchange of the other half, goes on replaying when rank 1 does so no more, a row
    gets a token twice, or the only row of a step is blamed for it."""
    failing = partial(RankGroup, command=REPLAYS_COMMAND)
    monkeypatch.setattr("quire.compute.executor.processes.group.RankGroup", failing)
    with LLM(**{**SETTINGS, "skip_tokenizer_init": True}) as llm:
        assert greedy_tokens(llm, PROMPTS[:1]) == greedy[:1]
        assert greedy_tokens(llm) == greedy
        runner = runner_of(llm)
        assert runner._decode.failures.count == MAX_FAILURES
        assert runner._forward._model.graphs is None


def test_an_engine_ends_while_an_adapter_waits_behind_a_step(tmp_path: Path) -> None:
    """Rank 1 has a step that rank 0 does not compute, and after it an adapter. Turns red when
    `shutdown` waits for the answer of rank 1, which waits for rank 0."""
    write_checkpoint(Case("base", "llama"), tmp_path / "base")
    write_adapter(tmp_path / "a", tmp_path / "base", ["q_proj"])
    settings: dict[str, Any] = {**SETTINGS, "model": str(tmp_path / "base"), "enable_lora": True}
    llm = LLM(**settings, skip_tokenizer_init=True, dtype="float32")
    executor: Any = llm.engine.client._core._executor  # type: ignore[attr-defined]
    plans: list[Any] = []
    execute = executor.execute
    executor.execute = lambda plan: (plans.append(plan), execute(plan))[1]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)

    again = replace(plans[0], step_id=100, leave=np.array([0], np.int32))
    executor._group.send(RankMessage.PLAN, encode_plan(again))
    ref = AdapterFolders(16).ref("a", str(tmp_path / "a"))
    put = executor.put_adapter(0, ref)
    time.sleep(1.0)  # rank 0 has put it, and rank 1 has not answered
    assert not put.done()
    ending = threading.Thread(target=llm.shutdown, daemon=True)
    ending.start()
    ending.join(WAIT_S)
    assert not ending.is_alive()
    assert isinstance(put.exception(), EngineError)


def test_ranks_that_compute_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a host with another version or processor is noticed by its tokens alone."""
    monkeypatch.setattr("quire.__version__", "0.0.9")  # of rank 0, and not of the other process
    with pytest.raises(ConfigError, match=r"computes with quire 0\.1.*rank 0 with quire 0\.0\.9"):
        LLM(**{**SETTINGS, "skip_tokenizer_init": True})


def test_a_model_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    """SmolLM2 has 9 query heads. Turns red when that is found out after minutes of loading."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}
    write_checkpoint(Case("nine", "llama", sizes), tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"tensor_parallel_size=2 does not fit .*: 9 query heads cannot be shared by 2 ranks",
    ):
        LLM(str(tmp_path), tensor_parallel_size=2, skip_tokenizer_init=True, quiet=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"torch_compile": True}, "and torch_compile do not go together"),
    ],
)
def test_what_does_not_work_beside_ranks_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(tensor_parallel_size=2, quiet=True, **settings)


def test_what_a_request_asks_in_vain_ends_it_alone() -> None:
    """Functions cannot go to another process. Turns red when such a request ends the engine."""
    with LLM(**{**SETTINGS, "skip_tokenizer_init": True}) as llm:
        params = SamplingParams(max_tokens=3, logits_processors=[lambda _, logits: logits])
        with pytest.raises(RequestError, match="logits_processors"):
            llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
        good = SamplingParams(max_tokens=3, ignore_eos=True)
        (found,) = llm.generate({"prompt_token_ids": [5, 6]}, good, use_tqdm=False)
        assert len(found.outputs[0].token_ids) == 3
