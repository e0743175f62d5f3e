"""Proves that a request can be served: the core asks before it queues it, and the client before it
sends it."""

from __future__ import annotations

from typing import Protocol

from quire.base.errors import RequestError
from quire.config.kv_layout import most_blocks
from quire.protocol.media import check_media
from quire.protocol.pooling_params import CLASSIFYING, POOLED_PARAMS
from quire.protocol.request import EngineRequest
from quire.protocol.status import EngineCapacity

__all__ = ["Feasibility", "HoldsTokens", "check_servable"]


def check_servable(request: EngineRequest, capacity: EngineCapacity) -> None:
    """Raise RequestError if a core of this capacity could never serve the request. The core checks
    the same, but only between steps, which may take seconds."""
    request.scheduling.check_policy(uses_priority=capacity.uses_priority)
    feasibility = Feasibility(
        _Groups(capacity),
        capacity.num_blocks,
        capacity.max_num_seqs,
        capacity.max_num_batched_tokens,
        capacity.max_model_len,
        draws_tokens=capacity.draws_tokens,
        num_classes=capacity.num_classes,
    )
    feasibility.max_total_tokens(request)


class HoldsTokens(Protocol):
    """Blocks that a sequence takes of a KV pool."""

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """See `KVLayout.most_blocks`."""
        ...


class _Groups:
    """The layer groups of a core elsewhere."""

    def __init__(self, capacity: EngineCapacity) -> None:
        self._capacity = capacity

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        groups = self._capacity.groups
        return sum(most_blocks(*group, num_tokens, max_step_tokens) for group in groups)


class Feasibility:
    """Worst cases against the pool, so that the oldest group can always finish.

    A request whose samples fit the pool together runs as one group and branches after its prompt;
    otherwise its samples run as groups of their own, over the cached prefix.
    """

    def __init__(
        self,
        layout: HoldsTokens,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        *,
        draws_tokens: bool = True,
        num_classes: int = 0,
    ) -> None:
        """draws_tokens, num_classes: see `ModelSpec`."""
        self._draws_tokens, self._num_classes = draws_tokens, num_classes
        self._layout = layout
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len

    def max_total_tokens(self, request: EngineRequest) -> int:
        """Prompt plus output tokens at most. RequestError if the engine can never hold them, in as
        many sequences as must run together."""
        num_together = self._num_together(request)
        num_prompt = len(request.prompt_token_ids)
        if request.pooling is not None:
            return self._max_total_of_pooled(request)
        if not self._draws_tokens:
            raise RequestError(
                "this model is an encoder, or has no head for logits, and draws no tokens: "
                "ask for vectors (embed, /v1/embeddings), scores or classes"
            )
        if num_prompt == 0:
            raise RequestError("the prompt is empty (0 tokens): give at least one token")
        if num_prompt >= self._max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, but the context holds {self._max_model_len} "
                f"with at least one output token: shorten the prompt to "
                f"{self._max_model_len - 1} tokens or raise max_model_len"
            )
        self._check_media(request)
        if request.media and request.params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is given, but tokens of a prompt that come as embeddings have no "
                "log-probabilities: leave it out"
            )
        if request.is_open:
            self._check_open(request)
            num_prompt = self._longest_prompt(request)
        wanted = request.params.max_tokens
        total = self._max_model_len
        if wanted is None or request.max_tokens_is_default:
            total = min(total, self._largest_fit(num_together) + 1)
        if wanted is not None:
            total = min(total, num_prompt + wanted)
        if total <= num_prompt or num_together * self._worst_case(total) > self._num_blocks:
            beams, width = "", ""
            if num_together > 1:
                beams, width = f" in each of its {num_together} beams", "lower the beam width, "
            raise RequestError(
                f"the request may need K/V for {max(total, num_prompt + 1) - 1} tokens "
                f"({num_prompt} of the prompt){beams}, but all {self._num_blocks} blocks together "
                f"hold {self._largest_fit(num_together)}{beams}: {width}lower max_tokens, shorten "
                "the prompt or give the cache more memory"
            )
        if total - num_prompt < request.params.min_tokens:
            raise RequestError(
                f"min_tokens is {request.params.min_tokens}, but after the {num_prompt} tokens of "
                f"the prompt there is room for {total - num_prompt}: lower min_tokens, shorten the "
                "prompt, or raise max_model_len"
            )
        _check_resumable(request, total)
        return total

    def _max_total_of_pooled(self, request: EngineRequest) -> int:
        """Count one token after the prompt, which is never computed."""
        _check_pooled(request)
        if request.pooling in CLASSIFYING and not self._num_classes:
            raise RequestError(
                "this model has no classes to sort texts into: use one with a head for them "
                "(…ForSequenceClassification), or ask for vectors"
            )
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise RequestError("the prompt is empty (0 tokens): give at least one token")
        if num_prompt > self._max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, but the context holds {self._max_model_len}: "
                "shorten the prompt or raise max_model_len"
            )
        self._check_media(request)
        if self._worst_case(num_prompt + 1) > self._num_blocks:
            raise RequestError(
                f"the prompt needs K/V for {num_prompt} tokens, but all {self._num_blocks} blocks "
                f"together hold {self._largest_fit(1)}: shorten the prompt or give the cache more "
                "memory"
            )
        return num_prompt + 1

    def _num_together(self, request: EngineRequest) -> int:
        """Sequences that have to hold their K/V at the same time. Beams do; samples need not."""
        if request.beams is None:
            return 1
        if request.beams.width > self._max_num_seqs:
            raise RequestError(
                f"the beam width is {request.beams.width}, but the engine computes "
                f"{self._max_num_seqs} sequences at a time: lower it or raise max_num_seqs"
            )
        return request.beams.width

    def _check_media(self, request: EngineRequest) -> None:
        """RequestError for media out of place, or larger than a step can ever compute at once."""
        check_media(request.media, len(request.prompt_token_ids))
        most = self._max_step_tokens - self._max_num_seqs + 1
        for span in (each.span for each in request.media):
            if span.is_whole and span.length > most:
                raise RequestError(
                    f"an image takes {span.length} tokens, which one step must compute, but beside "
                    f"{self._max_num_seqs - 1} other sequences (max_num_seqs) a step has room for "
                    f"{most}: raise max_num_batched_tokens"
                )

    def _check_open(self, request: EngineRequest) -> None:
        limit, known = request.max_prompt_tokens, len(request.prompt_token_ids)
        is_simple = request.params.n == 1 and request.beams is None and not request.media
        if not is_simple or len(request.output_token_ids):
            raise RequestError(
                "a request whose prompt arrives in pieces has one new sequence, n=1, and no "
                "embeddings"
            )
        if limit is not None and not known <= limit < self._max_model_len:
            raise RequestError(
                f"max_prompt_tokens is {limit}: give at least the {known} that are there and less "
                f"than the context of {self._max_model_len}"
            )

    def _longest_prompt(self, request: EngineRequest) -> int:
        """Tokens that an open prompt may have in the end."""
        if request.max_prompt_tokens is not None:
            return request.max_prompt_tokens
        room = min(self._max_model_len, self._largest_fit(1) + 1)
        params = request.params
        own = None if request.max_tokens_is_default else params.max_tokens
        return max(room - (own or max(params.min_tokens, 1)), len(request.prompt_token_ids))

    def max_total_of_prompt(self, request: EngineRequest, num_prompt: int) -> int:
        """Prompt plus output tokens at most if an open prompt ends with `num_prompt` tokens.
        RequestError if it is not open or has become too long."""
        if not request.is_open:
            raise RequestError("the prompt of this request has ended: it cannot be extended")
        longest = self._longest_prompt(request)
        if num_prompt > longest:
            raise RequestError(
                f"the prompt would have {num_prompt} tokens, but may have {longest}: end the "
                "request with what it has, or abort it"
            )
        max_total = self.max_total_tokens(request)
        wanted = request.params.max_tokens
        return max_total if wanted is None else min(max_total, num_prompt + wanted)

    def split(self, request: EngineRequest, max_total_tokens: int) -> list[tuple[int, ...]]:
        """Sample indices, by group."""
        n = request.params.n
        samples = range(request.first_sample, request.first_sample + n)
        if request.beams is not None:
            return [tuple(samples)]
        fits = n * self._worst_case(max_total_tokens) <= self._num_blocks
        if n <= self._max_num_seqs and fits:
            return [tuple(samples)]
        return [(sample,) for sample in samples]

    def _worst_case(self, total: int) -> int:
        """Blocks of one sequence; the last token's K/V are never needed."""
        return self._layout.most_blocks(total - 1, self._max_step_tokens)

    def _largest_fit(self, num_together: int) -> int:
        """Return the longest sequence whose K/V fit the pool `num_together` times, by bisection:
        `most_blocks` is monotonic."""
        share = self._num_blocks // num_together
        low, high = 0, self._max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self._layout.most_blocks(middle, self._max_step_tokens) <= share:
                low = middle
            else:
                high = middle - 1
        return low


def _check_pooled(request: EngineRequest) -> None:
    """A request for a vector asks for nothing that has to do with tokens. RequestError if it
    does."""
    asked = {
        "sampling parameters": request.params != POOLED_PARAMS,
        "a grammar": request.grammar is not None,
        "beams": request.beams is not None,
        "output tokens": len(request.output_token_ids) > 0,
        "an open prompt": request.is_open,
        "a pinned prefix": request.pin_seconds is not None,
    }
    if any(asked.values()):
        names = ", ".join(name for name, is_asked in asked.items() if is_asked)
        raise RequestError(
            f"the request pools its prompt ({request.pooling}) and draws no tokens, so {names} "
            "mean nothing: leave them out"
        )


def _check_resumable(request: EngineRequest, max_total: int) -> None:
    """A request that comes with output has something left to generate. RequestError if not."""
    output = request.output_token_ids
    if request.beams is not None and (len(output) or request.first_sample):
        raise RequestError("a beam search starts with its prompt: it cannot resume with output")
    if len(output) and request.params.n > 1:
        raise RequestError(f"a request that resumes has one sequence, not n = {request.params.n}")
    if len(request.prompt_token_ids) + len(output) >= max_total:
        raise RequestError(
            f"the request comes with {len(output)} output tokens and may have "
            f"{max_total - len(request.prompt_token_ids)}: nothing is left to generate"
        )
    reason = request.ending(output, has_room=True) if len(output) else None
    if reason is not None:
        raise RequestError(
            f"the request comes with output that has ended ({reason}) with token "
            f"{int(output[-1])}: nothing is left to generate"
        )
