"""Work on text that takes too long: it is refused, and what it holds up is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest

from quire.engine.model_front import ModelFront
from quire.server.generation.prompts import PromptRenderer
from quire.server.generation.render_pool import LEFT_PER_THREAD, RenderPool
from quire.server.requests.bodies import ChatRequest
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from quire.text.rendering import RenderedPrompt, Renderer
from tests import waiting
from tests.server.running import running_server
from tests.waiting import WAIT_S, wait_for

CHAT = "/v1/chat/completions"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, WAIT_S))


def test_gives_results_and_errors() -> None:
    async def work() -> None:
        pool = RenderPool(2, WAIT_S)
        assert await asyncio.gather(*(pool.run(lambda i=i: i * i) for i in range(50))) == [
            i * i for i in range(50)
        ]
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        with pytest.raises(RuntimeError, match="StopIteration"):  # no future takes it
            await pool.run(lambda: next(iter(())))
        pool.close()

    run(work())


async def left_behind(pool: RenderPool, release: threading.Event) -> RefusedError:
    """The refusal of work that has begun and does not end in time. On a busy machine it may have
    to be given more than once until a thread begins it in time."""
    num_left, usual = pool.num_left, pool._timeout_s
    pool._timeout_s = 0.05
    while True:
        with pytest.raises(RefusedError) as refused:
            await pool.run(release.wait)
        if pool.num_left > num_left:
            pool._timeout_s = usual
            return refused.value


def test_work_that_never_ends_does_not_stop_the_rest() -> None:
    release = threading.Event()

    async def work() -> None:
        pool = RenderPool(1, WAIT_S)
        for _ in range(LEFT_PER_THREAD):
            refused = await left_behind(pool, release)
            assert refused.status == 400 and "render_timeout_s" in str(refused)
            assert await pool.run(lambda: "served") == "served"
        assert pool.num_left == LEFT_PER_THREAD
        release.set()
        while pool.num_left:
            await asyncio.sleep(0.01)
        pool.close()

    run(work())


def test_the_threads_that_are_left_are_bounded() -> None:
    """Then nothing is begun any more until one of them ends, and that is said."""
    release = threading.Event()
    before = threading.active_count()

    async def work() -> None:
        pool = RenderPool(1, WAIT_S)
        for _ in range(LEFT_PER_THREAD + 1):
            await left_behind(pool, release)
        pool._timeout_s = 0.05
        for _ in range(3):
            with pytest.raises(RefusedError) as refused:
                await pool.run(release.wait)
            assert refused.value.status == 503 and refused.value.retry_after_s
        assert threading.active_count() - before <= LEFT_PER_THREAD + 1
        release.set()
        while pool.num_left:
            await asyncio.sleep(0.01)
        pool._timeout_s = WAIT_S
        assert await pool.run(lambda: "served") == "served"
        pool.close()

    run(work())
    wait_for(lambda: threading.active_count() <= before, "end of the threads")


def test_who_leaves_takes_the_work_that_has_not_begun_along() -> None:
    has_begun, release, begun = threading.Event(), threading.Event(), []

    def first_work() -> None:
        has_begun.set()
        release.wait()

    async def work() -> None:
        pool = RenderPool(1, WAIT_S)
        first = asyncio.create_task(pool.run(first_work))
        while not has_begun.is_set():
            await asyncio.sleep(0.01)
        second = asyncio.create_task(pool.run(lambda: begun.append(2)))
        await asyncio.sleep(0)  # it is queued now
        first.cancel()
        second.cancel()
        release.set()
        assert await pool.run(lambda: "served") == "served"
        assert not begun
        pool.close()

    run(work())


def test_threads_that_wait_keep_nothing_alive() -> None:
    class Text:
        pass

    class TextError(Exception):
        pass

    def fail(text: Text) -> None:
        raise TextError

    async def work() -> None:
        pool = RenderPool(1, WAIT_S)
        gc.disable()
        try:
            given, failed = Text(), Text()
            kept = [weakref.ref(given), weakref.ref(failed)]
            await pool.run(partial(id, given))
            del given
            while kept[0]() is not None:
                await asyncio.sleep(0.01)
            with contextlib.suppress(TextError):
                await pool.run(partial(fail, failed))
            del failed
            while kept[1]() is not None:
                await asyncio.sleep(0.01)
                gc.collect()  # an exception and its frames refer to each other
        finally:
            gc.enable()
        pool.close()

    run(work())


ENDLESS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = ('a ' * 80000) | wordcount %}"
    "{% endfor %}{% endfor %}{{ messages }}"
)


def test_an_endless_template_holds_up_nobody(front: ModelFront) -> None:
    settings = ServerSettings(
        disable_access_log=True,
        trust_request_chat_template=True,
        limits=Limits(render_timeout_s=1.0),
    )
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with running_server(front, settings) as server:
        reply = waiting.post(f"{server.url}{CHAT}", json={**body, "chat_template": ENDLESS})
        assert reply.status_code == 400 and "render_timeout_s" in reply.text
        assert waiting.post(f"{server.url}{CHAT}", json=body).status_code == 200
        server.wait_until_idle()


class ThreadsOfChats(Renderer):
    """Notes the threads that render chats."""

    names: tuple[str, ...] = ()

    def render_chat(self, *_: Any, **_options: Any) -> RenderedPrompt:
        self.names += (threading.current_thread().name,)
        return RenderedPrompt([1])


SIGN = "<|end|>"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [{"role": "user", "content": SIGN}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": SIGN}}]},
        {"documents": [{"text": SIGN}]},
        {"chat_template_kwargs": {"x": [SIGN]}},
        {"reasoning_effort": SIGN},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": '"<\\u007cend|>"'}}],
                }
            ]
        },
    ],
    ids=str,
)
def test_control_tokens_in_content_do_not_stop_the_loop(
    fields: dict[str, Any], front: ModelFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the loop stands still while the tokenizer is copied."""
    tokenizer = front.renderer.tokenizer
    assert tokenizer is not None and SIGN in tokenizer.control_tokens.ids
    monkeypatch.delitem(vars(tokenizer.control_tokens), "_plain", raising=False)
    renderer = ThreadsOfChats(tokenizer)
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}

    async def work() -> None:
        prompts = PromptRenderer(Limits(), 1)
        await prompts.render_chat(renderer, ChatRequest(**body), 4096, tenant="")
        prompts.close()

    run(work())
    assert renderer.names == (("render",) if fields else ("MainThread",))


GROWING = (
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x, 'x' * 99999] %}"
    "{% endfor %}{{ messages }}"
)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{# " + "x" * 65_536 + " #}{{ messages[0].content }}", "max_chat_template_chars"),
        ("{{ messages[0].content * 200000 }}", "400000 characters of these messages"),
        (GROWING, "more than 268435456 bytes in total"),
    ],
    ids=["long", "long prompt", "large values"],
)
def test_what_a_template_may_be_and_make_is_bounded(
    template: str, words: str, front: ModelFront
) -> None:
    settings = ServerSettings(disable_access_log=True, trust_request_chat_template=True)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with running_server(front, settings) as server:
        reply = waiting.post(f"{server.url}{CHAT}", json={**body, "chat_template": template})
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]
        server.wait_until_idle()
