"""The bundled model folder: complete, small, and what it says it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bundled import bundled_model_path

SCRIPTED = Path(__file__).with_name("scripted_dialogues.json")
MEGABYTE = 1_000_000


def read(name: str) -> dict[str, Any]:
    return json.loads((bundled_model_path() / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "MODEL_CARD.md",
    ],
)
def test_every_file_of_a_model_folder_is_there(name: str) -> None:
    """Catches a file that was not exported or not packaged."""
    assert (bundled_model_path() / name).stat().st_size > 0


def test_folder_stays_below_twelve_megabytes() -> None:
    """Catches weights exported in float32."""
    size = sum(path.stat().st_size for path in bundled_model_path().iterdir() if path.is_file())
    assert size <= 12 * MEGABYTE


def test_weights_are_bf16_and_agree_with_the_configuration() -> None:
    """Catches a wrong data type, a missing layer, or a stored copy of the tied output matrix."""
    safetensors = pytest.importorskip("safetensors")
    config = read("config.json")
    with safetensors.safe_open(bundled_model_path() / "model.safetensors", "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        types = {piece.get_dtype() for piece in slices.values()}
        shape = slices["model.embed_tokens.weight"].get_shape()
    assert types == {"BF16"}
    assert shape == [config["vocab_size"], config["hidden_size"]]
    assert len(slices) == 2 + 9 * config["num_hidden_layers"]
    assert "lm_head.weight" not in slices


def test_generation_stops_at_end_of_turn_and_end_of_text() -> None:
    """Catches an answer that runs on into an invented user turn."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(bundled_model_path() / "tokenizer.json"))
    wanted = [tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|eos|>")]
    assert read("generation_config.json")["eos_token_id"] == wanted


def test_card_says_that_it_is_a_demonstration() -> None:
    """Catches a card that promises more than the model holds."""
    card = (bundled_model_path() / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "demonstration" in card


def test_scripted_dialogues_are_a_hundred_and_half_declare_tools() -> None:
    """Catches a script that was cut or lost its tools."""
    scripted = json.loads(SCRIPTED.read_text(encoding="utf-8"))
    assert len(scripted) == 100
    assert sum(bool(entry["tools"]) for entry in scripted) == 50
    assert all(entry["expected"]["role"] == "assistant" for entry in scripted)
