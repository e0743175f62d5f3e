"""The document: a statement, evidence to check it by, an id over the statement, a signature.

All bytes that are hashed are JSON with sorted keys and no spaces, so that the same statement has
the same id wherever it is made.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import msgspec
import numpy as np

from quire.base.errors import ConfigError, RequestError
from quire.protocol.request import CHECKPOINT_VERSION

__all__ = [
    "Difference",
    "Evidence",
    "Receipt",
    "SampleEvidence",
    "SampleStatement",
    "Statement",
    "digest",
    "first_difference",
    "logprob_bits",
    "next_link",
    "prompt_digest",
    "read_key",
    "read_receipts",
]

FORMAT = "quire receipt 1"
LEAST_KEY_BYTES = 16
DIGEST_BYTES = 32

_encode = msgspec.json.Encoder(order="sorted").encode
_CHAIN = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"quire chain")


def digest(content: bytes, person: bytes) -> str:
    """Return BLAKE2b of some content, in hexadecimal. person: at most 16 bytes that name its kind,
    so that equal bytes of two kinds have different digests."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, person=person).hexdigest()


def prompt_digest(token_ids: Iterable[int]) -> str:
    """Return a digest of the ids of a prompt."""
    return digest(np.array(list(token_ids), "<i4").tobytes(), b"quire prompt")


def logprob_bits(logprob: float) -> str:
    """Return the bits of a log-probability, which is a float32, as 8 hexadecimal digits."""
    return struct.pack(">f", logprob).hex()


def next_link(link: bytes, token_id: int, bits: str) -> bytes:
    """Return the link of a chain after one more token: BLAKE2b of the link before it, the token id,
    and the bits of its log-probability."""
    hashed = _CHAIN.copy()  # quicker than a new one
    hashed.update(link + token_id.to_bytes(4, "little") + bytes.fromhex(bits))
    return hashed.digest()


class SampleStatement(msgspec.Struct, frozen=True, kw_only=True):
    """One sample. chain: last link of the chain over its tokens and their log-probabilities, in
    hexadecimal; zeros without a token. stop_reason: see `CompletionOutput`."""

    num_tokens: int
    chain: str
    finish_reason: str
    stop_reason: int | str | None = None


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides an answer, and the answer itself.

    engine: version, kernels, and the settings that change bits. model: digests of weights, config
    and adapter. text: digests of tokenizer, chat template, prompt and media. choice: parameters
    after defaults, the seed, tokens that end the answer, its grammar.
    """

    engine: dict[str, Any]
    model: dict[str, Any]
    text: dict[str, Any]
    choice: dict[str, Any]
    samples: list[SampleStatement]

    @property
    def id(self) -> str:
        """Digest of the statement."""
        return digest(_encode(self), b"quire receipt")


class SampleEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one sample, and the bits of their log-probabilities (see `logprob_bits`)."""

    token_ids: list[int]
    logprobs: list[str]

    @property
    def chain(self) -> str:
        """Last link of the chain over the tokens, in hexadecimal."""
        link = bytes(DIGEST_BYTES)
        for token_id, bits in zip(self.token_ids, self.logprobs, strict=True):
            link = next_link(link, token_id, bits)
        return link.hex()


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Contents whose digests the statement has, so that the answer can be made again. model,
    adapter, weights_version: names, for people; adapter is empty without one."""

    model: str
    adapter: str
    weights_version: str = CHECKPOINT_VERSION
    prompt_token_ids: list[int]
    samples: list[SampleEvidence]


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt. id: digest of the statement; equal receipts have equal ids. signature:
    HMAC-SHA-256 of the id under the operator's key, in hexadecimal, if there is one."""

    id: str
    statement: Statement
    evidence: Evidence
    format: str = FORMAT
    signature: str | None = None

    @classmethod
    def of(cls, statement: Statement, evidence: Evidence) -> Self:
        """A receipt without a signature."""
        return cls(id=statement.id, statement=statement, evidence=evidence)

    def to_json(self) -> str:
        """Return its text, which `quire replay` reads."""
        return _encode(self).decode()

    def signed(self, key: bytes) -> Receipt:
        """Return it with the operator's signature."""
        return msgspec.structs.replace(self, signature=self._signature(key))

    def is_signed_by(self, key: bytes) -> bool:
        """Return whether its signature was made with this key."""
        given = (self.signature or "").encode(errors="replace")
        return hmac.compare_digest(given, self._signature(key).encode())

    def _signature(self, key: bytes) -> str:
        return hmac.new(key, self.id.encode(), hashlib.sha256).hexdigest()

    def check(self) -> None:
        """Raise RequestError if it contradicts itself, as one that was edited does."""
        stated, given = self.statement, self.evidence
        held: list[tuple[str, object, object]] = [
            ("format", self.format, FORMAT),
            ("id", self.id, stated.id),
            (
                "text.prompt",
                cast("object", stated.text.get("prompt")),
                prompt_digest(given.prompt_token_ids),
            ),
            ("samples", len(stated.samples), len(given.samples)),
        ]
        for i, (sample, tokens) in enumerate(zip(stated.samples, given.samples, strict=False)):
            counts = sample.num_tokens, sample.num_tokens
            held.append((f"samples[{i}]", counts, (len(tokens.token_ids), len(tokens.logprobs))))
            if len(tokens.token_ids) == len(tokens.logprobs):
                held.append((f"samples[{i}].chain", sample.chain, tokens.chain))
        for place, one, other in held:
            if one != other:
                raise RequestError(
                    f"the receipt contradicts itself at {place}: it states {one!r}, but the rest "
                    f"of it gives {other!r}. It was changed after it was made; fetch it again."
                )


def read_receipts(content: bytes) -> list[Receipt]:
    """Read receipts from JSON: one, or a list as `GET /receipts/{id}` answers with. RequestError if
    there are none, or one contradicts itself."""
    try:
        document = msgspec.json.decode(content)
        listed: object = document.get("data", [document])
        found = msgspec.convert(listed, list[Receipt])
        for receipt in found:
            receipt.check()
    except RequestError:
        raise
    except (msgspec.MsgspecError, AttributeError, ValueError, OverflowError) as error:
        raise RequestError(
            f"this is no receipt: {error}. Give the JSON that an engine returned."
        ) from error
    if not found:
        raise RequestError("the list has no receipt. Give one with at least one.")
    return found


def read_key(path: Path) -> bytes:
    """Return the key for signatures in a file, without blanks at both ends. ConfigError if it
    cannot be read, others may read it, or it is too short."""
    try:
        with path.expanduser().open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read().strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give another file.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{path} has mode {mode:04o}, so that others may read it. `chmod 600 {path}` keeps it "
            "for you."
        )
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"The key in {path} has {len(key)} bytes, but {LEAST_KEY_BYTES} or more are safe. "
            "Write one with `python -c 'import secrets; print(secrets.token_hex())'`."
        )
    return key


class Difference(NamedTuple):
    """A field in which two statements differ: its path, and both values."""

    field: str
    stated: object
    found: object

    def __str__(self) -> str:
        return f"{self.field} is {self.found!r} here, but {self.stated!r} in the receipt"


def first_difference(
    stated: Mapping[str, Any], found: Mapping[str, Any], sections: Sequence[str]
) -> Difference | None:
    """Return the first field of some sections in which two statements, as JSON, differ, in the
    order of the sections, then of names."""
    for section in sections:
        difference = _difference(section, stated[section], found[section])
        if difference is not None:
            return difference
    return None


def _difference(place: str, stated: Any, found: Any) -> Difference | None:
    if isinstance(stated, dict) and isinstance(found, dict):
        one, other = cast("dict[str, Any]", stated), cast("dict[str, Any]", found)
        for name in sorted({*one, *other}):
            below = _difference(f"{place}.{name}", one.get(name), other.get(name))
            if below is not None:
                return below
        return None
    return None if stated == found else Difference(place, stated, found)
