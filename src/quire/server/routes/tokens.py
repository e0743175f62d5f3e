"""The route of token ids."""

from __future__ import annotations

from starlette.responses import Response

from quire.server.openai.sampling import completion_params
from quire.server.openai.tokens import GeneratedTokens, TokensAnswer, sampling_of
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import TokensRequest
from quire.server.requests.errors import RefusedError
from quire.server.routes.route import Call, Needs, Route, respond

__all__ = ["ROUTES"]


async def generate(call: Call[TokensRequest]) -> Response:
    """Continue token ids."""
    ready, body = call.ready, call.body
    sampling = sampling_of(body)
    for name in ("prompt", "prompt_embeds", "echo"):
        if getattr(sampling, name) is not None:
            raise RefusedError(
                f"sampling_params.{name} is given, but token_ids are the prompt. Leave it out.",
                param="sampling_params",
            )
    params = completion_params(sampling, ready.model.front.default_sampling, call.limits)

    def answer(timeline: Timeline) -> TokensAnswer:
        job = call.services.job(ready, call.request, sampling, timeline)
        return TokensAnswer(job, sampling, params, body.token_ids)

    return await respond(call, sampling, answer)


ROUTES = (
    Route(
        "POST",
        "/inference/v1/generate",
        generate,
        TokensRequest,
        GeneratedTokens,
        needs=Needs.ROOM,
        streams=True,
    ),
)
