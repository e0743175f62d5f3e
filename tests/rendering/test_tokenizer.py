"""Token ids, decoding and the files of a model folder, compared with transformers."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError, EngineError, RequestError
from quire.text.rendering import Tokenizer

from .conftest import BUILDERS, TEXTS, gpt2_like, llama2_like, write_folder


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode_equals_transformers(
    name: str,
    add_special_tokens: bool,
    folders: dict[str, Path],
    tokenizers_by_name: dict[str, Tokenizer],
    transformers: Any,
) -> None:
    """Fault: other ids than the model was trained with (BOS, prefix space, normalisation)."""
    oracle = transformers.AutoTokenizer.from_pretrained(folders[name])
    tokenizer = tokenizers_by_name[name]
    expected = [oracle.encode(text, add_special_tokens=add_special_tokens) for text in TEXTS]
    assert [tokenizer.encode(text, add_special_tokens) for text in TEXTS] == expected
    assert tokenizer.encode_batch(TEXTS, add_special_tokens) == expected
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.bos_token_id == oracle.bos_token_id
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert tokenizer.pad_token_id == oracle.pad_token_id


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("skip", [True, False])
def test_decode_equals_transformers(
    name: str,
    skip: bool,
    folders: dict[str, Path],
    tokenizers_by_name: dict[str, Tokenizer],
    transformers: Any,
) -> None:
    """Fault: text that differs from the reference for the same ids (spaces, special tokens)."""
    oracle = transformers.AutoTokenizer.from_pretrained(folders[name])
    tokenizer = tokenizers_by_name[name]
    draw = random.Random(name)
    samples = [tokenizer.encode(text) for text in TEXTS]
    samples += [draw.choices(range(tokenizer.vocab_size), k=12) for _ in range(300)]
    for ids in samples:
        expected = oracle.decode(ids, skip_special_tokens=skip)
        # Runs of byte tokens with invalid bytes are the documented exception.
        if tokenizer.decoder_plan.byte_fallback and "\ufffd" in expected:
            continue
        assert tokenizer.decode(ids, skip) == expected


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("extra", [{}, {"legacy": True}, {"add_prefix_space": False}])
def test_llama_class_equals_transformers(
    tokenizer_class: str, extra: dict[str, Any], tmp_path: Path, transformers: Any
) -> None:
    """Fault: a space marker after every special token where transformers 5 writes none."""
    config = {"tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>", **extra}
    folder = write_folder(
        tmp_path, llama2_like(), tokenizer_config=config, config={"model_type": "llama"}
    )
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS:
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_declared_tokens_equal_transformers(tmp_path: Path, transformers: Any) -> None:
    """Fault: added tokens of tokenizer_config.json get other ids or other matching rules."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "additional_special_tokens": ["<|im_start|>", "<|tool|>"],
        "added_tokens_decoder": {
            "3": {"content": "<|im_end|>", "lstrip": True, "special": True},
            "420": {"content": "<extra>", "special": False, "normalized": False},
        },
    }
    folder = write_folder(tmp_path, gpt2_like(), tokenizer_config=config)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    for text in (*TEXTS, "a <|im_end|> b<|tool|>c <extra> d"):
        assert tokenizer.encode(text) == oracle.encode(text)
    ids = oracle.encode("a <|im_end|> b<|tool|>c <extra> d")
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tokenizer.vocab_size == len(oracle)


def test_older_special_tokens_map(tmp_path: Path, transformers: Any) -> None:
    """Fault: repositories that name special tokens only in special_tokens_map.json have no EOS."""
    folder = write_folder(
        tmp_path,
        gpt2_like(),
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"},
        special_tokens_map={
            "eos_token": {"content": "<|end|>", "lstrip": False, "normalized": False},
            "bos_token": "<|begin|>",
        },
    )
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_id == oracle.eos_token_id is not None
    assert tokenizer.special_tokens == oracle.special_tokens_map


@pytest.mark.parametrize("form", ["keys", "object"])
def test_tokens_of_the_models_own(form: str, tmp_path: Path, transformers: Any) -> None:
    """Fault: a template that writes `image_token` writes nothing."""
    own = {"image_token": "<image>", "boi_token": "<|im_start|>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        **(own if form == "keys" else {"extra_special_tokens": own}),
    }
    folder = write_folder(tmp_path, gpt2_like(), tokenizer_config=config)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens == oracle.special_tokens_map
    assert tokenizer.encode("a <image> b") == oracle.encode("a <image> b")


def test_add_bos_flag_is_left_to_the_post_processor(tmp_path: Path, transformers: Any) -> None:
    """Fault: BOS added twice, or where the stored post-processor adds none."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "add_bos_token": True,
    }
    folder = write_folder(tmp_path, gpt2_like(), tokenizer_config=config)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    assert Tokenizer.from_folder(folder).encode("hello") == oracle.encode("hello")


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    """Fault: a tokenizer.json saved during training cuts prompts at 8 tokens."""
    backend = gpt2_like()
    backend.enable_truncation(8)
    backend.enable_padding(length=64)
    folder = write_folder(tmp_path, backend)
    text = "The quick brown fox jumps over the lazy dog. " * 5
    ids = Tokenizer.from_folder(folder).encode(text)
    assert Tokenizer.from_folder(folder).decode(ids) == text


def test_model_max_length(
    folders: dict[str, Path], tokenizers_by_name: dict[str, Tokenizer]
) -> None:
    """Fault: the 1e30 that older files write for `no limit` is taken for a limit."""
    assert tokenizers_by_name["gpt2"].model_max_length is None
    assert tokenizers_by_name["qwen"].model_max_length == 32768


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b", "x" * 5000 + "\udfff"])
def test_lone_surrogate_is_the_requests_fault(
    text: str, tokenizers_by_name: dict[str, Tokenizer]
) -> None:
    """Fault: half a character from a JSON escape crashes the server."""
    tokenizer = tokenizers_by_name["gpt2"]
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", text])


def test_other_types_are_the_requests_fault(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: a number in place of text raises TypeError."""
    with pytest.raises(RequestError, match="not text"):
        tokenizers_by_name["gpt2"].encode_batch(["fine", 3])  # type: ignore[list-item]


def test_ids_out_of_range(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: a negative or huge id raises OverflowError, or wraps around to a real token."""
    tokenizer = tokenizers_by_name["gpt2"]
    with pytest.raises(RequestError, match="-1 at index 1"):
        tokenizer.decode([0, -1])
    assert tokenizer.decode([10**12, tokenizer.vocab_size]) == ""
    assert tokenizer.token_bytes(10**12) == b""
    with pytest.raises(EngineError):
        tokenizer.token_bytes(-1)


@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama3", "llama2", "gemma"])
def test_token_bytes_make_the_text(name: str, tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: bytes of tokens (logprobs, grammars) that do not add up to the text."""
    tokenizer = tokenizers_by_name[name]
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "replace")
        expected = tokenizer.decode(ids, skip_special_tokens=False)
        # Inside a text the first word has its space.
        assert joined in (expected, " " + expected)


def test_token_conversions(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: tokens and ids that do not convert back and forth."""
    tokenizer = tokenizers_by_name["qwen"]
    for token, index in tokenizer.vocabulary().items():
        assert tokenizer.token_id(token) == index
        assert tokenizer.token_string(index) == token
    assert tokenizer.token_ids(["<|end|>", "no such token"]) == [1, None]
    assert tokenizer.special_ids == {0, 1, 2, 3}
    euro = tokenizer.token_ids(["\u00e2"])[0]
    assert euro is not None
    assert tokenizer.token_bytes(euro) == b"\xe2"
    assert tokenizer.token_text(euro) == "\ufffd"


def test_missing_and_broken_files(tmp_path: Path) -> None:
    """Fault: a traceback where a sentence should say which file is wrong and what to do."""
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_bytes(b"spm")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing.*found tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Tokenizer.from_folder(tmp_path)
    gpt2_like().save(str(tmp_path / "tokenizer.json"))
    for content in ("[]", "{", '{"added_tokens_decoder": {"x": 1}}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


def test_threads_share_one_tokenizer(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: `Already borrowed` from the library when two threads use one tokenizer."""
    tokenizer = tokenizers_by_name["llama3"]
    expected = [tokenizer.encode(text) for text in TEXTS]

    def work(_: int) -> bool:
        found = [tokenizer.encode(text) for text in TEXTS]
        decoded = [tokenizer.decode(ids) for ids in found]
        return found == expected and len(decoded) == len(TEXTS)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))


def test_light_import() -> None:
    """Fault: importing the room loads the tokenizer and template libraries."""
    import subprocess
    import sys

    code = (
        "import sys, quire.text.rendering; "
        "print([m for m in ('tokenizers', 'jinja2', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
