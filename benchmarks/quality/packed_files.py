"""Folders in the formats of other tools, rounded to nearest from a plain folder: for how close a
format's kernel comes to the format's own numbers, not for how good a tool's choice of numbers is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["PACKED", "write_packed"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]

E4M3_LARGEST = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (QLoRA, Dettmers et al. 2023, appendix E)."""


def write_packed(plain: Path, out: Path, name: str) -> None:
    """Write `plain`, of one file in bfloat16, as the format `name` of `PACKED`. The embedding, the
    head and norms stay as they are."""
    settings, pack = PACKED[name]
    out.mkdir()
    for file in plain.glob("*.json"):
        shutil.copyfile(file, out / file.name)
    config = json.loads((plain / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors: Tensors = {}
    for tensor_name, tensor in load_file(plain / "model.safetensors").items():
        module = tensor_name.removesuffix(".weight")
        if module.endswith(PROJECTIONS):
            packed = pack(tensor.float())
            tensors |= {f"{module}.{kind}": part.contiguous() for kind, part in packed.items()}
        else:
            tensors[tensor_name] = tensor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def _grid(weight: torch.Tensor, bits: int, size: int) -> tuple[torch.Tensor, ...]:
    """Values [O, I], scales of float16 and zero points [O, I / size], over the range of a group."""
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-6).half()
    zero = (-low / scale.float()).round().clamp(0, (1 << bits) - 1)
    values = (groups / scale.float()[..., None]).round() + zero[..., None]
    return values.clamp(0, (1 << bits) - 1).flatten(1).long(), scale, zero.long()


def _words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [R, n] → int32 [R, n · bits / 32]: a stream of bits, the lowest first."""
    stream = (values[..., None] >> torch.arange(bits)) & 1
    words = (stream.flatten(1).unflatten(1, (-1, 32)) << torch.arange(32)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _awq(weight: torch.Tensor) -> Tensors:
    values, scale, zero = _grid(weight, 4, 64)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(numbers: torch.Tensor) -> torch.Tensor:
        return _words(numbers.t().unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    return {"qweight": words(values), "qzeros": words(zero), "scales": scale.t()}


def _gptq(bits: int) -> Callable[[torch.Tensor], Tensors]:
    def pack(weight: torch.Tensor) -> Tensors:
        values, scale, zero = _grid(weight, bits, 64)
        qweight = _words(values, bits).t()
        return {"qweight": qweight, "qzeros": _words(zero.t(), bits), "scales": scale.t()}

    return pack


def _float8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / E4M3_LARGEST
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _float8_blocks(weight: torch.Tensor) -> Tensors:
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % 128, 0, -outputs % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = blocks.abs().amax((1, 3)) / E4M3_LARGEST
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outputs, :inputs]
    return {"weight": (weight / wide).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def _nf4(weight: torch.Tensor) -> Tensors:
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    table = torch.tensor(NF4)
    codes = _nearest(table, blocks / absmax[:, None]).view(-1, 2)
    state = json.dumps({"shape": list(weight.shape), "blocksize": 64, "quant_type": "nf4"})
    return {
        "weight": (codes[:, :1] << 4 | codes[:, 1:]).to(torch.uint8),
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode())).byte(),
    }


def _int8(weight: torch.Tensor) -> Tensors:
    largest = weight.abs().amax(1)
    return {"weight": (weight * 127 / largest[:, None]).round().to(torch.int8), "SCB": largest}


def _mxfp4(weight: torch.Tensor) -> Tensors:
    groups = weight.unflatten(1, (-1, 32))
    exponent = torch.frexp(groups.abs().amax(2).clamp(min=1e-30)).exponent - 3
    scaled = groups / torch.ldexp(torch.ones(exponent.shape), exponent)[..., None]
    codes = _nearest(torch.tensor(E2M1), scaled.abs()) | (scaled < 0).long() << 3
    pairs = codes.flatten(1).unflatten(1, (-1, 2))
    packed = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": (exponent + 127).to(torch.uint8)}


def _squeezellm(weight: torch.Tensor) -> Tensors:
    """Tables of 16 numbers per output by Lloyd's steps from quantiles, and the largest 0.4 % of the
    weights in the sparse part."""
    limit = weight.abs().flatten().kthvalue(int(weight.numel() * 0.996)).values
    outside = weight.abs() > limit
    dense = weight.masked_fill(outside, 0)
    table = torch.quantile(dense, (torch.arange(16) + 0.5) / 16, dim=1).t().contiguous()
    for _ in range(8):
        table = table.sort(dim=1).values
        codes = torch.searchsorted((table[:, 1:] + table[:, :-1]) / 2, dense)
        count = torch.zeros_like(table).scatter_add_(1, codes, torch.ones_like(dense))
        total = torch.zeros_like(table).scatter_add_(1, codes, dense)
        table = torch.where(count > 0, total / count.clamp(min=1), table)
    table = table.sort(dim=1).values.half()
    wide = table.float()
    codes = torch.searchsorted((wide[:, 1:] + wide[:, :-1]) / 2, dense)
    ends = torch.nn.functional.pad(outside.sum(1).cumsum(0), (1, 0))
    difference = weight[outside] - wide.gather(1, codes)[outside]
    return {
        "qweight": _words(codes, 4).t(),
        "lookup_table": table,
        "rows": ends.int(),
        "cols": outside.nonzero()[:, 1].int(),
        "vals": difference.half(),
    }


def _nearest(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Places in a sorted table of the entries that are nearest."""
    return torch.searchsorted((table[1:] + table[:-1]) / 2, numbers.contiguous())


def _gptq_settings(bits: int) -> dict[str, Any]:
    own = {"bits": bits, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"}
    return {"quant_method": "gptq", **own}


PACKED: Mapping[str, tuple[dict[str, Any], Callable[[torch.Tensor], Tensors]]] = MappingProxyType(
    {
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, _awq),
        "gptq-3": (_gptq_settings(3), _gptq(3)),
        "gptq-4": (_gptq_settings(4), _gptq(4)),
        "gptq-8": (_gptq_settings(8), _gptq(8)),
        "fp8": ({"quant_method": "fp8"}, _float8),
        "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, _float8_blocks),
        "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4),
        "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8),
        "mxfp4": (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "float"},
                        "format": "mxfp4-pack-quantized",
                    }
                },
            },
            _mxfp4,
        ),
        "squeezellm": ({"quant_method": "squeezellm", "wbits": 4}, _squeezellm),
    }
)
"""`quantization_config` and the tensors of a matrix, by a name of ours."""
