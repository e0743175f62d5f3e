"""Tokenizers and chat templates out of GGUF metadata."""

from __future__ import annotations

import gzip
import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.base.errors import ConfigError, RequestError
from quire.bundled import bundled_model_path
from quire.text.rendering import Renderer
from quire.text.rendering.gguf import SPLITS
from quire.text.rendering.tokenizer import Tokenizer
from tests.gguf_writer import write_gguf
from tests.rendering import gguf_splits

BASE = {"general.architecture": "llama"}
PIECES = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab", "<0x0A>"]
KINDS = [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 6]
SCORES = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0, -5.0, 0.0]


def sentence_piece(**changes: Any) -> dict[str, Any]:
    values = {
        "model": "llama",
        "tokens": PIECES,
        "token_type": KINDS,
        "scores": SCORES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return BASE | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def load(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_folder(write_gguf(folder / "m.gguf", metadata, {}))


def strings(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_string(token) for token in tokenizer.encode(text)]


def test_best_scored_pairs_join_first(tmp_path: Path) -> None:
    """Catches merges in the order of ids: "bc" scores above "ab"."""
    tokenizer = load(tmp_path, sentence_piece())
    assert strings(tokenizer, "abc") == ["<s>", "▁a", "bc"]
    assert strings(tokenizer, "ab\n") == ["<s>", "▁ab", "<0x0A>"]
    assert strings(tokenizer, "a</s>") == ["<s>", "▁a", "</s>"]
    assert tokenizer.decode(tokenizer.encode("ab abc\nc")) == "ab abc\nc"


def test_pieces_join_in_the_order_of_a_list(tmp_path: Path) -> None:
    """The files of Gemma 4 do so. Turns red when scores count, a text begins with a mark, or line
    breaks join with words."""
    tokens = [*PIECES, "\n", "\n\n", "b\n", "▁b"]
    changes = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": KINDS + [1] * 4,
        "merges": ["\n \n", "b \n", "a b", "▁ b", "b c"],
        "add_space_prefix": False,
        "add_bos_token": True,
    }
    tokenizer = load(tmp_path, sentence_piece(**changes))
    assert strings(tokenizer, "abc b\n\nbc") == ["<s>", "ab", "c", "▁b", "\n\n", "bc"]
    assert strings(tokenizer, "a</s>") == ["<s>", "a", "</s>"]
    assert tokenizer.decode(tokenizer.encode("ab abc\nc")) == "ab abc\nc"


PHI3 = ["<|endoftext|>", "<|assistant|>", "<|end|>"]


def phi3(**changes: Any) -> dict[str, Any]:
    changes = {"tokens": PIECES + PHI3, "scores": SCORES + [0.0] * 3, **changes}
    metadata = sentence_piece(add_bos_token=False, **changes)
    return metadata | {"general.architecture": "phi3"}


def test_tokens_of_phi_3_take_the_spaces_behind_them(tmp_path: Path) -> None:
    """Its files do not say so. Turns red when a prompt has line breaks that the model never saw."""
    metadata = phi3(token_type=[*KINDS, 3, 4, 3])
    text = "<|assistant|>\n ab<|end|>\n</s>\n<|endoftext|>\n<s>\nb"
    expected = ["<|assistant|>", "▁ab", "<|end|>", "</s>", "<|endoftext|>", "▁", "<0x0A>", "<s>"]
    assert strings(load(tmp_path, metadata), text) == [*expected, "▁", "<0x0A>", "b"]
    llama = load(tmp_path, metadata | BASE)
    assert strings(llama, "<|end|>\n") == ["<|end|>", "▁", "<0x0A>"]


def test_ends_of_turns_are_no_part_of_texts(tmp_path: Path) -> None:
    """Files of Phi-3 call its ends tokens of users, or words. Turns red when answers show them."""
    tokenizer = load(tmp_path, phi3(token_type=[*KINDS, 3, 4, 1]))
    found = tokenizer.encode("a<|end|>")
    assert [tokenizer.token_string(token) for token in found] == ["▁a", "<|end|>"]
    assert tokenizer.decode(found) == "a"
    assert not tokenizer.is_special(len(PIECES) + 1)  # <|assistant|>, as the file says


def _pieces_by_definition(text: str, scores: dict[str, float]) -> list[str]:
    """Join the neighbours whose whole scores best, the leftmost of equal ones, while there are."""
    parts = list(text)
    while True:
        joined = [
            (-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores
        ]
        if not joined:
            return parts
        place = min(joined)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@given(
    words=st.lists(st.text("abc", min_size=2, max_size=5), max_size=20, unique=True),
    text=st.text("abc", min_size=1, max_size=20),
    data=st.data(),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_are_those_of_the_definition(
    words: list[str], text: str, data: st.DataObject, tmp_path: Path
) -> None:
    ranks = data.draw(st.permutations(range(len(words))))
    scores = dict.fromkeys("abc", -99.0) | {
        word: -float(rank) for word, rank in zip(words, ranks, strict=True)
    }
    changes = {
        "tokens": ["<unk>", *scores],
        "token_type": [2] + [1] * len(scores),
        "scores": [0.0, *scores.values()],
        "add_space_prefix": False,
        "add_bos_token": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    tokenizer = load(tmp_path, sentence_piece(**changes))
    assert strings(tokenizer, text) == _pieces_by_definition(text, scores)


def test_marks_are_as_the_file_says(tmp_path: Path) -> None:
    changes = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    assert strings(load(tmp_path, sentence_piece(**changes)), "ab") == ["ab", "</s>"]


def byte_level(**changes: Any) -> dict[str, Any]:
    """The bundled model's tokenizer as a GGUF file has it."""
    stored = json.loads((bundled_model_path() / "tokenizer.json").read_text())
    vocab: dict[str, int] = dict(stored["model"]["vocab"])
    added = {token["content"]: token["id"] for token in stored["added_tokens"]}
    tokens = sorted({**vocab, **added}.items(), key=lambda item: item[1])
    merges = [m if isinstance(m, str) else " ".join(m) for m in stored["model"]["merges"]]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [token for token, _ in tokens],
        "token_type": [3 if token in added else 1 for token, _ in tokens],
        "merges": merges,
        "bos_token_id": 0,
        **changes,
    }
    return BASE | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_texts_come_back(pre: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level(pre=pre))
    for text in ("def f(x):\n\treturn x**2  # 1234", "naïve 漢字 👩‍👩‍👧 \r\n\n  end ", "it's 'S"):
        assert tokenizer.decode(tokenizer.encode(text, False)) == text


def test_words_are_split_by_the_named_rule(tmp_path: Path) -> None:
    tokens = ["<s>", "1", "2", "3", "4", "12", "34", "123", "1234", "Ġ"]
    merges = ["1 2", "12 3", "3 4", "12 34"]
    found = {}
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2"):
        changes = {"pre": pre, "tokens": tokens, "merges": merges, "token_type": [3] + [1] * 9}
        tokenizer = load(tmp_path, byte_level(**changes))
        found[pre] = [tokenizer.token_string(token) for token in tokenizer.encode("1234")]
    assert found == {
        "gpt-2": ["123", "4"],
        "smollm": ["1", "2", "3", "4"],
        "llama-bpe": ["<s>", "123", "4"],
        "qwen2": ["1", "2", "3", "4"],
    }


def test_tokens_that_stand_twice(tmp_path: Path) -> None:
    """Official files of Gemma 4 have such tokens. A text is read as the id that the file names,
    else as a control token, else as the last token; all of them are written as their text."""
    pieces = [*PIECES, "▁a", "abc", "abc", "</s>", "<0x0A>", "bc"]
    kinds, scores = [*KINDS, 1, 1, 3, 1, 6, 1], [*SCORES, -3.0, -4.0, 0.0, 0.0, 0.0, -1.0]
    twice: dict[str, Any] = {"tokens": pieces, "token_type": kinds, "scores": scores}
    for changes in (
        twice,
        {**twice, "model": "gemma4", "add_bos_token": True, "merges": ["▁ a", "b c", "a bc"]},
    ):
        tokenizer = load(tmp_path, sentence_piece(**changes))
        assert tokenizer.vocab_size == tokenizer.num_model_tokens == len(pieces)
        prefix = [] if "merges" in changes else [3]  # a text begins with a mark
        assert tokenizer.encode("abc</s>") == [1, 15, 2]
        assert tokenizer.encode(" a\n")[-2:] == [13, 17]
        assert tokenizer.encode("bc", False) == [*prefix, 18]
        given = [8, 18, 13, 9, 10, 14, 12, 17, 8]
        assert tokenizer.decode(given) == "bcbc a aabcabc\n\nbc"
        assert [tokenizer.token_text(each) for each in (9, 13, 14, 10)] == [" a"] * 2 + ["abc"] * 2
        assert tokenizer.decode([4, 15, 16], skip_special_tokens=True) == "a</s>"
        assert tokenizer.token_text(12) == tokenizer.token_text(17) == "\n"


def test_byte_level_tokens_that_stand_twice(tmp_path: Path) -> None:
    """Turns red when a streamed answer differs from a decoded one, or an empty token is missed."""
    tokens = ["<s>", "a", "b", "ab", "Ġ", "ab", "", "", "Ġ", "<s>"]
    changes: dict[str, Any] = {"tokens": tokens, "token_type": [3] + [1] * 8 + [3]}
    tokenizer = load(tmp_path, byte_level(**changes, merges=["a b"]))
    assert tokenizer.encode("ab ab<s>") == [5, 8, 5, 0]
    assert tokenizer.decode([3, 4, 5, 8, 6, 1, 7, 9]) == "ab ab a"
    assert b"".join(map(tokenizer.token_bytes, [3, 4, 5, 8, 6, 1, 7])) == b"ab ab a"
    assert tokenizer.vocab_size == len(tokens)


def test_merges_without_a_token_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = ["<s>", "a", "b", "c", "bc"]
    changes: dict[str, Any] = {"tokens": tokens, "token_type": [3] + [1] * 4}
    for merges in (["a b", "b c"], ["b c", "a bc"], ["q b", "b c", "b q"]):
        caplog.clear()
        tokenizer = load(tmp_path, byte_level(**changes, merges=merges))
        assert tokenizer.encode("abc") == [1, 4]
        left_out = [merge for merge in merges if merge != "b c"]
        assert f"{len(left_out)} of {len(merges)} merges" in caplog.text
        assert repr(left_out[0]) in caplog.text


WANTED: dict[str, Any] = json.loads(gzip.decompress(gguf_splits.FILE.read_bytes()))


@pytest.mark.parametrize("pre", SPLITS)
def test_tokens_of_texts_are_those_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    """Compare the ids of each rule with those that `gguf_splits` wrote. Turns red when a text is
    cut elsewhere, a word that is a token is merged, or a text begins in another way."""
    wanted = WANTED["rules"][pre]
    metadata = gguf_splits.metadata(pre, WANTED["tokens"], WANTED["merges"])
    tokenizer = load(tmp_path, metadata)
    num_compared, wrong = 0, []
    for index, (text, common) in enumerate(zip(WANTED["texts"], WANTED["common"], strict=True)):
        if pre == "qwen2" and not unicodedata.is_normalized("NFC", text):
            continue  # the model knows the normal form, which llama.cpp does not make
        num_compared += 1
        ids = wanted["other"].get(str(index), common)
        found = tokenizer.encode(text, False)
        if found != ids:
            wrong.append((text, ids, found))
    assert not wrong, f"{len(wrong)} of {num_compared} texts; the first: {wrong[0]}"
    assert num_compared > 450
    assert tokenizer.encode("a") == wanted["marked"]


BROKEN = {
    "kind": (byte_level(model="t5"), "model is 't5'.*--tokenizer"),
    "no kind": (BASE, "model is missing"),
    "pre": (byte_level(pre="viking"), "pre='viking' is not supported"),
    "merge": (byte_level(merges=["aq9q"]), r"merges\[0\]='aq9q'"),
    "no merge": (byte_level(merges=["a q9q", "b q9q"]), "none of 2 merges.*'a q9q'"),
    "types": (sentence_piece(token_type=[1, 2]), "2 entries for 13 tokens"),
    "scores": (sentence_piece(scores=[0.5]), "scores has 1 entries"),
    "bos": (sentence_piece(bos_token_id=99), "bos_token_id=99 is no token"),
    "tokens": (sentence_piece(tokens=[1, 2]), "no list of texts"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tokenizers_end_in_a_sentence(name: str, tmp_path: Path) -> None:
    metadata, message = BROKEN[name]
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, metadata)


def test_chat_template_and_one_that_loops(tmp_path: Path) -> None:
    """A template that never ends fails the chat and nothing else."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    metadata = sentence_piece() | {"tokenizer.chat_template": template}
    renderer = Renderer.from_folder(write_gguf(tmp_path / "m.gguf", metadata, {}))
    assert renderer.render_chat([{"role": "user", "content": "ab"}]).text == "<s>[ab]"
    nested = "{% for a in range(99999) %}" * 4 + "x" + "{% endfor %}" * 4
    metadata |= {"tokenizer.chat_template": nested}
    renderer = Renderer.from_folder(write_gguf(tmp_path / "m.gguf", metadata, {}))
    with pytest.raises(RequestError):
        renderer.render_chat([{"role": "user", "content": "ab"}])
    assert renderer.render_prompt("ab").token_ids
