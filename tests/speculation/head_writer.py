"""Writes heads for the bundled model in their published layouts: random, or fitted to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.speculation.head_reference import Target
from tests.speculation.shallow import BUNDLED

__all__ = ["HEAD_METHODS", "STATE_LAYERS", "config_of", "fit_head", "random_head", "write_head"]

HEAD_METHODS = ("medusa", "eagle", "eagle3")
STATE_LAYERS = [1, 3, 5]
NUM_HEADS = 4
DRAFT_TOKENS = 1500
"""Tokens that the head of EAGLE-3 knows."""

MODEL: dict[str, Any] = json.loads((BUNDLED / "config.json").read_text())
SIZE, VOCAB, INNER = MODEL["hidden_size"], MODEL["vocab_size"], MODEL["intermediate_size"]


def config_of(method: str) -> dict[str, Any]:
    """config.json of a published checkpoint."""
    if method == "medusa":
        return {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1, "version": "2"}
    config = {**MODEL, "num_hidden_layers": 1, "torch_dtype": "float32"}
    if method == "eagle3":
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        config |= {"draft_vocab_size": DRAFT_TOKENS}
        config |= {"eagle_aux_hidden_state_layer_ids": STATE_LAYERS}
    return config


def write_head(folder: Path, method: str, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint as it is published. The folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(method)))
    if method == "medusa":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    elif method == "eagle":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def random_head(method: str, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Tensors of a head whose every part matters."""
    torch.manual_seed(len(method))

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs) * (scale * 3 / inputs**0.5)

    if method == "medusa":
        found: dict[str, torch.Tensor] = {}
        for head in range(NUM_HEADS):
            found[f"{head}.0.linear.weight"] = matrix(SIZE, SIZE)
            found[f"{head}.0.linear.bias"] = torch.randn(SIZE) * scale
            found[f"{head}.1.weight"] = matrix(VOCAB, SIZE)
        return found
    width, name = (SIZE, "layers.0.") if method == "eagle" else (2 * SIZE, "midlayer.")
    heads, kv_heads = MODEL["num_attention_heads"] * 64, MODEL["num_key_value_heads"] * 64
    found = {
        f"{name}self_attn.q_proj.weight": matrix(heads, width),
        f"{name}self_attn.k_proj.weight": matrix(kv_heads, width),
        f"{name}self_attn.v_proj.weight": matrix(kv_heads, width),
        f"{name}self_attn.o_proj.weight": matrix(SIZE, heads),
        f"{name}post_attention_layernorm.weight": 1 + torch.randn(SIZE) * 0.2,
        f"{name}mlp.gate_proj.weight": matrix(INNER, SIZE),
        f"{name}mlp.up_proj.weight": matrix(INNER, SIZE),
        f"{name}mlp.down_proj.weight": matrix(SIZE, INNER),
        "embed_tokens.weight": torch.zeros(VOCAB, SIZE),
    }
    if method == "eagle":
        found |= {"fc.weight": matrix(SIZE, 2 * SIZE), "fc.bias": torch.randn(SIZE) * scale}
        return found
    known = torch.randperm(VOCAB)[:DRAFT_TOKENS].sort().values
    found |= {
        f"{name}input_layernorm.weight": 1 + torch.randn(SIZE) * 0.2,
        f"{name}hidden_norm.weight": 1 + torch.randn(SIZE) * 0.2,
        "fc.weight": matrix(SIZE, 3 * SIZE),
        "norm.weight": 1 + torch.randn(SIZE) * 0.2,
        "lm_head.weight": matrix(DRAFT_TOKENS, SIZE),
        "d2t": known - torch.arange(DRAFT_TOKENS),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known, value=True),
    }
    return found


def fit_head(
    method: str, target: Target, sequences: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Tensors of a head that is right now and then where the model says these sequences: its linear
    parts are fitted, all others nearly 0."""
    found = random_head(method, scale=0.02)
    layers = STATE_LAYERS if method == "eagle3" else []
    states = [target.states(tokens, layers) for tokens in sequences]
    last = [target.states(tokens, []) for tokens in sequences]
    if method == "medusa":
        for head in range(NUM_HEADS):
            ahead = head + 1
            given = torch.cat([each[:-ahead] for each in states])
            goal = target.head(torch.cat([each[ahead:] for each in last])).detach()
            found[f"{head}.0.linear.bias"] = torch.zeros(SIZE)
            found[f"{head}.1.weight"] = _fit(given, goal)
        return found
    goal = torch.cat([each[1:] for each in last])
    if method == "eagle":
        tokens = torch.cat([torch.tensor(list(each)[1:]) for each in sequences])
        given = torch.cat((target.embed(tokens), torch.cat([each[:-1] for each in states])), 1)
        found["fc.weight"], found["fc.bias"] = _fit(given.detach(), goal), torch.zeros(SIZE)
        return found
    found["fc.weight"] = _fit(torch.cat([each[:-1] for each in states]), goal)
    known = found["d2t"] + torch.arange(DRAFT_TOKENS)
    used = torch.tensor(sorted({token for each in sequences for token in each}))
    known = torch.cat((used, known[~torch.isin(known, used)]))[:DRAFT_TOKENS].sort().values
    found["d2t"] = known - torch.arange(DRAFT_TOKENS)
    found["norm.weight"] = torch.ones(SIZE)
    found["lm_head.weight"] = target.head(torch.eye(SIZE)).detach().T[known].contiguous()
    return found


def _fit(given: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """The matrix [outputs, inputs] by which `given` [N, inputs] comes closest to `goal`."""
    given, goal = given.double(), goal.double()
    square = given.T @ given
    square += torch.eye(len(square), dtype=torch.float64) * 1e-3 * square.diagonal().mean()
    return torch.linalg.solve(square, given.T @ goal).T.float().contiguous()
