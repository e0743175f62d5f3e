"""Grammars by llguidance: compiled beside the engine's steps, followed between them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from quire.base.errors import EngineError, RequestError
from quire.plan.grammar.matcher import ANY_TOKEN, Grammar, Mask
from quire.plan.grammar.source import refusal
from quire.plan.grammar.trial import LIMITS, GrammarTrial, Verdict
from quire.plan.grammar.vocabulary import Encode, Vocabulary
from quire.protocol.grammar import GrammarSpec
from quire.protocol.request import EngineRequest
from quire.protocol.step import IntArray, MaskArray, no_ints

__all__ = ["GuidanceGrammars"]

_TOKEN_BYTES = 4

MAX_CACHED = 128
MAX_CACHED_BYTES = 8 * 2**20
"""Bytes of cached grammars' texts; compiled ones take some times as much."""

_log = logging.getLogger("quire.grammar")

LoadVocabulary = Callable[[], tuple[Vocabulary, Encode]]


class GuidanceGrammars:
    """Each new grammar is tried in a child under limits, then compiled in a thread. Compiled ones,
    and why others were refused, are kept, as the request wrote them: the order of keys counts."""

    def __init__(self, load: LoadVocabulary, eos_token_ids: Collection[int]) -> None:
        """load: reads the model's tokens when the first grammar comes, in the thread that compiles.
        eos_token_ids: ends of a text, for requests that state none."""
        self._load = load
        self._eos_token_ids = frozenset(eos_token_ids)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-grammar")
        self._cache: OrderedDict[GrammarSpec, LLMatcher | RequestError] = OrderedDict()
        self._warned: OrderedDict[str, None] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._trial: GrammarTrial | None = None
        self._is_closed = False

    def bounded(self, request: EngineRequest) -> EngineRequest:
        """See `Grammars`. The masks say when a sequence may end, so nothing else does."""
        stops = request.stop_token_ids or self._eos_token_ids
        if not stops:
            raise RequestError(
                "the model has no token that ends a text, so no structured output can end. Give "
                "stop_token_ids."
            )
        params = replace(request.params, min_tokens=0)
        return replace(request, params=params, stop_token_ids=frozenset(stops))

    def open(self, request: EngineRequest) -> Future[Grammar]:
        """See `Grammars`; `request` as it was before it was bounded."""
        assert request.grammar is not None
        stops = _Stops(
            tuple(sorted(request.stop_token_ids or self._eos_token_ids)),
            request.params.min_tokens,
            is_last_resort=request.params.ignore_eos,
        )
        return self._thread.submit(self._open, request.grammar, stops)

    def close(self) -> None:
        """See `Grammars`. A compilation under way ends soon, since a trial came before."""
        self._is_closed = True
        trial = self._trial
        if trial is not None:
            trial.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()

    def _open(self, spec: GrammarSpec, stops: _Stops) -> Grammar:
        known = self._cache.get(spec)
        if known is None:
            known = self._compile(spec)
            self._cache[spec] = known
        self._cache.move_to_end(spec)
        while len(self._cache) > MAX_CACHED or self._num_cached_bytes() > MAX_CACHED_BYTES:
            self._cache.popitem(last=False)
        if isinstance(known, RequestError):
            raise RequestError(str(known))
        assert self._tokenizer is not None
        # the library cannot take back a token of a rule that counts them
        can_roll_back = "max_tokens" not in spec.source
        vocab_size, eos_id = self._tokenizer.vocab_size, self._tokenizer.eos_token
        return _Guided(known, vocab_size, eos_id, stops, can_roll_back)

    def _num_cached_bytes(self) -> int:
        return sum(len(spec.source) for spec in self._cache)

    def _compile(self, spec: GrammarSpec) -> LLMatcher | RequestError:
        """The matcher of an empty output, or why the grammar can have none. What a trial raises is
        of the moment, and not kept."""
        trial, tokenizer = self._ready()
        verdict = trial.check(spec)
        if verdict.refusal:
            return RequestError(verdict.refusal)
        self._warn(verdict)
        matcher = LLMatcher(tokenizer, verdict.text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            return RequestError(refusal(spec, matcher.get_error()))
        mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)  # fills caches, in no step
        return matcher

    def _warn(self, verdict: Verdict) -> None:
        """Say once of each schema what is not held to."""
        new = verdict.dropped.keys() - self._warned.keys()
        self._warned.update(dict.fromkeys(new))
        while len(self._warned) > MAX_CACHED:
            self._warned.popitem(last=False)
        found = [
            words for name in verdict.dropped if name in new for words in verdict.dropped[name]
        ]
        found += verdict.ignored if new else []
        if found:
            _log.warning("a schema has what is not held to: %s", "; ".join(found)[:500])

    def _ready(self) -> tuple[GrammarTrial, LLTokenizer]:
        if self._is_closed:
            raise EngineError("the engine has been shut down")
        if self._trial is None or self._tokenizer is None:
            vocabulary, encode = self._load()
            self._tokenizer = vocabulary.tokenizer(encode)
            self._trial = GrammarTrial(vocabulary)
        return self._trial, self._tokenizer


@dataclass(frozen=True, slots=True)
class _Stops:
    """Ends of a sequence: token ids, not before `min_tokens`. is_last_resort: not while anything
    else may follow. Where nothing else may, neither counts."""

    token_ids: tuple[int, ...]
    min_tokens: int
    is_last_resort: bool

    def may_end(self, num_tokens: int) -> bool:
        return num_tokens >= self.min_tokens and not self.is_last_resort


@dataclass(frozen=True, slots=True)
class _Guided:
    """A `Grammar`. prototype: the matcher of an empty output. eos_id: end token of its
    tokenizer."""

    prototype: LLMatcher
    vocab_size: int
    eos_id: int
    stops: _Stops
    can_roll_back: bool

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(
            self.prototype, self.vocab_size, self.eos_id, self.stops, self.can_roll_back
        )


class GuidanceMatcher:
    """Follows a sequence by feeding what is new of its output, or by going back first."""

    def __init__(
        self,
        prototype: LLMatcher,
        vocab_size: int,
        eos_id: int,
        stops: _Stops,
        can_roll_back: bool,
    ) -> None:
        """can_roll_back: else it tries drafts on a copy, and follows a changed output anew."""
        self._prototype = prototype
        self._can_roll_back = can_roll_back
        self._matcher = prototype.deep_copy()
        self._stops = stops
        self._ends = _mask_of(stops.token_ids, vocab_size)
        self._goes_on = ~(self._ends | _mask_of([eos_id], vocab_size))
        self._fed = b""  # the output that it has followed, as int32

    def masks(self, output: IntArray, drafts: IntArray) -> Sequence[Mask]:
        self._follow(output)
        masks: list[Mask] = [self._mask(len(output))]
        kept, num_fed = self._matcher, 0
        if len(drafts) and not self._can_roll_back:
            self._matcher = kept.deep_copy()
        for draft in drafts.tolist():
            mask = masks[-1]
            if mask is None or not self._allows(mask, draft) or draft in self._stops.token_ids:
                masks.append(ANY_TOKEN)  # the draft is rejected, or the end
                continue
            self._feed([draft])
            num_fed += 1
            masks.append(self._mask(len(output) + num_fed))
        if num_fed and self._can_roll_back:
            self._matcher.rollback(num_fed)
        self._matcher = kept
        return masks

    def forced(self, output: IntArray) -> IntArray:
        self._follow(output)
        if self._matcher.is_stopped():
            return no_ints()
        tokens = self._matcher.compute_ff_tokens()
        ends = [i for i, token in enumerate(tokens) if token in self._stops.token_ids]
        return np.array(tokens[: ends[0]] if ends else tokens, np.int32)

    def _follow(self, output: IntArray) -> None:
        given = output.astype(np.int32, copy=False).tobytes()
        num_fed = len(self._fed) // _TOKEN_BYTES
        if not given.startswith(self._fed):
            fed = np.frombuffer(self._fed, np.int32)
            same = min(num_fed, len(output))
            differs = np.flatnonzero(fed[:same] != output[:same])
            num_kept = int(differs[0]) if len(differs) else same
            if self._can_roll_back:
                self._matcher.rollback(num_fed - num_kept)
            else:
                self._matcher, num_kept = self._prototype.deep_copy(), 0
            num_fed = num_kept
        self._feed(output[num_fed:].tolist())
        self._fed = given

    def _feed(self, tokens: list[int]) -> None:
        num_legal = self._matcher.validate_tokens(tokens) if tokens else 0
        if num_legal < len(tokens):
            raise RequestError(
                f"token {tokens[num_legal]} of the output is not what the grammar allows there. "
                "Resume only what this grammar made."
            )
        if tokens:
            self._matcher.consume_tokens(tokens)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                "the grammar grew too complex while it was followed "
                f"({_first_line(self._matcher.get_error())}). Make it simpler."
            )

    def _mask(self, num_tokens: int) -> MaskArray:
        """Return the mask of the tokens that may follow `num_tokens` tokens of output."""
        mask = np.empty_like(self._ends)
        if self._matcher.is_stopped():
            mask.fill(0)
        else:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        may_end = self._matcher.is_accepting()
        mask &= self._goes_on
        if may_end and (self._stops.may_end(num_tokens) or not mask.any()):
            mask |= self._ends
        return mask

    @staticmethod
    def _allows(mask: MaskArray, token: int) -> bool:
        return 0 <= token < 32 * len(mask) and bool(mask[token // 32] >> np.uint32(token % 32) & 1)


def _mask_of(tokens: Collection[int], vocab_size: int) -> MaskArray:
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in tokens:
        if 0 <= token < vocab_size:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


def _first_line(text: str) -> str:
    """Return the first line; the rest may be a stack of the library."""
    return text.split("\n")[0][:300]
