"""EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (Li et al. 2025, arXiv:2503.01840).

One decoder layer reads a token and the model's state at the token before. What it gives stands for
the state at that token, so that the next guess can follow it. EAGLE joins both by a projection and
lets its layer's output be a state after the final norm. EAGLE-3 reads three states of the model,
from a low, a middle and a high layer, has norms and a head of its own, and mostly fewer tokens.

The table of tokens is the model's, and so is EAGLE's head: copies in a checkpoint are left out.
"""

from __future__ import annotations

from pathlib import Path

import torch

from quire.base.errors import ConfigError
from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory, ResidualAdd, RMSNorm
from quire.compute.models.heads.weights import HeadWeights, fill_layer, read_head_weights
from quire.compute.models.llama import LlamaModel
from quire.config import ModelSpec
from quire.config.model_spec import LlamaTraits
from quire.config.speculation.heads import EagleSpec
from quire.ops import PackedMatrix

__all__ = ["EagleHead", "load_eagle"]

_IN_LAYER = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
}


class EagleLayer:
    """Attention over x and an MLP on the stream, as in a block of Llama but for the norm before
    attention, which whoever makes x has done."""

    def __init__(self, spec: ModelSpec, make: LayerFactory, width: int) -> None:
        """width: numbers of x per token."""
        traits = spec.traits
        assert isinstance(traits, LlamaTraits)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention = make.attention(0, heads, rope=spec.ropes[0])
        self.qkv = make.qkv_linear(width, self.attention, None, bias=traits.qkv_bias)
        self.wanted = make.wanted_tokens(is_last=True)
        self.output = make.row(
            spec.num_heads * spec.head_dim, spec.hidden_size, bias=traits.o_bias, unit=spec.head_dim
        )
        self.mlp_norm = make.rms_norm(spec.hidden_size, spec.norm_eps)
        self.mlp = make.gated_mlp(
            spec.hidden_size, spec.intermediate_size, spec.activation, bias=traits.mlp_bias
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, width] and the stream [T, E] → what is to be added to the stream, and the stream;
        [N, E] of the wanted tokens."""
        x, residual = self.wanted(self.attention(self.qkv(x), positions, step), residual, step)
        x, residual = self.mlp_norm.add(self.output(x), residual)
        return self.mlp(x), residual


class EagleHead:
    """Guesses tokens of `target`. Its methods are those of `StateHead`
    (`compute/runner/drafting`)."""

    def __init__(
        self,
        target: LlamaModel,
        layer: EagleLayer,
        join: _Joined | _Beside,
        add: ResidualAdd,
        head: _OwnHead | None,
    ) -> None:
        self._target = target
        self._layer = layer
        self._join = join
        self._add = add
        self._head = head

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return self._join.read(states)

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        x, residual = self._join(self._target.embed(token_ids), states)
        return self._add(*self._layer(x, residual, positions, step))

    def next_states(self, output: torch.Tensor) -> torch.Tensor:
        return output if self._head is None else self._head.next_states(output)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return self._target.logits(output) if self._head is None else self._head.logits(output)


class _Joined:
    """EAGLE: x is a projection of both, and the stream begins with it."""

    def __init__(self, spec: ModelSpec, make: LayerFactory, *, bias: bool) -> None:
        self.projection = make.replicated(2 * spec.hidden_size, spec.hidden_size, bias=bias)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def __call__(
        self, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.projection(torch.cat((embedded, states), dim=1))
        return x, x


class _Beside:
    """EAGLE-3: x is both side by side, each after its norm, and the stream goes on from the
    state."""

    def __init__(self, spec: EagleSpec, make: LayerFactory, *, bias: bool) -> None:
        size, eps = spec.layer.hidden_size, spec.layer.norm_eps
        self.projection = make.replicated(spec.state_width, size, bias=bias)
        self.token_norm = make.rms_norm(size, eps)
        self.state_norm = make.rms_norm(size, eps)
        self._goes_on_normed = spec.norm_before_residual

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return self.projection(states)

    def __call__(
        self, embedded: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.state_norm(states)
        x = torch.cat((self.token_norm(embedded), normed), dim=1)
        return x, normed if self._goes_on_normed else states


class _OwnHead:
    """Final norm, and a projection to logits of the tokens that the head knows."""

    def __init__(
        self,
        norm: RMSNorm,
        projection: PackedMatrix,
        tokens: torch.Tensor | None,
        vocab_size: int,
        *,
        norm_output: bool,
    ) -> None:
        """tokens: int64 [D], the model's token of each output; None if it is the same."""
        self._norm = norm
        self._projection = projection
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._norm_output = norm_output

    def next_states(self, output: torch.Tensor) -> torch.Tensor:
        return self._norm(output) if self._norm_output else output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        found = self._projection(self._norm(output), torch.float32)
        if self._tokens is None:
            return found
        everything = found.new_full((len(found), self._vocab_size), -torch.inf)
        return everything.index_copy_(1, self._tokens, found)


def load_eagle(spec: EagleSpec, file: Path, make: LayerFactory, target: LlamaModel) -> EagleHead:
    """Load the layer that guesses tokens of `target`. Raises ConfigError for tensors of another
    layout or shape."""
    weights = read_head_weights(file).renamed(_plain)
    of_eagle3 = bool(spec.state_layers)
    layer, size = spec.layer, spec.layer.hidden_size
    dtype: torch.dtype = getattr(torch, layer.dtype)
    bias = "fc.bias" in weights.names
    join = _Beside(spec, make, bias=bias) if of_eagle3 else _Joined(layer, make, bias=bias)
    block = EagleLayer(layer, make, 2 * size if of_eagle3 else size)
    fill_layer(join.projection, weights, _named("fc"), dtype)
    if isinstance(join, _Beside):
        fill_layer(join.token_norm, weights, _named("layers.0.input_layernorm"), dtype)
        fill_layer(join.state_norm, weights, _named("layers.0.hidden_norm"), dtype)
    parts = {
        f"{part}.{kind}": f"layers.0.{name}.{kind}"
        for name, part in _IN_LAYER.items()
        for kind in ("weight", "bias")
    }
    fill_layer(block.qkv, weights, parts, dtype)
    fill_layer(block.output, weights, _named("layers.0.self_attn.o_proj"), dtype)
    fill_layer(block.mlp_norm, weights, _named("layers.0.post_attention_layernorm"), dtype)
    gates = {"gate.weight": "gate_proj", "up.weight": "up_proj"}
    gates |= {"gate.bias": "gate_proj", "up.bias": "up_proj"}
    names = {part: f"layers.0.mlp.{name}.{part.split('.')[1]}" for part, name in gates.items()}
    fill_layer(block.mlp.gate_up, weights, names, dtype)
    fill_layer(block.mlp.down, weights, _named("layers.0.mlp.down_proj"), dtype)
    head = _load_head(spec, weights, make, dtype) if of_eagle3 else None
    weights.ignore("embed_tokens.weight", "t2d", "layers.0.self_attn.rotary_emb.inv_freq")
    if head is None:
        weights.ignore("lm_head.weight")
    weights.finish()
    return EagleHead(target, block, join, make.residual_add(), head)


def _load_head(
    spec: EagleSpec, weights: HeadWeights, make: LayerFactory, dtype: torch.dtype
) -> _OwnHead:
    layer = spec.layer
    norm = make.rms_norm(layer.hidden_size, layer.norm_eps)
    fill_layer(norm, weights, _named("norm"), dtype)
    count = (*weights.shape_of("lm_head.weight"), layer.vocab_size)[0]
    projection = weights.take("lm_head.weight", (count, layer.hidden_size), dtype)
    tokens = None
    if "d2t" in weights.names:
        tokens = torch.arange(count) + weights.take_integers("d2t", (count,))
        if tokens.min() < 0 or tokens.max() >= layer.vocab_size:
            raise ConfigError(
                f"EAGLE-3's d2t names tokens up to {int(tokens.max()):,}, but the model has "
                f"{layer.vocab_size:,}; use weights that were trained for it"
            )
    elif count != layer.vocab_size:
        raise ConfigError(
            f"EAGLE-3's head has {count:,} tokens and the model {layer.vocab_size:,}, but there is "
            "no d2t that says which; use weights that were trained for it"
        )
    return _OwnHead(
        norm,
        make.head_of(projection, None),
        tokens,
        layer.vocab_size,
        norm_output=spec.norm_output,
    )


def _named(name: str) -> dict[str, str]:
    return {kind: f"{name}.{kind}" for kind in ("weight", "bias")}


def _plain(name: str) -> str:
    """Return the shortest of the names under which a tensor is published."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
