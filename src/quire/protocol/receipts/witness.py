"""Makes the receipt of one request while its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.protocol.receipts.receipt import (
    Evidence,
    Receipt,
    SampleEvidence,
    SampleStatement,
    Statement,
    digest,
    logprob_bits,
    prompt_digest,
)
from quire.protocol.request import EngineRequest, FinishReason, Weights
from quire.protocol.sampling_params import SAMPLING_PARAMETERS
from quire.protocol.step import TokenLogprobs

__all__ = ["Witness", "request_statement", "with_replaced"]

_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
"""Ends that follow from the tokens. All others depend on time or on people."""


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def evidence(self) -> SampleEvidence:
        """Return what the receipt keeps of it. Made at the end, so that a step pays little."""
        bits = [logprob_bits(each) for each in self.logprobs]
        return SampleEvidence(token_ids=self.token_ids, logprobs=bits)


class Witness:
    """Sees each token of a request once, in order, wherever it was computed: behind drafts,
    preemptions and crashes, so that none of these is in the receipt."""

    def __init__(
        self,
        request: EngineRequest,
        *,
        engine: Mapping[str, Any],
        model: Mapping[str, Any],
        text: Mapping[str, Any],
        name: str,
        is_current: Callable[[], bool],
    ) -> None:
        """engine, model, text: sections of the statement, to which the request adds its own. name:
        name of the model, for people. is_current: asked at the end whether the model still is what
        they state."""
        self._request = request
        self._engine, self._model, self._text = engine, model, text
        self._name = name
        self._is_current = is_current
        self._samples = [_Sample() for _ in range(request.params.n)]

    def take(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> None:
        """Take tokens of a sample that belong to its output, and its end if it has ended."""
        sample = self._samples[index]
        sample.token_ids += token_ids
        sample.logprobs += [entry.logprob for entry in logprobs]
        if reason is not None:
            sample.reason, sample.stop_reason = reason, stop_reason

    @property
    def is_complete(self) -> bool:
        """True if every sample has ended by itself."""
        return all(sample.reason in _OWN_ENDS for sample in self._samples)

    def receipt(self, weights: Weights | None) -> Receipt | None:
        """Return the receipt; None before the end, and if a sample did not end by itself or the
        files of the model have changed since the request began. weights: weights of all tokens;
        None if they changed, and then there is no receipt."""
        if not self.is_complete or weights is None or not self._is_current():
            return None
        request, adapter = self._request, self._request.adapter
        own = request_statement(request)
        prompt_ids = request.prompt_token_ids.tolist()
        samples = [each.evidence() for each in self._samples]
        statement = Statement(
            engine=dict(self._engine),
            model={**with_replaced(self._model, weights), "adapter": request.adapter_digest},
            text={**self._text, **own["text"]},
            choice=own["choice"],
            samples=[
                SampleStatement(
                    num_tokens=len(each.token_ids),
                    chain=tokens.chain,
                    finish_reason=str(each.reason),
                    stop_reason=each.stop_reason,
                )
                for each, tokens in zip(self._samples, samples, strict=True)
            ],
        )
        evidence = Evidence(
            model=self._name,
            adapter="" if adapter is None else adapter.name,
            weights_version=weights.version,
            prompt_token_ids=prompt_ids,
            samples=samples,
        )
        return Receipt.of(statement, evidence)


def with_replaced(model: Mapping[str, Any], weights: Weights) -> Mapping[str, Any]:
    """Return the section of a model with the digest of its weights. weights: weights in use,
    some of them perhaps in place of the checkpoint's."""
    if not weights.digest:
        return model
    both = f"{model['weights']}\0{weights.digest}".encode()
    return {**model, "weights": digest(both, b"quire weights")}


def request_statement(request: EngineRequest) -> dict[str, dict[str, Any]]:
    """Return what a request states of its text and its choice, as JSON has it. seed: None where no
    noise can change the choice."""
    params = {
        name: getattr(request.params, name)
        for name, each in SAMPLING_PARAMETERS.items()
        if each.facts.in_receipt
    }
    media = [
        (each.digest.hex(), each.span.position, each.span.length, each.span.first_row)
        for each in request.media
    ]
    stated = {
        "text": {"prompt": prompt_digest(request.prompt_token_ids.tolist()), "media": media},
        "choice": {
            "params": params,
            "seed": None if request.beams or request.params.is_greedy else request.seed,
            "end_token_ids": sorted(request.stop_token_ids),
            "grammar": request.grammar,
            "beams": request.beams,
        },
    }
    return msgspec.json.decode(msgspec.json.encode(stated))
