"""Gradients of the reference are those of `transformers`, for every variant of the families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.autograd.graph import allow_mutation_on_saved_tensors

from quire.base.errors import ConfigError
from quire.config import read_model_spec
from quire.config.model_spec import GenericTraits
from quire.engine.convert import convert_model
from quire.training import ReferenceModel
from quire.training.reference import KeptWrites
from tests.models.families import CASES, Case, random_sequences, write_checkpoint

TOLERANCE = 1e-4
"""Relative error of gradients in float32."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    """Turns red when a gradient does not reach a weight, or reaches its neighbour's place."""
    model: Any = write_checkpoint(case, tmp_path)
    spec = read_model_spec(tmp_path, implementation="quire")
    if spec.states or spec.latent is not None:
        with pytest.raises(ConfigError, match=f"{spec.architecture} cannot be trained: it has"):
            ReferenceModel(spec, tmp_path, case.max_positions, max_tokens=64)
        return
    reference = ReferenceModel(spec, tmp_path, case.max_positions, max_tokens=64)
    sequences = [each for each in random_sequences(case.lengths).values() if len(each) > 1]
    weights = {name: load_file(info.file)[name].float() for name, info in reference.stored.items()}
    outer = torch.randn(
        sum(len(each) - 1 for each in sequences), generator=torch.Generator().manual_seed(0)
    )
    values = list[torch.Tensor]()
    for tokens in sequences:
        ids = torch.tensor([tokens])
        logits = model(ids).logits[0, :-1].float()
        values.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    expected = torch.cat(values)
    got = reference.log_probs(weights, sequences)
    torch.testing.assert_close(got, expected.detach(), rtol=1e-4, atol=1e-4)
    (expected * outer).sum().backward()
    found = reference.gradients(weights, list(weights), sequences, outer)
    wanted = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    largest = max(float(each.abs().max()) for each in wanted.values())
    for name in wanted.keys() & found.keys():
        gap = float((found[name] - wanted[name]).abs().max())
        assert gap <= TOLERANCE * (largest / 100 + float(wanted[name].abs().max())), name
    # `transformers` joins the matrices of experts, so their gradients are compared by their norm.
    buffers = dict(model.named_buffers())
    mine = {name: each for name, each in found.items() if name not in buffers}
    torch.testing.assert_close(norm_of(mine), norm_of(wanted), rtol=TOLERANCE, atol=0)


def test_a_write_frees_no_place_for_another_saved_tensor() -> None:
    """Turns red when a tensor at the place of a saved one, which was written and freed, is taken
    for that: without `KeptWrites`, some of these gradients are wrong."""
    for _ in range(200):
        leaf = torch.randn(64, requires_grad=True)
        with torch.enable_grad(), allow_mutation_on_saved_tensors(), KeptWrites():
            doubled = leaf * 2
            total = doubled.square().sum()
            doubled.zero_()
            del doubled
            total = total + (leaf * 3).square().sum()
            (found,) = torch.autograd.grad(total, [leaf])
        torch.testing.assert_close(found, 26 * leaf.detach())


LLAMA = next(case for case in CASES if case.name == "llama")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_encoder": True}, "no head that draws tokens alone"),
        ({"prompt_attention": "bidirectional"}, "tokens of its prompts see later ones"),
        ({"traits": GenericTraits()}, "transformers computes it"),
    ],
)
def test_models_without_a_gradient_are_named(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_checkpoint(LLAMA, tmp_path)
    spec = replace(read_model_spec(tmp_path, implementation="quire"), **change)
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM cannot be trained: .*{reason}"):
        ReferenceModel(spec, tmp_path, 64, max_tokens=64)


def test_quantized_weights_are_named(tmp_path: Path) -> None:
    write_checkpoint(LLAMA, tmp_path / "plain")
    convert_model(tmp_path / "plain", tmp_path / "int8", "int8")
    spec = read_model_spec(tmp_path / "int8")
    with pytest.raises(ConfigError, match="is quantized, and training needs weights in 16 or 32"):
        ReferenceModel(spec, tmp_path / "int8", 64, max_tokens=64)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="it is a GGUF file"):
        ReferenceModel(spec, file, 64, max_tokens=64)


def norm_of(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in gradients.values()]).norm()
