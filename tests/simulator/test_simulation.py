"""`quire simulate`: reports and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.entrypoints.cli.main import main

SHORT = ("--rate", "1", "--seconds", "30")
QWEN = str(Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-0.6b")


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["simulate", *SHORT, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_trace_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = simulate(capsys)
    assert report["requests"] == 30
    assert 0.01 < float(str(report["normalized_latency_s"])) < 5


def test_equal_seeds_have_equal_hashes(capsys: pytest.CaptureFixture[str]) -> None:
    hashes = [simulate(capsys, "--trace-seed", seed)["trace_hash"] for seed in ("1", "1", "2")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_any_model_and_device_and_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", QWEN, "--accelerator", "xeon-amx-2", *SHORT, "--workload",
                 "alpaca"]) == 0  # fmt: skip
    shown = capsys.readouterr().out
    for word in ("two cores of an Intel Xeon", "TTFT", "TPOT", "KV slots", "preempted"):
        assert word in shown


def test_a_file_is_served_at_its_own_times_or_at_a_rate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"arrival_s": 10.0 * i, "prompt_tokens": 50, "output_tokens": 4})
        for i in range(5)
    ]
    path.write_text("\n".join(lines))
    assert main(["simulate", "--workload", str(path), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert main(["simulate", "--workload", str(path), "--rate", "10", "--json"]) == 0
    fast = json.loads(capsys.readouterr().out)
    assert own["simulated_s"] == pytest.approx(40, abs=1)
    assert fast["simulated_s"] < 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--accelerator", "a100"), "did you mean"),
        (("opt-12b",), "is no folder and not known"),
        (("--workload", "missing.jsonl"), "is no file"),
        (("opt-175b",), "leaves no KV block"),
        (("--num-accelerators", "7"), "cannot be shared by 7"),
        (("--workload", "translation-341", "--max-model-len", "64"), "context holds 64"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert complaint in capsys.readouterr().err
