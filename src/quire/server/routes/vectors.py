"""The routes of vectors, and of scores that are made of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from quire.protocol.pooling_params import PoolingParams
from quire.server.openai.sampling import check_label, check_priority
from quire.server.openai.vectors import (
    ClassList,
    EmbeddingList,
    PoolingList,
    RerankResults,
    ScoreList,
    VectorJob,
    class_list,
    document_texts,
    embedding_list,
    input_list,
    pooling_list,
    rerank_results,
    score_list,
)
from quire.server.requests.errors import RefusedError
from quire.server.requests.pooling_bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.server.routes.route import Call, Needs, Route

__all__ = ["ROUTES"]

Body = TypeVar("Body", bound=Pooled)
Made = TypeVar("Made")


async def create_embeddings(call: Call[EmbeddingRequest]) -> EmbeddingList:
    """Embed texts."""
    return await _pooled(call, _embeddings)


async def pool(call: Call[PoolingRequest]) -> PoolingList:
    """Pool hidden states of texts."""
    return await _pooled(call, _pooling)


async def classify(call: Call[ClassifyRequest]) -> ClassList:
    """Sort texts into classes."""
    return await _pooled(call, _classes)


async def score(call: Call[ScoreRequest]) -> ScoreList:
    """Compare texts."""
    return await _pooled(call, _scores)


async def rerank(call: Call[RerankRequest]) -> RerankResults:
    """Order documents by a query."""
    return await _pooled(call, _ranks)


async def _pooled(
    call: Call[Body], answer: Callable[[Body, VectorJob, int], Coroutine[Any, Any, Made]]
) -> Made:
    """Return the answer of a job for vectors, with a timeline. answer: takes the body, the job, and
    how many inputs a request may have."""
    body = call.body
    for name, text in (("cache_salt", body.cache_salt), ("request_id", body.request_id)):
        check_label(name, text, call.limits)
    check_priority(body.priority, call.limits)
    with call.services.recorded(call.request, body) as timeline:
        job = call.services.vector_job(call.ready, call.request, body, timeline)
        return await call.attended(answer(body, job, call.limits.max_embedding_inputs))


async def _embeddings(body: EmbeddingRequest, job: VectorJob, most: int) -> EmbeddingList:
    params = _params(body, normalize=body.normalize)
    before = job.ready.model.front.sentences.prompt(body.prompt_name)
    prompts = input_list(body.input, most)
    if before:
        prompts = [before + each if isinstance(each, str) else each for each in prompts]
    pooled = await job.run(prompts, params)
    as_base64 = body.encoding_format == "base64"
    return await embedding_list(job, pooled, dimensions=body.dimensions, as_base64=as_base64)


async def _pooling(body: PoolingRequest, job: VectorJob, most: int) -> PoolingList:
    params = _params(body, normalize=body.normalize)
    pooled = await job.run(input_list(body.input, most), params)
    return await pooling_list(job, pooled, as_base64=body.encoding_format == "base64")


async def _classes(body: ClassifyRequest, job: VectorJob, most: int) -> ClassList:
    params = _params(body, use_activation=body.use_activation is not False)
    return await class_list(job, input_list(body.input, most), params)


async def _scores(body: ScoreRequest, job: VectorJob, most: int) -> ScoreList:
    return await score_list(job, _params(body), body.text_1, body.text_2, most)


async def _ranks(body: RerankRequest, job: VectorJob, most: int) -> RerankResults:
    for name, value in (("top_n", body.top_n), ("max_tokens_per_doc", body.max_tokens_per_doc)):
        if value is not None and value < 1:
            raise RefusedError(f"{name} is {value}. Send 1 or more.", param=name)
    return await rerank_results(
        job,
        _params(body),
        body.query,
        document_texts(body.documents, most),
        most_tokens=body.max_tokens_per_doc,
        top_n=body.top_n,
        shows_documents=body.return_documents is not False,
    )


def _params(
    body: Pooled, *, normalize: bool | None = None, use_activation: bool = True
) -> PoolingParams:
    return PoolingParams(
        body.pooling, normalize, body.truncate_prompt_tokens, use_activation=use_activation
    )


def _routes(
    kind: type[Body],
    answer: type[Made],
    handler: Callable[[Call[Body]], Awaitable[Made]],
    *paths: str,
) -> tuple[Route[Any, Any], ...]:
    """Return a route under each of its names."""
    return tuple(Route("POST", path, handler, kind, answer, needs=Needs.ROOM) for path in paths)


ROUTES = (
    *_routes(EmbeddingRequest, EmbeddingList, create_embeddings, "/v1/embeddings"),
    *_routes(PoolingRequest, PoolingList, pool, "/pooling"),
    *_routes(ClassifyRequest, ClassList, classify, "/classify"),
    *_routes(ScoreRequest, ScoreList, score, "/score", "/v1/score"),
    *_routes(RerankRequest, RerankResults, rerank, "/rerank", "/v1/rerank", "/v2/rerank"),
)
