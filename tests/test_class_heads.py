"""Decoders with a head for classes, one that says "yes" or "no", and those without a head: their
numbers are those that `transformers` computes of the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from quire import LLM, ConfigError, PoolingParams, RequestError
from tests.encoder_writer import TEXTS, write_encoder, write_sentence_files

Maker = Callable[..., LLM]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "phi3": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}
SMALL: dict[str, Any] = {
    "quiet": True, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 11,
}  # fmt: skip


@pytest.fixture
def make() -> Iterator[Maker]:
    engines: list[LLM] = []

    def maker(folder: Path, **settings: Any) -> LLM:
        engines.append(LLM(str(folder), **{**SMALL, **settings}))
        return engines[-1]

    yield maker
    for engine in engines:
        engine.shutdown()


def numbers(model: Any, folder: Path, *texts: str) -> torch.Tensor:
    """Return the logits of the model's head, computed by `transformers`."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(*texts).ids
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_classes_and_scores(tmp_path: Path, make: Maker, kind: str, labels: int) -> None:
    """Prompts are computed in chunks, and again from the cache."""
    model = write_encoder(kind, tmp_path, num_labels=labels, **KINDS[kind])
    llm = make(tmp_path)
    for run in range(2):
        outputs = llm.classify(TEXTS, use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            raw = numbers(model, tmp_path, text)
            expected = raw.sigmoid() if labels == 1 else raw.softmax(-1)
            np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-4)
        assert any(output.num_cached_tokens for output in outputs) is bool(run)
    if labels > 1:
        with pytest.raises(RequestError, match="3 classes"):
            llm.score(TEXTS[0], TEXTS[1])
        return
    scored = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, scored, strict=True):
        expected = float(numbers(model, tmp_path, TEXTS[0], text).sigmoid())
        assert abs(output.outputs.score - expected) < 1e-4


def test_no_token_is_drawn(tmp_path: Path, make: Maker) -> None:
    write_encoder("qwen3", tmp_path, num_labels=2, **KINDS["qwen3"])
    llm = make(tmp_path)
    with pytest.raises(RequestError, match="draws no tokens"):
        llm.generate(TEXTS[0])
    (output,) = llm.encode(TEXTS[0], PoolingParams(normalize=False), use_tqdm=False)
    assert output.outputs.data.shape == (32,)


HEADLESS: dict[str, dict[str, Any]] = {
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "qwen2": {**KINDS["qwen2"], "tie_word_embeddings": False},
    **{kind: KINDS[kind] for kind in ("llama", "mistral", "phi3", "qwen3")},
}


@pytest.mark.parametrize("kind", HEADLESS)
def test_decoders_saved_without_a_head(tmp_path: Path, make: Maker, kind: str) -> None:
    """The folders are in the form of sentence-transformers. Fault: refused, since nothing makes
    logits."""
    model = write_encoder(kind, tmp_path, **HEADLESS[kind])
    (name,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert name in (f"{type(model).__name__}", "Gemma3TextModel")
    llm = make(tmp_path)
    for text, output in zip(TEXTS, llm.encode(TEXTS, use_tqdm=False), strict=True):
        expected = torch.nn.functional.normalize(states(model, tmp_path, text)[-1], dim=0)
        torch.testing.assert_close(output.outputs.data, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(RequestError, match="no head for logits, and draws no tokens"):
        llm.generate(TEXTS[0])
    assert llm.engine.spec.num_parameters == sum(each.numel() for each in model.parameters())
    with pytest.raises(ConfigError, match="without a head for logits take no adapters"):
        make(tmp_path, enable_lora=True)


def states(model: Any, folder: Path, text: str) -> torch.Tensor:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0]


def test_a_full_model_whose_head_is_not_there(tmp_path: Path, make: Maker) -> None:
    """For vectors alone, where files for them are there: the rest is whole."""
    model = write_encoder("qwen3", tmp_path, **KINDS["qwen3"])
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"'lm_head\.weight'.* is missing"):
        make(tmp_path)
    write_sentence_files(tmp_path, mode="mean", normalize=False)
    llm = make(tmp_path)
    (output,) = llm.encode(TEXTS[0], use_tqdm=False)
    expected = states(model, tmp_path, TEXTS[0]).mean(0)
    torch.testing.assert_close(output.outputs.data, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(RequestError, match="draws no tokens"):
        llm.generate(TEXTS[0])


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt_neox", "GPTNeoXForCausalLM"), ("stablelm", "StableLmForCausalLM")]
)
def test_a_missing_head_that_a_family_needs_is_named(
    tmp_path: Path, make: Maker, caplog: pytest.LogCaptureFixture, kind: str, name: str
) -> None:
    """Fault: vectors were promised, and then a weight was missing."""
    write_encoder(kind, tmp_path, tie_word_embeddings=False, num_key_value_heads=4)
    write_sentence_files(tmp_path, mode="mean", normalize=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    with pytest.raises(ConfigError, match=f"no head for logits, which {name} needs"):
        make(tmp_path)
    assert "gives vectors" not in caplog.text


OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["bread", "ship"],
    "is_original_qwen3_reranker": True,
}


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_answers_with_a_token(tmp_path: Path, make: Maker, tied: bool) -> None:
    """Qwen3-Reranker does this: the score is the difference of two logits."""
    from transformers import AutoModelForCausalLM

    more = {**KINDS["qwen3"], "tie_word_embeddings": tied}
    write_encoder("qwen3", tmp_path, **more)
    config = json.loads((tmp_path / "config.json").read_text())
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    assert "architectures" in config
    llm = make(tmp_path, hf_overrides=OVERRIDES)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    no, yes = (tokenizer.token_to_id(word) for word in OVERRIDES["classifier_from_token"])
    scored = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, scored, strict=True):
        logits = numbers(model, tmp_path, TEXTS[0], text)[-1]
        assert abs(output.outputs.score - float((logits[yes] - logits[no]).sigmoid())) < 1e-4
    (text,) = llm.generate(TEXTS[0], use_tqdm=False)
    assert text.outputs[0].token_ids, "it still is a language model"


def test_answers_that_are_no_tokens_are_refused(tmp_path: Path, make: Maker) -> None:
    write_encoder("qwen3", tmp_path, **KINDS["qwen3"])
    for words in (["bread"], ["bread", "nothing"]):
        with pytest.raises(ConfigError, match="classifier_from_token"):
            make(tmp_path, hf_overrides={**OVERRIDES, "classifier_from_token": words})
