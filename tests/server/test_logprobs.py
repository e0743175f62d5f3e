"""Log-probabilities: tokens, their names, their bytes and their places agree with the text."""

from __future__ import annotations

import asyncio
import functools
import json
from codecs import escape_decode
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.settings import EngineSettings
from quire.engine.clients.async_client import RequestUpdate
from quire.engine.model_front import ModelFront
from quire.engine.provenance import Provenance
from quire.protocol import PromptLogprobs, SamplingParams
from quire.protocol.status import EngineCapacity
from quire.protocol.step import TokenLogprobs, TopTokens
from quire.server.generation.backend import Ready, ServedModel
from quire.server.generation.prompts import PromptRenderer
from quire.server.generation.service import Generation
from quire.server.generation.waiting import Party, WaitingRoom
from quire.server.openai.answer import ITEMS_PER_TURN
from quire.server.openai.chat import ChatAnswer
from quire.server.openai.completions import CompletionAnswer
from quire.server.openai.job import Job
from quire.server.openai.logprobs import LogprobsBudget, LogprobsWriter
from quire.server.openai.sampling import completion_params
from quire.server.openai.tokens import TokensAnswer
from quire.server.readings.metrics import ServerMetrics
from quire.server.readings.timeline import Timeline
from quire.server.readings.trace_recorder import TraceRecorder
from quire.server.requests.bodies import ChatRequest, CompletionRequest
from quire.server.requests.limits import Limits
from quire.text.rendering import ChatTemplate, Renderer, Tokenizer
from tests.profiles import machine_settings
from tests.rendering.conftest import (
    BUILDERS,
    TEXTS,
    folders,  # noqa: F401
    tokenizers_by_name,  # noqa: F401
)
from tests.server.running import remembered
from tests.server.test_text import CutStream

CHAT_TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
PROMPTS = PromptRenderer(Limits(), 1)
METRICS = ServerMetrics()
NUM_TOP = 5


class ScriptedStream(CutStream):
    """Its tokens, and those of the prompt, have the log-probabilities of `scored`."""

    def __init__(self, prompt: list[int], output: list[int], cuts: list[int], size: int) -> None:
        super().__init__([output], cuts)
        self._prompt: list[int] | None = prompt
        self._size = size

    def take_update(self) -> RequestUpdate | None:
        found = super().take_update()
        if found is None:
            return None
        for news in found.samples:
            news.logprobs = [scored(token, self._size) for token in news.token_ids]
        if self._prompt is not None:
            entries = tuple(scored(token, self._size) for token in self._prompt[1:])
            found.prompt_logprobs = [PromptLogprobs(1, entries)]
            self._prompt = None
        return found


def scored(token: int, size: int) -> TokenLogprobs:
    """The token is the third of the most likely ones, or none of them; all values differ."""
    ids = [(token + 5 * step) % size for step in range(-2, NUM_TOP - 2)]
    if token % 3 == 0:
        ids = [(token + 7 * step) % size for step in range(1, NUM_TOP + 1)]
    values = [-0.5 - 0.25 * rank for rank in range(NUM_TOP)]
    own = values[ids.index(token)] if token in ids else -7.5
    top = TopTokens(np.array(ids, np.int32), np.array(values, np.float32))
    return TokenLogprobs(token, own, 1, top)


@dataclass(frozen=True, slots=True)
class ScriptedJob(Job):
    """A job whose engine answers each prompt with `output`, in pieces as `cuts` say."""

    output: Sequence[int] = ()
    cuts: Sequence[int] = ()

    @asynccontextmanager
    async def open(
        self, render: Any, params: SamplingParams, body: Any, form: None = None
    ) -> AsyncIterator[Any]:
        assert form is None
        prompt = await render()
        stream = ScriptedStream(
            prompt.token_ids, list(self.output), list(self.cuts), self.renderer.vocab_size
        )
        limits = Limits()
        timeline = Timeline("id", "/test")
        generation = Generation(
            stream,
            prompt,
            params,
            self.ready.model.front,
            limits=limits,
            place=WaitingRoom(limits).enter(Party()),
            timeline=timeline,
            metrics=METRICS,
            recorder=TraceRecorder(""),
            known=remembered(timeline, prompt.token_ids),
        )
        yield generation
        generation.close()


@functools.cache
def ready(tokenizer: Tokenizer | None) -> Ready:
    """Its model has some more embeddings than tokens."""
    size = 500 if tokenizer is None else tokenizer.vocab_size + 3
    renderer = Renderer(tokenizer, CHAT_TEMPLATE, size)
    provenance = Provenance(EngineSettings(), Path(), renderer)
    model = ServedModel(("m",), "m", 1, ModelFront(renderer, frozenset(), {}, provenance), 0)
    capacity = EngineCapacity(4096, 8, 256, 16, 512, 8192, ((None, 8),), uses_priority=False)
    return Ready(cast("Any", None), model, capacity)


def job(tokenizer: Tokenizer | None, output: Sequence[int], cuts: Sequence[int]) -> ScriptedJob:
    return ScriptedJob(
        ready(tokenizer),
        PROMPTS,
        cast("Any", None),
        LogprobsBudget(10**9),
        8,
        Timeline("id", "/test"),
        output=output,
        cuts=cuts,
    )


class Sink:
    is_full = False

    def __init__(self) -> None:
        self.data = b""

    async def start(self) -> None:
        return

    def write(self, data: bytes) -> None:
        self.data += data

    async def flush(self) -> None:
        return


def complete(
    tokenizer: Tokenizer | None,
    prompt: str | list[int],
    output: Sequence[int],
    cuts: Sequence[int] = (),
    **fields: Any,
) -> dict[str, Any]:
    """The choice of a completion; the stream of it must say the same."""
    body = CompletionRequest(prompt=prompt, logprobs=NUM_TOP, **fields)  # type: ignore[arg-type]
    params = completion_params(body, {}, Limits())

    async def both() -> tuple[bytes, bytes]:
        sink = Sink()
        answers = [
            CompletionAnswer(job(tokenizer, output, pieces), body, params, [prompt])
            for pieces in ([10**6], cuts)
        ]
        whole = await answers[0].whole()
        end = await answers[1].stream(sink)  # type: ignore[arg-type]
        return whole, sink.data + end

    whole, wire = asyncio.run(both())
    (choice,) = json.loads(whole)["choices"]
    streamed: dict[str, Any] = {"text": "", "logprobs": None}
    for event in wire.split(b"\n\n")[:-2]:
        (chunk,) = json.loads(event[6:])["choices"]
        streamed["text"] += chunk["text"]
        if streamed["logprobs"] is None:
            streamed["logprobs"] = chunk["logprobs"]
        else:
            for name, values in chunk["logprobs"].items():
                streamed["logprobs"][name] += values
    # A stop string that was being held back cuts off what was already told of.
    offsets = [min(offset, len(choice["text"])) for offset in streamed["logprobs"]["text_offset"]]
    streamed["logprobs"]["text_offset"] = offsets
    assert streamed == {"text": choice["text"], "logprobs": choice["logprobs"]}
    return choice


def bytes_of(name: str) -> bytes:
    if name.startswith("bytes:"):
        return escape_decode(name[6:].encode())[0]  # type: ignore[no-any-return]
    return name.encode()


def check_lists(choice: dict[str, Any], token_ids: Sequence[int], size: int) -> None:
    """Check the laws of all tokenizers and all tokens."""
    logprobs = choice["logprobs"]
    for values in logprobs.values():
        assert len(values) == len(token_ids)
    offsets = [0, *logprobs["text_offset"], len(choice["text"])]
    assert all(a <= b for a, b in pairwise(offsets)), offsets
    columns = (logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs"))
    for token, name, logprob, top in zip(token_ids, *columns, strict=True):
        if top is None:
            continue
        expected = scored(token, size)
        assert logprob == expected.logprob == top[name]
        values = set(expected.top_logprobs.tolist()) | {expected.logprob}
        assert sorted(top.values()) == sorted(values)


def check_text(text: str, names: Sequence[str], offsets: Sequence[int], start: int) -> None:
    """Check that the visible tokens make the text, each at its place. start: start of the text in
    the choice."""
    data = list(map(bytes_of, names))
    try:
        assert b"".join(data).decode() == text
    except UnicodeDecodeError:
        # The number of U+FFFD for it is the decoder's business.
        for name, offset in zip(names, offsets, strict=True):
            assert name.startswith("bytes:") or text.startswith(name, offset - start)
        return
    before = b""
    for piece, offset in zip(data, offsets, strict=True):
        assert offset == start + len(before.decode("utf-8", "ignore"))
        before += piece


IDS = st.lists(st.integers(0, 1 << 30), max_size=12)
ANY_TEXT = st.sampled_from(TEXTS) | st.text(max_size=20)


@pytest.mark.parametrize("name", BUILDERS)
@machine_settings(40)
@given(
    prompt=ANY_TEXT | IDS,
    output=ANY_TEXT | IDS,
    cuts=st.lists(st.integers(1, 4), max_size=20),
    echo=st.booleans(),
    skip=st.booleans(),
)
def test_tokens_make_the_text(
    name: str,
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
    prompt: str | list[int],
    output: str | list[int],
    cuts: list[int],
    echo: bool,
    skip: bool,
) -> None:
    """Faults: parts of characters share one key; offsets that count what the text does not have,
    or not what it has."""
    tokenizer = tokenizers_by_name[name]
    size = tokenizer.vocab_size + 3
    if not prompt or (isinstance(prompt, str) and not tokenizer.encode(prompt)):
        return
    if isinstance(output, str):
        output = tokenizer.encode(output, add_special_tokens=False)
    output = [token % size for token in output] or [1]
    if not isinstance(prompt, str):
        prompt = [token % size for token in prompt]
    choice = complete(tokenizer, prompt, output, cuts, echo=echo, skip_special_tokens=skip)
    prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    token_ids = [*prompt_ids, *output] if echo else output
    check_lists(choice, token_ids, size)
    if tokenizer.decoder_plan.kind == "opaque" or tokenizer.cleans_up_spaces:
        return
    # A prompt that was a text is repeated as it was, whatever its tokens read like.
    echoed = tokenizer.decode(prompt_ids, skip)
    if isinstance(prompt, str):
        if echo and tokenizer.decode(prompt_ids) != prompt:
            return
        echoed = prompt
    num_prompt = len(prompt_ids) if echo else 0
    start = len(echoed) if echo else 0
    names, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    for part, text, first in (
        (range(num_prompt), choice["text"][:start], 0),
        (range(num_prompt, len(token_ids)), choice["text"][start:], start),
    ):
        hides = skip or (not first and echo and isinstance(prompt, str))
        shown = [i for i in part if not (hides and tokenizer.is_special(token_ids[i]))]
        check_text(text, [names[i] for i in shown], [offsets[i] for i in shown], first)
    assert not echo or choice["text"].startswith(echoed)


async def turns_of(writing: Coroutine[Any, Any, bytes]) -> int:
    """Return how many turns others have while an answer is written."""
    task = asyncio.create_task(writing)
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert task.result()
    return num_turns


@pytest.mark.parametrize("kind", ["chat", "completion", "tokens", "prompt"])
def test_a_long_answer_gives_others_their_turn(
    kind: str,
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
) -> None:
    """Fault: the log-probabilities of a long answer hold up all other requests for seconds."""
    tokenizer = tokenizers_by_name[next(iter(BUILDERS))]
    long, short = [i % tokenizer.vocab_size for i in range(800)], [1]
    prompt, output = (long, short) if kind == "prompt" else (short, long)
    params = SamplingParams(
        logprobs=NUM_TOP, prompt_logprobs=NUM_TOP if kind == "prompt" else None, max_tokens=None
    )
    body = CompletionRequest(prompt=prompt, logprobs=NUM_TOP)  # type: ignore[arg-type]
    served = job(tokenizer, output, [10**6])
    answer: ChatAnswer | CompletionAnswer | TokensAnswer
    if kind == "chat":
        chat = ChatRequest(messages=[{"role": "user", "content": tokenizer.decode([70, 71])}])
        answer = ChatAnswer(served, chat, params)
    elif kind == "tokens":
        answer = TokensAnswer(served, body, params, prompt)
    else:
        body.prompt_logprobs = params.prompt_logprobs
        answer = CompletionAnswer(served, body, params, [prompt])
    assert asyncio.run(turns_of(answer.whole())) >= 800 // ITEMS_PER_TURN


@pytest.mark.parametrize("name", BUILDERS)
@machine_settings(15)
@given(text=ANY_TEXT, output=ANY_TEXT | IDS, cuts=st.lists(st.integers(1, 4), max_size=20))
def test_bytes_of_chats_make_the_text(
    name: str,
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
    text: str,
    output: str | list[int],
    cuts: list[int],
) -> None:
    """Fault: the bytes of the tokens are not those of the content."""
    tokenizer = tokenizers_by_name[name]
    size = tokenizer.vocab_size + 3
    if not tokenizer.encode(text, add_special_tokens=False):
        return
    if isinstance(output, str):
        output = tokenizer.encode(output, add_special_tokens=False)
    output = [token % size for token in output] or [1]
    body = ChatRequest(messages=[{"role": "user", "content": text}])
    params = SamplingParams(logprobs=NUM_TOP, max_tokens=None)

    async def both() -> tuple[bytes, bytes]:
        sink = Sink()
        whole = await ChatAnswer(job(tokenizer, output, [10**6]), body, params).whole()
        end = await ChatAnswer(job(tokenizer, output, cuts), body, params).stream(sink)  # type: ignore[arg-type]
        return whole, sink.data + end

    whole, wire = asyncio.run(both())
    (choice,) = json.loads(whole)["choices"]
    chunks = [json.loads(event[6:])["choices"][0] for event in wire.split(b"\n\n")[:-2]]
    items = choice["logprobs"]["content"]
    assert items == [
        item for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"]["content"]
    ]
    assert [item["logprob"] for item in items] == [scored(t, size).logprob for t in output]
    for item in items:
        assert len(item["top_logprobs"]) == NUM_TOP
        for entry in (item, *item["top_logprobs"]):
            assert bytes_of(entry["token"]) == bytes(entry["bytes"])
    if tokenizer.decoder_plan.kind == "opaque" or tokenizer.cleans_up_spaces:
        return
    shown = [i for i, t in zip(items, output, strict=True) if not tokenizer.is_special(t)]
    joined = b"".join(bytes(item["bytes"]) for item in shown)
    try:
        assert joined.decode() == choice["message"]["content"]
    except UnicodeDecodeError:
        assert "\ufffd" in choice["message"]["content"]


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = tokenizer.token_ids(tokens)
    assert None not in found
    return cast("list[int]", found)


def test_parts_of_characters_have_keys_of_their_own(
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
) -> None:
    """Fault: all of them are U+FFFD, and the token has the value of another."""
    tokenizer = tokenizers_by_name["gpt2"]
    parts = [token for token in range(4, 260) if len(tokenizer.token_bytes(token)) == 1]
    parts = [token for token in parts if tokenizer.token_bytes(token) >= b"\x80"]
    size = tokenizer.vocab_size + 3
    for token in parts:
        choice = complete(tokenizer, "a", [token])
        check_lists(choice, [token], size)
        (name,) = choice["logprobs"]["tokens"]
        assert name == f"bytes:\\x{tokenizer.token_bytes(token)[0]:02x}"
    ids = tokenizer.encode("😀 x")
    found = complete(tokenizer, "a", ids)["logprobs"]
    assert found["tokens"] == [r"bytes:\xf0\x9f", r"bytes:\x98", r"bytes:\x80", " ", "x"]
    assert found["text_offset"] == [0, 0, 0, 1, 2]


def test_bytes_that_make_no_character(
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
) -> None:
    """Fault: the next text begins with the character that never got complete."""
    for name, tokens, text, offsets in (
        ("gpt2", ["ð", "a", "ð", "Ł", "b"], "\ufffda\ufffdb", [0, 1, 2, 2, 3]),
        ("llama2", ["<0xE2>", "<0x82>", "a", "<0xFF>"], "\ufffd\ufffda\ufffd", [0, 0, 2, 3]),
        ("llama2", ["<0xEF>", "<0xBF>", "<0xBD>", "a"], "\ufffda", [0, 0, 0, 1]),
    ):
        tokenizer = tokenizers_by_name[name]
        choice = complete(tokenizer, [5], ids_of(tokenizer, *tokens))
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


def test_tokens_that_read_alike_are_told_apart(
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
) -> None:
    """Fault: a byte token and the letter, or ids without a token, share one key."""
    tokenizer = tokenizers_by_name["llama2"]
    letter, byte = ids_of(tokenizer, "a", "<0x61>")
    none, beyond = tokenizer.vocab_size, tokenizer.vocab_size + 1
    entry = TokenLogprobs(
        byte,
        -2.0,
        2,
        TopTokens(
            np.array([letter, byte, none, beyond], np.int32),
            np.array([-1.0, -2.0, -3.0, -4.0], np.float32),
        ),
    )
    writer = LogprobsWriter(tokenizer, 4, LogprobsBudget(10**6))
    assert writer.completion([byte], [entry], [0]).top_logprobs[0] == {
        f"token_id:{letter}": -1.0,
        "a": -2.0,
        "": -3.0,
        f"token_id:{beyond}": -4.0,
    }


def test_without_a_tokenizer_tokens_are_ids() -> None:
    """Fault: all tokens have the empty text as their name."""
    choice = complete(None, [7, 8], [9, 10], echo=True)
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in (7, 8, 9, 10)]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0]
    check_lists(choice, [7, 8, 9, 10], 500)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_of_an_echo(
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
    skip: bool,
) -> None:
    """Fault: BOS, which no one wrote, moves all offsets; or one that was written does not."""
    tokenizer = tokenizers_by_name["llama3"]
    (end,) = ids_of(tokenizer, "<|end|>")
    text = "é<|im_start|> 好"
    output = [*tokenizer.encode("a😀", add_special_tokens=False), end]
    choice = complete(tokenizer, text, output, echo=True, skip_special_tokens=skip)
    assert choice["text"] == text + "a😀" + ("" if skip else "<|end|>")
    names, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert names[:4] == ["<|begin|>", "é", "<|im_start|>", " "]
    assert offsets[:5] == [0, 0, 1, 13, 14]
    assert names[-1] == "<|end|>" and offsets[-1] == len(text) + 2
    # The same prompt reads like an output when given as ids.
    ids = tokenizer.encode(text)
    choice = complete(tokenizer, ids, output, echo=True, skip_special_tokens=skip)
    shown = tokenizer.decode([*ids, *output], skip)
    assert choice["text"] == shown
    if not skip:
        assert "".join(map(str, choice["logprobs"]["tokens"][:4])) == "<|begin|>é<|im_start|> "


def test_offsets_in_a_text_that_the_tokenizer_changes(
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
) -> None:
    """Fault: offsets that count the tokens' own text, which is not that of the prompt."""
    for name, text, words in (
        ("bert", "The   QUICK\nfox", {" quick": 3, " fox": 11}),
        ("t5", "½ ﬁ é 😀x", {"x": 7}),
        ("qwen", "e\u0301e\u0301 x", {" ": 4, "x": 5}),
        ("llama3", "a  \n b", {" b": 4}),
    ):
        found = complete(tokenizers_by_name[name], text, [1], echo=True)["logprobs"]
        places = dict(zip(found["tokens"], found["text_offset"], strict=True))
        assert {word: places[word] for word in words} == words, name


def test_what_a_stop_string_cuts_off_has_no_place(
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
) -> None:
    """Fault: an offset beyond the end of the text."""
    tokenizer = tokenizers_by_name["qwen"]
    output = tokenizer.encode("abc stop it")
    choice = complete(tokenizer, "x", output, stop=["c st"])
    assert choice["text"] == "ab" and choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
    assert max(choice["logprobs"]["text_offset"]) == 2


def test_an_echo_has_as_many_as_were_asked(
    tokenizers_by_name: dict[str, Tokenizer],  # noqa: F811
) -> None:
    """Fault: a smaller `prompt_logprobs` of the same request bounds those of the echo."""
    body = CompletionRequest(prompt="x", echo=True, logprobs=5, prompt_logprobs=1)
    assert completion_params(body, {}, Limits()).prompt_logprobs == 5
    body = CompletionRequest(prompt="x", echo=True, logprobs=1, prompt_logprobs=5)
    assert completion_params(body, {}, Limits()).prompt_logprobs == 5


def test_over_the_wire(http: httpx.Client) -> None:
    """The whole way gives as many entries as asked, and the token's own among them."""
    body = {"prompt": "日本 😀", "max_tokens": 8, "logprobs": 20, "echo": True, "ignore_eos": True}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    found = choice["logprobs"]
    columns = (found[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for name, logprob, top in list(zip(*columns, strict=True))[1:]:
        assert top[name] == logprob and len(top) in (20, 21)
    assert any(name.startswith("bytes:") for top in found["top_logprobs"][1:] for name in top)
