"""The route of token ids."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.server.http.body import BodyDecoder
from quire.server.http.openapi import body_of
from quire.server.openai.sampling import completion_params
from quire.server.openai.tokens import TokensAnswer, sampling_of
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import TokensRequest
from quire.server.requests.errors import RefusedError
from quire.server.routes.respond import respond
from quire.server.routes.services import Services

__all__ = ["tokens_router"]


def tokens_router(services: Services) -> APIRouter:
    """Token ids in, token ids out."""
    router = APIRouter(tags=["tokens"])
    limits = services.settings.limits
    decoder: BodyDecoder[TokensRequest] = BodyDecoder(TokensRequest, limits)

    @router.post("/inference/v1/generate", openapi_extra=body_of(TokensRequest))
    async def generate(request: Request) -> Response:
        """Continue token ids."""
        ready = services.ready()
        body = await decoder.decode(await services.bodies.read(request))
        sampling = sampling_of(body)
        for name in ("prompt", "prompt_embeds", "echo"):
            if getattr(sampling, name) is not None:
                raise RefusedError(
                    f"sampling_params.{name} is given, but token_ids are the prompt. Leave it out.",
                    param="sampling_params",
                )
        params = completion_params(sampling, ready.model.front.default_sampling, limits)

        def answer(timeline: Timeline) -> TokensAnswer:
            job = services.job(ready, request, sampling, timeline)
            return TokensAnswer(job, sampling, params, body.token_ids)

        return await respond(services, request, sampling, answer)

    return router
