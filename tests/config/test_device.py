"""Settings that are resolved on a machine with a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.config import ModelSpec
from quire.config.render_plan import render_plan
from quire.config.resolve import Resolved, resolve
from quire.config.settings import EngineSettings
from tests.config.specs import GIB, make_gpu_platform, make_platform, make_spec

ALL = EngineSettings()


def reason(plan: Resolved, name: str) -> str:
    return next(decision.reason for decision in plan.decisions if decision.name == name)


def test_auto_takes_the_gpu_and_says_which() -> None:
    plan = resolve(ALL, make_spec(), None, make_gpu_platform())
    assert plan.settings.device == plan.platform.device == "cuda"
    assert reason(plan, "device") == "Test GPU, SM 90, driver 570.86 for CUDA 12.8"
    asked = resolve(EngineSettings(device="cpu"), make_spec(), None, make_gpu_platform())
    assert asked.settings.device == asked.platform.device == "cpu"


def test_auto_goes_on_without_a_gpu_that_cannot_serve() -> None:
    platform = make_gpu_platform(problem="the driver is too old: update it")
    plan = resolve(ALL, make_spec(), None, platform)
    assert plan.settings.device == "cpu"
    assert "too old: update it" in reason(plan, "device")
    none = replace(make_platform(), gpu_problem="there is no GPU: install the driver")
    assert reason(resolve(ALL, make_spec(), None, none), "device") == "there is no GPU"
    with pytest.raises(ConfigError, match=r"device='cuda'.*too old: update it.*device='cpu'"):
        resolve(EngineSettings(device="cuda"), make_spec(), None, platform)


def test_a_float32_checkpoint_is_computed_in_bfloat16_on_a_gpu() -> None:
    platform = make_gpu_platform()
    plan = resolve(ALL, make_spec(dtype="float32"), None, platform)
    assert plan.settings.dtype == "bfloat16"
    assert resolve(ALL, make_spec(dtype="float16"), None, platform).settings.dtype == "float16"
    asked = resolve(EngineSettings(dtype="float32"), make_spec(dtype="float32"), None, platform)
    assert asked.settings.dtype == "float32"


def test_a_gpu_gives_what_is_left_of_nine_tenths() -> None:
    """gpu_memory_utilization is a share of the device, as vLLM's users expect."""
    spec = make_spec(num_layers=32, head_dim=128, num_kv_heads=8, max_context=100_000)
    plan = resolve(ALL, spec, None, make_gpu_platform(80 * GIB))
    assert plan.memory.budget == 72 * GIB
    assert plan.memory.budget - plan.memory.page < plan.memory.total <= plan.memory.budget
    half = resolve(
        EngineSettings.from_options({"gpu_memory_utilization": 0.5}),
        spec,
        None,
        make_gpu_platform(80 * GIB),
    )
    assert half.memory.budget == 40 * GIB
    assert "0.5" in reason(half, "num_kv_blocks")


def test_what_other_programs_have_is_not_planned() -> None:
    plan = resolve(ALL, make_spec(), None, make_gpu_platform(80 * GIB, free_bytes=10 * GIB))
    assert plan.memory.budget is not None
    assert 9 * GIB < plan.memory.budget < 10 * GIB
    with pytest.raises(ConfigError, match=r"does not fit.*other programs leave 1\.00 GiB"):
        resolve(ALL, make_spec(), None, make_gpu_platform(80 * GIB, free_bytes=GIB))


def test_advice_names_what_fills_the_memory() -> None:
    """Swap space lies in the host's memory: to lower it frees nothing on a GPU."""
    settings = EngineSettings(swap_space=GIB)
    with pytest.raises(ConfigError, match="does not fit") as on_gpu:
        resolve(settings, make_spec(), None, make_gpu_platform(80 * GIB, free_bytes=GIB))
    assert "swap" not in str(on_gpu.value)
    assert "max_num_batched_tokens or max_num_seqs" in str(on_gpu.value)
    with pytest.raises(ConfigError, match="does not fit") as on_cpu:
        resolve(settings, make_spec(), None, replace(make_platform(), free_bytes=GIB))
    assert "max_num_seqs or swap_space" in str(on_cpu.value)


def test_a_share_too_small_is_named_and_to_be_raised() -> None:
    """Turns red when the error blames the model for a share that the user gave."""
    small = EngineSettings.from_options({"gpu_memory_utilization": 0.001})
    with pytest.raises(ConfigError, match=r"\(0\.1% of .*raise memory_utilization\.$"):
        resolve(small, make_spec(), None, make_gpu_platform(80 * GIB))


@pytest.mark.parametrize(
    ("spec", "given", "free", "advice"),
    [
        (make_spec(), {"memory_utilization": 0.01}, 20 * GIB, "Free some memory, or raise memory"),
        (make_spec(), {"max_num_batched_tokens": 200_000}, GIB, "Free some memory, or lower max_"),
        (make_spec(), {}, GIB // 4, "Free some memory, raise memory_utilization, lower max"),
        (make_spec(num_parameters=10**10), {}, 10 * GIB, "memory, or use quantization='int8' or"),
        (make_spec(num_parameters=10**10), {}, 4 * GIB, "some memory, or use a smaller model."),
    ],
)
def test_only_advice_that_helps_is_given(
    spec: ModelSpec, given: dict[str, Any], free: int, advice: str
) -> None:
    """Fault: int4 was advised for 10 MiB of weights, and the process was called activations."""
    with pytest.raises(ConfigError, match=r"a process of 512\.0 MiB") as found:
        resolve(EngineSettings(**given), spec, None, make_platform(free))
    assert advice in str(found.value)


def test_a_context_that_does_not_fit_is_told_with_all_that_it_takes() -> None:
    """Fault: the advice followed "the KV cache can have 0": tables were not named."""
    with pytest.raises(ConfigError, match=r"needs \d+ KV blocks .* tables of .* are left for both"):
        resolve(EngineSettings(max_model_len=10**9), make_spec(), None, make_platform())
    few = EngineSettings(max_model_len=100_000, num_kv_blocks=5)
    with pytest.raises(ConfigError, match=r"and the KV cache can have 5\. Give at most .*=80,"):
        resolve(few, make_spec(), None, make_platform())


def test_what_does_not_fit_is_told_of_fewer_bits() -> None:
    """Turns red when the advice is what is set already."""
    advice = {"int8": "use quantization='int4', a smaller", "int4-sym": "use a smaller"}
    for quantization, words in advice.items():
        with pytest.raises(ConfigError, match=words):
            resolve(
                EngineSettings(quantization=quantization),
                make_spec(num_parameters=50 * 10**9),
                None,
                make_gpu_platform(80 * GIB),
            )


def test_a_gpu_without_memory_of_its_own_is_planned_with_the_hosts() -> None:
    plan = resolve(ALL, make_spec(), None, make_gpu_platform(0, free_bytes=0))
    host = make_platform()
    assert plan.memory.budget == int(host.free_bytes * 0.97)


def test_swap_space_is_the_hosts_memory() -> None:
    settings = EngineSettings(swap_space=4 * GIB)
    plan = resolve(settings, make_spec(), None, make_gpu_platform())
    assert plan.memory.fixed.swap == 0
    assert plan.settings.num_host_blocks * plan.memory.page == 4 * GIB
    with pytest.raises(ConfigError, match="swap_space of 9"):
        resolve(EngineSettings(swap_space=9 * GIB), make_spec(), None, make_gpu_platform())


def test_larger_gpus_compute_more_at_once() -> None:
    large = resolve(ALL, make_spec(), None, make_gpu_platform(141 * GIB)).settings
    small = resolve(ALL, make_spec(), None, make_gpu_platform(24 * GIB)).settings
    assert (large.max_num_seqs, large.max_num_batched_tokens) == (1024, 8192)
    assert (small.max_num_seqs, small.max_num_batched_tokens) == (256, 2048)


def test_graphs_are_held_back_unless_turned_off() -> None:
    some = resolve(ALL, make_spec(), None, make_gpu_platform())
    none = resolve(EngineSettings(enforce_eager=True), make_spec(), None, make_gpu_platform())
    assert some.memory.fixed.graphs > 0
    assert none.memory.fixed.graphs == 0


def test_the_report_names_the_gpu_and_fits_a_screen() -> None:
    report = render_plan(resolve(ALL, make_spec(), None, make_gpu_platform()))
    assert "Test GPU" in report
    assert "graphs" in report
    assert len(report.splitlines()) <= 25
    on_cpu = render_plan(resolve(ALL, make_spec(), None, make_platform()))
    assert "graphs" not in on_cpu
