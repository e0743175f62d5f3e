"""Latencies between the ranks of a model on one host: an all-reduce, a plan to all ranks, and what
a step of 28 layers takes beside its kernels.

    python -m benchmarks.kernels.collectives --output benchmarks/results/collectives.json

Two processes, as `tensor_parallel_size=2` starts them. Medians; run it on an idle machine. gloo is
torch's own collective for CPUs, and Ray would send a plan by a call of an actor: both are there for
comparison, the latter where Ray is installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.base.platform import detect_platform
from quire.base.platform.shared_region import SharedRegion
from quire.compute.executor.processes.ring import RingReader, RingWriter, create_ring
from quire.ops.compile import ISAS
from quire.ops.distributed import PlainCollectives
from quire.ops.exchange import join_region
from quire.ops.native.binding import native_unavailable
from quire.ops.native.replay import ReplayList
from quire.ops.native.team import Team
from quire.protocol.step import StepPlan
from quire.protocol.step_codec import decode_plan, encode_plan

SIZES = {"4 KB": 1024, "64 KB": 16 * 1024, "256 KB": 64 * 1024, "1 MB": 256 * 1024}
"""Numbers in float32."""
NUM_WARM = 20


def median_us(work: Callable[[], object], count: int) -> float:
    """Median microseconds of one call."""
    for _ in range(NUM_WARM):
        work()
    seconds: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds) * 1e6, 1)


def best_isa() -> str | None:
    """The instruction set of the kernels, None without any."""
    platform = detect_platform()
    return next((isa.name for isa in ISAS if native_unavailable(isa.name, platform) is None), None)


def shared_memory(rank: int, descriptor: int, isa: str | None, count: int, results: Any) -> None:
    """One rank over shared memory. isa: None for plain Python."""
    torch.set_num_threads(1)
    region = SharedRegion(descriptor)
    if isa is None:
        collectives: Any = PlainCollectives(region, rank)
    else:
        collectives = join_region(region, rank, f"cpu_{isa}", Team(1))
    found = {}
    for name, numbers in SIZES.items():
        x = torch.ones(numbers)
        found[name] = median_us(lambda x=x: collectives.all_reduce(x), count)
    if rank == 0:
        results.put(found)


def gloo(rank: int, store: str, count: int, results: Any) -> None:
    """One rank over torch's gloo."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
    for name, numbers in SIZES.items():
        x = torch.ones(numbers)
        found[name] = median_us(lambda x=x: dist.all_reduce(x), count)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def echo(ring: int, wakeup: int, back: int, count: int) -> None:
    """A rank that reads plans and answers each."""
    reader = RingReader(ring, 0, wakeup)
    for _ in range(count):
        decode_plan(reader.read()[1])
        os.eventfd_write(back, 1)


def of_two(work: Callable[..., None], *arguments: Any) -> Any:
    """Return the findings of two processes that do `work`."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=work, args=(rank, *arguments, results)) for rank in range(2)]
    for each in ranks:
        each.start()
    found = results.get(timeout=300)
    for each in ranks:
        each.join()
    return found


def plan_round_trip(count: int) -> float:
    """Microseconds until a rank has decoded a steady step's plan, and this process knows."""
    ring, wakeup, back = create_ring(), os.eventfd(0), os.eventfd(0)
    reader = multiprocessing.get_context("fork").Process(
        target=echo, args=(ring, wakeup, back, count + NUM_WARM)
    )
    reader.start()
    writer = RingWriter(ring, [wakeup], lambda: False)

    def send() -> None:
        writer.write(1, encode_plan(StepPlan(7)))
        os.eventfd_read(back)

    found = median_us(send, count)
    reader.join()
    return found


class Decoder:
    """An actor that reads plans."""

    def decode(self, data: bytes) -> None:
        decode_plan(data)


def ray_round_trip(count: int) -> float | None:
    """Microseconds until an actor of Ray has decoded such a plan; None without Ray."""
    if importlib.util.find_spec("ray") is None:
        return None
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False)
    actor = ray.remote(Decoder).remote()
    found = median_us(lambda: ray.get(actor.decode.remote(encode_plan(StepPlan(7)))), count)
    ray.shutdown()
    return found


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LAYERS = CONFIG["num_hidden_layers"]


def beside_kernels(folder: str, num_tokens: int) -> dict[str, float]:
    """Median microseconds of a captured decode step of two ranks, as rank 0 sees it: from one step
    to the next, and without the replay of its kernels, in which ranks exchange what they have."""
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    replays: list[tuple[float, float]] = []
    run = ReplayList.run

    def timed(self: ReplayList, count: int | None = None) -> None:
        started = time.perf_counter()
        run(self, count)
        replays.append((started, time.perf_counter()))

    ReplayList.run = timed  # type: ignore[method-assign]
    llm = LLM(
        folder,
        load_format="dummy",
        tensor_parallel_size=2,
        num_kv_blocks=128,
        max_model_len=1024,
        skip_tokenizer_init=True,
        quiet=True,
    )
    with llm:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        replays.clear()
        llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    ReplayList.run = run  # type: ignore[method-assign]
    pairs = list(itertools.pairwise(replays[2:]))
    steps = [after[0] - before[0] for before, after in pairs]
    outside = [after[0] - before[1] for before, after in pairs]
    return {
        "layers": LAYERS,
        "step": round(statistics.median(steps) * 1e6, 1),
        "outside_kernels": round(statistics.median(outside) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="calls of each kind")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    isa = best_isa()
    region = SharedRegion.create(2)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "processor": detect_platform().cpu.model_name,
            "cores": detect_platform().cpu.num_cores,
            "unit": "us, median",
            "plan_round_trip": plan_round_trip(options.count),
            "plan_round_trip_ray": ray_round_trip(options.count),
            "all_reduce": {
                "kernels": of_two(shared_memory, region.descriptor, isa, options.count),
                "plain_python": of_two(shared_memory, region.descriptor, None, options.count),
                "gloo": of_two(gloo, f"{folder}/store", options.count),
            },
            "step": beside_kernels(folder, min(options.count, 1000)),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
