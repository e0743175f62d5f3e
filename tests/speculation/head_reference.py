"""Guesses of Medusa and EAGLE heads in plain torch, over a whole sequence and without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu
from transformers import LlamaForCausalLM

__all__ = ["CausalStates", "Guess", "Target", "guess", "longest_first"]

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Guess:
    """A token, and by how much its logit is above the second best."""

    token: int
    margin: float


class CausalStates:
    """States [T, ...] of a causal model. Those of a sequence are those of its beginnings, too."""

    def __init__(self, compute: Callable[[list[int]], torch.Tensor]) -> None:
        self._compute = compute
        self._known: list[tuple[list[int], torch.Tensor]] = []

    def of(self, tokens: Sequence[int]) -> torch.Tensor:
        asked = list(tokens)
        for known, states in self._known:
            if known[: len(asked)] == asked:
                return states[: len(asked)]
        self._known.append((asked, self._compute(asked)))
        return self._known[-1][1]


def longest_first(seen: Iterable[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Order tokens and their guesses so that `CausalStates` computes few sequences."""
    return sorted(seen, key=lambda each: -len(each[0]))


class Target:
    """The model that is guessed for, by transformers in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.config: Any = self.model.config
        self._states = CausalStates(self._all_states)

    @torch.inference_mode()
    def _all_states(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, L + 1, W]: the states that enter each layer, and those after the final norm."""
        outputs = self.model(torch.tensor([tokens]), output_hidden_states=True)
        return torch.stack([each[0] for each in outputs.hidden_states], 1)

    def states(self, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """[T, W]: the states that enter `layers`, side by side; after the final norm if none."""
        return self._states.of(tokens)[:, list(layers) or [-1]].flatten(1)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.model.embed_tokens(tokens)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(states)


@torch.inference_mode()
def guess(
    method: str,
    weights: Tensors,
    config: Mapping[str, Any],
    target: Target,
    tokens: Sequence[int],
    count: int,
) -> list[Guess]:
    """Guess `count` tokens after `tokens`, of which the model has computed all but the last."""
    weights = {name: tensor.float() for name, tensor in weights.items()}
    layers = config.get("eagle_aux_hidden_state_layer_ids", []) if method == "eagle3" else []
    states = target.states(tokens[:-1], layers)
    if method == "medusa":
        return [_best(_medusa(weights, head, states[-1])) for head in range(count)]
    return _follow(method, weights, config, target, list(tokens), states, count)


def _medusa(weights: Tensors, head: int, state: torch.Tensor) -> torch.Tensor:
    block = 0
    while f"{head}.{block}.linear.weight" in weights:
        inner = weights[f"{head}.{block}.linear.weight"] @ state
        bias = weights.get(f"{head}.{block}.linear.bias")
        state = state + silu(inner if bias is None else inner + bias)
        block += 1
    return weights[f"{head}.{block}.weight"] @ state


def _follow(
    method: str,
    weights: Tensors,
    config: Mapping[str, Any],
    target: Target,
    tokens: list[int],
    states: torch.Tensor,
    count: int,
) -> list[Guess]:
    if method == "eagle3":
        states = states @ weights["fc.weight"].T
    found: list[Guess] = []
    for _ in range(count):
        embedded = target.embed(torch.tensor(tokens[1:]))
        if method == "eagle":
            x = torch.cat((embedded, states), 1) @ weights["fc.weight"].T + weights["fc.bias"]
            residual = x
        else:
            normed = _norm(states, weights["midlayer.hidden_norm.weight"], config)
            x = torch.cat(
                (_norm(embedded, weights["midlayer.input_layernorm.weight"], config), normed), 1
            )
            residual = normed if config.get("norm_before_residual") else states
        name = "layers.0." if method == "eagle" else "midlayer."
        output = _layer(weights, name, x, residual, config)[-1]
        logits = target.head(output)
        if method == "eagle3":
            own = weights["lm_head.weight"] @ _norm(output, weights["norm.weight"], config)
            logits = torch.full_like(logits, -torch.inf)
            for index, value in enumerate(own):
                logits[index + int(weights["d2t"][index])] = value
        found.append(_best(logits))
        tokens = [*tokens, found[-1].token]
        states = torch.cat((states, output[None]))
    return found


def _layer(
    weights: Tensors,
    name: str,
    x: torch.Tensor,
    residual: torch.Tensor,
    config: Mapping[str, Any],
) -> torch.Tensor:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, length = config["head_dim"], len(x)
    q, k, v = (
        (x @ weights[f"{name}self_attn.{part}_proj.weight"].T).view(length, -1, dim)
        for part in "qkv"
    )
    q, k = _rotate(q, config["rope_theta"]), _rotate(k, config["rope_theta"])
    k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, -1)
    stream = residual + attended @ weights[f"{name}self_attn.o_proj.weight"].T
    inner = _norm(stream, weights[f"{name}post_attention_layernorm.weight"], config)
    gate, up, down = (weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return stream + (silu(inner @ gate.T) * (inner @ up.T)) @ down.T


def _rotate(heads: torch.Tensor, theta: float) -> torch.Tensor:
    """Turn the pairs of each head [T, H, D] by the positions 0 … T - 1."""
    half = heads.shape[2] // 2
    angles = torch.arange(len(heads))[:, None] * theta ** -(torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = heads[..., :half], heads[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def _best(logits: torch.Tensor) -> Guess:
    (first, second), (token, _) = logits.topk(2)
    return Guess(int(token), float(first - second))
