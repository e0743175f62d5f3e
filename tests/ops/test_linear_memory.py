"""Linear kernels when the system has no memory for what they lay out anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import WAIT_S

WITHOUT_RESERVES = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"}
"""So that the allocator asks the system for all that is large, and has set nothing aside."""

WITHOUT_MEMORY = """
import resource, sys, torch
from quire.base.errors import EngineError
from quire.ops import ALL_OPS, Team
from quire.ops.random_tensors import normal
from quire.ops.linear.int4.cases import int4_weight
from quire.ops.linear.int8.cases import int8_weight
from quire.base.platform import detect_platform

op = ALL_OPS[sys.argv[1]]
rows, outputs, depth = 200, 40, 1 << 17
random = torch.Generator().manual_seed(0)
x = normal(random, rows, depth, dtype=torch.bfloat16)
if op.name == "linear":
    arguments = (normal(random, outputs, depth, dtype=torch.bfloat16), None)
elif op.name == "linear_int8":
    arguments = (*int8_weight(random, outputs, depth), None)
else:
    arguments = (*int4_weight(random, outputs, depth, 128), None)
here = detect_platform()
for provider in op.providers:
    if provider.unavailable(here) is not None:
        continue
    matrix = provider.load(Team(2))(*arguments)
    matrix(x[:1])
    with open("/proc/self/status") as status:
        mapped = 1024 * int(next(line for line in status if line.startswith("VmSize")).split()[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**20, hard))
    try:
        matrix(x)
    except EngineError as error:
        assert "code 2" in str(error), error
    else:
        raise AssertionError(f"{provider.name} found memory somewhere")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    got = matrix(x)
    for row in (0, 70, rows - 1):
        assert torch.equal(got[row], matrix(x[row])), f"{provider.name}: row {row}"
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads sizes through /proc")
@pytest.mark.parametrize("name", ["linear", "linear_int8", "linear_int4"])
def test_a_call_without_memory_fails_and_the_next_one_does_not(name: str) -> None:
    """Turns red when a kernel writes through the memory that it did not get, gives out what it did
    not compute, or has no memory any more once there is some."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY, name],
        env=os.environ | WITHOUT_RESERVES,
        timeout=WAIT_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
