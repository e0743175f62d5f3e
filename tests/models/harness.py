"""Drives a model over a real paged KV pool: builds `StepInputs` from plain lists of tokens.

The pool is hostile: it starts as NaN, block ids are shuffled, and blocks that have left a sliding
window are overwritten with NaN, so reading anything that a query must not see shows in the logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.base.platform import detect_platform
from quire.compute.attention import (
    AttentionBackend,
    AttentionNeeds,
    GroupInputs,
    KVPool,
    SequenceStates,
    StepInputs,
    select_backend,
)
from quire.compute.layers import LayerFactory
from quire.compute.layers.token_columns import TokenColumns
from quire.compute.models import CausalLM, load_model
from quire.compute.quantization import MatrixFormats, QuantizedFormats
from quire.config import ModelSpec, read_model_spec
from quire.config.kv_layout import KVLayout
from quire.config.shard import ONE_RANK, Shard
from quire.ops import OpSet, build_op_set, force_isa
from quire.ops.distributed import ALONE, Collectives
from quire.ops.kv.pages import EMPTY_BYTE

BLOCK_SIZE = 4
NUM_BLOCKS = 256
MAX_SEQUENCES = 16


class PagedModel:
    """A loaded model with its KV pool and the block tables of the sequences fed so far."""

    def __init__(
        self,
        folder: Path,
        implementation: str,
        max_positions: int = 96,
        quantization: str | None = None,
        kv_dtype: str | None = None,
        shard: Shard = ONE_RANK,
        collectives: Collectives = ALONE,
        formats: MatrixFormats | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        """implementation: "reference" (plain torch only) or "best" (what this machine has).
        kv_dtype: dtype of the cache; None takes the model's. shard: the rank whose layers are made.
        formats: replace those of `quantization`. spec: replaces the one of the folder."""
        self.spec = spec or read_model_spec(folder, implementation="quire")
        dtype: torch.dtype = getattr(torch, kv_dtype or self.spec.dtype)
        self._backend = _new_backend(self.spec, implementation, dtype)
        formats = formats or QuantizedFormats(quantization, new_ops(implementation))
        self._columns = TokenColumns(new_ops(implementation))
        factory = new_factory(
            self.spec,
            implementation,
            self._backend,
            max_positions,
            formats,
            quantized_cache=dtype.itemsize == 1,
            shard=shard,
            collectives=collectives,
            columns=self._columns,
        )
        self.model: CausalLM = load_model(self.spec, folder, factory, progress=False)
        layout = _layout(self.spec, dtype).of_rank(shard)
        self._pool = _new_pool(layout, dtype)
        self._groups = layout.groups
        self._free = list(range(NUM_BLOCKS))
        random.Random(7).shuffle(self._free)
        self._tables: dict[int, list[list[int]]] = {}
        self._lengths: dict[int, int] = {}
        self._states = None
        if factory.recurrent.state_bytes:
            cpu = torch.device("cpu")
            self._states = SequenceStates(MAX_SEQUENCES, factory.recurrent.state_bytes, cpu)

    @property
    def backend_name(self) -> str:
        return self._backend.name

    def step(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Feed each sequence its next tokens, all in one flat batch; logits [n, V] by sequence."""
        with torch.inference_mode():
            logits = self.model.logits(self.hidden(chunks))
        self._forget_outside_windows(chunks)
        pieces = logits.split([len(tokens) for tokens in chunks.values()])
        return dict(zip(chunks, pieces, strict=True))

    def hidden(self, chunks: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Feed likewise; hidden states [T, E]. An encoder takes them for first texts of pairs."""
        inputs = self.inputs(chunks)
        first = torch.zeros(len(inputs[0]), dtype=torch.int64)
        self._columns.set(dict.fromkeys(self._columns.names, first))
        with torch.inference_mode():
            return self.model.forward(*inputs)

    def share(self, seq: int, other: int, num_blocks: int) -> None:
        """Begin the sequence `other` with the first blocks of `seq`, full in each group."""
        tokens = num_blocks * BLOCK_SIZE
        self._tables[other] = [
            table[: tokens // group.tokens_per_block]
            for table, group in zip(self._tables[seq], self._groups, strict=True)
        ]
        self._lengths[other] = num_blocks * BLOCK_SIZE

    def inputs(
        self, chunks: Mapping[int, Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, StepInputs]:
        """Return the arguments of the model's forward for a step, with the dtypes of the engine's
        runner. The sequences have these tokens from now on."""
        starts = {seq: self._lengths.get(seq, 0) for seq in chunks}
        for seq, tokens in chunks.items():
            self._extend(seq, len(tokens))
        token_ids = torch.tensor(
            [token for tokens in chunks.values() for token in tokens], dtype=torch.int32
        )
        positions = torch.tensor(
            [starts[seq] + i for seq, tokens in chunks.items() for i in range(len(tokens))]
        )
        return token_ids, positions, self._inputs(chunks, starts)

    def _extend(self, seq: int, num_tokens: int) -> None:
        tables = self._tables.setdefault(seq, [[] for _ in self._groups])
        self._lengths[seq] = self._lengths.get(seq, 0) + num_tokens
        for table, group in zip(tables, self._groups, strict=True):
            while len(table) * group.tokens_per_block < self._lengths[seq]:
                table.append(self._free.pop())

    def _inputs(self, chunks: Mapping[int, Sequence[int]], starts: Mapping[int, int]) -> StepInputs:
        sizes = [len(tokens) for tokens in chunks.values()]
        lengths = [self._lengths[seq] for seq in chunks]
        query_start_loc = torch.tensor([0, *sizes]).cumsum(0).int()
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        groups: list[GroupInputs] = []
        for index, group in enumerate(self._groups):
            tables = [self._tables[seq][index] for seq in chunks]
            width = max(len(table) for table in tables)
            padded = [table + [0] * (width - len(table)) for table in tables]
            block_table = torch.tensor(padded, dtype=torch.int32)
            size = group.tokens_per_block
            slots = [
                table[position // size] * size + position % size
                for seq, table in zip(chunks, tables, strict=True)
                for position in range(starts[seq], self._lengths[seq])
            ]
            plan = self._backend.plan(query_start_loc, seq_lens, block_table, group.window)
            last_key = self._last_key(chunks, starts, group.window)
            groups.append(
                GroupInputs(block_table, torch.tensor(slots), group.window, plan, last_key)
            )
        states = None if self._states is None else self._states.inputs(starts)
        return StepInputs(
            query_start_loc,
            seq_lens,
            max(sizes),
            max(lengths),
            tuple(groups),
            self._pool,
            states=states,
        )

    def _last_key(
        self, chunks: Mapping[int, Sequence[int]], starts: Mapping[int, int], window: int | None
    ) -> torch.Tensor | None:
        """Return `GroupInputs.last_key`: the end of a whole prompt, or of the window behind a
        token."""
        if not self.spec.whole_prompts:
            return None
        reach = window or NUM_BLOCKS * BLOCK_SIZE
        keys = [
            min(self._lengths[seq], position + reach) - 1
            for seq in chunks
            for position in range(starts[seq], self._lengths[seq])
        ]
        return torch.tensor(keys, dtype=torch.int32)

    def _forget_outside_windows(self, chunks: Mapping[int, Sequence[int]]) -> None:
        for seq in chunks:
            for index, group in enumerate(self._groups):
                if group.window is not None:
                    unseen = max(0, self._lengths[seq] - group.window + 1)
                    unseen //= group.tokens_per_block
                    dead = self._tables[seq][index][:unseen]
                    for layer in group.layers:
                        cache = self._pool.layers[layer]
                        k, v = cache.k, cache.v
                        if cache.k_scale is not None and cache.v_scale is not None:
                            k, v = cache.k_scale, cache.v_scale
                        k[dead] = v[dead] = float("nan")


def new_factory(
    spec: ModelSpec,
    implementation: str = "reference",
    backend: AttentionBackend | None = None,
    max_positions: int = 64,
    formats: MatrixFormats | None = None,
    *,
    quantized_cache: bool = False,
    shard: Shard = ONE_RANK,
    collectives: Collectives = ALONE,
    columns: TokenColumns | None = None,
) -> LayerFactory:
    """Return a factory for the layers of `spec` on this machine's CPU."""
    backend = backend or _new_backend(spec, implementation)
    return LayerFactory(
        new_ops(implementation),
        dict.fromkeys(range(spec.num_layers), backend),
        getattr(torch, spec.dtype),
        torch.device("cpu"),
        max_positions,
        formats,
        quantized_cache=quantized_cache,
        shard=shard,
        collectives=collectives,
        columns=columns,
    )


def new_ops(implementation: str) -> OpSet:
    """Plain torch for "reference", what this machine has for "best"."""
    isa = "none" if implementation == "reference" else None
    return build_op_set(detect_platform(), force_isa(isa))


def _new_backend(
    spec: ModelSpec, implementation: str, kv_dtype: torch.dtype | None = None
) -> AttentionBackend:
    dtype: torch.dtype = kv_dtype or getattr(torch, spec.dtype)
    widest = max((g.kv.format for g in _layout(spec, dtype).groups), key=lambda kv: kv.key_dim)
    needs = AttentionNeeds.of_group(spec, widest, dtype)
    forced = "reference" if implementation == "reference" else None
    return select_backend(detect_platform(), needs, forced).backend


def _layout(spec: ModelSpec, dtype: torch.dtype) -> KVLayout:
    return KVLayout.of_model(spec, BLOCK_SIZE, str(dtype).removeprefix("torch."))


def _new_pool(layout: KVLayout, dtype: torch.dtype) -> KVPool:
    pool = KVPool.allocate(layout, NUM_BLOCKS, dtype, torch.device("cpu"))
    pool.pages.fill_(EMPTY_BYTE)
    return pool


def set_biases(folder: Path, part: str, biases: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the biases of "k" or "v" in a checkpoint. biases: makes them from the old ones,
    [K·D]."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(f".{part}_proj.bias"):
            tensors[name] = biases(tensor)
        elif name.endswith(".attn.c_attn.bias"):  # GPT-2
            parts = dict(zip("qkv", tensor.chunk(3), strict=True))
            tensors[name] = torch.cat(tuple((parts | {part: biases(parts[part])}).values()))
    save_file(tensors, file, {"format": "pt"})
