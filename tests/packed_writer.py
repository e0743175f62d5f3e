"""Writes quantized matrices number by number, and says what they are in float32.

Nothing here is shared with quire's readers. Each writer returns the tensors of one matrix by what
follows the module's name, and the matrix [O, I].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
Writer = Callable[[int, int, np.random.Generator], Written]


def bit_words(values: np.ndarray, bits: int) -> np.ndarray:
    """[n] numbers → int32 words: a stream of bits, the lowest first."""
    stream = 0
    for place, value in enumerate(values.tolist()):
        stream |= int(value) << bits * place
    count = len(values) * bits // 32
    words = [stream >> 32 * i & 0xFFFFFFFF for i in range(count)]
    return np.array(words, np.uint32).view(np.int32)


def along(values: np.ndarray, bits: int, axis: int) -> torch.Tensor:
    """Words along an axis of [m, n]."""
    return torch.from_numpy(np.apply_along_axis(bit_words, axis, values, bits).copy())


def grid(
    outputs: int, groups: int, bits: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Zero points [O, G], the smallest and the largest in many, and scales in float16."""
    zeros = random.integers(0, 1 << bits, (outputs, groups))
    zeros[::3] = 0
    zeros[1::3] = (1 << bits) - 1
    scales = (random.random((outputs, groups)) + 0.5) / (6 << bits)
    return zeros, scales.astype(np.float16)


def levels(outputs: int, inputs: int, bits: int, random: np.random.Generator) -> np.ndarray:
    """Numbers [O, I], each of which is there."""
    values = random.integers(0, 1 << bits, (outputs, inputs))
    some = np.arange(min(1 << bits, inputs))
    values[0, : len(some)] = some
    return values


def scaled(
    values: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray
) -> torch.Tensor:
    """(q - z) · s in float32; group: of each input."""
    whole = (values - zeros[:, group]).astype(np.float32)
    return torch.from_numpy(whole * scales.astype(np.float32)[:, group])


def awq(group_size: int, packing: str) -> Writer:
    def write(outputs: int, inputs: int, random: np.random.Generator) -> Written:
        size = inputs if group_size == -1 else group_size
        values = levels(outputs, inputs, 4, random)
        zeros, scales = grid(outputs, inputs // size, 4, random)
        matrix = scaled(values, zeros, scales, np.arange(inputs) // size)
        if packing == "gemm":
            tensors = {
                "qweight": _interleaved(values.T),
                "qzeros": _interleaved(zeros.T),
                "scales": torch.from_numpy(scales.T.copy()),
            }
            return tensors, matrix
        together = {32: 32, 64: 16}.get(size, 8)
        padding = ((0, 0), (0, -zeros.shape[1] % together))
        tensors = {
            "qweight": along(values, 4, 1),
            "qzeros": along(np.pad(zeros, padding), 4, 1),
            "scales": torch.from_numpy(np.pad(scales, padding)),
        }
        return tensors, matrix

    return write


def _interleaved(values: np.ndarray) -> torch.Tensor:
    """[n, O] → words [n, O / 8] whose fields are outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for field, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= values[:, output::8].astype(np.uint32) << np.uint32(4 * field)
    return torch.from_numpy(words.view(np.int32))


def gptq(
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    first_version: bool = True,
    act_order: int | None = None,
    with_index: bool = True,
) -> Writer:
    """act_order: the seed of an order of inputs; the same one gives matrices that share it."""

    def write(outputs: int, inputs: int, random: np.random.Generator) -> Written:
        size = inputs if group_size == -1 else group_size
        values = levels(outputs, inputs, bits, random)
        zeros, scales = grid(outputs, -(-inputs // size), bits, random)
        if symmetric:
            zeros[:] = 1 << bits - 1
        group = np.arange(inputs) // size
        if act_order is not None:
            group = np.random.default_rng(act_order).permutation(group)
        packed = along(zeros.T, bits, 1)
        if first_version and bits == 3:
            packed = along((zeros.T - 1) % 8, bits, 1)
        elif first_version:
            # Whole words less 1 in each field, as uint32 with borrow.
            ones = np.uint32(sum(1 << at for at in range(0, 32, bits)))
            packed = torch.from_numpy((packed.numpy().view(np.uint32) - ones).view(np.int32))
        tensors = {
            "qweight": along(values.T, bits, 0),
            "qzeros": packed,
            "scales": torch.from_numpy(scales.T.copy()),
        }
        if with_index:
            tensors["g_idx"] = torch.from_numpy(group.astype(np.int32))
        return tensors, scaled(values, zeros, scales, group)

    return write


@dataclass(frozen=True)
class Format:
    """One way to quantize a model. settings: its quantization_config. kernel: that of matrices
    [O, 128]; None: widened as they are used."""

    name: str
    settings: Mapping[str, Any]
    write: Writer
    kernel: str | None = None


def _awq(group_size: int, packing: str, kernel: str | None) -> Format:
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": packing,
        "zero_point": True,
    }
    return Format(f"awq-{packing}-g{group_size}", settings, awq(group_size, packing), kernel)


def _gptq(name: str, bits: int, group_size: int, kernel: str | None = None, **more: Any) -> Format:
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": more.get("symmetric", False),
        "desc_act": more.get("act_order") is not None,
        "checkpoint_format": "gptq" if more.get("first_version", True) else "gptq_v2",
    }
    return Format(f"gptq-{name}", settings, gptq(bits, group_size, **more), kernel)


FORMATS: tuple[Format, ...] = (
    _awq(32, "gemm", "int4"),
    _awq(128, "gemm", "int4-g128"),
    _awq(-1, "gemm", "int4-g128"),
    _awq(16, "gemm", None),
    _awq(32, "gemv", "int4"),
    _awq(64, "gemv", "int4-g64"),
    _gptq("4", 4, 32, "int4"),
    _gptq("4-v2", 4, 64, "int4-g64", first_version=False),
    _gptq("4-sym", 4, 128, "int4-g128-sym", symmetric=True, with_index=False),
    _gptq("4-act-order", 4, 32, "int4", act_order=5),
    _gptq("4-whole", 4, -1, "int4-g128", act_order=5),
    _gptq("2", 2, 32),
    _gptq("2-v2", 2, 64, first_version=False),
    _gptq("3", 3, 32),
    _gptq("3-sym", 3, -1, symmetric=True),
    _gptq("3-act-order", 3, 32, first_version=False, act_order=7),
    _gptq("8", 8, 32),
    _gptq("8-v2-uneven", 8, 48, first_version=False),
    _gptq("8-sym", 8, -1, "int8", symmetric=True),
)

VOCAB, HIDDEN, INNER, LAYERS = 96, 128, 160, 2
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
MATRICES = {
    "self_attn.q_proj": (128, HIDDEN),
    "self_attn.k_proj": (64, HIDDEN),
    "self_attn.v_proj": (64, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 128),
    "mlp.gate_proj": (128, HIDDEN),
    "mlp.up_proj": (128, HIDDEN),
    "mlp.down_proj": (HIDDEN, 128),
}


def write_pair(
    folder: Path,
    settings: Mapping[str, Any] | None,
    write: Callable[[str], Writer | None],
    config: Mapping[str, Any] | None = None,
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A folder with quantized matrices, one with their numbers in float32, and these numbers.

    write: by module, "lm_head" too; None leaves it plain.
    """
    generator = torch.Generator().manual_seed(5)
    config = {**CONFIG, **(config or {})}
    plain: Tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": 1 + 0.2 * torch.randn(HIDDEN, generator=generator),
    }
    modules = {"lm_head": (VOCAB, HIDDEN)} if not config["tie_word_embeddings"] else {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        modules |= {prefix + name: shape for name, shape in MATRICES.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"{prefix}{norm}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=generator)
        for name in ("q", "k", "v"):
            module = f"self_attn.{name}_proj"
            size = MATRICES[module][0]
            plain[f"{prefix}{module}.bias"] = torch.randn(size, generator=generator)
    packed, numbers = dict(plain), {}
    random = np.random.default_rng(17)
    for module, (outputs, inputs) in modules.items():
        writer = write(module)
        if writer is None:
            weight = torch.randn(outputs, inputs, generator=generator) * 0.1
            packed[f"{module}.weight"] = plain[f"{module}.weight"] = weight
        else:
            tensors, numbers[module] = writer(outputs, inputs, random)
            packed |= {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}
            plain[f"{module}.weight"] = numbers[module]
    paths = folder / "packed", folder / "plain"
    for path, tensors in zip(paths, (packed, plain), strict=True):
        path.mkdir()
        own = {"quantization_config": settings} if path == paths[0] and settings else {}
        (path / "config.json").write_text(json.dumps({**config, **own}))
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path / "model.safetensors", {"format": "pt"})
    return *paths, numbers


def all_but_head(writer: Writer) -> Callable[[str], Writer | None]:
    """`write` of `write_pair` that leaves lm_head plain."""
    return lambda module: None if module == "lm_head" else writer
