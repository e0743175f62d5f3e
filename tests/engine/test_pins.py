"""Pinned prefixes on the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import RequestError
from quire.protocol.control import MapBlocks
from tests.waiting import wait_for

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PREFIX = [5 + i % 300 for i in range(41)]
TTL_S = 2.0
"""Longer than the step that computes a prefix takes on a busy machine: it counts from its start."""
PROMPTS = [[*PREFIX, 9], [*PREFIX, 10, 11], PREFIX, PREFIX[:-1]]


@dataclass
class Said:
    role: str
    content: str


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(
        quiet=True, num_kv_blocks=64, max_model_len=128, max_num_seqs=8, dtype="float32",
        enable_prefix_caching=False,
    ) as engine:  # fmt: skip
        yield engine


def test_a_pinned_prefix_changes_no_token(llm: LLM) -> None:
    """41 tokens are two blocks and a tail of nine."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    cold = llm.generate(prompts, GREEDY, use_tqdm=False)
    pin = llm.pin_prefix({"prompt_token_ids": PREFIX})
    assert (pin.num_tokens, pin.num_blocks) == (41, 3)
    blocks = llm.engine.client.control(MapBlocks()).blocks
    assert (blocks.count(b"p"), blocks.count(b"f")) == (3, 61)
    warm = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [w.outputs[0].token_ids for w in warm] == [c.outputs[0].token_ids for c in cold]
    assert [each.num_cached_tokens for each in warm] == [41, 41, 40, 0]
    assert [each.hits for each in llm.pinned_prefixes()] == [3]
    assert llm.unpin_prefix(pin)
    assert not llm.unpin_prefix(pin)
    assert llm.engine.client.stats().num_used_blocks == 0


def test_messages_are_pinned_as_the_template_writes_them(llm: LLM) -> None:
    system = {"role": "system", "content": "You are a short-spoken clerk."}
    pin = llm.pin_prefix([system])
    assert llm.pin_prefix([Said(**system)]).handle == pin.handle  # an object, as in `chat`
    (answer,) = llm.chat([system, {"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False)
    assert answer.num_cached_tokens == pin.num_tokens


def test_equal_texts_are_one_pin(llm: LLM) -> None:
    pins = [llm.pin_prefix("The sea is wide and the sky is blue.") for _ in range(3)]
    assert len({pin.handle for pin in pins}) == len(llm.pinned_prefixes()) == 1
    assert llm.pinned_prefixes()[0].hits == 0  # nothing was asked with it
    assert llm.unpin_prefix(pins[2]) and not llm.unpin_prefix(pins[0])


def test_a_pin_ends(llm: LLM) -> None:
    llm.pin_prefix("The quick brown fox", ttl_s=TTL_S)
    wait_for(lambda: llm.pinned_prefixes() == (), "end of the pin")
    llm.generate("Hello", GREEDY, use_tqdm=False)
    assert llm.engine.client.stats().num_used_blocks == 0


def test_what_cannot_be_pinned(llm: LLM) -> None:
    with pytest.raises(RequestError, match="ttl_s is 0"):
        llm.pin_prefix("Hello", ttl_s=0)
    with pytest.raises(RequestError, match="The prompt has no tokens"):
        llm.pin_prefix({"prompt_token_ids": []})
    with LLM(quiet=True, num_kv_blocks=4, max_model_len=48) as small:
        with pytest.raises(RequestError, match="takes 3 KV blocks, but of the 4"):
            small.pin_prefix({"prompt_token_ids": PREFIX})
        assert small.generate("Hello", GREEDY, use_tqdm=False)[0].finished
