"""An executor without a model: tokens are hashes of the K/V that a real model would have read.

Whatever goes wrong with blocks (a wrong table entry, a lost copy, a block given to two owners)
changes what is read, and so the tokens. The same holds for recurrent states that miss a token, see
one twice, or are those of others. `expected_tokens` computes the tokens without any cache. Media
are words of 64 bits, one for each token; a word below 2**31 stands for what the token id does.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.base.errors import ConfigError, EngineError, RequestError
from quire.compute.runner.drafts import counts_of, draw_in_turns, keep_in_turns
from quire.compute.runner.halves import in_halves, in_order_of_writing
from quire.compute.runner.pooling import PoolPiece, VectorPools, wanted_tokens
from quire.compute.runner.rows import RowTable, ScheduledRows
from quire.config.kv_layout import KVLayout
from quire.protocol.adapters import AdapterRef
from quire.protocol.block_moves import BlockMove, MoveOutcome
from quire.protocol.control import ControlOp, LoadWeights, Report, Sleep, UpdateWeights, Wake
from quire.protocol.media import MediaInfo
from quire.protocol.request import Weights
from quire.protocol.step import (
    DRAFT_OF_MODEL,
    EMPTY_INTS,
    EnterRow,
    FloatArray,
    IntArray,
    LateInput,
    MaskArray,
    RowFailure,
    RowTokens,
    StepPlan,
    StepResult,
    TokenCandidates,
    TokenLogprobs,
)
from tests.executor.fake_model import FakeModel, Words, adapter_word
from tests.executor.fake_states import FakeStates
from tests.executor.fake_tiers import FakeTiers, Tier

__all__ = ["FakeExecutor", "FakeModel"]


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of media or adapters, made after the steps before it."""

    make: Callable[[], None]
    done: Future[None]


@dataclass(slots=True)
class _Computed:
    """A step, or some rows of it, before it samples. hidden: hidden states at the last token of
    each row that samples, and at its drafts. pooled: hidden states at the positions of each piece.
    states: recurrent states after each token of each row. sources: see `_fork`."""

    hidden: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    pooled: list[tuple[PoolPiece, list[int]]] = field(
        default_factory=list[tuple[PoolPiece, list[int]]]
    )
    failures: list[RowFailure] = field(default_factory=list[RowFailure])
    states: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    sources: dict[int, int] = field(default_factory=dict[int, int])


class FakeExecutor:
    """Runs plans over a fake paged cache.

    It is lazy: asking for a result computes all steps given so far, up to one that awaits late
    input.

    ticket_steps: steps between the start and the end of a ticket's work; its copies are made at the
    end. lose: picks, of the blocks or places [N] that a ticket should fill, those whose copies
    fail. corrupt: picks, of the places [N] of a tier beyond the host that are read, those that have
    changed since they were written; checksums tell, and the copies fail. poison:
    a token id; a row that computes it fails, and writes garbage in that step. readers_fail: True if
    a row that reads garbage fails too, as with NaN; otherwise its tokens are wrong. breaks: steps
    whose first forward fails, so that it is repeated in halves.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        num_blocks: int,
        layout: KVLayout,
        max_num_seqs: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        poison: int | None = None,
        readers_fail: bool = False,
        ticket_steps: Callable[[int], int] = lambda _: 0,
        lose: Callable[[IntArray], IntArray] = lambda _: EMPTY_INTS,
        num_checkpoints: int = 0,
        breaks: Callable[[int], bool] = lambda _: False,
        draft: Callable[[list[int]], list[int]] = lambda tokens: tokens,
        num_places: Sequence[int] = (),
        corrupt: Callable[[IntArray], IntArray] = lambda _: EMPTY_INTS,
    ) -> None:
        """num_places: places of each tier beyond the host. ticket_steps: called with the ticket's
        number. breaks: called with the step's number. draft: returns the guesses of a draft model
        after these tokens."""
        self._model = model
        self._breaks = breaks
        self._draft = draft
        self._sleep_level = 0
        self._weights_version = 0
        self._loaded = LoadWeights()
        self._readers_fail = readers_fail
        self._tokens_per_block = [group.tokens_per_block for group in layout.groups]
        self._poison = poison
        self._rows = RowTable(
            max_num_seqs,
            max_model_len,
            self._tokens_per_block,
            has_states=bool(layout.state_bytes),
        )
        self._streams: dict[int, EnterRow] = {}
        self._sample_index: dict[int, int] = {}
        self._pools = VectorPools()
        self._rng = np.random.default_rng(0)
        self._states = FakeStates(self._rows, num_checkpoints, np.random.default_rng(1))
        largest = max(self._tokens_per_block)
        self._cache = self._noise((2, num_blocks, largest))
        self._garbage = np.zeros((num_blocks, largest), np.bool_)
        tiers = [Tier(self._noise((2, num_host_blocks, largest)), lambda _: EMPTY_INTS)]
        tiers += [Tier(self._noise((2, n, largest)), corrupt) for n in num_places]
        self.tiers = FakeTiers(self._cache, self._garbage, tiers, ticket_steps, lose)
        self._queue: deque[tuple[StepPlan, Future[StepResult]] | _Change] = deque()
        self._computed: _Computed | None = None  # the first step of the queue, apart from its draws
        self._late: dict[int, LateInput] = {}
        self.media: dict[int, Words] = {}
        self.adapters: dict[int, AdapterRef] = {}

    def _noise(self, shape: tuple[int, ...]) -> Words:
        return self._rng.integers(0, 2**63, shape).astype(np.uint64)

    def start(self) -> Report:
        return self._report()

    def control(self, op: ControlOp) -> Report:
        """Carry out an operation. Dropped memory is filled with garbage, and all rows are
        removed. A file of weights whose name has "refused" in it is refused; none is read."""
        if self._queue:
            raise EngineError(f"{type(op).__name__} was given while steps are in flight")
        if isinstance(op, LoadWeights) and any("refused" in each for each in op.files):
            raise ConfigError(f"update_weights: {op.files} are refused")
        is_load = isinstance(op, LoadWeights) and not op.is_trial
        if is_load or isinstance(op, Sleep | UpdateWeights):
            self._cache[:] = self._noise(self._cache.shape)
            self._garbage[:] = True
            self.tiers.lose_all(self._noise)
            self._states.lose_all()
            self._rows.standing[:] = 0
        if isinstance(op, Sleep):
            self._sleep_level = op.level
        elif isinstance(op, Wake):
            self._sleep_level = 0
        elif isinstance(op, UpdateWeights):
            self._weights_version += 1
        elif isinstance(op, LoadWeights) and not op.is_trial:
            self._weights_version += 1
            self._loaded = op
        return self._report()

    def _report(self) -> Report:
        return Report(
            kernels="none: tokens are hashes",
            kernel_family="fake",
            numerics="invariant",
            weights_version=self._weights_version,
            weights=Weights(self._loaded.version, " ".join(self._loaded.files)),
            loaded=self._loaded,
            sleep_level=self._sleep_level,
        )

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        if self._sleep_level:
            raise EngineError(f"a step was given at sleep level {self._sleep_level}")
        future: Future[StepResult] = _LateFuture(self)
        self._queue.append((plan, future))
        return future

    def put_media(self, handle: int, data: object) -> MediaInfo:
        if not isinstance(data, bytes) or not data or len(data) % 8:
            raise RequestError("media of the fake model are whole words of 8 bytes: give some")
        self.media[handle] = np.frombuffer(data, np.uint64)
        return MediaInfo(len(data) // 8, hashlib.blake2b(data, digest_size=16).digest())

    def drop_media(self, handles: Sequence[int]) -> None:
        gone = tuple(handles)

        def forget() -> None:
            for handle in gone:
                self.media.pop(handle, None)

        self._change(forget)

    def put_adapter(self, slot: int, ref: AdapterRef) -> Future[None]:
        """Read an adapter; a folder without a name cannot be read."""
        if not ref.path:
            failed = Future[None]()
            failed.set_exception(RequestError(f"the adapter {ref.name!r} has no folder: give one"))
            return failed
        return self._change(lambda: self.adapters.update({slot: ref}))

    def _change(self, make: Callable[[], None]) -> Future[None]:
        change = _Change(make, Future())
        self._queue.append(change)
        if len(self._queue) == 1:
            self.run_queued()
        return change.done

    def move_blocks(self, move: BlockMove) -> Future[MoveOutcome]:
        raise EngineError(f"the fake device has no disk for move {move.ticket}")

    def cancel_move(self, ticket: int) -> None:
        raise EngineError(f"a fake device has no disk for move {ticket}")

    def late(self, late: LateInput) -> None:
        self._late[late.step_id] = late

    def made_drafts(self, step_id: int, *, wait: bool) -> Mapping[int, IntArray] | None:
        """Compute the step now, up to what it awaits."""
        del wait
        self.run_queued()
        work, rows = self._queue[0] if self._queue else None, self._rows
        if work is None or isinstance(work, _Change) or self._computed is None:
            return {}
        plan, found = work[0], dict[int, IntArray]()
        if plan.step_id != step_id:
            return {}
        for slot in set(plan.draft_slot[plan.draft_token == DRAFT_OF_MODEL].tolist()):
            end = int(rows.num_tokens[slot])
            found[slot] = rows.token_ids[slot, end : end + int(rows.num_drafts[slot])].copy()
        return found

    def shutdown(self) -> None:
        self.run_queued()
        for work in self._queue:
            future = work.done if isinstance(work, _Change) else work[1]
            future.set_exception(EngineError("shut down while a step awaited late input"))
        self._queue.clear()

    def run_queued(self) -> None:
        """Compute all steps given so far. A step whose late input is missing does not draw, nor do
        those behind it."""
        while self._queue:
            work = self._queue[0]
            if isinstance(work, _Change):
                work.make()
                work.done.set_result(None)
                self._queue.popleft()
                continue
            plan, future = work
            try:
                with np.errstate(over="ignore"):
                    if self._computed is None:
                        self._computed = self._compute_step(plan)
                    if self._awaits_late(plan, self._computed):
                        return
                    future.set_result(self._end_step(plan, self._computed))
            except Exception as error:  # noqa: BLE001  the future is where a fault belongs
                future.set_exception(error)
            self._computed = None
            self._queue.popleft()

    def drop_queued(self) -> None:
        """Lose all steps given and not computed, like a device fault."""
        self._queue.clear()
        self._computed = None
        self.tiers.drop_copies()

    def _compute_step(self, plan: StepPlan) -> _Computed:
        self._states.stash(plan)
        self.tiers.copy_blocks(plan)
        self._rows.apply(plan)
        for row in plan.enter:
            self._streams[row.slot] = row
            self._sample_index[row.slot] = row.sample_index
            self._states.enter(row)
        for src, dst in zip(plan.start_fork_src, plan.start_fork_dst, strict=True):
            self._streams[int(dst)] = self._streams[int(src)]
            self._states.fork(int(src), int(dst))
        for slot in set(plan.draft_slot[plan.draft_token == DRAFT_OF_MODEL].tolist()):
            self._make_drafts(slot)
        rows = in_order_of_writing(self._rows.scheduled(), plan)
        self._rows.last_keys(rows)  # raises if media are cut that must not be
        computed = self._forward(rows, self._breaks(plan.step_id))
        self._rows.commit_computed(rows)
        computed.sources = self._fork(plan, computed.hidden, computed.failures)
        return computed

    def _awaits_late(self, plan: StepPlan, computed: _Computed) -> bool:
        needs_late = any(self._streams[slot].waits_for_masks for slot in computed.sources)
        return needs_late and plan.step_id not in self._late

    def _make_drafts(self, slot: int) -> None:
        rows, stream = self._rows, self._streams[slot]
        prompt, start = rows.prompt_ids(slot).tolist(), int(rows.num_tokens[slot])
        count, sample = start + int(rows.num_drafts[slot]) - len(prompt), self._sample_index[slot]
        tokens = self._model.expected_tokens(prompt, count, stream.seed, sample)
        drafts = self._draft(tokens[start - len(prompt) :])
        rows.token_ids[slot, start : start + len(drafts)] = drafts
        rows.num_drafts[slot] = len(drafts)

    def _end_step(self, plan: StepPlan, computed: _Computed) -> StepResult:
        hidden, sources = computed.hidden, computed.sources
        masks = self._take_masks(plan, computed)
        asked = [slot for slot in sources if self._streams[slot].num_candidates]
        seen = {slot: hidden[sources.pop(slot)] for slot in asked}
        candidates = self._find_candidates(seen, masks)
        drawn = self._sample(hidden, sources, masks)
        self._states.settle(plan, computed.states)
        done, lost = self.tiers.end_tickets(plan)
        return StepResult(
            plan.step_id,
            drawn.slots.astype(np.int32),
            drawn.token_ids,
            candidates,
            failed=tuple(computed.failures),
            counts=counts_of(drawn),
            done=done,
            failed_tickets=lost,
            vectors=self._pool(computed.pooled),
        )

    def _pool(self, pooled: list[tuple[PoolPiece, list[int]]]) -> dict[int, FloatArray]:
        vectors: dict[int, FloatArray] = {}
        for piece, hidden in pooled:
            vector = self._pools.take(piece, self._model.states(hidden))
            if vector is not None:
                vectors[piece.slot] = vector
        return vectors

    def _take_masks(self, plan: StepPlan, computed: _Computed) -> dict[int, list[MaskArray | None]]:
        """Masks by slot of rows that wait for some; rows that get none no longer sample."""
        self._late = {step: late for step, late in self._late.items() if step >= plan.step_id}
        late = self._late.pop(plan.step_id, None)
        if late is None:
            return {}
        of_rows = np.split(late.index, np.cumsum(late.counts))[:-1]
        known = dict(zip(late.slots.tolist(), of_rows, strict=True))
        told = {failure.slot: failure for failure in late.failed}
        masks: dict[int, list[MaskArray | None]] = {}
        for slot in [s for s in computed.sources if self._streams[s].waits_for_masks]:
            if slot in known:
                masks[slot] = [late.masks[i] if i >= 0 else None for i in known[slot].tolist()]
                continue
            del computed.sources[slot]
            self._rows.failed[slot] = True
            computed.failures.append(told.get(slot) or RowFailure(slot, "no mask was given"))
        return masks

    def _forward(self, rows: ScheduledRows, breaks: bool) -> _Computed:
        everything = slice(0, len(rows.slots))

        def compute(part: slice) -> _Computed:
            computed = self._compute(rows.select(part))
            if breaks and part == everything and len(rows.slots):
                raise EngineError("the step broke after its rows were computed")
            return computed

        def alone(index: int, _: BaseException) -> _Computed:
            return self._compute(rows.select(slice(index, index + 1)))

        whole = _Computed()
        for part in in_halves(everything, compute, alone):
            whole.hidden.update(part.hidden)
            whole.pooled += part.pooled
            whole.failures += part.failures
            whole.states.update(part.states)
        whole.failures.sort(key=lambda failure: failure.slot)
        return whole

    def _compute(self, rows: ScheduledRows) -> _Computed:
        starts, ends = rows.num_computed, rows.num_computed + rows.num_tokens
        spans = list(zip(rows.slots.tolist(), starts.tolist(), ends.tolist(), strict=True))
        for slot, start, end in spans:
            inputs = self._inputs(slot, start, end)
            self._write(0, slot, start, self._model.first_layer(inputs, np.arange(start, end)))
        for slot, start, end in spans:
            contents = self._contents(0, slot, end)
            reads = [self._model.read(contents, position) for position in range(start, end)]
            self._write(1, slot, start, np.array(reads, np.uint64))
        states = self._advance(rows, spans)
        failures = [self._fail(*span) for span in spans if self._is_poisoned(*span)]
        while self._readers_fail and failures:
            known = {failure.slot for failure in failures}
            new = [s for s in spans if s[0] not in known and self._reads_garbage(*s)]
            if not new:
                break
            failures += [self._fail(*span) for span in new]
        failed = {failure.slot for failure in failures}

        def see(slot: int, end: int, positions: range) -> list[int]:
            contents, after = self._contents(1, slot, end), states.get(slot)
            return [
                self._model.see(
                    self._model.read(contents, position), after[position - end] if after else 0
                )
                for position in positions
            ]

        hidden = {
            slot: see(slot, end, range(end - 1 - drafts, end))
            for (slot, _, end), samples, drafts in zip(
                spans, rows.samples, rows.num_drafts.tolist(), strict=True
            )
            if samples and slot not in failed
        }
        pieces = wanted_tokens(self._rows, rows)[2]
        pooled = [
            (piece, see(piece.slot, piece.end, piece.positions))
            for piece in pieces
            if piece.slot not in failed
        ]
        return _Computed(hidden, pooled, failures, states)

    def _advance(
        self, rows: ScheduledRows, spans: list[tuple[int, int, int]]
    ) -> dict[int, list[int]]:
        """Recurrent states after each of the tokens of these rows, by slot; the last one is
        written, but not committed."""
        if not self._model.has_state:
            return {}
        states: dict[int, list[int]] = {}
        for slot, start, end in spans:
            inputs = self._inputs(slot, start, end).tolist()
            states[slot] = self._model.advance(self._states.read(slot), inputs)
            self._states.write(slot, states[slot][-1])
        return states

    def _inputs(self, slot: int, start: int, end: int) -> Words:
        """Return the model's inputs for these tokens of a row."""
        inputs = self._rows.token_ids[slot, start:end].astype(np.uint64)
        if (adapter := int(self._rows.adapter[slot])) > 0:
            inputs ^= adapter_word(self.adapters[adapter - 1].digest)
        for span in self._rows.media.get(slot, ()):
            first, last = max(span.position, start), min(span.end, end)
            if first < last:
                words = self.media[span.handle]
                inputs[first - start : last - start] = words[
                    first - span.position : last - span.position
                ]
        return inputs

    def _is_poisoned(self, slot: int, start: int, end: int) -> bool:
        return self._poison is not None and self._poison in self._rows.token_ids[slot, start:end]

    def _fail(self, slot: int, start: int, end: int) -> RowFailure:
        for layer in (0, 1):
            self._write(layer, slot, start, self._noise((end - start,)))
        self._states.write_noise(slot)
        positions = np.arange(start, end)
        for group in range(len(self._rows.tables)):
            self._garbage[self._places(group, slot, positions)] = True
        self._rows.failed[slot] = True
        return RowFailure(slot, f"token {self._poison} is poisoned: leave it out")

    def _reads_garbage(self, slot: int, start: int, end: int) -> bool:
        for group, window in enumerate(self._model.windows):
            first = 0 if window is None else max(start - window + 1, 0)
            if self._garbage[self._places(group, slot, np.arange(first, end))].any():
                return True
        return False

    def _fork(
        self, plan: StepPlan, hidden: dict[int, list[int]], failures: list[RowFailure]
    ) -> dict[int, int]:
        """Fork rows. Returns the slots that sample, each with the slot whose `hidden` it reads."""
        sources = {slot: slot for slot in hidden}
        for fork in plan.forks:
            self._rows.fork(fork.src, fork.dst)
            self._streams[fork.dst] = self._streams[fork.src]
            self._states.fork(fork.src, fork.dst)
            self._sample_index[fork.dst] = fork.sample_index
            if fork.src in hidden:
                sources[fork.dst] = fork.src
            else:
                failures.append(RowFailure(fork.dst, f"its source, slot {fork.src}, failed"))
        return sources

    def _sample(
        self,
        hidden: dict[int, list[int]],
        sources: dict[int, int],
        masks: dict[int, list[MaskArray | None]],
    ) -> RowTokens:
        slots = np.array(sorted(sources), np.int64)

        def draw(index: npt.NDArray[np.int64], turn: int) -> IntArray:
            tokens = [
                self._model.draw(
                    hidden[sources[slot]][turn],
                    self._streams[slot].seed,
                    self._sample_index[slot],
                    masks[slot][turn] if slot in masks else None,
                )
                for slot in slots[index].tolist()
            ]
            return np.array(tokens, np.int32)

        return draw_in_turns(self._rows, slots, draw)

    def _find_candidates(
        self, hidden: dict[int, list[int]], masks: dict[int, list[MaskArray | None]]
    ) -> dict[int, tuple[TokenCandidates, ...]]:
        """Return the candidates of rows that return some instead of drawing."""
        slots = np.array(sorted(hidden), np.int64)
        keep_in_turns(self._rows, slots, lambda index, _: np.ones(len(index), np.bool_))
        return {
            slot: tuple(
                self._candidates_of(slot, word, masks[slot][turn] if slot in masks else None)
                for turn, word in enumerate(words)
            )
            for slot, words in hidden.items()
        }

    def _candidates_of(self, slot: int, hidden: int, mask: MaskArray | None) -> TokenCandidates:
        row, scores = self._streams[slot], self._model.scores(hidden)
        if mask is not None:
            banned = np.setdiff1d(np.arange(len(scores)), self._model.allowed(mask))
            scores[banned] = -np.inf
        best = np.argsort(-scores, kind="stable")[: row.num_candidates]
        logprobs: tuple[TokenLogprobs, ...] = ()
        if row.params.logprobs is not None:
            logprobs = tuple(
                TokenLogprobs(token, float(scores[token]), rank)
                for rank, token in enumerate(best.tolist(), start=1)
            )
        return TokenCandidates(best.astype(np.int32), scores[best], logprobs)

    def _write(self, layer: int, slot: int, start: int, values: Words) -> None:
        positions = np.arange(start, start + len(values))
        for group in range(len(self._rows.tables)):
            blocks, offsets = self._places(group, slot, positions)
            self._cache[layer, blocks, offsets] = values
            self._garbage[blocks, offsets] = False

    def _contents(self, layer: int, slot: int, end: int) -> list[Words]:
        groups = range(len(self._rows.tables))
        places = [self._places(group, slot, np.arange(end)) for group in groups]
        return [self._cache[layer, blocks, offsets] for blocks, offsets in places]

    def _places(
        self, group: int, slot: int, positions: npt.NDArray[np.int64]
    ) -> tuple[IntArray, npt.NDArray[np.int64]]:
        """Blocks and offsets of the K/V of these positions in a layer group."""
        index, offsets = np.divmod(positions, self._tokens_per_block[group])
        return self._rows.tables[group][slot, index], offsets


class _LateFuture(Future[StepResult]):
    """Computes when it is asked for its result."""

    def __init__(self, executor: FakeExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> StepResult:
        """Return the result. Raises EngineError instead of waiting for ever."""
        self._executor.run_queued()
        if not self.done():
            raise EngineError("a step awaits late input, which nobody has given")
        return super().result(timeout)
