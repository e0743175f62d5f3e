"""The text model of a checkpoint for text and images loads as if it were alone."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import Case, random_sequences, write_checkpoint
from tests.models.family_bases import BASES
from tests.models.harness import PagedModel

from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.config import read_checkpoint, read_model_spec
from quire.config.families.nested import TEXT_DEFAULTS
from quire.config.settings import EngineSettings
from quire.config.startup import plan_startup
from quire.engine.convert import convert_model

SEQUENCES = random_sequences((9, 5))
NAMES: dict[str, Callable[[str], str]] = {
    "Gemma 3, as published": lambda name: f"language_model.{name}",
    "as transformers 5 saves": lambda name: (
        name if name.startswith("lm_head.") else name.replace("model.", "model.language_model.", 1)
    ),
    "Idefics 3": lambda name: (
        name if name.startswith("lm_head.") else name.replace("model.", "model.text_model.", 1)
    ),
}


def nest(folder: Path, out: Path, rename: Callable[[str], str], **outer: Any) -> Path:
    """Put the text model of `folder` into one that has an image encoder too."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("architectures")
    whole = {
        "architectures": ["SomethingForConditionalGeneration"],
        "model_type": "something",
        "dtype": config.pop("dtype"),
        "eos_token_id": config.pop("eos_token_id"),
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 1},
        "text_config": config,
    }
    out.mkdir()
    (out / "config.json").write_text(json.dumps(whole | outer))
    shutil.copy(folder / "generation_config.json", out)
    tensors = {rename(name): t for name, t in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.encoder.layers.0.mlp.fc1.weight"] = torch.ones(400, 400)
    tensors["model.multi_modal_projector.weight"] = torch.ones(8, 8)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write_checkpoint(Case(kind, kind), made[kind])
        return made[kind]

    return make


@pytest.mark.parametrize("kind", [kind for kind in TEXT_DEFAULTS if kind in BASES])
@pytest.mark.parametrize("naming", NAMES)
def test_logits_are_those_of_the_text_model_alone(
    kind: str, naming: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = nest(plain(kind), tmp_path / "nested", NAMES[naming])
    assert read_model_spec(folder) == read_model_spec(plain(kind))
    found, wanted = (
        PagedModel(each, "reference").step(SEQUENCES) for each in (folder, plain(kind))
    )
    assert all(torch.equal(found[seq], wanted[seq]) for seq in SEQUENCES)


def test_gemma_3_with_images_of_transformers(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 28}
    vision |= {"num_attention_heads": 1, "patch_size": 14}
    config = Gemma3Config(
        text_config=BASES["gemma3_text"], vision_config=vision, mm_tokens_per_image=4
    )
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "m")
    spec = read_model_spec(tmp_path / "m")
    assert (spec.architecture, spec.tie_word_embeddings) == ("Gemma3ForCausalLM", True)
    found = PagedModel(tmp_path / "m", "best").step(SEQUENCES)
    with torch.inference_mode():
        for seq, tokens in SEQUENCES.items():
            wanted = model(torch.tensor([tokens])).logits[0]
            assert float((found[seq] - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


def test_qwen3_5_with_images_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"hidden_size": 8, "intermediate_size": 8, "depth": 1, "num_heads": 1}
    vision |= {"out_hidden_size": 32, "patch_size": 2, "num_position_embeddings": 16}
    text = {**BASES["qwen3_5_text"], "tie_word_embeddings": False}
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=vision)
    ).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("model.visual.") for name in tensors)
    tensors |= {"mtp.fc.weight": torch.ones(8, 8), "mtp.norm.weight": torch.ones(8)}
    save_file(tensors, file, metadata={"format": "pt"})
    assert read_model_spec(tmp_path / "m").architecture == "Qwen3_5ForCausalLM"
    found = PagedModel(tmp_path / "m", "best").step(SEQUENCES)
    with torch.inference_mode():
        for seq, tokens in SEQUENCES.items():
            wanted = model(torch.tensor([tokens]), use_cache=False).logits[0]
            assert float((found[seq] - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())


def test_other_parts_are_told_and_take_no_memory(
    plain: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = nest(plain("qwen3"), tmp_path / "nested", NAMES["Gemma 3, as published"])
    platform = detect_platform()
    with caplog.at_level(logging.WARNING):
        plans = [
            plan_startup(EngineSettings(model=str(each), max_model_len=32), platform)
            for each in (plain("qwen3"), folder)
        ]
    assert "only the text model is read; 2 other tensors, such as" in caplog.text
    weights = [plan.resolved.memory.fixed.weights for plan in plans]
    assert weights[0] == weights[1]


def test_what_the_file_leaves_out_is_what_transformers_has() -> None:
    from transformers import CONFIG_MAPPING

    for kind, defaults in TEXT_DEFAULTS.items():
        config = CONFIG_MAPPING[kind]()
        found = {"rope_theta": (config.rope_parameters or {}).get("rope_theta"), **vars(config)}
        assert {key: found[key] for key in defaults} == defaults


def test_settings_that_a_nested_file_leaves_out(tmp_path: Path) -> None:
    """The text part of the published Gemma 3 4B, which states little."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    spec = read_model_spec(tmp_path)
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        262208,
        8,
        4,
        256,
    )
    assert (spec.dtype, spec.eos_token_ids, spec.max_context) == ("bfloat16", (1, 106), 131072)
    assert spec.windows.count(1024) == 29


def test_text_models_of_unknown_families_are_refused_by_name(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    names = NAMES["Gemma 3, as published"]
    for number, outer in enumerate(
        (
            {"text_config": {"model_type": "qwen2_vl_text"}},
            {"text_config": {}},
            {"model_type": "paligemma", "text_config": {"model_type": "gemma2"}},
        )
    ):
        folder = nest(plain("llama"), tmp_path / str(number), names, **outer)
        with pytest.raises(ConfigError, match="SomethingForConditionalGeneration is not supported"):
            read_model_spec(folder, implementation="quire")
    folder = nest(plain("llama"), tmp_path / "x", names, text_config={"model_type": 3})
    with pytest.raises(ConfigError, match="text_config: model_type=3"):
        read_model_spec(folder)


def test_weights_that_are_there_twice(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = nest(plain("llama"), tmp_path / "twice", NAMES["Idefics 3"])
    tensors = load_file(folder / "model.safetensors")
    tensors["language_model.model.norm.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="are the same weight"):
        read_checkpoint(folder)


def test_converting_writes_the_text_model_alone(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = nest(plain("gemma3_text"), tmp_path / "nested", NAMES["as transformers 5 saves"])
    convert_model(folder, tmp_path / "out")
    spec = read_model_spec(tmp_path / "out")
    assert spec.architecture == "Gemma3ForCausalLM"
    assert set(read_checkpoint(tmp_path / "out").tensors) == set(read_checkpoint(folder).tensors)
    PagedModel(tmp_path / "out", "reference")
