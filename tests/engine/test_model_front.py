"""Facts that a front is told of a model."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.bundled import bundled_model_path
from quire.config.families.reader import read_model_spec
from quire.config.settings import EngineSettings
from quire.engine.model_front import load_model_front, load_tokenizer


@pytest.mark.parametrize("missing", [0, 1])
def test_a_tokenizer_of_another_model_is_told(
    missing: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when whoever put the wrong tokenizer beside a model learns of it by refused texts,
    or when the right one is complained of."""
    folder = bundled_model_path()
    spec = read_model_spec(folder)
    front = load_model_front(EngineSettings(model=str(folder)), folder, spec)
    assert front.renderer.tokenizer is not None
    smaller = replace(spec, vocab_size=front.renderer.tokenizer.vocab_size - missing)
    with caplog.at_level(logging.WARNING, "quire.engine"):
        load_model_front(EngineSettings(model=str(folder)), folder, smaller)
    assert [record.args for record in caplog.records] == (
        [(smaller.vocab_size + 1, smaller.vocab_size)] if missing else []
    )


def test_a_folder_of_a_tokenizer_alone(tmp_path: Path) -> None:
    """Fault: a file that a tokenizer's `save_pretrained` wrote is refused for a missing
    config.json."""
    model = bundled_model_path()
    settings = EngineSettings(model=str(model), tokenizer=str(tmp_path), revision="v1")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        load_tokenizer(settings, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, tmp_path / name)
    front = load_model_front(settings, model, read_model_spec(model))
    own = load_tokenizer(EngineSettings(model=str(model)), model)
    assert front.renderer.tokenizer is not None
    assert front.renderer.tokenizer.encode("a b") == own.encode("a b")


@pytest.mark.parametrize("beyond", [0, 1])
def test_an_end_token_outside_the_vocabulary_is_told(
    beyond: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end nothing, in silence."""
    folder = bundled_model_path()
    spec = read_model_spec(folder)
    wrong = spec.vocab_size - 1 + beyond
    spec = replace(spec, eos_token_ids=(*spec.eos_token_ids, wrong))
    with caplog.at_level(logging.WARNING, "quire.engine"):
        load_model_front(EngineSettings(model=str(folder)), folder, spec)
    assert [str(wrong) in record.getMessage() for record in caplog.records] == [True] * beyond


def test_a_broken_chat_template_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Turns red when an operator learns by refused chats that the model's template is broken."""
    folder = Path(shutil.copytree(bundled_model_path(), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages | nope }}")
    with caplog.at_level(logging.WARNING, "quire.engine"):
        load_model_front(EngineSettings(model=str(folder)), folder, read_model_spec(folder))
    (record,) = caplog.records
    assert "Chat is disabled" in record.getMessage() and "'nope'" in record.getMessage()
