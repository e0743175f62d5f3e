"""`benchmarks.gpu` without a GPU: every part that computes runs with tiny sizes, and one that
breaks or hangs does not take the others with it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
DRY = ("limits", "laws", "qwen3-0.6b-int8-kv", "host", "kernels", "decode", "prefill", "paging",
       "linear", "compiled", "sampling")  # fmt: skip


@pytest.fixture
def script() -> ModuleType:
    return import_module("benchmarks.gpu.__main__")


@pytest.mark.parametrize("name", DRY)
def test_a_part_runs_dry(
    name: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when a part has a mistake that needs no GPU to be found. Parts that do as others do
    with other sizes are left out, for time; nor is anything compiled (tests/ops/test_compiled.py).
    """
    from benchmarks.gpu.part import Part

    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    module, _, function = script.PARTS[name].function.partition(":")
    findings = tmp_path / "findings"
    with torch.inference_mode():
        getattr(import_module(f"benchmarks.gpu.{module}"), function)(
            Part(torch.device("cpu"), True, 0, findings)
        )
    found = [json.loads(line) for line in findings.read_text().splitlines()]
    assert found
    for finding in found:
        assert finding["kind"] in ("figure", "check", "note")
        assert finding.get("ok", True), finding


def test_the_script_writes_what_its_parts_found(tmp_path: Path) -> None:
    """In processes of their own. Turns red when a finding is lost on its way, or a file is half."""
    output = tmp_path / "folder" / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    command += ["--parts", "limits", "--output", str(output)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["machine"]["machine"]["num_cores"] > 0
    outcome = report["parts"]["limits"]
    assert outcome["status"] == "done"
    assert [each["unit"] for each in outcome["findings"]] == ["GB/s", "GFLOP/s"]
    assert [path.name for path in output.parent.iterdir()] == ["gpu.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_part_is_tried_after_the_first(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Turns red when the reason is repeated for every part, or a file of failures is left."""
    output = tmp_path / "gpu.json"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", "--output", str(output)])
    with pytest.raises(SystemExit, match="3"):
        script.main()
    assert capsys.readouterr().out.count("sees no GPU") == 1
    assert not output.exists()


def test_a_part_that_hangs_is_ended(script: ModuleType, tmp_path: Path) -> None:
    """Turns red when one kernel that never ends costs all that comes after it."""
    began = time.monotonic()
    printed = tmp_path / "printed"
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert script.run_limited(sleep, 2.0, printed) == "ended after 2 s"
    assert time.monotonic() - began < 120


def test_a_part_that_breaks_keeps_what_it_found(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when findings before an error are lost, or when half a line breaks the report."""
    facts = json.dumps({"kind": "facts", "facts": {"a": 1}})
    check = json.dumps({"kind": "check", "name": "x", "ok": True})
    written = "\n".join((facts, check, check[:9]))
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys\n"
        "path = sys.argv[sys.argv.index('--findings') + 1]\n"
        f"open(path, 'w').write({written!r})\n"
        "raise RuntimeError('a driver fault')\n"
    )
    monkeypatch.setattr(script, "MODULE", "broken")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = script.run_apart("limits", 60.0, Namespace(device="cpu", quick=False))
    assert outcome["status"] == "failed with 1"
    assert outcome["machine"] == {"a": 1}
    assert [each["name"] for each in outcome["findings"]] == ["x"]
    assert "a driver fault" in outcome["printed"]


def test_the_mixed_workload_is_that_of_the_target(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """142,827 prompt and 133,966 output tokens, or the figure compares with nothing."""
    from benchmarks.gpu.part import Part
    from benchmarks.gpu.throughput import mixed_lengths

    lengths = mixed_lengths(Part(torch.device("cuda"), False, 0, tmp_path / "f"))
    assert len(lengths) == 256
    assert [sum(column) for column in zip(*lengths, strict=True)] == [142_827, 133_966]


def test_every_part_has_a_function(script: ModuleType) -> None:
    """Turns red when a part is renamed in one place alone."""
    for info in script.PARTS.values():
        module, _, function = info.function.partition(":")
        assert callable(getattr(import_module(f"benchmarks.gpu.{module}"), function))
