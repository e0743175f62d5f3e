"""Layers read facts of rows that no model file names, in captured steps too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.platform import detect_platform
from quire.bundled import bundled_model_path
from quire.compute.attention.reference import ReferenceAttention
from quire.compute.layers import LayerFactory
from quire.compute.layers.mlp import GatedMLP
from quire.compute.worker import Worker
from quire.compute.worker import load as loading
from quire.config.settings import EngineSettings
from quire.config.startup import StartupPlan, plan_startup
from quire.ops import ALL_OPS, force_isa
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import EnterRow, ForkRow, StepPlan
from tests.runner.late_device import keep_rows_on_device
from tests.runner.recorder import CallRecorder
from tests.worker.test_two_phases import make_settings

KERNELS = any(p.unavailable(detect_platform()) is None for p in ALL_OPS["linear"].providers)
NUM_ADAPTERS = 4
SETTINGS = EngineSettings(
    model=str(bundled_model_path()), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128,
    num_kv_blocks=64, dtype="float32",
)  # fmt: skip
PROMPTS = ([5, 9, 200, 31, 7], [77, 12], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [42] * 7)


def biases(size: int) -> torch.Tensor:
    """Large enough that each adapter answers otherwise; none is zero."""
    return torch.randn(NUM_ADAPTERS, size, generator=torch.Generator().manual_seed(5))


class AdaptedMLP:
    """An MLP that adds the bias of each token's adapter."""

    def __init__(self, mlp: GatedMLP, ops: Any, column: Any, table: torch.Tensor) -> None:
        self.gate_up, self.down = mlp.gate_up, mlp.down
        self._mlp, self._ops, self._column, self._table = mlp, ops, column, table

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self._ops.embedding(self._column.values, self._table)
        return self._ops.add(self._mlp(x), chosen)


class AdaptingFactory(LayerFactory):
    """Makes MLPs with adapters; `only` is one that all tokens get, whatever their rows say."""

    only: int | None = None

    def gated_mlp(self, size: int, *args: Any, **kwargs: Any) -> Any:
        table = biases(size)
        if self.only is not None:
            table = table[self.only].expand(NUM_ADAPTERS, -1).contiguous()
        mlp = super().gated_mlp(size, *args, **kwargs)
        return AdaptedMLP(mlp, self._ops, self._columns.column("adapter"), table)


@pytest.fixture(scope="module")
def plan() -> StartupPlan:
    return plan_startup(SETTINGS, detect_platform())


@pytest.fixture(autouse=True)
def adapting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LayerFactory", AdaptingFactory)


class Rows:
    """A worker and the plans of a few rows."""

    def __init__(
        self, plan: StartupPlan, *, max_captured_rows: int, on_device: bool, **more: Any
    ) -> None:
        settings = replace(
            make_settings(plan, device_state=on_device), max_captured_rows=max_captured_rows, **more
        )
        self.worker = Worker(settings)
        self.worker.allocate(64, 128)
        self._groups = plan.resolved.layout.groups
        self._step_id = 0

    @property
    def runner(self) -> Any:
        assert self.worker._assembly is not None
        return self.worker._assembly.runner

    def enter(self, slot: int, prompt: Sequence[int], adapter: int) -> EnterRow:
        """A row that has four blocks of its own in each group."""
        tables = tuple(
            np.arange(4, dtype=np.int32) + 4 * (slot + 4 * group)
            for group in range(len(self._groups))
        )
        return EnterRow(
            slot, np.array(prompt, np.int32), len(prompt), 0, tables,
            SamplingParams(temperature=0, max_tokens=40), 0, 0, adapter=adapter,
        )  # fmt: skip

    def step(self, **parts: Any) -> dict[int, int]:
        """The tokens that a plan's step draws, by slot."""
        result = self.worker.execute(StepPlan(self._step_id, **parts))
        self._step_id += 1
        assert not result.failed
        return dict(zip(result.slots.tolist(), result.token_ids.tolist(), strict=True))

    def begin(self, rows: Sequence[EnterRow], leave: Sequence[int] = ()) -> dict[int, int]:
        slots = [row.slot for row in rows]
        counts = [len(row.token_ids) for row in rows]
        return self.step(
            leave=np.array(leave, np.int32), enter=tuple(rows),
            delta_slot=np.array(slots, np.int32), delta_tokens=np.array(counts, np.int32),
        )  # fmt: skip

    def decode(self, slots: Sequence[int], num_steps: int) -> dict[int, list[int]]:
        """Tokens of rows that go on by one token per step."""
        ones = np.ones(len(slots), np.int32)
        drawn = [self.step(delta_slot=np.array(slots, np.int32), delta_tokens=ones)]
        drawn += [self.step() for _ in range(num_steps - 1)]
        return {slot: [step[slot] for step in drawn] for slot in slots}


def alone(plan: StartupPlan, prompt: Sequence[int], adapter: int, num_tokens: int) -> list[int]:
    """Return the answer of a row when every token gets its adapter, whatever rows say."""
    AdaptingFactory.only = adapter
    try:
        rows = Rows(plan, max_captured_rows=0, on_device=False)
    finally:
        AdaptingFactory.only = None
    first = rows.begin([rows.enter(0, prompt, 0)])
    return [first[0], *rows.decode([0], num_tokens - 1)[0]]


@pytest.fixture(params=["eager", "captured", "rows on a device", "recorded on a device"])
def rows(
    request: pytest.FixtureRequest, plan: StartupPlan, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rows]:
    is_captured, on_device = request.param == "captured", request.param.endswith("device")
    if is_captured and not KERNELS:
        pytest.skip("no compiled kernels here")
    if request.param == "recorded on a device":
        yield from recorded_rows(plan, monkeypatch)
        return
    made = Rows(plan, max_captured_rows=4 if is_captured else 0, on_device=on_device)
    yield made
    if is_captured:
        runner = made.runner
        assert runner._decode.drawing.recorded
        assert runner._forward._model.graphs is not None


def recorded_rows(plan: StartupPlan, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    """Rows of a device whose graphs a recorder of torch's operations replays."""
    recorders: list[CallRecorder] = []
    run = ReferenceAttention.run

    def make_recorder(state: Any, kv: Any) -> CallRecorder:
        recorders.append(CallRecorder([state.arena, kv.pages]))
        monkeypatch.setattr(ReferenceAttention, "run", recorders[-1].opaque(run))
        return recorders[-1]

    with monkeypatch.context() as patched:
        keep_rows_on_device(patched, make_recorder=make_recorder)
        made = Rows(
            plan, max_captured_rows=4, on_device=True,
            forced_ops=force_isa("none"), attention_backend="reference",
        )  # fmt: skip
    graphs = [made.runner._decode.drawing, made.runner._forward._model.graphs.graphs]
    for each in graphs:
        each._wanted = each._steps_between = 0
    yield made
    assert all(each.recorded for each in graphs)


def test_each_row_gets_its_adapter(rows: Rows, plan: StartupPlan) -> None:
    """Turns red when a graph keeps the adapters of the rows that it was captured with, when a slot
    keeps that of the row before, and when prompts take those of other tokens."""
    adapters = [2, 0, 3, 1]
    first = rows.begin([rows.enter(s, PROMPTS[s], adapters[s]) for s in (0, 1, 2)])
    later = rows.decode([0, 1, 2], 6)
    for slot in (0, 1, 2):
        expected = alone(plan, PROMPTS[slot], adapters[slot], 7)
        assert [first[slot], *later[slot]] == expected
    # One row is replaced by another one with another adapter, while the others go on.
    second = rows.begin([rows.enter(1, PROMPTS[3], adapters[3])], leave=[1])
    more = rows.decode([0, 1, 2], 5)
    assert [second[1], *more[1]] == alone(plan, PROMPTS[3], adapters[3], 6)
    for slot in (0, 2):
        whole = [first[slot], *later[slot], second[slot], *more[slot]]
        assert whole == alone(plan, PROMPTS[slot], adapters[slot], 13)


def test_adapters_answer_differently(plan: StartupPlan) -> None:
    """Turns red when the other tests could not see a wrong adapter."""
    answers = {tuple(alone(plan, PROMPTS[0], adapter, 7)) for adapter in range(NUM_ADAPTERS)}
    assert len(answers) == NUM_ADAPTERS


def test_a_fork_keeps_the_adapter(rows: Rows, plan: StartupPlan) -> None:
    """Turns red when a row that branches off computes with the adapter of its slot's last row."""
    rows.begin([rows.enter(2, PROMPTS[1], 1), rows.enter(3, PROMPTS[1], 1)])
    row = rows.enter(0, PROMPTS[0], 2)
    first = rows.step(
        leave=np.array([2, 3], np.int32), enter=(row,),
        delta_slot=np.array([0], np.int32), delta_tokens=np.array([5], np.int32),
        forks=(ForkRow(0, 3, 1),),
    )  # fmt: skip
    own = np.arange(4, dtype=np.int32) + 12  # the fork writes into blocks of its own
    expected = alone(plan, PROMPTS[0], 2, 4)
    assert first == {0: expected[0], 3: expected[0]}
    second = rows.step(
        copy_src=np.array([0], np.int32), copy_dst=own[:1],
        table_group=np.zeros(4, np.int32), table_slot=np.full(4, 3, np.int32),
        table_index=np.arange(4, dtype=np.int32), table_block=own,
        delta_slot=np.array([0, 3], np.int32), delta_tokens=np.ones(2, np.int32),
    )  # fmt: skip
    third = rows.step()
    assert [second[3], third[3]] == expected[1:3]


def test_a_model_that_asks_for_none_pays_nothing(
    plan: StartupPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when every step gathers columns that no layer reads."""
    monkeypatch.setattr(loading, "LayerFactory", LayerFactory)
    rows = Rows(plan, max_captured_rows=0, on_device=False)
    loaded = rows.worker._loaded
    assert loaded is not None
    columns = loaded.columns
    assert columns.names == ()
    assert columns.gather(lambda name: pytest.fail(name), torch.zeros(1)) == {}
