"""Longest context and largest KV cache that fit into the memory of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.config.kv_layout import KVLayout
from quire.config.memory.amounts import format_bytes
from quire.config.memory.budget import MemoryBudget
from quire.config.memory.fixed_bytes import FixedOf
from quire.config.memory.plan import FixedBytes, MemoryPlan, largest_context
from quire.config.model_spec import ModelSpec
from quire.config.settings import EngineSettings

__all__ = ["PoolBounds", "PoolSizing"]

DEFAULT_KV_SHARE = 0.5
"""Share of the memory beside weights and activations: other programs need memory too."""

UNKNOWN_MEMORY_KV_BYTES = 2**30
"""Size of the KV cache on a machine that does not say how much memory is free."""

NAMED_CONTEXTS, MOST_NAMES = 4, 2**18
"""Full contexts whose prefixes have names, for each sequence, if blocks take no memory; and the
most names, if one context has no more."""

MOST_STEPS = 4
"""Steps in flight at once, and one more."""

SHORTEST_CONTEXT = 2
"""One prompt token and one output token."""


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """Bounds of what a pool serves. longest: longest context allowed, if it is not the model's."""

    max_num_seqs: int
    max_num_batched_tokens: int
    longest: int | None = None


class PoolSizing:
    """Weighs context against memory. A longer context needs more blocks and longer tables, so
    whether a length fits is monotonic and the longest one is found by bisection."""

    def __init__(
        self,
        settings: EngineSettings,
        spec: ModelSpec,
        layout: KVLayout,
        *,
        fixed: FixedOf,
        budget: MemoryBudget,
        bounds: PoolBounds,
        draft_page: int = 0,
    ) -> None:
        """fixed: bytes needed beside the KV cache, by context. draft_page: bytes of each block for
        a draft model."""
        self._settings = settings
        self._spec = spec
        self._layout = layout
        self._page = layout.page_bytes + draft_page
        self._fixed = fixed
        self._budget = budget
        self._max_num_seqs = bounds.max_num_seqs
        self._step_tokens = bounds.max_num_batched_tokens
        self._longest = spec.max_context if bounds.longest is None else bounds.longest

    def fits(self, context: int) -> bool:
        """Return whether one sequence of `context` tokens fits the largest possible KV cache."""
        blocks = self._largest_pool(context)
        return blocks > 0 and self._blocks_for(context) <= blocks

    def choose_context(self) -> tuple[int, str]:
        """max_model_len and why. ConfigError naming the longest that fits if the asked one does
        not, or naming what is missing if nothing fits."""
        self._check_room()
        asked, claimed = self._settings.max_model_len, self._spec.max_context
        if asked is not None:
            self._check_asked_context(asked)
            if asked > claimed:
                return asked, f"as asked, beyond the {claimed:,} of the model: expect worse text"
            return asked, "as asked"
        longest = largest_context(self.fits, self._longest)
        if longest < SHORTEST_CONTEXT:
            raise ConfigError(
                f"The KV cache of {self._pool_words()} holds {longest} tokens, too few for any "
                "request. Give it more."
            )
        if longest == claimed:
            return claimed, "as the model claims"
        return longest, f"the longest that fits; the model claims {claimed:,}"

    def choose_blocks(self, context: int) -> tuple[int, str]:
        """Number of KV blocks and why, for a `context` that fits."""
        settings, largest = self._settings, self._largest_pool(context)
        if settings.num_kv_blocks is not None:
            return largest, "as asked"
        if settings.kv_cache_memory is not None:
            return largest, f"kv_cache_memory of {format_bytes(settings.kv_cache_memory)}"
        if not self._page:
            return largest, "names of prefixes: no layer has K/V"
        one = self._blocks_for(context)
        if self._spec.is_encoder:
            steps = MOST_STEPS * (self._layout.blocks_for(self._step_tokens) + self._max_num_seqs)
            if largest >= max(steps, one):
                return max(steps, one), "for the prompts of the steps in flight: none is kept"
        if self._budget.limit is None:
            size = format_bytes(UNKNOWN_MEMORY_KV_BYTES)
            blocks, reason = largest, f"{size}: the machine does not say what is free"
        elif not self._budget.is_shared:
            share = settings.memory_utilization
            blocks = largest
            reason = (
                "all that is left" if share is None else f"what memory_utilization={share} leaves"
            )
        else:
            blocks, reason = int(largest * DEFAULT_KV_SHARE), "half of the memory that is left"
            if blocks < one:
                blocks, reason = one, "one full context, more than half of the memory that is left"
        if blocks > self._max_num_seqs * one:
            blocks = self._max_num_seqs * one
            return blocks, f"a full context for each of max_num_seqs={self._max_num_seqs}"
        return blocks, reason

    def plan(self, context: int, num_blocks: int) -> MemoryPlan:
        """Plan the memory with a pool of `num_blocks`."""
        layout = self._layout
        per_hit = layout.blocks_for(layout.hit_tokens)
        capacity = num_blocks // per_hit * layout.hit_tokens
        longest = largest_context(
            lambda length: self._blocks_for(length) <= num_blocks,
            max(capacity, self._spec.max_context, context),
        )
        return MemoryPlan(
            free=self._budget.free,
            budget=self._budget.limit,
            fixed=self._fixed(context),
            page=self._page,
            num_kv_blocks=num_blocks,
            kv_per_token=self._page * per_hit // layout.hit_tokens,
            capacity_tokens=capacity,
            longest_context=longest,
            max_concurrency=num_blocks / self._blocks_for(context),
        )

    def _blocks_for(self, context: int) -> int:
        return self._layout.most_blocks(context, self._step_tokens)

    def _left(self, context: int) -> int | None:
        """Bytes that the KV cache may have at most; None if unlimited."""
        limit = self._budget.limit
        return None if limit is None else limit - self._fixed(context).total

    def _asked_blocks(self) -> int | None:
        if self._settings.num_kv_blocks is not None:
            return self._settings.num_kv_blocks
        if self._settings.kv_cache_memory is not None:
            return self._settings.kv_cache_memory // self._page
        return None

    def _largest_pool(self, context: int) -> int:
        """The most blocks there may be; 0 if those asked for do not fit."""
        asked, left = self._asked_blocks(), self._left(context)
        if not self._page:
            if left is not None and left < 0:
                return 0
            one = self._blocks_for(context)
            named = max(one, min(NAMED_CONTEXTS * self._max_num_seqs * one, MOST_NAMES))
            return named if asked is None else asked
        if left is None:
            unknown = UNKNOWN_MEMORY_KV_BYTES // self._page
            return unknown if asked is None else asked
        room = max(left, 0) // self._page
        if asked is None:
            return room
        return asked if asked <= room else 0

    def _check_room(self) -> None:
        """The KV cache that was asked for, or a single block, beside everything else."""
        left, asked, page = (
            self._left(SHORTEST_CONTEXT),
            self._asked_blocks(),
            self._page,
        )
        if left is None:
            return
        if left < page:
            fixed = self._fixed(SHORTEST_CONTEXT)
            # Swap space fills a CPU's memory alone, and graphs that of a GPU.
            parts = ["activations", "tables"]
            parts += ["swap space"] * bool(fixed.swap) + ["graphs"] * bool(fixed.graphs)
            rest = fixed.total - fixed.weights - fixed.runtime
            raise ConfigError(
                f"The model does not fit: weights of {format_bytes(fixed.weights)}, a process of "
                f"{format_bytes(fixed.runtime)}, {_listed(parts, 'and')} of {format_bytes(rest)} "
                f"leave no KV block of the {self._budget.words}. "
                f"{self._remedies(fixed, page - left)}."
            )
        left = self._left(self._settings.max_model_len or SHORTEST_CONTEXT) or 0
        if asked is not None and page <= left < asked * page:
            # With a length that is still open, name what fits beside the tables of the full one.
            room = self._left(self._settings.max_model_len or self._spec.max_context) or 0
            room = room if room >= page else left
            limit = (
                f"num_kv_blocks={room // page}"
                if self._settings.num_kv_blocks is not None
                else f"kv_cache_memory={room // 2**10}KiB"
            )
            raise ConfigError(
                f"A KV cache of {self._pool_words()} does not fit: {format_bytes(left)} are left "
                f"of the {self._budget.words}. Give at most {limit}."
            )

    def _remedies(self, fixed: FixedBytes, missing: int) -> str:
        """Return what gives the missing bytes: only what can give all of them alone, unless nothing
        can."""
        narrower = {
            None: ("quantization='int8' or 'int4', ", 3 * fixed.weights // 4),
            "int8": ("quantization='int4', ", fixed.weights // 2),
        }
        quantize, saved = narrower.get(self._settings.quantization, ("", 0))
        smaller = ["max_num_batched_tokens", "max_num_seqs"]
        smaller += ["swap_space"] * bool(fixed.swap)
        eager = ", set enforce_eager" if fixed.graphs else ""
        given = {
            "raise memory_utilization": self._budget.spare,
            f"lower {_listed(smaller, 'or')}{eager}": fixed.total - fixed.weights - fixed.runtime,
            f"use {quantize}a smaller dtype or a smaller model": saved or fixed.weights,
        }
        if 0 < saved < missing <= fixed.weights:
            given["use a smaller model"] = fixed.weights
        enough = [words for words, size in given.items() if size >= missing]
        found = ["free some memory", *(enough or given)]
        text = found[0] if len(found) == 1 else f"{', '.join(found[:-1])}, or {found[-1]}"
        return text[0].upper() + text[1:]

    def _check_asked_context(self, asked: int) -> None:
        claimed = self._spec.max_context
        if asked > claimed and self._spec.has_learned_positions:
            raise ConfigError(
                f"max_model_len={asked} exceeds the model's table of {claimed} positions. "
                f"Give at most max_model_len={claimed}."
            )
        if asked > claimed and self._spec.index_top_k is not None:
            raise ConfigError(
                f"max_model_len={asked} exceeds index_topk={self._spec.index_top_k} tokens, from "
                "which on the model chooses those to attend to, which quire does not compute yet. "
                f"Give at most max_model_len={claimed}."
            )
        if self.fits(asked):
            return
        longest = largest_context(self.fits, asked - 1)
        advice = f"Give at most max_model_len={longest}, or more memory to the KV cache."
        if longest < SHORTEST_CONTEXT:
            advice = "Give more memory to the KV cache."
        blocks, pool = self._blocks_for(asked), self._asked_blocks()
        there = f"the KV cache can have {pool}"
        if pool is None or blocks <= pool:  # the tables take part of what there is
            tables = self._fixed(asked).tables
            left = max((self._left(asked) or 0) + tables, 0)
            there = f"tables of {format_bytes(tables)}, and {format_bytes(left)} are left for both"
            if pool is not None:
                there += f" with a KV cache of {self._pool_words()}"
        raise ConfigError(
            f"max_model_len={asked} does not fit: one such sequence needs {blocks} KV blocks "
            f"({format_bytes(blocks * self._page)}) and {there}. {advice}"
        )

    def _pool_words(self) -> str:
        settings = self._settings
        if settings.num_kv_blocks is not None:
            size = format_bytes(settings.num_kv_blocks * self._page)
            return f"num_kv_blocks={settings.num_kv_blocks} ({size})"
        if settings.kv_cache_memory is not None:
            return f"kv_cache_memory={format_bytes(settings.kv_cache_memory)}"
        return "the memory that is left"


def _listed(words: list[str], last: str) -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
