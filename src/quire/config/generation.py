"""Reads generation_config.json: what the model's authors suggest for sampling and stopping."""

from __future__ import annotations

from pathlib import Path

from quire.config.hf import RawConfig, read_json
from quire.config.model_spec import GenerationDefaults
from quire.errors import ConfigError, RequestError

__all__ = ["read_generation_defaults"]


def read_generation_defaults(folder: Path, *, with_sampling: bool = True) -> GenerationDefaults:
    """Defaults of a checkpoint folder; all unset if it has no generation_config.json.

    with_sampling: False reads only what ends a sequence. Raises ConfigError, naming file, key and
    value, if the file is broken or a value has the wrong type or no meaning.
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
    defaults = GenerationDefaults(
        temperature=raw.read_optional(float, "temperature"),
        top_p=raw.read_optional(float, "top_p"),
        top_k=raw.read_optional(int, "top_k"),
        min_p=raw.read_optional(float, "min_p"),
        repetition_penalty=raw.read_optional(float, "repetition_penalty"),
        max_new_tokens=raw.read_optional(int, "max_new_tokens"),
        eos_token_ids=eos_token_ids,
    )
    _check_meaning(raw, defaults)
    return defaults


def _check_meaning(raw: RawConfig, defaults: GenerationDefaults) -> None:
    """Check the values against the ranges that requests have."""
    from quire.protocol.sampling_params import SamplingParams  # with it comes numpy

    for name, value in defaults.sampling().items():
        try:
            SamplingParams.from_optional({name: value})
        except RequestError as error:
            key = "max_new_tokens" if name == "max_tokens" else name
            raise ConfigError(
                f"{raw.source}: {key}={value!r} cannot be the default of requests ({error}) "
                "Correct the file, or start with generation_config none."
            ) from error
