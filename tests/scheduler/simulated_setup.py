"""Settings of a simulated engine, and who it deals with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from quire.config.kv_layout import KVLayout
from quire.plan.scheduler import PrefillLimits
from quire.plan.scheduler.constraints.unsent import Question, Verdict
from quire.plan.scheduler.loads import LOAD_SECONDS
from quire.protocol import BeamRules, EngineRequest, SequenceFinish
from quire.protocol.recovery import ALWAYS_SWAP, RecoveryCosts
from tests.executor.fake import FakeModel
from tests.kv_cache.model import make_layout
from tests.scheduler.expected import VOCAB, Asked, make_model

POISON_OUTSIDE = VOCAB + 1


@dataclass(frozen=True)
class Setup:
    """Settings of a simulated engine."""

    depth: int = 2
    windows: tuple[int | None, ...] = (None,)
    block_size: int = 2
    num_blocks: int = 24
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 8
    max_model_len: int = 32
    poison: int | None = None
    readers_fail: bool = False
    num_host_blocks: int = 0
    recovery_costs: RecoveryCosts = ALWAYS_SWAP
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    prefill_limits: PrefillLimits = field(default_factory=PrefillLimits)
    max_drafts: int = 0
    guesses: str = "any"
    """Source of the drafts: any number right; all "wrong"; all "right"; right ones "beyond" what
    was asked for and what the sequence may have; or from "methods" and predictions, as many as pay;
    or from a draft "model", likewise."""
    names_per_block: tuple[int, ...] = ()

    ticket_steps: tuple[int, ...] = (0,)
    """Steps that copies from the host take after the step that starts them, ticket by ticket in
    turn."""
    losses: float = 0.0
    """Share of failed copies among the blocks and places that copies under tickets fill."""
    keeps_evicted: bool = False
    """True if evicted blocks are kept in host blocks."""
    num_places: int | None = None
    """Places of a source beyond the host; None: there is no such source."""
    refusals: float = 0.0
    """Share of the offered blocks that this source does not take, and of its places that it empties
    by and by."""
    corruptions: float = 0.0
    """Share of the places read there that have changed."""
    load_seconds: float = LOAD_SECONDS
    num_checkpoints: int | None = None
    """Checkpoints of recurrent states; None: the model has no states."""
    breaks: float = 0.0
    """Share of the steps that are computed in vain, and then again in halves."""

    @property
    def has_state(self) -> bool:
        return self.num_checkpoints is not None

    @property
    def layout(self) -> KVLayout:
        """Return the layout of the groups. An empty `names_per_block` means 1 for each group."""
        steps = self.names_per_block or (1,) * len(self.windows)
        kinds = tuple(zip(self.windows, steps, strict=True))
        return make_layout(kinds, self.block_size, has_states=self.has_state)

    @property
    def model(self) -> FakeModel:
        return make_model(self.windows, self.has_state)


@dataclass
class Client:
    """A client's request and the answer it got."""

    asked: Asked
    output: tuple[int, ...]
    first_handle: int
    deadline_s: float | None = None
    beams: BeamRules | None = None
    tokens: list[int] = field(default_factory=list)
    finish: SequenceFinish | None = None


class Judge(Protocol):
    """Answers questions about watched sequences."""

    def watches(self, request: EngineRequest) -> bool: ...

    def answer(self, question: Question) -> Verdict: ...
