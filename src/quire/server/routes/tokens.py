"""Routes of token ids: generate from them, and what text becomes them."""

from __future__ import annotations

from typing import Any

from msgspec.json import decode
from msgspec.structs import replace
from starlette.responses import Response

from quire.protocol.sampling_params import SamplingParams
from quire.server.generation.prompts import EmbedsPrompt, check_context, prompt_list
from quire.server.openai.answer import run_all
from quire.server.openai.chat import ChatAnswer
from quire.server.openai.completions import CompletionAnswer
from quire.server.openai.sampling import chat_params, completion_params, limit_field
from quire.server.openai.tokens import GeneratedTokens, TokensAnswer, sampling_of
from quire.server.openai.tools import answer_form, asked_tools
from quire.server.openai.trl import TrlAnswer, trl_answer
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import ChatRequest, CompletionRequest, TokensRequest
from quire.server.requests.errors import RefusedError
from quire.server.requests.trl_bodies import TrlChatRequest, TrlGenerateRequest
from quire.server.routes.route import Call, Needs, Route, respond

__all__ = ["ROUTES"]

_BESIDE = {*TokensRequest.__struct_fields__} & {*CompletionRequest.__struct_fields__}
"""Fields of completions that stand beside the parameters."""
_OF_PROMPTS = ("prompt", "truncate_prompt_tokens", "add_special_tokens")
"""Fields of completions that are of no use once the prompt is rendered."""


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


async def render_completion(call: Call[CompletionRequest]) -> list[TokensRequest]:
    """Render the prompts of a completion. Each becomes a request for `/inference/v1/generate`."""
    ready, body = call.ready, call.body
    if body.echo:
        raise RefusedError(
            "echo is true, but /inference/v1/generate gives no text. Leave it out.", param="echo"
        )
    name = ready.model.adapter_of(body.model) or ready.model.names[0]
    params = completion_params(body, ready.model.front.default_sampling, call.limits)
    prompts = prompt_list(body, call.limits, max(params.n, body.best_of or 1))
    beside = {field: getattr(body, field) for field in _BESIDE}
    request_id = body.request_id or call.request.state.request_id
    sampling = replace(
        body, **dict.fromkeys((*_BESIDE, *_OF_PROMPTS)), max_tokens=params.max_tokens
    )
    found: list[TokensRequest] = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, EmbedsPrompt):
            raise RefusedError(
                "prompt_embeds are given, which have no token ids. Leave them out.",
                param="prompt_embeds",
            )
        token_ids = await call.attended(_render(call, prompt, params))
        label = f"cmpl-{index}-{request_id}"[: call.limits.max_label_chars]
        beside.update(model=name, request_id=label)
        found.append(TokensRequest(token_ids=token_ids, sampling_params=sampling, **beside))
    return found


async def _render(
    call: Call[CompletionRequest], prompt: str | list[int], params: SamplingParams
) -> list[int]:
    """Return the token ids of a prompt that fits the context."""
    ready, body = call.ready, call.body
    most = ready.capacity.max_model_len
    rendered = await call.services.prompts.render_prompt(
        ready.model.front.renderer,
        prompt,
        most,
        add_special_tokens=body.add_special_tokens is not False,
    )
    field = limit_field(body)
    return check_context(rendered, params, most, body.truncate_prompt_tokens, field).token_ids


async def trl_generate(call: Call[TrlGenerateRequest]) -> TrlAnswer:
    """Continue prompts, as TRL's own server did up to TRL 1.12."""
    ready, body = call.ready, call.body.completion()
    params = completion_params(body, ready.model.front.default_sampling, call.limits)
    prompts = prompt_list(body, call.limits, params.n)
    with call.services.recorded(call.request, body) as timeline:
        job = call.services.job(ready, call.request, body, timeline, num_together=len(prompts))
        answer = CompletionAnswer(job, body, params, prompts)
        choices = decode(await call.attended(answer.whole()))["choices"]
    return trl_answer([each["prompt_token_ids"] for each in choices[:: params.n]], choices)


async def trl_chat(call: Call[TrlChatRequest]) -> TrlAnswer:
    """Answer conversations, as TRL's own server did up to TRL 1.12."""
    ready, bodies = call.ready, call.body.chats()
    defaults = ready.model.front.default_sampling
    asked = [asked_tools(body) for body in bodies]
    params = [
        chat_params(body, defaults, call.limits, must_call=tools.must_call)
        for body, tools in zip(bodies, asked, strict=True)
    ]
    most, n = call.limits.max_sequences, params[0].n if params else 1
    if not 0 < len(bodies) * n <= most:
        raise RefusedError(
            f"{len(bodies)} conversations with n={n} are not 1 to {most} sequences "
            "(max_sequences). Send others.",
            param="messages",
        )
    found: list[dict[str, Any]] = [{} for _ in bodies]
    with call.services.recorded(call.request, bodies[0]) as timeline:

        async def answer(number: int, body: ChatRequest) -> None:
            form = answer_form(asked[number], body, ready.model)
            job = call.services.job(ready, call.request, body, timeline, num_together=len(bodies))
            chat = ChatAnswer(job, body, params[number], form)
            found[number] = decode(await chat.whole())

        works = [answer(number, body) for number, body in enumerate(bodies)]
        await call.attended(run_all(works))
    choices = [choice for each in found for choice in each["choices"]]
    return trl_answer([each["prompt_token_ids"] for each in found], choices)


ROUTES = (
    Route("POST", "/generate", trl_generate, TrlGenerateRequest, TrlAnswer, needs=Needs.ROOM),
    Route("POST", "/chat", trl_chat, TrlChatRequest, TrlAnswer, needs=Needs.ROOM, refuses=(507,)),
    Route(
        "POST",
        "/v1/completions/render",
        render_completion,
        CompletionRequest,
        list[TokensRequest],
        needs=Needs.ROOM,
    ),
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
