"""MTP layers (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

A projection joins the normed state of the model at a token with the normed embedding of the token
after it. A block of the model follows, and a norm; then the model's own head guesses the token
after that one. The table of tokens and the head are the model's: copies in a checkpoint are left
out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from quire.base.errors import ConfigError
from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory, TokenColumns
from quire.compute.models.causal_lm import CausalLM, HasMTP
from quire.compute.models.loader import fill_model, fill_with_noise, match_layers
from quire.compute.models.weight_map import WeightTarget
from quire.config import Checkpoint, ModelSpec, TensorInfo
from quire.config.speculation.mtp import MTPDraft, stored_mtp
from quire.ops import OpSet

__all__ = ["MTPHead", "load_mtp", "stored_layers"]

_log = logging.getLogger("quire.models")


class MTPHead:
    """Guesses tokens of `target` by the layer of `draft`. `HasWeights`, and its methods are those
    of `StateHead` (`compute/runner/drafting`)."""

    def __init__(
        self, draft: MTPDraft, make: LayerFactory, target: HasMTP, columns: TokenColumns
    ) -> None:
        """columns: columns of the target's layers. Adapters of requests change no guess: tokens are
        looked up in the base model's table, and logits are of its head."""
        layer = draft.layer
        self._columns = columns
        size, offset = layer.hidden_size, 0.0 if draft.is_deepseek else 1.0
        self.join = make.replicated(2 * size, size, bias=False)
        self.token_norm, self.state_norm, self.norm = (
            make.rms_norm(size, layer.norm_eps, offset=offset) for _ in range(3)
        )
        self._block = target.mtp_block(layer, make)
        self.blocks = [self._block]
        self.lm_head = None
        self._target = target
        self._is_deepseek = draft.is_deepseek
        names, places = draft.names, ("join", "token_norm", "state_norm", "norm")
        self.weight_map = replace(
            target.weight_map,
            prefix=draft.start,
            outer={getattr(names, place): place for place in places},
            blocks=names.block,
            beside={},
            others=(),
        )

    def read(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        self._columns.choose(())
        embedded = self._target.embed(token_ids)
        if self._is_deepseek:
            embedded = embedded.masked_fill((positions == 0).unsqueeze(1), 0.0)
        x = torch.cat((self.token_norm(embedded), self.state_norm(states)), dim=1)
        x, residual = self._block(self.join(x), None, positions, step)
        normed, stream = self.norm.add(x, residual)
        return stream if self._is_deepseek else normed

    def next_states(self, output: torch.Tensor) -> torch.Tensor:
        return output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return self._target.logits(self.norm(output) if self._is_deepseek else output)


def load_mtp(
    draft: MTPDraft,
    make: LayerFactory,
    target: HasMTP,
    columns: TokenColumns,
    seed: int,
    replaced: Mapping[str, torch.Tensor],
) -> MTPHead:
    """Load the MTP layer that guesses tokens of `target`. seed: seed of weights that are made up.
    replaced: tensors to load instead, by name in the checkpoint. Raises ConfigError for tensors of
    another layout or shape."""
    head = MTPHead(draft, make, target, columns)
    dtype: torch.dtype = getattr(torch, draft.layer.dtype)
    if draft.checkpoint is None:
        fill_with_noise(head, dtype, seed, replaced)
    else:
        fill_model(head, draft.folder, draft.checkpoint, dtype, replaced)
    return head


def stored_layers(
    spec: ModelSpec,
    folder: Path,
    ops: OpSet,
    model: CausalLM,
    checkpoint: Checkpoint,
    make: LayerFactory,
) -> Iterator[tuple[MTPHead, list[tuple[TensorInfo, WeightTarget]]]]:
    """Yield the MTP layers that the files of a model have, empty, and what on disk goes where in
    each. One that the model's family does not explain is left out, with a warning."""
    if not isinstance(model, HasMTP):
        return
    for draft in stored_mtp(spec, folder, checkpoint):
        assert draft.checkpoint is not None, "it is stored"
        head = MTPHead(draft, make, model, TokenColumns(ops))
        try:
            plan = match_layers(head, folder, draft.checkpoint)
        except ConfigError as error:
            _log.warning("the layer %s* is left out: %s", draft.start, error)
            continue
        yield head, plan
