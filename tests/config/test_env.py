"""Values that environment variables may and may not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.bundled import bundled_model_path
from quire.config import env
from quire.config.device import MOST_THREADS, MOST_THREADS_PER_CORE
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup


def threads(**settings: object) -> int:
    """Return the number of threads that the engine resolves for the bundled model."""
    given = EngineSettings(model=str(bundled_model_path()), **settings)
    return plan_startup(given, detect_platform()).resolved.settings.num_threads


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("2,4", 2), ("", None)])
def test_omp_num_threads_is_read(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: int | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert env.num_threads() == expected


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_bad_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
        env.num_threads()


def test_the_setting_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads() == 1
    assert threads(num_threads=5) == 5


def test_more_threads_than_cores_are_not_kept_quiet() -> None:
    cores = detect_platform().cpu.num_cores
    for asked, told in ((cores, False), (cores + 1, True)):
        given = EngineSettings(model=str(bundled_model_path()), num_threads=asked)
        decisions = plan_startup(given, detect_platform()).resolved.decisions
        (reason,) = (one.reason for one in decisions if one.name == "num_threads")
        assert ("more than the usable cores" in reason) == told


def test_threads_that_would_only_wait_are_refused() -> None:
    """Turns red when an engine starts that makes a token in a minute and cannot be interrupted."""
    most = max(MOST_THREADS, MOST_THREADS_PER_CORE * detect_platform().cpu.num_cores)
    assert threads(num_threads=most) == most
    with pytest.raises(ConfigError, match=f"num_threads={most + 1} .* and {most} at most"):
        threads(num_threads=most + 1)


def test_a_variable_of_a_larger_machine_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a container with a few of a host's cores starts no engine, or a slow one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    assert threads() == detect_platform().cpu.num_cores


def test_a_small_model_takes_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads() == detect_platform().cpu.num_cores


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, env.SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_spinning_is_limited_unless_the_user_said_so(
    given: dict[str, str], expected: str | None, tmp_path: Path
) -> None:
    """In a process of its own, for the variable outlives a test. `LLM` must set it before torch,
    in whose place a module tells it and ends the process."""
    (tmp_path / "torch.py").write_text(
        "import os\nprint(os.environ.get('GOMP_SPINCOUNT'), flush=True)\nos._exit(0)"
    )
    code = "from quire import LLM\nprint('LLM', flush=True)\nLLM(quiet=True, num_kv_blocks=64)"
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    path = os.pathsep.join([str(tmp_path), *filter(None, [clean.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env={**clean, **given, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.split() == ["LLM", str(expected)]


@pytest.mark.parametrize("name", ["QUIRE_CPU_ISA", "QUIRE_GPU_KERNELS"])
def test_misspelt_kernels_are_refused_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Turns red when `quire plan` promises a start that would fail."""
    monkeypatch.setenv(name, "avx521")
    with pytest.raises(ConfigError, match=f"{name} has no such value: 'avx521'"):
        threads()
