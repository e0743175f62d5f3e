from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from quire.config.env import limit_spinning
from tests import pairs
from tests.profiles import IS_CI, SCALE

# No example fails for its time, since others use the machine too. With CI set, examples are the
# same in every run, so that a run judges the change and nothing else; elsewhere they are new ones.
settings.register_profile(
    "quire",
    max_examples=100 * SCALE,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=IS_CI,
)
settings.load_profile("quire")

# Two files run at a time: threads of torch that spin for each other would take most of the time.
limit_spinning()

# Whoever runs the tests may have a file of defaults.
os.environ["XDG_CONFIG_HOME"] = os.path.join(os.path.dirname(__file__), "none")

# The suite proves what CPUs compute, on any machine; benchmarks/gpu has the proofs of a GPU.
for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
    os.environ[name] = ""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(pairs)


@pytest.fixture(scope="module", autouse=True)
def light_collections() -> Iterator[None]:
    """Let the garbage collector skip what lives longer than a file: modules and collected tests are
    half a million objects, so that tests which collect would spend most of their time there. All of
    it is collected at the end of a file, which is at fault for what it left open; a later file that
    thaws the objects finds nothing of it."""
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()


@pytest.fixture
def pythons_own_handler() -> Iterator[None]:
    """Ctrl-C raises, even if the shell that runs the tests has ignored it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
