"""Any checkpoint that quire loads, written as a Hugging Face folder."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.base.platform.outputs import check_new_folder
from quire.config import read_json, read_model_spec
from quire.config.checkpoint import INDEX_NAME
from quire.config.families.reader import flat_config
from quire.config.gguf import config_of, is_gguf, read_gguf_parts
from quire.config.media.images import find_images
from quire.config.quantization import QUANTIZATIONS
from quire.config.sentence import module_folders
from quire.config.settings import EngineSettings
from quire.text.rendering.gguf import read_gguf_templates, read_gguf_tokenizer

__all__ = ["convert_model", "copy_rest", "new_checkpoint"]

_ON_STORAGE = ("quantization_config", "compression_config", "torch_dtype")
"""Keys of config.json on how weights are stored."""

DTYPE = "bfloat16"
COPIED = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Endings of files beside the weights: tokenizer, templates, generation settings, license."""

REPLACED = (
    "config.json", INDEX_NAME, "quantize_config.json", "quant_config.json", "hf_quant_config.json",
    "pytorch_model.bin.index.json",
)  # fmt: skip


def convert_model(
    folder: Path,
    out: Path,
    quantization: str | None = None,
    *,
    plain_head: bool = False,
    rotate: bool = True,
) -> None:
    """Write the checkpoint `folder`, which may be a GGUF file, into the new folder `out`; of a GGUF
    file the language model alone.

    Plain tensors become bfloat16; with `quantization`, the matrices that it quantizes are stored so
    in the format of compressed-tensors, and loading gives what that setting gives for the
    checkpoint in bfloat16. plain_head: the projection to logits, and a table that is tied to it,
    stay plain. rotate: inputs and weights, as that setting does; without, engines that know no
    `transform_config` read the folder too. `out` appears once it is whole.
    Raises ConfigError: `out` is there, a format that does not exist, or as loading does.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise ConfigError(f"quantization cannot be {quantization!r}. Give one of: {known}.")
    with new_checkpoint(folder, out) as partial:
        spec = replace(read_model_spec(folder), dtype=DTYPE)
        # The language model alone is written where the model is a GGUF file.
        images = None if is_gguf(folder) else find_images(folder, spec, EngineSettings())
        spec = replace(spec, images=images)
        from quire.compute.models.convert import NamedFormats, convert_weights
        from quire.compute.models.heads import stored_layers
        from quire.ops import build_op_set, force_isa

        ops = build_op_set(detect_platform(), force_isa("none"))
        formats = NamedFormats(ops, quantization, plain_head=plain_head, rotate=rotate)
        beside = functools.partial(stored_layers, spec, folder, ops)
        converted = convert_weights(spec, folder, partial, ops, formats, beside)
        _write_json(partial / INDEX_NAME, converted.index)
        stated = {"dtype": DTYPE, "tie_word_embeddings": converted.is_tied}
        if images is None:
            config = _config(folder) | stated
        else:
            config = _nested_config(folder, stated)
        if converted.quantization is not None:
            config["quantization_config"] = converted.quantization
        _write_json(partial / "config.json", config)
        copy_rest(folder, partial)


@contextmanager
def new_checkpoint(folder: Path, out: Path) -> Generator[Path, None, None]:
    """Give an empty folder in which a checkpoint is written that is made of `folder`; it becomes
    `out` at the end, and is gone after an exception. It gets a config.json. Raises ConfigError: out
    is there, lies in `folder`, or cannot be written."""
    check_new_folder(out)
    if out.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{out} lies within {folder}; name a folder beside it")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in partial.glob("*.safetensors"):  # which is written for its owner alone
            shutil.copymode(partial / "config.json", file)
        partial.rename(out)
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be written ({error.strerror}); free some space, or name another place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(folder: Path) -> dict[str, Any]:
    """Return config.json without its statements on how weights are stored."""
    if is_gguf(folder):
        stated = config_of(read_gguf_parts(folder)).as_dict()
        # null is a value to transformers, where the file says nothing
        return {key: value for key, value in stated.items() if value is not None}
    config = flat_config(read_json(folder / "config.json")).as_dict()
    return {key: value for key, value in config.items() if key not in _ON_STORAGE}


def _nested_config(folder: Path, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a model with more parts than text. stated: values of all parts as far
    as they have them, and of the text model."""
    config = read_json(folder / "config.json").as_dict()
    text = config.get("text_config")
    for key, section in config.items():
        if isinstance(section, dict):
            part = cast("dict[str, Any]", section)
            known = {name: value for name, value in stated.items() if name in part}
            plain = {name: value for name, value in part.items() if name not in _ON_STORAGE}
            config[key] = {**plain, **(stated if section is text else known)}
    return {key: value for key, value in config.items() if key not in _ON_STORAGE} | dict(stated)


def copy_rest(folder: Path, out: Path) -> None:
    """Write tokenizer, templates, settings of generation, and what becomes of hidden states."""
    if not is_gguf(folder):
        modules = module_folders(folder)
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix in COPIED and path.name not in REPLACED:
                shutil.copyfile(path, out / path.name)
            elif path.is_dir() and path.name in modules:
                _copy_module(path, out / path.name)
        return
    backend, files = read_gguf_tokenizer(folder)
    backend.save(str(out / "tokenizer.json"))
    named = {name: token.content for name, token in files.named.items()}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    templates = read_gguf_templates(folder)
    if templates.keys() == {"default"}:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    _write_json(out / "tokenizer_config.json", settings)


def _copy_module(folder: Path, out: Path) -> None:
    out.mkdir()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in COPIED:
            shutil.copyfile(path, out / path.name)


def _write_json(path: Path, content: Mapping[str, Any] | None) -> None:
    """None writes nothing."""
    if content is not None:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
