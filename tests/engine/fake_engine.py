"""A whole engine over the fake executor, for tests of the plan side."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from quire.base.telemetry.flight.record import FlightRecorder
from quire.config.kv_layout import KVFormat, KVLayout
from quire.config.resolved import ResolvedScheduler
from quire.config.speculation import parse_speculation
from quire.engine.core.engine_core import EngineCore, PlanObserver
from quire.engine.core.hook_runner import HookRunner
from quire.plan.grammar import Grammars
from quire.plan.kv_cache import BlockHasher, KVManager
from quire.plan.scheduler import Fcfs, Feasibility, Scheduler
from quire.plan.speculation import DraftMethods
from quire.protocol import EngineRequest, SamplingParams, SequenceFinish
from quire.protocol.adapters import AdapterRef
from quire.protocol.beam_search import BeamRules
from quire.protocol.grammar import GrammarSpec
from quire.protocol.media import Media
from quire.protocol.pooling_params import POOLED_PARAMS, Pooling
from quire.protocol.recovery import ALWAYS_SWAP
from quire.protocol.step import MediaSpan
from tests.executor.fake import FakeExecutor, FakeModel

STUCK_S = 120.0
"""`tests.waiting.WAIT_S`. Cores of tests, which start often, do not import that."""


class FakeEngine:
    """Core, and what came out of it so far, by handle."""

    def __init__(
        self,
        *,
        depth: int = 2,
        windows: Sequence[int | None] = (None,),
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 64,
        vocab_size: int = 1000,
        poison: int | None = None,
        enable_prefix_caching: bool = True,
        on_plan: PlanObserver | None = None,
        layout: KVLayout | None = None,
        num_checkpoints: int = 0,
        breaks: bool = False,
        num_host_blocks: int = 0,
        grammars: Grammars | None = None,
        hooks: HookRunner | None = None,
        speculative_config: str | None = None,
        num_adapter_slots: int = 0,
        long_prefill_token_threshold: int | None = None,
        flight: FlightRecorder | None = None,
    ) -> None:
        """layout: replaces windows and block_size. breaks: every step is computed in vain once, and
        then in halves."""
        if layout is None:
            layout = KVLayout.of_windows(windows, block_size, KVFormat(1, 1, 1, 4))
        block_size = layout.block_size
        kinds = [group.window for group in layout.groups]
        self.kv = KVManager(
            layout,
            num_blocks,
            max_num_seqs,
            max_model_len,
            num_host_blocks,
            num_checkpoints,
        )
        self.scheduler = Scheduler(
            kv=self.kv,
            hasher=BlockHasher(block_size, b"test"),
            policy=Fcfs(),
            feasibility=Feasibility(
                layout, num_blocks, max_num_seqs, max_num_batched_tokens, max_model_len
            ),
            settings=ResolvedScheduler(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                long_prefill_token_threshold=long_prefill_token_threshold,
            ),
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            watches=None if hooks is None else hooks.watches,
            recovery_costs=ALWAYS_SWAP if num_host_blocks else None,
            methods=DraftMethods(parse_speculation(speculative_config)),
            vocab_size=vocab_size,
            flight=flight,
        )
        self.model = FakeModel(kinds, vocab_size, has_state=layout.state_bytes > 0)
        self.executor = executor = FakeExecutor(
            self.model,
            num_blocks=num_blocks,
            layout=layout,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            poison=poison,
            num_host_blocks=num_host_blocks,
            num_checkpoints=num_checkpoints,
            breaks=lambda _: breaks,
        )
        report = executor.start()
        self.core = EngineCore(
            self.scheduler, executor, depth, on_plan, report, grammars, hooks, num_adapter_slots
        )
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, SequenceFinish] = {}
        self.num_cached: dict[int, int] = {}
        self.vectors: dict[int, np.ndarray] = {}
        self.now = 0.0
        self._next_handle = 0

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        n: int = 1,
        seed: int = 0,
        stop: frozenset[int] = frozenset(),
        output: Sequence[int] = (),
        salt: str = "",
        given: Sequence[tuple[int, int]] = (),
        is_whole: bool = False,
        grammar: GrammarSpec | None = None,
        beams: BeamRules | None = None,
        hooks: Sequence[str] = (),
        logprobs: int | None = None,
        pooling: Pooling | None = None,
        prediction: Sequence[int] = (),
        adapter: AdapterRef | None = None,
        message_ends: Sequence[int] = (),
        pin_seconds: float | None = None,
        pin_is_shared: bool = False,
    ) -> list[int]:
        """prompt: token ids, or words of media. given: first token and end of each part of it that
        comes as media. is_whole: see `MediaSpan`, of all these."""
        tokens, media = list(prompt), []
        for start, end in given:
            media.append(self.put(prompt[start:end], start, is_whole=is_whole))
            tokens[start:end] = [self.model.vocab_size] * (end - start)
        handles = list(range(self._next_handle, self._next_handle + n))
        request = EngineRequest(
            request_id=str(handles[0]),
            first_handle=handles[0],
            prompt_token_ids=np.array(tokens, np.int32),
            media=tuple(media),
            params=POOLED_PARAMS
            if pooling
            else SamplingParams(max_tokens=max_tokens, n=n, hooks=hooks, logprobs=logprobs),
            seed=seed,
            stop_token_ids=stop,
            output_token_ids=np.array(output, np.int32),
            arrival_time=self.now,
            salt=salt,
            grammar=grammar,
            beams=beams,
            pooling=pooling,
            prediction_token_ids=np.array(prediction, np.int32),
            adapter=adapter,
            message_ends=np.array(message_ends, np.int32),
            pin_seconds=pin_seconds,
            pin_is_shared=pin_is_shared,
        )
        self.core.add(request)
        self._next_handle += n
        for handle in handles:
            self.tokens[handle] = list(output)
        return handles

    def put(self, words: Sequence[int], position: int, *, is_whole: bool = False) -> Media:
        """Media of these words, from `position` of a prompt on."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        info = self.core.put_media(handle, np.array(words, np.uint64).tobytes())
        assert info.num_tokens == len(words)
        return Media(info.digest, MediaSpan(position, len(words), handle, is_whole=is_whole))

    def step(self) -> None:
        self.now += 1
        output = self.core.step(self.now)
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            assert handle not in self.finished, "a token after the end"
            self.tokens[handle].append(token)
        for handle, vector in output.vectors.items():
            assert handle not in self.vectors, "a second vector"
            self.vectors[handle] = vector
        for finish in output.finished:
            assert finish.handle not in self.finished, "a sequence ended twice"
            self.finished[finish.handle] = finish
        self.num_cached.update(output.num_cached_tokens)
        self.core.check_invariants()

    def run(self, max_steps: int = 2000) -> None:
        """Take steps until all requests have ended. Steps that compute nothing, since a grammar is
        compiled meanwhile, have a limit in time."""
        before, ends_at = self.core.stats().steps_total, time.monotonic() + STUCK_S
        for step in itertools.count():
            if not self.core.has_unfinished:
                return
            self.step()
            if step >= max_steps:
                computed = self.core.stats().steps_total - before
                if computed >= max_steps or time.monotonic() > ends_at:
                    raise AssertionError(f"no end after {step} steps: {self.core.stats()}")
