"""Kernels in Triton's interpreter as backends, the sampler and benchmarks call them.

Started by tests/ops/test_callers_of_triton.py, as interpreted_providers.py is by test_triton.py.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.attention import test_select
from tests.bench import test_gpu_script
from tests.ops.triton.interpreter import repair_interpreter
from tests.sampling.rows import Tokens, sampler
from tests.sampling.test_sampler_law import some_logits

from quire.compute.sampling import DeviceColumns, DeviceSampler, SamplingState
from quire.ops.sampling.draw.triton import draw
from quire.protocol import SamplingParams

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, over NaN and inf


@pytest.mark.parametrize("name", ["decode-tiles", "prompt-tiles"])
def test_the_benchmark_of_tiles_runs_dry(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same test as for the other parts: tests/bench/test_gpu_script.py. These parts call
    kernels by themselves."""
    script = import_module("benchmarks.gpu.__main__")
    test_gpu_script.test_a_part_runs_dry(name, script, tmp_path, monkeypatch)


def test_the_backend_serves_a_layer_of_a_pool() -> None:
    """The same test as for the other backends: tests/attention/test_select.py."""
    assert test_select.BACKENDS["triton"].refusal(test_select.PLATFORM, test_select.NEEDS) is None
    test_select.test_plan_and_run_serve_a_layer_of_a_pool("triton")
    test_select.test_metadata_that_a_kernel_cannot_read_are_refused("triton")


def test_the_device_sampler_draws_the_tokens_of_the_host() -> None:
    """Turns red when a graph of these kernels would give other tokens than the host's sampler."""
    vocab_size, many = 4500, []
    for temperature in (0.0, 0.7, 1.5):
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (7, 0.9, 0.0), (0, 0.80037, 0.05), (1, 1.0, 0)):
            many.append(
                SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            )
    state = SamplingState(len(many), vocab_size)
    for slot, params in enumerate(many):
        state.enter(slot, params, seed=slot * 2**60 + 5, sample_index=slot)
    logits = torch.from_numpy(np.stack([some_logits(vocab_size, slot) for slot in range(12)]))
    slots = np.random.default_rng(0).permutation(len(many))
    positions = slots + 100
    device = DeviceSampler(state, DeviceColumns.of_state(state, torch.device("cpu")), draw)
    got = device.sample(logits, torch.from_numpy(slots), torch.from_numpy(positions))
    expected = sampler(state).sample(logits, slots, positions, Tokens())
    assert got.token_ids.tolist() == expected.token_ids.tolist()
