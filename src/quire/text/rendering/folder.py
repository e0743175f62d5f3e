"""The tokenizer and chat-template files of a model folder, read into plain values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from quire.base.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Older files store "no limit" as int(1e30); every real limit is far below this.
UNLIMITED_LENGTH_FROM = 1 << 40
_FOREIGN_FILES = ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model", "spiece.model")


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """One added token: its text and how the matcher treats the text around it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True


def _no_named_tokens() -> Mapping[str, TokenSpec]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents of the JSON files beside `tokenizer.json` about the tokenizer.

    `added` are tokens that tokenizer_config.json declares, ordered by id; `named` maps
    `bos_token`, `eos_token`, ... to tokens; `extra` are further special tokens.
    `model_max_length` is in tokens and None when the file gives no real limit.
    """

    tokenizer_file: Path
    tokenizer_class: str | None = None
    model_type: str | None = None
    added: tuple[TokenSpec, ...] = ()
    named: Mapping[str, TokenSpec] = field(default_factory=_no_named_tokens)
    extra: tuple[TokenSpec, ...] = ()
    model_max_length: int | None = None
    cleans_up_spaces: bool = False
    splits_special_tokens: bool = False
    legacy: bool = False
    adds_prefix_space: bool | None = None


def require_folder(path: str | Path) -> Path:
    """`path` as a folder that exists; ConfigError otherwise."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"The model folder {str(folder)!r} does not exist or is not a folder. "
            "Give the path of a local folder that holds config.json and tokenizer.json."
        )
    return folder


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, an empty one without the file; ConfigError if it is broken."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path.name} in {str(path.parent)!r} cannot be read ({error}). "
            "Check the file's permissions, or download the model again."
        ) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path.name} in {str(path.parent)!r} is not valid JSON ({error}). "
            "Download the file again."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path.name} in {str(path.parent)!r} holds a JSON {type(value).__name__} where an "
            "object is expected. Download the file again."
        )
    return cast("dict[str, Any]", value)


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Read a model folder; ConfigError when `tokenizer.json` is missing or a file is broken.

    The precedence is that of transformers 5: an `added_tokens_decoder` in tokenizer_config.json
    makes special_tokens_map.json and added_tokens.json (older formats) irrelevant.
    """
    folder = require_folder(path)
    tokenizer_file = folder / TOKENIZER_FILE
    if not tokenizer_file.is_file():
        raise ConfigError(_missing_tokenizer_message(folder))
    config = read_json_object(folder / "tokenizer_config.json")
    declared = config.get("added_tokens_decoder")
    added: tuple[TokenSpec, ...] = ()
    if isinstance(declared, dict):
        added = _declared_tokens(cast("dict[str, Any]", declared), folder)
    else:
        config |= read_json_object(folder / "special_tokens_map.json")
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    if isinstance(extra, dict):
        config |= cast("dict[str, Any]", extra)
    return TokenizerFiles(
        tokenizer_file=tokenizer_file,
        tokenizer_class=_optional_str(config.get("tokenizer_class")),
        model_type=_optional_str(read_json_object(folder / "config.json").get("model_type")),
        added=added,
        named=_named_tokens(config, added),
        extra=_extra_tokens(cast("object", extra)),
        model_max_length=_real_limit(config.get("model_max_length")),
        cleans_up_spaces=config.get("clean_up_tokenization_spaces") is True,
        splits_special_tokens=config.get("split_special_tokens") is True,
        legacy=config.get("legacy") is True,
        adds_prefix_space=_optional_bool(config.get("add_prefix_space")),
    )


def read_chat_templates(path: str | Path) -> dict[str, str]:
    """All chat templates of a model folder by name; the main one is called `default`.

    Sources, first hit wins: `chat_template.jinja` with `additional_chat_templates/*.jinja`,
    `chat_template` in tokenizer_config.json (one string or a list of named ones),
    `chat_template.json` (processors of older vision models). Empty when there is none.
    """
    folder = require_folder(path)
    templates: dict[str, str] = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        templates["default"] = _read_template(main)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_template(file)
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not templates:
            templates = _templates_in(read_json_object(folder / name), folder / name)
    return templates


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The chat template {str(path)!r} cannot be read ({error}). "
            "It must be a readable UTF-8 text file."
        ) from error


def _templates_in(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    value: Any = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        value = [
            {"name": name, "template": text} for name, text in cast("dict[str, Any]", value).items()
        ]
    templates: dict[str, str] = {}
    for entry in cast("list[Any]", value) if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not all(
            isinstance(cast("dict[str, Any]", entry).get(key), str) for key in ("name", "template")
        ):
            raise ConfigError(
                f"`chat_template` in {str(path)!r} has an entry of an unknown form: "
                f"{str(cast('object', entry))[:80]!r}. It must be a string or a list of "
                '{"name": ..., "template": ...}.'
            )
        named = cast("dict[str, str]", entry)
        templates[named["name"]] = named["template"]
    return templates


def _missing_tokenizer_message(folder: Path) -> str:
    found = [name for name in _FOREIGN_FILES if (folder / name).is_file()]
    hint = f" (found {', '.join(found)}, which is another format)" if found else ""
    return (
        f"The file {TOKENIZER_FILE} is missing in {str(folder)!r}{hint}. Create it with "
        "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` of transformers, "
        "or start with skip_tokenizer_init=True (--skip-tokenizer-init) and send token ids."
    )


def _declared_tokens(declared: Mapping[str, Any], folder: Path) -> tuple[TokenSpec, ...]:
    by_id: dict[int, TokenSpec] = {}
    for index, value in declared.items():
        token = _token_spec(value, special=False)
        if token is None or not index.isdecimal():
            raise ConfigError(
                f"`added_tokens_decoder` in tokenizer_config.json of {str(folder)!r} has the entry "
                f"{index!r}: {str(value)[:80]}. Expected a token id with an object that has "
                "`content`. Download the file again."
            )
        by_id[int(index)] = token
    return tuple(by_id[index] for index in sorted(by_id))


def _named_tokens(
    config: Mapping[str, Any], added: tuple[TokenSpec, ...]
) -> Mapping[str, TokenSpec]:
    """The usual names first, then those of the model's own, such as `image_token`."""
    known = {token.content: token for token in added}
    own = sorted(key for key in config if key.endswith("_token") and key not in NAMED_TOKENS)
    named: dict[str, TokenSpec] = {}
    for key in (*NAMED_TOKENS, *own):
        token = _token_spec(config.get(key))
        if token is not None:
            named[key] = known.get(token.content, token)
    return MappingProxyType(named)


def _extra_tokens(value: object) -> tuple[TokenSpec, ...]:
    specs = map(_token_spec, cast("list[object]", value) if isinstance(value, list) else [])
    return tuple(spec for spec in specs if spec is not None)


def _token_spec(value: object, special: bool = True) -> TokenSpec | None:
    """`special` is what holds when the file does not say: named tokens are, added ones are not."""
    if isinstance(value, str):
        return TokenSpec(value, normalized=not special, special=special)
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, Any]", value)
    content = fields.get("content")
    if not isinstance(content, str):
        return None
    is_special = fields.get("special", special) is True
    return TokenSpec(
        content,
        single_word=fields.get("single_word") is True,
        lstrip=fields.get("lstrip") is True,
        rstrip=fields.get("rstrip") is True,
        normalized=fields.get("normalized", not is_special) is True,
        special=is_special,
    )


def _real_limit(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 < value < UNLIMITED_LENGTH_FROM else None


def _optional_str(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _optional_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
