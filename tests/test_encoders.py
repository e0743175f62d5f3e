"""Encoders: vectors, classes and scores are those that `transformers` computes of the files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, ConfigError, PoolingParams, RequestError
from quire.config import read_model_spec
from quire.config.sentence import read_sentence_settings
from tests.encoder_writer import KINDS, TEXTS, write_encoder, write_sentence_files

Maker = Callable[..., LLM]
SMALL: dict[str, Any] = {
    "quiet": True, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 70,
}  # fmt: skip
POOLINGS = {
    "mean": lambda h: h.mean(0),
    "cls": lambda h: h[0],
    "last": lambda h: h[-1],
}


@pytest.fixture
def make() -> Iterator[Maker]:
    engines: list[LLM] = []

    def maker(folder: Path, **settings: Any) -> LLM:
        engines.append(LLM(str(folder), **{**SMALL, **settings}))
        return engines[-1]

    yield maker
    for engine in engines:
        engine.shutdown()


def ids_of(llm: LLM, first: str, second: str | None = None) -> dict[str, torch.Tensor]:
    """Inputs of `transformers`, by the tokenizer's file."""
    import tokenizers

    file = Path(str(llm.engine.resolved.settings.model)) / "tokenizer.json"
    found = tokenizers.Tokenizer.from_file(str(file)).encode(first, second)
    return {
        "input_ids": torch.tensor([found.ids]), "token_type_ids": torch.tensor([found.type_ids])
    }  # fmt: skip


def hidden_of(model: Any, llm: LLM, text: str) -> torch.Tensor:
    inputs = ids_of(llm, text)
    if model.config.model_type == "modernbert":  # it has no table of types
        del inputs["token_type_ids"]
    with torch.inference_mode():
        return model(**inputs).last_hidden_state[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(
    tmp_path: Path, make: Maker, kind: str, depth: int
) -> None:
    """Texts of several lengths share steps, and more come than a step has room for."""
    model = write_encoder(kind, tmp_path)
    llm = make(tmp_path, depth=depth)
    for pooling, pooled in POOLINGS.items():
        params: Any = PoolingParams(pooling=pooling, normalize=False)  # type: ignore[arg-type]
        outputs = llm.encode(TEXTS * 3, params, use_tqdm=False)
        for text, output in zip(TEXTS * 3, outputs, strict=True):
            expected = pooled(hidden_of(model, llm, text))
            torch.testing.assert_close(output.outputs.data, expected, rtol=1e-4, atol=1e-4)
            assert output.num_cached_tokens == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_alone_has_the_vector_that_it_has_among_others(
    tmp_path: Path, make: Maker, kind: str
) -> None:
    write_encoder(kind, tmp_path)
    llm = make(tmp_path)
    together = llm.embed(TEXTS, use_tqdm=False)
    report = llm.engine.client.report
    is_exact = report.kernel_family != "reference" and "attention: reference" not in report.kernels
    for text, output in zip(TEXTS, together, strict=True):
        (alone,) = llm.embed(text, use_tqdm=False)
        close = np.array(alone.outputs.embedding) - np.array(output.outputs.embedding)
        assert np.abs(close).max() <= (0 if is_exact else 2e-6)


def test_files_with_old_names_are_read(tmp_path: Path, make: Maker) -> None:
    """Names without the model's prefix, norms with gamma and beta, a pooler that nobody needs."""
    model = write_encoder("bert", tmp_path)
    file = tmp_path / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(file).items()
    }
    assert any("pooler" in name for name in old) and any("gamma" in name for name in old)
    for prefix in ("", "bert."):
        save_file({prefix + name: tensor for name, tensor in old.items()}, file, {"format": "pt"})
        llm = make(tmp_path)
        (output,) = llm.encode(TEXTS[0], PoolingParams(normalize=False), use_tqdm=False)
        expected = hidden_of(model, llm, TEXTS[0]).mean(0)
        torch.testing.assert_close(output.outputs.data, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_classes_and_scores(tmp_path: Path, make: Maker, kind: str, labels: int) -> None:
    """Fault: the second text counts as the first (BERT has a table for that)."""
    model = write_encoder(kind, tmp_path, num_labels=labels)
    llm = make(tmp_path)

    def numbers(*texts: str) -> torch.Tensor:
        inputs = ids_of(llm, *texts)
        if kind != "bert":
            del inputs["token_type_ids"]
        with torch.inference_mode():
            return model(**inputs).logits[0]

    outputs = llm.classify(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        raw = numbers(text)
        expected = raw.sigmoid() if labels == 1 else raw.softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-4)
        assert output.outputs.num_classes == labels
    (raw,) = llm.classify(
        [TEXTS[0]], pooling_params=PoolingParams(use_activation=False), use_tqdm=False
    )
    np.testing.assert_allclose(raw.outputs.probs, numbers(TEXTS[0]), atol=1e-4)
    if labels > 1:
        with pytest.raises(RequestError, match="3 classes"):
            llm.score(TEXTS[0], TEXTS[1])
        return
    scored = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, scored, strict=True):
        expected = float(numbers(TEXTS[0], text).sigmoid())
        assert abs(output.outputs.score - expected) < 1e-4
    pairs = llm.score(TEXTS, TEXTS[::-1], use_tqdm=False)
    for one, other, output in zip(TEXTS, TEXTS[::-1], pairs, strict=True):
        assert abs(output.outputs.score - float(numbers(one, other).sigmoid())) < 1e-4


def test_classes_by_the_mean_of_all_states(tmp_path: Path, make: Maker) -> None:
    """Most classifiers made of ModernBERT do this; here they have all biases too."""
    biases = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
    more = {"classifier_pooling": "mean", **dict.fromkeys(biases, True)}
    model = write_encoder("modernbert", tmp_path, num_labels=3, **more)
    llm = make(tmp_path)
    for text, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
        inputs = ids_of(llm, text)
        del inputs["token_type_ids"]
        with torch.inference_mode():
            expected = model(**inputs).logits[0].softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-4)


def test_old_and_new_settings_of_modernbert_are_the_same(tmp_path: Path) -> None:
    """Files on the hub say how often a layer sees all, and a base of positions each."""
    write_encoder("modernbert", tmp_path)
    file = tmp_path / "config.json"
    new, settings = read_model_spec(tmp_path), json.loads(file.read_text())
    for name in ("layer_types", "rope_parameters"):
        del settings[name]
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0}
    file.write_text(json.dumps({**settings, **old, "local_rope_theta": 10000.0}))
    assert read_model_spec(tmp_path) == new
    assert new.windows == (None, 5, 5, None) and new.ropes[0] == new.ropes[3] != new.ropes[1]
    weights = load_file(tmp_path / "model.safetensors")
    assert new.num_parameters == sum(tensor.numel() for tensor in weights.values())


def test_long_pairs_are_cut_like_those_of_transformers(tmp_path: Path, make: Maker) -> None:
    from tokenizers import Tokenizer

    model = write_encoder("bert", tmp_path, num_labels=1)
    llm = make(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for most in (5, 9, 12, 20):
        tokenizer.enable_truncation(most, strategy="longest_first")
        for one, other in ((TEXTS[2], TEXTS[5]), (TEXTS[1], TEXTS[2]), (TEXTS[2], TEXTS[4])):
            cut = PoolingParams(truncate_prompt_tokens=most, use_activation=False)
            (output,) = llm.score(one, other, pooling_params=cut, use_tqdm=False)
            found = tokenizer.encode(one, other)
            assert output.prompt_token_ids == found.ids
            inputs = {"input_ids": [found.ids], "token_type_ids": [found.type_ids]}
            with torch.inference_mode():
                expected = model(**{k: torch.tensor(v) for k, v in inputs.items()}).logits
            assert abs(output.outputs.score - float(expected)) < 1e-4


def test_long_texts_are_cut_at_their_end(tmp_path: Path, make: Maker) -> None:
    write_encoder("bert", tmp_path)
    llm = make(tmp_path)
    (whole,) = llm.encode(TEXTS[2], use_tqdm=False)
    cut = PoolingParams(truncate_prompt_tokens=6)
    (output,) = llm.encode(TEXTS[2], cut, use_tqdm=False)
    assert output.prompt_token_ids == [*whole.prompt_token_ids[:5], whole.prompt_token_ids[-1]]
    with pytest.raises(RequestError, match="the context holds 66"):
        llm.encode("sea " * 70, use_tqdm=False)
    (most,) = llm.encode("sea " * 70, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(most.prompt_token_ids) == 66


def test_sentence_files_say_what_becomes_of_states(tmp_path: Path, make: Maker) -> None:
    model = write_encoder("bert", tmp_path)
    prompts = {"query": "the queen ", "passage": "bread "}
    write_sentence_files(
        tmp_path, mode="cls", normalize=False, longest=40, prompts=prompts, default_prompt="query"
    )
    llm = make(tmp_path)
    assert llm.engine.resolved.settings.max_model_len == 40
    for name, before in ((None, "the queen "), ("passage", "bread ")):
        (output,) = llm.embed([TEXTS[0]], prompt_name=name, use_tqdm=False)
        expected = hidden_of(model, llm, before + TEXTS[0])[0]
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)
        assert output.outputs.hidden_size == 32
    with pytest.raises(RequestError, match="prompts are: query, passage"):
        llm.embed(TEXTS, prompt_name="odd")
    few = PoolingParams(dimensions=8)
    (cut,) = llm.embed([TEXTS[0]], pooling_params=few, use_tqdm=False)
    first = hidden_of(model, llm, "the queen " + TEXTS[0])[0][:8]
    np.testing.assert_allclose(cut.outputs.embedding, first / first.norm(), atol=1e-4)
    with pytest.raises(RequestError, match="dimensions is 100"):
        llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=100), use_tqdm=False)


def test_scores_of_encoders_without_classes_are_cosines(tmp_path: Path, make: Maker) -> None:
    write_encoder("roberta", tmp_path)
    llm = make(tmp_path)
    vectors = np.array([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])
    scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(scores, vectors @ vectors[0], atol=1e-5)
    with pytest.raises(RequestError, match="make no pairs"):
        llm.score(TEXTS[:2], TEXTS[:3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "max"}, "pooling max is not supported"),
        ({"more": ("Dense",)}, "module 'Dense' is not supported"),
    ],
    ids=["max", "dense"],
)
def test_modules_that_are_lacking_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    write_encoder("bert", tmp_path)
    write_sentence_files(tmp_path, **change)
    with pytest.raises(ConfigError, match=words):
        LLM(str(tmp_path), **SMALL)


TRANSFORMER_FILES = [
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]


@pytest.mark.parametrize(
    ("name", "settings", "longest"),
    [
        *((name, {"max_seq_length": 24}, 24) for name in TRANSFORMER_FILES),
        (TRANSFORMER_FILES[0], {"tokenizer_args": {"model_max_length": 22}}, 22),
        (
            TRANSFORMER_FILES[0],
            {"processor_kwargs": {"model_max_length": 22}, "max_seq_length": 24},
            22,
        ),
        (TRANSFORMER_FILES[0], {"max_seq_length": None, "do_lower_case": False}, 50),
        (TRANSFORMER_FILES[0], {}, 50),
    ],
)
def test_the_longest_text_is_that_of_the_files(
    tmp_path: Path, name: str, settings: dict[str, Any], longest: int
) -> None:
    """Fault: a file under another name, or a bound in another place, is passed over, so that long
    texts have other vectors. 50 is what the tokenizer says."""
    write_encoder("bert", tmp_path)
    write_sentence_files(tmp_path)
    (tmp_path / name).write_text(json.dumps(settings))
    tokenizer = tmp_path / "tokenizer_config.json"
    stated = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps({**stated, "model_max_length": 50}))
    assert read_model_spec(tmp_path).max_context == longest
    tokenizer.write_text(json.dumps({**stated, "model_max_length": 10**30}))
    assert read_model_spec(tmp_path).max_context == (longest if longest < 50 else 66)


def test_settings_of_the_module_that_change_nothing_are_taken(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    write_sentence_files(tmp_path)
    settings = {
        "do_lower_case": True,
        "transformer_task": "feature-extraction",
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "last_hidden_state"}
        },
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"text": {"truncation": True}, "chat_template": {"depth": 1}},
        "model_args": {"torch_dtype": "float16", "trust_remote_code": True},
        "unpad_inputs": False,
        "query_length": None,
    }
    (tmp_path / "sentence_xlnet_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_sentence_settings(tmp_path, is_encoder=True).pooling == "cls"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"do_lower_case": True}, "do_lower_case=True"),
        ({"tokenizer_name_or_path": "other/tokenizer"}, "tokenizer_name_or_path='other/tokenizer'"),
        ({"transformer_task": "fill-mask"}, "transformer_task='fill-mask'"),
        ({"module_output_name": "sentence_embedding"}, "module_output_name='sentence_embedding'"),
        (
            {"modality_config": {"image": {"method": "forward"}}},
            "modality_config: it has no 'text'",
        ),
        (
            {"modality_config": {"text": {"method": "get_text_features"}}},
            "text: method='get_text_features'",
        ),
        ({"processing_kwargs": {"text": {"max_length": 8}}}, "text: max_length=8"),
        ({"model_kwargs": {"rotary_scaling_factor": 2}}, "rotary_scaling_factor=2"),
        ({"config_args": {"is_causal": False}}, "config_args: is_causal=False"),
        ({"tokenizer_args": {"truncation_side": "left"}}, "truncation_side='left'"),
        ({"query_length": 32}, "query_length=32"),
        ({"of_next_year": 1}, "of_next_year=1"),
    ],
)
def test_settings_of_the_module_that_nothing_obeys_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    write_encoder("bert", tmp_path)
    write_sentence_files(tmp_path)
    (tmp_path / "sentence_roberta_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_sentence_settings(tmp_path, is_encoder=True)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["custom_st.Transformer"], "'custom_st.Transformer' is code of the model's own"),
        (["Transformer", "my_modules.Pooling"], "'my_modules.Pooling' is code of"),
        (["Transformer", "Pooling", "Pooling"], "in this order"),
        (["Transformer", "Normalize", "Pooling"], "in this order"),
        ([], "modules (none)"),
    ],
)
def test_modules_of_other_kinds_and_orders_are_refused(
    tmp_path: Path, kinds: list[str], words: str
) -> None:
    """Fault: a class of the model's own passes as one of the library that has its name."""
    write_sentence_files(tmp_path)
    modules = [
        {"type": kind if "." in kind else f"sentence_transformers.models.{kind}", "path": path}
        for kind, path in zip(kinds, ("", "1_Pooling", "1_Pooling"), strict=False)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_sentence_settings(tmp_path, is_encoder=True)


@pytest.mark.parametrize(
    ("file", "settings", "words"),
    [
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "'SparseEncoder'"),
    ],
)
def test_other_files_that_make_other_vectors_are_refused(
    tmp_path: Path, file: str, settings: dict[str, Any], words: str
) -> None:
    write_sentence_files(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=words):
        read_sentence_settings(tmp_path, is_encoder=True)


@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_a_pooling_without_its_file_is_refused(tmp_path: Path, mode: str) -> None:
    """Catches vectors of another pooling than the model's, taken for want of a file."""
    write_sentence_files(tmp_path, mode=mode)
    assert read_sentence_settings(tmp_path, is_encoder=True).pooling == mode
    (tmp_path / "1_Pooling" / "config.json").unlink()
    for is_encoder in (True, False):
        with pytest.raises(ConfigError, match=r"1_Pooling.config\.json: is missing"):
            read_sentence_settings(tmp_path, is_encoder=is_encoder)


def test_what_encoders_cannot_do_is_refused(tmp_path: Path, make: Maker) -> None:
    write_encoder("bert", tmp_path)
    llm = make(tmp_path)
    with pytest.raises(RequestError, match="draws no tokens"):
        llm.generate("the king", use_tqdm=False)
    with pytest.raises(RequestError, match="no classes"):
        llm.classify(TEXTS)
    with pytest.raises(RequestError, match="no classes"):
        llm.encode("king", PoolingParams(pooling="classify"), use_tqdm=False)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=32 is less than the 66"):
        make(tmp_path, max_num_batched_tokens=32)
    with pytest.raises(ConfigError, match="encoders take no adapters"):
        make(tmp_path, enable_lora=True)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["position_embedding_type"] = "relative_key"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="position_embedding_type='relative_key'"):
        make(tmp_path)


def test_a_bad_text_fails_alone(tmp_path: Path, make: Maker) -> None:
    write_encoder("bert", tmp_path)
    llm = make(tmp_path)
    good, bad = llm.embed(["the king", "sea " * 100], use_tqdm=False)
    assert good.error is None and len(good.outputs.embedding) == 32
    assert bad.error is not None and bad.outputs.embedding == []


def test_sleep_and_weights(tmp_path: Path, make: Maker) -> None:
    write_encoder("bert", tmp_path)
    llm = make(tmp_path)
    (before,) = llm.embed([TEXTS[0]], use_tqdm=False)
    llm.sleep(2)
    llm.wake_up()
    (after,) = llm.embed([TEXTS[0]], use_tqdm=False)
    assert after.outputs.embedding == before.outputs.embedding


def test_decoders_read_sentence_files_too(tmp_path: Path, make: Maker) -> None:
    from tests.models.families import CASES, write_checkpoint

    write_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    write_sentence_files(tmp_path, mode="mean", normalize=False)
    llm = make(tmp_path, skip_tokenizer_init=True, max_model_len=64)
    ids = {"prompt_token_ids": [5, 9, 3, 7]}
    (found,) = llm.encode([ids], use_tqdm=False)
    (mean,) = llm.encode([ids], PoolingParams("mean", normalize=False), use_tqdm=False)
    torch.testing.assert_close(found.outputs.data, mean.outputs.data, rtol=0, atol=0)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized(tmp_path: Path, make: Maker, quantization: str) -> None:
    write_encoder("bert", tmp_path, hidden_size=64, intermediate_size=128)
    plain = np.array([e.outputs.embedding for e in make(tmp_path).embed(TEXTS, use_tqdm=False)])
    llm = make(tmp_path, quantization=quantization)
    found = np.array([e.outputs.embedding for e in llm.embed(TEXTS, use_tqdm=False)])
    assert (plain * found).sum(1).min() > (0.999 if quantization == "int8" else 0.9)
