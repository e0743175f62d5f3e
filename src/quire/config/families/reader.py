"""`read_model_spec`: config.json, or the header of a GGUF file, to `ModelSpec`.

Each family of `quire.config.families` reads its own config.json. A third party adds an architecture
with an entry point of the group `quire.model_specs` that names a reader
`(RawConfig, dtype) -> ModelSpec`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError
from quire.base.platform.interrupts import is_ctrl_c
from quire.config.checkpoint import read_checkpoint
from quire.config.families import ARCHITECTURE_OF_TYPE, READERS, SpecReader
from quire.config.families.encoders.classes import with_answers
from quire.config.families.gemma import Gemma2Traits
from quire.config.families.generic import has_transformers, read_generic
from quire.config.families.nested import text_config, with_unseen
from quire.config.generation import read_generation_defaults, read_gguf_defaults
from quire.config.gguf import config_of, dtype_of, is_gguf, read_gguf_parts
from quire.config.hf import RawConfig, read_json
from quire.config.model_spec import DTYPE_BYTES, GenericTraits, LlamaTraits, ModelSpec
from quire.config.packed import read_packed_settings
from quire.config.sentence import longest_sentence

if TYPE_CHECKING:  # 50 ms that known models need not spend
    from importlib.metadata import EntryPoint

__all__ = ["flat_config", "read_model_spec"]

_log = logging.getLogger("quire.config")

SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
USUAL_DTYPE = "bfloat16"
"""Dtype of models that state none and have no weights here, as `load_format="dummy"` allows."""


def read_model_spec(
    folder: Path,
    *,
    with_sampling: bool = True,
    overrides: Mapping[str, Any] | None = None,
    dtype_is_chosen: bool = False,
    implementation: str = "auto",
    longest: int | None = None,
) -> ModelSpec:
    """Parse config.json and generation_config.json of a checkpoint folder, or the header of a GGUF
    file.

    with_sampling: whether the latter's sampling defaults count. overrides: values that stand in
    place of those of config.json. dtype_is_chosen: the user has given one, so that of the
    checkpoint need not be one that quire knows. implementation: "transformers" has that library
    compute the model, "quire" never, "auto" where quire has no file for it. longest: tokens of the
    longest sequence, if that is chosen already and may exceed the model's own. Raises ConfigError,
    naming file, key and value, for anything that quire cannot serve.
    """
    if is_gguf(folder):
        spec = _read_gguf_spec(folder, overrides or {}, with_sampling=with_sampling)
        return spec.within(max(spec.max_context, longest or 0))
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder}: has no config.json; give the folder of a Hugging Face style checkpoint, a "
            "GGUF file, or the type of one in a repository, such as organization/name:Q4_K_M"
        )
    raw = flat_config(read_json(path)).overridden(overrides or {})
    if implementation == "transformers" or (implementation == "auto" and _is_unknown(raw)):
        architecture = next(iter(_stated(raw)), "")
        dtype = _read_dtype(raw, folder, dtype_is_chosen)
        try:
            spec = _read_by_transformers(raw, folder, overrides or {}, dtype)
        except ConfigError as error:
            if implementation == "transformers":
                raise
            raise ConfigError(f"{_not_supported(raw, architecture)}; {error}") from error
    else:
        architecture, reader = _find_reader(raw)
        read_packed_settings(folder)
        spec = reader(raw, _read_dtype(raw, folder, dtype_is_chosen))
        spec = with_answers(_in_both_directions(spec, raw), raw, folder)
    spec = _without_missing_head(spec, architecture, folder)
    of_sentence = longest_sentence(folder, is_encoder=spec.is_encoder)
    has_table = spec.has_learned_positions and not spec.is_encoder  # as long as the context
    if of_sentence is not None and not has_table:
        spec = replace(spec, max_context=min(spec.max_context, of_sentence))
    spec = spec.within(max(spec.max_context, longest or 0))
    generation = read_generation_defaults(folder, spec, with_sampling=with_sampling)
    eos = dict.fromkeys(spec.eos_token_ids + generation.eos_token_ids)
    return replace(spec, architecture=architecture, generation=generation, eos_token_ids=tuple(eos))


def _read_by_transformers(
    raw: RawConfig, folder: Path, overrides: Mapping[str, Any], dtype: str
) -> ModelSpec:
    """Raises ConfigError for what that library would not be told, or knows in another way."""
    if overrides:
        raise ConfigError("hf_overrides does not reach transformers; change config.json instead")
    if read_packed_settings(folder) is not None:
        raise ConfigError(
            f"{raw.source}: quantized checkpoints are served by quire's own models alone; use one "
            "that is not, with quantization= if you like"
        )
    return read_generic(raw, folder, dtype)


def _read_gguf_spec(file: Path, overrides: Mapping[str, Any], *, with_sampling: bool) -> ModelSpec:
    header = read_gguf_parts(file)
    raw = config_of(header).overridden(overrides)
    architecture, reader = _find_reader(raw)
    spec = _in_both_directions(reader(raw, dtype_of(header)), raw)
    generation = read_gguf_defaults(header) if with_sampling else spec.generation
    return replace(spec, architecture=architecture, generation=generation)


def _in_both_directions(spec: ModelSpec, raw: RawConfig) -> ModelSpec:
    """A decoder whose prompts see all of themselves if the config says so, as `transformers` takes
    it: windows reach as far behind a token as before it, and there the token itself is not counted.
    """
    if spec.prompt_attention is not None or raw.read(bool, "is_causal", default=True):
        return spec
    windows = tuple(None if window is None else window + 1 for window in spec.windows)
    return replace(spec, prompt_attention="bidirectional", windows=windows)


def flat_config(raw: RawConfig) -> RawConfig:
    """config.json as one of a text model alone would be: the nested part of one of several parts
    whose text model is of a known family."""
    nested = None if any(name in READERS for name in _stated(raw)) else text_config(raw)
    if nested is None:
        return with_unseen(raw)
    architecture = ARCHITECTURE_OF_TYPE[nested.read(str, "model_type")]
    return RawConfig({**nested.as_dict(), "architectures": [architecture]}, nested.source)


def _is_unknown(raw: RawConfig) -> bool:
    """Return whether neither quire nor a third party has a reader for this architecture, so that it
    is worth asking `transformers`."""
    from importlib.metadata import entry_points

    name = next(iter(_stated(raw)), None)
    if name is None or name in READERS or not raw.has("model_type") or not has_transformers():
        return False
    return not entry_points(group="quire.model_specs", name=name)


def _not_supported(raw: RawConfig, name: str) -> str:
    from importlib.metadata import entry_points

    known = ", ".join(sorted({*READERS, *entry_points(group="quire.model_specs").names}))
    return f"{raw.source}: architecture {name} is not supported; quire serves {known}"


def _find_reader(raw: RawConfig) -> tuple[str, SpecReader]:
    name = _architecture(raw)
    if name in READERS:
        return name, READERS[name]
    from importlib.metadata import entry_points

    third_party = {point.name: point for point in entry_points(group="quire.model_specs")}
    if name in third_party:
        return name, partial(_read_by_others, name, third_party[name])
    raise ConfigError(_not_supported(raw, name))


def _read_by_others(name: str, point: EntryPoint, raw: RawConfig, dtype: str) -> ModelSpec:
    """Read by a package of somebody's. ConfigError with its words for whatever it raises."""
    try:
        return point.load()(raw, dtype)
    except ConfigError:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(
            f"the reader of architecture {name!r} ({point.value}) failed ({error!r}): mend its "
            "package, or leave it out"
        ) from error


def _architecture(raw: RawConfig) -> str:
    """Return the stated architecture, or that of the model type: trainers and converters omit the
    first."""
    if stated := _stated(raw):
        return stated[0]
    kind = raw.read_optional(str, "model_type")
    if kind is None or kind not in ARCHITECTURE_OF_TYPE:
        return "not stated"
    _log.warning(
        "%s: architectures is not stated; %s is taken, for model_type=%r",
        raw.source,
        ARCHITECTURE_OF_TYPE[kind],
        kind,
    )
    return ARCHITECTURE_OF_TYPE[kind]


def _stated(raw: RawConfig) -> tuple[str, ...]:
    return raw.read_list(str, "architectures") or ()


def _read_dtype(raw: RawConfig, folder: Path, is_chosen: bool) -> str:
    stated = raw.read_optional(str, "dtype", "torch_dtype")
    if stated is not None:
        stated = stated.removeprefix("torch.")
        if stated in DTYPE_BYTES:
            return stated
        if is_chosen:
            _log.warning("%s: dtype=%r does not count, since another was given", raw.source, stated)
            return USUAL_DTYPE
        raise ConfigError(
            f"{raw.unsupported('dtype', stated, DTYPE_BYTES)}, or give the setting dtype"
        )
    if not any(folder.glob("*.safetensors*")):
        return USUAL_DTYPE
    counts: dict[str, int] = {}
    for tensor in read_checkpoint(folder).tensors.values():
        if tensor.packed is None:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.num_bytes
    most = max(counts, key=lambda dtype: counts[dtype], default="F32")
    if most not in SAFETENSORS_DTYPES and is_chosen:
        return USUAL_DTYPE  # and loading refuses what it cannot convert
    if most not in SAFETENSORS_DTYPES:
        raise raw.unsupported("dtype of the weights", most, SAFETENSORS_DTYPES)
    return SAFETENSORS_DTYPES[most]


def _without_missing_head(spec: ModelSpec, architecture: str, folder: Path) -> ModelSpec:
    """Return the model without a head that its files leave out. Raises ConfigError if it is of a
    family that is not computed without one."""
    if not _lacks_head(spec, folder):
        return spec
    if isinstance(spec.traits, LlamaTraits | Gemma2Traits):
        _log.warning("%s: has no head for logits, so it gives vectors and no texts", folder)
        return spec.without_head()
    if isinstance(spec.traits, GenericTraits) or architecture not in READERS:
        return spec  # its head may have another name
    raise ConfigError(
        f"{folder}: has no head for logits, which {architecture} needs here, also for vectors; "
        "take files that have it"
    )


def _lacks_head(spec: ModelSpec, folder: Path) -> bool:
    """Return whether files for vectors, as modules.json says, leave out a head that is not tied."""
    if spec.tie_word_embeddings or not spec.draws_tokens or not (folder / "modules.json").is_file():
        return False
    if not any(folder.glob("*.safetensors*")):
        return False
    heads = ("lm_head.", "embed_out.", "output.")
    return not any(name.startswith(heads) for name in read_checkpoint(folder).tensors)
