"""`quire convert` of checkpoints for text and images: the written folder answers as the one that
was read does with the same `quantization`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.image_oracle import GREEDY, SETTINGS, asked, tokens
from tests.image_writer import (
    GEMMA_BEGIN,
    IMAGE,
    QWEN_IMAGE,
    picture,
    write_any_checkpoint,
    write_vision_checkpoint,
)

from quire import LLM, ConfigError
from quire.engine.convert import convert_model

PLACES = {"smolvlm": IMAGE, "gemma3": GEMMA_BEGIN}
SIXTEEN: dict[str, Any] = {**SETTINGS, "dtype": "bfloat16"}


def _answers(folder: Path, kind: str, quantization: str | None = None) -> list[list[int]]:
    place = PLACES.get(kind, QWEN_IMAGE)
    prompts = [asked(f"Look: {place} Why?", picture(40, 24)), "Only text here."]
    with LLM(str(folder), **SIXTEEN, quantization=quantization) as llm:
        return [tokens(each) for each in llm.generate(prompts, GREEDY, use_tqdm=False)]


def _others(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of the encoder, by name on disk."""
    marks = ("language_model.", "text_model.", "lm_head.")
    return {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not any(mark in name for mark in marks)
    }


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_smolvlm(quantization: str | None, tmp_path: Path) -> None:
    """Matrices of 64 inputs, in groups of int4."""
    source = write_vision_checkpoint(tmp_path / "in", hidden_size=64, intermediate_size=128)
    out = tmp_path / "out"
    convert_model(source, out, quantization)
    assert _answers(out, "smolvlm") == _answers(source, "smolvlm", quantization)
    own, wanted = _others(out), _others(source)
    assert own.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(own[name], tensor.bfloat16() if tensor.dim() > 1 else tensor)
    processor = "preprocessor_config.json"
    assert (out / processor).read_text() == (source / processor).read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "smolvlm"
    assert config["text_config"]["dtype"] == "bfloat16"
    if quantization is not None:
        stored = load_file(out / "model.safetensors")
        assert any("text_model" in name and "weight_scale" in name for name in stored)
        ignored = config["quantization_config"]["ignore"]
        assert "model.vision_model.encoder.layers.0.mlp.fc1" in ignored
        assert "model.connector.modality_projection.proj" in ignored


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3"])
def test_other_families(kind: str, tmp_path: Path) -> None:
    source, out = write_any_checkpoint(tmp_path / "in", kind), tmp_path / "out"
    convert_model(source, out, "int8")
    assert _answers(out, kind) == _answers(source, kind, "int8")


def test_what_transformers_reads(tmp_path: Path) -> None:
    """Without quantization the written folder is one of `transformers`, weight for weight."""
    from transformers import AutoModelForImageTextToText

    source, out = write_any_checkpoint(tmp_path / "in", "qwen3_vl"), tmp_path / "out"
    convert_model(source, out)
    read = [AutoModelForImageTextToText.from_pretrained(each) for each in (source, out)]
    wanted, found = (dict(each.named_parameters()) for each in read)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], weight.bfloat16())


def test_half_floats_stay(tmp_path: Path) -> None:
    """An encoder in 16 bits is copied as it is."""
    source = write_any_checkpoint(tmp_path / "in", "smolvlm")
    weights = load_file(source / "model.safetensors")
    halved = {
        name: tensor if "text_model" in name else tensor.half() for name, tensor in weights.items()
    }
    save_file(halved, source / "model.safetensors", {"format": "pt"})
    convert_model(source, tmp_path / "out", "int8")
    own, wanted = _others(tmp_path / "out"), _others(source)
    assert all(own[name].dtype == torch.float16 for name in wanted)
    assert all(torch.equal(own[name], wanted[name]) for name in wanted)
    assert _answers(tmp_path / "out", "smolvlm") == _answers(source, "smolvlm", "int8")


def test_an_image_encoder_in_few_bits_is_refused(tmp_path: Path) -> None:
    source = write_any_checkpoint(tmp_path / "in", "smolvlm")
    weights = load_file(source / "model.safetensors")
    name = "model.connector.modality_projection.proj"
    matrix = weights.pop(f"{name}.weight")
    weights[f"{name}.weight"] = matrix.to(torch.int8)
    weights[f"{name}.weight_scale"] = torch.ones(len(matrix), 1)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    path = source / "config.json"
    config = json.loads(path.read_text())
    eight = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": eight}},
    }
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"modality_projection.*is quantized"):
        convert_model(source, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()
