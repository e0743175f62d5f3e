from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator

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

# Two files run at a time. Threads that wait for each other would take most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
limit_spinning()

# Whoever runs the tests may have a file of defaults.
os.environ["XDG_CONFIG_HOME"] = os.path.join(os.path.dirname(__file__), "none")

# The suite proves what CPUs compute, on any machine; benchmarks/gpu has the proofs of a GPU.
for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
    os.environ[name] = ""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(pairs)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, which would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def light_collections() -> None:
    """Let the garbage collector skip modules and collected tests. They are a million objects: one
    collection of them takes over half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def collected_garbage(light_collections: None) -> Iterator[None]:
    """Collect the garbage of a file at its end: it is at fault for what it left open. An engine
    that slept has frozen what was there, so that all of it is collected. What lives on, such as
    modules that the file was first to import, is frozen for the files that follow."""
    num_frozen = gc.get_freeze_count()
    yield
    if gc.get_freeze_count() > num_frozen:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def pythons_own_handler() -> Iterator[None]:
    """Ctrl-C raises, even if the shell that runs the tests has ignored it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
