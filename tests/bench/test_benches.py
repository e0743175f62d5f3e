"""The benchmarks on a tiny model: they run, and their records add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError, EngineError
from quire.entrypoints.bench.lengths import LengthRange
from quire.entrypoints.bench.machine import LimitProbe, describe_machine, measure_limits
from quire.entrypoints.bench.record import new_record
from quire.entrypoints.bench.throughput import ThroughputOptions, generate_exactly, run_throughput
from quire.entrypoints.cli.main import main
from quire.entrypoints.llm import LLM

SMALL = ["--load-format", "dummy", "--max-model-len", "64", "--num-threads", "1", "--quiet"]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_throughput_counts_the_tokens_of_its_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens per second of the wrong number of tokens."""
    file = tmp_path / "new" / "throughput.json"
    arguments = ["--num-prompts", "3", "--input-len", "5", "--output-len", "4-6", "--repeats", "2"]
    status = main(
        ["bench", "throughput", *arguments, "--no-limits", "--output-json", str(file), *SMALL]
    )
    shown, record = capsys.readouterr(), read(file)
    assert status == 0
    assert shown.out.startswith("Throughput: ")
    work, figures = record["workload"], record["figures"]
    assert work["num_prompt_tokens"] == 15
    assert 12 <= work["num_output_tokens"] <= 18
    for seconds, rate in zip(
        figures["elapsed_s"]["values"], figures["output_tokens_per_s"]["values"], strict=True
    ):
        assert seconds * rate == pytest.approx(work["num_output_tokens"])
    assert len(figures["elapsed_s"]["values"]) == 2
    assert record["settings"]["max_model_len"] == 64
    assert record["machine"]["num_cores"] >= 1
    assert record["command"][0] == "quire"
    assert record["limits"] is None


def test_latency_leaves_its_warm_up_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latency.json"
    arguments = ["--batch-size", "2", "--input-len", "4", "--output-len", "3"]
    turns = ["--num-iters", "3", "--num-iters-warmup", "1", "--no-limits"]
    status = main(["bench", "latency", *arguments, *turns, "--output-json", str(file), *SMALL])
    assert status == 0
    assert "50% percentile latency" in capsys.readouterr().out
    assert len(read(file)["figures"]["latency_s"]["values"]) == 3


def test_lengths_beyond_the_context_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input-len", "60", "--output-len", "10", "--no-limits"]
    assert main(["bench", "latency", *arguments, *SMALL]) == 2
    assert "exceed max_model_len=64" in capsys.readouterr().err


def test_a_request_that_gives_too_few_tokens_fails_the_benchmark() -> None:
    """Refused requests would count as very fast ones."""
    with (
        LLM(load_format="dummy", max_model_len=16, num_threads=1, quiet=True) as llm,
        pytest.raises(EngineError, match="gave 0 of 4 tokens"),
    ):
        generate_exactly(llm, [[1] * 20, [1]], [4, 4], show_progress=False)


def test_a_record_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    options = ThroughputOptions(
        prompts=LengthRange(3, 3),
        outputs=LengthRange(2, 2),
        num_prompts=1,
        max_output_len=None,
        repeats=1,
        seed=0,
        show_progress=False,
        with_limits=False,
    )
    settings = {"load_format": "dummy", "max_model_len": 32, "num_threads": 1, "quiet": True}
    record = run_throughput(options, settings, ["here"])
    with pytest.raises(ConfigError, match=str(tmp_path)):
        record.save(tmp_path)


def test_a_record_has_no_folders_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "models" / "small", Path(__file__)
    inside.mkdir(parents=True)
    workload = {
        "models": [str(inside), {"other": outside}],
        "route": "/v1/completions",
        "text": "/s> " * 99,
    }
    record = new_record(
        "any", ["run", str(outside)], None, None, seed=0, workload=workload, figures={}
    )
    assert record.command == ("run", outside.name)
    assert record.workload == {
        "models": ["models/small", {"other": outside.name}], "route": "/v1/completions",
        "text": "/s> " * 99,
    }  # fmt: skip


def test_machine_and_its_limits() -> None:
    limits = measure_limits(1, read_bytes=4_000_000, size=64)
    assert limits.read_gb_per_s > 0
    assert limits.matmul_gflop_per_s > 0
    probe = LimitProbe(1, size=64)
    assert probe.product("bf16") > 0
    assert probe.product("int8") > 0
    machine = describe_machine()
    assert len(machine.lines()) == 7
    assert machine.memory_bytes >= machine.free_bytes >= 0
