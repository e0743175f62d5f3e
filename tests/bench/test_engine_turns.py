"""Engines in processes of their own that take turns."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.bench.lengths import Workload
from quire.entrypoints.bench.machine import LimitProbe
from tests.waiting import wait_for

FAKE = '''
"""An engine that writes down what it is asked, gives a token a step, and prints noise."""
import os, threading, time

class Fake:
    def __init__(self, options):
        self.settings = {"weights": options.weights}
        self.options, self.counts = options, []
    def start(self, prompts, output_lengths):
        print("noise", flush=True)
        with open(self.options.work_dir / "log", "a") as log:
            log.write(f"{self.options.weights} {prompts[0][:4]} {output_lengths}\\n")
        if self.options.weights == "dying" and len(prompts) > 1:
            os.write(2, b"no memory left\\n\\n")
            os._exit(3)
        self.counts, self.lengths = [0] * len(prompts), output_lengths
    def step(self):
        self.counts = [min(c + 1, n) for c, n in zip(self.counts, self.lengths)]
        if self.options.weights == "busy" and min(self.counts) == min(self.lengths):
            threading.Thread(target=self.burn, daemon=True).start()
        return list(self.counts)
    def burn(self):
        while not (self.options.work_dir / "idle").exists():
            time.sleep(0.001)
        started = time.thread_time()
        while time.thread_time() - started < 0.05:
            pass
        (self.options.work_dir / "burnt").touch()
    def kernel_seconds(self):
        return None
    def close(self):
        (self.options.work_dir / "closed").touch()

def open_engine(options):
    if options.weights == "lacking":
        import a_package_that_nobody_has
    return Fake(options)
'''
FORMATS = ("one", "two", "dying", "busy", "lacking")


@pytest.fixture(autouse=True)
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fake`, an engine whose formats are its behaviours, in a module that its process finds."""
    (tmp_path / "fake_engine.py").write_text(FAKE)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    engines = importlib.import_module("benchmarks.peers.engines")
    formats = dict.fromkeys(FORMATS, engines.Format(8))
    monkeypatch.setitem(engines.ENGINES, "fake", engines.Adapter("Fake", "fake_engine", formats))


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    importlib.import_module("benchmarks.peers.engine_runs").add_engine_arguments(parser)
    return parser.parse_args(["--engine", "fake", *given])


def opened(tmp_path: Path, *weights: str) -> Any:
    options = arguments("--weights", *weights, "--model", str(tmp_path), "--threads", "1")
    runs = importlib.import_module("benchmarks.peers.engine_runs")
    return runs.opened_groups(options, tmp_path, max_num_seqs=2, max_model_len=16)


def log_of(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


def test_engines_take_turns_between_readings_of_the_limits(tmp_path: Path) -> None:
    """Turns red when an engine has other prompts than its rival, knows one already, always runs
    first, or is set beside limits that are not those around it."""
    turns = importlib.import_module("benchmarks.peers.engine_turns")
    workloads = {"short": Workload((4, 4), (2, 2)), "long": Workload((4,), (3,))}
    for group in opened(tmp_path, "one", "two"):
        limits = turns.MachineLimits(LimitProbe(1, read_bytes=4_000_000, size=64), group.bits)
        found = turns.run_turns(group.runs, workloads, limits, repeats=2, vocab_size=50, seed=0)
        first, second = group.runs
    log = log_of(tmp_path)
    order = [line.split()[0] for line in log]
    assert order == ["one", "two", "one", "two", "two", "one", "two", "one"]
    prompts = [line.split(" ", 1)[1] for line in log]
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 4
    expected = [
        found[first, "short"][0], found[second, "short"][0],
        found[first, "long"][0], found[second, "long"][0],
        found[second, "short"][1], found[first, "short"][1],
        found[second, "long"][1], found[first, "long"][1],
    ]  # fmt: skip
    for turn, following in pairwise(expected):
        assert turn.after is following.before
    assert expected[0].read == (expected[0].before.read + expected[0].after.read) / 2
    assert expected[0].timeline.moments[-1].counts == (2, 2)
    figures = limits.figures(found[first, "short"])
    assert figures["limit_int8_gop_per_s"] == [
        turn.arithmetic / 1e9 for turn in found[first, "short"]
    ]


def test_a_process_ends_when_its_requests_do(tmp_path: Path) -> None:
    """Turns red when engines stay behind and compute beside the next ones."""
    for group in opened(tmp_path, "one"):
        process = group.runs[0].engine._process
        assert process.poll() is None
        assert group.runs[0].engine.settings == {"weights": "one"}
    assert process.returncode == 0
    assert (tmp_path / "closed").exists()


def test_processor_time_of_an_idle_engine_is_seen(tmp_path: Path) -> None:
    """Turns red when an engine that computes during another one's turn looks idle."""
    for group in opened(tmp_path, "busy"):
        engine = group.runs[0].engine
        engine.run([[1]], [1])
        (tmp_path / "idle").touch()
        wait_for((tmp_path / "burnt").exists, "work of an idle engine")
        assert engine.run([[2]], [1]).idle_cpu_seconds >= 0.04


def test_what_an_interpreter_lacks_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when a missing package ends the run or goes unnoticed."""
    [names] = [[run.weights for run in g.runs] for g in opened(tmp_path, "lacking", "two")]
    assert names == ["two"]
    err = capsys.readouterr().err
    assert "Fake, lacking: skipped, a_package_that_nobody_has is not installed for " in err


def test_an_engine_that_dies_ends_the_run_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns red when the run hangs, says nothing of use, or takes the others' figures for whole."""
    table = importlib.import_module("benchmarks.peers.cpu_table")
    command = ["cpu_table.py", "--engine", "fake", "--weights", "one", "dying", "--columns", "4"]
    command += ["--model", str(tmp_path), "--work-dir", str(tmp_path), "--threads", "1"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(table, "LimitProbe", lambda threads: LimitProbe(threads, 4000, 64))
    monkeypatch.setattr(table, "count_weights", lambda config: (100, 10))
    monkeypatch.setattr(table, "count_kv_elements", lambda config: 4)
    assert table.main() == 1
    shown = capsys.readouterr()
    assert shown.err == "Fake, dying: its process ended with status 3: no memory left\n"
    assert not shown.out
    assert (tmp_path / "closed").exists()


def test_an_interpreter_must_be_of_an_engine() -> None:
    """Turns red when a misspelled engine runs in the wrong environment."""
    assert arguments("--python", "fake=a=b").python == [("fake", "a=b")]
    for text in ("nobody=python", "fake", "fake="):
        with pytest.raises(SystemExit):
            arguments("--python", text)


def record(
    weights: str, rates: Sequence[float], *, group: str, read: Sequence[float]
) -> dict[str, Any]:
    """Return a record of decode B=16, with half the machine's arithmetic."""
    figures = {
        "decode_16_tokens_per_s": rates,
        "decode_16_share_of_read": read,
        "decode_16_share_of_arithmetic": [0.5] * len(rates),
        "decode_16_idle_cpu_share": [0.001] * len(rates),
    }
    limits = ("read_gb_per_s", "matmul_gflop_per_s", "bf16_gflop_per_s", "int8_gop_per_s")
    figures |= {f"limit_{name}": [10.0] for name in limits}
    turns = {"group": group, "members": ["Fake, two", "Fake, one"]}
    spread_of = importlib.import_module("quire.entrypoints.bench.record").spread_of
    return {
        "workload": {"engine": "fake", "weights": weights, "bits": 8, "turns": turns},
        "figures": {
            name: {"values": list(values), "median": spread_of(values).median,
                   "low": min(values), "high": max(values)}
            for name, values in figures.items()
        },
    }  # fmt: skip


def test_ratios_are_of_the_same_turns() -> None:
    """Turns red when medians are divided, turns of different runs meet, or the first engine of the
    command line is not the one that is compared."""
    tables = importlib.import_module("benchmarks.peers.engine_tables")
    shares = [0.2, 0.6, 0.4]
    records = [
        record("one", [10.0, 20.0, 40.0], group="a", read=shares),
        record("one", [100.0], group="b", read=[0.4]),
        record("two", [400.0], group="b", read=[0.4]),
        record("two", [30.0, 20.0, 20.0], group="a", read=shares),
    ]
    [(name, ratio)] = tables.ratios_by_turn(records, "decode_16_tokens_per_s").items()
    assert name == "Fake, two / Fake, one"
    assert ratio.values == (3.0, 1.0, 0.5, 4.0)
    text = tables.render_tables(records)
    assert "| Fake, two / Fake, one |  |  |  | 2.00 (0.50–4.00) |  |" in text
    # The larger share of each turn: 0.5, 0.6, 0.5, 0.5.
    assert "| Fake, one |  |  |  | 30.0 (10.0–100.0), 50% a (40% r) |" in text
    assert "Idle, Fake, two: 0.1% of a core (at most 0.1%)." in text
    with_quality = tables.render_tables(records, {"Fake, two": 0.00512})
    [row] = [line for line in with_quality.splitlines() if line.startswith("| Fake, two | ")]
    assert row.endswith("int8 10 GOP/s | 0.0051 |")
    assert "| Fake, one |" in with_quality and "| KL |" in with_quality


def test_shares_are_of_turns_with_steady_limits() -> None:
    """Turns red when a turn between a slow and a fast machine speaks for either."""
    tables = importlib.import_module("benchmarks.peers.engine_tables")
    one = record("one", [10.0, 20.0, 40.0], group="a", read=[0.9, 0.6, 0.8])
    spread = dict.fromkeys(("median", "low", "high"), 0.0)
    for when, values in (("before", [30.0, 55.0, 30.0]), ("after", [31.0, 30.0, 26.0])):
        one["figures"][f"decode_16_read_{when}_gb_per_s"] = {"values": values, **spread}
        one["figures"][f"decode_16_product_{when}_gop_per_s"] = {"values": [1.0] * 3, **spread}
    assert "20.0 (10.0–40.0), 85% r (50% a)" in tables.render_tables([one])
    one["figures"]["decode_16_product_after_gop_per_s"]["values"] = [0.8] * 3
    assert "20.0 (10.0–40.0), 80% r (50% a)" in tables.render_tables([one])  # too few, over all
