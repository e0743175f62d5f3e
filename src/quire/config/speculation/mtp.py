"""The MTP layer of a checkpoint (multi-token prediction; DeepSeek-AI 2024, arXiv:2412.19437,
section 2.2), found and checked beside its model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.base.errors import ConfigError
from quire.config.checkpoint import Checkpoint, TensorInfo
from quire.config.families.mtp import DEEPSEEK_MTP, MTPNames, mtp_names
from quire.config.kv_layout import KVLayout
from quire.config.memory.plan import is_loaded, weight_bytes
from quire.config.memory.ranks import rank_weight_bytes
from quire.config.model_spec import MatrixShape, ModelSpec, ParameterCounts
from quire.config.shard import Shard
from quire.config.speculation.heads import layer_page_bytes, layer_step_bytes

__all__ = ["MTPDraft", "find_mtp", "stored_mtp"]

_PLAIN = re.compile(r"\.(gate|shared_expert_gate|kv_b_proj|k_b_proj|v_b_proj)\.weight$")
"""Matrices that keep the model's dtype whatever the format of others."""


@dataclass(frozen=True, slots=True)
class MTPDraft:
    """An MTP layer. Given the model's state at a token and the token after it, it gives a state
    from which the model's head guesses the token after that one.

    folder: folder, or GGUF file, of the model. target: the model. layer: a model of one layer, like
    a layer of the target with full attention. checkpoint: tensors of the layer, by their names on
    disk; None if weights are made up. start: beginning of these names. num_ranks: ranks that share
    the layer; sizes are those of one.
    """

    folder: Path
    target: ModelSpec
    layer: ModelSpec
    checkpoint: Checkpoint | None
    start: str
    num_ranks: int = 1
    is_cut = True

    @property
    def is_deepseek(self) -> bool:
        """True if the layer reads nothing of the second token of a sequence, and goes on from its
        state before the final norm. Layers of Qwen read all, go on from the state behind the norm,
        and their norms are zero-centred."""
        return self.names is DEEPSEEK_MTP

    @property
    def names(self) -> MTPNames:
        """Names of the layer's tensors."""
        return mtp_names(self.start)

    @property
    def name(self) -> str:
        """Name for the report."""
        return f"MTP layer of {self.folder.name}"

    def with_dtype(self, dtype: str) -> MTPDraft:
        """The same in the dtype of the computation."""
        target, layer = (replace(each, dtype=dtype) for each in (self.target, self.layer))
        return replace(self, target=target, layer=layer)

    def weight_bytes(self, quantization: str | None) -> int:
        """Weights in memory."""
        weights = weight_bytes(self.layer, self.checkpoint, quantization)
        return rank_weight_bytes(self.layer, weights, self.num_ranks)

    def step_bytes(self, step_tokens: int, num_seqs: int) -> int:
        """See `layer_step_bytes`."""
        width = self.target.hidden_size
        return layer_step_bytes(self.target, self.layer, width, step_tokens, num_seqs)

    def page_bytes(self, layout: KVLayout) -> int:
        """See `layer_page_bytes`."""
        return layer_page_bytes(self.target, self.layout(layout), self.target.hidden_size)

    def layout(self, target: KVLayout) -> KVLayout:
        """Return the layout of a rank's K/V of the layer, beside that of the target."""
        return KVLayout.of_draft(self.layer, target).of_rank(Shard(0, self.num_ranks))


def find_mtp(
    target: ModelSpec, folder: Path, checkpoint: Checkpoint | None, num_ranks: int
) -> MTPDraft:
    """Find the MTP layer of a model; the first one, if it has several. checkpoint: headers of the
    model's files; None if weights are made up, those of the layer too. Raises ConfigError without
    such a layer. num_ranks: ranks that share the layer."""
    if not target.mtp_layers:
        raise ConfigError(_none_message(folder, "its settings name none"))
    start = target.mtp_layers[0]
    if checkpoint is None:
        return MTPDraft(folder, target, _made_up_layer(target), None, start, num_ranks)
    found = _stored(target, folder, checkpoint, start)
    join = _join_of(start)
    if found is None:
        raise ConfigError(_none_message(folder, f"{join} is missing"))
    return replace(found, num_ranks=num_ranks)


def stored_mtp(target: ModelSpec, folder: Path, checkpoint: Checkpoint) -> list[MTPDraft]:
    """Return all MTP layers that the files of a model have. Arguments as of `find_mtp`."""
    found = (_stored(target, folder, checkpoint, start) for start in target.mtp_layers)
    return [each for each in found if each is not None]


def _join_of(start: str) -> str:
    return f"{start}{mtp_names(start).join}.weight"


def _stored(target: ModelSpec, folder: Path, checkpoint: Checkpoint, start: str) -> MTPDraft | None:
    """Return the layer with names that begin so; None without one."""
    names = mtp_names(start)
    copies = {f"{start}{name}.weight" for name in (names.table, names.head)}
    tensors = {
        name: tensor
        for name, tensor in {**checkpoint.tensors, **checkpoint.others}.items()
        if name.startswith(start) and name not in copies and is_loaded(name)
    }
    if _join_of(start) not in tensors:
        return None
    own = replace(checkpoint, tensors=tensors, others={})
    return MTPDraft(folder, target, _layer_of(target, tensors), own, start)


def _none_message(folder: Path, reason: str) -> str:
    return (
        f"speculative_config has method='mtp', but {folder} has no MTP layer ({reason}): take a "
        "checkpoint that has one, or method='auto'."
    )


def _layer_of(target: ModelSpec, tensors: Mapping[str, TensorInfo]) -> ModelSpec:
    """Return a model of one layer with these tensors, like the last one with full attention."""
    matrices = (
        MatrixShape(*tensor.shape)
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and not _PLAIN.search(name)
    )
    count = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return _one_layer(target, tuple(matrices), count)


def _made_up_layer(target: ModelSpec) -> ModelSpec:
    """Return the same without tensors. Its size is that of a layer with experts, if there are any,
    or else the mean of all layers."""
    experts, counts = target.experts, target.parameters
    num_alike = target.num_layers if experts is None else max(sum(experts.layers), 1)
    size = target.hidden_size
    matrices = [
        replace(each, count=each.count // num_alike)
        for each in target.matrices
        if each.count >= num_alike and not each.is_head
    ]
    of_join = 2 * size * size + 3 * size
    count = counts.layer + max(counts.extra, 0) // num_alike + of_join
    return _one_layer(target, (*matrices, MatrixShape(size, 2 * size)), count)


def _one_layer(
    target: ModelSpec, matrices: tuple[MatrixShape, ...], num_parameters: int
) -> ModelSpec:
    last = next(i for i in reversed(target.kv_layers) if target.windows[i] is None)
    experts = target.experts
    return replace(
        target,
        num_layers=1,
        windows=(None,),
        ropes=(target.ropes[last],),
        experts=None if experts is None else replace(experts, layers=(True,)),
        matrices=matrices,
        parameters=ParameterCounts(embedding=0, layer=num_parameters, head=0),
        tie_word_embeddings=True,  # there is neither a table nor a head
        states=(),
        wide_states=(),
        state_inputs=0,
        mtp_layers=(),
    )
