"""The routes of vectors, and of scores that are made of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.protocol.pooling_params import PoolingParams
from quire.server.http.body import BodyDecoder
from quire.server.http.events import while_connected
from quire.server.http.openapi import body_of
from quire.server.openai.answer import encode
from quire.server.openai.sampling import check_label, check_priority
from quire.server.openai.vectors import (
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
from quire.server.routes.respond import JSON
from quire.server.routes.services import Services

__all__ = ["vectors_router"]

Body = TypeVar("Body", bound=Pooled)


def vectors_router(services: Services) -> APIRouter:
    """Embeddings, pooling, classes, score and rerank."""
    router = APIRouter(tags=["vectors"])
    most = services.settings.limits.max_embedding_inputs

    async def embeddings(body: EmbeddingRequest, job: VectorJob) -> object:
        params = _params(body, normalize=body.normalize)
        before = job.ready.model.front.sentences.prompt(body.prompt_name)
        prompts = input_list(body.input, most)
        if before:
            prompts = [before + each if isinstance(each, str) else each for each in prompts]
        pooled = await job.run(prompts, params)
        as_base64 = body.encoding_format == "base64"
        return await embedding_list(job, pooled, dimensions=body.dimensions, as_base64=as_base64)

    async def pooling(body: PoolingRequest, job: VectorJob) -> object:
        params = _params(body, normalize=body.normalize)
        pooled = await job.run(input_list(body.input, most), params)
        return await pooling_list(job, pooled, as_base64=body.encoding_format == "base64")

    async def classify(body: ClassifyRequest, job: VectorJob) -> object:
        params = _params(body, use_activation=body.use_activation is not False)
        return await class_list(job, input_list(body.input, most), params)

    async def score(body: ScoreRequest, job: VectorJob) -> object:
        return await score_list(job, _params(body), body.text_1, body.text_2, most)

    async def rerank(body: RerankRequest, job: VectorJob) -> object:
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

    _add(services, router, ("/v1/embeddings",), EmbeddingRequest, embeddings, "Embed texts.")
    _add(services, router, ("/pooling",), PoolingRequest, pooling, "Pool hidden states of texts.")
    _add(services, router, ("/classify",), ClassifyRequest, classify, "Sort texts into classes.")
    _add(services, router, ("/score", "/v1/score"), ScoreRequest, score, "Compare texts.")
    paths = ("/rerank", "/v1/rerank", "/v2/rerank")
    _add(services, router, paths, RerankRequest, rerank, "Order documents by a query.")
    return router


def _add(
    services: Services,
    router: APIRouter,
    paths: tuple[str, ...],
    kind: type[Body],
    answer: Callable[[Body, VectorJob], Awaitable[object]],
    summary: str,
) -> None:
    """Add a route under each of its names."""
    decoder: BodyDecoder[Body] = BodyDecoder(kind, services.settings.limits)

    async def endpoint(request: Request) -> Response:
        ready = services.ready()
        body = await decoder.decode(await services.bodies.read(request))
        for name, text in (("cache_salt", body.cache_salt), ("request_id", body.request_id)):
            check_label(name, text, services.settings.limits)
        check_priority(body.priority, services.settings.limits)
        with services.recorded(request, body) as timeline:
            job = services.vector_job(ready, request, body, timeline)

            async def work() -> Any:
                return await answer(body, job)

            found = await while_connected(request.receive, work())
        return Response(encode(found), media_type=JSON)

    for path in paths:
        router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            summary=summary,
            description=summary,
            openapi_extra=body_of(kind),
        )


def _params(
    body: Pooled, *, normalize: bool | None = None, use_activation: bool = True
) -> PoolingParams:
    return PoolingParams(
        body.pooling, normalize, body.truncate_prompt_tokens, use_activation=use_activation
    )
