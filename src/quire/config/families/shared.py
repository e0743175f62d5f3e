"""Parts of config.json that several families spell alike."""

from __future__ import annotations

from typing import TypedDict

from quire.base.errors import ConfigError
from quire.config.hf import RawConfig
from quire.config.model_spec import MatrixShape
from quire.config.rope import RopeSpec, extended_context, read_ropes

__all__ = [
    "ACTIVATIONS",
    "FULL",
    "MAX_LAYERS",
    "SLIDING",
    "CommonFields",
    "plain_block_matrices",
    "read_common",
    "read_heads",
    "read_hybrid_layer_types",
    "read_hybrid_ropes",
    "read_layer_types",
    "read_num_layers",
    "read_taps",
    "read_windows",
]

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu")


class CommonFields(TypedDict):
    """Fields of `ModelSpec` that all families read alike."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    bos_token_id: int | None
    pad_token_id: int | None


def read_common(
    raw: RawConfig,
    dtype: str,
    model_type: str,
    hidden_size: int,
    num_layers: int,
    heads: tuple[int, int, int],
) -> CommonFields:
    """Read the fields, beside sizes and heads, which files name in several ways. model_type: value
    where the file is silent. heads: see `read_heads`."""
    num_heads, num_kv_heads, head_dim = heads
    return CommonFields(
        architecture="",
        model_type=raw.read(str, "model_type", default=model_type),
        vocab_size=raw.read_size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        bos_token_id=next(iter(raw.read_ids("bos_token_id")), None),
        pad_token_id=raw.read_optional(int, "pad_token_id"),
    )


def read_heads(raw: RawConfig, hidden_size: int) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim."""
    num_heads = raw.read_size("num_attention_heads", "n_head")
    num_kv_heads = raw.read_size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{raw.source}: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    if not raw.has("head_dim") and hidden_size % num_heads:
        raise ConfigError(
            f"{raw.source}: hidden_size={hidden_size} is not a multiple of "
            f"num_attention_heads={num_heads}; state head_dim"
        )
    return num_heads, num_kv_heads, raw.read_size("head_dim", default=hidden_size // num_heads)


MAX_LAYERS = 10_000
"""Ten times those of the deepest models. A wrong number fails here, not when memory is full."""


def read_num_layers(raw: RawConfig, *keys: str) -> int:
    """Number of layers, from the first of `keys` that is there; num_hidden_layers if none is
    given."""
    keys = keys or ("num_hidden_layers",)
    num_layers = raw.read_size(*keys)
    if num_layers > MAX_LAYERS:
        key = next(key for key in keys if raw.has(key))
        raise ConfigError(
            f"{raw.source}: {key}={num_layers} must be at most {MAX_LAYERS}; fetch the file again"
        )
    return num_layers


def read_layer_types(
    raw: RawConfig, num_layers: int, default: tuple[str, ...], other: str = SLIDING
) -> tuple[str, ...]:
    """Layers are full attention or `other`."""
    layer_types = raw.read_list(str, "layer_types")
    if layer_types is None:
        return default
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"{raw.source}: layer_types has {len(layer_types)} entries for {num_layers} layers"
        )
    for kind in layer_types:
        if kind not in (FULL, other):
            raise raw.unsupported("layer_types", kind, (FULL, other))
    return layer_types


def read_hybrid_layer_types(
    raw: RawConfig, num_layers: int, default: tuple[str, ...], recurrent: str
) -> tuple[str, ...]:
    """ConfigError without a layer of attention, whose blocks name the prefixes of a cache."""
    layer_types = read_layer_types(raw, num_layers, default, recurrent)
    if FULL not in layer_types:
        raise ConfigError(
            f"{raw.source}: layer_types has no {FULL!r}; quire serves models with some of them"
        )
    return layer_types


def read_hybrid_ropes(
    raw: RawConfig, layer_types: tuple[str, ...], head_dim: int, max_positions: int
) -> tuple[tuple[RopeSpec | None, ...], int]:
    """Rope of each layer, None where it has states; and the longest context in tokens."""
    (rope,) = read_ropes(raw, (FULL,), head_dim, max_positions)
    ropes = tuple(rope if kind == FULL else None for kind in layer_types)
    return ropes, extended_context(rope, max_positions)


MAX_TAPS = 8
"""The kernel's limit (csrc/recurrent/short_conv.cpp); models have 3 or 4."""


def read_taps(raw: RawConfig, key: str) -> int:
    """Number of tokens that a short convolution sees, its own included."""
    taps = raw.read_size(key)
    if not 2 <= taps <= MAX_TAPS:
        raise ConfigError(f"{raw.source}: {key}={taps}; quire takes 2 to {MAX_TAPS}")
    return taps


def read_windows(raw: RawConfig, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    """Per layer; None is full attention."""
    if SLIDING not in layer_types:
        return (None,) * len(layer_types)
    window = raw.read_size("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def plain_block_matrices(
    hidden: int, inner: int, num_layers: int, *, gated: bool = False
) -> tuple[MatrixShape, ...]:
    """q, k, v; attention's output; the MLP up, with its gate, and down; as many key heads as query
    heads."""
    up = (1 + gated) * inner
    sizes = ((3 * hidden, hidden), (hidden, hidden), (up, hidden), (hidden, inner))
    return tuple(MatrixShape(outputs, inputs, num_layers) for outputs, inputs in sizes)
