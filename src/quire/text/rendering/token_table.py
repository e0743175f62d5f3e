"""Token id → text, remembered as ids turn up, so that a token costs one dictionary look-up."""

from typing import Protocol

from quire.text.rendering.pieces import DecoderPlan, Piece, byte_level_bytes

# Stands for a token that leaves no trace: skipped special tokens and ids without a token.
SKIPPED = Piece("", "")


class Vocabulary(Protocol):
    """Interface of a tokenizer to a token table."""

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None for an id without one."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` removes the token."""
        ...

    def is_added(self, token_id: int) -> bool:
        """Return whether the token was added beside the model's vocabulary."""
        ...


class TokenTable:
    """Texts that tokens add, for one setting of `skip_special_tokens`.

    Safe to share between threads: entries depend on the id alone, so a race only repeats work.
    """

    def __init__(
        self, vocabulary: Vocabulary, plan: DecoderPlan, skip_special_tokens: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._plan = plan
        self._skip_special_tokens = skip_special_tokens
        self.whole: dict[int, str] = {}
        """Byte-level tokens that are complete UTF-8 by themselves."""
        self.data: dict[int, bytes] = {}
        self.pieces: dict[int, Piece] = {}

    @property
    def plan(self) -> DecoderPlan:
        """Rules that turn token strings into text."""
        return self._plan

    def load_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level tokenizer; empty when it leaves no trace."""
        token = self._visible_token(token_id)
        data = b"" if token is None else byte_level_bytes(token)
        self.data[token_id] = data
        try:
            self.whole[token_id] = data.decode("utf-8")
        except UnicodeDecodeError:
            self.whole.pop(token_id, None)
        return data

    def load_piece(self, token_id: int) -> Piece:
        """The piece of a token of a `pieces` tokenizer; `SKIPPED` when it leaves no trace."""
        token = self._visible_token(token_id)
        piece = SKIPPED if token is None else self._plan.piece(token)
        self.pieces[token_id] = piece
        return piece

    def added_text(self, token_id: int) -> str | None:
        """The plain text of an added token, None for the others."""
        if not self._vocabulary.is_added(token_id):
            return None
        return self._visible_token(token_id)

    def _visible_token(self, token_id: int) -> str | None:
        if self._skip_special_tokens and self._vocabulary.is_special(token_id):
            return None
        return self._vocabulary.token_string(token_id)
