"""Makes the engine core's request from a rendered prompt and its parameters."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.base.errors import ConfigError, RequestError, quoted
from quire.config.adapters import AdapterFolders
from quire.protocol.adapters import LoRARequest
from quire.protocol.beam_search import BeamRules, check_beam_sampling
from quire.protocol.pooling_params import POOLED_PARAMS, PoolingParams
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams, check_vocabulary
from quire.protocol.step import IntArray
from quire.text.rendering.bans import check_bans, check_beam_bans
from quire.text.rendering.renderer import RenderedPrompt, Renderer
from quire.text.rendering.tokenizer import Tokenizer

__all__ = ["PromptAdapters", "RequestRenderer", "truncated"]

SEED_MASK = 2**64 - 1


def truncated(
    prompt: RenderedPrompt,
    params: SamplingParams | PoolingParams,
    max_model_len: int,
    *,
    is_encoder: bool = False,
) -> RenderedPrompt:
    """The prompt, cut to its last tokens as `params.truncate_prompt_tokens` asks; an encoder's to
    its first ones."""
    length = params.truncate_prompt_tokens
    if length is None:
        return prompt
    if length == -1:
        length = max_model_len
        if isinstance(params, SamplingParams):
            length -= max(params.max_tokens or 1, params.min_tokens)
    return prompt.first(length) if is_encoder else prompt.last(length)


class RequestRenderer:
    """Turns text-level parameters (bad words, the model's end-of-sequence tokens, a missing seed)
    into the integers that the engine core knows.

    seed: seed from which requests without one draw theirs; None for unpredictable ones.
    """

    def __init__(
        self, renderer: Renderer, eos_token_ids: frozenset[int], seed: int | None = None
    ) -> None:
        self._renderer = renderer
        self._eos_token_ids = eos_token_ids
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def render(
        self,
        request_id: str,
        first_handle: int,
        prompt: RenderedPrompt,
        params: SamplingParams,
        arrival_time: float,
        beams: BeamRules | None = None,
        *,
        max_tokens_is_default: bool = False,
    ) -> EngineRequest:
        """Raises RequestError if a parameter names a token outside the vocabulary, bad words cannot
        be spelled, `params` ban every token, or have something that no search by `beams` has. A
        request without seed gets one, so that it can be replayed."""
        vocab_size = self._renderer.vocab_size
        stop_tokens = self._renderer.stop_tokens(params.stop_strings)
        if beams is not None:
            text_stops = set(params.stop_strings) - set(stop_tokens.values())
            check_beam_sampling(params, beams, vocab_size, text_stops)
        tokenizer = self._renderer.tokenizer
        if params.bad_words and tokenizer is not None:
            spelled = self._spell(tokenizer, params.bad_words)
            words = dict.fromkeys((*(params.bad_words_token_ids or ()), *spelled))
            params = replace(params, bad_words_token_ids=tuple(words))
        if params.dry_multiplier and params.dry_breaker_token_ids is None:
            params = replace(params, dry_breaker_token_ids=self._breakers(params))
        check_vocabulary(params, vocab_size)
        ending = self._stop_token_ids(params) | stop_tokens.keys()
        check_bans(params, ending, vocab_size)
        if beams is not None:
            check_beam_bans(params, ending, vocab_size)
        structured = params.structured_outputs
        if structured is not None:
            params = replace(params, structured_outputs=None)
        if params.deterministic and params.logprobs is None:
            params = replace(params, logprobs=0)  # for the receipt; whoever asked sees none
        seed = params.seed
        if seed is None:
            seed = self._random.getrandbits(64)
        token_ids = self._token_ids(prompt)
        return EngineRequest(
            request_id=request_id,
            first_handle=first_handle,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed & SEED_MASK,
            stop_token_ids=ending,
            arrival_time=arrival_time,
            beams=beams,
            salt=prompt.salt,
            max_tokens_is_default=max_tokens_is_default,
            media=prompt.media,
            grammar=None if structured is None else structured.spec,
            adapter=prompt.adapter,
            message_ends=self._renderer.message_ends(token_ids),
            prediction_token_ids=np.array(prompt.prediction, np.int32),
        )

    def render_pooled(
        self,
        request_id: str,
        handle: int,
        prompt: RenderedPrompt,
        params: PoolingParams,
        arrival_time: float,
    ) -> EngineRequest:
        """A request for the vector of a prompt, by parameters of which none is open."""
        return EngineRequest(
            request_id=request_id,
            first_handle=handle,
            prompt_token_ids=self._token_ids(prompt),
            params=POOLED_PARAMS,
            seed=0,
            arrival_time=arrival_time,
            salt=prompt.salt,
            media=prompt.media,
            pooling=params.pooling,
            adapter=prompt.adapter,
            second_start=prompt.second_start,
        )

    def _token_ids(self, prompt: RenderedPrompt) -> IntArray:
        if prompt.parts:
            raise RequestError(f"{prompt.parts[0].place} cannot be used here: leave it out")
        token_ids = np.array(prompt.token_ids, np.int32)
        for span in (each.span for each in prompt.media):  # none that penalties could count
            token_ids[span.position : span.end] = self._renderer.vocab_size
        return token_ids

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids or ())
        return own if params.ignore_eos else own | self._eos_token_ids

    def _breakers(self, params: SamplingParams) -> list[int | tuple[int, ...]]:
        """Return the tokens that hold a text of `dry_sequence_breakers`, and its own tokens."""
        texts, tokenizer = tuple(params.dry_sequence_breakers or ()), self._renderer.tokenizer
        if not texts:
            return []
        if tokenizer is None:
            raise RequestError(
                f"dry_sequence_breakers is {quoted(texts)}, but there is no tokenizer to spell "
                "them. Give dry_breaker_token_ids instead, which may be empty."
            )
        holding = {token_id for text in texts for token_id in tokenizer.ids_holding(text)}
        spelled = self._spell(tokenizer, texts)
        return [*sorted(holding), *(each for each in spelled if holding.isdisjoint(each))]

    def _spell(self, tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it starts a text and as it follows a space, however it was given."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            for text in (bare, " " + bare) if bare else (word,):
                spelled = tuple(tokenizer.encode(text, add_special_tokens=False))
                if spelled:
                    spellings[spelled] = None
        return tuple(spellings)


class PromptAdapters:
    """Finds adapters in their folders; safe to share between threads."""

    def __init__(self, max_rank: int) -> None:
        """max_rank: bound of the engine."""
        self._folders = AdapterFolders(max_rank)

    def put(self, prompt: RenderedPrompt, lora: LoRARequest | None) -> RenderedPrompt:
        """Return the prompt as one that an adapter computes. RequestError if its folder has none
        that can be used."""
        if lora is None:
            return prompt
        if not isinstance(lora, LoRARequest):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError(f"lora_request is {lora!r}: give LoRARequest(name, id, path)")
        try:
            return replace(prompt, adapter=self._folders.ref(lora.name, lora.path))
        except ConfigError as error:
            raise RequestError(f"the adapter {lora.name!r} cannot be used: {error}") from error

    def put_each(
        self,
        prompts: Sequence[RenderedPrompt | RequestError],
        adapters: Sequence[LoRARequest | None],
    ) -> list[RenderedPrompt | RequestError]:
        """Return prompts with their adapters; one that cannot be used fails its own prompt."""
        found: list[RenderedPrompt | RequestError] = []
        for prompt, lora in zip(prompts, adapters, strict=True):
            try:
                is_fine = isinstance(prompt, RenderedPrompt)
                found.append(self.put(prompt, lora) if is_fine else prompt)
            except RequestError as error:
                found.append(error)
        return found
