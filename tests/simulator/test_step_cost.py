"""The cost model: the cost of a step, and the effect of each constant."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.entrypoints.simulator import StepCost, device_named, device_names
from quire.entrypoints.simulator.devices import CONSTANTS
from quire.entrypoints.simulator.models import MODEL_NAMES, model_spec

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QWEN = BENCHMARKS / "models" / "qwen3-0.6b"
A100 = device_named("a100-40")
OPT_13B = model_spec("opt-13b")


def seconds(cost: StepCost, *rows: tuple[int, int], sampled: int = 0) -> float:
    """Return the seconds of a step of rows (computed, tokens)."""
    computed, tokens = np.array(rows, np.int64).T
    return cost.seconds(computed, tokens, sampled)


@pytest.fixture
def cost() -> StepCost:
    return StepCost(A100, OPT_13B, block_size=None)


@pytest.mark.parametrize(
    ("name", "num_devices", "gigabytes", "kv_gigabytes", "slots"),
    [
        ("opt-13b", 1, 26, 12, 15_700),
        ("opt-66b", 4, 132, 21, 9_700),
        ("opt-175b", 8, 346, 264, 60_100),
    ],
)
def test_models_have_the_sizes_of_the_papers_table_1(
    name: str, num_devices: int, gigabytes: int, kv_gigabytes: int, slots: int
) -> None:
    """Turns red when weights or K/V bytes are counted wrongly."""
    cost = StepCost(A100, model_spec(name), num_devices=num_devices)
    assert cost.weight_bytes() / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert kv_gigabytes * 1e9 / cost.kv_bytes_per_token == pytest.approx(slots, rel=0.1)


def test_few_tokens_cost_what_the_weights_take_to_read(cost: StepCost) -> None:
    """Turns red when a decode of one sequence and one of a few differ by more than their K/V."""
    one, four = seconds(cost, (100, 1)), seconds(cost, *[(100, 1)] * 4)
    assert four - one == pytest.approx(3 * 101 * cost.context_s)
    assert one == pytest.approx(cost.weights_s + 101 * cost.context_s + cost.launch_s)


def test_many_tokens_cost_their_products(cost: StepCost) -> None:
    """A prompt is bound by arithmetic, and its attention by pairs of tokens."""
    short, long = seconds(cost, (0, 1000)), seconds(cost, (0, 2000))
    assert long - short == pytest.approx(1000 * cost.token_s + 1_500_500 * cost.pair_s)


def test_chunks_of_a_prompt_have_the_pairs_of_the_whole(cost: StepCost) -> None:
    """Turns red when a chunk does not see what was computed before it."""

    def attention(start: int, count: int) -> float:
        return seconds(cost, (start, count)) - count * cost.token_s - cost.launch_s

    chunks = sum(attention(start, 500) for start in range(0, 2000, 500))
    assert chunks == pytest.approx(attention(0, 2000))


def test_a_window_limits_what_is_read() -> None:
    """Turns red when a sliding layer costs as much as a full one."""
    sliding = replace(OPT_13B, windows=(128,) * OPT_13B.num_layers)
    full, short = StepCost(A100, OPT_13B), StepCost(A100, sliding)
    assert seconds(short, (1500, 1)) < seconds(full, (1500, 1))
    assert seconds(short, (1500, 1)) == pytest.approx(seconds(short, (1000, 1)))


def test_more_devices_share_the_work_and_exchange_sums() -> None:
    """Turns red when tensor parallelism is free, or buys nothing."""
    one, four = (StepCost(A100, OPT_13B, num_devices=n) for n in (1, 4))
    assert seconds(one, (100, 1)) / 4 < seconds(four, (100, 1)) < seconds(one, (100, 1))
    exchanges = 2 * OPT_13B.num_layers * A100.all_reduce_s
    assert seconds(four, (100, 1)) > one.weights_s / 4 + exchanges
    with pytest.raises(ConfigError, match="40 heads cannot be shared by 3 devices"):
        StepCost(A100, OPT_13B, num_devices=3)


def test_tiny_blocks_slow_attention_down() -> None:
    """Few sequences with loads of one token cannot fill the bandwidth; blocks of 16 can."""
    times = {
        size: seconds(StepCost(A100, OPT_13B, block_size=size), *[(500, 1)] * 4)
        for size in (1, 16, 128)
    }
    assert times[1] > 1.1 * times[16]
    assert times[16] == pytest.approx(times[128], rel=0.05)


def test_small_blocks_take_many_calls_to_copy() -> None:
    """Figure 19a of the paper: swapping is bound by calls with small blocks, by bytes with large
    ones. Turns red when a copy costs its bytes alone."""
    by_token = {
        size: StepCost(A100, OPT_13B, block_size=size).copy_s(256 // size) for size in (1, 16, 256)
    }
    assert by_token[1] == pytest.approx(16 * by_token[16], rel=0.05)
    bytes_s = 256 * StepCost(A100, OPT_13B).kv_bytes_per_token / A100.host_bytes_per_s
    assert by_token[256] == pytest.approx(bytes_s)
    assert StepCost(A100, OPT_13B).copy_s(0) == 0.0


@pytest.mark.parametrize("constant", CONSTANTS)
def test_every_constant_has_an_effect(constant: str) -> None:
    """Turns red when a constant of the table is read by nothing."""

    def times(device_name: str, factor: float) -> list[float]:
        device = device_named(device_name).scaled(constant, factor)
        cost = StepCost(device, OPT_13B, num_devices=4, block_size=1)
        rows = [[(600, 1)] * 20, [(0, 2000)]]
        return [*(seconds(cost, *row) for row in rows), cost.copy_s(4), _large(device).copy_s(4)]

    assert times("a100-40", 1.2) != times("a100-40", 1.0)


def _large(device: object) -> StepCost:
    return StepCost(device, OPT_13B, block_size=256)  # type: ignore[arg-type]


def test_devices_and_models_are_all_usable_and_others_refused() -> None:
    for device in device_names():
        for model in MODEL_NAMES:
            assert seconds(StepCost(device_named(device), model_spec(model)), (10, 1)) > 0
    with pytest.raises(ConfigError, match="did you mean a100-40"):
        device_named("a100-4")
    with pytest.raises(ConfigError, match="no folder and not known"):
        model_spec("opt-14b")


@pytest.mark.parametrize("rows", [1, 4, 16, 32])
def test_the_xeon_decodes_as_fast_as_it_was_measured(rows: int) -> None:
    """31 steps after prompts of 64 tokens, as `benchmarks/peers/cpu_table.py` measures them. Turns
    red when the device or the roofline is further than 10 % from the committed run."""
    seconds_of = StepCost(device_named("xeon-amx-2"), model_spec(str(QWEN))).seconds
    spent = sum(
        seconds_of(np.full(rows, 64 + step), np.ones(rows, np.int64), rows) for step in range(31)
    )
    assert 31 * rows / spent == pytest.approx(measured(f"decode_{rows}_tokens_per_s"), rel=0.1)


def test_the_xeon_computes_prompts_as_fast_as_it_was_measured() -> None:
    cost = StepCost(device_named("xeon-amx-2"), model_spec(str(QWEN)))
    spent = seconds(cost, *[(0, 64)] * 16, sampled=16)
    assert 16 * 64 / spent == pytest.approx(measured("prefill_tokens_per_s"), rel=0.1)


def measured(figure: str) -> float:
    path = BENCHMARKS / "results" / "cpu_turns_amx" / "quire_bfloat16.json"
    return json.loads(path.read_text())["figures"][figure]["median"]


def test_a_cpu_reads_and_multiplies_one_after_the_other() -> None:
    """Turns red when a device that does not overlap costs the longer of both."""
    cpu = device_named("xeon-amx-2")
    plain, overlapped = (StepCost(device, OPT_13B) for device in (cpu, replace(cpu, overlaps=True)))
    assert seconds(plain, *[(9, 1)] * 32) > 1.2 * seconds(overlapped, *[(9, 1)] * 32)


def test_only_a_device_that_is_the_host_itself_waits_for_it() -> None:
    """Turns red when GPUs wait for the host, or a small model on a CPU does not."""
    for name in device_names():
        cost = StepCost(device_named(name), OPT_13B)
        assert cost.waits_for_host == (not cost.device.overlaps)
        changed = cost.host_s(0, changes_rows=True)
        assert changed == 12 * OPT_13B.num_layers * cost.device.host_change_s
        assert cost.host_s(2, changes_rows=False) == 2 * cost.device.host_enter_s
