"""Guesses of Medusa and EAGLE heads in plain torch, over a whole sequence and without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

__all__ = ["AT_ONCE", "CausalStates", "Guess", "Target", "guesses", "longest_first"]

AT_ONCE = 32
"""Sequences that a reference computes in one forward."""

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
    """Order tokens and their guesses so that `CausalStates` computes few sequences, and those of
    about one length stand together."""
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
def guesses(
    method: str,
    weights: Tensors,
    config: Mapping[str, Any],
    target: Target,
    asked: Sequence[tuple[Sequence[int], int]],
) -> list[list[Guess]]:
    """Guess so many tokens after each of these, of which the model has computed all but the last.
    Tokens of about one length should stand together."""
    weights = {name: tensor.float() for name, tensor in weights.items()}
    layers = config.get("eagle_aux_hidden_state_layer_ids", []) if method == "eagle3" else []
    found: list[list[Guess]] = []
    for start in range(0, len(asked), AT_ONCE):
        some = asked[start : start + AT_ONCE]
        states = [target.states(tokens[:-1], layers) for tokens, _ in some]
        most = max(count for _, count in some)
        if method == "medusa":
            last = torch.stack([each[-1] for each in states])
            by_place = [_best(_medusa(weights, head, last)) for head in range(most)]
        else:
            known = [torch.tensor(tokens) for tokens, _ in some]
            by_place = _follow(method, weights, config, target, known, states, most)
        found += [
            list(row[:count])
            for row, (_, count) in zip(zip(*by_place, strict=True), some, strict=True)
        ]
    return found


def _medusa(weights: Tensors, head: int, state: torch.Tensor) -> torch.Tensor:
    block = 0
    while f"{head}.{block}.linear.weight" in weights:
        inner = state @ weights[f"{head}.{block}.linear.weight"].T
        bias = weights.get(f"{head}.{block}.linear.bias")
        state = state + silu(inner if bias is None else inner + bias)
        block += 1
    return state @ weights[f"{head}.{block}.weight"].T


def _follow(
    method: str,
    weights: Tensors,
    config: Mapping[str, Any],
    target: Target,
    tokens: list[torch.Tensor],
    states: list[torch.Tensor],
    count: int,
) -> list[list[Guess]]:
    """Guess for each row, `count` times. No token sees what is behind it, so neither what shorter
    rows are filled up with."""
    if method == "eagle3":
        states = [each @ weights["fc.weight"].T for each in states]
    found: list[list[Guess]] = []
    for _ in range(count):
        embedded = target.embed(pad_sequence([each[1:] for each in tokens], True))
        given = pad_sequence(states, True)
        if method == "eagle":
            x = torch.cat((embedded, given), -1) @ weights["fc.weight"].T + weights["fc.bias"]
            residual = x
        else:
            normed = _norm(given, weights["midlayer.hidden_norm.weight"], config)
            x = torch.cat(
                (_norm(embedded, weights["midlayer.input_layernorm.weight"], config), normed), -1
            )
            residual = normed if config.get("norm_before_residual") else given
        name = "layers.0." if method == "eagle" else "midlayer."
        ends = torch.tensor([len(each) - 1 for each in states])
        output = _layer(weights, name, x, residual, config)[torch.arange(len(ends)), ends]
        logits = target.head(output)
        if method == "eagle3":
            own = _norm(output, weights["norm.weight"], config) @ weights["lm_head.weight"].T
            logits = torch.full_like(logits, -torch.inf)
            logits[:, torch.arange(own.shape[1]) + weights["d2t"].long()] = own
        found.append(_best(logits))
        tokens = [
            torch.cat((row, torch.tensor([each.token])))
            for row, each in zip(tokens, found[-1], strict=True)
        ]
        states = [torch.cat((row, last[None])) for row, last in zip(states, output, strict=True)]
    return found


def _layer(
    weights: Tensors,
    name: str,
    x: torch.Tensor,
    residual: torch.Tensor,
    config: Mapping[str, Any],
) -> torch.Tensor:
    """[N, T, W]: the output of the layer for each token."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, length = config["head_dim"], x.shape[1]
    q, k, v = (
        (x @ weights[f"{name}self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, dim))
        for part in "qkv"
    )
    q, k = _rotate(q, config["rope_theta"]), _rotate(k, config["rope_theta"])
    k, v = (each.repeat_interleave(heads // kv_heads, 2) for each in (k, v))
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) * dim**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    attended = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2)
    stream = residual + attended @ weights[f"{name}self_attn.o_proj.weight"].T
    inner = _norm(stream, weights[f"{name}post_attention_layernorm.weight"], config)
    gate, up, down = (weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return stream + (silu(inner @ gate.T) * (inner @ up.T)) @ down.T


def _rotate(heads: torch.Tensor, theta: float) -> torch.Tensor:
    """Turn the pairs of each head [N, T, H, D] by the positions 0 … T - 1."""
    half = heads.shape[3] // 2
    angles = torch.arange(heads.shape[1])[:, None] * theta ** -(torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = heads[..., :half], heads[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def _best(logits: torch.Tensor) -> list[Guess]:
    """Guess for each row."""
    values, tokens = logits.topk(2)
    return [
        Guess(token, first - second)
        for token, (first, second) in zip(tokens[:, 0].tolist(), values.tolist(), strict=True)
    ]
