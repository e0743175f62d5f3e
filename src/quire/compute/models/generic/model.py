"""A model of `transformers` as the engine's `CausalLM`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.base.errors import ConfigError, EngineError
from quire.compute.attention import ScoreOptions, StepInputs
from quire.compute.layers import Attention, LayerFactory
from quire.compute.layers.adapted import Projection
from quire.compute.models.generic.interface import NAME, AttentionCall, connect, register
from quire.config import ModelSpec

__all__ = ["GenericModel", "load_generic"]


def load_generic(
    spec: ModelSpec, folder: Path, factory: LayerFactory, *, dummy: bool
) -> GenericModel:
    """Load the folder by `transformers` and put quire's attention and projections into it. dummy:
    with random numbers. Raises ConfigError where the files are not those of the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    dtype: torch.dtype = getattr(torch, spec.dtype)
    options: dict[str, Any] = {"attn_implementation": NAME, "dtype": dtype}
    options["trust_remote_code"] = False
    # Parameters of an inference mode cannot be tied, nor counted by those who load them.
    with torch.inference_mode(mode=False), torch.no_grad():
        if dummy:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModelForCausalLM.from_config(config, **options)
        else:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, output_loading_info=True, **options
            )
            model, info = loaded
            _refuse_wrong(folder, info)
    return GenericModel(spec, model.eval().requires_grad_(False), factory)


def _refuse_wrong(folder: Path, info: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, info.get(kind) or ()))
        if names:
            what = kind.removesuffix("_keys")
            raise ConfigError(
                f"{folder}: {len(names)} {what} tensors, such as {names[0]!r}; fetch the "
                "checkpoint again, or correct config.json"
            )


class GenericModel:
    """`CausalLM` whose hidden states are what the model gives to its head. What the model does to
    logits behind the head is done by itself, in a second call of it over given hidden states."""

    def __init__(self, spec: ModelSpec, model: Any, factory: LayerFactory) -> None:
        self._model, self._factory = model, factory
        self._base: Any = model.get_decoder()
        self._base_forward: Any = self._base.forward
        self._base.forward = self._forward_of_base
        self._head = _Head(factory, model.get_output_embeddings(), spec)
        _replace_linears(model, factory, model.get_output_embeddings())
        model.set_output_embeddings(self._head)
        connect(model, self._attend)
        self._attention: dict[int, Attention] = {}
        self._step: StepInputs | None = None
        self._positions: torch.Tensor | None = None
        self._given: torch.Tensor | None = None
        self._output: Any = None
        self.tensors = [*model.parameters(), *model.buffers()]  # what sleep takes

    @property
    def transformers_model(self) -> nn.Module:
        """The model of `transformers`, with quire's attention and projections in it."""
        return self._model

    @property
    def weight_map(self) -> Any:
        """Raises ConfigError: names are the library's."""
        raise ConfigError(
            "A model that `transformers` computes takes neither new weights nor adapters; load it "
            "again, or use an architecture of quire's own."
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        if step.given is not None:
            raise EngineError("A model that `transformers` computes takes no prompt embeddings.")
        self._step, self._positions = step, positions
        self._head.captures = True
        try:
            self._model(
                input_ids=token_ids.long()[None],
                position_ids=positions.long()[None],
                use_cache=False,
            )
        finally:
            self._head.captures = False
        hidden = self._head.hidden
        assert hidden is not None, "the model called its head"
        self._head.hidden = None
        hidden = hidden.flatten(0, -2)
        return hidden if step.wanted_tokens is None else hidden[step.wanted_tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] → float32 [N, V]."""
        self._given = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
        try:
            out = self._model(input_ids=ids, use_cache=False)
        finally:
            self._given = None
        return out.logits[0].float()

    def _forward_of_base(self, *args: Any, **kwargs: Any) -> Any:
        if self._given is not None:
            return self._output(last_hidden_state=self._given)
        out = self._base_forward(*args, **kwargs)
        self._output = type(out)
        return out

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        assert self._step is not None, "attention runs in a forward"
        assert self._positions is not None, "attention runs in a forward"
        heads, tokens, dim = call.q.shape[1:]
        kv_heads = call.k.shape[1]
        layer = self._attention.get(call.layer)
        if layer is None:
            sinks = None if call.sinks is None else call.sinks.float()
            layer = self._factory.attention(
                call.layer,
                (heads, kv_heads, dim),
                scale=call.scale,
                scores=ScoreOptions(soft_cap=call.soft_cap, sinks=sinks),
            )
            self._attention[call.layer] = layer
        qkv = torch.cat((call.q[0], call.k[0], call.v[0])).transpose(0, 1).reshape(tokens, -1)
        return layer(qkv.contiguous(), self._positions, self._step).view(1, tokens, heads, dim)


class _Packed(nn.Module):
    """A linear layer by quire's kernels, in the format of the engine."""

    def __init__(self, projection: Projection) -> None:
        super().__init__()
        self._projection = projection

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._projection(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _Head(nn.Module):
    """The projection to logits, float32. captures: it keeps what it is given, and gives none."""

    def __init__(self, factory: LayerFactory, linear: nn.Linear, spec: ModelSpec) -> None:
        super().__init__()
        self.captures = False
        self.hidden: torch.Tensor | None = None
        self._size = spec.vocab_size
        self._matrix = factory.head_of(linear.weight, linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.captures:
            self.hidden = x
            return x.new_empty((*x.shape[:-1], 0))
        logits = self._matrix(x.reshape(-1, x.shape[-1]), torch.float32)
        return logits.view(*x.shape[:-1], self._size)


def _replace_linears(model: nn.Module, factory: LayerFactory, head: nn.Module) -> None:
    """Put packed layers in place of plain ones, one after the other, so that one exists twice."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child is head:
                continue
            has_bias = child.bias is not None
            packed = factory.replicated(child.in_features, child.out_features, bias=has_bias)
            packed.weights.load("weight", child.weight)
            if has_bias:
                packed.weights.load("bias", child.bias)
            packed.weights.finish()
            setattr(parent, name, _Packed(packed))
