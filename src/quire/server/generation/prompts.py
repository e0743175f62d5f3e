"""Turns prompts and conversations into tokens, without stalling the streams of others.

Short ones are rendered at once, which is cheaper than switching threads. Long ones go to a small
pool of threads, since `tokenizers` works outside of the interpreter lock.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import msgspec

from quire.base.errors import RequestError
from quire.protocol.json_schema import num_chars_to_read
from quire.protocol.sampling_params import SamplingParams
from quire.server.generation.kept_images import KeptImages
from quire.server.generation.render_pool import RenderPool
from quire.server.requests.bodies import ChatRequest, CompletionRequest, TokenizeRequest
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.text.dialect import Dialect
from quire.text.dialect.conversation import described, prepared
from quire.text.dialect.harmony import own_template
from quire.text.rendering import RenderedPrompt, Renderer, RendersChats, check_messages
from quire.text.rendering.media.door import EmbedsPart
from quire.text.rendering.media.sources import ImageSource, is_remote
from quire.text.rendering.message_check import IMAGE_MARK

__all__ = ["EmbedsPrompt", "Prompt", "PromptRenderer", "check_context", "prompt_list"]

SHORT_CHARS = 2048
"""Characters that are tokenized in about the time of a round trip to a thread."""

CHARS_PER_MESSAGE = 64
"""Characters whose tokenizing takes about as long as a template's work on an empty message."""

SLOW_TEMPLATE_S = 0.02
"""Processor seconds of a slow template. A usual one takes a hundredth of that for a short chat."""

FETCH_THREADS, FETCH_TIMEOUT_S = 8, 30.0
"""Threads that fetch images, and seconds for one image, waiting for a thread included."""

FETCHES_TOGETHER = 4
"""Most threads that fetch images of one request, so that a slow host leaves some to others."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """A prompt of embeddings. base64: their file."""

    base64: str


Prompt = str | list[int] | EmbedsPrompt


class PromptRenderer:
    """Renders for all requests. Raises RefusedError or RequestError if a prompt cannot be
    rendered."""

    def __init__(
        self,
        limits: Limits,
        num_threads: int,
        kept_images: KeptImages | None = None,
        *,
        trust_templates: bool = False,
    ) -> None:
        """kept_images: images of the server that requests may name; None if it has none."""
        self._limits = limits
        self._kept_images = kept_images
        self._trust_templates = trust_templates
        self._pool = RenderPool(num_threads, limits.render_timeout_s)
        self._fetches = RenderPool(FETCH_THREADS, FETCH_TIMEOUT_S)
        self._has_slow_template = False

    def close(self) -> None:
        self._pool.close()
        self._fetches.close()

    async def render_prompt(
        self,
        renderer: Renderer,
        prompt: str | list[int],
        max_model_len: int,
        *,
        add_special_tokens: bool = True,
    ) -> RenderedPrompt:
        """Render a text or token ids."""
        if isinstance(prompt, str):
            self._check_chars(len(prompt), max_model_len, "prompt")
        work = functools.partial(renderer.render_prompt, prompt, add_special_tokens)
        try:
            return await self._run(work, len(prompt))
        except RequestError as error:
            raise RefusedError(str(error), param="prompt") from error

    async def render_pair(
        self,
        renderer: Renderer,
        first: str,
        second: str,
        max_model_len: int,
        most: int | None,
    ) -> RenderedPrompt:
        """Render two texts for a cross-encoder, cut to `most` tokens if given."""
        num_chars = len(first) + len(second)
        self._check_chars(num_chars, max_model_len, "prompt")
        work = functools.partial(renderer.render_pair, first, second, most)
        return await self._run(work, num_chars)

    async def first_tokens(
        self, renderer: Renderer, text: str, most: int, max_model_len: int
    ) -> str:
        """Return the beginning of a text that has at most so many tokens. What is longer than any
        prompt is cut before it is tokenized."""
        if renderer.tokenizer is None:
            raise RefusedError("This server has no tokenizer, so it takes no texts. Send tokens.")
        text = text[: self._limits.prompt_chars(max_model_len)]
        starts = await self._run(
            functools.partial(renderer.tokenizer.offsets, text, add_special_tokens=False), len(text)
        )
        return text[: starts[most]] if len(starts) > most else text

    async def render_embeds(self, prompt: EmbedsPrompt) -> RenderedPrompt:
        """Decode embeddings, which the engine reads."""
        work = functools.partial(base64.b64decode, prompt.base64, validate=True)
        try:
            data = await self._run(work, len(prompt.base64))
        except ValueError as error:
            raise RefusedError(
                f"prompt_embeds is no base64: {error}", param="prompt_embeds"
            ) from None
        return RenderedPrompt([], parts=(EmbedsPart(data),))

    async def render_chat(
        self,
        renderer: Renderer,
        body: ChatRequest | TokenizeRequest,
        max_model_len: int,
        dialect: Dialect | None = None,
        tools_text: str = "",
        *,
        tenant: str,
    ) -> RenderedPrompt:
        """Render messages through the model's chat template or, if trusted, the request's own.
        dialect: dialect of the model. tools_text: describes the tools to templates that have no
        place for them. tenant: caller, for the images that it has here."""
        taken, images = renderer.take_images(cast("object", body.messages))
        messages = self._checked_messages(taken)
        if images:
            images = await self._fetched(renderer, images, tenant)
        if dialect is not None:
            messages = prepared(messages, dialect)
        num_chars = _num_message_chars(messages) + _num_other_chars(body)
        self._check_chars(num_chars, max_model_len, "messages")
        most = self._limits.prompt_chars(max_model_len)
        template = own_template(dialect, renderer.chat_template)
        work = functools.partial(
            self._render_chat, renderer, body, messages, most, tools_text, template, images
        )
        own = body.chat_template if isinstance(body, ChatRequest) else None
        if own is not None:
            self._check_template(own)
        if images:
            return await self._with_images(work, renderer, images, tenant)
        size = num_chars + CHARS_PER_MESSAGE * len(messages)
        is_slow = self._has_slow_template or _needs_time(renderer, body, messages)
        if own is not None or size > SHORT_CHARS or is_slow:  # `own` is yet to be compiled
            return await self._pool.run(work)
        return self._timed(work)

    async def render_prediction(
        self, renderer: Renderer, prompt: RenderedPrompt, text: str, max_model_len: int
    ) -> RenderedPrompt:
        """Return the prompt with its tokenized prediction, cut to the longest possible answer."""
        self._check_chars(len(text), max_model_len, "prediction")
        if renderer.tokenizer is None:
            raise RefusedError(
                "prediction is a text, but this server has no tokenizer. Leave it out.",
                param="prediction",
            )
        work = functools.partial(renderer.tokenizer.encode, text, add_special_tokens=False)
        token_ids = await self._run(work, len(text))
        return replace(prompt, prediction=tuple(token_ids[:max_model_len]))

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """Run other work on text. size: number of characters or tokens."""
        return await self._run(work, size)

    async def _run(self, work: Callable[[], Result], size: int) -> Result:
        if size <= SHORT_CHARS:
            return work()
        return await self._pool.run(work)

    def _timed(self, work: Callable[[], Result]) -> Result:
        """Run work on a short chat at once. If the model's template proves slow, later ones go to
        the threads, since the event loop must not stand still."""
        started = time.thread_time()
        try:
            return work()
        finally:
            if time.thread_time() - started > SLOW_TEMPLATE_S:
                self._has_slow_template = True

    def _render_chat(
        self,
        renderer: Renderer,
        body: ChatRequest | TokenizeRequest,
        messages: list[dict[str, Any]],
        max_prompt_chars: int,
        tools_text: str,
        template: RendersChats | None,
        images: Sequence[ImageSource],
    ) -> RenderedPrompt:
        """template: chat template of the model. images: images taken out of the messages."""
        continues = bool(body.continue_final_message)
        variables = dict(body.chat_template_kwargs or {})
        documents = None
        if isinstance(body, ChatRequest):
            documents = body.documents
            if body.reasoning_effort is not None:
                variables = {**_effort_variables(body.reasoning_effort), **variables}
            if body.verbosity is not None:
                variables = {"verbosity": body.verbosity, **variables}
            if body.chat_template is not None:
                template = renderer.request_template(body.chat_template)
        asked = body.add_generation_prompt
        render = functools.partial(
            renderer.render_chat,
            documents=documents,
            add_generation_prompt=not continues if asked is None else asked,
            continue_final_message=continues,
            chat_template=template,
            chat_template_kwargs=variables,
            add_special_tokens=bool(body.add_special_tokens),
            max_prompt_chars=max_prompt_chars,
            images=images,
        )
        if not tools_text:
            return render(messages, body.tools)
        try:
            return render(described(messages, tools_text), body.tools)
        except RequestError:  # some templates refuse a system message
            return render(described(messages, tools_text, in_system=False), body.tools)

    async def _with_images(
        self,
        render: Callable[[], RenderedPrompt],
        renderer: Renderer,
        images: Sequence[ImageSource],
        tenant: str,
    ) -> RenderedPrompt:
        """Render a chat with images, and keep those that the caller has named."""
        prompt = await self._pool.run(render)
        own, kept = renderer.images, self._kept_images
        if own is not None and kept is not None and any(each.uuid for each in images):
            await self._pool.run(functools.partial(kept.keep, images, tenant, own.access))
        return prompt

    async def _fetched(
        self, renderer: Renderer, images: Sequence[ImageSource], tenant: str
    ) -> tuple[ImageSource, ...]:
        """Return images, those of http: and https: URLs as bytes, which are fetched side by side,
        and those that the server keeps. The name of one that it keeps no more stands for the image
        of that name in the same request, which may be a later turn of the conversation. Raises
        RequestError for too many images, for a URL that may not be fetched, and for an image that
        is not there."""
        own, kept = renderer.images, self._kept_images
        assert own is not None, "it took the images"
        own.check_number(len(images))
        turns = asyncio.Semaphore(FETCHES_TOGETHER)
        sent = {each.uuid: each for each in images if each.uuid and each.value is not None}

        async def fetched(image: ImageSource) -> ImageSource:
            if kept is not None and kept.has(image):
                read = functools.partial(kept.read, image, tenant, own.access.max_bytes)
                uuid = None if image.value is None else image.uuid  # one that is kept stays so
                try:
                    return replace(image, value=await self._pool.run(read), uuid=uuid)
                except RequestError:
                    if image.value is not None or image.uuid not in sent:
                        raise
                given = await fetched(sent[image.uuid])
                return replace(image, value=given.value, uuid=None)
            if not (isinstance(image.value, str) and is_remote(image.value)):
                return image
            work = functools.partial(own.access.fetch, image.value, image.place)
            async with turns:
                return replace(image, value=await self._fetches.run(work))

        tasks = [asyncio.ensure_future(fetched(image)) for image in images]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # one has failed, or the client has left
                task.cancel()

    def _check_template(self, source: str) -> None:
        if not self._trust_templates:
            raise RefusedError(
                "chat_template is given, but this server takes no templates from requests. Leave "
                "it out, or start the server with --trust-request-chat-template.",
                param="chat_template",
            )
        most = self._limits.max_chat_template_chars
        if len(source) > most:
            raise RefusedError(
                f"chat_template has {len(source)} characters, but this server takes {most} "
                "(max_chat_template_chars). Send a shorter one, or start the server with it "
                "(--chat-template).",
                param="chat_template",
            )

    def _checked_messages(self, messages: object) -> list[dict[str, Any]]:
        limits = self._limits
        items = cast("list[Any]", messages) if isinstance(messages, list) else []
        if len(items) > limits.max_messages:
            raise RefusedError(
                f"There are {len(items)} messages, but this server takes {limits.max_messages} "
                "(max_messages). Send fewer.",
                param="messages",
            )
        for index, message in enumerate(items):
            fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
            content: Any = fields.get("content")
            if isinstance(content, list):
                self._check_num_parts(len(cast("list[Any]", content)), index)
        check_messages(cast("object", messages), text_only=True)
        return items

    def _check_num_parts(self, num_parts: int, index: int) -> None:
        if num_parts > self._limits.max_content_parts:
            raise RefusedError(
                f"messages[{index}].content has {num_parts} parts, but this server takes "
                f"{self._limits.max_content_parts} (max_content_parts). Send fewer.",
                param="messages",
            )

    def _check_chars(self, num_chars: int, max_model_len: int, param: str) -> None:
        highest = self._limits.prompt_chars(max_model_len)
        if num_chars > highest:
            raise RefusedError(
                f"This model's maximum context length is {max_model_len} tokens. The "
                f"{'prediction' if param == 'prediction' else 'prompt'} has "
                f"{num_chars} characters, which is more than is worth tokenizing "
                f"(max_prompt_chars, {highest}). Shorten it.",
                param=param,
            )


def _needs_time(
    renderer: Renderer, body: ChatRequest | TokenizeRequest, messages: list[dict[str, Any]]
) -> bool:
    """Return True if control tokens in what was sent make the first such chat a slow one, or the
    schemas of tools take long to read."""
    if body.tools and num_chars_to_read(body.tools) > SHORT_CHARS:
        return True
    tokenizer = renderer.tokenizer
    given: list[object] = [messages, body.tools, body.chat_template_kwargs]
    if isinstance(body, ChatRequest):
        given += (body.documents, body.reasoning_effort)
    return tokenizer is not None and tokenizer.control_tokens.needs_time(given)


def _num_message_chars(messages: Sequence[dict[str, Any]]) -> int:
    num_chars = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            num_chars += len(content)
        elif isinstance(content, list):
            num_chars += sum(map(_num_part_chars, cast("list[Any]", content)))
        others = {k: v for k, v in message.items() if k not in ("role", "content")}
        num_chars += _num_chars(others)
    return num_chars


def _num_part_chars(part: str | dict[str, Any]) -> int:
    """Count the characters of a part of text."""
    if isinstance(part, dict):
        if part.get("type") == IMAGE_MARK:
            return 0
        part = part["refusal" if part.get("type") == "refusal" else "text"]
    return len(part)


def _num_other_chars(body: ChatRequest | TokenizeRequest) -> int:
    """Count the characters that a template may write beside the messages."""
    documents = body.documents if isinstance(body, ChatRequest) else None
    return sum(map(_num_chars, (documents, body.chat_template_kwargs, body.tools)))


def _effort_variables(effort: str) -> dict[str, Any]:
    """Return the variables for a reasoning effort: templates read the word, or a switch."""
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def _num_chars(value: object) -> int:
    """Count roughly the characters that a template would write of this value."""
    return len(msgspec.json.encode(value)) if value else 0


def prompt_list(body: CompletionRequest, limits: Limits, n: int) -> list[Prompt]:
    """Return the prompts of a completion request: first embeddings, then texts or token ids. An
    empty text beside embeddings is dropped, since some clients must send one.

    Raises RefusedError if kinds are mixed, there are none, or prompts × n exceeds the limit.
    """
    embeds = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    prompts: list[Prompt] = [EmbedsPrompt(each) for each in embeds or ()]
    if prompts:
        _check_with_embeds(body)
    if not (prompts and not body.prompt):
        prompts += _text_prompts(body.prompt)
    if len(prompts) * n > limits.max_sequences:
        raise RefusedError(
            f"The request has {len(prompts)} prompts x n = {n}, but this server takes "
            f"{limits.max_sequences} sequences at once (max_sequences). Send fewer.",
            param="prompt",
        )
    return prompts


def _check_with_embeds(body: CompletionRequest) -> None:
    """Raise RefusedError for options that need the tokens of embeddings, which are unknown."""
    asked = {
        "echo": body.echo,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise RefusedError(
            f"{name} is given with prompt_embeds, which have no tokens that it could be about. "
            "Leave it out.",
            param=name,
        )


def _text_prompts(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    if prompt is None:
        raise RefusedError("prompt is missing. Send it, or prompt_embeds.", param="prompt")
    prompts: list[str | list[int]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [cast("list[int]", prompt)]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        if len(prompts) != len(prompt) or not prompts:
            fault = "mixes token ids with prompts" if prompt else "is an empty list"
            raise RefusedError(
                f"prompt {fault}. Send a text, a list of texts, a list of token ids, or a list of "
                "such lists.",
                param="prompt",
            )
    return prompts


def check_context(
    prompt: RenderedPrompt,
    params: SamplingParams,
    max_model_len: int,
    truncate: int | None = None,
    limit_field: str | None = "max_tokens",
) -> RenderedPrompt:
    """Return the prompt, cut to its last `truncate` tokens if asked (-1: to the room that the
    answer leaves). Raises RefusedError, in words that clients look for, if it does not fit the
    context.

    limit_field: the request's field that bounds the answer; None if `params.max_tokens` is a
    default, which shrinks to the room that is left.
    """
    num_wanted = params.max_tokens or 1
    if limit_field is None:
        num_wanted = max(params.min_tokens, 1)
        limit_field = "min_tokens" if params.min_tokens else None
    if truncate is not None:
        beside = "" if limit_field is None else f" beside {num_wanted} of {limit_field}"
        prompt = _truncated(prompt, truncate, max_model_len - num_wanted, beside)
    num_prompt = len(prompt.token_ids)
    if num_prompt + num_wanted > max_model_len:
        raise RefusedError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {num_prompt + num_wanted} tokens ({num_prompt} in the prompt, "
            f"{num_wanted} in the completion). Please reduce the length of the prompt or of the "
            f"completion{'' if limit_field is None else f' ({limit_field})'}.",
            param=limit_field if num_prompt < max_model_len else None,
        )
    return prompt


def _truncated(prompt: RenderedPrompt, truncate: int, room: int, beside: str) -> RenderedPrompt:
    """beside: words for the rest of the context's use."""
    length = room if truncate == -1 else truncate
    if truncate != -1 and not 1 <= truncate <= room:
        raise RefusedError(
            f"truncate_prompt_tokens is {truncate}, but the context leaves {max(room, 0)} tokens "
            f"to the prompt{beside}. Give a number from 1 to that, or -1 for as many.",
            param="truncate_prompt_tokens",
        )
    return prompt.last(length)
