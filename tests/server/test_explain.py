"""Planted causes of slow requests and of cache misses, each named by the explanation."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.model_front import ModelFront
from quire.entrypoints.cli.main import main
from quire.protocol.media import Media
from quire.protocol.status import (
    CacheFacts,
    EngineState,
    EngineStatus,
    LoadOutcome,
    OtherRequest,
    Preemption,
    PreemptionCause,
    RequestFacts,
    WaitReason,
)
from quire.protocol.step import MediaSpan
from quire.server.generation.backend import ServedModel
from quire.server.generation.served_model import model_dialect, template_risks
from quire.server.processes.boot_screen import BootScreen
from quire.server.readings.chat_parts import ChatParts
from quire.server.readings.explanation import cache_sentences, seen_by, slow_sentences
from quire.server.readings.prompt_memory import CacheVerdict, KnownPrompt, MissKind, PromptMemory
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import ChatRequest
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.in_memory import InMemoryClient
from tests.server.running import RunningServer, held_up, running_server

SIZE = 16
SYSTEM = {"role": "system", "content": "You answer in one short sentence, and you never guess."}
ASKED = {"role": "user", "content": "Which river of Europe is the longest one, from spring to sea?"}


class Planted:
    """A server whose engine stands still until a test lets it go."""

    def __init__(self, server: RunningServer, http: httpx.Client) -> None:
        self.server = server
        self.http = http
        self.threads = ThreadPoolExecutor(8)

    def stand(self) -> None:
        self.server.call(lambda: setattr(self.server.client, "paused", True))

    def go_on(self) -> None:
        self.server.call(lambda: setattr(self.server.client, "paused", False))

    def ask(self, name: str, prompt: Sequence[int], num_tokens: int = 8, **body: Any) -> Any:
        """Ask for a completion, and return it."""
        body = {"max_tokens": num_tokens, "ignore_eos": True, "prompt": list(prompt), **body}
        response = self.http.post("/v1/completions", json=body, headers={"x-request-id": name})
        assert response.status_code == 200, response.text
        return response.json()

    def begin(self, name: str, prompt: Sequence[int], num_tokens: int = 8) -> Future[Any]:
        """Ask in a thread, and wait until the engine has the request."""
        before = self.server.call(lambda: len(self.server.client.added))
        found = self.threads.submit(self.ask, name, prompt, num_tokens)
        waiting.wait_for(
            lambda: self.server.call(lambda: len(self.server.client.added)) > before, name
        )
        return found

    def together(self, *asked: tuple[str, Sequence[int], int]) -> None:
        """Have the engine take requests in this order before it computes any of them."""
        self.stand()
        found = [self.begin(*each) for each in asked]
        self.go_on()
        for each in found:
            each.result()

    def chat(self, *messages: Any, **body: Any) -> str:
        """Ask for a chat, and return the id of the answer."""
        body = {"model": "bundled", "max_tokens": 20, "messages": messages, **body}
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["id"]

    def wait_for_steps(self, name: str) -> None:
        """Wait until a request writes its answer."""
        waiting.wait_for(lambda: self.explain(name)["engine"][0]["num_steps"] > 2, "steps")

    def explain(self, name: str) -> Any:
        response = self.http.get(f"/admin/requests/{name}/explanation")
        assert response.status_code == 200, response.text
        return response.json()

    def slow(self, name: str) -> str:
        return " ".join(self.explain(name)["sentences"])

    def missed(self, name: str) -> Any:
        """Return the reason of a miss, with its sentences."""
        found = self.explain(name)
        return {**found["cache"], "words": " ".join(found["cache_sentences"])}


@contextmanager
def planted(
    front: ModelFront, settings: ServerSettings | None = None, **engine: Any
) -> Iterator[Planted]:
    client = InMemoryClient(**{"step_s": 0.002, **engine})
    if settings is None:
        settings = ServerSettings(disable_access_log=True, enable_engine_control=True)
    with (
        running_server(front, settings, client=client) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        yield Planted(server, http)


@pytest.fixture(scope="module")
def roomy(front: ModelFront) -> Iterator[Planted]:
    with planted(front) as found:
        yield found


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


# --- slow -----------------------------------------------------------------------------------------


def test_a_wait_for_blocks_names_who_holds_them(front: ModelFront) -> None:
    """Fault: the wait has no reason, another one, or names a request that held nothing."""
    with planted(front, num_blocks=20) as here:
        first = here.begin("a", ids(0, 200), 100)
        here.wait_for_steps("a")
        here.ask("b", ids(500, 200), 4)
        first.result()
        assert "for free K/V blocks, behind request a." in here.slow("b")
        assert here.explain("b")["engine"][0]["waits"]["blocks"] > 0.05
        assert "K/V blocks" not in here.slow("a")


def test_a_wait_for_a_place_names_who_has_it(front: ModelFront) -> None:
    with planted(front, max_num_seqs=1) as here:
        here.together(("a", ids(0, 20), 30), ("b", ids(500, 20), 4), ("c", ids(700, 20), 4))
        said = here.slow("c")
        assert "for a place in the batch (max_num_seqs), behind request a (1 more waited)" in said


def test_a_wait_for_tokens_of_a_step(roomy: Planted) -> None:
    roomy.together(("a", ids(2000, 500), 4), ("b", ids(2500, 500), 4), ("c", ids(3500, 250), 4))
    said = roomy.slow("c")
    assert "for its turn in a step (max_num_batched_tokens), behind request" in said


def test_chunks_beside_decodes(roomy: Planted) -> None:
    """Fault: chunks are counted wrongly, or the rows beside them."""
    roomy.stand()
    small = roomy.begin("small", ids(0, 20), 40)
    roomy.go_on()
    roomy.wait_for_steps("small")
    roomy.ask("long", ids(3000, 450), 4)
    small.result()
    said = roomy.slow("long")
    assert "Its prompt was computed in 2 steps beside 1 decoding row." in said
    assert "Its answer took 3 steps beside 1 other row." in said
    assert "beside 0 to 1 other rows" in roomy.slow("small")


def test_a_preemption_names_who_took_the_blocks(front: ModelFront) -> None:
    """Fault: the cause is missing, or the tokens computed again are."""
    with planted(front, num_blocks=12) as here:
        here.together(("a", ids(0, 80), 60), ("b", ids(500, 79), 60))
        said = here.slow("b")
        assert "It was preempted once: since K/V blocks ran out, which request a needed" in said
        (one,) = here.explain("b")["engine"][0]["preemptions"]
        assert 0 < one["num_again"] <= one["num_computed"] and one["seconds"] > 0
        assert f"{one['num_again']} token" in said


def test_a_reset_that_preempts(roomy: Planted) -> None:
    roomy.stand()
    found = roomy.begin("reset", ids(40, 20), 60)
    roomy.go_on()
    roomy.wait_for_steps("reset")
    roomy.http.post("/reset_prefix_cache?reset_running_requests=true").raise_for_status()
    found.result()
    assert "since the prefix cache was reset with the requests that ran" in roomy.slow("reset")


def test_a_request_that_waits_can_be_asked_about(front: ModelFront) -> None:
    """Fault: nobody can tell why a request hangs until it has ended."""
    with planted(front, max_num_seqs=1) as here:
        first = here.begin("a", ids(0, 20), 200)
        second = here.begin("b", ids(500, 20), 4)
        waiting.wait_for(lambda: "max_num_seqs" in here.slow("b"), "reason")
        assert "It has waited" in here.slow("b") and "It has run for" in here.slow("b")
        first.result()
        second.result()


def test_requests_of_other_keys_have_no_names() -> None:
    """Fault: a caller learns the ids of requests of another key."""
    others = OtherRequest("secret", "other"), OtherRequest("mine", "me")
    lost = Preemption(PreemptionCause.BLOCKS, others[0], 40, num_again=20, seconds=0.5)
    facts = RequestFacts(
        "b", "me", "finished", 1.0, {"blocks": 1.25}, others, num_running=4, num_waiting=2,
        preemptions=(lost,), num_preemptions=1,
    )  # fmt: skip
    said = " ".join(slow_sentences(Timeline("b", "/v1/x", "me"), seen_by("me", [facts])))
    assert "secret" not in said
    assert (
        "It waited 1.25 s for free K/V blocks, behind request mine and requests of other keys "
        "(2 more ran and 2 more waited)." in said
    )
    assert "which a request of another key needed; 20 tokens computed again, after 500 ms" in said


@pytest.mark.parametrize("reason", WaitReason)
def test_every_wait_has_words(reason: WaitReason) -> None:
    facts = RequestFacts("b", "", "finished", 3.0, {reason.value: 2.0})
    assert "It waited 2.00 s " in " ".join(slow_sentences(Timeline("b", "/v1/x"), [facts]))


def test_a_pause_between_tokens_is_told() -> None:
    timeline = Timeline("a", "/v1/x", clock=iter([0, 1, 1.1, 1.2, 1.3, 3.3, 3.4, 9]).__next__)
    for _ in range(6):
        timeline.add_chunk(2)
    said = slow_sentences(timeline, [])
    assert "The longest pause between two tokens was 2.00 s, after 8 tokens; the usual" in said[-1]


# --- missed ---------------------------------------------------------------------------------------


def test_nothing_before(roomy: Planted) -> None:
    roomy.ask("new", ids(1000, 40))
    assert roomy.missed("new")["kind"] == "nothing_before"


def test_all_that_fills_blocks_was_found(roomy: Planted) -> None:
    """Fault: tokens of the last block, which is not full, are called a miss."""
    roomy.ask("first", ids(1100, 40), 1)
    roomy.ask("more", [*ids(1100, 40), 7, 8, 9])
    found = roomy.missed("more")
    assert (found["kind"], found["token"], found["place"]) == ("difference", 40, "answer")
    roomy.ask("again", ids(1100, 40))
    found = roomy.missed("again")
    assert found["kind"] == "nothing_missed" and found["num_cached_tokens"] == 32
    assert "the last 8 tokens fill no block of 16" in found["words"]


def test_a_token_of_a_prompt_without_parts(roomy: Planted) -> None:
    roomy.ask("first", ids(1200, 60))
    roomy.ask("other", [*ids(1200, 37), 5, *ids(1238, 22)])
    found = roomy.missed("other")
    assert (found["kind"], found["token"], found["place"]) == ("difference", 37, "prompt")
    assert found["compared"] == "first" and found["num_reusable_tokens"] == 32


def test_another_salt(roomy: Planted) -> None:
    roomy.ask("first", ids(1300, 60), cache_salt="red")
    roomy.ask("other", ids(1300, 60), cache_salt="blue")
    assert roomy.missed("other")["kind"] == "salt"


def test_all_prompt_tokens_are_asked_for(roomy: Planted) -> None:
    roomy.ask("first", ids(1400, 60))
    roomy.ask("whole", ids(1400, 60), prompt_logprobs=1)
    assert roomy.missed("whole")["kind"] == "whole"


def test_evicted(front: ModelFront) -> None:
    """Fault: blocks that were given to others are not told from ones that never were."""
    with planted(front, num_blocks=12) as here:
        here.ask("first", ids(0, 100))
        here.ask("between", ids(500, 150))
        here.ask("again", ids(0, 100))
        assert here.missed("again")["kind"] == "evicted"
        assert here.missed("again")["compared"] == "first"


def test_emptied_and_new_weights(front: ModelFront) -> None:
    with planted(front) as here:
        here.ask("first", ids(0, 100))
        here.http.post("/reset_prefix_cache").raise_for_status()
        here.ask("second", ids(0, 100))
        assert here.missed("second")["kind"] == "emptied"
        scheduler = here.server.client.engine.scheduler
        here.server.call(lambda: scheduler.vacate(has_new_weights=True))
        here.ask("third", ids(0, 100))
        assert here.missed("third")["kind"] == "weights"
        here.ask("fourth", ids(0, 100))
        assert here.missed("fourth")["kind"] == "nothing_missed"


def test_parts_of_chats(front: ModelFront) -> None:
    """Fault: the part that differs is another one."""
    other = {"role": "user", "content": "Which lake?"}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("sum_of_two_numbers", "weather_in_a_town")
    ]
    with planted(front) as here:
        here.chat(SYSTEM, ASKED)
        changed = {**SYSTEM, "content": SYSTEM["content"].replace("guess", "lie")}
        assert here.missed(here.chat(changed, ASKED))["place"] == "system"
        found = here.missed(here.chat(SYSTEM, {**ASKED, "content": "Which river is short?"}))
        assert (found["place"], found["message"], found["role"]) == ("message", 0, "user")
        here.chat(SYSTEM, ASKED, tools=tools)
        assert here.missed(here.chat(SYSTEM, ASKED, tools=tools[::-1]))["place"] == "tools"
        answer = {"role": "assistant", "content": "Not what the model said."}
        found = here.missed(here.chat(SYSTEM, ASKED, answer, other))
        assert (found["place"], found["message"]) == ("answer", 1)


def test_the_template_writes_a_date(front: ModelFront) -> None:
    """Fault: a difference that no request made is laid to a message."""
    renderer = front.renderer
    assert renderer.tokenizer is not None
    template = (
        "{{ '<|system|>Today is ' + strftime_now('%H:%M:%S.%f') + '.<|end|>' }}"
        "{% for m in messages %}{{ '<|user|>' + m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    client = InMemoryClient()
    settings = ServerSettings(disable_access_log=True, trust_request_chat_template=True)
    with (
        running_server(front, settings, client=client) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        here = Planted(server, http)
        here.chat(ASKED, chat_template=template)
        found = here.missed(here.chat(ASKED, chat_template=template))
        assert found["place"] == "template" and "such as a date" in found["words"]


def test_the_timeline_has_the_reason(roomy: Planted) -> None:
    roomy.ask("first", ids(1500, 60))
    roomy.ask("second", [*ids(1500, 40), 3, 4])
    shown = roomy.http.get("/admin/requests/second").json()
    assert shown["cache"]["kind"] == "difference" and shown["cache"]["token"] == 40


def test_prompts_are_compared_beside_other_work(
    roomy: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the event loop stands still while millions of tokens are compared."""
    roomy.ask("alike", ids(1700, 40))
    with held_up(monkeypatch, KnownPrompt, "match") as begun:
        found = roomy.threads.submit(roomy.missed, "alike")
        assert begun.wait(waiting.WAIT_S)
        assert waiting.get(f"{roomy.server.url}/livez").status_code == 200
    assert found.result()["num_prompt_tokens"] == 40


# --- reasons that only some engines have, by hand -------------------------------------------------


def known(memory: PromptMemory, name: str, tokens: Sequence[int], **more: Any) -> KnownPrompt:
    timeline = Timeline(name, "/v1/x")
    timeline.scheduled_s = timeline.now()
    given = {"tail": 0, "salt": "", "adapter": "", "media": (), "parts": None, **more}
    prompt = memory.add(timeline, np.array(tokens, np.int32), **given)
    timeline.first_token_s = timeline.now()
    return prompt


def facts_of(name: str, **cache: Any) -> RequestFacts:
    core = cache.pop("core", 0)
    given = {"is_on": True, "reads": True, "block_size": SIZE, "num_prompt": 64, "num_cached": 0}
    return RequestFacts(
        name, "", "finished", 1.0, {}, cache=CacheFacts(**{**given, **cache}), core=core
    )


def verdict_of(prompt: KnownPrompt, facts: Sequence[RequestFacts] = ()) -> CacheVerdict:
    return prompt.verdict(prompt.match(prompt.memory.before(prompt), SIZE), SIZE, facts)


@pytest.mark.parametrize(
    ("cache", "kind", "words"),
    [
        ({"core": 1}, MissKind.REPLICA, "another replica computed them"),
        ({"load": LoadOutcome.LATE}, MissKind.TIER, "beyond the device, and the load took too"),
        ({"load": LoadOutcome.LOST}, MissKind.TIER, "and the load failed"),
        ({"load": LoadOutcome.DECLINED}, MissKind.TIER, "and computing was faster than loading"),
        ({"needs_states": True}, MissKind.STATE, "no recurrent state was kept"),
        ({"is_evicted": True}, MissKind.EVICTED, "were evicted for other requests"),
        ({"is_on": False}, MissKind.OFF, "Prefixes are not cached"),
        ({}, MissKind.UNKNOWN, "nothing tells why"),
    ],
)
def test_reasons_of_the_engine(cache: dict[str, Any], kind: MissKind, words: str) -> None:
    memory = PromptMemory(8)
    known(memory, "a", ids(0, 64))
    prompt = known(memory, "b", ids(0, 64))
    facts = [facts_of("a"), facts_of("b", **cache)]
    verdict = verdict_of(prompt, facts)
    assert verdict.kind is kind and words in " ".join(cache_sentences(verdict))


def test_an_earlier_prompt_that_was_not_computed_yet() -> None:
    memory = PromptMemory(8)
    known(memory, "a", ids(0, 64)).timeline.first_token_s = 100.0
    prompt = known(memory, "b", ids(0, 64))
    verdict = verdict_of(prompt, [facts_of("a"), facts_of("b")])
    assert verdict.kind is MissKind.NOT_YET


def test_another_adapter_and_another_image() -> None:
    """Fault: tokens that are equal hide that an image differs, or the adapter."""
    memory = PromptMemory(8)
    image = [Media(bytes([n]) * 16, MediaSpan(20, 10, 0)) for n in range(2)]
    known(memory, "a", ids(0, 64), media=image[:1])
    other = verdict_of(known(memory, "b", ids(0, 64), media=image[1:]))
    assert (other.kind, other.token) == (MissKind.MEDIA, 20)
    third = known(memory, "c", ids(0, 64), media=image[:1], adapter="red")
    assert verdict_of(third).kind is MissKind.ADAPTER


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["", "red"])), min_size=1, max_size=8),
    st.integers(1, 40),
)
def test_the_newest_of_the_most_alike_is_compared(
    earlier: list[tuple[int, str]], length: int
) -> None:
    """Compares the choice with a plain loop. Each earlier prompt has its first tokens in common."""
    memory = PromptMemory(16)
    for number, (num_common, salt) in enumerate(earlier):
        known(memory, str(number), [*ids(0, num_common), *ids(900, 30)], salt=salt)
    last = known(memory, "last", ids(0, length))
    match = last.match(memory.before(last), SIZE)
    commons = [min(num_common, length) for num_common, _ in earlier]
    weights = [
        common - (SIZE - 1) * (salt == "red")
        for common, (_, salt) in zip(commons, earlier, strict=True)
    ]
    best = max(range(len(earlier)), key=lambda n: (weights[n], n))
    is_like = commons[best] >= SIZE or (length <= SIZE and commons[best] > 0)
    if is_like:
        assert match is not None and match.other.timeline.request_id == str(best)
    else:
        assert match is None


def test_what_the_template_writes_before_an_answer() -> None:
    memory = PromptMemory(8)
    first = ChatRequest(messages=[ASKED])
    later = ChatRequest(messages=[ASKED, {"role": "assistant", "content": "x"}, ASKED])
    known(memory, "a", [*ids(0, 40), 90, 91], tail=40, parts=ChatParts.of(first))
    prompt = known(memory, "b", [*ids(0, 40), 90, 7, *ids(200, 9)], parts=ChatParts.of(later))
    prompt.timeline.num_cached_tokens = 32
    place = verdict_of(prompt).place
    assert place is not None and place.name == "generation_prompt"


def test_memory_is_bounded_and_keys_are_apart() -> None:
    """Fault: prompts pile up, or a caller learns of prompts of another key."""
    memory = PromptMemory(2)
    prompts = [known(memory, str(n), ids(0, 64)) for n in range(5)]
    assert memory.find("2", "") is None and memory.find("3", "") is prompts[3]
    prompts[0].answered([1, 2, 3])  # forgotten long ago
    assert len(prompts[0].tokens) == 64
    timeline = Timeline("x", "/v1/x", "other key")
    given = {"tail": 0, "salt": "", "adapter": "", "media": (), "parts": None}
    apart = memory.add(timeline, np.arange(64, dtype=np.int32), **given)
    assert verdict_of(apart).kind is MissKind.NOTHING_BEFORE
    assert memory.find("4", "other key") is None


def test_hashes_tell_no_token() -> None:
    """Fault: the memory holds token ids, which are text."""
    prompt = known(PromptMemory(1), "a", ids(0, 64))
    assert not np.isin(prompt.tokens[1:], np.arange(64)).any()


# --- other doors ----------------------------------------------------------------------------------


def test_the_command(roomy: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    answer = roomy.ask("cli", ids(1600, 40))
    for name in ("cli", answer["id"]):
        assert main(["explain", name, "--url", roomy.server.url]) == 0
        said = capsys.readouterr().out
        assert said.startswith("It took ") and "40 prompt tokens" in said
    assert main(["explain", "cli", "--url", roomy.server.url, "--json"]) == 0
    assert '"sentences"' in capsys.readouterr().out
    assert main(["explain", "nobody", "--url", roomy.server.url]) == 2
    assert "There is no request 'nobody'" in capsys.readouterr().err


def message(here: Planted, previous: str | None, **body: Any) -> Any:
    given = {
        "model": "bundled", "max_tokens": 8, "system": SYSTEM["content"], "messages": [ASKED],
        "diagnostics": {"previous_message_id": previous}, **body,
    }  # fmt: skip
    response = here.http.post("/v1/messages", json=given)
    assert response.status_code == 200, response.text
    return response.json()


def test_diagnostics_of_messages(roomy: Planted) -> None:
    """Fault: a client that swaps two tools is told of another change, or one that appends is."""
    tools = [
        {"name": name, "input_schema": {"type": "object"}}
        for name in ("sum_of_two_numbers", "weather_in_a_town")
    ]
    first = message(roomy, None, tools=tools)
    assert first["diagnostics"] is None
    swapped = message(roomy, first["id"], tools=tools[::-1])
    reason = swapped["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == "tools_changed" and reason["cache_missed_input_tokens"] > 0
    turns = [ASKED, {"role": "assistant", "content": "The Volga."}, ASKED]
    for sent in (turns, turns[:2]):  # the last one begins the answer
        appended = message(roomy, first["id"], tools=tools, messages=sent)
        assert appended["diagnostics"] is None
    begun = [{**ASKED, "content": "Lakes?"}, turns[1]]
    changed = message(roomy, first["id"], tools=tools, messages=begun)
    assert changed["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"
    system = message(roomy, first["id"], tools=tools, system="You guess.")
    assert system["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    other = message(roomy, first["id"], tools=tools, messages=[{**ASKED, "content": "Lakes?"}])
    assert other["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"
    unknown = message(roomy, "msg_nobody")
    assert unknown["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    plain = roomy.http.post(
        "/v1/messages", json={"model": "bundled", "max_tokens": 4, "messages": [ASKED]}
    )
    assert plain.json()["diagnostics"] is None
    wrong = roomy.http.post(
        "/v1/messages",
        json={
            "model": "bundled", "max_tokens": 4, "messages": [ASKED],
            "diagnostics": {"previous_message_id": 3},
        },
    )  # fmt: skip
    assert wrong.status_code == 400 and "previous_message_id" in wrong.text


def response_to(here: Planted, compared: object, **body: Any) -> httpx.Response:
    given = {
        "model": "bundled", "max_output_tokens": 8, "instructions": SYSTEM["content"],
        "input": ASKED["content"], "prompt_cache_options": {"comparison_response_id": compared},
        **body,
    }  # fmt: skip
    return here.http.post("/v1/responses", json=given)


def test_diagnostics_of_responses(roomy: Planted) -> None:
    first = response_to(roomy, None).json()
    assert "prompt_cache_diagnostics" not in first
    again = response_to(roomy, first["id"]).json()["prompt_cache_diagnostics"]
    assert again == {"type": "cache_hit"}
    changed = response_to(roomy, first["id"], instructions="You guess.").json()
    found = changed["prompt_cache_diagnostics"]
    assert (found["type"], found["reason"]) == ("cache_miss", "input_changed")
    assert found["cache_missed_tokens"] > 0
    effort = response_to(roomy, first["id"], reasoning={"effort": "high"}).json()
    assert effort["prompt_cache_diagnostics"]["type"] == "cache_hit", "its template reads none"
    unknown = response_to(roomy, "resp_nobody").json()["prompt_cache_diagnostics"]
    assert unknown["type"] == "comparison_response_not_found"
    wrong = response_to(roomy, 3)
    assert wrong.status_code == 400 and "comparison_response_id" in wrong.text


def test_the_start_names_habits_of_the_template(
    front: ModelFront, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: nobody learns of them before the cache misses."""
    risks = tuple(template_risks(front, model_dialect(front)))
    assert [risk.name for risk in risks] == ["tool_order"]
    out = io.StringIO()
    status = EngineStatus(EngineState.READY, capacity=InMemoryClient().status.capacity)
    BootScreen(out, ServerSettings()).ready(status, "bundled", "bundled", risks)
    assert "  template  tool_order: it writes the tools before the messages" in out.getvalue()
    with caplog.at_level("INFO", "quire.server"):
        ServedModel(("bundled",), "bundled", 0, front, cache_risks=risks).log_risks()
    assert "defeats cached prefixes: it writes the tools before" in caplog.text
