"""Names of experts in the blocks of checkpoints, by the families that share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from quire.compute.models.weight_map import Stacked, WeightMap
from quire.config.model_spec import ExpertNames

__all__ = ["with_experts"]

_EXPERTS = {
    "gate_proj": "moe.experts.gate_up:gate",
    "up_proj": "moe.experts.gate_up:up",
    "down_proj": "moe.experts.down",
}
_SHARED = {
    "gate_proj": "moe.shared.mlp.gate_up:gate",
    "up_proj": "moe.shared.mlp.gate_up:up",
    "down_proj": "moe.shared.mlp.down",
}


class _Names(NamedTuple):
    """block, stacked: see `WeightMap`."""

    block: Mapping[str, str]
    stacked: Mapping[str, Stacked]


def _under(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": place for name, place in names.items()}


def _stacked(prefix: str, gate_up: str, down: str) -> dict[str, Stacked]:
    """Return the parts of two tensors of all experts, by the names of each expert's. prefix: prefix
    that ends with a dot."""
    experts = f"{prefix}experts.{{}}"
    return {
        f"{prefix}{gate_up}": Stacked((f"{experts}.gate_proj.weight", f"{experts}.up_proj.weight")),
        f"{prefix}{down}": Stacked((f"{experts}.down_proj.weight",)),
    }


_QWEN = _Names(
    {
        "mlp.gate": "moe.router",
        **_under("mlp.experts.{}", _EXPERTS),
        **_under("mlp.shared_expert", _SHARED),
        "mlp.shared_expert_gate": "moe.shared.gate",
    },
    _stacked("mlp.", "experts.gate_up_proj", "experts.down_proj"),
)
_GATE_UP = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
_DOWN = ("mlp.experts.{}.down_proj",)
_GPT_OSS = _Names(
    {"mlp.router": "moe.router", **_under("mlp.experts.{}", _EXPERTS)},
    {
        f"mlp.experts.{name}{suffix}": Stacked(
            tuple(f"{part}.{kind}" for part in parts), interleaved=True, is_transposed=not suffix
        )
        for name, parts in (("gate_up_proj", _GATE_UP), ("down_proj", _DOWN))
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    },
)
_NAMES: Mapping[ExpertNames, _Names] = MappingProxyType(
    {
        "qwen": _QWEN,
        "gpt_oss": _GPT_OSS,
        "deepseek": _Names(
            {
                "mlp.gate": "moe.router",
                "mlp.gate.e_score_correction_bias": "moe.choice_bias",
                **_under("mlp.experts.{}", _EXPERTS),
                **_under("mlp.shared_experts", _SHARED),
            },
            _QWEN.stacked,
        ),
        "mixtral": _Names(
            {
                "block_sparse_moe.gate": "moe.router",
                "block_sparse_moe.experts.{}.w1": _EXPERTS["gate_proj"],
                "block_sparse_moe.experts.{}.w3": _EXPERTS["up_proj"],
                "block_sparse_moe.experts.{}.w2": _EXPERTS["down_proj"],
            },
            {
                "block_sparse_moe.experts.gate_up_proj": Stacked(
                    (
                        "block_sparse_moe.experts.{}.w1.weight",
                        "block_sparse_moe.experts.{}.w3.weight",
                    )
                ),
                "block_sparse_moe.experts.down_proj": Stacked(
                    ("block_sparse_moe.experts.{}.w2.weight",)
                ),
            },
        ),
        "granite": _Names(
            {
                "block_sparse_moe.router.layer": "moe.router",
                **_under("block_sparse_moe.experts.{}", _EXPERTS),
            },
            _stacked("block_sparse_moe.", "input_linear.weight", "output_linear.weight"),
        ),
        "granite_hybrid": _Names(
            {
                "block_sparse_moe.router.layer": "moe.router",
                **_under("block_sparse_moe.experts.{}", _EXPERTS),
                "shared_mlp.input_linear": "moe.shared.mlp.gate_up",
                "shared_mlp.output_linear": "moe.shared.mlp.down",
                "shared_mlp.gate_proj": _SHARED["gate_proj"],
                "shared_mlp.up_proj": _SHARED["up_proj"],
            },
            {
                **_stacked("block_sparse_moe.", "input_linear.weight", "output_linear.weight"),
                **_stacked("block_sparse_moe.", "experts.gate_up_proj", "experts.down_proj"),
            },
        ),
        "lfm2": _Names(
            {
                "feed_forward.gate": "moe.router",
                "feed_forward.expert_bias": "moe.choice_bias",
                "feed_forward.experts.{}.w1": _EXPERTS["gate_proj"],
                "feed_forward.experts.{}.w3": _EXPERTS["up_proj"],
                "feed_forward.experts.{}.w2": _EXPERTS["down_proj"],
            },
            {
                "feed_forward.experts.gate_up_proj": Stacked(
                    ("feed_forward.experts.{}.w1.weight", "feed_forward.experts.{}.w3.weight")
                ),
                "feed_forward.experts.down_proj": Stacked(("feed_forward.experts.{}.w2.weight",)),
            },
        ),
        "gemma4": _Names(
            {
                "router.scale": "beside.router_norm",
                "router.proj": "beside.moe.router",
                "router.per_expert_scale": "beside.moe.factors",
                **{f"experts.{{}}.{name}": f"beside.{place}" for name, place in _EXPERTS.items()},
                "pre_feedforward_layernorm_2": "beside.input_norm",
                "post_feedforward_layernorm_1": "beside.mlp_norm",
                "post_feedforward_layernorm_2": "beside.output_norm",
            },
            _stacked("", "experts.gate_up_proj", "experts.down_proj"),
        ),
    }
)


def with_experts(names: WeightMap, family: ExpertNames) -> WeightMap:
    """Return a map that also names experts, in the blocks that have some."""
    found = _NAMES[family]
    return replace(names, block={**names.block, **found.block}, stacked=found.stacked)
