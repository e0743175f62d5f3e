"""Input and output of the engine core."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.protocol.adapters import AdapterRef
from quire.protocol.beam_search import BeamRules
from quire.protocol.grammar import GrammarSpec
from quire.protocol.media import Media
from quire.protocol.pins import prefix_key
from quire.protocol.pooling_params import Pooling
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.scheduling_params import SchedulingParams
from quire.protocol.step import FloatArray, IntArray, PromptLogprobs, TokenLogprobs, no_ints

__all__ = [
    "CHECKPOINT_VERSION",
    "EMPTY_HANDLES",
    "EngineOutput",
    "EngineRequest",
    "FinishReason",
    "SequenceFinish",
    "Weights",
    "WholeSequence",
]


EMPTY_HANDLES: npt.NDArray[np.int64] = np.zeros(0, np.int64)


CHECKPOINT_VERSION = "default"
"""Label of the weights of the checkpoint, as in vLLM."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that an output was computed with. version: label. digest: hexadecimal digest of
    the tensors in place of the checkpoint's; empty if there are none."""

    version: str = CHECKPOINT_VERSION
    digest: str = ""


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the names are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"
    CONTENT_FILTER = "content_filter"
    REPETITION = "repetition"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the engine core sees it: integers only.

    first_handle: the client's number for sample 0; sample i is `first_handle + i`. Outputs carry
        handles. A client never reuses one.
    prompt_token_ids: int32, at least one token.
    output_token_ids: empty for a new request; else the request resumes as if preempted (n = 1).
    first_sample: index of the first of `params.n` samples; not 0 where a later sample resumes by
        itself. An index has the same random stream, whichever samples run beside it.
    seed: 64-bit; chosen by the front when the user gave none, so that a replay draws the same.
    salt: tenants with different salts never share cached blocks.
    beams: if set, the samples are the best sequences that a beam search finds, best first, and each
        comes whole with its finish.
    is_open: more of the prompt will come (`ExtendPrompt`); the tokens that are there are computed
        meanwhile, and nothing is generated before the end of the prompt is known.
    max_prompt_tokens: most prompt tokens of an open request; None: all that fit.
    pin_seconds: time for which the computed prompt stays in the cache (inf: for ever), for other
        requests that start with it, or None; n and max_tokens are 1 then.
    pin_is_shared: the pinned prefix serves requests of every salt; whoever asks for this declares
        that its text is no secret.
    grammar: language of the outputs. adapter: changes the model for this request.
    max_tokens_is_default: no client asked for `params.max_tokens`, so it is cut to what fits.
    media: parts of the prompt that are embeddings, in order. The token ids there stand for nothing
        and lie outside of the vocabulary.
    pooling: the request is for a vector made of its prompt's hidden states, and ends when that is
        computed; `params` are `POOLED_PARAMS` then.
    second_start: index of the first token of the second text, if the prompt is a pair of texts that
        models may tell apart; 0 if it is not.
    message_ends: int32, numbers of tokens, in order; a message of the prompt ends after each, and
        other prompts may go on differently there. They are hints: empty if nobody knows.
    prediction_token_ids: int32, ids of an output that the client expects. The parts that are right
        cost less time; the output is the same with and without it.
    """

    request_id: str
    first_handle: int
    prompt_token_ids: IntArray
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    output_token_ids: IntArray = field(default_factory=no_ints)
    arrival_time: float = 0.0
    salt: str = ""
    first_sample: int = 0
    beams: BeamRules | None = None
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    is_open: bool = False
    max_prompt_tokens: int | None = None
    pin_seconds: float | None = None
    pin_is_shared: bool = False
    max_tokens_is_default: bool = False
    media: tuple[Media, ...] = ()
    grammar: GrammarSpec | None = None
    adapter: AdapterRef | None = None
    pooling: Pooling | None = None
    second_start: int = 0
    message_ends: IntArray = field(default_factory=no_ints)
    prediction_token_ids: IntArray = field(default_factory=no_ints)

    @property
    def adapter_digest(self) -> str:
        """Digest of its adapter; empty if it has none."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def pin_key(self) -> str:
        """`prefix_key` of what it pins."""
        return prefix_key(
            self.prompt_token_ids,
            self.salt,
            is_shared=self.pin_is_shared,
            adapter=self.adapter_digest,
        )

    def is_stop(self, token: int, num_output: int) -> bool:
        """Return whether `token`, the last of `num_output`, ends a sequence of this request."""
        return token in self.stop_token_ids and num_output >= self.params.min_tokens

    @property
    def looks_back(self) -> bool:
        """True if `ending` reads more of an output than its last token and its length."""
        return self.params.repetition_detection is not None

    def ending(self, output_ids: IntArray, *, has_room: bool) -> FinishReason | None:
        """Return why an output ends with its last token, or None if it goes on: the rule of the
        scheduler, of beams and of requests that resume. has_room: it may have a further token."""
        if self.is_stop(int(output_ids[-1]), len(output_ids)):
            return FinishReason.STOP
        if not has_room:
            return FinishReason.LENGTH
        repeats = self.params.repetition_detection
        if repeats is not None and len(output_ids) >= self.params.min_tokens:
            return FinishReason.REPETITION if repeats.ends(output_ids) else None
        return None


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """An output that comes in one piece. token_ids: int32, after the prompt. cum_logprob: the sum
    of what the search went by. logprobs: one per token, if asked; else empty."""

    token_ids: IntArray
    cum_logprob: float
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFinish:
    """End of a sequence. `stop_token_id` is set if one ended it; `message` on errors, missed
    deadlines and ends by a hook; `whole` if its tokens were not given as they came.
    is_request_fault: the request caused the error."""

    handle: int
    reason: FinishReason
    stop_token_id: int | None = None
    message: str = ""
    whole: WholeSequence | None = None
    is_request_fault: bool = False


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Output of one step for the clients.

    handles (int64), token_ids (int32) [N]: sequence `handles[i]` grew by `token_ids[i]`.
        A sequence that grew by several tokens is there several times, in their order.
    logprobs: one per token, indexed by handle, for sequences that asked. prompt_logprobs: pieces,
        indexed by handle; one may come again after a preemption.
    num_cached_tokens: indexed by handle; comes once, when the first step is planned, for sample 0
        and every sample that does not branch off from another one.
    vectors: float32 [E], indexed by handle, of sequences that pool; they have ended with this step.
    finished: sequences that ended with this step (their last token is in `token_ids`, or they are
        whole).
    weights: weights that the step computed with; None for those of the checkpoint.
    """

    handles: npt.NDArray[np.int64]
    token_ids: IntArray
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict[int, PromptLogprobs])
    num_cached_tokens: dict[int, int] = field(default_factory=dict[int, int])
    finished: tuple[SequenceFinish, ...] = ()
    vectors: dict[int, FloatArray] = field(default_factory=dict[int, FloatArray])
    weights: Weights | None = None

    @property
    def tells_weights(self) -> bool:
        """True if it has something that was computed, so that `weights` are those in use."""
        is_whole = any(each.whole is not None for each in self.finished)
        return len(self.handles) > 0 or bool(self.num_cached_tokens) or is_whole

    @property
    def num_tokens(self) -> int:
        """New ones, those of whole sequences included."""
        whole = (f.whole for f in self.finished if f.whole is not None)
        return len(self.token_ids) + sum(len(sequence.token_ids) for sequence in whole)
