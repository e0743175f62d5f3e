"""The text of a stream is the text of the whole answer, however the tokens come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.clients.async_client import RequestUpdate, SampleUpdate
from quire.engine.model_front import ModelFront
from quire.protocol import FinishReason, SamplingParams, SequenceFinish
from quire.server.generation.follow import NeverFull
from quire.server.generation.service import Generation
from quire.server.generation.waiting import Party, WaitingRoom
from quire.server.openai.answer import AnswerHead, ChunkWriter, collect
from quire.server.openai.chat import CHAT_SHAPE
from quire.server.readings.metrics import ServerMetrics
from quire.server.readings.timeline import Timeline
from quire.server.readings.trace_recorder import TraceRecorder
from quire.server.requests.limits import Limits
from quire.text.rendering import RenderedPrompt
from tests.profiles import examples
from tests.server.running import remembered

SENTENCES = [
    "Plain words, and more of them.",
    "Grüße aus Köln — «naïve café»",
    "日本語のテキスト、そして中文。",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, e\u0301 combining",
    "line\u2028separator\u2029and \x85 next\r\n\ttab",
    'quotes " and \\ backslashes </script>',
]


class CutStream:
    """Gives the tokens of each sample in the pieces that a test names."""

    def __init__(self, samples: list[list[int]], cuts: list[int]) -> None:
        self._left = [list(tokens) for tokens in samples]
        self._cuts = list(cuts)
        self.aborted: set[int] = set()

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """All of it is there from the start."""

    @property
    def is_over(self) -> bool:
        return not any(
            tokens and index not in self.aborted for index, tokens in enumerate(self._left)
        )

    def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        return self

    async def __anext__(self) -> RequestUpdate:
        raise NotImplementedError

    def take_update(self) -> RequestUpdate | None:
        news: list[SampleUpdate] = []
        for index, tokens in enumerate(self._left):
            if not tokens or index in self.aborted:
                continue
            size = self._cuts.pop() if self._cuts else 1
            piece, self._left[index] = tokens[:size], tokens[size:]
            ended = not self._left[index]
            finish = SequenceFinish(index, FinishReason.LENGTH) if ended else None
            news.append(SampleUpdate(index, piece, finish=finish))
        if not news:
            return None
        return RequestUpdate(news, num_cached_tokens=0)

    def abort(self, sample_index: int | None = None) -> None:
        self.aborted |= {sample_index} if sample_index is not None else set(range(99))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


def generation(front: ModelFront, stream: CutStream, params: SamplingParams) -> Generation:
    limits, timeline = Limits(), Timeline("id", "/test")
    return Generation(
        stream,
        RenderedPrompt([1, 2, 3]),
        params,
        front,
        limits=limits,
        place=WaitingRoom(limits).enter(Party()),
        timeline=timeline,
        metrics=ServerMetrics(),
        recorder=TraceRecorder(""),
        known=remembered(timeline, [1, 2, 3]),
    )


async def whole(front: ModelFront, stream: CutStream, params: SamplingParams) -> list[Any]:
    found = generation(front, stream, params)
    samples = await collect(found)
    found.close()
    return [(sample.text, sample.finish_reason, sample.stop_reason) for sample in samples]


async def streamed(front: ModelFront, stream: CutStream, params: SamplingParams) -> list[Any]:
    """Return the answer that a client reads, from the lines of the wire."""
    found = generation(front, stream, params)
    head = AnswerHead("chatcmpl-1", "chat.completion.chunk", 1, "m")
    writer = ChunkWriter(head, CHAT_SHAPE, found)
    chunks: list[bytes] = []
    await found.run(lambda deltas: chunks.extend(map(writer.event, deltas)), NeverFull())
    wire = b"".join(chunks)
    found.close()
    texts: list[Any] = [["", None, None] for _ in range(params.n)]
    for event in wire.split(b"\n\n")[:-1]:
        assert event.startswith(b"data: ") and b"\n" not in event
        (choice,) = json.loads(event[6:])["choices"]
        sample = texts[choice["index"]]
        assert sample[1] is None, "a chunk after the end of the sample"
        sample[0] += choice["delta"]["content"]
        sample[1], sample[2] = choice["finish_reason"], choice.get("stop_reason")
    return [tuple(sample) for sample in texts]


@examples(60)
@given(
    sentences=st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=3),
    noise=st.lists(st.integers(3, 4095), max_size=8),
    cuts=st.lists(st.integers(1, 5), max_size=60),
    stop=st.lists(st.sampled_from(["e", "and", "、", "👧", "zz", "\u2028s"]), max_size=2),
)
def test_stream_equals_whole(
    front: ModelFront, sentences: list[str], noise: list[int], cuts: list[int], stop: list[str]
) -> None:
    tokenizer = front.renderer.tokenizer
    assert tokenizer is not None
    samples = [tokenizer.encode(text, add_special_tokens=False) + noise for text in sentences]
    params = SamplingParams(n=len(samples), max_tokens=None, stop=stop)

    async def both() -> tuple[list[Any], list[Any]]:
        return (
            await whole(front, CutStream(samples, []), params),
            await streamed(front, CutStream(samples, cuts), params),
        )

    one, other = asyncio.run(both())
    assert one == other
    for (text, _, reason), tokens in zip(one, samples, strict=True):
        plain = tokenizer.decode(tokens)
        assert plain.startswith(text)
        assert reason in stop if reason is not None else text == plain
