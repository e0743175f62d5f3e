"""A stream cut anywhere and continued on another core equals the uncut one; who kills cores is
found. Without processes: the client's bookkeeping over fake engines that are thrown away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.clients.open_requests import OpenRequests
from quire.engine.clients.request_stream import RequestStream
from quire.protocol import BeamRules, EngineRequest, FinishReason, SamplingParams
from quire.protocol.codec import Codec, encode
from quire.protocol.control import ExtendPrompt
from quire.protocol.grammar import GrammarSpec
from quire.protocol.messages import Add, ClientMessage, CoreMessage, Extend, Output
from tests.engine.fake_engine import FakeEngine
from tests.engine.hash_grammar import SPEC, HashGrammars, mask_after
from tests.engine.process_harness import FAKE_MODEL, Collected
from tests.pairs import LAWS_BY_PAIRS
from tests.profiles import machine_settings
from tests.scheduler.beam_reference import search

pytestmark = LAWS_BY_PAIRS


def new_engine() -> FakeEngine:
    grammars = HashGrammars(FAKE_MODEL.vocab_size)
    return FakeEngine(num_blocks=256, max_model_len=128, grammars=grammars)


class Cut:
    """A client and the core that it has at the moment. Everything between them goes as bytes."""

    def __init__(self, max_replays: int = 100) -> None:
        self._next_handle = 0
        self._from_client: Codec[ClientMessage] = Codec(ClientMessage)
        self._from_core: Codec[CoreMessage] = Codec(CoreMessage)
        self.client = OpenRequests(self.reserve, max_replays)
        self.engine = new_engine()

    def reserve(self, count: int) -> int:
        self._next_handle += count
        return self._next_handle - count

    def add(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        n: int,
        max_tokens: int,
        beams: BeamRules | None = None,
        is_open: bool = False,
        grammar: GrammarSpec | None = None,
    ) -> RequestStream:
        request = EngineRequest(
            "test",
            self.reserve(n),
            np.array(prompt, np.int32),
            SamplingParams(n=n, max_tokens=max_tokens),
            seed,
            beams=beams,
            is_open=is_open,
            grammar=grammar,
        )
        stream = self.client.open(request, self.engine.core.abort)
        self.send(request)
        return stream

    def send(self, request: EngineRequest) -> None:
        message = self._from_client.decode(encode(Add(request)))
        assert isinstance(message, Add)
        self.engine.core.add(message.request)

    def extend(self, stream: RequestStream, piece: Sequence[int], *, is_last: bool) -> None:
        handle, tokens = stream.request.first_handle, np.array(piece, np.int32)
        request = self.client.extended(handle, tokens, is_last=is_last)
        assert request is not None
        in_core = self.client.set_request(handle, request)
        if in_core is not None:
            message = self._from_client.decode(encode(Extend(in_core, tokens, is_last)))
            assert isinstance(message, Extend)
            op = ExtendPrompt(message.handle, message.token_ids, message.is_last)
            self.engine.core.control(op, 0.0)

    def step(self) -> None:
        self.engine.now += 1
        output = self.engine.core.step(self.engine.now)
        message = self._from_core.decode(encode(Output(output)))
        assert isinstance(message, Output)
        self.client.take(message.output)
        self.client.announce()
        for request in self.client.next_trial():
            self.send(request)

    def die(self) -> None:
        """The core is gone, with all that it had not sent; a new one takes over."""
        running = self.engine.scheduler.running_handles()
        self.client.core_died(frozenset(running.tolist()))
        self.engine = new_engine()
        for request in self.client.core_started():
            self.send(request)

    def finish(self) -> None:
        for _ in range(2000):
            if not self.client:
                return
            self.step()
        raise AssertionError("no end")


def read(stream: RequestStream) -> Collected:
    """All that a finished stream has, as its reader gets it."""

    async def collect() -> Collected:
        found = Collected()
        async for update in stream:
            for sample in update.samples:
                found.tokens.setdefault(sample.index, []).extend(sample.token_ids)
                assert sample.index not in found.finishes
                if sample.finish is not None:
                    found.finishes[sample.index] = sample.finish
        return found

    return asyncio.run(collect())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cut", range(26))
def test_cut_after_each_step_equals_uncut(cut: int, n: int) -> None:
    prompt = list(range(40))  # takes two steps
    world = Cut()
    stream = world.add(prompt, seed=5, n=n, max_tokens=20)
    for _ in range(cut):
        world.step()
    world.die()
    world.finish()
    found = read(stream)
    assert found.tokens == {i: FAKE_MODEL.expected_tokens(prompt, 20, 5, i) for i in range(n)}
    assert [found.finishes[i].handle for i in range(n)] == list(range(n))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 9, 17])
def test_a_stream_under_a_grammar_goes_on(cut: int, n: int) -> None:
    """The next core makes the grammar anew, and its masks from what was sent."""
    world = Cut()
    stream = world.add([1, 2, 3], seed=5, n=n, max_tokens=15, grammar=SPEC)
    for _ in range(cut):
        world.step()
    world.die()
    world.finish()
    size = FAKE_MODEL.vocab_size
    expected = {
        i: FAKE_MODEL.expected_tokens([1, 2, 3], 15, 5, i, lambda output: mask_after(output, size))
        for i in range(n)
    }
    assert read(stream).tokens == expected


@pytest.mark.parametrize("cut", [1, 2, 5, 14, 30])
def test_a_search_that_is_cut_begins_again(cut: int) -> None:
    """It gives nothing before its end, so its reader sees no difference."""
    rules, world = BeamRules(3), Cut()
    stream = world.add([1, 2, 3], seed=0, n=2, max_tokens=8, beams=rules)
    for _ in range(cut):
        world.step()
    world.die()
    world.finish()
    found = search(lambda tokens: FAKE_MODEL.expected_scores(tokens), [1, 2, 3], rules, 8).found
    assert read(stream).tokens == {i: list(found[i].tokens) for i in range(2)}


@machine_settings(60)
@given(
    pieces=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    moves=st.lists(st.sampled_from(["step", "step", "die"]), max_size=20),
    seed=st.integers(0, 2**31),
)
def test_an_open_prompt_that_is_cut_goes_on(pieces: list[int], moves: list[str], seed: int) -> None:
    """It grows between any two steps and deaths; another request runs beside it."""
    world, rest = Cut(), list(pieces)
    prompt = list(range(1, 2 + sum(pieces)))
    stream = world.add(prompt[:1], seed=5, n=1, max_tokens=9, is_open=True)
    other = world.add([7], seed=6, n=1, max_tokens=15)
    rng, given_tokens = random.Random(seed), 1
    for move in [*moves, *["end"] * len(pieces)]:
        if rest and (move == "end" or rng.random() < 0.5):
            piece = prompt[given_tokens : given_tokens + rest[0]]
            given_tokens += rest.pop(0)
            world.extend(stream, piece, is_last=not rest)
        if move == "step":
            world.step()
        elif move == "die":
            world.die()
    world.finish()
    assert read(stream).tokens[0] == FAKE_MODEL.expected_tokens(prompt, 9, 5)
    assert read(other).tokens[0] == FAKE_MODEL.expected_tokens([7], 15, 6)


@machine_settings(60)
@given(data=st.data())
def test_any_number_of_cuts_and_aborts(data: st.DataObject) -> None:
    """Requests come, samples are aborted and cores die at any time; each sample ends once, and has
    what an engine without faults gives, or a beginning of it if it was aborted."""
    world = Cut()
    streams: list[tuple[RequestStream, list[int], int]] = []
    aborted: set[tuple[int, int]] = set()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "die", "abort"]))
        if action == "add":
            prompt = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
            n = data.draw(st.integers(1, 3))
            stream = world.add(prompt, seed=len(streams), n=n, max_tokens=12)
            streams.append((stream, prompt, n))
        elif action == "step":
            world.step()
        elif action == "die":
            world.die()
        elif streams:
            which = data.draw(st.integers(0, len(streams) - 1))
            stream, _, n = streams[which]
            sample = data.draw(st.integers(0, n - 1))
            if stream.samples[sample].finish is None:
                aborted.add((which, sample))
            world.client.abort([stream.request.first_handle + sample])
    world.finish()
    for which, (stream, prompt, n) in enumerate(streams):
        found = read(stream)
        for sample in range(n):
            wanted = FAKE_MODEL.expected_tokens(prompt, 12, which, sample)
            tokens = found.tokens.get(sample, [])
            if (which, sample) in aborted:
                assert found.finishes[sample].reason is FinishReason.ABORT
                assert tokens == wanted[: len(tokens)]
            else:
                assert found.finishes[sample].reason is FinishReason.LENGTH
                assert tokens == wanted
    while world.engine.core.has_unfinished:
        world.step()
    assert world.engine.core.stats().num_used_blocks == 0


@machine_settings(40)
@given(
    fatal_step=st.integers(0, 6),
    max_replays=st.integers(0, 3),
    num_others=st.integers(0, 6),
    poison_place=st.integers(0, 6),
)
def test_the_request_that_kills_cores_is_the_one_that_fails(
    fatal_step: int, max_replays: int, num_others: int, poison_place: int
) -> None:
    """A core dies once the poison has run for some steps in it. With replays nobody else fails."""
    world = Cut(max_replays)
    streams = [world.add([i, 7], seed=i, n=1, max_tokens=30) for i in range(num_others)]
    streams.insert(min(poison_place, num_others), world.add([777], seed=99, n=1, max_tokens=30))
    poison = next(s for s in streams if s.request.seed == 99)
    ran = 0
    for _ in range(3000):
        if not world.client:
            break
        sequences = world.engine.scheduler.state.table.sequences
        is_in = any(s is not None and s.group.request.seed == 99 for s in sequences)
        ran = ran + 1 if is_in else 0
        if is_in and ran > min(fatal_step, 3) and not poison.is_finished:
            world.die()
            ran = 0
        else:
            world.step()
    assert not world.client, "no end"
    assert read(poison).finishes[0].reason is FinishReason.ERROR
    for stream in streams:
        if stream is not poison:
            found = read(stream)
            if max_replays:
                seed = stream.request.seed
                assert found.tokens[0] == FAKE_MODEL.expected_tokens([seed, 7], 30, seed)
            assert len(found.finishes) == 1


def test_what_waits_is_not_suspected() -> None:
    world = Cut(max_replays=0)
    running = [world.add([i], seed=i, n=1, max_tokens=20) for i in range(8)]  # all slots
    waiting = world.add([9], seed=9, n=1, max_tokens=20)
    for _ in range(3):
        world.step()
    world.die()
    assert all(stream.is_finished for stream in running)
    world.finish()
    assert read(waiting).tokens[0] == FAKE_MODEL.expected_tokens([9], 20, 9)
