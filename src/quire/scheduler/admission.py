"""Proves that a request can be served before it is queued."""

from __future__ import annotations

from quire.config.kv_layout import KVLayout
from quire.errors import RequestError
from quire.protocol.request import EngineRequest

__all__ = ["Admission"]


class Admission:
    """Worst cases against the pool, so that the oldest group can always finish.

    A request whose samples fit the pool together runs as one group and branches after its prompt;
    otherwise its samples run as groups of their own, over the cached prefix.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len

    def max_total_tokens(self, request: EngineRequest) -> int:
        """Prompt plus output tokens at most. RequestError if the engine can never hold them."""
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise RequestError("the prompt is empty (0 tokens): give at least one token")
        if num_prompt >= self._max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, but the context holds {self._max_model_len} "
                f"with at least one output token: shorten the prompt to "
                f"{self._max_model_len - 1} tokens or raise max_model_len"
            )
        wanted = request.params.max_tokens
        if request.is_open:
            self._check_open(request)
            num_prompt = self._longest_prompt(request)
        total = self._max_model_len
        if wanted is None:
            total = min(total, self._largest_fit() + 1)
        elif num_prompt + wanted < total:
            total = num_prompt + wanted
        if total <= num_prompt or self._worst_case(total) > self._num_blocks:
            raise RequestError(
                f"the request may need K/V for {max(total, num_prompt + 1) - 1} tokens "
                f"({num_prompt} of the prompt), but all {self._num_blocks} blocks together hold "
                f"{self._largest_fit()}: lower max_tokens, shorten the prompt or give the cache "
                "more memory"
            )
        return total

    def _check_open(self, request: EngineRequest) -> None:
        limit, known = request.max_prompt_tokens, len(request.prompt_token_ids)
        if request.params.n > 1 or len(request.output_token_ids):
            raise RequestError("a request whose prompt arrives in pieces has one new sequence, n=1")
        if limit is not None and not known <= limit < self._max_model_len:
            raise RequestError(
                f"max_prompt_tokens is {limit}: give at least the {known} that are there and less "
                f"than the context of {self._max_model_len}"
            )

    def _longest_prompt(self, request: EngineRequest) -> int:
        """Tokens that an open prompt may have in the end."""
        if request.max_prompt_tokens is not None:
            return request.max_prompt_tokens
        room = min(self._max_model_len, self._largest_fit() + 1)
        return max(room - (request.params.max_tokens or 1), len(request.prompt_token_ids))

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
        fits = n * self._worst_case(max_total_tokens) <= self._num_blocks
        if n <= self._max_num_seqs and fits:
            return [tuple(samples)]
        return [(sample,) for sample in samples]

    def _worst_case(self, total: int) -> int:
        """Blocks of one sequence; the last token's K/V are never needed."""
        return self._layout.blocks_for(total - 1, self._max_step_tokens)

    def _largest_fit(self) -> int:
        """The most tokens whose K/V fit the pool, by bisection: `blocks_for` is monotonic."""
        low, high = 0, self._max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self._layout.blocks_for(middle, self._max_step_tokens) <= self._num_blocks:
                low = middle
            else:
                high = middle - 1
        return low
