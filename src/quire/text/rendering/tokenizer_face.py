"""The tokenizer as users of `transformers` know it: the names and meanings, not the library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.base.foreign import ForeignName, check_foreign, missing_attribute
from quire.text.rendering.renderer import Renderer
from quire.text.rendering.tokenizer import Tokenizer

__all__ = ["TokenizerFace"]

_FIXED = "the tokenizer of a running engine does not change"
_MISSING: Mapping[str, str] = {
    **dict.fromkeys(
        ("add_tokens", "add_special_tokens", "train_new_from_iterator", "resize"), _FIXED
    ),
    **dict.fromkeys(
        ("pad", "prepare_for_model", "build_inputs_with_special_tokens"),
        "prompts of a batch are not padded: give them as lists of their own lengths",
    ),
    **dict.fromkeys(
        ("save_pretrained", "push_to_hub", "from_pretrained", "save_vocabulary", "init_kwargs"),
        "it belongs to the engine; the files are in the model's folder",
    ),
    **dict.fromkeys(
        ("backend_tokenizer", "_tokenizer", "sp_model"), "what is behind it is not shown"
    ),
    "image_processor": "images are prepared by the renderer",
}
_ONE_LENGTH = ForeignName("each text has a list of its own length; nothing is padded", ("longest",))
_LISTS = ForeignName("ids come as lists; torch.tensor makes a tensor of one")
_FOREIGN: Mapping[str, ForeignName] = {
    "padding": _ONE_LENGTH,
    "padding_side": _ONE_LENGTH,
    "pad_to_multiple_of": _ONE_LENGTH,
    "return_tensors": _LISTS,
    "return_overflowing_tokens": ForeignName("nothing is cut off but by max_length"),
    "stride": ForeignName("nothing is cut off but by max_length", ("0",)),
    "text_pair": ForeignName("one text at a time is tokenized"),
    "text_target": ForeignName("one text at a time is tokenized"),
    "is_split_into_words": ForeignName("texts are tokenized whole"),
    "return_token_type_ids": ForeignName("no model reads them"),
    "return_attention_mask": ForeignName("it is always there", ("true",)),
    "return_special_tokens_mask": ForeignName("all_special_ids tells which tokens are special"),
    "return_length": ForeignName("len() of a list tells it"),
    "verbose": ForeignName("nothing is printed", None),
    "clean_up_tokenization_spaces": ForeignName("the model's files say whether", None),
    "use_source_tokenizer": ForeignName("there is one tokenizer", None),
    "split_special_tokens": ForeignName("the model's files say whether"),
    "return_assistant_tokens_mask": ForeignName("nothing is trained here"),
    "tokenizer_kwargs": ForeignName("apply_chat_template takes truncation and max_length itself"),
}


class Encoding(dict[str, Any]):
    """input_ids and attention_mask, by key or as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise missing_attribute("what the tokenizer returned", name, {})


class TokenizerFace:
    """Tokenizer that `LLM.get_tokenizer()` returns. Ids and texts are those of the engine's own
    tokenizer, so they are those of requests."""

    is_fast = True
    truncation_side = "right"

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self._own = tokenizer
        self._renderer = renderer

    @classmethod
    def of(cls, renderer: Renderer) -> TokenizerFace | None:
        """None where the engine has no tokenizer."""
        return None if renderer.tokenizer is None else cls(renderer.tokenizer, renderer)

    # --- text to ids ----------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        text_pair: None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        **others: Any,
    ) -> list[int]:
        """Return token ids of one text. truncation: keep `max_length` of them, or
        `model_max_length`."""
        _check("encode", {"text_pair": text_pair, **others})
        found = self._own.encode(text, add_special_tokens)
        return found[: max_length or self.model_max_length] if truncation else found

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_offsets_mapping: bool = False,
        **others: Any,
    ) -> Encoding:
        """input_ids and attention_mask of one text, or lists of them."""
        _check("a tokenizer", {"text_pair": text_pair, **others})
        is_one = isinstance(text, str)
        texts: list[str] = [text] if is_one else list(text)
        ids = [
            self.encode(each, None, add_special_tokens, truncation, max_length) for each in texts
        ]
        found: dict[str, list[Any]] = {
            "input_ids": ids,
            "attention_mask": [[1] * len(each) for each in ids],
        }
        if return_offsets_mapping:
            found["offset_mapping"] = [
                self._spans(each, add_special_tokens)[: len(kept)]
                for each, kept in zip(texts, ids, strict=True)
            ]
        return Encoding({name: each[0] if is_one else each for name, each in found.items()})

    encode_plus = batch_encode_plus = __call__

    def tokenize(self, text: str, add_special_tokens: bool = False, **others: Any) -> list[str]:
        """Tokens of a text as the vocabulary spells them."""
        _check("tokenize", others)
        ids = self._own.encode(text, add_special_tokens)
        return [self._own.token_string(each) or "" for each in ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_dict: bool = False,
        **others: Any,
    ) -> Any:
        """The prompt of a conversation: its ids; with tokenize False its text; with return_dict
        input_ids and attention_mask. Several conversations give a list of these. Other arguments
        are variables of the template."""
        foreign = {name: others.pop(name) for name in list(others) if name in _FOREIGN}
        _check("apply_chat_template", foreign)
        if conversation and not isinstance(conversation[0], Mapping):
            options: dict[str, Any] = {**others, "return_dict": False}
            several = [
                self.apply_chat_template(
                    each, tools, documents, chat_template, add_generation_prompt,
                    continue_final_message, tokenize, truncation, max_length, **options,
                )
                for each in conversation
            ]  # fmt: skip
            return _with_masks(several) if return_dict and tokenize else several
        template = None if chat_template is None else self._renderer.request_template(chat_template)
        rendered = self._renderer.render_chat(
            conversation,
            tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=template,
            chat_template_kwargs=others,
        )
        if not tokenize:
            return rendered.text
        ids = rendered.token_ids
        if truncation:
            ids = ids[: max_length or self.model_max_length]
        return (
            Encoding({"input_ids": ids, "attention_mask": [1] * len(ids)}) if return_dict else ids
        )

    # --- ids to text ----------------------------------------------------------------------------

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
        **others: Any,
    ) -> Any:
        """The text of ids: a list, a tensor or one id. Of a list of lists: a list of texts."""
        _check("decode", others)
        ids = _as_ids(token_ids)
        if ids and isinstance(ids[0], list):
            return self.batch_decode(ids, skip_special_tokens)
        return self._own.decode(ids, skip_special_tokens, spaces_between_special_tokens)

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, **others: Any
    ) -> list[str]:
        """The text of each sequence of ids."""
        _check("batch_decode", others)
        return [self._own.decode(_as_ids(each), skip_special_tokens) for each in sequences]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Tokens as the vocabulary spells them; None for an id without one."""
        if isinstance(ids, int):
            return self._own.token_string(ids)
        special = self._own.special_ids if skip_special_tokens else frozenset[int]()
        return [self._own.token_string(each) for each in _as_ids(ids) if each not in special]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Ids of tokens; that of the unknown token, or None, for a text that is none."""
        if isinstance(tokens, str):
            found = self._own.token_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(each) for each in tokens]

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """The text of tokens."""
        return self._own.decode(self.convert_tokens_to_ids(list(tokens)), False)

    # --- what there is --------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._own.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model's vocabulary, without those that were added to it."""
        return self._own.num_model_tokens

    def get_vocab(self) -> dict[str, int]:
        """Token → id, added tokens included."""
        return self._own.vocabulary()

    vocab = property(get_vocab)

    def get_added_vocab(self) -> dict[str, int]:
        """Return the tokens of `get_vocab` that were added."""
        return {token: each for token, each in self.get_vocab().items() if self._own.is_added(each)}

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of `all_special_tokens`; skip_special_tokens leaves out more, if more were added."""
        found = (self._own.token_id(token) for token in self.all_special_tokens)
        return [token_id for token_id in found if token_id is not None]

    @property
    def all_special_tokens(self) -> list[str]:
        """Special tokens that the model's files name."""
        return self._own.declared_special_tokens

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Named special tokens."""
        return self._own.special_tokens

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template."""
        template = self._renderer.chat_template
        return None if template is None else template.source()

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str | None:
        """The template for a conversation, with tools or without."""
        own = self._renderer.chat_template
        if chat_template is not None or own is None:
            return chat_template
        return own.source("tool_use" if tools and "tool_use" in own.names else "default")

    @property
    def model_max_length(self) -> int:
        """The limit that the files state; 10**30, as in transformers, without one."""
        return self._own.model_max_length or 10**30

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Number of tokens that encoding adds to a text."""
        _check("num_special_tokens_to_add", {"text_pair": pair})
        return len(self._own.encode("a")) - len(self._own.encode("a", add_special_tokens=False))

    def _spans(self, text: str, add_special_tokens: bool) -> list[tuple[int, int]]:
        starts = self._own.offsets(text, add_special_tokens)
        return list(zip(starts, [*starts[1:], len(text)], strict=True))

    def __getattr__(self, name: str) -> Any:
        """`bos_token`, `eos_token_id` and so on, and the engine's own names."""
        named = self._own.special_tokens
        token = name.removesuffix("_id")
        if token.endswith("_token") and token.partition("_")[0] in _NAMED:
            found = named.get(token)
            if name == token or found is None:
                return found
            return self._own.token_id(found)
        if not name.startswith("_") and hasattr(self._own, name):
            return getattr(self._own, name)
        raise missing_attribute("the tokenizer", name, _MISSING)


_NAMED = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


def _check(what: str, given: Mapping[str, Any]) -> None:
    check_foreign(RequestError, what, _FOREIGN, given)


def _with_masks(ids: list[list[int]]) -> Encoding:
    return Encoding({"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]})


def _as_ids(token_ids: Any) -> list[Any]:
    """A list of what may be an id, a tensor or an array."""
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()
    return [token_ids] if isinstance(token_ids, int) else list(token_ids)
