"""Graphs on = graphs off, whole and in pieces, with a recorder that does without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.compute.attention.reference import ReferenceAttention
from quire.compute.runner.graphs.ladder import LazyGraphs, ladder
from tests.engine.test_laws import assert_same, workload
from tests.models.families import CASES, write_checkpoint
from tests.runner.late_device import keep_rows_on_device
from tests.runner.recorder import CallRecorder

BY_NAME = {case.name: case for case in CASES}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "quiet": True,
    "skip_tokenizer_init": True,
    "num_kv_blocks": 64,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "num_threads": 1,
}


class Recorded:
    """Engines on plain torch, the only one that the recorder understands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorders: list[CallRecorder] = []
        self.engines: list[LLM] = []
        self._run = ReferenceAttention.run
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("QUIRE_CPU_ISA", "none")
        keep_rows_on_device(monkeypatch, make_recorder=self._make_recorder)

    def _make_recorder(self, state: Any, kv: Any) -> CallRecorder:
        recorder = CallRecorder([state.arena, kv.pages])
        self._monkeypatch.setattr(ReferenceAttention, "run", recorder.opaque(self._run))
        self.recorders.append(recorder)
        return recorder

    def start(self, folder: Path, **settings: Any) -> LLM:
        self.engines.append(LLM(str(folder), **{**SETTINGS, **settings}))
        return self.engines[-1]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    engines = Recorded(monkeypatch)
    yield engines
    for engine in engines.engines:
        engine.shutdown()


def runner_of(llm: LLM) -> Any:
    client: Any = llm.engine.client
    return client._core._executor._worker._assembly.runner


def graphs_of(llm: LLM) -> tuple[LazyGraphs[Any], LazyGraphs[Any]]:
    """Return the graphs of steps in which every row decodes, and of other steps."""
    runner = runner_of(llm)
    return runner._decode.drawing, runner._forward._model.graphs.graphs


def generate(llm: LLM) -> list[RequestOutput]:
    """Return outputs of many lengths, so that a step has 8 rows at first and one at last."""
    lengths = [20, 3, 11, 16, 5, 8, 14, 24]
    asked = [
        SamplingParams(
            temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=n, ignore_eos=True, top_p=0.95
        )
        for i, n in enumerate(lengths)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in workload()]
    return llm.generate(prompts, asked, use_tqdm=False)


def never(graphs: LazyGraphs[Any]) -> None:
    """The same padding, without graphs: torch rounds products of another size differently."""
    graphs._wanted = 10**9


def at_once(graphs: LazyGraphs[Any]) -> None:
    graphs._wanted, graphs._steps_between = 0, 0


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("mistral-window", {"depth": 3}),
        ("qwen3", {"kv_cache_dtype": "int8", "depth": 1}),
        ("opt", {"num_kv_blocks": 24}),
    ],
    ids=str,
)
def test_graphs_give_what_steps_give(
    name: str, more: dict[str, Any], tmp_path: Path, recorded: Recorded
) -> None:
    """Turns red when a number of the host's is baked into a graph, when a graph reads memory that a
    later one writes, or when the spare row changes."""
    write_checkpoint(BY_NAME[name], tmp_path)
    eager = recorded.start(tmp_path, **more)
    for graphs in graphs_of(eager):
        never(graphs)
    expected = generate(eager)
    assert_same(generate(eager), expected, exact=True)
    graphed = recorded.start(tmp_path, **more)
    uniform, mixed = graphs_of(graphed)
    at_once(uniform)
    at_once(mixed)
    for _ in range(2):
        assert_same(generate(graphed), expected, exact=True)
    assert set(uniform.recorded) == {1, 2, 4, 8}
    assert len(mixed.recorded) > 1
    if "num_kv_blocks" in more:
        assert graphed.engine.client.stats().preempted_total > 0


def test_eager_records_nothing(tmp_path: Path, recorded: Recorded) -> None:
    write_checkpoint(BY_NAME["llama"], tmp_path)
    generate(recorded.start(tmp_path, enforce_eager=True))
    assert not recorded.recorders


def test_a_failed_recording_ends_graphs_alone(tmp_path: Path, recorded: Recorded) -> None:
    """Turns red when a step is lost with the recording, or every later step tries again."""
    write_checkpoint(BY_NAME["llama"], tmp_path)
    expected = generate(recorded.start(tmp_path))
    llm = recorded.start(tmp_path)
    uniform = runner_of(llm)._decode
    at_once(uniform.drawing)
    compute, tried = uniform._compute_and_draw, []

    def breaks(size: int) -> Any:
        if recorded.recorders[-1]._calls is not None:
            tried.append(size)
            raise RuntimeError("not while it is recorded")
        return compute(size)

    uniform._compute_and_draw = breaks
    assert_same(generate(llm), expected, exact=True)
    assert len(tried) == 1


def test_a_size_is_recorded_when_it_came_often_and_none_was_lately() -> None:
    graphs: LazyGraphs[int] = LazyGraphs(ladder(8), wanted=2, steps_between=3)
    got = [graphs.get(size, lambda size: size) for size in (4, 4, 4, 2, 2, 2, 2, 4)]
    assert got == [None, None, 4, None, None, None, 2, 4]


def test_the_ladder_ends_where_it_is_told() -> None:
    assert ladder(0) == ()
    assert ladder(1) == (1,)
    assert ladder(20) == (1, 2, 4, 8, 16, 20)
    assert ladder(256)[-3:] == (224, 240, 256)
    graphs: LazyGraphs[int] = LazyGraphs(ladder(20))
    assert [graphs.size_for(n) for n in (1, 3, 17, 20, 21)] == [1, 4, 20, 20, None]
