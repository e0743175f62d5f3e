"""Callers of the kernels in Triton, in the interpreter: apart from tests/ops/test_triton.py, which
proves kernels and depends on them alone (tests/gates.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CALLERS = Path(__file__).parent / "triton" / "interpreted_callers.py"


def test_callers_in_the_interpreter() -> None:
    """In a process of its own, since Triton is asked to interpret before it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CALLERS)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
