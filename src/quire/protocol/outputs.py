"""Outputs that a user gets back. The names and shapes are those that vLLM users know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.protocol.adapters import LoRARequest
from quire.protocol.receipts import Receipt
from quire.protocol.request import Weights

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ChatAnswer",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FunctionCall",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ToolCall",
    "WeightHistory",
    "WeightVersionSpan",
    "common_weights",
]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position (natural log, before temperature and
    penalties). rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Log-probabilities of a position by token id: the most likely tokens asked for, and the one that
is there."""


@dataclass(slots=True)
class FunctionCall:
    """arguments: the text of a JSON object, cut where the answer was."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ToolCall:
    """A call as messages of the OpenAI API hold it."""

    id: str
    function: FunctionCall
    type: str = "function"


@dataclass(slots=True)
class ChatAnswer:
    """The parts of an answer. content: None if it is calls or thinking alone. reasoning: None
    without thinking. tool_calls: calls in the order in which they came."""

    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Tokens `start` … `end` - 1 of an output, which one version of the weights computed."""

    version: str
    start: int
    end: int


class WeightHistory:
    """The weights that computed an output, from its first token on."""

    __slots__ = ("_is_changed", "_starts")

    def __init__(self, weights: Weights) -> None:
        self._starts = [(0, weights)]
        self._is_changed = False

    def change(self, weights: Weights, num_tokens: int) -> None:
        """Take in what computes from now on, where the output has `num_tokens`."""
        if weights == self._starts[-1][1]:
            return
        self._is_changed = True
        if self._starts[-1][0] == num_tokens:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != weights:
            self._starts.append((num_tokens, weights))

    def begin(self) -> None:
        """Take in that the first step of the output comes now: nothing was computed before."""
        self._is_changed = False

    def came_whole(self) -> None:
        """Take in that the output came in one piece, as of a beam search: if weights changed while
        it was computed, nobody knows at which token."""
        if self._is_changed:
            self._starts = []

    @property
    def only(self) -> Weights | None:
        """The weights of all tokens; None if there were several."""
        return self._starts[0][1] if len(self._starts) == 1 else None

    def spans(self, num_tokens: int) -> list[WeightVersionSpan]:
        """Return the spans of an output of `num_tokens`, in order; none if nobody knows."""
        ends = [start for start, _ in self._starts[1:]] + [num_tokens] * bool(self._starts)
        return [
            WeightVersionSpan(weights.version, start, min(end, num_tokens))
            for (start, weights), end in zip(self._starts, ends, strict=True)
            if start < num_tokens
        ]


def common_weights(histories: Sequence[WeightHistory]) -> Weights | None:
    """Return the weights of all samples of a request; None if there were several."""
    first = histories[0].only
    return first if all(each.only == first for each in histories) else None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request, so far.

    finish_reason: "stop", "length", "content_filter", "repetition", "abort" or "error"; None while
    it runs.
    stop_reason: the stop string or stop token id that ended it, None if the model's end-of-sequence
    token did. answer: the parts of an answer of `LLM.chat` that has ended. error: why it failed, as
    `RequestOutput.error` says. weight_versions: versions of the weights that computed it, once it
    has ended; None before that, and if nobody knows. log_masses: `TokenLogprobs.log_mass` of each
    token, with `logprobs`, under processed modes.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    answer: ChatAnswer | None = None
    error: str | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    log_masses: list[float] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events. arrival_time: seconds of `time.time`; all others are seconds of
    `time.monotonic`, and 0.0 until the event. queued_ts: arrival. scheduled_ts: first step.
    last_token_ts: last token so far, of any sample."""

    arrival_time: float
    queued_ts: float
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token."""
        return max(self.first_token_ts - self.queued_ts, 0.0)

    @property
    def time_in_queue(self) -> float:
        """Seconds from arrival to the first step."""
        return max(self.scheduled_ts - self.queued_ts, 0.0)

    @property
    def first_scheduled_time(self) -> float | None:
        """`scheduled_ts` in seconds of `time.time`; None before it. So are the others."""
        return self._as_time(self.scheduled_ts)

    @property
    def first_token_time(self) -> float | None:
        return self._as_time(self.first_token_ts)

    @property
    def last_token_time(self) -> float | None:
        return self._as_time(self.last_token_ts)

    def _as_time(self, ts: float) -> float | None:
        return self.arrival_time + (ts - self.queued_ts) if ts else None


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs.

    prompt_logprobs: one entry per prompt token, the first of which is None, if asked.
    num_cached_tokens: prompt tokens whose K/V came from the prefix cache.
    error: reason of the failure; the other fields hold the output before it. A refused request has
    one output with this error and no text. metrics: times of its events; None if it was refused.
    lora_request: the adapter that computed it. receipt: statement on how it was made, if the
        request is `deterministic` and all of its samples have ended by themselves.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    receipt: Receipt | None = None


@dataclass(slots=True)
class PoolingOutput:
    """data: float32 tensor [hidden size]; None before the end, and of requests that failed."""

    data: Any = None


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and the vector that was made of it. Other fields as in `RequestOutput`."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """embedding: the vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """probs: probability of each class, or the model's own numbers if so asked."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """score: similarity or relevance of a pair of texts."""

    score: float


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """A text and its vector."""

    outputs: EmbeddingOutput  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput):
    """A text and its classes."""

    outputs: ClassificationOutput  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """A pair of texts and its score. prompt_token_ids: ids of the pair, or of the second text where
    the model gives each text a vector."""

    outputs: ScoringOutput  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(slots=True)
class BeamSearchSequence:
    """A sequence that a beam search found.

    tokens, text: the prompt and the output, as in vLLM; the stop token is a token, and special
        tokens have no text. cum_logprob: sum over the output tokens. score: `cum_logprob`
        normalised by the length penalty; sequences stand in the order of their scores. logprobs:
        one entry per output token, if asked.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences for one prompt, best first. error: why it failed; then there is one, which
    is empty."""

    sequences: list[BeamSearchSequence]
    error: str | None = None
