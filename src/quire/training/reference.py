"""A model by the plain references of all operations, which autograd follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.compute.attention import GroupInputs, KVPool, LayerCache, ReferenceAttention, StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.layers.weights import DenseWeights
from quire.compute.models import CausalLM, WeightTarget, load_model
from quire.compute.models.loader import match_weights
from quire.config import ModelSpec, TensorInfo, read_checkpoint
from quire.config.gguf import is_gguf
from quire.config.hf import StoredTensor
from quire.config.kv_layout import KVLayout
from quire.config.model_spec import GenericTraits
from quire.ops import build_op_set, force_isa

__all__ = ["KeptWrites", "ReferenceModel"]

DTYPE = "float32"
CPU = torch.device("cpu")

Tokens = Sequence[Sequence[int]]
"""Token ids of sequences."""


class ReferenceModel:
    """Log-probabilities of tokens, and their gradients, by torch in float32, at the weights that an
    engine makes of those it is given.

    The layers are those of the engine, over the references that stand beside its kernels. These
    write in place, as the kernels do, so autograd keeps copies of what they overwrite.

    stored: the tensors of the checkpoint that the model reads, by name. A head that is tied to the
    embedding is none of them. beside: tensors of layers that guess further tokens, and of an image
    encoder.
    """

    def __init__(self, spec: ModelSpec, folder: Path, max_positions: int, max_tokens: int) -> None:
        """spec: with the dtype of the engine. max_positions: length of its context, by which some
        ropes differ. max_tokens: tokens of sequences whose graphs are in memory at once; one longer
        sequence may be too.

        Raises ConfigError for a model that it cannot differentiate.
        """
        _check_spec(spec, folder)
        self._spec = replace(spec, dtype=DTYPE)
        self._folder = folder
        self._max_positions = max_positions
        self._max_tokens = max_tokens
        self._ops = build_op_set(detect_platform(), force_isa("none"))
        self._layout = KVLayout.of_model(self._spec, block_size=1, kv_dtype=DTYPE)
        checkpoint = read_checkpoint(folder)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        _, plan = match_weights(spec, folder, self._factory(dtype), checkpoint)
        self.stored: Mapping[str, TensorInfo] = {info.name: info for info, _ in plan}
        self._kept = {info.name: _kept_dtype(target, dtype) for info, target in plan}
        drafting = [
            info for info in checkpoint.tensors.values() if info.name.startswith(spec.mtp_layers)
        ]
        self.beside: Mapping[str, StoredTensor] = {
            part.name: part
            for info in (*drafting, *checkpoint.others.values())
            for part in info.stored
        }
        packed = next((info.name for info, _ in plan if info.packed is not None), None)
        if packed is not None:
            raise ConfigError(
                f"{folder}: tensor {packed!r} is quantized, and training needs weights in 16 or 32 "
                "bits. Use the checkpoint that it was made from."
            )

    @torch.no_grad()
    def log_probs(self, weights: Mapping[str, torch.Tensor], sequences: Tokens) -> torch.Tensor:
        """Return the log-probabilities of all tokens but the first of each sequence, one sequence
        after the other, float32 [N]. weights: a tensor for each name of `stored`."""
        wide = self._rounded(weights)
        found = [
            self._values(wide, part, [range(len(each) - 1) for each in part])
            for part in self._parts(sequences)
        ]
        return torch.cat(found)

    def gradients(
        self,
        weights: Mapping[str, torch.Tensor],
        wanted: Collection[str],
        sequences: Tokens,
        outer: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return the gradients, float32, of the sum of `log_probs` · outer with respect to the
        weights in `wanted`. outer: float32 [N]. Tokens with a factor of 0 cost no logits."""
        leaves = self._rounded(weights)
        inputs = [leaves[name].requires_grad_() for name in wanted]
        totals = [torch.zeros_like(leaf) for leaf in inputs]
        factors = iter(outer.split([len(each) - 1 for each in sequences]))
        for part in self._parts(sequences):
            own = [next(factors) for _ in part]
            places = [each.nonzero()[:, 0].tolist() for each in own]
            if not any(places):
                continue
            chosen = torch.cat([each[each != 0] for each in own])
            with (
                torch.enable_grad(),
                _SplitIntoViews(),
                allow_mutation_on_saved_tensors(),
                KeptWrites(),
            ):
                values = self._values(leaves, part, places)
                found = torch.autograd.grad(values, inputs, chosen, allow_unused=True)
            for total, each in zip(totals, found, strict=True):
                if each is not None:
                    total += each
        return dict(zip(wanted, totals, strict=True))

    def _rounded(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights that the engine computes with, in float32."""
        return {
            name: weight.detach().to(self._kept[name]).float() for name, weight in weights.items()
        }

    def _parts(self, sequences: Tokens) -> Iterator[Tokens]:
        """Yield sequences that are computed together."""
        part: list[Sequence[int]] = []
        for each in sequences:
            if part and sum(map(len, part)) + len(each) > self._max_tokens:
                yield part
                part = []
            part.append(each)
        if part:
            yield part

    def _values(
        self,
        weights: Mapping[str, torch.Tensor],
        sequences: Tokens,
        places: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Return log-probabilities of the tokens behind `places` of each sequence, float32 [N]."""
        model = self._filled(weights)
        starts = accumulate(map(len, sequences), initial=0)
        wanted = torch.tensor(
            [start + i for start, own in zip(starts, places, strict=False) for i in own]
        )
        ids = torch.tensor(list(chain.from_iterable(sequences)))
        positions = torch.cat([torch.arange(len(each)) for each in sequences])
        step = self._step([len(each) for each in sequences], positions, wanted)
        logits = model.logits(model.forward(ids, positions, step))
        return logits.log_softmax(-1).gather(1, ids[wanted + 1, None])[:, 0]

    def _filled(self, weights: Mapping[str, torch.Tensor]) -> CausalLM:
        """Return the model, whose weights are functions of these."""
        return load_model(
            self._spec,
            self._folder,
            self._factory(torch.float32),
            progress=False,
            replaced=weights,
        )

    def _factory(self, dtype: torch.dtype) -> LayerFactory:
        backends = dict.fromkeys(range(self._spec.num_layers), ReferenceAttention())
        return LayerFactory(self._ops, backends, dtype, CPU, self._max_positions)

    def _step(
        self, lengths: Sequence[int], positions: torch.Tensor, wanted: torch.Tensor
    ) -> StepInputs:
        """Return the inputs of a step that computes whole sequences. Each has one block in each
        group, and each layer a memory of its own, so that its gradient does not pass through the
        writes of other layers."""
        rows, longest = len(lengths), max(lengths)
        layers: dict[int, LayerCache] = {}
        groups: dict[int, int] = {}
        for index, group in enumerate(self._layout.groups):
            kv = group.kv.format
            for layer in group.layers:
                k, v = (
                    torch.zeros(rows, longest, kv.num_kv_heads, width)
                    for width in (kv.key_dim, kv.value_dim)
                )
                layers[layer], groups[layer] = LayerCache(k, v, None, None), index
        table = torch.arange(rows, dtype=torch.int32)[:, None]
        row_of_token = torch.arange(rows).repeat_interleave(torch.tensor(lengths))
        slots = row_of_token * longest + positions
        return StepInputs(
            query_start_loc=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            max_query_len=longest,
            max_seq_len=longest,
            groups=tuple(
                GroupInputs(table, slots, group.window, None) for group in self._layout.groups
            ),
            kv=KVPool(torch.empty(0, dtype=torch.uint8), layers, groups),
            wanted_tokens=wanted,
        )


def _kept_dtype(target: WeightTarget, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an engine of this dtype keeps a tensor."""
    weights = target.weights
    return weights.part(target.part).dtype if isinstance(weights, DenseWeights) else dtype


class KeptWrites(TorchDispatchMode):
    """Holds all tensors that are written in place until it ends. `allow_mutation_on_saved_tensors`
    of torch 2.13 knows a saved tensor by its addresses and its version. Without this it mistakes a
    new tensor at the address of a freed one for that one, and the gradient is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        named = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._kept.append(args[place] if place < len(args) else named.get(argument.name))
        return func(*args, **named)


class _SplitIntoViews(TorchFunctionMode):
    """Makes `Tensor.split` return slices. Autograd lets a slice be written in place, but not one of
    several results of one call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func is torch.Tensor.split:
            return _slices(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _slices(x: torch.Tensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
    length = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    starts = accumulate(sizes, initial=0)
    return tuple(x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False))


def _check_spec(spec: ModelSpec, folder: Path) -> None:
    """Raise ConfigError for a model whose references autograd cannot follow, or that does more than
    draw tokens after text."""
    reason = ""
    if is_gguf(folder):
        reason = "it is a GGUF file. Write it as a folder with `quire convert`, and load that"
    elif isinstance(spec.traits, GenericTraits):
        reason = "transformers computes it"
    elif spec.states:
        reason = "it has recurrent layers"
    elif spec.latent is not None:
        reason = "it has latent attention"
    elif spec.images is not None:
        reason = "it reads images"
    elif spec.whole_prompts:
        reason = "tokens of its prompts see later ones"
    elif spec.classes is not None or not spec.draws_tokens:
        reason = "it has no head that draws tokens alone"
    if reason:
        raise ConfigError(
            f"{spec.architecture} cannot be trained: {reason}. docs/training.md lists what can."
        )
