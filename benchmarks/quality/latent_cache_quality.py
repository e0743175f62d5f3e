"""Loss of quality by latent planes in int8, and what the size of the rotated part adds to it.

    python -m benchmarks.quality.latent_cache_quality [--threads N] [--output FILE]

A tiny random model in the shape of DeepSeek-V3, with dense layers alone, over random tokens: KL, in
nats per token, of the next token's distribution from that of the same weights and cache in float32.
The normed part of a plane has elements of about 1. Those of the rotated part are of some sizes, and
the queries that meet them smaller by the same factor, so that scores stay alike. Nothing is drawn
and nothing is timed, so one pass is exact.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.arguments import command_line
from benchmarks.quality.kv_cache_quality import (
    SEED,
    SEQUENCES,
    TOKENS,
    WEIGHT_SCALE,
    WINDOW,
    Engine,
)
from benchmarks.quality.quantization_quality import Reader
from safetensors.torch import save_file

from quire.base.platform import detect_platform
from quire.config import ModelSpec, read_model_spec
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from quire.entrypoints.bench.record import Spread, new_record, spread_of

HEADS, NOPE, ROTARY, RANK, VALUE = 4, 64, 32, 128, 64
SIZE, INNER, VOCAB, LAYERS = 256, 512, 512, 4
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": VALUE,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "max_position_embeddings": WINDOW,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ROTATED = (0.1, 1.0, 10.0, 100.0)


def write_model(folder: Path, rotated: float, dtype: torch.dtype) -> ModelSpec:
    """The same weights for every dtype. rotated: size of the rotated part of a plane."""
    generator = torch.Generator().manual_seed(SEED)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, outputs: int, inputs: int, scale: float = WEIGHT_SCALE) -> torch.Tensor:
        tensors[name] = torch.randn(outputs, inputs, generator=generator) * scale
        return tensors[name]

    matrix("model.embed_tokens.weight", VOCAB, SIZE)
    matrix("lm_head.weight", VOCAB, SIZE)
    tensors["model.norm.weight"] = torch.ones(SIZE)
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}{norm}.weight"] = torch.ones(SIZE)
        part = f"{block}self_attn."
        q = matrix(f"{part}q_proj.weight", HEADS * (NOPE + ROTARY), SIZE, SIZE**-0.5)
        q.view(HEADS, NOPE + ROTARY, SIZE)[:, NOPE:] /= rotated
        down = matrix(f"{part}kv_a_proj_with_mqa.weight", RANK + ROTARY, SIZE, SIZE**-0.5)
        down[RANK:] *= rotated
        tensors[f"{part}kv_a_layernorm.weight"] = torch.ones(RANK)
        matrix(f"{part}kv_b_proj.weight", HEADS * (NOPE + VALUE), RANK, RANK**-0.5)
        matrix(f"{part}o_proj.weight", SIZE, HEADS * VALUE)
        for name in ("gate", "up"):
            matrix(f"{block}mlp.{name}_proj.weight", INNER, SIZE)
        matrix(f"{block}mlp.down_proj.weight", SIZE, INNER)
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": name}))
    return read_model_spec(folder)


def latent_figures(engine: Engine) -> Iterator[tuple[str, Spread]]:
    """KL by the size of the rotated part and by what is kept how."""
    generator = torch.Generator().manual_seed(SEED)
    texts = [
        torch.randint(VOCAB, (TOKENS,), generator=generator).tolist() for _ in range(SEQUENCES)
    ]

    def read(reader: Reader) -> torch.Tensor:
        return torch.cat([reader.log_probabilities(ids) for ids in texts])

    for rotated in ROTATED:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            spec = write_model(folder, rotated, torch.float32)
            exact = read(engine.reader(spec, folder, "float32"))
            got = {"float32, int8 cache": read(engine.reader(spec, folder, "int8"))}
            spec = write_model(folder, rotated, torch.bfloat16)
            for kv_dtype in ("bfloat16", "int8"):
                got[f"bfloat16, {kv_dtype} cache"] = read(engine.reader(spec, folder, kv_dtype))
        for label, logprobs in got.items():
            divergence = float((exact.exp() * (exact - logprobs)).sum(1).mean())
            yield f"rotated part of {rotated:g}: {label}: KL", spread_of([divergence])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    platform, found = detect_platform(), dict[str, Spread]()
    with torch.inference_mode():
        for name, spread in latent_figures(Engine(platform, options.threads)):
            found[name] = spread
            print(f"{name:60s} {spread.median:.6f}")
    if options.output:
        with tempfile.TemporaryDirectory() as place:
            write_model(Path(place), 1.0, torch.float32)
            settings = EngineSettings(model=place, skip_tokenizer_init=True)
            resolved = plan_startup(settings, platform).resolved
        record = new_record(
            "latent_cache_quality",
            command_line(),
            resolved,
            None,
            seed=SEED,
            workload={"tokens": TOKENS, "sequences": SEQUENCES},
            figures=found,
        )
        record.save(options.output)


if __name__ == "__main__":
    main()
