"""The front door of the room: prompts and conversations to token ids, tokens to text."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, cast

from quire.base.errors import ConfigError, RequestError, quoted
from quire.base.foreign import ForeignName, check_foreign
from quire.config.gguf import is_gguf
from quire.protocol.adapters import AdapterRef
from quire.protocol.codec import is_unicode
from quire.protocol.media import Media, MediaInfo
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import IntArray, no_ints
from quire.text.rendering.chat_template.control_tokens import ChatText, Spans
from quire.text.rendering.chat_template.template import ChatTemplate
from quire.text.rendering.detokenize import IncrementalDetokenizer, TokenOffsets, has_text
from quire.text.rendering.folder import require_folder
from quire.text.rendering.media.door import EmbedsPart, MediaPart
from quire.text.rendering.media.images import ImageRenderer
from quire.text.rendering.media.parts import IMAGE_FIELDS, images_of, in_order, take_images
from quire.text.rendering.media.sources import ImageSource
from quire.text.rendering.message_check import TEXT_ONLY
from quire.text.rendering.messages import ArgumentsForm, checked_messages, fit_arguments
from quire.text.rendering.output import OutputRenderer
from quire.text.rendering.tokenizer import Tokenizer

LONGEST_TAIL = 64
"""Tokens that a template writes behind the last message, at most."""

_PROMPT_KEYS = frozenset(
    {"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", *IMAGE_FIELDS}
)
_FOREIGN_KEYS: Mapping[str, ForeignName] = {
    "mm_processor_kwargs": ForeignName("the engine takes it, for all prompts"),
    "encoder_prompt": ForeignName("no model has an encoder"),
    "decoder_prompt": ForeignName("no model has an encoder; give it as the prompt"),
    "token_type_ids": ForeignName("no model reads them"),
    "priority": ForeignName("generate(…, priority=…) takes it", ("0",)),
    "type": ForeignName("the other keys tell it", None),
}


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Token ids for the engine, with the text they came from (None when ids were given).

    salt: prompts of other salts share no cached prefix with it. media: parts of the prompt that are
    embeddings and that the engine has. parts: media to give to the engine first; a prompt of
    embeddings has no tokens before. prediction: token ids of the output that the client expects.
    adapter: adapter that computes it. second_start: see `EngineRequest`.
    own: control tokens of the text that its template wrote, if content has others (`ChatText`).
    """

    token_ids: list[int]
    text: str | None = None
    salt: str = ""
    media: tuple[Media, ...] = ()
    parts: tuple[MediaPart, ...] = ()
    adapter: AdapterRef | None = None
    prediction: tuple[int, ...] = ()
    second_start: int = 0
    own: Spans | None = None

    def with_media(self, infos: Sequence[MediaInfo], handles: Sequence[int]) -> Self:
        """Return the prompt when the engine has its parts under `handles`. infos: its answers."""
        media, token_ids = self.media, self.token_ids
        for part, info, handle in zip(self.parts, infos, handles, strict=True):
            placed = part.placed(info, handle)
            media += placed.media
            token_ids = token_ids if placed.token_ids is None else placed.token_ids
        return replace(self, token_ids=token_ids, media=media, parts=())

    @property
    def known_token_ids(self) -> list[int]:
        """Token ids after which an output goes on: none if some are not known."""
        is_embeds = sum(each.span.length for each in self.media) == len(self.token_ids)
        return [] if is_embeds else self.token_ids

    def last(self, length: int) -> "RenderedPrompt":
        """Its last `length` tokens, or itself if it is no longer than that. Raises RequestError if
        it has embeddings."""
        if len(self.token_ids) <= length or length < 1:
            return self
        if self.media or self.parts:
            raise RequestError(
                "truncate_prompt_tokens cannot cut images or prompt_embeds. Send fewer of them, or "
                "leave it out."
            )
        return replace(self, token_ids=self.token_ids[-length:], text=None)

    def first(self, length: int) -> "RenderedPrompt":
        """Return its first tokens and the closing one, `length` in all, or itself if it is no
        longer: the form in which encoders get a long text. Raises RequestError for a pair of texts,
        which is cut when it is rendered."""
        if len(self.token_ids) <= length or length < 1:
            return self
        if self.second_start:
            raise RequestError("a pair of texts is too long: allow more tokens, or shorten it")
        return replace(
            self, token_ids=[*self.token_ids[: length - 1], self.token_ids[-1]], text=None
        )


Prompt = str | Sequence[int] | Mapping[str, Any] | RenderedPrompt
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, which may have a cache_salt and
`IMAGE_FIELDS`, {"prompt_embeds": tensor}, or what a renderer made of one of these."""


class RendersChats(Protocol):
    """A chat template, or what stands for one (`ChatTemplate`)."""

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None: ...

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **kwargs: Any,
    ) -> str: ...

    def arguments_form(
        self,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        continue_final_message: bool | str = False,
        **kwargs: Any,
    ) -> ArgumentsForm: ...


class Renderer:
    """Everything about text for one model; safe to share between threads.

    Without a `tokenizer` only token ids go in, and outputs have no text. `vocab_size` is the number
    of embeddings of the model, which bounds the token ids that a request may send; None takes the
    tokenizer's. control_tokens_in_content: text of a message that spells a control token is that
    token. images: preparation of images; None for a model that takes text only. finds_message_ends:
    the engine asks where messages end, since the model has recurrent states.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None = None,
        vocab_size: int | None = None,
        *,
        control_tokens_in_content: bool = False,
        images: ImageRenderer | None = None,
        finds_message_ends: bool = False,
    ) -> None:
        if vocab_size is None and tokenizer is None:
            raise ConfigError(
                "A Renderer without tokenizer got no vocab_size, so it cannot check token ids. "
                "Pass the vocab_size of the model."
            )
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._takes_control_tokens = control_tokens_in_content
        self._images = images
        self._finds_message_ends = finds_message_ends
        self._vocab_size = vocab_size or (tokenizer.vocab_size if tokenizer else 0)

    @property
    def takes_images(self) -> bool:
        """True if chats may have images."""
        return self._images is not None

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        vocab_size: int | None = None,
        skip_tokenizer_init: bool = False,
        chat_template: str | Path | None = None,
        control_tokens_in_content: bool = False,
        images: Callable[[Tokenizer], ImageRenderer] | None = None,
        finds_message_ends: bool = False,
    ) -> "Renderer":
        """Load tokenizer and chat template of a model folder or GGUF file.

        `chat_template` replaces the model's own: a path, or the text of a template. images: makes
        what prepares images. Raises
        ConfigError when it, or a file of the tokenizer, is missing or broken. A broken template of
        the model's own only disables chat.
        """
        folder = Path(path) if is_gguf(Path(path)) else require_folder(path)
        if skip_tokenizer_init:
            return cls(None, None, vocab_size)
        tokenizer = Tokenizer.from_folder(folder)
        special = tokenizer.special_tokens
        if chat_template is None:
            template = ChatTemplate.from_folder(folder, special)
        else:
            template = ChatTemplate(_template_text(chat_template), special, is_given=True)
        return cls(
            tokenizer,
            template,
            vocab_size,
            control_tokens_in_content=control_tokens_in_content,
            images=None if images is None else images(tokenizer),
            finds_message_ends=finds_message_ends,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None when the engine runs without."""
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template, None when the model has none."""
        return self._chat_template

    @property
    def images(self) -> ImageRenderer | None:
        """Preparation of images, None for a model that takes text only."""
        return self._images

    @property
    def vocab_size(self) -> int:
        """Token ids of requests lie below this."""
        return self._vocab_size

    def render_prompt(self, prompt: Prompt, add_special_tokens: bool = True) -> RenderedPrompt:
        """Token ids of one prompt, or embeddings as they were given.

        Raises RequestError for an empty prompt, a token id outside the vocabulary, text without a
        tokenizer, or a prompt of another form.
        """
        if isinstance(prompt, RenderedPrompt):
            return prompt
        text: Any = None
        token_ids: Any = prompt
        salt = ""
        if isinstance(prompt, Mapping):
            if "prompt_embeds" in prompt:
                return RenderedPrompt([], parts=(EmbedsPart(_embeds_of(prompt)),))
            sources = images_of(prompt)
            if sources:
                bare = {key: prompt[key] for key in prompt if key not in IMAGE_FIELDS}
                return self._with_images(self.render_prompt(bare, add_special_tokens), sources)
            text, token_ids, salt = _prompt_fields(prompt)
        elif isinstance(prompt, str):
            text, token_ids = prompt, None
        if token_ids is not None:
            return RenderedPrompt(self._checked_ids(token_ids), text, salt)
        if not isinstance(text, str):
            raise RequestError(
                f"The prompt is {quoted(text)}. Send a string or a list of token ids."
            )
        found = self._require_tokenizer("a text prompt").encode(text, add_special_tokens)
        if not found:
            raise RequestError(
                f"The prompt {quoted(text)} has no tokens of its own. Send at least one character."
            )
        return RenderedPrompt(self._within_vocabulary(found), text, salt)

    def render_pair(self, first: str, second: str, most: int | None = None) -> RenderedPrompt:
        """Token ids of two texts, which a cross-encoder compares. most: tokens to which they are
        cut. RequestError as in `render_prompt`."""
        tokenizer = self._require_tokenizer("a pair of texts")
        for text in (first, second):
            if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError(f"A text of the pair is {quoted(text)}. Send a string.")
        token_ids, second_start = tokenizer.encode_pair(first, second, most)
        return RenderedPrompt(self._within_vocabulary(token_ids), second_start=second_start)

    def render_chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        chat_template: RendersChats | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        max_prompt_chars: int | None = None,
        images: Sequence[ImageSource] = (),
    ) -> RenderedPrompt:
        """Token ids of a conversation. images: images that `take_images` took out of the messages.

        Chat templates write BOS themselves, so none is added by default. `chat_template` replaces
        the model's for this call. Raises RequestError as `ChatTemplate.render` does, when there is
        no template or no tokenizer, and when the prompt is longer than `max_prompt_chars`, which
        is found before it is tokenized. Texts of messages and tools that are spelled like control
        tokens stay texts (`ControlTokens`).
        """
        tokenizer = self._require_tokenizer("a chat")
        if images:
            self._require_images(images)
        template = chat_template or self._chat_template
        if template is None:
            raise RequestError(
                "This model has no chat template, so messages cannot be turned into a prompt. "
                "Use completions, or start with --chat-template FILE."
            )
        if isinstance(template, ChatTemplate):
            template.check_roles(messages)
        variables = dict(chat_template_kwargs or {})
        template.check_kwargs(variables)
        form = template.arguments_form(tools, documents, continue_final_message, **variables)

        def render(values: dict[str, Any]) -> str:
            return template.render(
                values["messages"],
                values["tools"],
                values["documents"],
                add_generation_prompt,
                continue_final_message,
                **values["variables"],
            )

        try:
            checked, images = in_order(checked_messages(messages, text_only=True), images)
            given = {
                # Escapes in JSON may spell a control token. The text that is searched must be the
                # one shown.
                "messages": fit_arguments(checked, form),
                "tools": tools,
                "documents": documents,
                "variables": variables,
            }
            if self._takes_control_tokens:
                chat = ChatText(render(given))
            else:
                chat = tokenizer.control_tokens.rendered(render, given)
        except RecursionError as error:
            raise RequestError(
                "messages, tools or documents are nested too deep. Send what is nested less."
            ) from error
        text = chat.text
        if max_prompt_chars is not None and len(text) > max_prompt_chars:
            raise RequestError(
                f"The chat template made a prompt of {len(text)} characters of these messages, but "
                f"at most {max_prompt_chars} are taken (max_prompt_chars). Send less."
            )
        token_ids = tokenizer.encode_chat(chat, add_special_tokens)
        if not token_ids:
            raise RequestError(
                "The chat template made an empty prompt of these messages. "
                "Send a message with content."
            )
        found = RenderedPrompt(self._within_vocabulary(token_ids), text, own=chat.own)
        return self._with_images(found, images) if images else found

    def _with_images(
        self, prompt: RenderedPrompt, sources: Sequence[ImageSource]
    ) -> RenderedPrompt:
        """Return the prompt with images in the places that its image tokens mark. RequestError for
        a model that takes none, and as of `ImageRenderer`."""
        images = self._require_images(sources)
        token_ids, parts = images.place(prompt.token_ids, images.prepare_all(sources))
        return replace(prompt, token_ids=token_ids, parts=parts)

    def _require_images(self, sources: Sequence[ImageSource]) -> ImageRenderer:
        if self._images is None:
            raise RequestError(f"{sources[0].place} is an image. {TEXT_ONLY}")
        self._images.check_number(len(sources))
        return self._images

    def take_images(self, messages: Any) -> tuple[Any, tuple[ImageSource, ...]]:
        """Return messages with marks in place of images, and the images, as `render_chat` takes
        both. A model that takes text only leaves images where they are, to be refused there."""
        return (messages, ()) if self._images is None else take_images(messages)

    def last_end(self, token_ids: IntArray) -> int:
        """Return the number of tokens after which what a template writes behind the last message
        begins, found as `ControlTokens.message_ends` does; all of them if there is no such place
        near the end."""
        if self._tokenizer is None:
            return len(token_ids)
        start = max(len(token_ids) - LONGEST_TAIL, 0)
        ends = self._tokenizer.control_tokens.message_ends(token_ids[start:])
        return start + int(ends[-1]) if len(ends) else len(token_ids)

    def message_ends(self, token_ids: IntArray) -> IntArray:
        """Return where messages of a prompt end (`ControlTokens.message_ends`); empty if the model
        has no use for it."""
        if self._tokenizer is None or not self._finds_message_ends:
            return no_ints()
        return self._tokenizer.control_tokens.message_ends(token_ids)

    def request_template(self, source: str) -> ChatTemplate:
        """The chat template that a request brought itself; RequestError when it is broken.

        It runs in the sandbox, but it is a stranger's code: let only trusted clients send one.
        """
        special = self._require_tokenizer("a chat template").special_tokens
        try:
            return ChatTemplate(source, special, is_given=True)
        except ConfigError as error:
            raise RequestError(str(error)) from error

    def count(self, prompt: Prompt, add_special_tokens: bool = True) -> int:
        """Number of tokens of a prompt; RequestError as in `render_prompt`, and for embeddings."""
        rendered = self.render_prompt(prompt, add_special_tokens)
        if rendered.parts and not rendered.token_ids:
            raise RequestError("The prompt is embeddings. Count its rows.")
        return len(rendered.token_ids)

    def stop_tokens(self, stops: Sequence[str]) -> dict[int, str]:
        """Return the stop strings that are one special token, by its id. Such a token ends a
        sequence although its text may never be seen (`skip_special_tokens`)."""
        if self._tokenizer is None:
            return {}
        ids = zip(self._tokenizer.token_ids(stops), stops, strict=True)
        return {
            token_id: stop
            for token_id, stop in ids
            if token_id is not None
            and token_id < self._vocab_size
            and self._tokenizer.is_special(token_id)
        }

    def output_of(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> OutputRenderer:
        """A renderer for one sample of a request with `params`; it continues `prompt_token_ids`.
        eos_token_ids: end tokens of the model."""
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_token_ids=prompt_token_ids,
            )
        return OutputRenderer(
            detokenizer,
            params.stop_strings,
            stop_tokens=self.stop_tokens(params.stop_strings),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            eos_token_ids=eos_token_ids,
        )

    def prompt_text(self, prompt: RenderedPrompt, params: SamplingParams) -> str:
        """The text of a prompt; one of token ids reads as an output of `params` would."""
        if prompt.text is not None or self._tokenizer is None:
            return prompt.text or ""
        return self._tokenizer.decode(
            prompt.token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
        )

    def prompt_offsets(
        self, prompt: RenderedPrompt, params: SamplingParams, add_special_tokens: bool = True
    ) -> list[int]:
        """Return where in `prompt_text` each token of the prompt begins. add_special_tokens: same
        as when the prompt was rendered."""
        if self._tokenizer is None:
            return [0] * len(prompt.token_ids)
        if prompt.text is not None:
            return self._tokenizer.offsets(prompt.text, add_special_tokens)
        return _offsets(self._tokenizer, (), params).append(prompt.token_ids)

    def output_offsets(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, start: int = 0
    ) -> TokenOffsets | None:
        """Return the offsets of one sample's tokens, which continue `prompt_token_ids` after
        `start` characters; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return _offsets(self._tokenizer, prompt_token_ids, params, start)

    def continues_text(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> bool:
        """Return whether an output has text before it: at the start of a text some tokens
        differ."""
        return self._tokenizer is not None and has_text(
            self._tokenizer, prompt_token_ids, params.skip_special_tokens
        )

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"The request has {what}, but the engine runs without a tokenizer "
                "(skip_tokenizer_init). Send prompt_token_ids."
            )
        return self._tokenizer

    def _checked_ids(self, values: Any) -> list[int]:
        """A list of ints within the vocabulary; numpy integers are taken, booleans are not."""
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise RequestError(
                f"The token ids of the prompt are {quoted(cast('object', values))}. "
                "Send a list of integers."
            )
        items = list(cast("Iterable[Any]", values))
        if not items:
            raise RequestError("The prompt has no tokens. Send at least one token id.")
        if set(map(type, items)) != {int}:
            items = [_as_token_id(value, index) for index, value in enumerate(items)]
        return self._within_vocabulary(cast("list[int]", items))

    def _within_vocabulary(self, token_ids: list[int]) -> list[int]:
        if min(token_ids) >= 0 and max(token_ids) < self._vocab_size:
            return token_ids
        index, token_id = next(
            (index, token_id)
            for index, token_id in enumerate(token_ids)
            if not 0 <= token_id < self._vocab_size
        )
        raise RequestError(
            f"Token id {token_id} at index {index} of the prompt is outside the vocabulary of "
            f"{self._vocab_size} tokens. Send ids from 0 to {self._vocab_size - 1}."
        )


def _offsets(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    start: int = 0,
) -> TokenOffsets:
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        prompt_token_ids=prompt_token_ids,
    )
    return TokenOffsets(detokenizer, start)


def _prompt_fields(prompt: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """Text, token ids and salt."""
    unknown = sorted(set(prompt) - _PROMPT_KEYS - _FOREIGN_KEYS.keys(), key=str)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    foreign = {name: value for name, value in prompt.items() if name in _FOREIGN_KEYS}
    check_foreign(RequestError, "a prompt", _FOREIGN_KEYS, foreign)
    if unknown or (text is None and token_ids is None):
        problem = "neither text nor token ids nor embeddings"
        if unknown:
            problem = f"the unknown key {unknown[0]!r}"
        raise RequestError(
            f'The prompt object has {problem}. Send {{"prompt": text}}, '
            '{"prompt_token_ids": [ids]} or {"prompt_embeds": tensor}.'
        )
    if text is not None and not isinstance(text, str):
        raise RequestError(f'"prompt" is {quoted(text)}. It must be a string.')
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise RequestError(f'"cache_salt" is {quoted(salt)}. It must be a string.')
    if not is_unicode(salt):
        raise RequestError(
            f'"cache_salt" is {quoted(salt)}, which has half of a surrogate pair. '
            "Send valid Unicode."
        )
    return text, token_ids, salt


def _embeds_of(prompt: Mapping[str, Any]) -> object:
    others = sorted(set(prompt) - {"prompt_embeds"}, key=str)
    if others or prompt["prompt_embeds"] is None:
        problem = f"beside {others[0]!r}" if others else "without a value"
        raise RequestError(
            f'The prompt object has "prompt_embeds" {problem}. Send {{"prompt_embeds": tensor}} '
            "alone: a tensor [number of tokens, hidden size]."
        )
    return prompt["prompt_embeds"]


def _as_token_id(value: Any, index: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except Exception as error:  # tensors have an index too, which fails if they are no integers
        raise RequestError(
            f"The token id at index {index} of the prompt is {quoted(value)}. "
            "It must be an integer."
        ) from error


def _template_text(source: str | Path) -> str:
    """Text that has template syntax is a template itself, anything else is the path of one."""
    if isinstance(source, str) and ("{{" in source or "{%" in source or "\n" in source):
        return source
    path = Path(source)
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The chat template {str(path)!r} cannot be read ({error}). "
            "Give the path of a UTF-8 file, or the template itself."
        ) from error
