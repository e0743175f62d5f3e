"""Cost of LoRA adapters: decode steps and prefill with some, beside the same without.

    python -m benchmarks.steps.lora_cpu [--adapters 0 1 8 32] [--rows 32] [--rank 16]
        [--output FILE]

Random weights in bfloat16, and adapters of all projections of the blocks. Engines without and with
LoRA ("plain" and 0 adapters) and numbers of adapters take turns. A figure is the wall time of one
decode step of all rows, or of one prefill, planning and drawing included, one step in flight. The
floor of added time is what the bytes of the adapters in use take at the bandwidth of "memory read"
(`kernel_figures`), which is measured beside them.
"""

# ruff: isort: skip_file
# local_engine settles how threads wait before torch is imported
from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.engines.random_checkpoint import read_config
from benchmarks.steps.local_engine import LocalEngine, add_local_arguments, save_local_record
import numpy as np
import torch
from safetensors.torch import save_file

from quire.entrypoints.bench.lengths import random_prompts
from quire.entrypoints.bench.throughput import exact_params
from quire.config.adapters import AdapterFolders
from quire.protocol.adapters import AdapterRef
from quire.protocol.request import EngineRequest

PROMPT_LEN = 8
WARMUP_STEPS = 3


class Adapted(LocalEngine):
    """An engine whose sequences have adapters, one after the other in turn."""

    def __init__(self, options: argparse.Namespace, *, enable_lora: bool) -> None:
        self._output_len = 1 + 2 * WARMUP_STEPS + options.steps
        longest = max(options.prefill, PROMPT_LEN + self._output_len) + 2
        super().__init__(
            options,
            max_num_seqs=options.rows,
            max_num_batched_tokens=max(options.prefill, PROMPT_LEN * options.rows),
            max_model_len=longest,
            depth=1,
            num_kv_blocks=options.rows * (2 + longest // 16),
            enable_lora=enable_lora,
            max_loras=max(1, *options.adapters),
            max_lora_rank=options.rank,
        )

    def ask(
        self, prompts: Sequence[Sequence[int]], output_len: int, refs: Sequence[AdapterRef]
    ) -> None:
        params = exact_params(output_len)
        for i, prompt in enumerate(prompts):
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            ids, adapter = np.array(prompt, np.int32), refs[i % len(refs)] if refs else None
            self.client.add(
                EngineRequest(str(handle), handle, ids, params, handle, adapter=adapter)
            )

    def decode_ms(
        self, prompts: Sequence[Sequence[int]], refs: Sequence[AdapterRef], num_steps: int
    ) -> float:
        """Median of a decode step of all rows."""
        self.ask([prompt[:1] for prompt in prompts], 1, refs)
        self.finish()  # adapters are in their slots
        self.ask(prompts, self._output_len, refs)
        while len(self.client.step().handles) < len(prompts):
            pass
        seconds = [self._step(len(prompts)) for _ in range(WARMUP_STEPS + num_steps)]
        self.end()
        return 1000 * statistics.median(seconds[WARMUP_STEPS:])

    def prefill_ms(self, prompt: Sequence[int], refs: Sequence[AdapterRef]) -> float:
        """One prompt, whose adapter is in its slot."""
        self.ask([prompt[:1]], 1, refs)
        self.finish()
        self.ask([prompt], 1, refs)
        started = time.perf_counter()
        self.finish()
        return 1000 * (time.perf_counter() - started)

    def _step(self, num_rows: int) -> float:
        started = time.perf_counter()
        output = self.client.step()
        assert len(output.handles) == num_rows, "not every row was in the step"
        return time.perf_counter() - started


def write_adapters(folder: Path, model: Path, count: int, rank: int) -> list[AdapterRef]:
    """Random adapters of all projections of a Llama-like model."""
    config = read_config(model)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    folders = AdapterFolders(rank)
    refs: list[AdapterRef] = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (outputs, inputs) in shapes.items():
                path = f"base_model.model.model.layers.{layer}.{name}"
                a = torch.randn(rank, inputs, generator=generator) * 0.01
                b = torch.randn(outputs, rank, generator=generator) * 0.01
                tensors[f"{path}.lora_A.weight"] = a.bfloat16()
                tensors[f"{path}.lora_B.weight"] = b.bfloat16()
        path = folder / f"adapter{i}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        stated = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (path / "adapter_config.json").write_text(json.dumps(stated))
        refs.append(folders.ref(path.name, str(path)))
    return refs


def read_bandwidth() -> float:
    """GB/s of a sum over memory that no cache holds."""
    data = torch.ones(2**27)
    started = time.perf_counter()
    for _ in range(3):
        data.sum()
    return 3 * data.nbytes / (time.perf_counter() - started) / 1e9


def measure(
    options: argparse.Namespace, engines: dict[str, Adapted], refs: Sequence[AdapterRef]
) -> dict[str, list[float]]:
    """Figures by name, one of each turn."""
    size = read_config(options.model)["vocab_size"]
    prompts = random_prompts([PROMPT_LEN] * options.rows, size, options.seed)
    (long,) = random_prompts([options.prefill], size, options.seed + 1)
    figures: dict[str, list[float]] = {}
    for _ in range(options.turns):
        found = {"plain_decode_ms": engines["plain"].decode_ms(prompts, (), options.steps)}
        found["plain_prefill_ms"] = engines["plain"].prefill_ms(long, ())
        for count in options.adapters:
            name = f"{count}_adapters_decode_ms"
            found[name] = engines["lora"].decode_ms(prompts, refs[:count], options.steps)
        for count in (0, 1):
            found[f"{count}_adapters_prefill_ms"] = engines["lora"].prefill_ms(long, refs[:count])
        found["memory_read_gb_per_s"] = read_bandwidth()
        for name, value in found.items():
            figures.setdefault(name, []).append(value)
    return figures


def main() -> int:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        count = max(1, *options.adapters)
        refs = write_adapters(Path(folder), options.model, count, options.rank)
        num_bytes = (Path(refs[0].path) / "adapter_model.safetensors").stat().st_size
        engines = {"plain": Adapted(options, enable_lora=False)}
        engines["lora"] = Adapted(options, enable_lora=True)
        figures = measure(options, engines, refs)
    for name, values in figures.items():
        print(f"{name:28} {statistics.median(values):9.3f}")
    workload = {
        "rows": options.rows, "rank": options.rank, "prefill": options.prefill,
        "steps_per_turn": options.steps, "adapter_bytes": num_bytes,
    }  # fmt: skip
    save_local_record("lora_cpu", options, engines["lora"], workload, figures)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10, help="per turn")
    add_local_arguments(parser, turns_help="of each engine and number of adapters")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
