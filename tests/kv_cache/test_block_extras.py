"""Names of blocks whose K/V depend on more than tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.plan.kv_cache import BlockExtras, BlockHasher
from quire.protocol.media import Media
from quire.protocol.step import MediaSpan
from tests.profiles import examples

SIZE = 4


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    extras: BlockExtras

    def names(self) -> list[bytes]:
        hasher, chain = BlockHasher(SIZE, b"key"), list[bytes]()
        hasher.extend(chain, np.array(self.tokens, np.int32), hasher.root(), self.extras)
        return chain

    def inputs(self) -> list[object]:
        """Return the inputs of each full block's K/V: all that comes before its end."""
        of_tokens: list[object] = [(token, None) for token in self.tokens]
        for each in self.extras.media:
            span = each.span
            positions = span.positions.reshape(3, -1)
            for i in range(span.length):
                place = tuple(positions[:, i].tolist()) if positions.size else None
                token = self.tokens[span.position + i]
                of_tokens[span.position + i] = (token, (each.digest, i, place))
        ends = range(SIZE, len(self.tokens) + 1, SIZE)
        return [(self.extras.adapter, tuple(of_tokens[:end])) for end in ends]


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Draw a prompt of few values, so that many are alike."""
    tokens = draw(st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE))
    media: list[Media] = []
    start = 0
    while start < len(tokens) and draw(st.booleans()):
        position = draw(st.integers(start, min(start + 2, len(tokens) - 1)))
        length = draw(st.integers(1, min(6, len(tokens) - position)))
        positions = draw(
            st.one_of(
                st.just(()),
                st.lists(st.integers(0, 1), min_size=3 * length, max_size=3 * length),
            )
        )
        digest = draw(st.sampled_from((b"a", b"b", b"ab", b"")))
        handle = draw(st.integers(0, 3))
        span = MediaSpan(position, length, handle, np.array(positions, np.int32))
        media.append(Media(digest, span))
        start = position + length
    adapter = draw(st.sampled_from(("", "a", "ab")))
    return Prompt(tuple(tokens), BlockExtras(adapter, tuple(media)))


@examples(400)
@given(st.lists(prompts(), min_size=2, max_size=8))
def test_names_are_equal_where_all_inputs_are_and_nowhere_else(found: list[Prompt]) -> None:
    of_inputs: dict[object, bytes] = {}
    for prompt in found:
        for inputs, name in zip(prompt.inputs(), prompt.names(), strict=True):
            assert of_inputs.setdefault(inputs, name) == name
    assert len(set(of_inputs.values())) == len(of_inputs)


def test_a_block_without_extras_has_the_name_that_it_always_had() -> None:
    tokens = np.arange(8, dtype=np.int32)
    hasher, chain = BlockHasher(SIZE, b"key"), list[bytes]()
    later = Media(b"image", MediaSpan(6, 1, 0))
    hasher.extend(chain, tokens, hasher.root(), BlockExtras(media=(later,)))
    data = hasher.root() + tokens[:4].tobytes()
    assert chain[0] == hashlib.blake2b(data, digest_size=16, key=b"key").digest()
    assert chain[1] != hasher.name(chain[0], tokens[4:].tobytes())


def test_tokens_cannot_spell_extras() -> None:
    """A block of other length is none of this model, but no bytes are to stand for both."""
    hasher = BlockHasher(SIZE, b"key")
    extras = BlockExtras(adapter="abcd").of(0, SIZE)
    block = np.arange(4, dtype=np.int32).tobytes()
    assert hasher.name(hasher.root(), block, extras) != hasher.name(hasher.root(), block + extras)


def test_a_chain_that_grows_has_the_names_of_one_that_is_whole() -> None:
    tokens = np.arange(40, dtype=np.int32)
    extras = BlockExtras("a", (Media(b"x", MediaSpan(3, 11, 0)), Media(b"y", MediaSpan(17, 9, 1))))
    hasher = BlockHasher(SIZE, b"key")
    whole, grown = list[bytes](), list[bytes]()
    hasher.extend(whole, tokens, hasher.root(), extras)
    for end in range(41):
        hasher.extend(grown, tokens[:end], hasher.root(), extras)
    assert grown == whole


def test_media_that_go_on_are_not_media_that_begin_again() -> None:
    tokens = np.zeros(8, np.int32)
    once = (Media(b"a", MediaSpan(0, 8, 0)),)
    twice = (Media(b"a", MediaSpan(0, 4, 0)), Media(b"a", MediaSpan(4, 4, 0)))
    hasher, chains = BlockHasher(SIZE, b"key"), ([], [])
    for chain, media in zip(chains, (once, twice), strict=True):
        hasher.extend(chain, tokens, hasher.root(), BlockExtras(media=media))
    assert chains[0][0] == chains[1][0]
    assert chains[0][1] != chains[1][1]
