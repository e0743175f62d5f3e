"""Images of GGUF models, by the encoder in a file of its own: answers equal those of the folder."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.gguf_images import write_two_files
from tests.gguf_writer import gguf_header
from tests.image_oracle import GREEDY, SETTINGS, asked, tokens
from tests.image_writer import (
    GEMMA_BEGIN,
    IMAGE,
    QWEN_IMAGE,
    data_url,
    picture,
    write_any_checkpoint,
)

from quire import LLM, ConfigError, RequestError
from quire.base.platform import detect_platform
from quire.config.render_plan import render_plan
from quire.config.settings import EngineSettings
from quire.config.startup import find_model, plan_startup

PLACES = {"smolvlm": IMAGE, "idefics3": IMAGE, "gemma3": GEMMA_BEGIN}


def _answers(model: Path, prompts: list[Any], chat: Any, **more: Any) -> list[list[int]]:
    with LLM(str(model), **SETTINGS, **more) as llm:
        found = [tokens(each) for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
        (answer,) = llm.chat(chat, GREEDY, use_tqdm=False)
        return [*found, list(answer.prompt_token_ids), tokens(answer)]


def test_answers_are_those_of_the_folder(kind: str, kind_folder: Path, tmp_path: Path) -> None:
    """With the file beside the model, two images in a prompt, and text alone."""
    model, _ = write_two_files(kind_folder, tmp_path)
    place, first, second = PLACES.get(kind, QWEN_IMAGE), picture(40, 24), picture(30, 50, 1)
    prompts = [asked(f"Look: {place} and {place} Why?", first, second), "Only text here."]
    url = {"type": "image_url", "image_url": {"url": data_url(second)}}
    chat = [{"role": "user", "content": [url, {"type": "text", "text": "What is it?"}]}]
    # The tiny Gemma cuts text in no way that GGUF files can name.
    more = {"tokenizer": str(kind_folder)} if kind == "gemma3" else {}
    assert _answers(model, prompts, chat, **more) == _answers(kind_folder, prompts, chat)


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_any_checkpoint(tmp_path_factory.mktemp("smolvlm"), "smolvlm")


@pytest.fixture(scope="module")
def files(smol: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_two_files(smol, tmp_path_factory.mktemp("files"))


def test_half_floats_and_old_names(smol: Path, tmp_path: Path) -> None:
    """A file that is named, of half floats, with names of networks as before May 2025."""
    from tests import gguf_images

    folder = tmp_path / "half"
    shutil.copytree(smol, folder)
    weights = load_file(folder / "model.safetensors")
    halved = {
        name: tensor if "text_model" in name or tensor.dim() == 1 else tensor.half().float()
        for name, tensor in weights.items()
    }
    save_file(halved, folder / "model.safetensors", {"format": "pt"})
    names = dict(gguf_images._SIGLIP)
    try:
        gguf_images._SIGLIP.update({"mlp.fc1": "ffn_down", "mlp.fc2": "ffn_up"})
        model, mmproj = write_two_files(folder, tmp_path / "files", "F16")
    finally:
        gguf_images._SIGLIP.update(names)
    named = mmproj.rename(tmp_path / "encoder.gguf")
    prompts = [asked(f"Look: {IMAGE}", picture(60, 40))]
    chat = [{"role": "user", "content": "Only text."}]
    wanted = _answers(folder, prompts, chat)
    assert _answers(model, prompts, chat, mmproj=str(named)) == wanted


def test_a_model_without_an_encoder_takes_text_alone(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    model = Path(shutil.copy(files[0], tmp_path))
    with LLM(str(model), **SETTINGS) as llm:
        with pytest.raises(RequestError, match=r"takes text only.*mmproj"):
            llm.generate(asked(IMAGE, picture(30, 30)), GREEDY, use_tqdm=False)
        assert tokens(*llm.generate("text", GREEDY, use_tqdm=False))


def test_the_plan_counts_the_encoder(files: tuple[Path, Path]) -> None:
    settings = EngineSettings(model=str(files[0]), max_model_len=256, num_kv_blocks=64)
    with_images = plan_startup(settings, detect_platform())
    text = plan_startup(
        EngineSettings(
            model=str(files[0]),
            max_model_len=256,
            num_kv_blocks=64,
            limit_mm_per_prompt='{"image": 0}',
        ),
        detect_platform(),
    )
    spec = with_images.resolved.spec
    assert spec.images is not None
    assert spec.images.file == files[1]
    tower = spec.images.num_parameters * spec.dtype_bytes
    weights = with_images.resolved.memory.fixed.weights - text.resolved.memory.fixed.weights
    assert weights == tower
    assert "the encoder's" in render_plan(with_images.resolved)
    assert with_images.checkpoint is not None
    assert files[1] in with_images.checkpoint.files


def _find(model: Path, **more: Any) -> Any:
    return find_model(EngineSettings(model=str(model), **more)).spec.images


def test_several_files_beside_the_model_are_not_chosen_from(
    files: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copy(files[0], tmp_path))
    for name in ("mmproj-a.gguf", "b.mmproj.gguf"):
        shutil.copy(files[1], tmp_path / name)
    with caplog.at_level(logging.WARNING):
        assert _find(model) is None
    assert "several image encoders beside it (b.mmproj.gguf, mmproj-a.gguf)" in caplog.text
    assert _find(model, mmproj=str(tmp_path / "mmproj-a.gguf")) is not None


def _write(file: Path, **values: Any) -> Path:
    metadata = {"general.architecture": "clip"} | {
        key.replace("__", "."): value for key, value in values.items()
    }
    file.write_bytes(gguf_header(metadata, []))
    return file


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, "holds no image encoder"),
        ({"clip__projector_type": "pixtral"}, "'pixtral' are not supported.*idefics3"),
        (
            {"clip__projector_type": "idefics3", "clip__vision__projection_dim": 48},
            "rows of 48 numbers for a language model of 32",
        ),
        (
            {"clip__projector_type": "idefics3", "clip__vision__projection_dim": 32},
            r"clip\.vision\.image_size is None and must be a positive number",
        ),
        (
            {
                "clip__projector_type": "qwen2.5vl_merger",
                "clip__vision__n_wa_pattern": 1,
                "clip__vision__block_count": 1 << 20,
            },
            r"block_count is 1048576, but there are 0 tensors",
        ),
        (
            {
                "clip__projector_type": "qwen3vl_merger",
                "clip__vision__projection_dim": 32,
                **{
                    f"clip__vision__{key}": 4
                    for key in (
                        "embedding_length",
                        "feed_forward_length",
                        "block_count",
                        "attention__head_count",
                        "patch_size",
                    )
                },
                "clip__use_gelu": True,
            },
            r"models with the token '<\|image_pad\|>', which this model's vocabulary lacks",
        ),
    ],
)
def test_files_that_do_not_fit(
    values: dict[str, Any],
    wanted: str,
    files: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Refused if they are named; else the model takes text, and the log says why."""
    model = Path(shutil.copy(files[0], tmp_path))
    file = _write(tmp_path / "mmproj.gguf", **values)
    with pytest.raises(ConfigError, match=wanted):
        _find(model, mmproj=str(file))
    with caplog.at_level(logging.WARNING):
        assert _find(model) is None
    assert "takes no images" in caplog.text


def test_unknown_tensors_are_found_before_loading(
    files: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when an encoder that nobody named keeps the model from starting."""
    model = Path(shutil.copy(files[0], tmp_path))
    renamed = files[1].read_bytes().replace(b"v.post_ln.weight", b"v.post_no.weight")
    (tmp_path / "mmproj.gguf").write_bytes(renamed)
    with caplog.at_level(logging.WARNING):
        assert _find(model) is None
    assert "'v.post_no.weight' is of no encoder of the type idefics3" in caplog.text


def test_an_encoder_of_another_generation_is_refused(tmp_path: Path) -> None:
    """Both have the tokens, and rows of the same width."""
    kinds = ("qwen2_5_vl", "qwen3_vl")
    (older, _), (_, newer) = (
        write_two_files(write_any_checkpoint(tmp_path / f"{kind}-hf", kind), tmp_path / kind)
        for kind in kinds
    )
    with pytest.raises(ConfigError, match=r"language models of qwen3vl or .* is of qwen2vl"):
        _find(older, mmproj=str(newer))


def test_settings_without_an_effect_are_refused(
    smol: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is a folder, which has its own"):
        _find(smol, mmproj=str(files[1]))
    with pytest.raises(ConfigError, match="is no GGUF file"):
        _find(files[0], mmproj=str(tmp_path / "missing.gguf"))
    with pytest.raises(ConfigError, match="is an image encoder"):
        _find(files[1])
