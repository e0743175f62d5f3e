"""Sharing of the KV pool among a model's layers: typed layer groups whose pages have one byte size.

Blocks are named per layer group. A model whose layers are all alike has one group. A model that
mixes kinds of layers (full attention, sliding windows, latent K/V) has several groups of equally
many layers. One pool serves them all, since a page, which is one block of every layer of a group,
has the same size in each; a group with smaller tokens holds more of them in a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from types import MappingProxyType
from typing import Literal, NamedTuple

from quire.config.model_spec import DTYPE_BYTES, STATE_ALIGNMENT, ModelSpec
from quire.config.shard import Shard

__all__ = [
    "FP8_DTYPES",
    "KV_DTYPES",
    "STATE_PART_BYTES",
    "KVFormat",
    "KVGroup",
    "KVLayout",
    "LayerKV",
    "StoredSizes",
    "group_layers",
    "most_blocks",
]

KV_DTYPES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        **{name: (size, 0) for name, size in DTYPE_BYTES.items()},
        "int8": (1, 4),
        "float8_e4m3fn": (1, 0),
        "float8_e5m2": (1, 0),
    }
)
"""Bytes of an element, and of a scale beside the elements (`KVFormat.num_scales`)."""

FP8_DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
)
"""Names of the setting for the dtypes that torch calls otherwise."""

STATE_PART_BYTES = 2**20
"""Most bytes of a part of a state on a disk, if there are no blocks to be as long as."""

GroupKind = Literal["full", "window", "latent"]
"""full: a query sees all tokens before it. window: the last few. latent: all of them, of which the
cache keeps one compressed plane (multi-head latent attention, arXiv:2405.04434, section 2.1)."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Bytes of one token in one layer.

    num_planes: 2 where K and V lie apart; 1 where V is the first `value_dim` elements of K.
    key_dim, value_dim: elements per head. dtype_bytes, scale_bytes: see KV_DTYPES.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype_bytes: int
    scale_bytes: int = 0
    num_planes: int = 2

    @classmethod
    def plain(cls, num_kv_heads: int, head_dim: int, kv_dtype: str) -> KVFormat:
        """K and V of one width. kv_dtype: a name in KV_DTYPES."""
        return cls(num_kv_heads, head_dim, head_dim, *KV_DTYPES[kv_dtype])

    @classmethod
    def latent(cls, width: int, rank: int, kv_dtype: str) -> KVFormat:
        """One plane for all heads, whose first `rank` elements are the value."""
        return cls(1, width, rank, *KV_DTYPES[kv_dtype], num_planes=1)

    @property
    def num_scales(self) -> int:
        """Scales of one token in one plane, if it has some: one for each head. A plane of K and V
        has two for each, of the elements of V and of the others, which differ in size."""
        return self.num_kv_heads * (2 if self.num_planes == 1 else 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one plane. Planes are equally wide. Scales follow the elements,
        aligned."""
        elements = self.num_kv_heads * max(self.key_dim, self.value_dim) * self.dtype_bytes
        if not self.scale_bytes:
            return elements
        aligned = -(-elements // self.scale_bytes) * self.scale_bytes
        return aligned + self.num_scales * self.scale_bytes

    def of_rank(self, shard: Shard) -> KVFormat:
        """The format of the kv heads that a rank has. Raises ConfigError as `Shard.kv_heads`."""
        if not self.num_kv_heads:
            return self
        return replace(self, num_kv_heads=shard.kv_heads(self.num_kv_heads).count)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """K/V of one layer. window: tokens that a query sees, itself included; of kind "window"."""

    format: KVFormat
    kind: GroupKind = "full"
    window: int | None = None

    @classmethod
    def with_window(cls, window: int | None, kv_format: KVFormat) -> LayerKV:
        """A layer of sliding-window attention, or of full attention if there is no window."""
        return cls(kv_format, "full" if window is None else "window", window)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables.

    layers: model layer indices; plane p of layer `layers[j]` lies in segment j · num_planes + p of
        a page.
    tokens_per_block: a multiple of the layout's `block_size`.
    """

    layers: tuple[int, ...]
    kv: LayerKV
    tokens_per_block: int

    @property
    def window(self) -> int | None:
        return self.kv.window

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def first_block_needed(self, query: int) -> int:
        """Index of the first block that a query at position `query` reads. Those before it may be
        released, and a prefix hit need not have them."""
        if self.window is None:
            return 0
        return max(query - self.window + 1, 0) // self.tokens_per_block

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """See `most_blocks`."""
        return most_blocks(self.window, self.tokens_per_block, num_tokens, max_step_tokens)


def most_blocks(
    window: int | None, tokens_per_block: int, num_tokens: int, max_step_tokens: int
) -> int:
    """Most blocks of a group that a sequence of `num_tokens` holds at once, when a step adds at
    most `max_step_tokens` of them.

    A sliding group keeps the window of the oldest query of a step, so it may hold
    window - 1 + max_step_tokens tokens, wherever these start within a block.
    """
    whole = -(-num_tokens // tokens_per_block)
    if window is None:
        return whole
    span = window - 1 + max_step_tokens
    return min(whole, (span + tokens_per_block - 2) // tokens_per_block + 1)


class StoredSizes(NamedTuple):
    """Sizes of what a rank keeps in a slot of a disk's file. block_bytes: bytes of a block, or of a
    part of a state if no layer has K and V. num_state_parts: number of parts of a recurrent state,
    each as long as a block; 0 without states."""

    block_bytes: int
    num_state_parts: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layer groups over one pool of bytes [num_segments, B, segment_bytes].

    groups: layer groups in the order of their first layers. block_size: tokens that one block name
    stands for. state_bytes: size of the recurrent state of one sequence, over all layers that have
    one; 0: none. state_input_bytes: size of a token from which these states are computed.
    copied_bytes: bytes of these two that each rank has, while ranks share the others.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    state_bytes: int = 0
    state_input_bytes: int = 0
    copied_bytes: tuple[int, int] = (0, 0)

    @classmethod
    def of_windows(
        cls, windows: Sequence[int | None], block_size: int, kv_format: KVFormat
    ) -> KVLayout:
        """Layout of layers that differ in their windows alone."""
        layers = [LayerKV.with_window(window, kv_format) for window in windows]
        return cls(group_layers(layers, block_size), block_size)

    @classmethod
    def of_model(cls, spec: ModelSpec, block_size: int, kv_dtype: str) -> KVLayout:
        """Layout of a model's cache. kv_dtype: a name in KV_DTYPES."""
        layers: list[LayerKV | None] = [None] * spec.num_layers
        if (latent := spec.latent) is not None:
            kv = LayerKV(KVFormat.latent(latent.width, latent.rank, kv_dtype), "latent")
            return cls(group_layers([kv] * spec.num_layers, block_size), block_size)
        for layer, shape in zip(spec.kv_layers, spec.own_kv_shapes, strict=True):
            kv_format = KVFormat.plain(*shape, kv_dtype)
            layers[layer] = LayerKV.with_window(spec.windows[layer], kv_format)
        groups = group_layers(layers, block_size)
        copied = (spec.copied_states * spec.dtype_bytes, spec.copied_inputs * spec.dtype_bytes)
        return cls(groups, block_size, spec.state_bytes, spec.state_input_bytes, copied)

    @classmethod
    def of_draft(cls, draft: ModelSpec, target: KVLayout) -> KVLayout:
        """Layout of the K/V of a model, or a layer, that guesses tokens beside `target`. Its blocks
        are those of the target's group with full attention: a block with one number holds the K/V
        of the same tokens in both pools."""
        size = next(group for group in target.groups if group.window is None).tokens_per_block
        return replace(cls.of_model(draft, size, draft.dtype), block_size=size)

    def of_rank(self, shard: Shard) -> KVLayout:
        """The layout of one rank's pool. Blocks have the same tokens as in that of one rank alone,
        so one plan serves all ranks."""
        groups = (
            replace(group, kv=replace(group.kv, format=group.kv.format.of_rank(shard)))
            for group in self.groups
        )
        sizes = zip((self.state_bytes, self.state_input_bytes), self.copied_bytes, strict=True)
        states, inputs = (copied - (copied - size) // shard.size for size, copied in sizes)
        return replace(self, groups=tuple(groups), state_bytes=states, state_input_bytes=inputs)

    def stored_sizes(self, spec: ModelSpec, num_ranks: int) -> StoredSizes:
        """Return the sizes on a disk for ranks that share this layout in equal parts. spec: the
        model's. A rank may pad its share of each layer's state to a cache line."""
        own = self.of_rank(Shard(0, num_ranks))
        num_states = len(spec.states) + len(spec.wide_states)
        padding = num_states * STATE_ALIGNMENT if num_ranks > 1 else 0
        state_bytes = own.state_bytes + padding
        block_bytes = own.page_bytes or min(state_bytes, STATE_PART_BYTES)
        return StoredSizes(block_bytes, -(-state_bytes // max(block_bytes, 1)))

    @property
    def num_segments(self) -> int:
        """Segments per page: one for each plane of each layer of a group."""
        return max(len(group.layers) * group.kv.format.num_planes for group in self.groups)

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment; those that a group does not fill are padding."""
        return max(g.tokens_per_block * g.kv.format.token_bytes for g in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one group, over all of its layers."""
        return self.num_segments * self.segment_bytes

    @property
    def hit_tokens(self) -> int:
        """A cached prefix is a multiple of this, so that it ends where each group has a whole
        page."""
        return lcm(*(group.tokens_per_block for group in self.groups))

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks of all groups that hold this many tokens, ignoring
        windows."""
        return sum(group.blocks_for(num_tokens) for group in self.groups)

    def first_blocks(self, num_tokens: int) -> tuple[range, ...]:
        """Block table of each group of a lone sequence, in the first blocks of a pool."""
        counts = [group.blocks_for(num_tokens) for group in self.groups]
        ends = list(accumulate(counts))
        return tuple(range(end - n, end) for end, n in zip(ends, counts, strict=True))

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks that one sequence holds at once, over all groups (`KVGroup.most_blocks`)."""
        return sum(group.most_blocks(num_tokens, max_step_tokens) for group in self.groups)


NO_KV = LayerKV(KVFormat(num_kv_heads=0, key_dim=0, value_dim=0, dtype_bytes=0))


def group_layers(layers: Sequence[LayerKV | None], block_size: int) -> tuple[KVGroup, ...]:
    """Partition layers by kind, window and format into groups of at most the smallest kind's size.

    layers: None for those without K/V.
    A kind with more layers than the smallest kind is split, so that little of a page is padding.
    The group with the largest tokens has `block_size` of them in a block; the others have as many
    times that as fit its segments. If no layer has K/V, one group without layers has blocks of no
    bytes, whose names are those of prefixes.
    """
    kinds: dict[LayerKV, list[int]] = {}
    for layer, kv in enumerate(layers):
        if kv is None:
            continue
        kinds.setdefault(kv, []).append(layer)
    if not kinds:
        return (KVGroup((), NO_KV, block_size),)
    size = min(len(members) for members in kinds.values())
    largest = max(kv.format.token_bytes for kv in kinds)
    groups = [
        KVGroup(
            tuple(members[start : start + size]),
            kv,
            block_size * (largest // kv.format.token_bytes),
        )
        for kv, members in kinds.items()
        for start in range(0, len(members), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.layers[0]))
