"""Contribution of one token to the text, derived from the decoder section of tokenizer.json.

Three families cover almost every published tokenizer:

- `bytes`: byte-level BPE (GPT-2, Llama 3, Qwen): a token is a run of bytes.
- `pieces`: SentencePiece-like and word-piece decoders: a token is a piece of text, or one byte
  when the tokenizer falls back to bytes; the first piece of a text may look different.
- `opaque`: a decoder whose result for one token depends on its neighbours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

METASPACE = "\u2581"
TWIN_MARK = "\ufdd0"
"""Stands behind a token whose text another token has too; no part of its text."""
# (written by a tokenizer, read by people), applied in this order; as in transformers.
_SPACE_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
# The word-piece decoder of `tokenizers` has one more rule, after " 'm".
_WORD_PIECE_CLEANUP = (*_SPACE_CLEANUP[:7], (" do not", " don't"), *_SPACE_CLEANUP[7:])


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of a token at the start of a text and anywhere else; `byte` for byte tokens."""

    first: str
    later: str
    byte: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """Rules that turn token strings into text. `strip` is (character, count) removed from the
    start."""

    kind: Literal["bytes", "pieces", "opaque"]
    style: Literal["plain", "metaspace", "word_piece", "joined"] = "plain"
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = (" ", 0)
    marker: str = METASPACE
    drops_first_marker: bool = True
    cleanup: bool = False

    def piece(self, token: str) -> Piece:
        """The contribution of the token string `token` (families `pieces` only)."""
        if self.style == "metaspace":
            spaced = token.replace(self.marker, " ")
            first = token.replace(self.marker, "") if self.drops_first_marker else spaced
            return Piece(first, spaced)
        if self.style == "word_piece":
            return self._word_piece(token)
        if self.style == "joined":
            return Piece(token, " " + token)
        token = _replace_all(token, self.replacements)
        byte = _fallback_byte(token) if self.byte_fallback else None
        return Piece(token, token, byte)

    def at_start(self, piece: Piece) -> bytes:
        """The bytes of the token where nothing of the text precedes it."""
        data = piece.first.encode("utf-8") if piece.byte is None else bytes((piece.byte,))
        character, num_stripped = self.strip
        mark = character.encode("utf-8")
        for _ in range(num_stripped):
            data = data.removeprefix(mark)
        return data

    def _word_piece(self, token: str) -> Piece:
        continues = bool(self.marker) and token.startswith(self.marker)
        later = token[len(self.marker) :] if continues else " " + token
        if not self.cleanup:
            return Piece(token, later)
        return Piece(
            _replace_all(token, _WORD_PIECE_CLEANUP), _replace_all(later, _WORD_PIECE_CLEANUP)
        )


OPAQUE = DecoderPlan(kind="opaque")


def plan_decoder(decoder: Mapping[str, Any] | None) -> DecoderPlan:
    """Classify the `decoder` object of tokenizer.json (None: token strings joined by spaces)."""
    if decoder is None:
        return DecoderPlan(kind="pieces", style="joined")
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return DecoderPlan(kind="bytes")
    if kind == "Metaspace":
        return _metaspace_plan(decoder)
    if kind == "WordPiece":
        return DecoderPlan(
            kind="pieces",
            style="word_piece",
            marker=str(decoder.get("prefix", "##")),
            cleanup=decoder.get("cleanup") is not False,
        )
    steps = cast("list[dict[str, Any]]", decoder.get("decoders", [decoder]))
    if len(steps) == 1 and kind == "Sequence":
        return plan_decoder(steps[0])
    if [step.get("type") for step in steps] == ["Replace", "ByteLevel"]:
        is_mark = steps[0].get("pattern") == {"String": TWIN_MARK} and not steps[0].get("content")
        return DecoderPlan(kind="bytes") if is_mark else OPAQUE
    return _sequence_plan(steps)


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with other characters stands for its own UTF-8."""
    token = token.replace(TWIN_MARK, "")
    try:
        return token.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def clean_up_spaces(text: str) -> str:
    """The `clean_up_tokenization_spaces` rule of transformers for tokenizers that are not BPE."""
    return _replace_all(text, _SPACE_CLEANUP)


def _replace_all(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def _metaspace_plan(decoder: Mapping[str, Any]) -> DecoderPlan:
    scheme = decoder.get("prepend_scheme")
    if scheme is None:
        scheme = "never" if decoder.get("add_prefix_space") is False else "always"
    return DecoderPlan(
        kind="pieces",
        style="metaspace",
        marker=str(decoder.get("replacement", METASPACE)),
        drops_first_marker=scheme != "never",
    )


def _sequence_plan(steps: list[dict[str, Any]]) -> DecoderPlan:
    """`Replace* ByteFallback? Fuse? Strip?`, as Llama 2, Gemma and Phi-3 write it; else opaque."""
    replacements: list[tuple[str, str]] = []
    order = {"Replace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
    strip, stage, fallback = (" ", 0), 0, False
    for step in steps:
        kind = str(step.get("type"))
        rank = order.get(kind, -1)
        if rank < stage or (rank == stage and kind != "Replace"):
            return OPAQUE
        if kind == "Replace":
            pattern = step.get("pattern")
            old = cast("dict[str, Any]", pattern).get("String") if pattern else None
            if not isinstance(old, str):
                return OPAQUE
            replacements.append((old, str(step.get("content", ""))))
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Strip":
            if stage != order["Fuse"] or step.get("stop"):
                return OPAQUE
            strip = (str(step.get("content", " ")), int(step.get("start", 0)))
        stage = rank
    return DecoderPlan(
        kind="pieces", replacements=tuple(replacements), byte_fallback=fallback, strip=strip
    )


def _fallback_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _byte_characters() -> dict[int, int | None]:
    """Character → byte of the GPT-2 byte alphabet; other characters map out of Latin-1.

    Printable Latin-1 characters stand for themselves; the remaining 68 bytes follow from U+0100
    on, in order (Radford et al. 2019, the reference encoder).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table: dict[int, int | None] = {code: code for code in printable}
    others = [byte for byte in range(256) if byte not in table]
    # A raw byte that has a stand-in must not pass as itself: send it outside Latin-1.
    table.update(dict.fromkeys(others, 0x10FFFF))
    table.update({0x100 + index: byte for index, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_characters()
