"""`quire plan --workload`: limits, the fewest devices, what breaks, and tuned flags."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.parser import CommandParser
from quire.entrypoints.cli.serve import add_arguments
from quire.entrypoints.simulator import Served, StepCost, device_named
from quire.entrypoints.simulator.memory import num_kv_blocks
from quire.entrypoints.simulator.models import model_spec
from quire.entrypoints.simulator.planner import (
    Capacity,
    parse_slo,
    plan_capacity,
    render_capacity,
    tune,
)
from quire.entrypoints.simulator.planner import capacity as capacity_module
from quire.entrypoints.simulator.workloads import TraceRequest, draw_trace

SPEC = model_spec("opt-13b")
SLO = parse_slo("ttft=1s,tpot=60ms")


def make_cost(device: str, degree: int) -> StepCost:
    return StepCost(device_named(device), SPEC, num_devices=degree)


def trace(rate: float, count: int = 16) -> list[TraceRequest]:
    seconds = count / rate
    return draw_trace("alpaca", rate=rate, seconds=seconds, seed=0, max_model_len=2048)


def plan(
    work: list[TraceRequest], *devices: str, slo: str = "ttft=1s,tpot=60ms", degree: int = 1
) -> Capacity:
    return plan_capacity(work, parse_slo(slo), make_cost, devices, (degree,))


def served(first: list[float], end: list[float], tokens: int = 11) -> Served:
    count = len(first)
    return Served(
        np.zeros(count), np.array(first), np.array(end), np.full(count, tokens), 1.0, 0, 1, 1.0
    )


def test_limits_count_requests_that_keep_all_of_them() -> None:
    """The first keeps both; the second is late; the third is slow. Turns red when one limit hides
    the other."""
    run = served([0.5, 2.0, 0.5], [1.0, 2.5, 1.5])
    assert SLO.kept(run) == pytest.approx({"ttft": 2 / 3, "tpot": 2 / 3})
    assert SLO.kept_all(run) == pytest.approx(1 / 3)
    assert parse_slo("e2e=2s").kept_all(run) == pytest.approx(2 / 3)
    assert parse_slo("ttft=500ms").strain(served([0.25], [1])) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=1", "ttft=-1s", "ttft=infs", "tbt=1s", "ttft=1s,ttft=2s"]
)
def test_limits_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Give each of ttft, tpot, e2e once"):
        parse_slo(text)


def test_the_fewest_servers_are_found_and_one_less_misses_the_limits() -> None:
    """Turns red when the number of servers has nothing to do with the load."""
    busy, limits = trace(300, 120), "ttft=200ms,tpot=60ms"
    few, many = plan(trace(2), "a100-80"), plan(busy, "a100-80", slo=limits)
    assert few.options[0].num_devices == 1 < many.options[0].num_devices
    assert all(option.kept >= 0.99 for option in (*few.options, *many.options))
    replica = capacity_module._replica(make_cost("a100-80", 1), {})
    fewer = replica.serve(busy, many.options[0].replicas - 1)
    assert parse_slo(limits).kept_all(fewer) < 0.99


def test_what_breaks_and_goodput_are_those_of_the_first_option() -> None:
    found = plan(trace(20), "h100", "a100-80")
    assert [option.device for option in found.options] == ["h100", "a100-80"]
    rates = [load.rate for load in found.loads]
    assert rates == sorted(rates)
    assert all(load.goodput == pytest.approx(load.kept * load.rate) for load in found.loads)
    assert found.breaks.startswith(("nothing", "ttft", "tpot"))
    assert "first breaks" in render_capacity(found)


def test_devices_that_cannot_serve_say_why() -> None:
    """Turns red when a device is left out silently."""
    found = plan(trace(2), "a100-40", "h100", slo="tpot=15ms")
    assert "a request alone misses tpot" in found.unfit["1 x a100-40"]
    with pytest.raises(ConfigError, match=r"No device serves this workload within ttft ≤ 0\.001 s"):
        plan(trace(2), "a100-40", slo="ttft=1ms")
    large = model_spec("opt-175b")
    with pytest.raises(ConfigError, match="leave no room for a KV cache"):
        plan_capacity(
            trace(2), SLO, lambda d, n: StepCost(device_named(d), large, num_devices=n), ["a100-40"]
        )


def test_tuned_settings_are_no_worse_and_are_flags_of_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns red when a flag is misspelt, or trials exceed 64."""
    monkeypatch.setattr(_sized(), "BUDGETS", (256, 2048))
    monkeypatch.setattr(_sized(), "SEQUENCES", (64,))
    work = trace(10)
    best = plan(work, "a100-80").options[0]
    tuned = tune(work, SLO, make_cost("a100-80", best.degree), {"max_model_len": 2048}, best)
    assert tuned.strain <= tuned.strain_before
    assert tuned.trials == 9
    parser = CommandParser(prog="quire serve")
    add_arguments(parser)
    parser.parse_args(tuned.flags.split())


def _sized() -> Any:
    return importlib.import_module("quire.entrypoints.simulator.planner.tune")


def test_the_grid_has_at_most_64_trials() -> None:
    module = _sized()
    size = 1
    for values in (module.CACHING, module.POLICIES, module.SEQUENCES, module.BUDGETS):
        size *= len(values)
    assert size <= module.MAX_TRIALS == 64


def test_the_command_prints_json_text_and_a_plot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, plot = tmp_path / "trace.jsonl", tmp_path / "plot.svg"
    lines = [
        json.dumps({"arrival_s": 0.5 * i, "prompt_tokens": 90, "output_tokens": 20})
        for i in range(8)
    ]
    path.write_text("\n".join(lines))
    base = ["plan", "opt-13b", "--workload", str(path), "--accelerators", "a100-80"]
    assert main([*base, "--json", "--plot", str(plot)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"][0]["num_devices"] == 1
    assert found["requests"] == 8
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    assert main([*base, "--slo", "ttft=2s"]) == 0
    text = capsys.readouterr().out
    assert "when the traffic doubles, first breaks" in text
    assert main([*base, "--slo", "ttft=2"]) == 2
    assert main([*base, "--memory"]) == 2


def test_a_cache_in_fewer_bits_has_more_blocks() -> None:
    """Fault: time was counted for one byte per number, and room for two."""
    device, spec = device_named("a100-80"), model_spec("opt-13b")
    wide, narrow = (StepCost(device, spec, num_devices=1, kv_bytes=n) for n in (2, 1))
    assert num_kv_blocks(narrow) == pytest.approx(2 * num_kv_blocks(wide), abs=1)
