"""Tensors of a GGUF file under the names that Hugging Face folders give them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire.base.errors import ConfigError
from quire.config.families import FAMILIES, Family
from quire.config.families.gguf_names import SHARED_GATE, GGUFNames
from quire.config.gguf.header import GGUFEntry, GGUFHeader

__all__ = [
    "GGUFLayout",
    "find_architecture",
    "layout_of",
    "num_draft_blocks",
]

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GATE_UP, _GATE_AND_UP = "ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")
"""One tensor of gate and up of all experts, and the two that may stand in its place."""

_WHOLE_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "layer_output_scale.weight": "layer_scalar",
}
"""Tensors of a block whose names have no ending in folders."""

_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_TENSOR = re.compile(
    r"(?:blk\.(?P<layer>\d{1,6})\.)?(?P<part>\w+(\.\w+)?)\.(?P<kind>weight|bias|scale)"
)
_CONVS = ("shortconv.conv.weight", "ssm_conv1d.weight")
"""Taps of each channel, [channels, taps]: folders have a dimension more between the two."""

_RATES, _SKIPS = ".ssm_a", ".ssm_d"
"""Endings of tensors of decay rates and of factors on inputs: names without "weight"."""

_FLAT = (_RATES, _SKIPS, ".ssm_norm.weight")
"""Numbers of heads or channels, which some files have in two dimensions."""

_MTP = "nextn."
_MTP_PARTS = {
    "nextn.eh_proj": "join",
    "nextn.enorm": "token_norm",
    "nextn.hnorm": "state_norm",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "table",
    "nextn.shared_head_head": "head",
}
"""Tensors of an MTP layer beside its block, and the fields of `MTPNames` with their names."""

BUFFERS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are settings, not weights: `config_of` reads them."""


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """Mapping of a tensor's rows on disk to those of its Hugging Face counterpart.

    entry: the tensor in the file. paired_heads: number of heads whose rows are in the order of the
    rotated pairs (first element of each half, then second, ...); 0 leaves rows as they are.
    adds_one: each number is larger by 1 than in the Hugging Face tensor. is_rate: each is -exp of
    that there. frames: tensors with the further frames of a patch, [outputs, channels · pixels] as
    `entry`; the counterpart has the frames of a channel together.
    """

    entry: GGUFEntry
    paired_heads: int = 0
    adds_one: bool = False
    is_rate: bool = False
    frames: tuple[GGUFEntry, ...] = ()


def find_architecture(header: GGUFHeader) -> tuple[GGUFNames, Family]:
    """Return the family of a file, and its names there. Raises ConfigError for an unknown
    `general.architecture`."""
    name = header.string("general.architecture")
    if name == "clip":
        raise ConfigError(
            f"{header.file}: is an image encoder; give the GGUF file of its language model, and "
            "this one by mmproj, or put it beside the model"
        )
    known = [(family.gguf, family) for family in FAMILIES if family.gguf is not None]
    found = {
        names.told_by: (replace(names, name=name), family)
        for names, family in known
        if name is not None and name in (names.name, *names.also)
    }
    if name is None or not found:
        stated = "is missing" if name is None else f"{name[:80]!r} is not supported"
        all_names = ", ".join(
            sorted({each for names, _ in known for each in (names.name, *names.also)})
        )
        raise ConfigError(
            f"{header.file}: general.architecture {stated}; quire reads GGUF files of {all_names}"
        )
    told = (key for key in found if key is not None and header.integer(f"{name}.{key}"))
    return found[next(told, None)]


def num_draft_blocks(header: GGUFHeader, name: str) -> int:
    """Blocks behind the last layer that guess further tokens."""
    return header.integer(f"{name}.nextn_predict_layers") or 0


def layout_of(header: GGUFHeader) -> dict[str, GGUFLayout]:
    """Every weight of the model by its Hugging Face name, those of experts one by one; a tensor
    that has none keeps its own. Of the blocks that guess further tokens the first is there, all of
    whose names have one beginning (`MTPNames`).

    Raises ConfigError for an unknown architecture, or heads that do not divide the rows."""
    names, _ = find_architecture(header)
    name, heads = names.name, dict[str, int]()
    if names.pairs_heads:
        num_heads = header.integer(f"{name}.attention.head_count") or 0
        key = f"{name}.attention.head_count_kv"
        if key in header.arrays:  # 0 in layers that do not attend
            counts = [each for each in header.array(key) or () if isinstance(each, int)]
            own = max(counts, default=0)
        else:
            own = header.integer(key) or 0
        own = own or num_heads
        heads = {"attn_q": num_heads, "attn_k": own}
    found: dict[str, GGUFLayout] = {}
    drafts = num_draft_blocks(header, name)
    num_layers = (header.integer(f"{name}.block_count") or 0) - drafts
    for entry in header.tensors.values():
        layer = _LAYER.match(entry.name)
        place = 0 if drafts == 0 or layer is None else int(layer[1]) - num_layers + 1
        if entry.name in BUFFERS or place > 1:
            continue
        is_rate = entry.name.endswith(_RATES)
        is_bare = entry.name.endswith((_RATES, _SKIPS))
        match = _TENSOR.fullmatch(f"{entry.name}.weight" if is_bare else entry.name)
        part = match["part"] if match else ""
        paired = heads.get(part, 0)
        if paired < 0 or (paired and entry.shape[0] % (2 * paired)):
            raise ConfigError(
                f"{header.file}: tensor {entry.name!r} has {entry.shape[0]} rows, which are no "
                f"whole number of pairs for {paired} heads"
            )
        adds_one = names.adds_one and part.endswith("norm") and part not in names.plain_norms
        is_mtp = place == 1
        of_none = f"{names.mtp.start.format(num_layers)}{entry.name}" if is_mtp else entry.name
        places = _hugging_face_names(match, names, is_mtp=is_mtp) or (of_none,)
        for full, own in _one_by_one(places, entry):
            if full in found:
                raise ConfigError(
                    f"{header.file}: tensors {found[full].entry.name!r} and {entry.name!r} are "
                    "the same weight; fetch the file again"
                )
            found[full] = GGUFLayout(own, paired, adds_one, is_rate)
    return found


def _one_by_one(places: tuple[str, ...], entry: GGUFEntry) -> Iterator[tuple[str, GGUFEntry]]:
    """Yield a tensor by its name, or the matrices of all experts that it holds by theirs. places:
    names of those of an expert, which share its rows equally."""
    place = places[0]
    if entry.name.endswith(f"{SHARED_GATE}.weight") and len(entry.shape) == 1:
        entry = replace(entry, shape=(1, *entry.shape))  # a projection to one number
    if entry.name.endswith(_FLAT) and len(entry.shape) == 2:
        entry = replace(entry, shape=(entry.shape[0] * entry.shape[1],))
    if entry.name.endswith(_CONVS) and len(entry.shape) == 2:
        entry = replace(entry, shape=(entry.shape[0], 1, entry.shape[1]))
    if "{}" not in place or len(entry.shape) != (2 if place.endswith(".bias") else 3):
        yield place, entry
        return
    experts, rows, *rest = entry.shape
    if rows % len(places):
        yield entry.name, entry  # is refused under its own name
        return
    shape = (rows // len(places), *rest)
    size = (entry.end - entry.start) // (experts * len(places))
    for index in range(experts * len(places)):
        expert, part = divmod(index, len(places))
        start = entry.start + index * size
        own = replace(entry, shape=shape, start=start, end=start + size)
        yield places[part].format(expert), own


def _hugging_face_names(
    match: re.Match[str] | None, gguf: GGUFNames, *, is_mtp: bool
) -> tuple[str, ...]:
    """Return the name of a tensor, or those of an expert's parts that it holds; () for none.
    is_mtp: the tensor's block is an MTP layer."""
    if match is None:
        return ()
    names, prefix = {**_OUTER, **gguf.outer}, ""
    if is_mtp and match["part"].startswith(_MTP):
        names = {part: getattr(gguf.mtp, field) for part, field in _MTP_PARTS.items()}
        prefix = gguf.mtp.start.format(int(match["layer"]))
    elif match["layer"] is not None:
        names, prefix = gguf.block, gguf.blocks.format(int(match["layer"]))
        if is_mtp:
            start = gguf.mtp.start.format(int(match["layer"]))
            prefix = start + gguf.mtp.block.format(0)
        full = f"{match['part']}.{match['kind']}"
        whole = names.get(full) or _WHOLE_NAMES.get(full)
        if whole is not None:
            return (prefix + whole,)
    parts = _GATE_AND_UP if match["part"] == _GATE_UP else (match["part"],)
    if match["kind"] == "scale" or any(part not in names for part in parts):
        return ()
    return tuple(f"{prefix}{names[part]}.{match['kind']}" for part in parts)
