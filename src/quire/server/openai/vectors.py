"""Answers to requests for vectors, and for scores computed from them."""

from __future__ import annotations

import asyncio
import base64
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from quire.config.model_spec import ClassesSpec
from quire.protocol.pooling_params import PoolingParams, class_probabilities, normalized
from quire.protocol.scheduling_params import SchedulingParams
from quire.protocol.step import FloatArray
from quire.server.generation.backend import Ready
from quire.server.generation.prompts import PromptRenderer
from quire.server.generation.vectors import PooledPrompt, VectorService
from quire.server.generation.waiting import Party
from quire.server.openai.answer import encoded_by_turns, run_all
from quire.server.readings.timeline import Timeline
from quire.server.requests.errors import RefusedError
from quire.server.requests.places import string_of
from quire.text.rendering import RenderedPrompt

__all__ = [
    "ClassList", "EmbeddingList", "PoolingList", "RerankResults", "ScoreList", "VectorJob",
    "class_list", "document_texts", "embedding_list", "input_list", "pooling_list",
    "rerank_results", "score_list",
]  # fmt: skip

MAX_TOGETHER = 64
"""Prompts of one request that are in the engine at a time, so that other requests get their
turn."""

Items = TypeVar("Items")


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingData(msgspec.Struct):
    """embedding: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[EmbeddingData]
    usage: PoolingUsage
    object: str = "list"


class PoolingData(msgspec.Struct):
    index: int
    data: list[float] | str
    object: str = "pooling"


class PoolingList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[PoolingData]
    usage: PoolingUsage
    object: str = "list"


class ClassData(msgspec.Struct):
    """label: name of the most likely class. probs: probabilities of all classes."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ClassData]
    usage: PoolingUsage
    object: str = "list"


class ScoreData(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ScoreData]
    usage: PoolingUsage
    object: str = "list"


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: dict[str, str] | UnsetType = UNSET


class RerankResults(msgspec.Struct):
    """results: best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a cross-encoder reads together."""

    first: str
    second: str


VectorPrompt = str | list[int] | TextPair


@dataclass(frozen=True, slots=True)
class VectorJob:
    """One request, and the parts of the server that serve it."""

    ready: Ready
    prompts: PromptRenderer
    vectors: VectorService
    timeline: Timeline
    scheduling: SchedulingParams
    salt: str
    add_special_tokens: bool

    @property
    def model(self) -> str:
        """Name of the model in the answer."""
        return self.ready.model.names[0]

    @property
    def classes(self) -> ClassesSpec | None:
        """Classes into which the model sorts texts."""
        return self.ready.model.front.classes

    async def run(
        self, prompts: Sequence[VectorPrompt], params: PoolingParams
    ) -> list[PooledPrompt]:
        """Compute the vector of each prompt. Errors as in `VectorService.vector`; the first one
        ends all."""
        found: dict[int, PooledPrompt] = {}
        is_spare = self.scheduling.is_spare
        party = Party(min(len(prompts), MAX_TOGETHER), is_spare=is_spare)
        together = asyncio.Semaphore(MAX_TOGETHER)

        async def one(index: int, prompt: VectorPrompt) -> None:
            async with together:
                found[index] = await self.vectors.vector(
                    self.ready,
                    functools.partial(self._render, prompt, params),
                    params,
                    timeline=self.timeline,
                    party=party,
                    scheduling=self.scheduling,
                    salt=self.salt,
                )

        await run_all([one(index, prompt) for index, prompt in enumerate(prompts)])
        return [found[index] for index in range(len(prompts))]

    async def first_tokens(self, text: str, most: int) -> str:
        """Return the beginning of a text that has at most so many tokens."""
        front = self.ready.model.front
        return await self.prompts.first_tokens(
            front.renderer, text, most, self.ready.capacity.max_model_len
        )

    async def _render(self, prompt: VectorPrompt, params: PoolingParams) -> RenderedPrompt:
        renderer = self.ready.model.front.renderer
        most = self.ready.capacity.max_model_len
        if isinstance(prompt, TextPair):
            length = params.truncate_prompt_tokens
            return await self.prompts.render_pair(
                renderer, prompt.first, prompt.second, most, most if length == -1 else length
            )
        return await self.prompts.render_prompt(
            renderer, prompt, most, add_special_tokens=self.add_special_tokens
        )


def input_list(given: str | list[str | int | list[int]], most: int) -> list[str | list[int]]:
    """Return the prompts of an `input`. Raises RefusedError if kinds are mixed, there are none, or
    more than `most`."""
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(item, int) for item in given):
        return [cast("list[int]", given)]
    prompts = [item for item in given if not isinstance(item, int)]
    if not prompts or len(prompts) != len(given):
        fault = "mixes token ids with prompts" if prompts else "is an empty list"
        raise RefusedError(
            f"input {fault}. Send a text, a list of texts, a list of token ids, or a list of such "
            "lists.",
            param="input",
        )
    return _bounded(prompts, most, "input")


async def embedding_list(
    job: VectorJob, pooled: Sequence[PooledPrompt], *, dimensions: int | None, as_base64: bool
) -> EmbeddingList:
    """Return vectors as embeddings. dimensions: keep the first ones of each, scaled to length 1.
    Raises RefusedError if a vector has fewer."""
    data = await encoded_by_turns(
        EmbeddingData(i, _written(_cut(each.vector, dimensions), as_base64))
        for i, each in enumerate(pooled)
    )
    return EmbeddingList(*_head(job, "embd"), data, _usage(pooled))


async def pooling_list(
    job: VectorJob, pooled: Sequence[PooledPrompt], *, as_base64: bool
) -> PoolingList:
    """Return vectors as they are."""
    data = await encoded_by_turns(
        PoolingData(i, _written(each.vector, as_base64)) for i, each in enumerate(pooled)
    )
    return PoolingList(*_head(job, "pool"), data, _usage(pooled))


async def class_list(
    job: VectorJob, prompts: Sequence[str | list[int]], params: PoolingParams
) -> ClassList:
    """Sort texts into the model's classes. Raises RefusedError if it has none."""
    classes = job.classes
    if classes is None:
        raise RefusedError(
            "This model has no classes to sort texts into. Serve one with a head for them "
            "(…ForSequenceClassification), or ask for vectors (/v1/embeddings)."
        )
    pooled = await job.run(prompts, _classifying(params))
    data: list[ClassData] = []
    for index, each in enumerate(pooled):
        probs = class_probabilities(each.vector, classes.activation, params)
        label = classes.labels[int(each.vector.argmax())]
        data.append(ClassData(index, label, probs.tolist(), len(probs)))
    return ClassList(*_head(job, "classify"), data, _usage(pooled))


def _classifying(params: PoolingParams) -> PoolingParams:
    """Return parameters under which the engine gives the raw numbers of the classes. Raises
    RefusedError if the request has a pooling: the head for classes has its own."""
    if params.pooling is not None:
        raise RefusedError(
            f"pooling is {params.pooling!r}, but this model's head for classes has its own. Leave "
            "it out.",
            param="pooling",
        )
    return replace(params, pooling="classify", normalize=False)


async def _pair_scores(
    job: VectorJob, params: PoolingParams, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], PoolingUsage]:
    """Return scores of pairs of texts. Raises RefusedError if the model gives several numbers per
    pair, or the request has a field without effect on pairs."""
    classes = job.classes
    if classes is None:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        pooled = await job.run(texts, replace(params, normalize=True))
        by_text = dict(zip(texts, pooled, strict=True))
        scores = [_cosine(by_text[one].vector, by_text[other].vector) for one, other in pairs]
        return scores, _usage(pooled)
    if not classes.gives_scores:
        raise RefusedError(
            f"This model has {len(classes.labels)} classes, and only a single number is a score. "
            "POST /classify gives them all."
        )
    if not job.add_special_tokens:
        raise RefusedError(
            "add_special_tokens is false, but this model tells two texts apart by special tokens. "
            "Leave it out.",
            param="add_special_tokens",
        )
    pooled = await job.run([TextPair(*pair) for pair in pairs], _classifying(params))
    kind = classes.score_activation
    scores = [float(class_probabilities(each.vector, kind, params)[0]) for each in pooled]
    return scores, _usage(pooled)


async def score_list(
    job: VectorJob,
    params: PoolingParams,
    first: str | list[str],
    second: str | list[str],
    most: int,
) -> ScoreList:
    """Score pairs of texts with a cross-encoder, or with the cosine of their vectors. Raises
    RefusedError if the lists' lengths make no pairs."""
    lefts = [first] if isinstance(first, str) else first
    rights = [second] if isinstance(second, str) else second
    _bounded(lefts, most, "text_1")
    _bounded(rights, most, "text_2")
    if len(lefts) not in (1, len(rights)):
        raise RefusedError(
            f"text_1 has {len(lefts)} texts and text_2 {len(rights)}. Send one text with each of "
            "several, or lists of one length.",
            param="text_1",
        )
    pairs = [(lefts[i % len(lefts)], right) for i, right in enumerate(rights)]
    scores, usage = await _pair_scores(job, params, pairs)
    data = [ScoreData(i, score) for i, score in enumerate(scores)]
    return ScoreList(*_head(job, "score"), data, usage)


async def rerank_results(
    job: VectorJob,
    params: PoolingParams,
    query: str,
    documents: Sequence[str],
    *,
    most_tokens: int | None,
    top_n: int | None,
    shows_documents: bool,
) -> RerankResults:
    """Order documents by their scores with the query, best first. most_tokens: bound of the tokens
    read from each document."""
    read = documents
    if most_tokens is not None:
        read = [await job.first_tokens(each, most_tokens) for each in documents]
    scores, usage = await _pair_scores(job, params, [(query, each) for each in read])
    results = [RerankResult(i, score) for i, score in enumerate(scores)]
    results.sort(key=lambda result: (-result.relevance_score, result.index))
    for result in results if shows_documents else ():
        result.document = {"text": documents[result.index]}
    answer_id = f"rerank-{job.timeline.request_id}"
    return RerankResults(answer_id, job.model, usage, results[: top_n or len(results)])


def document_texts(documents: Sequence[str | dict[str, Any]], most: int) -> list[str]:
    """Return the texts of documents. Raises RefusedError if one has none, or there are too many."""
    _bounded(documents, most, "documents")
    return [
        each if isinstance(each, str) else string_of(each, "text", f"documents[{index}]")
        for index, each in enumerate(documents)
    ]


def _bounded(items: Sequence[Items], most: int, param: str) -> list[Items]:
    if not 1 <= len(items) <= most:
        raise RefusedError(
            f"{param} has {len(items)} texts, but this server takes 1 to {most} at once "
            "(max_embedding_inputs).",
            param=param,
        )
    return list(items)


def _cut(vector: FloatArray, dimensions: int | None) -> FloatArray:
    if dimensions is None:
        return vector
    if not 1 <= dimensions <= len(vector):
        raise RefusedError(
            f"dimensions is {dimensions}, but vectors of this model have {len(vector)}. Use 1 to "
            "that.",
            param="dimensions",
        )
    return normalized(vector[:dimensions])


def _written(vector: FloatArray, as_base64: bool) -> list[float] | str:
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()


def _cosine(one: FloatArray, other: FloatArray) -> float:
    """Return the cosine of two vectors of length 1."""
    return float(one.astype(np.float64) @ other.astype(np.float64))


def _head(job: VectorJob, prefix: str) -> tuple[str, int, str]:
    return f"{prefix}-{job.timeline.request_id}", int(time.time()), job.model


def _usage(pooled: Sequence[PooledPrompt]) -> PoolingUsage:
    num_tokens = sum(each.num_tokens for each in pooled)
    return PoolingUsage(num_tokens, num_tokens)
