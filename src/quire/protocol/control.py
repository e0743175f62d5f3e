"""Operations beside steps: commands and questions to an engine, and its one kind of answer.

They run while no step is in flight. Operations of clients cross to the engine's process unchanged;
those of a start go only to the ranks of a model. Weights cross as names of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.protocol.media import MediaInfo
from quire.protocol.pins import PinnedPrefix
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.request import CHECKPOINT_VERSION, Weights
from quire.protocol.status import EngineView, RequestFacts
from quire.protocol.step import IntArray

__all__ = [
    "RESUMED",
    "AdminOp",
    "Allocate",
    "ControlOp",
    "ExtendPrompt",
    "Inspect",
    "ListPins",
    "LoadWeights",
    "MapBlocks",
    "MeasureRecovery",
    "OpenDisk",
    "MeasuredMemory",
    "Pause",
    "PauseMode",
    "Report",
    "ResetPrefixCache",
    "Resume",
    "Sleep",
    "StartProfile",
    "StopProfile",
    "TellFacts",
    "Unpin",
    "UpdateWeights",
    "Wake",
    "WorkerOp",
    "asleep",
]

PauseMode = Literal["keep", "wait", "abort"]
"""Treatment of requests during a pause: they stand still; or admitted ones go on to their end,
while no other is admitted; or all of them end."""

RESUMED = "the engine was told to go on before its requests had ended: pause it again"
"""The answer to a pause with mode "wait" that `Resume` or `Wake` came before."""


class _Op(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One operation."""


class Inspect(_Op, frozen=True):
    """Change nothing, and report."""


class MapBlocks(_Op, frozen=True):
    """Answered by `Report.blocks` and `Report.view`. No step is waited for. steps_s: age of the
    oldest steps that the view has."""

    steps_s: float = 3600.0


class ListPins(_Op, frozen=True):
    """Answered by `Report.pins`."""


class TellFacts(_Op, frozen=True):
    """Answered by `Report.facts`, about these requests of one key. No step is waited for."""

    tenant: str
    request_ids: tuple[str, ...]


class Unpin(_Op, frozen=True):
    """Release the prefix that this request pinned. `Report.was_there`: whether there was one."""

    handle: int


class ResetPrefixCache(_Op, frozen=True):
    """Forget all cached prefixes but pinned ones. reset_running: running requests are preempted
    too, and computed again."""

    reset_running: bool = False


class Pause(_Op, frozen=True):
    """Compute nothing until `Resume`; new requests wait. Answered when steps have ended, and with
    mode "wait" when the requests have."""

    mode: PauseMode = "abort"


class Resume(_Op, frozen=True):
    """Go on after `Pause`. RequestError while the engine sleeps."""


class Sleep(_Op, frozen=True):
    """Pause, then give memory back. level 1: the KV cache; weights stay on a CPU, and go from a GPU
    to host memory. level 2: the weights too, which are loaded again on `Wake`. New requests are
    refused. Cached and pinned prefixes are lost; requests that are kept are computed again."""

    level: int = 1
    mode: PauseMode = "abort"


class Wake(_Op, frozen=True):
    """Take memory again after `Sleep`, and go on."""


class StartProfile(_Op, frozen=True):
    """Record what steps do, until `StopProfile` writes a trace to a file in `directory`."""

    directory: str


class StopProfile(_Op, frozen=True):
    """End a recording. `Report.profile`: the file."""


class LoadWeights(_Op, frozen=True):
    """Compute with the tensors of these files in place of the checkpoint's; the checkpoint's others
    stay. Effects and errors as of `UpdateWeights`; the same operation twice changes nothing.

    files: paths of safetensors files, which nobody writes any more; a later one wins. Empty: the
    checkpoint as it is. version: label of outputs made with them. is_trial: read and check the
    files, and change nothing.
    """

    files: tuple[str, ...] = ()
    version: str = CHECKPOINT_VERSION
    is_trial: bool = False


AdminOp = (
    Inspect
    | MapBlocks
    | ListPins
    | TellFacts
    | Unpin
    | ResetPrefixCache
    | Pause
    | Resume
    | Sleep
    | Wake
    | StartProfile
    | StopProfile
    | LoadWeights
)


@dataclass(frozen=True, slots=True)
class ExtendPrompt:
    """The prompt of an open request goes on with `token_ids`, int32 [N]; `is_last` ends it.
    RequestError if it has ended already or grows too long. `Report.was_there`: false if the request
    has ended."""

    handle: int
    token_ids: IntArray
    is_last: bool


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Replace weights by name, as the checkpoint names them; others stay. Requests go on with the
    new ones, computed again from their tokens, and nothing that was cached is hit any more.

    tensors: torch tensors or arrays of the shapes that the checkpoint has. ConfigError, and nothing
    changes, for unknown names and other shapes. EngineError if they cannot be loaded: requests go
    on with the old ones, computed again, or the engine sleeps if those cannot be loaded either.
    version: label of outputs made with them; empty for the number of replacements so far.
    """

    tensors: Mapping[str, Any]
    version: str = ""


class Allocate(_Op, frozen=True):
    """Take memory for the KV pool and what computes over it. Before the first step."""

    num_blocks: int
    max_model_len: int


class MeasureRecovery(_Op, frozen=True):
    """Measure what it costs to bring a preempted request back. Before the first step."""


class OpenDisk(_Op, frozen=True):
    """Open the files of K/V on disk, for `Executor.move_blocks`. After `Allocate`. EngineError if a
    recurrent state is larger than `num_state_parts` blocks.

    folder: path of the store. is_writer: False for files that may only be read. lock: descriptor
    that the first rank closes after its last write.
    """

    folder: str
    is_writer: bool
    slot_bytes: int
    num_slots: int
    num_state_parts: int
    lock: int | None = None


WorkerOp = (
    Allocate | MeasureRecovery | OpenDisk | Sleep | Wake | StartProfile | StopProfile | LoadWeights
)
"""Operations that every rank of a model carries out."""

ControlOp = AdminOp | ExtendPrompt | UpdateWeights | Allocate | MeasureRecovery | OpenDisk


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes of a device. total: memory of the device. free: memory that no program used before this
    one started.

    weights: tensors after loading. loaded: memory of this process then. peak: most memory of the
    process during the largest steps, without the KV cache.
    """

    total: int
    free: int
    weights: int
    loaded: int
    peak: int


@dataclass(frozen=True, slots=True)
class Report:
    """The engine after an operation, or after its start.

    kernels: a sentence on the kernels. kernel_family: the kernels of attention, in one word.
    numerics: "invariant" if the bits of a row do not depend on the rows beside it, else "fast".
    unstable: reason for "fast", in words; empty for "invariant".
    weights_version: number of times that weights were replaced. weights: weights in use. loaded:
    files that they came from. sleep_level: 0 while it is awake.
    was_there: whether the operation found its object. measured: sizes on the device, where it can
    be measured. recovery_costs, pins, profile: result, if the operation asked for it. lost_pins:
    keys of the pins for every salt that the engine let go by itself, if it was asked for pins.
    media: facts about the media that the engine was given. plan: text of `quire plan`, in answers
    to `Inspect`. blocks: a letter for each KV block, in answers to `MapBlocks`: f free, c cached,
    u used by one sequence, s shared by several, p pinned. view: the moment, in the same answers.
    facts: facts about requests, in answers to `TellFacts`.
    """

    kernels: str = ""
    kernel_family: str = ""
    numerics: Literal["fast", "invariant"] = "fast"
    weights_version: int = 0
    weights: Weights = field(default_factory=Weights)
    loaded: LoadWeights = field(default_factory=LoadWeights)
    sleep_level: int = 0
    is_paused: bool = False
    was_there: bool = True
    measured: MeasuredMemory | None = None
    recovery_costs: RecoveryCosts | None = None
    pins: tuple[PinnedPrefix, ...] = ()
    lost_pins: tuple[str, ...] = ()
    profile: str = ""
    media: MediaInfo | None = None
    plan: str = ""
    blocks: bytes = b""
    view: EngineView | None = None
    facts: tuple[RequestFacts, ...] = ()
    unstable: str = ""


def asleep(level: int) -> str:
    """Message for requests that come while the engine sleeps."""
    return f"the engine sleeps (level {level}): wake it up first"
