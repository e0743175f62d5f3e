"""Reads what a model's authors suggest for sampling and stopping: generation_config.json, or the
metadata of a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError, RequestError
from quire.config.gguf import GGUFHeader
from quire.config.hf import RawConfig, read_json
from quire.config.model_spec import GenerationDefaults, ModelSpec

if TYPE_CHECKING:
    from quire.protocol.parameters.declaration import Declared

__all__ = ["read_generation_defaults", "read_gguf_defaults"]

_log = logging.getLogger("quire.config")

_NOT_OBEYED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "begin_suppress_tokens": ([],),
        "constraints": ([],),
        "diversity_penalty": (0,),
        "do_sample": (True,),
        "dola_layers": ([],),
        "encoder_no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "exponential_decay_length_penalty": (),
        "force_words_ids": ([],),
        "forced_bos_token_id": (),
        "forced_decoder_ids": ([],),
        "forced_eos_token_id": (),
        "guidance_scale": (1,),
        "max_time": (),
        "min_length": (0,),
        "no_repeat_ngram_size": (0,),
        "num_beam_groups": (1,),
        "num_beams": (1,),
        "penalty_alpha": (0,),
        "sequence_bias": ([], {}),
        "token_healing": (False,),
        "top_h": (),
        "typical_p": (1,),
        "watermarking_config": ({},),
    }
)
"""Keys by which `transformers` would draw other tokens, and values that ask for nothing."""

_GGUF_START = "general.sampling."
_GGUF_NOT_OBEYED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"mirostat": (0,), "sequence": ("",)}
)
"""Names behind `_GGUF_START` that no parameter obeys, with the values that ask for nothing. Others
only say how one of these works."""


def read_generation_defaults(
    folder: Path, spec: ModelSpec, *, with_sampling: bool = True
) -> GenerationDefaults:
    """Return the defaults of a checkpoint folder; all are unset if it has no
    generation_config.json. A line in the log names the settings that are not obeyed.

    spec: the model; tokens outside of its vocabulary are banned anyway. with_sampling: False reads
    only the tokens that end a sequence. Raises ConfigError, naming file, key and value, if the file
    is broken or a value has the wrong type or no meaning.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    raw = read_json(path)
    eos_token_ids = raw.read_ids("eos_token_id")
    if min(eos_token_ids, default=0) < 0:
        raise ConfigError(
            f"{path}: eos_token_id={min(eos_token_ids)} is no token id; remove it from the file"
        )
    if not with_sampling:
        return GenerationDefaults(eos_token_ids=eos_token_ids)
    keys = {each.facts.in_config: each for each in _declared() if each.facts.in_config}
    numbers = {
        each.name: value
        for key, each in keys.items()
        if (value := raw.read_optional(_number(each), key)) is not None
    }
    if numbers.get("min_tokens") == 0:
        del numbers["min_tokens"]
    defaults = GenerationDefaults(
        numbers=tuple(numbers.items()),
        stop_strings=_read_stop_strings(raw),
        banned_words=_read_banned(raw, spec, {*spec.eos_token_ids, *eos_token_ids}),
        eos_token_ids=eos_token_ids,
    )
    names = {each.name: key for key, each in keys.items()} | {"stop": "stop_strings"}
    _check_meaning(raw, defaults.sampling(), names)
    _warn_of(raw.source, {key: raw.as_dict()[key] for key in raw if raw.has(key)}, _NOT_OBEYED)
    return defaults


def read_gguf_defaults(header: GGUFHeader) -> GenerationDefaults:
    """Defaults under "general.sampling." of a GGUF file. A line in the log names what of it is not
    obeyed, as what no request could have."""
    stated = {
        key.removeprefix(_GGUF_START): value
        for key, value in header.metadata.items()
        if key.startswith(_GGUF_START)
    }
    read = {each.facts.in_gguf: each for each in _declared() if each.facts.in_gguf}
    others = dict(_GGUF_NOT_OBEYED)
    if stated.get("penalty_last_n") != -1:  # not of all tokens, as here
        del read["penalty_repeat"]
        if stated.get("penalty_last_n") != 0:
            others["penalty_repeat"] = (1.0,)
    found: list[tuple[str, float]] = []
    for key, each in read.items():
        try:
            found += _read_suggestion(header, _GGUF_START + key, each)
        except ConfigError as error:
            _log.warning("not obeyed: %s", error)
    _warn_of(str(header.file), stated, others, _GGUF_START)
    return GenerationDefaults(numbers=tuple(found))


def _declared() -> Iterable[Declared]:
    from quire.protocol.sampling_params import SAMPLING_PARAMETERS  # with it comes numpy

    return SAMPLING_PARAMETERS.values()


def _number(declared: Declared) -> type[int] | type[float]:
    """The type of a parameter that is a number."""
    return int if declared.kind is int else float


def _read_suggestion(
    header: GGUFHeader, key: str, declared: Declared
) -> tuple[tuple[str, float], ...]:
    """Return name and value of a parameter if the file states one at this key. Raises ConfigError
    for a value that no request could have."""
    raw, name = RawConfig(header.metadata, str(header.file)), declared.name
    value = raw.read_optional(_number(declared), key)
    if value is None:
        return ()
    if name == "temperature":
        value = max(value, 0.0)  # llama.cpp takes the most likely token, as at 0
    _check_meaning(raw, {name: value}, {name: key})
    return ((name, value),)


def _warn_of(
    source: str,
    stated: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    start: str = "",
) -> None:
    """Name what is stated, asks for something and is not obeyed."""
    unread = [key for key, values in neutral.items() if key in stated and stated[key] not in values]
    if unread:
        _log.warning(
            "%s: not obeyed: %s; requests can say how tokens are drawn",
            source,
            ", ".join(f"{start}{key}={stated[key]!r}" for key in unread)[:500],
        )


def _read_stop_strings(raw: RawConfig) -> tuple[str, ...]:
    """Texts that end a sequence. Empty ones ask for nothing."""
    if isinstance(raw.as_dict().get("stop_strings"), str):
        texts = (raw.read(str, "stop_strings"),)
    else:
        texts = raw.read_list(str, "stop_strings") or ()
    return tuple(text for text in texts if text)


def _read_banned(raw: RawConfig, spec: ModelSpec, ending: set[int]) -> tuple[tuple[int, ...], ...]:
    """Tokens, and sequences of them, that must not come. A word that is an end alone does not
    count, as in `transformers`."""
    words: list[tuple[int, ...]]
    words = [(token,) for token in raw.read_list(int, "suppress_tokens") or ()]
    for index, each in enumerate(raw.read_list(object, "bad_words_ids") or ()):
        key = f"bad_words_ids[{index}]"
        word = RawConfig({key: each}, raw.source).read_list(int, key) or ()
        if word not in {(), *((token,) for token in ending)}:
            words.append(word)
    known = range(spec.vocab_size)
    return tuple(dict.fromkeys(word for word in words if all(token in known for token in word)))


def _check_meaning(raw: RawConfig, values: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Check the values against the ranges that requests have. keys: keys of the file by parameter,
    where the names differ."""
    from quire.protocol.sampling_params import SamplingParams

    for name, value in values.items():
        try:
            SamplingParams.from_optional({"max_tokens": None, name: value})
        except RequestError as error:
            key = keys.get(name, name)
            raise ConfigError(
                f"{raw.source}: {key}={value!r} cannot be the default of requests ({error}) "
                "Correct the file, or start with generation_config none."
            ) from error
