"""The law of the incremental detokenizer: deltas together equal `decode`, however they are cut."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.rendering import IncrementalDetokenizer, Tokenizer
from tests.profiles import examples

from .conftest import BUILDERS, EXACT, TEXTS

IDS = st.lists(st.integers(0, 1 << 30), max_size=40)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=10)


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: Any) -> list[str]:
    """Feed `ids` in pieces of the lengths `cuts`, over and over; the deltas."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    deltas: list[str] = []
    start = turn = 0
    while start < len(ids):
        length = cuts[turn % len(cuts)]
        deltas.append(detokenizer.append(ids[start : start + length]))
        start, turn = start + length, turn + 1
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("name", EXACT)
@examples(150)
@given(ids=IDS, cuts=CUTS, skip=st.booleans(), spaces=st.booleans())
def test_deltas_equal_decode(
    name: str,
    tokenizers_by_name: dict[str, Tokenizer],
    ids: list[int],
    cuts: list[int],
    skip: bool,
    spaces: bool,
) -> None:
    """Fault: streamed text that differs from the text of the whole, on any ids at all."""
    tokenizer = tokenizers_by_name[name]
    # A little beyond the vocabulary too: a model may have more embeddings than tokens.
    ids = [i % (tokenizer.vocab_size + 3) for i in ids]
    deltas = stream(
        tokenizer, ids, cuts, skip_special_tokens=skip, spaces_between_special_tokens=spaces
    )
    assert "".join(deltas) == tokenizer.decode(ids, skip, spaces)


@pytest.mark.parametrize("name", BUILDERS)
@examples(40)
@given(text=st.sampled_from(TEXTS) | st.text(max_size=20), cuts=CUTS)
def test_real_text_streams_without_replacement_characters(
    name: str, tokenizers_by_name: dict[str, Tokenizer], text: str, cuts: list[int]
) -> None:
    """Fault: an emoji or a CJK character arrives as U+FFFD because its bytes came apart."""
    tokenizer = tokenizers_by_name[name]
    if "\ufffd" in text:
        return
    ids = tokenizer.encode(text)
    deltas = stream(tokenizer, ids, cuts)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_character_is_held_until_complete(
    name: str, tokenizers_by_name: dict[str, Tokenizer]
) -> None:
    """Fault: part of a character is shown, or a complete one waits for the next token."""
    tokenizer = tokenizers_by_name[name]
    by_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [by_byte[bytes((byte,))] for byte in "𝄞a🜁".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.append([i]) for i in ids]
    assert deltas == ["", "", "", "𝄞", "a", "", "", "", "🜁"]
    detokenizer.append(ids[:2])
    assert set(detokenizer.finish()) == {"\ufffd"}


def test_invalid_bytes_leave_their_neighbours_alone(
    tokenizers_by_name: dict[str, Tokenizer],
) -> None:
    """Fault: one invalid byte at the end turns characters that were already shown into U+FFFD."""
    tokenizer = tokenizers_by_name["llama2"]
    ids = tokenizer.token_ids(
        ["<0xC3>", "<0xA9>", "<0xFF>", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>"]
    )
    known = [i for i in ids if i is not None]
    assert tokenizer.decode(known) == "é\ufffdé\ufffd\ufffd"
    assert stream(tokenizer, known, [1]) == ["", "é", "\ufffd", "", "é", "", "", "\ufffd\ufffd"]


@pytest.mark.parametrize("name", ["llama2", "t5"])
@pytest.mark.parametrize("skip", [True, False])
def test_output_continues_the_prompt(
    name: str, skip: bool, tokenizers_by_name: dict[str, Tokenizer]
) -> None:
    """Fault: the space between prompt and output is lost: `The quickbrown`."""
    tokenizer = tokenizers_by_name[name]
    ids = tokenizer.encode("The quick brown fox")
    for cut in range(1, len(ids)):
        output = "".join(
            stream(tokenizer, ids[cut:], [1], prompt_token_ids=ids[:cut], skip_special_tokens=skip)
        )
        prompt = tokenizer.decode(ids[:cut], skip)
        assert prompt + output == tokenizer.decode(ids, skip)
    # After nothing but BOS the output is the start of the text.
    if skip and name == "llama2":
        assert "".join(stream(tokenizer, ids[1:], [1], prompt_token_ids=ids[:1])).startswith("The")


def test_special_tokens_appear_as_text(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: special tokens vanish, or break a character, when they are to be shown."""
    tokenizer = tokenizers_by_name["gpt2"]
    ids = tokenizer.encode("é<|im_start|>好<|im_end|>")
    assert "".join(stream(tokenizer, ids, [1])) == "é好"
    shown = stream(tokenizer, ids, [1], skip_special_tokens=False)
    assert "".join(shown) == "é<|im_start|>好<|im_end|>"


def test_spaces_between_special_tokens(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: the option has no effect on decoders that write spaces between tokens."""
    tokenizer = tokenizers_by_name["bert"]
    ids = tokenizer.token_ids(["[CLS]", "[SEP]", "the", "[SEP]"])
    known = [i for i in ids if i is not None]
    assert tokenizer.decode(known, False) == "[CLS] [SEP] the [SEP]"
    assert tokenizer.decode(known, False, False) == "[CLS][SEP] the [SEP]"


def test_neighbour_dependent_decoder(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: a decoder outside the known families loses spaces or text."""
    tokenizer = tokenizers_by_name["old_bpe"]
    ids = tokenizer.encode("The quick brown fox jumps")
    for cuts in ([1], [2, 3], [50]):
        assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["qwen", "llama2"])
def test_cost_per_token_is_flat(name: str, tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: cost that grows with the length of the output (a 32k answer takes minutes)."""
    tokenizer = tokenizers_by_name[name]
    ids = tokenizer.encode(TEXTS[0] + TEXTS[2] + TEXTS[4])
    detokenizer = IncrementalDetokenizer(tokenizer)
    spent: list[float] = []
    for _ in range(400):
        started = time.thread_time()
        for i in ids:
            detokenizer.append((i,))
        spent.append(time.thread_time() - started)
    # The best of many, so that nothing else on the machine counts. A quadratic stream takes a
    # hundred times longer at the end.
    assert min(spent[-50:]) < 10 * min(spent[:50])
