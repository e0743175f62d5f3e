"""Writes GGUF files number by number, independently of the code that reads them.

Blocks are packed from the integers that they hold, one at a time, and come with the numbers that
they stand for. Factors are powers of two, so that each number is exact.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.gguf_delta import DELTA, DELTA_NAMES, delta_metadata, rows_of_delta
from tests.gguf_latent import LATENT, LATENT_NAMES, heads_of_latent, latent_metadata
from tests.gguf_mamba import ARCHITECTURES, mamba_tensors

TYPE_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10,
    "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30,
    "MXFP4": 39,
}  # fmt: skip
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)

Block = tuple[bytes, list[float]]


@dataclass(frozen=True)
class Tensor:
    """shape: slowest dimension first."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def _f16(value: float) -> bytes:
    return struct.pack("<e", value)


def _nibbles(q: list[int]) -> bytes:
    half = len(q) // 2
    return bytes(q[j] | q[j + half] << 4 for j in range(half))


def _fifth_bits(q: list[int]) -> bytes:
    return struct.pack("<I", sum((q[j] >> 4) << j for j in range(32)))


def q4_0(r: random.Random, d: float) -> Block:
    q = [r.randrange(16) for _ in range(32)]
    return _f16(d) + _nibbles(q), [d * (x - 8) for x in q]


def q4_1(r: random.Random, d: float) -> Block:
    q, m = [r.randrange(16) for _ in range(32)], r.choice((-2.0, 0.25))
    return _f16(d) + _f16(m) + _nibbles(q), [d * x + m for x in q]


def q5_0(r: random.Random, d: float) -> Block:
    q = [r.randrange(32) for _ in range(32)]
    low = _nibbles([x & 15 for x in q])
    return _f16(d) + _fifth_bits(q) + low, [d * (x - 16) for x in q]


def q5_1(r: random.Random, d: float) -> Block:
    q, m = [r.randrange(32) for _ in range(32)], r.choice((-2.0, 0.25))
    low = _nibbles([x & 15 for x in q])
    return _f16(d) + _f16(m) + _fifth_bits(q) + low, [d * x + m for x in q]


def q8_0(r: random.Random, d: float) -> Block:
    q = [r.randrange(-128, 128) for _ in range(32)]
    return _f16(d) + struct.pack("<32b", *q), [d * x for x in q]


def q2_k(r: random.Random, d: float) -> Block:
    scale, low = [[r.randrange(16) for _ in range(16)] for _ in range(2)]
    q, packed = [r.randrange(4) for _ in range(256)], bytearray(64)
    for i, x in enumerate(q):
        packed[i // 128 * 32 + i % 32] |= x << i % 128 // 32 * 2
    head = bytes(s | m << 4 for s, m in zip(scale, low, strict=True))
    numbers = [d * scale[i // 16] * x - 0.5 * low[i // 16] for i, x in enumerate(q)]
    return head + bytes(packed) + _f16(d) + _f16(0.5), numbers


def q3_k(r: random.Random, d: float) -> Block:
    scale, q = [r.randrange(64) for _ in range(16)], [r.randrange(8) for _ in range(256)]
    mask, packed, scales = bytearray(32), bytearray(64), bytearray(12)
    for i, x in enumerate(q):
        packed[i // 128 * 32 + i % 32] |= (x & 3) << i % 128 // 32 * 2
        mask[i % 32] |= (x >> 2) << i // 32
    for k, s in enumerate(scale):
        scales[k % 8] |= (s & 15) << (k // 8 * 4)
        scales[8 + k % 4] |= (s >> 4) << (k // 4 * 2)
    numbers = [d * (scale[i // 16] - 32) * (x - 4) for i, x in enumerate(q)]
    return bytes(mask + packed + scales) + _f16(d), numbers


def _pairs(scale: list[int], low: list[int]) -> bytes:
    b = bytearray(12)
    for s, (sc, m) in enumerate(zip(scale, low, strict=True)):
        if s < 4:
            b[s] |= sc
            b[s + 4] |= m
        else:
            b[s + 4] |= sc & 15 | (m & 15) << 4
            b[s - 4] |= sc >> 4 << 6
            b[s] |= m >> 4 << 6
    return bytes(b)


def _k_pairs(r: random.Random, d: float, bits: int) -> Block:
    scale, low = [[r.randrange(64) for _ in range(8)] for _ in range(2)]
    q = [r.randrange(1 << bits) for _ in range(256)]
    packed, high = bytearray(128), bytearray(32)
    for i, x in enumerate(q):
        packed[i // 64 * 32 + i % 32] |= (x & 15) << i // 32 % 2 * 4
        high[i % 32] |= (x >> 4) << i // 32
    head = _f16(d) + _f16(0.5) + _pairs(scale, low) + (bytes(high) if bits == 5 else b"")
    return head + bytes(packed), [
        d * scale[i // 32] * x - 0.5 * low[i // 32] for i, x in enumerate(q)
    ]


def q4_k(r: random.Random, d: float) -> Block:
    return _k_pairs(r, d, 4)


def q5_k(r: random.Random, d: float) -> Block:
    return _k_pairs(r, d, 5)


def q6_k(r: random.Random, d: float) -> Block:
    scale, q = [r.randrange(-128, 128) for _ in range(16)], [r.randrange(64) for _ in range(256)]
    low, high = bytearray(128), bytearray(64)
    for i, x in enumerate(q):
        p, t, place = i // 128, i % 128 // 32, i % 32
        low[64 * p + place + 32 * (t % 2)] |= (x & 15) << 4 * (t // 2)
        high[32 * p + place] |= (x >> 4) << 2 * t
    numbers = [d * scale[i // 16] * (x - 32) for i, x in enumerate(q)]
    return bytes(low + high) + struct.pack("<16b", *scale) + _f16(d), numbers


def iq4_nl(r: random.Random, d: float) -> Block:
    q = [r.randrange(16) for _ in range(32)]
    return _f16(d) + _nibbles(q), [d * NON_LINEAR[x] for x in q]


def iq4_xs(r: random.Random, d: float) -> Block:
    scale, q = [r.randrange(64) for _ in range(8)], [r.randrange(16) for _ in range(256)]
    top = sum((s >> 4) << 2 * k for k, s in enumerate(scale))
    low = bytes(scale[2 * k] & 15 | (scale[2 * k + 1] & 15) << 4 for k in range(4))
    body = b"".join(_nibbles(q[32 * k : 32 * k + 32]) for k in range(8))
    numbers = [d * (scale[i // 32] - 32) * NON_LINEAR[x] for i, x in enumerate(q)]
    return _f16(d) + struct.pack("<H", top) + low + body, numbers


def mxfp4(r: random.Random, d: float) -> Block:
    q, e = [r.randrange(16) for _ in range(32)], r.randrange(110, 140)
    return bytes((e,)) + _nibbles(q), [2.0 ** (e - 127) * E2M1[x] for x in q]


PACKERS: Mapping[str, Callable[[random.Random, float], Block]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q2_K": q2_k,
    "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}  # fmt: skip


def random_tensor(kind: str, shape: tuple[int, int], seed: int, d: float) -> tuple[Tensor, Any]:
    """A matrix of random blocks, and its numbers float32 of that shape."""
    r, data, numbers = random.Random(seed), b"", []
    while len(numbers) < shape[0] * shape[1]:
        packed, values = PACKERS[kind](r, d)
        data, numbers = data + packed, numbers + values
    return Tensor(kind, shape, data), torch.tensor(numbers).view(shape)


def float_tensor(values: torch.Tensor) -> Tensor:
    return Tensor("F32", tuple(values.shape), values.contiguous().numpy().tobytes())


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    if isinstance(value, array):  # of "i": int32, whatever the numbers are
        return 9, struct.pack("<IQ", 5, len(value)) + value.tobytes()
    items = [_value(item) for item in value]
    kind = items[0][0] if items else 4
    return 9, struct.pack("<IQ", kind, len(items)) + b"".join(data for _, data in items)


def gguf_header(
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
    version: int = 3,
) -> bytes:
    """Everything before the data. tensors: name, kind, shape and bytes of each."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        out += _string(key) + struct.pack("<I", kind) + data
    offset = 0
    for name, kind, shape, size in tensors:
        out += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out += struct.pack("<IQ", TYPE_IDS[kind], offset)
        offset += size + -size % 32
    return out + b"\0" * (-len(out) % 32)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int = 3
) -> Path:
    listed = [(name, each.kind, each.shape, len(each.data)) for name, each in tensors.items()]
    body = (each.data + b"\0" * (-len(each.data) % 32) for each in tensors.values())
    path.write_bytes(gguf_header(metadata, listed, version) + b"".join(body))
    return path


_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm":
    "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}  # fmt: skip
_GEMMA_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


_OLMO_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM_NAMES = {
    **_NAMES,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_GEMMA4_NAMES = {
    **_GEMMA_NAMES,
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
_LFM2_NAMES = {
    **_NAMES, "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "model.embedding_norm": "token_embd_norm", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "self_attn.out_proj": "attn_output",
    "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj", "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
}  # fmt: skip
_LFM2_MOE_NAMES = {**_LFM2_NAMES, "feed_forward.gate": "ffn_gate_inp"}
_EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps", "w1": "ffn_gate_exps", "up_proj": "ffn_up_exps",
    "w3": "ffn_up_exps", "down_proj": "ffn_down_exps", "w2": "ffn_down_exps",
}  # fmt: skip
_MOE_NAMES = {
    **_NAMES, "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_MOE_POST_NORM_NAMES = {
    **_MOE_NAMES, "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj":
    "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
_BARE_NAMES = {
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "self_attn.sinks": "attn_sinks.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
_MOE = (
    "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "mixtral", "glm4moe", "gpt-oss",
    "lfm2moe", "qwen35moe", "qwen3next", "deepseek2",
)  # fmt: skip
_PAIRED = ("llama", "granite", "smollm3", "granitemoe", "mixtral")
"""Architectures whose files have rows of q and k in the order of the rotated pairs."""


def gguf_name(name: str, architecture: str) -> str:
    own = {
        "gemma3": _GEMMA_NAMES, "gemma4": _GEMMA4_NAMES, "olmo2": _OLMO_NAMES, "glm4": _GLM_NAMES,
        "seed_oss": _OLMO_NAMES, "lfm2": _LFM2_NAMES, "lfm2moe": _LFM2_MOE_NAMES,
    }  # fmt: skip
    names = own.get(architecture, _MOE_NAMES if architecture in _MOE else _NAMES)
    if architecture in ("glm4moe", "gpt-oss"):
        names = _MOE_POST_NORM_NAMES
    if architecture in DELTA:
        names = {**_MOE_NAMES, **DELTA_NAMES}
    if architecture in LATENT:
        names = {**_MOE_POST_NORM_NAMES, **LATENT_NAMES}
    for bare, stored in _BARE_NAMES.items():
        if name.endswith(bare):
            return f"blk.{name.split('.')[2]}.{stored}"
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{names[part]}.{kind}"
    return f"{names[stem]}.{kind}"


def gguf_tensors(folder: Path, architecture: str, config: Any) -> dict[str, Tensor]:
    """The weights of a Hugging Face folder as GGUF stores them, in float32."""
    rows = gguf_rows(load_file(folder / "model.safetensors"), architecture, config)
    return {name: float_tensor(values) for name, values in rows.items()}


def gguf_rows(
    plain: Mapping[str, torch.Tensor], architecture: str, config: Any
) -> dict[str, torch.Tensor]:
    """Weights by their names in GGUF, in its order of rows. plain: weights by names of a folder."""
    if architecture in ARCHITECTURES:
        return dict(mamba_tensors(plain, config))
    found: dict[str, torch.Tensor] = {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if architecture in DELTA:
        plain = dict(rows_of_delta(plain, architecture, config))
    if architecture == "deepseek2":
        found = heads_of_latent(plain, config)
        plain = {name: values for name, values in plain.items() if ".kv_b_proj." not in name}
    if architecture in _MOE:
        plain, stacked = _without_experts(plain)
        found |= stacked
    for name, values in plain.items():
        part, rows = name.split(".")[-2], values
        if architecture in _PAIRED and part in heads:
            split = values.reshape(heads[part], 2, -1, *values.shape[1:])
            rows = split.swapaxes(1, 2).reshape(values.shape)
        if name.endswith(("conv.conv.weight", "conv1d.weight")):
            rows = values.squeeze(1)
        has_one = architecture == "gemma3" or architecture in DELTA
        if has_one and part.endswith("norm") and ".linear_attn." not in name:
            rows = values + 1
        found[gguf_name(name, architecture)] = rows
    return found


def _without_experts(
    plain: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Other tensors, and those of experts, all of a block in one [experts, rows, columns]."""
    others: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, values in plain.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if ".mlp.experts." in name and values.dim() == 3 and "_proj" in name:  # gpt-oss
            for part, columns in _parts_of_gpt_oss(name, values.transpose(1, 2)):
                experts[f"blk.{layer}.{part}.weight"] = dict(enumerate(columns))
        elif name.endswith("_proj_bias"):
            for part, rows in _parts_of_gpt_oss(name, values):
                experts[f"blk.{layer}.{part}.bias"] = dict(enumerate(rows))
        elif ".experts." in name:
            number, part, _ = name.partition(".experts.")[2].split(".")
            stack = experts.setdefault(f"blk.{layer}.{_EXPERT_NAMES[part]}.weight", {})
            stack[int(number)] = values
        elif name.endswith(".input_linear.weight"):  # gate and up of all experts
            for part, rows in zip(("gate", "up"), values.chunk(2, dim=1), strict=True):
                experts[f"blk.{layer}.ffn_{part}_exps.weight"] = dict(enumerate(rows))
        elif name.endswith(".output_linear.weight"):
            experts[f"blk.{layer}.ffn_down_exps.weight"] = dict(enumerate(values))
        else:
            others[name] = values.flatten() if "shared_expert_gate" in name else values
    stacked = {
        name: torch.stack([own[number] for number in sorted(own)]) for name, own in experts.items()
    }
    return others, stacked


def _parts_of_gpt_oss(name: str, rows: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """rows [experts, rows, …]; those of gate and up take turns."""
    if "down_proj" in name:
        return [("ffn_down_exps", rows)]
    return [("ffn_gate_exps", rows[:, ::2]), ("ffn_up_exps", rows[:, 1::2])]


_STATES_HEADS = ("qwen3", "qwen3moe", "gemma3", "gemma4", "glm4", "glm4moe", "gpt-oss")
"""Architectures whose published models have a head_dim in config.json: it is written of these."""


def _lfm2_metadata(config: Any) -> dict[str, Any]:
    kinds, a = config.layer_types, config.model_type.replace("_", "")
    heads = [0 if kind == "conv" else config.num_key_value_heads for kind in kinds]
    values = {
        f"{a}.attention.head_count_kv": heads,
        f"{a}.shortconv.l_cache": config.conv_L_cache,
    }
    if a == "lfm2":
        return values | {"lfm2.feed_forward_length": 32}  # two thirds of 48, as folders adjust it
    return values | {
        f"{a}.expert_feed_forward_length": config.moe_intermediate_size,
        f"{a}.leading_dense_block_count": config.num_dense_layers,
        f"{a}.expert_gating_func": 2,
    }


def gguf_metadata(architecture: str, config: Any) -> dict[str, Any]:
    """Settings of a `transformers` config as GGUF spells them."""
    a = "llama" if architecture == "mixtral" else architecture
    values = {
        "general.architecture": a,
        f"{a}.block_count": config.num_hidden_layers,
        f"{a}.context_length": config.max_position_embeddings,
        f"{a}.embedding_length": config.hidden_size,
        f"{a}.feed_forward_length": config.intermediate_size,
        f"{a}.attention.head_count": config.num_attention_heads,
        f"{a}.attention.head_count_kv": config.num_key_value_heads,
        f"{a}.attention.layer_norm_rms_epsilon": float(
            getattr(config, "rms_norm_eps", None) or config.norm_eps
        ),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **_head_metadata(a, config),
    }
    own = {"gemma4": _gemma4_metadata, "lfm2": _lfm2_metadata, "lfm2moe": _lfm2_metadata}
    if a in own:
        values |= own[a](config)
    values |= delta_metadata(a, config)
    values |= latent_metadata(a, config)
    if architecture in _MOE:
        values |= {
            f"{a}.expert_count": getattr(config, "num_experts", None)
            or getattr(config, "num_local_experts", 0),
            f"{a}.expert_used_count": config.num_experts_per_tok,
        }
    if a == "gpt-oss":
        values |= {
            f"{a}.expert_feed_forward_length": config.intermediate_size,
            f"{a}.attention.sliding_window": config.sliding_window,
        }
    if a in ("glm4moe", "deepseek2"):
        values |= {
            f"{a}.expert_count": config.n_routed_experts,
            f"{a}.expert_shared_count": config.n_shared_experts,
            f"{a}.leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
            f"{a}.expert_weights_scale": float(config.routed_scaling_factor),
            f"{a}.expert_weights_norm": config.norm_topk_prob,
            f"{a}.expert_group_count": config.n_group or 1,
            f"{a}.expert_group_used_count": config.topk_group or 1,
            f"{a}.nextn_predict_layers": 1,
            f"{a}.block_count": config.num_hidden_layers + 1,
        }
    if architecture in ("qwen2moe", "qwen3moe", "glm4moe", "qwen35moe", "qwen3next"):
        values[f"{a}.expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture in ("qwen2moe", "qwen35moe", "qwen3next"):
        values[f"{a}.expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if a == "gemma3":
        values["gemma3.attention.sliding_window"] = config.sliding_window
    if a in ("granite", "granitemoe"):
        values |= {
            f"{a}.attention.scale": float(config.attention_multiplier),
            f"{a}.embedding_scale": float(config.embedding_multiplier),
            f"{a}.residual_scale": float(config.residual_multiplier),
            f"{a}.logit_scale": float(config.logits_scaling),
        }
    if a == "phi3" or (a == "olmo2" and getattr(config, "sliding_window", None)):
        values[f"{a}.attention.sliding_window"] = config.sliding_window or 0
    if a in ("phi3", "glm4", "glm4moe"):
        partial = config.rope_parameters["partial_rotary_factor"]
        values[f"{a}.rope.dimension_count"] = int(_head_dim(config) * partial)
    if a == "phi3":
        original = config.original_max_position_embeddings
        values[f"{a}.rope.scaling.original_context_length"] = original
    return values


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _head_metadata(a: str, config: Any) -> dict[str, Any]:
    head_dim = _head_dim(config)
    is_shared = head_dim * config.num_attention_heads == config.hidden_size
    is_stated = a in _STATES_HEADS or not is_shared
    return {f"{a}.attention.key_length": head_dim} if is_stated else {}


def _gemma4_metadata(config: Any) -> dict[str, Any]:
    """Return the metadata in the form of llama.cpp's converter."""
    a, slides = "gemma4", [kind == "sliding_attention" for kind in config.layer_types]
    own = config.num_hidden_layers - config.num_kv_shared_layers
    last = (1 + config.use_double_wide_mlp) * config.intermediate_size
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    full = layers[-1].head_dim
    values = {
        f"{a}.feed_forward_length": [config.intermediate_size] * own + [last] * (len(slides) - own),
        f"{a}.attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
        f"{a}.attention.sliding_window": config.sliding_window,
        f"{a}.attention.sliding_window_pattern": slides,
        f"{a}.attention.shared_kv_layers": config.num_kv_shared_layers,
        f"{a}.attention.key_length": full,
        f"{a}.attention.value_length": full,
        f"{a}.attention.key_length_swa": config.head_dim,
        f"{a}.attention.value_length_swa": config.head_dim,
        f"{a}.rope.dimension_count": full,
        f"{a}.rope.dimension_count_swa": config.head_dim,
        f"{a}.embedding_length_per_layer_input": config.hidden_size_per_layer_input,
    }
    if config.final_logit_softcapping is not None:
        values[f"{a}.final_logit_softcapping"] = config.final_logit_softcapping
    if config.enable_moe_block:
        values |= {
            f"{a}.expert_count": config.num_experts,
            f"{a}.expert_used_count": config.top_k_experts,
            f"{a}.expert_feed_forward_length": config.moe_intermediate_size,
        }
    return values
