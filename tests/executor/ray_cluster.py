"""A cluster of Ray on this machine, for tests of ranks that it places."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator

import pytest

from tests.profiles import SCALE

NUM_CPUS = 3
IN_SOAKS = pytest.mark.skipif(SCALE == 1, reason="a run starts Ray once; the rest is for a soak")


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """A head without room for ranks, and a node with some; engines find it meanwhile."""
    utils = importlib.import_module("ray.cluster_utils")
    made = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.add_node(num_cpus=NUM_CPUS)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = made.address
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_ADDRESS"]
        made.shutdown()
