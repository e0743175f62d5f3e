"""The tokenizer of a model folder, on the `tokenizers` library alone."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire.base.errors import ConfigError, EngineError, RequestError
from quire.config.gguf import is_gguf
from quire.protocol.codec import is_unicode
from quire.text.rendering.chat_template.control_tokens import ChatText, ControlTokens
from quire.text.rendering.detokenize import IncrementalDetokenizer
from quire.text.rendering.folder import TokenizerFiles, TokenSpec, read_tokenizer_files
from quire.text.rendering.gguf import read_gguf_tokenizer
from quire.text.rendering.pieces import DecoderPlan, byte_level_bytes, clean_up_spaces, plan_decoder
from quire.text.rendering.token_table import TokenTable

if TYPE_CHECKING:
    import tokenizers

# Beyond this length the variant that computes no offsets is faster than the plain one.
_LONG_TEXT = 2048
# The library keeps ids in 32 bits and refuses larger ones.
_LARGEST_ID = 0xFFFFFFFF
# Texts that `ids_holding` remembers; each may name most of the vocabulary.
_MOST_KNOWN_TEXTS = 64
# transformers 5 rebuilds the pipeline of these, whatever tokenizer.json says (its LlamaTokenizer).
_REBUILT_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_REBUILT_MODEL_TYPES = (None, "llama")


class Tokenizer:
    """Text to token ids and back, with the ids that transformers 5 gives for the same folder.

    Safe to share between threads: after construction only its memory of texts changes. Whether BOS
    or EOS is added follows from the post-processor stored in tokenizer.json; as in transformers 5
    the flags `add_bos_token` and `add_eos_token` of tokenizer_config.json have no say beside it.

    `decode` equals transformers too, with one exception: if byte-fallback tokens form valid
    characters and invalid bytes in one run, the valid characters are kept. (Turning them to U+FFFD
    after the fact would take back text that was already streamed.)
    """

    def __init__(self, backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> None:
        self._backend = backend
        self._files = files
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._plan = _decoder_plan(backend)
        is_bpe = type(backend.model).__name__ == "BPE"
        self._cleans_up_spaces = files.cleans_up_spaces and not is_bpe
        self._tables = {skip: TokenTable(self, self._plan, skip) for skip in (True, False)}
        self._holding: dict[str, tuple[int, ...]] = {}
        self._named = {name: token.content for name, token in files.named.items()}
        taken = (  # others are no tokens in a text
            (token.content, index)
            for index, token in added.items()
            if not (token.special and files.splits_special_tokens)
        )
        unknown = (self._named.get("unk_token"), getattr(backend.model, "unk_token", None))
        unknown_ids = frozenset(i for i, token in added.items() if token.content in unknown)
        self._control_tokens = ControlTokens(backend, dict(taken), self._special_ids, unknown_ids)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Load the tokenizer of a model folder or GGUF file; ConfigError when a file is missing or
        broken."""
        if is_gguf(Path(path)):
            return cls(*read_gguf_tokenizer(Path(path)))
        files = read_tokenizer_files(path)
        return cls(_load_backend(files), files)

    def digest(self) -> str:
        """Return a digest of all that decides its ids and texts, in hexadecimal."""
        flags = repr(replace(self._files, tokenizer_file=Path()))
        content = f"{self._backend.to_str()}\0{flags}".encode()
        return hashlib.blake2b(content, digest_size=32, person=b"quire tokenizer").hexdigest()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (the model may have more embeddings)."""
        return self._vocab_size

    @property
    def num_model_tokens(self) -> int:
        """Number of tokens of the model's vocabulary, without those that were added to it."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    @property
    def declared_special_tokens(self) -> list[str]:
        """Special tokens that the files name one by one, in `special_tokens` or elsewhere."""
        extra = (token.content for token in self._files.extra)
        return list(dict.fromkeys((*self._named.values(), *extra)))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` removes."""
        return self._special_ids

    @property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens, `bos_token`, `eos_token`, ..., as chat templates see them."""
        return dict(self._named)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the begin-of-sequence token."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token."""
        return self._named_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        """Id of the token for unknown text."""
        return self._named_id("unk_token")

    @property
    def model_max_length(self) -> int | None:
        """The limit in tokens that the files state, None without one."""
        return self._files.model_max_length

    @property
    def control_tokens(self) -> ControlTokens:
        """Tokens that templates write turns with."""
        return self._control_tokens

    @property
    def decoder_plan(self) -> DecoderPlan:
        """Rules that turn token strings into text."""
        return self._plan

    @property
    def cleans_up_spaces(self) -> bool:
        """True if decoded text goes through `clean_up_spaces`."""
        return self._cleans_up_spaces

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; RequestError when it is not valid Unicode."""
        if len(text) > _LONG_TEXT:
            return self.encode_batch([text], add_special_tokens)[0]
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise _not_text(text) from error

    def encode_chat(self, chat: ChatText, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered chat; RequestError as in `encode`."""
        if chat.own is None:
            return self.encode(chat.text, add_special_tokens)
        if not _is_text(chat.text):
            raise _not_text(chat.text)
        found = self._control_tokens.encode(chat.text, chat.own)
        if not add_special_tokens:
            return found
        bare, whole = self.encode("a", False), self.encode("a")
        starts = range(len(whole) - len(bare) + 1)
        first = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
        return [*whole[:first], *found, *whole[first + len(bare) :]]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text, computed in parallel; RequestError as in `encode`."""
        try:
            found = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise next((_not_text(text) for text in texts if not _is_text(text)), error) from error
        return [encoding.ids for encoding in found]

    def encode_pair(
        self, first: str, second: str, most: int | None = None
    ) -> tuple[list[int], int]:
        """Token ids of two texts as the post-processor joins them, and where those begin that it
        counts to the second; 0 if it makes no difference. most: tokens in all, to which the longer
        text is cut, then both in turn. RequestError as in `encode`, or if there is no room."""
        try:
            whole = self._backend.encode(first, second)
            if most is not None and len(whole.ids) > most:
                whole = self._cut_pair(first, second, most)
        except TypeError as error:
            faults = (_not_text(text) for text in (first, second) if not _is_text(text))
            raise next(faults, error) from error
        types = whole.type_ids
        return whole.ids, types.index(1) if 1 in types else 0

    def _cut_pair(self, first: str, second: str, most: int) -> "tokenizers.Encoding":
        room = most - self._backend.num_special_tokens_to_add(is_pair=True)
        if room < 2:
            raise RequestError(
                f"A pair of texts is to have at most {most} tokens, which leaves no room for them. "
                "Allow more."
            )
        pair = [self._backend.encode(text, add_special_tokens=False) for text in (first, second)]
        shorter, longer = sorted(pair, key=lambda each: len(each.ids))
        num_short = min(len(shorter.ids), room // 2)
        shorter.truncate(num_short)
        longer.truncate(room - num_short)
        return self._backend.post_process(pair[0], pair[1])

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return where in `text` each token of `encode` begins, in characters. Tokens that are part
        of a character begin with it; those that encoding adds have no length. RequestError as in
        `encode`."""
        try:
            found = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise _not_text(text) from error
        offsets: list[int] = []
        start = end = 0
        last: int | None = None
        spans = zip(found.ids, found.offsets, found.special_tokens_mask, strict=True)
        for token_id, (first, past), is_mark in spans:
            if is_mark:
                offsets.append(max(start, end))
                continue
            if first > end:
                first = end + self._num_left_over(text[end:first], last)
            start, end, last = max(start, first), max(end, past), token_id
            offsets.append(start)
        return offsets

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `token_ids`; ids beyond the vocabulary add nothing.

        `spaces_between_special_tokens` matters to decoders that write spaces between tokens.
        """
        if min(token_ids, default=0) < 0:
            index, token_id = next((i, value) for i, value in enumerate(token_ids) if value < 0)
            raise RequestError(
                f"Token id {token_id} at index {index} is negative. "
                f"Token ids of this model run from 0 to {self._vocab_size - 1}."
            )
        if spaces_between_special_tokens or self._plan.kind != "pieces":
            text = self.raw_decode(token_ids, skip_special_tokens)
            if not (self._plan.byte_fallback and "\ufffd" in text):
                return clean_up_spaces(text) if self._cleans_up_spaces else text
        stream = IncrementalDetokenizer(
            self,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return stream.append(token_ids) + stream.finish()

    def raw_decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of all `token_ids` as the `tokenizers` library gives it."""
        known = list(token_ids)
        if max(known, default=0) > _LARGEST_ID:
            known = [token_id for token_id in known if token_id <= _LARGEST_ID]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int, *, starts_text: bool = False) -> bytes:
        """The bytes that the token adds inside a text, or at its start; empty for an id without a
        token. A decoder that looks at neighbours may add others."""
        token = self.token_string(token_id)
        if token is None:
            return b""
        if self._plan.kind == "bytes":
            return byte_level_bytes(token)
        if self._plan.kind == "pieces":
            piece = self._plan.piece(token)
            if starts_text:
                return self._plan.at_start(piece)
            return piece.later.encode("utf-8") if piece.byte is None else bytes((piece.byte,))
        return self.raw_decode([token_id], skip_special_tokens=False).encode("utf-8")

    def token_text(self, token_id: int) -> str:
        """The text that the token adds inside a text; U+FFFD for part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None for an id without one."""
        if token_id < 0:
            raise EngineError(
                f"Token id {token_id} reached the tokenizer: a placeholder was taken for a token. "
                "Report this as a bug."
            )
        return None if token_id > _LARGEST_ID else self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, None when there is none."""
        return self._backend.token_to_id(token)

    def token_ids(self, tokens: Iterable[str]) -> list[int | None]:
        """`token_id` for each token."""
        return [self.token_id(token) for token in tokens]

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` removes the token."""
        return token_id in self._special_ids

    def is_added(self, token_id: int) -> bool:
        """Return whether the token was added beside the model's vocabulary."""
        return token_id in self._added_ids

    def vocabulary(self) -> dict[str, int]:
        """Token string → id, added tokens included (a copy)."""
        return self._backend.get_vocab(with_added_tokens=True)

    def token_table(self, skip_special_tokens: bool) -> TokenTable:
        """Return the texts that tokens add, shared by all detokenizers."""
        return self._tables[skip_special_tokens]

    def ids_holding(self, text: str) -> tuple[int, ...]:
        """Return the tokens that add a text with `text` in it."""
        found = self._holding.get(text)
        if found is None:
            wanted = text.encode("utf-8")
            found = tuple(i for i, token in enumerate(self._token_bytes) if wanted in token)
            if len(self._holding) >= _MOST_KNOWN_TEXTS:
                self._holding.clear()
            self._holding[text] = found
        return found

    @cached_property
    def _token_bytes(self) -> tuple[bytes, ...]:
        return tuple(self.token_bytes(token_id) for token_id in range(self._vocab_size))

    def _num_left_over(self, gap: str, last: int | None) -> int:
        """Characters of `gap`, which no token covers, that belong to the token before it. Some
        post-processors take white space off both ends of what a token covers; normalizers drop
        characters."""
        if gap.strip() or last is None:
            return len(gap.rstrip())
        text = self.token_text(last)
        return min(len(gap), len(text) - len(text.rstrip())) if text.strip() else 0

    def _named_id(self, name: str) -> int | None:
        token = self._named.get(name)
        return None if token is None else self.token_id(token)


def _load_backend(files: TokenizerFiles) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(files.tokenizer_file))
    # The library raises a bare Exception for a file that it cannot read.
    except Exception as error:
        raise ConfigError(
            f"The tokenizer file {str(files.tokenizer_file)!r} cannot be loaded ({error}). "
            "Download it again, or save it anew with the newest `tokenizers` library."
        ) from error
    # A stored limit would cut prompts silently; a stored padding would lengthen them.
    backend.no_truncation()
    backend.no_padding()
    if _is_rebuilt(backend, files):
        _rebuild_like_llama(backend, files)
    _add_declared_tokens(backend, files)
    backend.encode_special_tokens = files.splits_special_tokens
    return backend


def _add_declared_tokens(backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> None:
    """Add what tokenizer_config.json declares and tokenizer.json lacks, in transformers' order."""
    import tokenizers

    def added_token(spec: TokenSpec) -> tokenizers.AddedToken:
        return tokenizers.AddedToken(
            spec.content,
            single_word=spec.single_word,
            lstrip=spec.lstrip,
            rstrip=spec.rstrip,
            normalized=spec.normalized,
            special=spec.special,
        )

    present = backend.get_added_tokens_decoder().values()
    same = {repr(token) for token in present}
    declared = [token for token in map(added_token, files.added) if repr(token) not in same]
    known = {token.content for token in present} | {token.content for token in declared}
    for spec in (*files.named.values(), *files.extra):
        if spec.content not in known:
            known.add(spec.content)
            declared.append(added_token(spec))
    if declared:
        backend.add_tokens(declared)  # pyright: ignore[reportUnknownMemberType]


def _is_rebuilt(backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> bool:
    return (
        files.tokenizer_class in _REBUILT_CLASSES
        and files.model_type in _REBUILT_MODEL_TYPES
        and type(backend.model).__name__ == "BPE"
        and _decoder_plan(backend).kind != "bytes"
    )


def _rebuild_like_llama(backend: "tokenizers.Tokenizer", files: TokenizerFiles) -> None:
    """Spaces as markers without a normalizer, one marker before the first word.

    Old files put a marker after every special token as well, which the SentencePiece original
    never did unless `legacy` was on.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    prefix = files.adds_prefix_space is not False
    scheme = ("always" if files.legacy else "first") if prefix else "never"
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
    steps: list[Any] = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)


def _decoder_plan(backend: "tokenizers.Tokenizer") -> DecoderPlan:
    decoder: Any = backend.decoder
    if decoder is None:
        return plan_decoder(None)
    return plan_decoder(cast("dict[str, Any]", json.loads(decoder.__getstate__())))


def _is_text(text: object) -> bool:
    return isinstance(text, str) and is_unicode(text)


def _not_text(text: object) -> RequestError:
    if not isinstance(text, str):
        return RequestError(
            f"A prompt of type {type(text).__name__} is not text. Send a string or token ids."
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return RequestError(
            f"The text has the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is not valid Unicode. Send the character that the pair of "
            "surrogates stands for, or leave it out."
        )
    return RequestError("The text cannot be tokenized. Send valid Unicode text.")
