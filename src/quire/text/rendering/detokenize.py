"""Token ids to text as they come, without ever splitting a character.

Law: for any ids and any way to cut them, the deltas together equal `Tokenizer.decode` of all ids.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from quire.text.rendering.pieces import clean_up_spaces
from quire.text.rendering.token_table import SKIPPED, TokenTable

REPLACEMENT = "\ufffd"
# The longest pattern of clean_up_spaces has 4 characters; with no space in twice that many, none
# can still begin.
_CLEANUP_REACH = 8
# Tokens of the prompt that an opaque decoder sees as context.
_OPAQUE_CONTEXT = 6


class TextStream(Protocol):
    """Ids in, text out."""

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` add for certain."""
        ...

    @property
    def held(self) -> str:
        """Text that `finish` would give now."""
        ...

    def finish(self) -> str:
        """The text still held: incomplete characters as U+FFFD."""
        ...


class ByteStream:
    """Byte-level tokens. At most 3 bytes, the begin of one character, are held."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._whole = table.whole
        self._held = b""

    def append(self, token_ids: Sequence[int]) -> str:
        """The complete characters that `token_ids` add."""
        whole = self._whole
        parts: list[str] = []
        for token_id in token_ids:
            text = None if self._held else whole.get(token_id)
            parts.append(self._decode(token_id) if text is None else text)
        return parts[0] if len(parts) == 1 else "".join(parts)

    @property
    def held(self) -> str:
        """U+FFFD for a character that is not complete yet."""
        return self._held.decode("utf-8", "replace")

    def finish(self) -> str:
        """U+FFFD for a character that never got complete."""
        held, self._held = self.held, b""
        return held

    def _decode(self, token_id: int) -> str:
        data = self._table.data.get(token_id)
        if data is None:
            data = self._table.load_bytes(token_id)
        data = self._held + data
        text, num_used = utf_8_decode(data, "replace", False)
        self._held = data[num_used:]
        return text


class PieceStream:
    """SentencePiece-like and word-piece tokens.

    A run of byte tokens is decoded character by character; an invalid byte becomes one U+FFFD and
    leaves its neighbours alone, so text never waits for the end of the run.
    """

    def __init__(
        self, table: TokenTable, continues_text: bool, spaces_between_special_tokens: bool
    ) -> None:
        self._table = table
        self._pieces = table.pieces
        self._started = continues_text
        self._strip_character, self._num_to_strip = table.plan.strip
        if continues_text:
            self._num_to_strip = 0
        self._joins_added = not spaces_between_special_tokens
        self._after_added = False
        self._held = b""

    def append(self, token_ids: Sequence[int]) -> str:
        """The complete characters that `token_ids` add."""
        pieces = self._pieces
        parts: list[str] = []
        for token_id in token_ids:
            piece = pieces.get(token_id)
            if piece is None:
                piece = self._table.load_piece(token_id)
            if piece is SKIPPED:
                continue
            if piece.byte is not None:
                parts.append(self._take_byte(piece.byte))
            else:
                if self._held:
                    parts.append(self._release())
                parts.append(piece.later if self._started else piece.first)
            self._started = True
            if self._joins_added:
                self._join_added(token_id, parts)
        return self._strip("".join(parts)) if self._num_to_strip else "".join(parts)

    @property
    def held(self) -> str:
        """U+FFFD for each byte of a character that is not complete yet."""
        return REPLACEMENT * len(self._held)

    def finish(self) -> str:
        """U+FFFD for each byte of a character that never got complete."""
        return self._strip(self._release())

    def _take_byte(self, byte: int) -> str:
        data = self._held + bytes((byte,))
        text = ""
        while data:
            try:
                characters, num_used = utf_8_decode(data, "strict", False)
            except UnicodeDecodeError as error:
                text += REPLACEMENT * (error.end - error.start)
                data = data[error.end :]
                continue
            text, data = text + characters, data[num_used:]
            break
        self._held = data
        return text

    def _release(self) -> str:
        num_bytes, self._held = len(self._held), b""
        return REPLACEMENT * num_bytes

    def _join_added(self, token_id: int, parts: list[str]) -> None:
        """Between two added tokens in a row no space is written."""
        text = self._table.added_text(token_id)
        if text is not None and self._after_added:
            parts[-1] = text
        self._after_added = text is not None

    def _strip(self, text: str) -> str:
        start = 0
        while start < len(text) and self._num_to_strip:
            if text[start] != self._strip_character:
                self._num_to_strip = 0
                break
            start += 1
            self._num_to_strip -= 1
        return text[start:]


class OpaqueStream:
    """Decoders that look across tokens: a sliding window of tokens is decoded twice.

    Exact when the decoder's result for a token depends on close neighbours only.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(context)
        self._window_start = 0
        self._read_end = len(self._ids)

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` add, unless it ends within a character."""
        parts: list[str] = []
        for token_id in token_ids:
            self._ids.append(token_id)
            shown = self._decode(self._ids[self._window_start : self._read_end])
            text = self._decode(self._ids[self._window_start :])
            if text.endswith(REPLACEMENT) or not text.startswith(shown):
                continue
            parts.append(text[len(shown) :])
            self._window_start = max(self._window_start, self._read_end - 1)
            self._read_end = len(self._ids)
        return "".join(parts)

    @property
    def held(self) -> str:
        """Text that the window still holds."""
        if self._read_end == len(self._ids):
            return ""
        shown = self._decode(self._ids[self._window_start : self._read_end])
        return self._decode(self._ids[self._window_start :])[len(shown) :]

    def finish(self) -> str:
        """Return the text that the window still holds."""
        held = self.held
        self._window_start = self._read_end = len(self._ids)
        return held


class SpaceCleaner:
    """`clean_up_spaces` over another stream: holds back what a later character could change."""

    def __init__(self, source: TextStream) -> None:
        self._source = source
        self._held = ""

    def append(self, token_ids: Sequence[int]) -> str:
        """The cleaned text that no later token can change."""
        text = self._held + self._source.append(token_ids)
        cut = len(text)
        if " " in text[-_CLEANUP_REACH:]:
            cut = text.rfind(" ")
            while cut > 0 and text[cut - 1] in " '":
                cut = text.rfind(" ", 0, cut)
            cut = max(cut, 0)
        self._held = text[cut:]
        return clean_up_spaces(text[:cut])

    @property
    def held(self) -> str:
        """The rest, if nothing follows."""
        return clean_up_spaces(self._held + self._source.held)

    def finish(self) -> str:
        """The rest."""
        text, self._held = self._held + self._source.finish(), ""
        return clean_up_spaces(text)


class DetokenizerSource(Protocol):
    """Interface of a tokenizer to `IncrementalDetokenizer`."""

    @property
    def cleans_up_spaces(self) -> bool:
        """True if decoded text goes through `clean_up_spaces`."""
        ...

    def token_table(self, skip_special_tokens: bool) -> TokenTable:
        """Return the text that each token adds."""
        ...

    def raw_decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of all `token_ids`, before `clean_up_spaces`."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` removes the token."""
        ...


def has_text(
    tokenizer: DetokenizerSource, token_ids: Sequence[int], skip_special_tokens: bool
) -> bool:
    """Return whether any of `token_ids` is shown, so that later tokens continue a text."""
    return any(
        not (skip_special_tokens and tokenizer.is_special(token_id)) for token_id in token_ids
    )


class IncrementalDetokenizer:
    """The text of one growing sequence.

    `prompt_token_ids` is what precedes the output. With it, the output is the continuation of a
    text: a SentencePiece-like tokenizer then keeps the space before its first word. (A character
    whose first bytes are in the prompt and whose last are in the output becomes U+FFFD.)
    """

    def __init__(
        self,
        tokenizer: DetokenizerSource,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        table = tokenizer.token_table(skip_special_tokens)
        stream: TextStream
        if table.plan.kind == "bytes":
            stream = ByteStream(table)
        elif table.plan.kind == "pieces":
            continues = has_text(tokenizer, prompt_token_ids, skip_special_tokens)
            stream = PieceStream(table, continues, spaces_between_special_tokens)
        else:

            def decode(token_ids: Sequence[int]) -> str:
                return tokenizer.raw_decode(token_ids, skip_special_tokens)

            stream = OpaqueStream(decode, prompt_token_ids[-_OPAQUE_CONTEXT:])
        self._stream = SpaceCleaner(stream) if tokenizer.cleans_up_spaces else stream

    @property
    def held(self) -> str:
        """The text that `finish` would give now."""
        return self._stream.held

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` add and that no later token can change."""
        return self._stream.append(token_ids)

    def finish(self) -> str:
        """The text still held; incomplete characters become U+FFFD."""
        return self._stream.finish()


class TokenOffsets:
    """Starts of the tokens of a growing text, in characters.

    A token that completes or continues a character begins with it; one without a text of its own
    begins where the text ends. Offsets never fall. `start`: the characters before the text.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._num_chars = start

    def append(self, token_ids: Sequence[int]) -> list[int]:
        """The offset of each of the next tokens."""
        return [self._next(token_id) for token_id in token_ids]

    def _next(self, token_id: int) -> int:
        held = self._detokenizer.held
        text = self._detokenizer.append((token_id,))
        start = self._num_chars
        self._num_chars += len(text)
        if held and text:
            start += min(len(text), _num_kept(held, text + self._detokenizer.held))
        return start


def _num_kept(held: str, text: str) -> int:
    """Characters of `held` that begin `text` and are complete without the last token."""
    if len(text) <= len(held):
        return 0
    num_kept = 0
    while num_kept < len(held) and text[num_kept] == held[num_kept]:
        num_kept += 1
    return num_kept
