"""Writes quantized matrices number by number, and says what they are in float32.

Nothing that writes is shared with quire's readers. Each writer returns the tensors of one matrix
by what follows the module's name, and the matrix [O, I].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quire.compute.models.loader import read_packed
from quire.compute.quantization import StoredMatrix
from quire.config.packed import PackedLayout

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
    """Return (q - z) · s in float32. group: group of each input."""
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


def halved(bits: int, random: np.random.Generator, *shape: int) -> np.ndarray:
    """Scales in bfloat16, whose words are the upper halves of those of float32."""
    scales = ((random.random(shape) + 0.5) / (6 << bits)).astype(np.float32)
    return (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)


def pack_quantized(
    bits: int, group_size: int, *, symmetric: bool = True, act_order: int | None = None
) -> Writer:
    def write(outputs: int, inputs: int, random: np.random.Generator) -> Written:
        size = inputs if group_size == -1 else group_size
        group = np.arange(inputs) // size
        if act_order is not None:
            group = np.random.default_rng(act_order).permutation(group)
        half = 1 << bits - 1
        values = levels(outputs, inputs, bits, random) - half
        zeros = grid(outputs, inputs // size, bits, random)[0] - half
        zeros = np.zeros_like(zeros) if symmetric else zeros
        scales = halved(bits, random, *zeros.shape)
        tensors = {
            "weight_packed": along(values + half, bits, 1),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = along(zeros + half, bits, 0)
        if act_order is not None:
            tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        return tensors, scaled(values, zeros, scales, group)

    return write


def int_quantized(bits: int, group_size: int, *, symmetric: bool = True, shape: str = "") -> Writer:
    """shape: "whole" for one scale."""

    def write(outputs: int, inputs: int, random: np.random.Generator) -> Written:
        size = inputs if group_size == -1 else group_size
        half = 1 << bits - 1
        values = levels(outputs, inputs, bits, random) - half
        zeros = grid(outputs, inputs // size, bits, random)[0] - half
        zeros = np.zeros_like(zeros) if symmetric else zeros
        scales = halved(bits, random, *zeros.shape)
        if shape == "whole":
            scales[:] = scales[0, 0]
        stored = torch.from_numpy(scales).bfloat16()
        tensors = {
            "weight": torch.from_numpy(values.astype(np.int8)),
            "weight_scale": stored[0] if shape == "whole" else stored,
            "input_scale": torch.ones(1),
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        return tensors, scaled(values, zeros, scales, np.arange(inputs) // size)

    return write


def e4m3(codes: np.ndarray) -> np.ndarray:
    """1 sign, 4 exponent bits less 7, 3 mantissa bits; exponent 0 is below normal."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    return np.where(codes >> 7, -size, size).astype(np.float32)


def float8(scales: str, name: str = "weight_scale", block: tuple[int, int] = (0, 0)) -> Writer:
    """scales: "whole", "outputs", "blocks", or "powers" (blocks of e8m0)."""

    def write(outputs: int, inputs: int, random: np.random.Generator) -> Written:
        codes = random.integers(0, 256, (outputs, inputs)).astype(np.uint8)
        codes[codes & 127 == 127] = 3
        codes[0, :8] = (0, 1, 7, 8, 126, 128, 129, 254)
        rows = {"whole": outputs, "outputs": 1}.get(scales, block[0])
        columns = inputs if scales in ("whole", "outputs") else block[1]
        shape = (-(-outputs // rows), -(-inputs // columns))
        scale = ((random.random(shape) + 0.5) / 800).astype(np.float32)
        stored = torch.from_numpy(scale)
        if scales == "powers":
            exponents = random.integers(115, 119, shape).astype(np.uint8)
            scale = 2.0 ** (exponents.astype(np.float32) - 127)
            stored = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
        each = scale[np.arange(outputs) // rows][:, np.arange(inputs) // columns]
        tensors = {
            "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
            name: stored.reshape(()) if scales == "whole" else stored,
        }
        return tensors, torch.from_numpy(e4m3(codes) * each.astype(np.float32))

    return write


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(*, blocks: bool) -> Writer:
    def write(outputs: int, inputs: int, random: np.random.Generator) -> Written:
        codes = levels(outputs, inputs, 4, random).astype(np.uint8)
        exponents = random.integers(119, 124, (outputs, inputs // 32)).astype(np.uint8)
        packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
        powers = 2.0 ** (exponents.astype(np.float32) - 127)
        matrix = torch.from_numpy(E2M1[codes] * np.repeat(powers, 32, axis=1).astype(np.float32))
        if blocks:
            own = {"weight_blocks": packed.view(outputs, -1, 16)}
            return own | {"weight_scales": torch.from_numpy(exponents)}, matrix
        own = {"weight_packed": packed, "weight_scale": torch.from_numpy(exponents)}
        return own, matrix

    return write


def bits_and_bytes_4(block: int, *, nested: bool, kind: str = "nf4") -> Writer:
    def write(outputs: int, inputs: int, random: np.random.Generator) -> Written:
        table = np.sort(random.random(16).astype(np.float32)) * 2 - 1
        codes = levels(outputs, inputs, 4, random).astype(np.uint8).reshape(-1)
        blocks = -(-codes.size // block)
        absmax = (random.random(blocks).astype(np.float32) + 0.5) * np.float32(0.1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state["shape"] = [outputs, inputs]
        tensors: Tensors = {}
        if nested:
            second = (random.random(256).astype(np.float32) - np.float32(0.5)) * np.float32(0.1)
            index = random.integers(0, 256, blocks).astype(np.uint8)
            outer = random.random(-(-blocks // 16)).astype(np.float32)
            state |= {"nested_blocksize": 16, "nested_offset": 0.0625}
            absmax = second[index] * outer[np.arange(blocks) // 16] + np.float32(0.0625)
            tensors["weight.nested_absmax"] = torch.from_numpy(outer)
            tensors["weight.nested_quant_map"] = torch.from_numpy(second)
            tensors["weight.absmax"] = torch.from_numpy(index)
        else:
            tensors["weight.absmax"] = torch.from_numpy(absmax)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors |= {
            "weight": torch.from_numpy(codes[::2] << 4 | codes[1::2])[:, None],
            "weight.quant_map": torch.from_numpy(table),
            f"weight.quant_state.bitsandbytes__{kind}": torch.from_numpy(text),
        }
        numbers = table[codes] * absmax[np.arange(codes.size) // block]
        return tensors, torch.from_numpy(numbers.astype(np.float32)).view(outputs, inputs)

    return write


def bits_and_bytes_8(outputs: int, inputs: int, random: np.random.Generator) -> Written:
    values = levels(outputs, inputs, 8, random) - 128
    scale = (random.random(outputs) * 0.2 + 0.1).astype(np.float32)
    tensors = {
        "weight": torch.from_numpy(values.astype(np.int8)),
        "SCB": torch.from_numpy(scale),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    each = (scale / np.float32(127))[:, None]
    return tensors, torch.from_numpy(values.astype(np.float32) * each)


def squeezellm(bits: int, *, sparse: bool = False, full: bool = False) -> Writer:
    def write(outputs: int, inputs: int, random: np.random.Generator) -> Written:
        values = levels(outputs, inputs, bits, random)
        table = ((random.random((outputs, 1 << bits)) - 0.5) * 0.3).astype(np.float32)
        matrix = np.take_along_axis(table, values, axis=1)
        tensors = {
            "qweight": along(values.T, bits, 0),
            "lookup_table": torch.from_numpy(table),
        }
        if sparse:
            found = random.random((outputs, inputs)) < 0.02
            found[3] = False
            extra = np.where(found, random.random(found.shape), 0).astype(np.float32)
            matrix = matrix + extra
            tensors |= {
                "rows": torch.tensor([0, *found.sum(1).cumsum().tolist()], dtype=torch.int32),
                "cols": torch.from_numpy(np.nonzero(found)[1].astype(np.int32)),
                "vals": torch.from_numpy(extra[found]),
            }
        if full:
            index = np.array([1, outputs - 2, 34])
            rows = (random.random((3, inputs)) - 0.5).astype(np.float32)
            matrix[index] += rows
            tensors["full_rows"] = torch.from_numpy(rows.T.copy())
            tensors["full_row_indices"] = torch.from_numpy(index.astype(np.int32))
        return tensors, torch.from_numpy(matrix)

    return write


@dataclass(frozen=True)
class Format:
    """One way to quantize a model. settings: its quantization_config. kernel: kernel of matrices
    [O, 128], for tables without the size of blocks; None: they are widened as they are used."""

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


_BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def _compressed(
    name: str,
    layout: str,
    weights: dict[str, Any],
    write: Writer,
    kernel: str | None = None,
    activations: dict[str, Any] | None = None,
) -> Format:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    settings = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return Format(f"compressed-{name}", settings, write, kernel)


def _pack(name: str, bits: int, size: int, kernel: str | None = None, **more: Any) -> Format:
    weights = {"num_bits": bits, "type": "int", "symmetric": more.get("symmetric", True)}
    weights |= {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    return _compressed(name, "pack-quantized", weights, pack_quantized(bits, size, **more), kernel)


def _ints(name: str, bits: int, size: int, kernel: str | None = None, **more: Any) -> Format:
    weights = {"num_bits": bits, "type": "int", "symmetric": more.get("symmetric", True)}
    weights |= {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    write = int_quantized(bits, size, **more)
    return _compressed(name, "int-quantized", weights, write, kernel, _BY_TOKEN)


def _fp8(name: str, settings: dict[str, Any], write: Writer) -> Format:
    return Format(f"fp8-{name}", {"quant_method": "fp8", **settings}, write, "tables-8")


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}

FORMATS: tuple[Format, ...] = (
    _awq(32, "gemm", "blocks-w4_zero-32"),
    _awq(128, "gemm", "blocks-w4_zero-128"),
    _awq(-1, "gemm", "blocks-w4_zero-128"),
    _awq(16, "gemm", None),
    _awq(32, "gemv", "blocks-w4_zero-32"),
    _awq(64, "gemv", "blocks-w4_zero-64"),
    _gptq("4", 4, 32, "blocks-w4_zero-32"),
    _gptq("4-v2", 4, 64, "blocks-w4_zero-64", first_version=False),
    _gptq("4-sym", 4, 128, "blocks-w4-128", symmetric=True, with_index=False),
    _gptq("4-act-order", 4, 32, "blocks-w4_zero-32", act_order=5),
    _gptq("4-whole", 4, -1, "blocks-w4_zero-128", act_order=5),
    _gptq("2", 2, 32, "blocks-w2_zero-32"),
    _gptq("2-v2", 2, 64, "blocks-w2_zero-64", first_version=False),
    _gptq("3", 3, 32, "blocks-w3_zero-32"),
    _gptq("3-sym", 3, -1, "blocks-w3_zero-128", symmetric=True),
    _gptq("3-act-order", 3, 32, "blocks-w3_zero-32", first_version=False, act_order=7),
    _gptq("8", 8, 32, "blocks-w8_zero-32"),
    _gptq("8-v2-uneven", 8, 48, first_version=False),
    _gptq("8-sym", 8, -1, "blocks-w8-128", symmetric=True),
    _pack("w4a16", 4, 128, "blocks-w4-128"),
    _pack("w4a16-asym", 4, 32, "blocks-w4_zero-32", symmetric=False),
    _pack("w4a16-act-order", 4, 32, "blocks-w4-32", act_order=3),
    _pack("w4a16-channel", 4, -1, "blocks-w4-128"),
    _pack("w8a16", 8, -1, "blocks-w8-128"),
    _pack("w8a16-groups", 8, 64, "blocks-w8_zero-64", symmetric=False),
    _ints("w8a8", 8, -1, "int8"),
    _ints("w8a8-whole", 8, -1, "int8", shape="whole"),
    _ints("w8a8-asym", 8, -1, "blocks-w8_zero-128", symmetric=False),
    _ints("w8a8-groups", 8, 32, "blocks-w8-32"),
    _ints("w4a8", 4, 64, "int4-g64-sym"),
    _ints("w4a8-channel", 4, -1, "int8"),
    _compressed(
        "fp8",
        "float-quantized",
        {**_FLOAT, "strategy": "channel"},
        float8("outputs"),
        "tables-8",
    ),
    _compressed(
        "fp8-blocks",
        "float-quantized",
        {**_FLOAT, "strategy": "block", "block_structure": [32, 48]},
        float8("blocks", block=(32, 48)),
        "tables-8",
    ),
    _compressed(
        "mxfp4", "mxfp4-pack-quantized", {"num_bits": 4}, mxfp4(blocks=False), "blocks-e2m1-32"
    ),
    Format("mxfp4-blocks", {"quant_method": "mxfp4"}, mxfp4(blocks=True), "blocks-e2m1-32"),
    _fp8("whole", {}, float8("whole")),
    _fp8("outputs", {}, float8("outputs")),
    _fp8(
        "blocks",
        {"weight_block_size": [128, 128]},
        float8("blocks", "weight_scale_inv", (128, 128)),
    ),
    _fp8("powers", {"weight_block_size": [48, 80]}, float8("powers", "weight_scale_inv", (48, 80))),
    Format(
        "modelopt", {"quant_method": "modelopt", "quant_algo": "FP8"}, float8("whole"), "tables-8"
    ),
    Format("nf4", _NF4, bits_and_bytes_4(64, nested=False), "tables-4"),
    Format("nf4-nested", _NF4, bits_and_bytes_4(48, nested=True), "tables-4"),
    Format("fp4", _NF4, bits_and_bytes_4(256, nested=True, kind="fp4"), "tables-4"),
    Format(
        "int8-bnb",
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        bits_and_bytes_8,
        "blocks-w8-128",
    ),
    Format("squeezellm-3", {"quant_method": "squeezellm", "wbits": 3}, squeezellm(3), "tables-3"),
    Format(
        "squeezellm-4-sparse",
        {"quant_method": "squeezellm", "wbits": 4},
        squeezellm(4, sparse=True, full=True),
        "tables-4",
    ),
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
    """Write a folder with quantized matrices and one with their numbers in float32. Return both and
    the numbers.

    write: returns the writer of a module, "lm_head" included; None leaves it plain.
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
        path.mkdir(parents=True)
        own = {"quantization_config": settings} if path == paths[0] and settings else {}
        (path / "config.json").write_text(json.dumps({**config, **own}))
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path / "model.safetensors", {"format": "pt"})
    return *paths, numbers


def all_but_head(writer: Writer) -> Callable[[str], Writer | None]:
    """`write` of `write_pair` that leaves lm_head plain."""
    return lambda module: None if module == "lm_head" else writer


def stored_matrix(layout: PackedLayout) -> StoredMatrix:
    """Return a matrix, read in the way of the loader."""
    file = next(iter(layout.tensors.values())).file
    with safe_open(file, framework="pt") as opened:
        return read_packed(layout, file, opened)
