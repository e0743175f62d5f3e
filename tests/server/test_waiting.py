"""The waiting room: bounds that follow the measured rate, and places that are given back once."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.model_front import ModelFront
from quire.server.generation.prompts import SHORT_CHARS, PromptRenderer
from quire.server.generation.waiting import Party, Place, WaitingRoom
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.text.rendering import RenderedPrompt


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 400))))
def test_counts_are_those_of_the_places(moves: list[tuple[int, int, int]]) -> None:
    room = WaitingRoom(Limits(max_queue_requests=4, max_queue_tokens=500))
    held: list[tuple[Place, int]] = []
    for kind, which, tokens in moves:
        if kind < 2:
            try:
                place = room.enter(Party())
            except RefusedError:
                assert len(held) == 4
                continue
            try:
                place.hold(tokens)
            except RefusedError:
                assert held and sum(size for _, size in held) + tokens > 500
                place.leave()
                continue
            held.append((place, tokens))
        elif held:
            place, _ = held.pop(which % len(held))
            place.leave()
            place.leave()
        assert room.num_requests == len(held)
        assert room.num_tokens == sum(size for _, size in held)


def test_patience_follows_the_speed_and_the_prompts() -> None:
    """Fault: an 8B model on a CPU computes 20 prompt tokens/s, and no prompt of 8,000 tokens is
    ever answered: the limit is 300 s."""
    room = WaitingRoom(Limits())
    room.set_capacity(max_model_len=32_000, max_num_seqs=4)
    first, second, third = (room.enter(Party()) for _ in range(3))
    first.hold(8000)
    assert (first.queue_s(), first.first_token_s()) == (60.0, 300.0), "the speed is not known yet"
    room.observe_speed(20.0)
    assert (first.queue_s(), first.first_token_s()) == (60.0, 800.0)
    first.start()
    second.hold(100)
    assert (second.queue_s(), second.first_token_s()) == (800.0, 810.0)
    first.leave()
    third.hold(100)
    assert (third.queue_s(), third.first_token_s()) == (60.0, 300.0)
    room.observe_speed(2000.0)
    assert (second.queue_s(), second.first_token_s()) == (60.0, 300.0)
    second.start()
    for place in (second, second, third):
        place.leave()
    assert room.num_computing == room.num_tokens == room.num_requests == 0


def test_time_in_which_no_engine_answers_ends_no_wait() -> None:
    """Fault: requests that waited for a hung engine were refused in the second in which it was
    replaced."""
    now = 100.0
    room = WaitingRoom(Limits(first_token_timeout_s=7.0), clock=lambda: now)
    room.set_capacity(max_model_len=1000, max_num_seqs=4)
    early = room.enter(Party())
    early.hold(10)
    for now, is_silent in ((101.0, False), (102.0, True), (105.0, True)):  # noqa: B007
        room.note_silence(is_silent=is_silent)
    assert (early.queue_s(), early.first_token_s()) == (63.0, 10.0)
    late = room.enter(Party())
    late.hold(10)
    now = 106.5
    assert (early.queue_s(), late.queue_s()) == (64.5, 61.5), "it goes on"
    room.note_silence(is_silent=False)
    now = 130.0
    assert (early.queue_s(), late.queue_s()) == (64.5, 61.5)


def test_limits_that_were_given_stay() -> None:
    room = WaitingRoom(Limits(max_queue_s=5.0, first_token_timeout_s=7.0))
    place = room.enter(Party())
    place.hold(8000)
    room.observe_speed(1.0)
    assert (place.queue_s(), place.first_token_s()) == (5.0, 7.0)


def test_a_party_is_let_in_as_a_whole() -> None:
    """Fault: a request for embeddings was refused in the middle, by its own prompts."""
    room = WaitingRoom(Limits(max_queue_requests=4))
    party = Party(64)
    places = [room.enter(party) for _ in range(64)]
    for place in places:
        place.hold(10)
    with pytest.raises(RefusedError, match="no more than 4 requests may wait"):
        room.enter(Party())
    for place in places:
        place.leave()
    assert room.num_requests == room.num_tokens == 0
    others = [room.enter(Party()) for _ in range(4)]
    assert len(others) == 4 and room.enter(party) is not None, "its last prompts come later"


def test_a_party_that_fits_only_in_part_is_refused_as_a_whole() -> None:
    room = WaitingRoom(Limits(max_queue_requests=4))
    first = [room.enter(party) for party in [Party(3)] for _ in range(3)]
    with pytest.raises(RefusedError, match="max_queue_requests"):
        room.enter(Party(2))
    assert room.num_requests == 3
    first[0].leave()
    party = Party(2)
    assert [room.enter(party) for _ in range(2)] and room.num_requests == 4


def test_the_bound_on_tokens_follows_the_rate() -> None:
    now = [0.0]
    room = WaitingRoom(Limits(), clock=lambda: now[0])
    room.set_capacity(max_model_len=1000, max_num_seqs=4)
    places = [room.enter(Party()) for _ in range(2)]
    places[0].hold(4000)
    with pytest.raises(RefusedError, match="no more than 4000 tokens may wait") as found:
        places[1].hold(1000)
    assert found.value.status == 503 and found.value.retry_after_s == 1.0
    room.observe(0)
    now[0] = 1.0
    room.observe(500)
    assert room.tokens_per_s == 500
    places[1].hold(1000)
    assert room.retry_after_s == pytest.approx(5.0)


def test_a_lone_request_is_always_let_in() -> None:
    room = WaitingRoom(Limits(max_queue_tokens=10))
    room.enter(Party()).hold(1000)
    with pytest.raises(RefusedError, match="max_queue_tokens"):
        room.enter(Party()).hold(1)


def test_prompts_that_come_together_are_let_in_together() -> None:
    room = WaitingRoom(Limits(max_queue_tokens=10))
    party = Party()
    places = [room.enter(party) for _ in range(4)]
    for place in places:
        place.hold(8)
    with pytest.raises(RefusedError, match="max_queue_tokens"):
        room.enter(Party()).hold(1)
    for place in places:
        place.leave()
    assert room.num_tokens == party.num_tokens == party.num_requests == 0


def test_long_prompts_are_rendered_in_another_thread(front: ModelFront) -> None:
    names: list[str] = []

    class Watched:
        def render_prompt(self, prompt: str, add_special_tokens: bool) -> RenderedPrompt:
            names.append(threading.current_thread().name)
            return front.renderer.render_prompt(prompt, add_special_tokens)

    async def render(text: str) -> None:
        await prompts.render_prompt(Watched(), text, 10**6)  # pyright: ignore

    prompts = PromptRenderer(Limits(), 1)
    asyncio.run(render("short"))
    asyncio.run(render("long " * SHORT_CHARS))
    prompts.close()
    assert names[0] == "MainThread" and names[1].startswith("render")
