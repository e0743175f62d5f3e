"""The routes of the OpenAI API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from quire.server.generation.adapters import ServedAdapters
from quire.server.generation.prompts import prompt_list
from quire.server.openai.chat import ChatAnswer, ChatCompletion
from quire.server.openai.completions import CompletionAnswer, TextCompletion
from quire.server.openai.sampling import chat_params, completion_params
from quire.server.openai.tools import answer_form, asked_tools
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import AdapterRequest, ChatRequest, CompletionRequest
from quire.server.requests.errors import RefusedError
from quire.server.routes.route import TEXT, Answer, Call, Needs, Route, respond

__all__ = ["ROUTES"]

MESSAGES_VERSION = "anthropic-version"
"""Header of clients of the Messages API."""


class ModelCard(msgspec.Struct, kw_only=True):
    """A name of the served model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    default_sampling_params: dict[str, Any]
    input_modalities: list[str]
    permission: list[Any]


class MessagesModelCard(ModelCard, kw_only=True):
    """The same, with the fields that clients of the Messages API read too."""

    type: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int
    max_tokens: int
    capabilities: None = None
    deprecated_at: None = None
    line: None = None
    retires_at: None = None


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


class MessagesModelList(ModelList):
    first_id: str
    last_id: str
    has_more: bool


async def create_completion(call: Call[CompletionRequest]) -> Response:
    """Continue one or more prompts."""
    ready, body = call.ready, call.body
    params = completion_params(body, ready.model.front.default_sampling, call.limits)
    prompts = prompt_list(body, call.limits, max(params.n, body.best_of or 1))

    def answer(timeline: Timeline) -> Answer:
        together = len(prompts)
        job = call.services.job(ready, call.request, body, timeline, num_together=together)
        return CompletionAnswer(job, body, params, prompts)

    return await respond(call, body, answer)


async def create_chat_completion(call: Call[ChatRequest]) -> Response:
    """Answer a conversation."""
    ready, body = call.ready, call.body
    tools, defaults = asked_tools(body), ready.model.front.default_sampling
    params = chat_params(body, defaults, call.limits, must_call=tools.must_call)
    form = answer_form(tools, body, ready.model)

    def answer(timeline: Timeline) -> Answer:
        job = call.services.job(ready, call.request, body, timeline)
        return ChatAnswer(job, body, params, form)

    return await respond(call, body, answer)


async def list_models(call: Call[None]) -> ModelList:
    """The served model, under each of its names, and its adapters. Clients of the Messages API,
    which name its version, get the fields that they read too."""
    model = call.ready.model
    adapters = [] if model.adapters is None else model.adapters.names
    cards = [_model_card(call, name) for name in (*model.names, *adapters)]
    if MESSAGES_VERSION not in call.request.headers:
        return ModelList("list", cards)
    return MessagesModelList("list", cards, cards[0].id, cards[-1].id, has_more=False)


async def retrieve_model(call: Call[None]) -> ModelCard:
    """One name of the served model."""
    return _model_card(call, call.part("model_id"))


async def load_lora_adapter(call: Call[AdapterRequest]) -> str:
    """Serve one more adapter, from the folder for adapters."""
    body, served = call.body, _served_adapters(call)
    name, path = body.lora_name, body.lora_path or body.lora_name
    await served.load(name, path, replace=bool(body.load_inplace))
    return f"Success: LoRA adapter '{name}' added successfully."


async def unload_lora_adapter(call: Call[AdapterRequest]) -> str:
    """Stop serving an adapter; requests that use it go on."""
    _served_adapters(call).unload(call.body.lora_name)
    return f"Success: LoRA adapter '{call.body.lora_name}' removed successfully."


def _served_adapters(call: Call[AdapterRequest]) -> ServedAdapters:
    served = call.services.backend.require().model.adapters
    if served is None:
        raise RefusedError("This server takes no LoRA adapters. Start it with --enable-lora.")
    if call.services.settings.api_server_count > 1:
        raise RefusedError(
            "Several fronts serve here, and only one of them would know the adapter. Put it into "
            "--lora-folder, where each finds it by its name."
        )
    return served


def _model_card(call: Call[None], name: str) -> ModelCard:
    model = call.ready.model
    adapter = model.adapter_of(name)
    path = None if adapter is None or model.adapters is None else model.adapters.path(adapter)
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "root": model.root if path is None else path,
        "parent": None if adapter is None else model.names[0],
        "max_model_len": call.ready.capacity.max_model_len,
        "default_sampling_params": dict(model.front.default_sampling),
        "input_modalities": ["text", *(["image"] if model.front.renderer.takes_images else [])],
        "permission": [],
    }
    if MESSAGES_VERSION not in call.request.headers:
        return ModelCard(**card)
    return MessagesModelCard(
        **card,
        type="model",
        display_name=name,
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat(),
        lifecycle="active",
        max_input_tokens=card["max_model_len"],
        max_tokens=card["max_model_len"],
    )


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        create_completion,
        CompletionRequest,
        TextCompletion,
        needs=Needs.ROOM,
        streams=True,
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        ChatRequest,
        ChatCompletion,
        needs=Needs.ROOM,
        streams=True,
        refuses=(507,),
    ),
    Route("GET", "/v1/models", list_models, answer=ModelList, needs=Needs.ENGINE),
    Route(
        "GET", "/v1/models/{model_id:path}", retrieve_model, answer=ModelCard, needs=Needs.ENGINE
    ),
    Route("POST", "/v1/load_lora_adapter", load_lora_adapter, AdapterRequest, str, media=TEXT),
    Route("POST", "/v1/unload_lora_adapter", unload_lora_adapter, AdapterRequest, str, media=TEXT),
)
