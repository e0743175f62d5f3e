"""The MTP layer of a checkpoint (multi-token prediction; DeepSeek-AI 2024, arXiv:2412.19437,
section 2.2), found and checked beside its model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.config.checkpoint import Checkpoint, TensorInfo
from quire.config.families.mtp import DEEPSEEK_MTP, MTPNames, mtp_names
from quire.config.kv_layout import KVLayout
from quire.config.memory.plan import is_loaded, weight_bytes
from quire.config.model_spec import MatrixShape, ModelSpec
from quire.config.speculation.heads import layer_page_bytes, layer_step_bytes
from quire.errors import ConfigError

__all__ = ["MTPDraft", "find_mtp"]

_PLAIN = re.compile(r"\.(gate|shared_expert_gate|kv_b_proj|k_b_proj|v_b_proj)\.weight$")
"""Matrices that keep the model's dtype whatever the format of others."""


@dataclass(frozen=True, slots=True)
class MTPDraft:
    """An MTP layer. Given the model's state at a token and the token after it, it gives a state
    from which the model's head guesses the token after that one.

    folder: folder, or GGUF file, of the model. target: the model. layer: a model of one layer, like
    a layer of the target with full attention. checkpoint: tensors of the layer, by their names on
    disk. start: beginning of these names.
    """

    folder: Path
    target: ModelSpec
    layer: ModelSpec
    checkpoint: Checkpoint
    start: str

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
        return weight_bytes(self.layer, self.checkpoint, quantization)

    def step_bytes(self, step_tokens: int, num_seqs: int) -> int:
        """See `layer_step_bytes`."""
        width = self.target.hidden_size
        return layer_step_bytes(self.target, self.layer, width, step_tokens, num_seqs)

    def page_bytes(self, layout: KVLayout) -> int:
        """See `layer_page_bytes`."""
        return layer_page_bytes(self.target, self.layout(layout), self.target.hidden_size)

    def layout(self, target: KVLayout) -> KVLayout:
        """Return the layout of the layer's K/V beside that of the target."""
        return KVLayout.of_draft(self.layer, target)


def find_mtp(target: ModelSpec, folder: Path, checkpoint: Checkpoint | None) -> MTPDraft:
    """Find the MTP layer of a model; the first one, if it has several. checkpoint: headers of the
    model's files; None if weights are made up. Raises ConfigError without such a layer."""
    if checkpoint is None:
        raise ConfigError(
            "speculative_config has method='mtp', and load_format='dummy' makes up no MTP layer: "
            "leave one of them out."
        )
    if not target.mtp_layers:
        raise ConfigError(_none_message(folder, "its settings name none"))
    start = target.mtp_layers[0]
    names = mtp_names(start)
    copies = {f"{start}{name}.weight" for name in (names.table, names.head)}
    tensors = {
        name: tensor
        for name, tensor in {**checkpoint.tensors, **checkpoint.others}.items()
        if name.startswith(start) and name not in copies and is_loaded(name)
    }
    join = f"{start}{names.join}.weight"
    if join not in tensors:
        raise ConfigError(_none_message(folder, f"{join} is missing"))
    own = replace(checkpoint, tensors=tensors, others={})
    return MTPDraft(folder, target, _layer_of(target, tensors), own, start)


def _none_message(folder: Path, reason: str) -> str:
    return (
        f"speculative_config has method='mtp', but {folder} has no MTP layer ({reason}): take a "
        "checkpoint that has one, or method='auto'."
    )


def _layer_of(target: ModelSpec, tensors: Mapping[str, TensorInfo]) -> ModelSpec:
    """Return a model of one layer with these tensors, like the last one with full attention."""
    last = next(i for i in reversed(target.kv_layers) if target.windows[i] is None)
    experts = target.experts
    matrices = (
        MatrixShape(*tensor.shape)
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and not _PLAIN.search(name)
    )
    return replace(
        target,
        num_layers=1,
        windows=(None,),
        ropes=(target.ropes[last],),
        experts=None if experts is None else replace(experts, layers=(True,)),
        matrices=tuple(matrices),
        states=(),
        wide_states=(),
        state_inputs=0,
        mtp_layers=(),
    )
