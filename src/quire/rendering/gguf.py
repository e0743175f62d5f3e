"""The tokenizer and chat templates that a GGUF file carries in its metadata."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.gguf import GGUFHeader, ends_by_text, read_gguf_parts
from quire.errors import ConfigError
from quire.rendering.folder import TokenizerFiles, TokenSpec
from quire.rendering.pieces import TWIN_MARK

if TYPE_CHECKING:
    import tokenizers

_log = logging.getLogger("quire.rendering")

_KEY = "tokenizer.ggml."
_TEMPLATE_KEY = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "pad_token": "padding_token_id",
}
_TAKE_NO_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 that leave what follows them, as in its tokenizer.json."""
_MARK = "\u2581"
_MAX_PIECE_CHARS = 256
"""Merges of a longer token are not made: their number grows with its length, and such a token is a
fault or an attack."""

# Split patterns by name, from the tokenizer.json of the models that they were made for.
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTE_LEVEL = {
    "gpt-2": _GPT2_SPLIT,
    "smollm": _GPT2_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
}
_SINGLE_DIGITS = ("smollm",)
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")
"""Llama 3 takes a word that is a token as it is, without merging."""


def read_gguf_tokenizer(file: Path) -> tuple[tokenizers.Tokenizer, TokenizerFiles]:
    """The tokenizer of a GGUF file.

    Raises ConfigError: no tokenizer, one of an unknown kind, or one whose parts do not fit.
    """
    header = read_gguf_parts(file)
    kind = header.string(_KEY + "model")
    makers: dict[str, Callable[[GGUFHeader, dict[str, int], list[int]], tokenizers.Tokenizer]] = {
        "gpt2": _byte_level,
        "llama": _sentence_piece,
        "gemma4": _merged_pieces,
    }
    if kind not in makers:
        stated = "is missing" if kind is None else f"is {kind[:80]!r}, which quire does not read"
        raise ConfigError(
            f"{file}: {_KEY}model {stated}; give the folder of the model's tokenizer with "
            "tokenizer (--tokenizer)"
        )
    tokens, ids, kinds = _tokens(header)
    backend = makers[kind](header, ids, kinds)
    is_phi3 = kind == "llama" and header.string("general.architecture") == "phi3"
    _add_tokens(backend, tokens, kinds, takes_spaces=is_phi3)
    named = _named_tokens(header, tokens)
    _add_marks(backend, header, named, adds_bos=kind in ("llama", "gemma4"))
    return backend, TokenizerFiles(tokenizer_file=file, model_type="gguf", named=named)


def read_gguf_templates(file: Path) -> dict[str, str]:
    """All chat templates of a GGUF file by name; the main one is called `default`."""
    header = read_gguf_parts(file)
    prefix = _TEMPLATE_KEY + "."
    templates = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    }
    main = header.string(_TEMPLATE_KEY)
    return templates if main is None else {**templates, "default": main}


def _tokens(header: GGUFHeader) -> tuple[list[str], dict[str, int], list[int]]:
    """Token strings by id, ids by token string in the same order, and types. Raises ConfigError for
    lists that are none."""
    tokens = header.array(_KEY + "tokens")
    if not tokens or not isinstance(tokens[0], str):
        raise ConfigError(f"{header.file}: {_KEY}tokens is no list of texts; fetch the file again")
    kinds = header.array(_KEY + "token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens) or not isinstance(kinds[0], int):
        raise ConfigError(
            f"{header.file}: {_KEY}token_type has {len(kinds)} entries for {len(tokens)} tokens"
        )
    for end in ends_by_text(tokens):
        kinds[end] = _CONTROL  # whatever the file says: their text is no part of an answer
    if len(set(tokens)) != len(tokens):
        tokens = _mark_twins(header, tokens, kinds)
    return tokens, {token: index for index, token in enumerate(tokens)}, kinds


def _mark_twins(header: GGUFHeader, tokens: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Token strings, each once. Of tokens with one text, a text is read as the one that the file
    names, else the last, which other programs take too; the others get marks, which no text has,
    and decoding drops. Tokens that are matched whole come before those that merges make."""
    named = {header.integer(_KEY + key) for key in _NAMED.values()}
    places: dict[str, list[int]] = {}
    for index, token in enumerate(tokens):
        places.setdefault(token, []).append(index)
    found, taken = list(tokens), set(tokens)
    for token, indices in places.items():
        first = max(indices, key=lambda i: (i in named, kinds[i] in (_CONTROL, _USER), i))
        twin = token
        for index in indices:
            if index != first:
                while twin in taken:
                    twin += TWIN_MARK
                taken.add(twin)
                found[index] = twin
    return found


def _byte_level(
    header: GGUFHeader,
    ids: dict[str, int],
    kinds: list[int],  # noqa: ARG001  kinds of makers
) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = header.string(_KEY + "pre")
    if name in (None, "default"):
        _log.warning(
            "%s does not say how text is split into words (%spre); it is split as for GPT-2, "
            "which may give other tokens than the model knows.",
            header.file,
            _KEY,
        )
        name = "gpt-2"
    if name not in _BYTE_LEVEL:
        raise ConfigError(
            f"{header.file}: {_KEY}pre={name[:80]!r} is not supported; quire knows "
            f"{', '.join(_BYTE_LEVEL)}. Give the folder of the model's tokenizer with tokenizer "
            "(--tokenizer)"
        )
    model = models.BPE(ids, _merges(header, ids), ignore_merges=name in _WHOLE_WORDS_FIRST)
    backend = Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Split(Regex(_BYTE_LEVEL[name]), "isolated")]
    if name in _SINGLE_DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()  # as the model was trained
    backend.decoder = _without_marks(ids, decoders.ByteLevel())
    return backend


def _without_marks(ids: Iterable[str], *steps: Any) -> tokenizers.decoders.Decoder:
    """A decoder of steps, which drops the marks of tokens that have a text in common."""
    from tokenizers import decoders

    if any(token.endswith(TWIN_MARK) for token in ids):
        steps = (decoders.Replace(TWIN_MARK, ""), *steps)
    return steps[0] if len(steps) == 1 else decoders.Sequence(list(steps))


def _merges(header: GGUFHeader, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens in the order in which they join. Those that make no token are left out."""
    merges: list[tuple[str, str]] = []
    left_out: list[str] = []
    lines = header.array(_KEY + "merges") or []
    for index, line in enumerate(lines):
        left, space, right = line.partition(" ") if isinstance(line, str) else ("", "", "")
        if not space:
            raise ConfigError(
                f"{header.file}: {_KEY}merges[{index}]={str(line)[:80]!r} does not join two "
                "tokens; fetch the file again"
            )
        if {left, right, left + right} <= ids.keys():
            merges.append((left, right))
        else:
            left_out.append(line)
    if left_out and not merges:
        raise ConfigError(
            f"{header.file}: none of {len(lines)} merges ({_KEY}merges) joins two tokens to a "
            f"third, {left_out[0][:80]!r} for one; fetch the file again"
        )
    if left_out:
        _log.warning(
            "%s: %d of %d merges (%smerges) do not join two tokens to a third and are left out, "
            "%r for one.",
            header.file,
            len(left_out),
            len(lines),
            _KEY,
            left_out[0][:80],
        )
    return merges


def _sentence_piece(
    header: GGUFHeader, ids: dict[str, int], kinds: list[int]
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the best-scored piece that two neighbours make is made first."""
    scores = header.array(_KEY + "scores") or []
    if len(scores) != len(ids) or not isinstance(scores[0], float):
        raise ConfigError(
            f"{header.file}: {_KEY}scores has {len(scores)} entries for {len(ids)} tokens"
        )
    prefix = header.flag(_KEY + "add_space_prefix") is not False
    return _pieces(ids, kinds, _merges_by_score(list(ids), kinds, scores), prefix=prefix)


def _merged_pieces(
    header: GGUFHeader, ids: dict[str, int], kinds: list[int]
) -> tokenizers.Tokenizer:
    """SentencePiece's pieces, joined in the order of a list. Line breaks join with nothing else."""
    from tokenizers import Regex, pre_tokenizers

    prefix = header.flag(_KEY + "add_space_prefix") is True
    backend = _pieces(ids, kinds, _merges(header, ids), prefix=prefix)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return backend


def _pieces(
    ids: dict[str, int], kinds: list[int], merges: list[tuple[str, str]], *, prefix: bool
) -> tokenizers.Tokenizer:
    """BPE over characters, of which spaces have a mark, and of unknown ones the bytes count.
    prefix: a text begins with that mark."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = next(
        (token for token, kind in zip(ids, kinds, strict=True) if kind == _UNKNOWN), None
    )
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    spaces = [normalizers.Replace(" ", _MARK)]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_MARK), *spaces] if prefix else spaces
    )
    steps: list[Any] = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = _without_marks(ids, *steps)
    return backend


def _merges_by_score(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to cut a normal token into two tokens, by the score of the whole, best first."""
    normal = [index for index, kind in enumerate(kinds) if kind == _NORMAL]
    known = {tokens[index] for index in normal}
    merges: list[tuple[str, str]] = []
    # Some vocabularies have a million cuts: this loop is most of the start of their models.
    for index in sorted(normal, key=scores.__getitem__, reverse=True):
        token = tokens[index]
        if len(token) > _MAX_PIECE_CHARS:
            continue
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in known:
                right = token[cut:]
                if right in known:
                    merges.append((left, right))
    return merges


def _add_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    kinds: Sequence[int],
    *,
    takes_spaces: bool,
) -> None:
    """Control tokens and those of users are matched whole, before anything else. takes_spaces: they
    take the spaces and line breaks behind them too, which files do not say."""
    from tokenizers import AddedToken

    added = [
        AddedToken(
            token,
            rstrip=takes_spaces and token not in _TAKE_NO_SPACES,
            normalized=False,
            special=kind != _USER,
        )
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER) and token
    ]
    backend.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]


def _named_tokens(header: GGUFHeader, tokens: Sequence[str]) -> dict[str, TokenSpec]:
    named: dict[str, TokenSpec] = {}
    for name, key in _NAMED.items():
        index = header.integer(_KEY + key)
        if index is None or index == 0xFFFFFFFF:
            continue
        if not 0 <= index < len(tokens):
            raise ConfigError(
                f"{header.file}: {_KEY}{key}={index} is no token; there are {len(tokens)}"
            )
        named[name] = TokenSpec(tokens[index])
    return named


def _add_marks(
    backend: tokenizers.Tokenizer, header: GGUFHeader, named: dict[str, TokenSpec], adds_bos: bool
) -> None:
    """Put the tokens of begin and end around each text, where the file asks for them."""
    from tokenizers import processors

    if header.string(_KEY + "pre") in _WHOLE_WORDS_FIRST:
        adds_bos = True
    stated = header.flag(_KEY + "add_bos_token")
    bos = named.get("bos_token") if (adds_bos if stated is None else stated) else None
    eos = named.get("eos_token") if header.flag(_KEY + "add_eos_token") else None
    if bos is None and eos is None:
        return
    parts = [*([bos] if bos else []), None, *([eos] if eos else [])]
    marks = {part.content for part in parts if part is not None}
    ids = [(token, backend.token_to_id(token)) for token in sorted(marks)]
    template = ["$A" if part is None else part.content for part in parts]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
