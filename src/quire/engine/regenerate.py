"""Makes the answer of a receipt again, and compares it."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from quire.base.errors import ConfigError, RequestError
from quire.engine.build import Engine
from quire.engine.provenance import CONDITIONAL_SETTINGS, STATED_SETTINGS
from quire.engine.stated_media import GivenMedia, put_media
from quire.protocol.adapters import AdapterRef
from quire.protocol.beam_search import BeamRules
from quire.protocol.grammar import GrammarSpec
from quire.protocol.receipts import (
    Receipt,
    SampleEvidence,
    SampleStatement,
    first_difference,
    logprob_bits,
    request_statement,
    with_replaced,
)
from quire.protocol.request import EngineOutput, EngineRequest, FinishReason, SequenceFinish
from quire.protocol.sampling_params import SamplingParams, check_vocabulary
from quire.protocol.step import TokenLogprobs

__all__ = ["receipt_settings", "regenerate"]

REQUEST_ID = "replay"


def receipt_settings(receipt: Receipt) -> dict[str, Any]:
    """Return the settings that a receipt states, by name, for an engine that gives its bits. A
    receipt may come from a stranger, so it sets nothing else: no hooks, folders or memory."""
    stated = receipt.statement.engine
    return {
        name: stated[name] for name in (*STATED_SETTINGS, *CONDITIONAL_SETTINGS) if name in stated
    }


@dataclass(slots=True)
class _Sample:
    """A sample as it is made again. wanted: number of tokens to compare. is_cut: it was ended
    here, since it goes on behind them."""

    wanted: int
    is_cut: bool = False
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[str] = field(default_factory=list[str])
    finish: SequenceFinish | None = None

    @property
    def goes_on(self) -> bool:
        """True if it has all tokens that are wanted, and no end."""
        return self.finish is None and not self.is_cut and len(self.token_ids) >= self.wanted

    def take(self, token_id: int, entry: TokenLogprobs) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob_bits(entry.logprob))


def regenerate(
    engine: Engine,
    receipt: Receipt,
    adapter: AdapterRef | None = None,
    media: Sequence[GivenMedia] = (),
    *,
    first_handle: int = 0,
) -> str:
    """Make the answer again in an engine that does nothing else. Return the first difference in
    words, empty if there is none: first of the fields, then of the tokens.

    adapter: adapter that computed it. media: its images or embeddings, in order. first_handle: the
    first of as many handles as the receipt has samples and media, which no request had. Raises
    RequestError if the receipt does not say enough.
    """
    request = _request(receipt, adapter, first_handle)
    with put_media(engine, receipt, media, first_handle + request.params.n) as placed:
        return _difference(engine, receipt, replace(request, media=placed))


def _difference(engine: Engine, receipt: Receipt, request: EngineRequest) -> str:
    stated = receipt.statement
    program, model, text = engine.provenance.sections(engine.facts)
    model = with_replaced(model, engine.client.report.weights)
    own = request_statement(request)
    found = {
        "engine": program,
        "model": {**model, "adapter": request.adapter_digest},
        "text": {**text, **own["text"]},
    }
    difference = first_difference(msgspec.to_builtins(stated), found, ("engine", "model", "text"))
    if difference is not None:
        return str(difference)
    if engine.facts.unstable:
        raise ConfigError(
            f"The bits of an answer cannot be promised here: {engine.facts.unstable}. Replay it on "
            "an engine like the one that made it."
        )
    _check_tokens(request, engine.spec.vocab_size)
    samples = _generate(engine, request, [each.num_tokens for each in stated.samples])
    for index, sample in enumerate(samples):
        words = _sample_difference(
            engine, index, stated.samples[index], receipt.evidence.samples[index], sample
        )
        if words:
            return words
    return ""


def _request(receipt: Receipt, adapter: AdapterRef | None, first_handle: int) -> EngineRequest:
    """Return the request, with room for no more tokens than the answer had, and one. RequestError
    if the receipt states parameters that do not exist here."""
    choice, samples = receipt.statement.choice, receipt.statement.samples
    if receipt.statement.model.get("adapter") and adapter is None:
        raise RequestError(
            f"the adapter {receipt.evidence.adapter!r} computed the answer. Give its folder."
        )
    try:
        given = dict(choice["params"])
        rules = msgspec.convert(choice["beams"], BeamRules | None)
        if rules is None:
            given["max_tokens"] = most = _max_tokens(samples)
            given["min_tokens"] = min(given["min_tokens"], most)
        params = SamplingParams(**given, logprobs=0, deterministic=True)
        if params.n != len(samples):
            raise RequestError(f"n is {params.n}, but there are {len(samples)} samples")
        return EngineRequest(
            request_id=REQUEST_ID,
            first_handle=first_handle,
            prompt_token_ids=np.array(receipt.evidence.prompt_token_ids, np.int32),
            params=params,
            seed=choice["seed"] or 0,
            stop_token_ids=frozenset(choice["end_token_ids"]),
            arrival_time=time.monotonic(),
            beams=rules,
            grammar=msgspec.convert(choice["grammar"], GrammarSpec | None),
            adapter=adapter,
        )
    except (KeyError, TypeError, OverflowError, msgspec.ValidationError) as error:
        raise RequestError(
            f"the receipt states a request that quire {receipt.statement.engine.get('quire')} took "
            f"and this one does not ({type(error).__name__}: {error}). Replay it with that version."
        ) from error


def _max_tokens(samples: Sequence[SampleStatement]) -> int:
    """Return the length at which samples ended; one token more than the longest has, if none ended
    by its length."""
    cut = [each.num_tokens for each in samples if each.finish_reason == FinishReason.LENGTH]
    longest = max((each.num_tokens for each in samples), default=0)
    return max(*cut, 1) if cut else longest + 1


def _check_tokens(request: EngineRequest, vocab_size: int) -> None:
    """Raise RequestError for tokens that the model does not have: a file is no front."""
    prompt, is_token = request.prompt_token_ids, np.ones(len(request.prompt_token_ids), bool)
    for span in (each.span for each in request.media):
        is_token[span.position : span.end] = False
    beyond = (prompt < 0) | (prompt >= vocab_size)
    if not len(prompt) or (beyond & is_token).any():
        raise RequestError(
            f"the prompt of the receipt is empty, or has tokens beyond the {vocab_size} of this "
            "model. Give the model that made the answer."
        )
    check_vocabulary(request.params, vocab_size)


def _generate(engine: Engine, request: EngineRequest, wanted: list[int]) -> list[_Sample]:
    """Run the request, each sample as far as it is wanted."""
    client = engine.client
    samples = {request.first_handle + i: _Sample(count) for i, count in enumerate(wanted)}
    client.add(request)
    while client.has_unfinished:
        _take(client.step(), samples)
        longer = [handle for handle, each in samples.items() if each.goes_on]
        client.abort(longer)
        for handle in longer:
            samples[handle].is_cut = True
    return list(samples.values())


def _take(output: EngineOutput, samples: dict[int, _Sample]) -> None:
    logprobs = {handle: iter(entries) for handle, entries in output.logprobs.items()}
    for handle, token_id in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
        samples[handle].take(token_id, next(logprobs[handle]))
    for finish in output.finished:
        sample = samples[finish.handle]
        if finish.whole is not None:
            ids = finish.whole.token_ids.tolist()
            for token_id, entry in zip(ids, finish.whole.logprobs, strict=True):
                sample.take(token_id, entry)
        if not sample.is_cut:
            sample.finish = finish


def _sample_difference(
    engine: Engine, index: int, stated: SampleStatement, kept: SampleEvidence, found: _Sample
) -> str:
    """Return the first difference of a sample in words, empty if there is none."""
    place = f"sample {index}" if index else "the answer"
    both = zip(kept.token_ids, found.token_ids, kept.logprobs, found.logprobs, strict=False)
    for number, (one, other, one_bits, other_bits) in enumerate(both, 1):
        if one != other or one_bits != other_bits:
            return (
                f"token {number} of {place} is {_token(engine, other)} here, log-probability "
                f"{_shown(other_bits)}, but {_token(engine, one)} in the receipt, log-probability "
                f"{_shown(one_bits)}"
            )
    finish, ends_by_text = found.finish, isinstance(stated.stop_reason, str)
    if finish is not None and finish.reason is FinishReason.ERROR:
        return f"{place} fails here: {finish.message}"
    if len(found.token_ids) < len(kept.token_ids):
        return (
            f"{place} ends after {len(found.token_ids)} tokens here, but has "
            f"{len(kept.token_ids)} in the receipt"
        )
    if ends_by_text and stated.finish_reason == FinishReason.STOP:
        return ""  # the engine knows no texts
    reason = None if finish is None else finish.reason.value
    if reason != stated.finish_reason:
        how = "goes on" if reason is None else f"ends by {reason!r}"
        return f"{place} {how} here, but ends by {stated.finish_reason!r} in the receipt"
    return ""


def _token(engine: Engine, token_id: int) -> str:
    tokenizer = engine.renderer.tokenizer
    return f"{token_id}" if tokenizer is None else f"{token_id} {tokenizer.token_text(token_id)!r}"


def _shown(bits: str) -> str:
    """A log-probability as a number and in its bits."""
    (value,) = struct.unpack(">f", bytes.fromhex(bits))
    return f"{value:.9g} (0x{bits})"
