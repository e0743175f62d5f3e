"""Models of `transformers` over quire's paged attention equal that library's own attention."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.families import CASES, Case, random_sequences, write_checkpoint
from tests.models.harness import PagedModel
from tests.models.test_golden import Logits, assert_equal, chunks, run

from quire.base.errors import ConfigError
from quire.compute.models.generic.probe import RefusedError, facts_of
from quire.config import ModelSpec, read_model_spec
from quire.config.families.generic import spec_of
from quire.config.hf import read_json

_LLAMA = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OTHERS = (
    Case("phi", "phi", {**_LLAMA, "num_key_value_heads": 4}),
    Case("ernie4_5", "ernie4_5", _LLAMA),
)
"""Families that quire has no file for."""
OWN_NAMES = {"llama", "gemma2", "gemma3", "opt", "gpt2", "gpt-oss", "granite", "olmo3", "stablelm"}
OWN_NAMES |= {"starcoder2", "nemotron"}
OWN = tuple(case for case in CASES if case.name in OWN_NAMES)
"""Families with every kind of attention, and with factors behind the head."""


def spec_by_probe(folder: Path) -> ModelSpec:
    spec = spec_of(facts_of(folder), read_json(folder / "config.json"), "float32")
    return replace(spec, architecture="Any")


@pytest.fixture(params=[*OTHERS, *OWN], ids=lambda case: case.name)
def golden(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[Case, Path, dict[int, list[int]], Logits]:
    case: Case = request.param
    model = write_checkpoint(case, tmp_path)
    sequences = random_sequences(case.lengths)
    with torch.inference_mode():
        logits = {seq: model(torch.tensor([tokens])).logits[0] for seq, tokens in sequences.items()}
    return case, tmp_path, sequences, logits


@pytest.mark.parametrize("implementation", ["reference", "best"])
def test_logits_equal_those_of_transformers(
    golden: tuple[Case, Path, dict[int, list[int]], Logits], implementation: str
) -> None:
    """Whole prompts, then chunks of uneven sizes of sequences at different stages. Turns red when a
    row sees another's tokens, a window or a scale is not passed on, or a factor behind the head is
    lost."""
    case, folder, sequences, logits = golden
    spec = spec_by_probe(folder)
    whole = PagedModel(folder, implementation, case.max_positions, spec=spec)
    assert_equal(whole.step(sequences), logits)
    cut = PagedModel(folder, implementation, case.max_positions, spec=spec)
    assert_equal(run(cut, chunks(sequences, [5, 1, 8, 3, 1, 11])), logits)


def test_projections_are_quantized(tmp_path: Path) -> None:
    """Turns red when the library's own layers compute in place of the format's."""
    write_checkpoint(OTHERS[0], tmp_path)
    spec, sequences = spec_by_probe(tmp_path), random_sequences()
    plain = PagedModel(tmp_path, "best", spec=spec).step(sequences)
    packed = PagedModel(tmp_path, "best", quantization="int8", spec=spec).step(sequences)
    for seq, logits in plain.items():
        difference = (packed[seq] - logits).norm() / logits.norm()
        assert 1e-4 < difference < 0.05


def test_an_unknown_architecture_is_read_by_transformers(tmp_path: Path) -> None:
    """Turns red when the process that asks the library gives other facts, or none."""
    write_checkpoint(OTHERS[0], tmp_path)
    spec = read_model_spec(tmp_path)
    same = {"architecture": "PhiForCausalLM", "generation": spec.generation}
    assert spec == replace(spec_by_probe(tmp_path), **same)
    with pytest.raises(ConfigError, match="PhiForCausalLM is not supported"):
        read_model_spec(tmp_path, implementation="quire")
    with pytest.raises(ConfigError, match=r"PhiForCausalLM is not supported.*hf_overrides"):
        read_model_spec(tmp_path, overrides={"rope_theta": 5.0})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no attention of ours": ("bloom", {"n_layer": 2, "n_head": 4}, "0 calls of attention"),
    "other layers": ("qwen3_next", {}, "linear_attention"),
    "moving rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "dynamic",
    ),
    "positions of its own": (
        "bart",
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        "counts positions",
    ),
    "mask of its own": ("doge", {}, "a mask of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name: str, tmp_path: Path) -> None:
    """Turns red when a model runs whose attention does not pass through ours."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type, extra, reason = REFUSED[name]
    config = CONFIG_MAPPING[model_type](**{**_LLAMA, **extra})
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match=reason):
        facts_of(tmp_path)


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """Turns red when weights that are missing stay random."""
    write_checkpoint(OTHERS[0], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="missing tensors"):
        PagedModel(tmp_path, "reference", spec=spec_by_probe(tmp_path))
