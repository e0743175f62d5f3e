"""Stop strings, against a reader that takes one character at a time and keeps everything."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import RequestError
from quire.text.rendering import StopMatcher
from tests.profiles import examples

SMALL = st.text(alphabet="ab🦊", max_size=30)
STOPS = st.lists(st.text(alphabet="ab🦊", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The shortest beginning of `text` that ends with a stop string; the longest such string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    out = "".join(matcher.append(piece).text for piece in pieces)
    return out + matcher.finish(), matcher.matched


def cut_text(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(bounds)]


@examples(500)
@given(text=SMALL, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 30)))
def test_any_cut_gives_the_same(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    """Fault: a stop string across two tokens is missed, or the cut decides which one wins."""
    matcher = StopMatcher(stops, include)
    assert run(matcher, cut_text(text, cuts)) == expected(text, stops, include)


@examples(300)
@given(text=SMALL, stops=STOPS)
def test_holds_back_only_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    """Fault: text waits although it cannot become a stop string (stuttering streams)."""
    matcher = StopMatcher(stops)
    released = ""
    for end in range(1, len(text) + 1):
        released += matcher.append(text[end - 1]).text
        if matcher.matched is not None:
            return
        held = text[len(released) : end]
        longest = max(
            (n for s in stops for n in range(len(s)) if text[:end].endswith(s[:n])), default=0
        )
        assert len(held) == longest


def test_examples() -> None:
    """Fault: the wrong match of several, or text after the stop."""
    assert run(StopMatcher(["abcd", "bc"]), ["abcd"]) == ("a", "bc")
    assert run(StopMatcher(["bc", "abc"]), ["xabc"]) == ("x", "abc")
    assert run(StopMatcher(["\n\n"]), ["a\n", "\nb", "c"]) == ("a", "\n\n")
    assert run(StopMatcher(["END"], True), ["xE", "N", "Dy"]) == ("xEND", "END")
    assert run(StopMatcher(["END"]), ["xEN"]) == ("xEN", None)
    assert run(StopMatcher(), ["a", "b"]) == ("ab", None)


def test_unchecked_text_may_begin_a_stop() -> None:
    """Fault: text before `min_tokens` stops the sequence, or can no longer take part in a stop."""
    matcher = StopMatcher(["ab", "xabz"])
    assert matcher.append("ab xab", check=False).text == "ab "
    assert matcher.append("y").text == "xaby"
    matcher = StopMatcher(["ab"])
    matcher.append("a", check=False)
    assert matcher.append("b").stop == "ab"


def test_empty_stop_string() -> None:
    """Fault: an empty stop string ends every request at once."""
    with pytest.raises(RequestError, match="empty"):
        StopMatcher(["a", ""])
