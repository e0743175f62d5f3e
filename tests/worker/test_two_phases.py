"""A worker that measures before it takes the memory of its KV pool, on a CPU that plays a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.base.errors import ConfigError, EngineError
from quire.base.platform import detect_platform
from quire.bundled import bundled_model_path
from quire.compute.kv_transfer.block_copies import StagedCopies
from quire.compute.runner.device.queue import HostQueue
from quire.compute.runner.forward import ForwardPass
from quire.compute.worker import Worker, WorkerSettings
from quire.compute.worker.largest_steps import LargestSteps
from quire.config.memory.measured import render_measured, replan
from quire.config.resolve import resolve
from quire.config.settings import EngineSettings
from quire.config.startup import StartupPlan, plan_startup
from quire.protocol.control import MeasuredMemory
from tests.config.specs import GIB, make_gpu_platform, make_spec
from tests.kv_cache.model import make_layout

SETTINGS = EngineSettings(
    model=str(bundled_model_path()), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128,
    num_kv_blocks=64, dtype="float32",
)  # fmt: skip


PLACES = pytest.mark.parametrize("on_device", [False, True], ids=["host rows", "device rows"])


class Meter:
    """Tells what it was made with, and notes what was asked when."""

    total, free = 80 * GIB, 79 * GIB

    def __init__(self, refused: int = 0) -> None:
        self.asked: list[str] = []
        self._refused = refused

    def tensors(self) -> int:
        return 10 * GIB

    def held(self) -> int:
        self.asked.append("held")
        return 11 * GIB

    def watch(self) -> None:
        self.asked.append("watch")

    def most_held(self) -> int:
        self.asked.append("most_held")
        return 13 * GIB

    def num_refused(self) -> int:
        return self._refused


def make_settings(
    plan: StartupPlan, *, device_state: bool = False, num_host_blocks: int = 0
) -> WorkerSettings:
    chosen = plan.resolved.settings
    return WorkerSettings(
        chosen=replace(chosen, num_host_blocks=num_host_blocks, num_threads=1, quiet=True),
        spec=plan.resolved.spec,
        folder=Path(plan.folder),
        layout=plan.resolved.layout,
        platform=plan.resolved.platform,
        device_state=device_state,
        forced_ops={},
        attention_backend=None,
        preferred_attention=None,
        max_captured_rows=0,
    )


@pytest.fixture(scope="module")
def plan() -> StartupPlan:
    return plan_startup(SETTINGS, detect_platform())


@PLACES
def test_the_largest_steps_are_computed_and_measured(plan: StartupPlan, on_device: bool) -> None:
    meter = Meter()
    worker = Worker(make_settings(plan, device_state=on_device), meter)
    measured = worker.measure_memory()
    # A pool that is only there for the measurement is not counted.
    steps = LargestSteps(4, 64, 128, plan.resolved.layout)
    pool = steps.num_blocks * plan.resolved.layout.page_bytes
    assert measured == MeasuredMemory(80 * GIB, 79 * GIB, 10 * GIB, 11 * GIB, 13 * GIB - pool)
    assert meter.asked == ["held", "watch", "most_held", "held"]


@PLACES
def test_nothing_of_the_measurement_stays(
    plan: StartupPlan, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pool and rows would be missing from the memory that the real ones take."""
    worker = Worker(make_settings(plan, device_state=on_device), Meter())
    seen: list[weakref.ref[torch.Tensor]] = []
    assemble = Worker._assemble

    def watched(self: Worker, size: object) -> None:
        assemble(self, size)  # type: ignore[arg-type]
        assert self._assembly is not None
        seen.append(weakref.ref(self._assembly.runner._changes._pages))

    monkeypatch.setattr(Worker, "_assemble", watched)
    worker.measure_memory()
    assert [ref() for ref in seen] == [None]


def test_a_cpu_measures_nothing(plan: StartupPlan) -> None:
    assert Worker(make_settings(plan)).measure_memory() is None


@PLACES
def test_what_swapping_costs_is_measured_without_a_failure(
    plan: StartupPlan, on_device: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy that fails takes no time, and would seem cheap."""
    worker = Worker(make_settings(plan, device_state=on_device, num_host_blocks=8))
    worker.allocate(16, 128)
    costs = worker.measure_recovery()
    assert costs.seconds_per_token > 0
    assert costs.seconds_per_block > 0
    assert not caplog.records


def test_blocks_are_copied_in_the_order_of_the_steps(
    plan: StartupPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of it a GPU copies blocks by numbers that are not there yet."""
    seen: list[str] = []

    @contextmanager
    def computing(_: HostQueue) -> Generator[None]:
        seen.append("in")
        yield
        seen.append("out")

    monkeypatch.setattr(HostQueue, "computing", computing)
    monkeypatch.setattr(StagedCopies, "out", lambda *_: seen.append("copy"))
    worker = Worker(make_settings(plan, device_state=True, num_host_blocks=8))
    worker.allocate(16, 128)
    worker.measure_recovery()
    copies = [seen[at - 1 : at + 2] for at, each in enumerate(seen) if each == "copy"]
    assert copies
    assert all(each == ["in", "copy", "out"] for each in copies)


def test_steps_that_do_not_fit_say_what_to_lower(
    plan: StartupPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds whether the runner saves itself by halves or not."""
    with pytest.raises(ConfigError, match=r"64 tokens does not fit.*Lower max_num_batched_tokens"):
        Worker(make_settings(plan), Meter(refused=1)).measure_memory()

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Advice follows.")

    worker = Worker(make_settings(plan), Meter())
    monkeypatch.setattr(Worker, "_assemble", out_of_memory)
    with pytest.raises(ConfigError, match=r"memory beside the model: CUDA out of memory\. Lower"):
        worker.measure_memory()
    with pytest.raises(ConfigError, match=r"KV cache of 5 blocks.*Lower gpu_memory_utilization"):
        worker.allocate(5, 64)


def test_a_device_that_computes_nothing_does_not_start(
    plan: StartupPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first request would find out."""

    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(ForwardPass, "_compute", broken)
    with pytest.raises(EngineError, match=r"computes no step: .*no kernel image"):
        Worker(make_settings(plan), Meter()).measure_memory()


@pytest.mark.parametrize(
    ("seqs", "tokens", "context", "first"),
    [(4, 64, 128, [16, 16, 16, 16]), (3, 8, 128, [3, 3, 2]), (2, 64, 8, [7, 7]), (1, 5, 2, [1])],
)
def test_the_largest_steps_have_all_tokens_and_all_rows(
    seqs: int, tokens: int, context: int, first: list[int]
) -> None:
    steps = LargestSteps(seqs, tokens, context, make_layout(((None, 1), (8, 1)), 4))
    prompt, decode = steps.plans()
    assert prompt.delta_tokens.tolist() == first
    assert [len(row.token_ids) for row in prompt.enter] == first
    assert decode.delta_tokens.tolist() == [1] * seqs
    per_row = [len(table) for table in prompt.enter[0].block_tables]
    assert per_row == [-(-(max(first) + 1) // 4)] * 2
    assert steps.num_blocks == sum(per_row)


def test_blocks_are_counted_anew_from_what_was_measured() -> None:
    asked, spec = EngineSettings(), make_spec(num_layers=32, head_dim=128, num_kv_heads=8)
    planned = resolve(asked, spec, None, make_gpu_platform(80 * GIB))
    planned = replace(planned, layout=planned.layout)
    measured = MeasuredMemory(80 * GIB, 79 * GIB, 10 * GIB, 11 * GIB, 13 * GIB)
    settled = replan(asked, planned, measured)
    fixed = settled.memory.fixed
    assert (fixed.weights, fixed.runtime, fixed.activations) == (10 * GIB, GIB, 2 * GIB)
    left = 72 * GIB - 13 * GIB - fixed.graphs
    whole = planned.settings.max_num_seqs * planned.settings.max_model_len // 16
    assert settled.settings.num_kv_blocks == min(left // settled.memory.page, whole)
    line = render_measured(planned, settled)
    assert "weights 10.0 GiB, process 1.00 GiB, a step of 8,192 tokens 2.00 GiB" in line
    assert "\n" not in line


def test_a_context_that_does_not_fit_after_all_is_shortened() -> None:
    spec = make_spec(num_layers=32, head_dim=128, num_kv_heads=8, max_context=100_000)
    asked = EngineSettings()
    planned = resolve(asked, spec, None, make_gpu_platform(80 * GIB))
    assert planned.settings.max_model_len == 100_000
    tight = MeasuredMemory(80 * GIB, 79 * GIB, 60 * GIB, 61 * GIB, 64 * GIB)
    settled = replan(asked, planned, tight)
    assert 2 <= settled.settings.max_model_len < 100_000
    assert f"max_model_len {settled.settings.max_model_len:,}" in render_measured(planned, settled)
    wanted = EngineSettings(max_model_len=100_000)
    with pytest.raises(ConfigError, match="Give at most max_model_len="):
        replan(wanted, planned, tight)
    nothing_left = replace(tight, peak=73 * GIB)
    with pytest.raises(ConfigError, match="does not fit"):
        replan(asked, planned, nothing_left)
