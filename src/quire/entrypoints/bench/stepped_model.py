"""A model as an engine loads it, over a paged cache of its own, fed step by step from lists of
tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from quire.base.errors import ConfigError
from quire.compute.attention import GroupInputs, KVPool, SequenceStates, StepInputs, backend_of_isa
from quire.compute.models import CausalLM
from quire.compute.models.generic.model import GenericModel
from quire.compute.worker.load import LoadedModel, load, open_device
from quire.compute.worker.settings import WorkerSettings
from quire.config import env
from quire.config.startup import StartupPlan
from quire.ops import REFERENCE, force_gpu_kernels, force_isa, force_linear
from quire.ops.kv.pages import EMPTY_BYTE

__all__ = ["Sequences", "SteppedModel", "Traced", "decoder_layers"]

Sequences = Mapping[int, Sequence[int]]
"""Token ids by sequence."""

Block = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""Takes x and the residual stream first, and gives both, to be added by whoever comes next."""

Traced = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Logits [n, V] of the tokens of each sequence, and the residual stream before the first layer and
behind each one, [L + 1, n, E]; both float32 on the host."""


class SteppedModel:
    """Feeds sequences to a model. The cache starts as NaN, so what must not be read shows.

    kernels: a sentence on what computes.
    """

    def __init__(self, plan: StartupPlan, lengths: Sequence[int]) -> None:
        """Load the model of the plan. lengths: lengths that the sequences may reach. Raises
        ConfigError if it cannot be loaded."""
        settings = _worker_settings(plan)
        self._loaded = load(settings, open_device(settings.platform))
        self._layout = settings.layout
        self._num_blocks = sum(map(settings.layout.blocks_for, lengths))
        self._num_sequences = len(lengths)
        self.kernels = self._loaded.kernels
        self._trace = _Trace(self._loaded)
        self.reset()

    def reset(self) -> None:
        """Forget all sequences."""
        loaded = self._loaded
        self._pool = KVPool.allocate(
            self._layout, self._num_blocks, loaded.kv_dtype, loaded.device
        ).scaled(loaded.cache_scales)
        self._pool.pages.fill_(EMPTY_BYTE)
        self._free = iter(range(self._num_blocks))
        self._tables: dict[int, list[list[int]]] = {}
        self._lengths: dict[int, int] = {}
        self._states = None
        if loaded.state_bytes:
            self._states = SequenceStates(self._num_sequences, loaded.state_bytes, loaded.device)

    def step(self, chunks: Sequences) -> Traced:
        """Feed each sequence its next tokens, all in one flat batch."""
        starts = {seq: self._lengths.get(seq, 0) for seq in chunks}
        for seq, tokens in chunks.items():
            self._extend(seq, len(tokens))
        device, model = self._loaded.device, self._loaded.model
        token_ids = [token for tokens in chunks.values() for token in tokens]
        positions = [starts[seq] + i for seq, tokens in chunks.items() for i in range(len(tokens))]
        with torch.inference_mode():
            self._trace.begin()
            hidden = model.forward(
                torch.tensor(token_ids, dtype=torch.int32, device=device),
                torch.tensor(positions, device=device),
                self._inputs(chunks, starts),
            )
            logits = model.logits(hidden).float().cpu()
            states = self._trace.end()
        sizes = [len(tokens) for tokens in chunks.values()]
        pieces = zip(logits.split(sizes), states.split(sizes, dim=1), strict=True)
        return dict(zip(chunks, pieces, strict=True))

    def _extend(self, seq: int, num_tokens: int) -> None:
        tables = self._tables.setdefault(seq, [[] for _ in self._layout.groups])
        self._lengths[seq] = self._lengths.get(seq, 0) + num_tokens
        for group, table in zip(self._layout.groups, tables, strict=True):
            while len(table) < group.blocks_for(self._lengths[seq]):
                table.append(next(self._free))

    def _inputs(self, chunks: Sequences, starts: Mapping[int, int]) -> StepInputs:
        device = self._loaded.device
        sizes = [len(tokens) for tokens in chunks.values()]
        lengths = [self._lengths[seq] for seq in chunks]
        ends = list(accumulate(sizes, initial=0))
        query_start_loc = torch.tensor(ends, dtype=torch.int32, device=device)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        groups: list[GroupInputs] = []
        backends = self._loaded.attention.backends
        for index, (group, backend) in enumerate(zip(self._layout.groups, backends, strict=True)):
            size = group.tokens_per_block
            tables = [self._tables[seq][index] for seq in chunks]
            width = max(map(len, tables))
            padded = [table + [0] * (width - len(table)) for table in tables]
            block_table = torch.tensor(padded, dtype=torch.int32, device=device)
            slots = [
                table[position // size] * size + position % size
                for seq, table in zip(chunks, tables, strict=True)
                for position in range(starts[seq], self._lengths[seq])
            ]
            slot_mapping = torch.tensor(slots, device=device)
            plan = backend.plan(query_start_loc, seq_lens, block_table, group.window)
            groups.append(GroupInputs(block_table, slot_mapping, group.window, plan))
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


class _Trace:
    """Keeps the residual stream of a forward, layer by layer."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._states: list[torch.Tensor] = []
        model: CausalLM = loaded.model
        if isinstance(model, GenericModel):
            layers = decoder_layers(model.transformers_model, loaded.spec.num_layers)
            layers[0].register_forward_pre_hook(self._before, with_kwargs=True)
            for layer in layers:
                layer.register_forward_hook(self._behind)
            return
        blocks: Sequence[Block] = attrgetter("blocks")(model)  # as every weight map asks
        traced = [
            _TracedBlock(block, self._states, is_first=index == 0)
            for index, block in enumerate(blocks)
        ]
        setattr(model, "blocks", traced)  # noqa: B010  no part of `CausalLM`

    def begin(self) -> None:
        """Forget the forward before."""
        self._states.clear()

    def end(self) -> torch.Tensor:
        """[L + 1, T, E]."""
        return torch.stack([state.flatten(0, -2) for state in self._states])

    def _before(self, _: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]) -> None:
        first = args[0] if args else kwargs["hidden_states"]
        assert isinstance(first, torch.Tensor)
        self._states.append(first.float().cpu())

    def _behind(self, _: object, __: object, output: object) -> None:
        state = output[0] if isinstance(output, tuple) else output
        assert isinstance(state, torch.Tensor)
        self._states.append(state.float().cpu())


class _TracedBlock:
    """A block that tells what it was given, if it is the first, and what it gives."""

    def __init__(self, block: Block, states: list[torch.Tensor], *, is_first: bool) -> None:
        self._block, self._states, self._is_first = block, states, is_first

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._is_first:
            self._states.append(_stream(x, residual))
        given = self._block(x, residual, *rest)
        self._states.append(_stream(*given))
        return given


def _stream(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The residual stream, of which a block leaves the last sum to whoever comes next."""
    total = x.float() if residual is None else x.float() + residual.float()
    return total.cpu().clone()


def _worker_settings(plan: StartupPlan) -> WorkerSettings:
    """Settings of a worker that captures nothing, with the kernels that the environment names."""
    chosen, resolved = plan.resolved.settings, plan.resolved
    if chosen.device == "cpu":
        isa = env.cpu_isa()
        products = force_linear(chosen.linear_isa, chosen.activation_bits)
        forced = products if isa is None else force_isa(isa)
        attention = backend_of_isa(isa)
    else:
        wish = env.gpu_kernels()
        forced = force_gpu_kernels(wish)
        attention = REFERENCE if wish == "none" else wish
    return WorkerSettings(
        chosen=chosen,
        spec=resolved.spec,
        folder=plan.folder,
        layout=resolved.layout,
        platform=resolved.platform,
        device_state=False,
        forced_ops=forced,
        attention_backend=chosen.attention_backend or attention,
        preferred_attention=backend_of_isa(chosen.attention_isa),
        max_captured_rows=0,
    )


def decoder_layers(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """Return the layers of the text model in their order, by their number. Raises ConfigError if
    no part of `model` has so many."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # pyright: ignore
    for part in decoder.modules():
        if isinstance(part, nn.ModuleList) and len(part) == num_layers:
            return list(part)
    raise ConfigError(f"{type(model).__name__} has no list of {num_layers} layers")
