"""The tokenizer and chat templates that a GGUF file carries in its metadata."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError
from quire.config.gguf import GGUFHeader, ends_by_text, read_gguf_parts
from quire.text.rendering.folder import TokenizerFiles, TokenSpec
from quire.text.rendering.pieces import TWIN_MARK

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

# Patterns that cut text, in turn; what none of them takes stays whole. They come from the models'
# tokenizer.json, in the form that llama.cpp has for them.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# Marks belong to the letters before them.
_QWEN35_SPLIT = _QWEN2_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_SEED_SPLIT = _QWEN2_SPLIT.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
# Words end before a capital that follows a small letter. Letters beyond a to z count as both.
_NOT_SMALL, _NOT_CAPITAL = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_SMALL}*{_NOT_CAPITAL}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_SMALL}+{_NOT_CAPITAL}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = _GPT4O_SPLIT.replace(f"{_CONTRACTIONS}?", "").replace(r"\p{N}{1,3}", r"\p{N}")
_DIGITS_FIRST = (r"\p{N}", _GPT2_SPLIT)
_FALCON_SPLITS = (r"[\p{P}$+<=>^~|`]+", _GPT2_SPLIT, "[0-9][0-9][0-9]")
_DEEPSEEK_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&[^\\s]]+"
_DEEPSEEK_LLM_SPLITS = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER_SPLITS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_DEEPSEEK_V3_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_NAMES_OF_SPLITS = {
    (_GPT2_SPLIT,): "gpt-2 phi-2 mpt olmo exaone4 a.x-4.0 mellum trillion granite-docling",
    _DIGITS_FIRST: "smollm starcoder refact command-r exaone codeshell minerva-7b",
    (_LLAMA3_SPLIT,): (
        "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe"
    ),
    (_QWEN2_SPLIT,): "qwen2 deepseek-r1-qwen stablelm2 megrez kormo",
    (_QWEN35_SPLIT,): "qwen35",
    (_SEED_SPLIT,): "seed-coder",
    (_GPT4O_SPLIT,): "gpt-4o llama4 kanana2",
    (_TEKKEN_SPLIT,): "tekken",
    _FALCON_SPLITS: "falcon",
    _DEEPSEEK_LLM_SPLITS: "deepseek-llm",
    _DEEPSEEK_CODER_SPLITS: "deepseek-coder",
    _DEEPSEEK_V3_SPLITS: "deepseek-v3",
}
SPLITS = {name: splits for splits, names in _NAMES_OF_SPLITS.items() for name in names.split()}
"""Patterns by the name that `tokenizer.ggml.pre` states."""
_BEGUN = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Rules of models whose texts begin with their token of begin, though files may not say so."""
_WHOLE_WORDS_FIRST = (*_BEGUN, "glm4")
"""Rules of models that take a word that is a token as it is, without merging."""


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
    if name not in SPLITS:
        raise ConfigError(
            f"{header.file}: {_KEY}pre={name[:80]!r} is not supported; quire knows "
            f"{', '.join(SPLITS)}. Give the folder of the model's tokenizer with tokenizer "
            "(--tokenizer)"
        )
    model = models.BPE(ids, _merges(header, ids), ignore_merges=name in _WHOLE_WORDS_FIRST)
    backend = Tokenizer(model)
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]
    ]
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
    """Add control tokens and those of users, which are matched whole, before anything else.
    takes_spaces: they take the spaces and line breaks behind them too; files do not say so."""
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

    if header.string(_KEY + "pre") in _BEGUN:
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
