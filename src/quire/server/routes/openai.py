"""The routes of the OpenAI API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from quire.server.generation.adapters import ServedAdapters
from quire.server.generation.prompts import prompt_list
from quire.server.http.body import BodyDecoder
from quire.server.http.openapi import body_of
from quire.server.openai.answer import encode
from quire.server.openai.chat import ChatAnswer
from quire.server.openai.completions import CompletionAnswer
from quire.server.openai.sampling import chat_params, completion_params
from quire.server.openai.tools import answer_form, asked_tools
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import (
    AdapterRequest,
    ChatRequest,
    CompletionRequest,
)
from quire.server.requests.errors import RefusedError
from quire.server.routes.respond import JSON, Answer, respond
from quire.server.routes.services import Services

__all__ = ["generating_routes", "openai_router"]

MESSAGES_VERSION = "anthropic-version"
"""Header of clients of the Messages API."""


def openai_router(services: Services) -> APIRouter:
    """Completions, chats and models."""
    router = APIRouter(tags=["OpenAI"])
    limits = services.settings.limits
    completions: BodyDecoder[CompletionRequest] = BodyDecoder(CompletionRequest, limits)
    adapters: BodyDecoder[AdapterRequest] = BodyDecoder(AdapterRequest, limits)
    chats: BodyDecoder[ChatRequest] = BodyDecoder(ChatRequest, limits)

    @router.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one or more prompts."""
        ready = services.ready()
        body = await completions.decode(await services.bodies.read(request))
        params = completion_params(body, ready.model.front.default_sampling, limits)
        prompts = prompt_list(body, limits, max(params.n, body.best_of or 1))

        def answer(timeline: Timeline) -> Answer:
            job = services.job(ready, request, body, timeline, num_together=len(prompts))
            return CompletionAnswer(job, body, params, prompts)

        return await respond(services, request, body, answer)

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        ready = services.ready()
        body = await chats.decode(await services.bodies.read(request))
        tools, defaults = asked_tools(body), ready.model.front.default_sampling
        params = chat_params(body, defaults, limits, must_call=tools.must_call)
        form = answer_form(tools, body, ready.model)

        def answer(timeline: Timeline) -> Answer:
            return ChatAnswer(services.job(ready, request, body, timeline), body, params, form)

        return await respond(services, request, body, answer)

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """The served model, under each of its names, and its adapters. Clients of the Messages API,
        which name its version, get the fields that they read too."""
        model = services.backend.require().model
        adapters = [] if model.adapters is None else model.adapters.names
        cards = [_model_card(services, request, name) for name in (*model.names, *adapters)]
        found: dict[str, Any] = {"object": "list", "data": cards}
        if MESSAGES_VERSION in request.headers:
            ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
            found = {**found, **ends, "has_more": False}
        return Response(encode(found), media_type=JSON)

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(request: Request, model_id: str) -> Response:
        """One name of the served model."""
        services.backend.require().model.adapter_of(model_id)
        return Response(encode(_model_card(services, request, model_id)), media_type=JSON)

    @router.post("/v1/load_lora_adapter", openapi_extra=body_of(AdapterRequest))
    async def load_lora_adapter(request: Request) -> Response:
        """Serve one more adapter, from the folder for adapters."""
        body = await adapters.decode(await services.bodies.read(request))
        served = _served_adapters(services)
        name, path = body.lora_name, body.lora_path or body.lora_name
        await served.load(name, path, replace=bool(body.load_inplace))
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", openapi_extra=body_of(AdapterRequest))
    async def unload_lora_adapter(request: Request) -> Response:
        """Stop serving an adapter; requests that use it go on."""
        body = await adapters.decode(await services.bodies.read(request))
        _served_adapters(services).unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _served_adapters(services: Services) -> ServedAdapters:
    served = services.backend.require().model.adapters
    if served is None:
        raise RefusedError("This server takes no LoRA adapters. Start it with --enable-lora.")
    if services.settings.api_server_count > 1:
        raise RefusedError(
            "Several fronts serve here, and only one of them would know the adapter. Put it into "
            "--lora-folder, where each finds it by its name."
        )
    return served


def generating_routes(router: APIRouter) -> list[APIRoute]:
    """Return the routes of a router that take most of the load."""
    return [
        route
        for route in router.routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ()) and "{" not in route.path
    ]


def _model_card(services: Services, request: Request, name: str) -> dict[str, Any]:
    ready = services.backend.require()
    adapter = ready.model.adapter_of(name)
    adapters = ready.model.adapters
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": ready.model.created,
        "owned_by": "quire",
        "root": ready.model.root if adapter is None or adapters is None else adapters.path(adapter),
        "parent": None if adapter is None else ready.model.names[0],
        "max_model_len": ready.capacity.max_model_len,
        "default_sampling_params": dict(ready.model.front.default_sampling),
        "permission": [],
    }
    if MESSAGES_VERSION not in request.headers:
        return card
    created = datetime.fromtimestamp(ready.model.created, UTC)
    most = card["max_model_len"]
    unknown = ("capabilities", "deprecated_at", "line", "retires_at")
    return {
        **card,
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": most,
        "max_tokens": most,
        **dict.fromkeys(unknown),
    }
