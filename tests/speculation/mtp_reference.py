"""Checkpoints with an MTP layer, and its guesses over a whole sequence without a cache: the block
by `transformers`, which has no MTP layers, and what is around it in plain torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence

from tests.gguf_writer import gguf_tensors, write_gguf
from tests.models.families import Case, write_checkpoint
from tests.models.test_gguf import architecture_of, settings_of
from tests.speculation.head_reference import AT_ONCE, CausalStates, Guess

__all__ = [
    "DELTA",
    "NUM_LAYERS",
    "MTPOracle",
    "Tensors",
    "as_gguf",
    "change_tensors",
    "write_mtp",
]

NUM_LAYERS = 3
"""Layers of the models, without the MTP layer."""

DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with MTP layers like that of Qwen3-Next; others have DeepSeek's."""

_OF_DEEPSEEK = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
Tensors = dict[str, torch.Tensor]


class MTPOracle:
    """A model, and its MTP layer in float32. config: configuration of the model."""

    def __init__(self, model: Any, parts: Tensors, *, is_delta: bool) -> None:
        """model: a model of `transformers`, whose last layer is the block of the MTP layer. parts:
        tensors beside the block."""
        self._head, self._inner = model.lm_head, copy.deepcopy(model.model)
        self._base = model.model
        self._parts, self._is_delta = parts, is_delta
        self._states = CausalStates(self._computed_states)
        self._eps = model.config.rms_norm_eps
        count = len(self._base.layers) - 1
        self._base.layers, block = self._base.layers[:count], self._inner.layers[count]
        self.config: Any = self._base.config
        self.config.num_hidden_layers = count
        self._inner.layers, self._inner.norm = torch.nn.ModuleList([block]), torch.nn.Identity()
        self._inner.config.num_hidden_layers = 1
        if is_delta:
            self._inner.config.layer_types = ["full_attention"]
            self.config.layer_types = self.config.layer_types[:count]

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, E]: states of the model after its final norm."""
        return self._states.of(tokens)

    @torch.inference_mode()
    def _computed_states(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._base(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def guesses(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[list[Guess]]:
        """Guess so many tokens after each of these, of which the model has computed all but the
        last. Tokens of about one length should stand together."""
        found: list[list[Guess]] = []
        for start in range(0, len(asked), AT_ONCE):
            found += self._guesses_at_once(asked[start : start + AT_ONCE])
        return found

    def _guesses_at_once(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[list[Guess]]:
        known = [torch.tensor(tokens) for tokens, _ in asked]
        states = [self.states(tokens[:-1]) for tokens, _ in asked]
        found: list[list[Guess]] = [[] for _ in asked]
        for _ in range(max(count for _, count in asked)):
            last = self._last_of_streams([tokens[1:] for tokens in known], states)
            normed = self._norm("norm", last)
            values, tokens = self._head(normed).topk(2)
            ahead = normed if self._is_delta else last
            for row, (first, second) in enumerate(values.tolist()):
                found[row].append(Guess(int(tokens[row, 0]), first - second))
                known[row] = torch.cat((known[row], tokens[row, :1]))
                states[row] = torch.cat((states[row], ahead[row : row + 1]))
        return [each[:count] for each, (_, count) in zip(found, asked, strict=True)]

    def joined(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[..., T, 2E], the input of the projection. tokens: the one after each state."""
        embedded = self._base.embed_tokens(tokens).clone()
        if not self._is_delta:
            embedded[..., 0, :] = 0.0
        normed = self._norm("pre_fc_norm_embedding", embedded)
        return torch.cat((normed, self._norm("pre_fc_norm_hidden", states)), -1)

    def _last_of_streams(
        self, tokens: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """[N, E]: the output of the block for the last token of each. No token sees what is behind
        it, so neither what shorter ones are filled up with."""
        x = self.joined(pad_sequence(tokens, True), pad_sequence(states, True))
        stream = self._inner(inputs_embeds=x @ self._parts["fc"].T, use_cache=False)
        ends = torch.tensor([len(each) - 1 for each in tokens])
        return stream.last_hidden_state[torch.arange(len(ends)), ends]

    def _norm(self, part: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._parts[part] + 1.0 if self._is_delta else self._parts[part]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight

    @property
    def tensors(self) -> Tensors:
        """Tensors beside the block, by their names in files."""
        if self._is_delta:
            return {f"mtp.{part}.weight": tensor for part, tensor in self._parts.items()}
        start = f"model.layers.{NUM_LAYERS}."
        return {
            f"{start}{_OF_DEEPSEEK[part]}.weight": tensor for part, tensor in self._parts.items()
        }

    @torch.inference_mode()
    def fit(self, folder: Path, sequences: Sequence[Sequence[int]]) -> None:
        """Make the layer, here and in the files, right now and then where the model says these
        sequences: the projection is fitted, and the block adds nearly nothing."""
        self._parts["norm"] = torch.full_like(self._parts["norm"], 0.0 if self._is_delta else 1.0)
        states = [self.states(tokens) for tokens in sequences]
        given = torch.cat(
            [
                self.joined(torch.tensor(list(tokens)[1:]), own[:-1])
                for tokens, own in zip(sequences, states, strict=True)
            ]
        ).double()
        goal = torch.cat([own[1:] for own in states]).double()
        square = given.T @ given + 1e-6 * torch.eye(given.shape[1], dtype=torch.float64)
        self._parts["fc"] = torch.linalg.solve(square, given.T @ goal).T.float().contiguous()
        for name, tensor in self._inner.layers[0].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                tensor.mul_(0.01)
        start = "mtp.layers.0." if self._is_delta else f"model.layers.{NUM_LAYERS}."

        def fitted(tensors: Tensors) -> Tensors:
            for name, tensor in tensors.items():
                if name.startswith(start) and ("o_proj" in name or "down_proj" in name):
                    tensor.mul_(0.01)
            return {**tensors, **self.tensors}

        change_tensors(folder, fitted)


def write_mtp(model_type: str, folder: Path, extra: dict[str, Any]) -> MTPOracle:
    """Write a random model with an MTP layer, in the layout of its family."""
    is_delta = model_type in DELTA
    config = {**extra, "num_hidden_layers": NUM_LAYERS + 1}
    if is_delta:
        config["layer_types"] = ["linear_attention", "full_attention"] * 2
    model = write_checkpoint(Case(model_type, model_type, config), folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["num_hidden_layers"] = NUM_LAYERS
    for key in ("layer_types", "mlp_layer_types"):
        if settings.get(key) is not None:
            settings[key] = settings[key][:NUM_LAYERS]
    if not is_delta:
        settings["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(settings))
    size = model.config.hidden_size
    torch.manual_seed(7)
    parts = {"fc": torch.randn(size, 2 * size) * (2 / size) ** 0.5}
    for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        parts[part] = torch.randn(size) * 0.2 + (0.0 if is_delta else 1.0)
    oracle = MTPOracle(model, parts, is_delta=is_delta)
    last = f"model.layers.{NUM_LAYERS}."
    in_block = "mtp.layers.0." if is_delta else last
    change_tensors(
        folder,
        lambda tensors: {
            **{name.replace(last, in_block): tensor for name, tensor in tensors.items()},
            **oracle.tensors,
        },
    )
    return oracle


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Write the tensors of a checkpoint anew."""
    file = folder / "model.safetensors"
    changed = change(load_file(file))
    save_file({name: tensor.clone() for name, tensor in changed.items()}, file, {"format": "pt"})


def as_gguf(model_type: str, folder: Path, config: Any) -> Path:
    """Write the checkpoint in `folder` as a GGUF file too, beside it."""
    case = Case(model_type, model_type)
    tensors = gguf_tensors(folder, architecture_of(case), config)
    return write_gguf(folder / "model.gguf", settings_of(case, config), tensors)
