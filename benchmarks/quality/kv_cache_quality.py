"""Loss of quality by a KV cache in int8, and what large biases on K add to it.

    python -m benchmarks.quality.kv_cache_quality [--max-bytes N] [--threads N] [--output FILE]

First a tiny random model in the shape of Qwen2 over random tokens, with biases on K of some sizes:
KL, in nats per token, of the next token's distribution from that of the same weights and cache in
float32; "biases in the cache": K stored with its bias, as attention that cannot add one needs it.
Then the bundled model, which has no biases, over the text of quantization_quality.py and with the
same figures. Nothing is drawn and nothing is timed, so one pass is exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from benchmarks.arguments import command_line
from benchmarks.quality.quantization_quality import (
    TOOLS,
    WINDOW,
    Reader,
    Scores,
    Variant,
    figures,
    score,
    windows,
)
from safetensors.torch import save_file

from quire.base.platform import Platform, detect_platform
from quire.bundled import bundled_model_path
from quire.compute.attention import AttentionNeeds, select_backend
from quire.compute.layers import LayerFactory
from quire.compute.quantization import Int8Format, PlainFormat
from quire.config import ModelSpec, read_model_spec
from quire.config.kv_layout import KVLayout
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from quire.entrypoints.bench.record import Spread, new_record, spread_of
from quire.ops import OpSet, Team, build_op_set
from quire.text.rendering import Tokenizer

SEED, BLOCK_SIZE = 0, 16
TOKENS, SEQUENCES = 512, 4
KV_HEADS, HEAD_DIM = 2, 64
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": WINDOW,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
WEIGHT_SCALE = 0.05
"""At which scores differ by about 1 from key to key."""

Bias = Callable[[torch.Generator], torch.Tensor]


def one_dim(size: float) -> Bias:
    """Return a source of biases of about 1, and of `size` in one dim of each head."""

    def bias(generator: torch.Generator) -> torch.Tensor:
        biases = torch.randn(KV_HEADS, HEAD_DIM, generator=generator)
        biases[:, torch.randint(HEAD_DIM, (), generator=generator)] = size
        return biases

    return bias


def slow_dims(generator: torch.Generator) -> torch.Tensor:
    """100 in three dims that turn least, where published models have theirs."""
    biases = torch.randn(KV_HEADS, HEAD_DIM, generator=generator)
    half = HEAD_DIM // 2
    biases[:, [half - 2, half - 1, HEAD_DIM - 2]] = 100.0
    return biases


BIASES: dict[str, Bias] = {
    "none": lambda generator: torch.zeros(KV_HEADS, HEAD_DIM),  # noqa: ARG005
    "about 1": lambda generator: torch.randn(KV_HEADS, HEAD_DIM, generator=generator),
    "10 in one dim": one_dim(10.0),
    "100 in one dim": one_dim(100.0),
    "1000 in one dim": one_dim(1000.0),
    "100 in three slow dims": slow_dims,
    "about 100": lambda generator: 100 * torch.randn(KV_HEADS, HEAD_DIM, generator=generator),
}


class Engine:
    """Readers of any folder on this machine."""

    def __init__(self, platform: Platform, threads: int) -> None:
        self._platform = platform
        self._team = Team(threads)
        self.ops: OpSet = build_op_set(platform, {}, self._team)

    def reader(
        self,
        spec: ModelSpec,
        folder: Path,
        kv_dtype: str,
        variant: Variant | None = None,
        *,
        biases_in_cache: bool = False,
    ) -> Reader:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        (group,) = KVLayout.of_model(spec, BLOCK_SIZE, kv_dtype).groups
        needs = AttentionNeeds.of_group(spec, group.kv.format, getattr(torch, kv_dtype))
        backend = select_backend(self._platform, needs, None, self._team).backend
        factory = LayerFactory(
            self.ops,
            dict.fromkeys(range(spec.num_layers), backend),
            dtype,
            torch.device("cpu"),
            WINDOW,
            variant,
            quantized_cache=kv_dtype == "int8" and not biases_in_cache,
        )
        return Reader(spec, folder, factory, backend, kv_dtype)


def write_model(folder: Path, bias: Bias, dtype: torch.dtype) -> ModelSpec:
    """A random model of SHAPE; the same weights for every bias and dtype."""
    generator = torch.Generator().manual_seed(SEED)
    size, inner, vocab = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    kv_size = KV_HEADS * HEAD_DIM
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int) -> None:
        tensors[name] = torch.randn(*shape, generator=generator) * WEIGHT_SCALE

    matrix("model.embed_tokens.weight", vocab, size)
    matrix("lm_head.weight", vocab, size)
    tensors["model.norm.weight"] = torch.ones(size)
    for layer in range(SHAPE["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}{norm}.weight"] = torch.ones(size)
        for part, outputs in (("q", size), ("k", kv_size), ("v", kv_size)):
            matrix(f"{block}self_attn.{part}_proj.weight", outputs, size)
            tensors[f"{block}self_attn.{part}_proj.bias"] = torch.randn(
                outputs, generator=generator
            ) * (1.0 if part == "q" else 0.1)
        matrix(f"{block}self_attn.o_proj.weight", size, size)
        for part in ("gate", "up"):
            matrix(f"{block}mlp.{part}_proj.weight", inner, size)
        matrix(f"{block}mlp.down_proj.weight", size, inner)
        of_layer = torch.Generator().manual_seed(layer)
        tensors[f"{block}self_attn.k_proj.bias"] = bias(of_layer).flatten()
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**SHAPE, "dtype": name}))
    return read_model_spec(folder)


def bias_figures(engine: Engine) -> Iterator[tuple[str, Spread]]:
    """KL by bias and by what is kept how."""
    generator = torch.Generator().manual_seed(SEED)
    texts = [
        torch.randint(SHAPE["vocab_size"], (TOKENS,), generator=generator).tolist()
        for _ in range(SEQUENCES)
    ]

    def read(reader: Reader) -> torch.Tensor:
        return torch.cat([reader.log_probabilities(ids) for ids in texts])

    for name, bias in BIASES.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            spec = write_model(folder, bias, torch.float32)
            exact = read(engine.reader(spec, folder, "float32"))
            got = {
                "float32, int8 cache": engine.reader(spec, folder, "int8"),
                "float32, int8 cache, biases in the cache": engine.reader(
                    spec, folder, "int8", biases_in_cache=True
                ),
            }
            spec = write_model(folder, bias, torch.bfloat16)
            got |= {
                "bfloat16": engine.reader(spec, folder, "bfloat16"),
                "bfloat16, int8 cache": engine.reader(spec, folder, "int8"),
                "bfloat16, int8 cache, biases in the cache": engine.reader(
                    spec, folder, "int8", biases_in_cache=True
                ),
            }
        for label, reader in got.items():
            divergence = float((exact.exp() * (exact - read(reader))).sum(1).mean())
            yield f"bias on K {name}: {label}: KL", spread_of([divergence])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write JSON here")
    parser.add_argument("--max-bytes", type=int, default=0, help="of each file; 0: all of them (0)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sys.path.insert(0, str(TOOLS))
    from corpus import load_corpus

    torch.set_num_threads(options.threads)
    platform, folder, corpus = detect_platform(), bundled_model_path(), load_corpus()
    startup = plan_startup(EngineSettings(model=str(folder)), platform)
    spec, engine = startup.resolved.spec, Engine(platform, options.threads)
    plain, int8 = PlainFormat(engine.ops), Int8Format(engine.ops)
    todo = windows(corpus.held_out, Tokenizer.from_folder(folder), options.max_bytes)
    size = sum(len(d.text[: options.max_bytes or None].encode()) for d in corpus.held_out)
    in_int8 = Variant("int8", [(1, int8)], int8)
    as_is = Variant("none", [(1, plain)], plain)
    readers = {
        "none": engine.reader(spec, folder, spec.dtype, as_is),
        "int8 cache": engine.reader(spec, folder, "int8", as_is),
        "int8": engine.reader(spec, folder, spec.dtype, in_int8),
        "int8, int8 cache": engine.reader(spec, folder, "int8", in_int8),
    }
    found: dict[str, Spread] = {}
    scores: dict[str, list[Scores]] = {name: [] for name in readers}
    with torch.inference_mode():
        for name, spread in bias_figures(engine):
            found[name] = spread
            print(f"{name:80s} {spread.median:.6f}")
        for window in todo:
            reference = readers["none"].log_probabilities(window.ids[:-1])
            for name, reader in readers.items():
                got = reader.log_probabilities(window.ids[:-1])
                scores[name].append(score(window, reference, got))
    plain_bits = sum(each.bits for each in scores["none"])
    for name, of_variant in scores.items():
        values = figures(name, of_variant, plain_bits, size)
        found |= values
        print(f"{name:46s}", *(f"{spread.median:.5f}" for spread in values.values()))
    if options.output:
        record = new_record(
            "kv_cache_quality",
            command_line(),
            startup.resolved,
            None,
            seed=SEED,
            workload={
                "held_out_files": [document.name for document in corpus.held_out],
                "bytes": size,
                "windows": len(todo),
                "tokens": sum(window.new for window in todo),
                "corpus_sha256": corpus.sha256,
                "operations": dict(engine.ops.chosen),
                "random_model": SHAPE,
                "random_tokens": TOKENS * SEQUENCES,
            },
            figures=found,
        )
        record.save(options.output)


if __name__ == "__main__":
    main()
