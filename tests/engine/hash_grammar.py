"""A grammar that notices everything: the tokens that it allows are a hash of the whole output."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from quire.base.errors import RequestError
from quire.plan.grammar import Grammar, Mask
from quire.protocol import EngineRequest, IntArray
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.step import MaskArray

__all__ = ["SPEC", "HashGrammars", "mask_after"]

SPEC = GrammarSpec(GrammarKind.REGEX, "hash")


def mask_after(output: Sequence[int], vocab_size: int, *, num_allowed: int = 7) -> MaskArray:
    """Few tokens, other ones after every output."""
    rng = np.random.default_rng(zlib.crc32(np.array(output, np.int32).tobytes()))
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[rng.choice(vocab_size, num_allowed, replace=False)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


class HashGrammars:
    """outputs: outputs that a mask was asked for. fails: returns the error to raise for an output,
    or None."""

    def __init__(
        self,
        vocab_size: int,
        fails: Callable[[Sequence[int]], BaseException | None] = lambda _: None,
    ) -> None:
        self.vocab_size = vocab_size
        self.fails = fails
        self.outputs: list[tuple[int, ...]] = []
        self.later: list[Future[Grammar]] = []
        self.is_closed = False

    def bounded(self, request: EngineRequest) -> EngineRequest:
        assert request.grammar is not None
        if request.grammar.source == "refused":
            raise RequestError("refused at once")
        return request

    def open(self, request: EngineRequest) -> Future[Grammar]:
        """Done when it is there, but for the one that comes `later`."""
        assert request.grammar is not None
        found: Future[Grammar] = Future()
        if request.grammar.source == "later":
            self.later.append(found)
        elif request.grammar.source == SPEC.source:
            found.set_result(self)
        else:
            found.set_exception(RequestError(f"no grammar: {request.grammar.source}"))
        return found

    def close(self) -> None:
        self.is_closed = True

    def matcher(self) -> HashGrammars:
        return self

    def masks(self, output: IntArray, drafts: IntArray) -> list[Mask]:
        known = output.tolist()
        self.outputs.append(tuple(known))
        error = self.fails(known)
        if error is not None:
            raise error
        masks: list[Mask] = [mask_after(known, self.vocab_size)]
        for draft in drafts.tolist():
            mask = masks[-1]
            is_allowed = mask is not None and bool(mask[draft // 32] >> (draft % 32) & 1)
            known = [*known, draft]
            masks.append(mask_after(known, self.vocab_size) if is_allowed else None)
        return masks

    def forced(self, output: IntArray) -> IntArray:
        return output[:0]
