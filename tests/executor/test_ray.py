"""Ranks that Ray places: two nodes of a cluster on this machine. Skipped without Ray. A run starts
ranks once; what they do then, and how they are lost, is for a soak."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ConfigError, EngineError
from quire.compute.executor.ray.cluster import RayHosts, check_nodes, check_own_host
from quire.engine import build
from tests.config.specs import GIB
from tests.executor.ray_cluster import IN_SOAKS, NUM_CPUS, ray_cluster
from tests.models.families import Case, write_checkpoint
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = [[5 + i, 17, 30, 42, 8] * (1 + i) for i in range(4)]
SIZES = {
    "hidden_size": 64,
    "head_dim": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("dense")
    write_checkpoint(Case("dense", "llama", SIZES), path)
    return str(path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with ray_cluster():
        yield


def settings(folder: str, **more: Any) -> dict[str, Any]:
    return {
        "model": folder,
        "max_model_len": 64,
        "num_kv_blocks": 128,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "quiet": True,
        "num_threads": 1,
        **more,
    }


def answers(llm: LLM) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(PROMPTS))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not [each.error for each in outputs if each.error]
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=IN_SOAKS)])
def test_ranks_on_another_node_give_what_processes_give(
    folder: str, cluster: Any, ranks: int
) -> None:
    """Both add partial sums in the same order, so bits are equal."""
    with LLM(**settings(folder, tensor_parallel_size=ranks)) as llm:
        wanted = answers(llm)
    by_ray = settings(folder, tensor_parallel_size=ranks, distributed_executor_backend="ray")
    with LLM(**by_ray) as llm:
        assert answers(llm) == wanted
        assert answers(llm) == wanted


@IN_SOAKS
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_host_is_noticed(folder: str, cluster: Any, number: int) -> None:
    """The process that holds a host's ranks is killed or stopped, as when its host is lost. Turns
    red when a call hangs, or nothing says what was lost."""
    by_ray = settings(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    with LLM(**by_ray) as llm:
        answers(llm)
        client: Any = llm.engine.client
        group = client._core._executor._group
        (pid,) = group.pids
        os.kill(pid, number)
        wait_for(lambda: group._lost, "notice")
        with pytest.raises(EngineError, match=r"the host of rank 1 .*start a new engine"):
            answers(llm)
    with LLM(**by_ray) as llm:
        answers(llm)


def test_without_room_the_start_says_what_is_free(
    folder: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.compute.executor.ray.cluster.PLACE_S", 2.0)
    with pytest.raises(ConfigError, match=f"num_threads=1 CPUs of one host, and {NUM_CPUS} are"):
        LLM(**settings(folder, tensor_parallel_size=8, distributed_executor_backend="ray"))


def test_a_rank_that_no_node_can_hold_is_refused_at_once(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when Ray is asked to place it, and waited for."""
    monkeypatch.setattr("quire.compute.executor.ray.cluster.PLACE_S", 10 * WAIT_S)
    with pytest.raises(ConfigError, match=r"no node of Ray.s cluster with num_threads=1 CPUs"):
        RayHosts(1, 1, 2**50, 2**51)


NODES: list[dict[str, Any]] = [
    {"Alive": True, "Resources": {"CPU": 4.0, "memory": 7.0 * GIB}},
    {"Alive": True, "Resources": {"memory": 64.0 * GIB}},
    {"Alive": False, "Resources": {"CPU": 8.0, "memory": 64.0 * GIB}},
]


def test_a_node_has_cpus_and_memory_for_a_rank() -> None:
    """Turns red when a node that is gone, or has no CPUs, counts."""
    check_nodes(NODES, 4, 7 * GIB)
    words = r"takes 8.00 GiB .* more than 7.00 GiB. .*`ray start --memory=BYTES`"
    with pytest.raises(ConfigError, match=words):
        check_nodes(NODES, 4, 8 * GIB)


def test_ranks_beside_rank_0_find_room() -> None:
    """Turns red when two processes of a host both plan with all of its memory, or its cores."""
    check_own_host(0, (4, 0.0), (7 * GIB, 8 * GIB))
    check_own_host(1, (2, 4.0), (4 * GIB, 8 * GIB))
    with pytest.raises(ConfigError, match="num_threads=4 they take more than its 4 CPUs"):
        check_own_host(1, (4, 4.0), (4 * GIB, 8 * GIB))
    words = r"takes 5.00 GiB, and 8.00 GiB are free here.*lower kv_cache_memory"
    with pytest.raises(ConfigError, match=words):
        check_own_host(1, (2, 4.0), (5 * GIB, 8 * GIB))


def test_one_rank_needs_no_ray(folder: str) -> None:
    with pytest.raises(ConfigError, match="places ranks, and tensor_parallel_size is 1"):
        LLM(**settings(folder, distributed_executor_backend="ray"))


@IN_SOAKS
def test_ranks_meet_again_after_a_deep_sleep(folder: str, cluster: Any) -> None:
    """Turns red when ranks that load their weights again read addresses of the first time."""
    by_ray = settings(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    with LLM(**by_ray) as llm:
        wanted = answers(llm)
        for _ in range(2):
            llm.sleep(level=2)
            llm.wake_up()
            assert answers(llm) == wanted


@IN_SOAKS
def test_a_rank_that_cannot_start_says_so_at_once(
    folder: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is not on the other host. Turns red when rank 0 waits for that rank in vain."""
    values = build.setting_values
    missing = lambda asked: {**values(asked), "model": "/missing"}  # noqa: E731
    monkeypatch.setattr(build, "setting_values", missing)
    started = time.monotonic()
    with pytest.raises(ConfigError, match="/missing"):
        LLM(**settings(folder, tensor_parallel_size=2, distributed_executor_backend="ray"))
    assert time.monotonic() - started < 45.0
