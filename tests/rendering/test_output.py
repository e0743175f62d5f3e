"""One output sequence: text, stop strings and the tokens that are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import RequestError
from quire.protocol.request import FinishReason, SequenceFinish
from quire.protocol.sampling_params import SamplingParams
from quire.text.rendering import (
    Ending,
    IncrementalDetokenizer,
    OutputRenderer,
    Renderer,
    TextDelta,
    Tokenizer,
)
from tests.profiles import examples

from .conftest import TEXTS

TEXT = "The quick brown fox jumps over the lazy dog."


def renderer(tokenizer: Tokenizer, *stop: str, include: bool = False, min_tokens: int = 0):
    return OutputRenderer(
        IncrementalDetokenizer(tokenizer),
        stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
    )


@examples(150)
@given(
    text=st.sampled_from(TEXTS),
    start=st.integers(0, 100),
    length=st.integers(1, 6),
    step=st.integers(1, 7),
    include=st.booleans(),
)
def test_any_step_gives_the_same(
    tokenizers_by_name: dict[str, Tokenizer],
    text: str,
    start: int,
    length: int,
    step: int,
    include: bool,
) -> None:
    """Fault: several tokens per step (drafts) keep other text or tokens than one per step."""
    tokenizer = tokenizers_by_name["gpt2"]
    ids = tokenizer.encode(text)
    stop = text[start % max(len(text), 1) :][:length] or "none"
    one = renderer(tokenizer, stop, include=include)
    many = renderer(tokenizer, stop, include=include)
    one_text = "".join(one.append([i]).text for i in ids) + one.finish()
    many_text = ""
    for at in range(0, len(ids), step):
        many_text += many.append(ids[at : at + step]).text
    many_text += many.finish()
    assert one_text == many_text == one.text == many.text
    assert (one.stopped, one.num_tokens) == (many.stopped, many.num_tokens)
    plain = tokenizer.decode(ids)
    if stop in plain:
        end = plain.index(stop)
        assert one_text == plain[: end + len(stop) if include else end]
        # The kept tokens are the fewest whose text has the stop string.
        assert stop in tokenizer.decode(ids[: one.num_tokens])
        assert stop not in tokenizer.decode(ids[: one.num_tokens - 1])
    else:
        assert (one_text, one.num_tokens) == (plain, len(ids))


def test_tokens_after_the_stop_are_dropped(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: tokens sampled past the stop string are billed or shown."""
    tokenizer = tokenizers_by_name["gpt2"]
    output = renderer(tokenizer, "brown")
    ids = tokenizer.encode(TEXT)
    delta = output.append(ids)
    assert delta.text == "The quick "
    assert delta.stopped == "brown"
    assert "brown" in tokenizer.decode(ids[: delta.num_tokens_kept])
    assert output.append(ids) == TextDelta("", "brown", 0)
    assert output.finish() == ""


def test_min_tokens_exempts_the_first_tokens(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: a stop string ends a request before `min_tokens`."""
    tokenizer = tokenizers_by_name["gpt2"]
    ids = tokenizer.encode("a b a b a b")
    per_token = [tokenizer.decode([i]) for i in ids]
    for min_tokens in range(len(ids)):
        output = renderer(tokenizer, "b", min_tokens=min_tokens)
        for i in ids:
            output.append([i])
        ends = [n for n, text in enumerate(per_token, start=1) if "b" in text and n > min_tokens]
        assert output.num_tokens == (ends[0] if ends else len(ids))


def test_stop_token_text_is_left_out(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: the text of a stop token that is an ordinary word shows up in the answer."""
    tokenizer = tokenizers_by_name["gpt2"]
    ids = tokenizer.encode("one two")
    output = renderer(tokenizer)
    assert output.append(ids, ends_with_stop_token=True).num_tokens_kept == len(ids)
    assert output.text + output.finish() == tokenizer.decode(ids[:-1])
    output = renderer(tokenizer, include=True)
    output.append(ids, ends_with_stop_token=True)
    assert output.text == "one two"


def test_finish_releases_what_was_held(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Fault: the end of an answer is lost because it looked like the begin of a stop string."""
    tokenizer = tokenizers_by_name["gpt2"]
    output = renderer(tokenizer, "dog. End", "\ufffd")
    output.append(tokenizer.encode(TEXT))
    assert output.text == TEXT[:-4]
    assert output.finish() == "dog."
    assert output.text == TEXT
    output = renderer(tokenizer, "\ufffd")
    half = tokenizer.token_id("\u00c3")  # how the vocabulary spells the byte 0xC3
    assert half is not None
    output.append([half])
    assert output.finish() == ""
    assert output.stopped == "\ufffd"


def test_without_tokenizer() -> None:
    """Fault: an engine without tokenizer cannot serve token ids at all."""
    output = OutputRenderer(None)
    assert output.append([1, 2, 3]) == TextDelta("", None, 3)
    assert (output.finish(), output.text, output.num_tokens) == ("", "", 3)
    with pytest.raises(RequestError, match="without a tokenizer"):
        OutputRenderer(None, ["x"])


@pytest.mark.parametrize("shows_special", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_special_token_ends_the_text_as_a_stop_string(
    tokenizers_by_name: dict[str, Tokenizer], include: bool, shows_special: bool
) -> None:
    """With what was held back before it, and once, whether its own text is shown or not; for
    every kind of tokenizer."""
    for name, tokenizer in tokenizers_by_name.items():
        ids = tokenizer.encode("The qu", add_special_tokens=False)
        for special in tokenizer.special_ids - set(ids):
            end = tokenizer.token_string(special)
            assert end is not None
            before = tokenizer.decode(ids)
            params = SamplingParams(
                stop=[before + "ick", end, "never"],
                include_stop_str_in_output=include,
                skip_special_tokens=not shows_special,
            )
            output = Renderer(tokenizer).output_of([], params)
            deltas = [output.append([token]) for token in ids]
            deltas.append(output.append([special], ends_with_stop_token=True))
            assert deltas[-1].stopped == end == output.stopped, name
            text = "".join(delta.text for delta in deltas)
            assert (output.text, output.finish()) == (text, "")
            assert text.replace(" ", "") == before.replace(" ", "") + end * include, name
            assert output.num_tokens == len(ids) + 1


def test_only_special_tokens_of_the_model_are_stop_tokens(
    tokenizers_by_name: dict[str, Tokenizer],
) -> None:
    """Not the tokens of ordinary words, and none that the model cannot give."""
    tokenizer = next(t for t in tokenizers_by_name.values() if t.token_id("<|im_end|>"))
    special, plain = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("a")
    assert special is not None and plain is not None
    stops = ["a", "<|im_end|>", "<|im_end|>\n", "<|none|>"]
    assert Renderer(tokenizer).stop_tokens(stops) == {special: "<|im_end|>"}
    assert Renderer(tokenizer, vocab_size=special).stop_tokens(stops) == {}
    assert Renderer(None, vocab_size=9).stop_tokens(stops) == {}


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (None, None),
        (SequenceFinish(0, LENGTH), Ending(LENGTH)),
        (SequenceFinish(0, STOP, 7), Ending(STOP, 7)),
        (SequenceFinish(0, STOP, 2), Ending(STOP)),
        (SequenceFinish(0, FinishReason.ERROR, message="it failed"), Ending(FinishReason.ERROR)),
    ],
)
def test_one_rule_says_how_an_output_ends(
    tokenizers_by_name: dict[str, Tokenizer],
    finish: SequenceFinish | None,
    expected: Ending | None,
) -> None:
    """Fault: an end token of the model is a stop_reason, or a stop token is none."""
    tokenizer = tokenizers_by_name["gpt2"]
    params = SamplingParams(stop=["lazy"])
    output = Renderer(tokenizer).output_of([], params, frozenset({2}))
    ids = tokenizer.encode("The quick brown")
    assert output.take(ids, finish).ending == expected


def test_a_stop_string_goes_before_what_the_engine_says(
    tokenizers_by_name: dict[str, Tokenizer],
) -> None:
    """Fault: a stop string in the last tokens of a cut or failed sequence is not seen."""
    tokenizer = tokenizers_by_name["gpt2"]
    for finish in (None, SequenceFinish(0, LENGTH), SequenceFinish(0, FinishReason.ERROR)):
        output = Renderer(tokenizer).output_of([], SamplingParams(stop=["quick"]))
        ids = tokenizer.encode("The quick brown fox")
        update = output.take(ids, finish)
        assert update.ending == Ending(STOP, "quick")
        assert update.text.rstrip() == "The"
        assert update.num_tokens_kept < len(ids)
