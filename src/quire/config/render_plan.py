"""The start-up report: decisions, and uses of the memory, as a block of text."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.kv_layout import KV_DTYPES
from quire.config.memory.amounts import format_bytes
from quire.config.memory.plan import FEWEST_DRAFTS
from quire.config.resolve import Decision, Resolved
from quire.config.shard import Shard

__all__ = ["render_plan"]


def render_plan(plan: Resolved, extra: Sequence[Decision] = ()) -> str:
    """At most 25 lines of aligned text: name, value, reason.

    extra: decisions made later, such as the attention backend.
    """
    spec = plan.spec
    title = f"{spec.architecture}, {spec.num_parameters / 1e6:,.1f} M parameters"
    rows = [
        *((item.name, item.value, item.reason) for item in (*plan.decisions, *extra)),
        ("memory" if plan.settings.tensor_parallel_size == 1 else "memory of a rank", "", ""),
        *_memory_rows(plan),
    ]
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows)
    lines = (
        f"  {name:<{names}}  {value:>{values}}  {reason}".rstrip() for name, value, reason in rows
    )
    return "\n".join([title, *lines])


def _memory_rows(plan: Resolved) -> list[tuple[str, str, str]]:
    memory, fixed, settings = plan.memory, plan.memory.fixed, plan.settings
    loaded = "counted by config.json" if settings.load_format == "dummy" else "from the files"
    kept = settings.dtype
    taken = "taken from the system as they fill"
    if settings.device != "cpu":
        taken = "to be settled by what a step takes"
    [quantization] = [item for item in plan.decisions if item.name == "quantization"]
    if quantization.value != "none":
        kept = f"{settings.dtype}, matrices as quantization says"
    return [
        ("  weights", format_bytes(fixed.weights), f"in {kept}, {loaded}"),
        (
            "  activations",
            format_bytes(fixed.activations + fixed.logits),
            f"at most, in a step of {settings.max_num_batched_tokens:,} tokens, logits included",
        ),
        ("  tables", format_bytes(fixed.tables), "token ids, block tables, positions"),
        *_rows_of_device(plan),
        *_rows_of_states(plan),
        *_rows_of_images(plan),
        (
            "  KV cache",
            format_bytes(memory.kv_cache),
            f"{memory.capacity_tokens:,} tokens of {format_bytes(memory.kv_per_token)}"
            f"{_expanded_words(plan)}, {taken}"
            if plan.spec.has_kv
            else f"no layer has K/V; prefixes of {memory.capacity_tokens:,} tokens have names",
        ),
        ("  total", format_bytes(memory.total), _budget_words(plan)),
        (
            "concurrency",
            f"{memory.max_concurrency:.2f}x",
            f"sequences of {settings.max_model_len:,} tokens at once",
        ),
    ]


def _expanded_words(plan: Resolved) -> str:
    """Say what a token of latent attention would take without it."""
    elements = plan.spec.expanded_kv_elements
    if elements is None:
        return ""
    each, _ = KV_DTYPES[plan.settings.kv_cache_dtype]
    return f" (keys and values of all heads: {format_bytes(elements * each)})"


def _rows_of_states(plan: Resolved) -> list[tuple[str, str, str]]:
    if not plan.layout.state_bytes:
        return []
    count, settings = plan.settings.num_state_checkpoints, plan.settings
    size = format_bytes(plan.layout.of_rank(Shard(0, settings.tensor_parallel_size)).state_bytes)
    tokens = settings.max_num_seqs + FEWEST_DRAFTS
    words = (
        f"{size} each: two of every sequence, {count:,} checkpoints; {tokens:,} tokens of drafts"
    )
    return [("  states", format_bytes(plan.memory.fixed.states), words)]


def _rows_of_images(plan: Resolved) -> list[tuple[str, str, str]]:
    images = plan.spec.images
    if images is None:
        return []
    size = format_bytes(images.num_parameters * plan.spec.dtype_bytes)
    words = f"open ones, the cache, the work on one; the encoder's {size} are among the weights"
    return [("  images", format_bytes(plan.memory.fixed.images), words)]


def _rows_of_device(plan: Resolved) -> list[tuple[str, str, str]]:
    """Return rows for the process, and for memory that another device lends or that comes later."""
    fixed, settings = plan.memory.fixed, plan.settings
    swap = format_bytes(settings.num_host_blocks * plan.memory.page)
    if settings.device == "cpu":
        return [
            ("  process", format_bytes(fixed.runtime), "interpreter and libraries"),
            ("  swap space", swap, "host memory for preempted requests and evicted prefixes"),
        ]
    return [
        ("  process", format_bytes(fixed.runtime), "the driver's context, libraries, kernels"),
        ("  graphs", format_bytes(fixed.graphs), "held back for steps that are captured later"),
        (
            "  swap space",
            swap,
            "of the host, not counted here, for preempted requests and evicted prefixes",
        ),
    ]


def _budget_words(plan: Resolved) -> str:
    memory = plan.memory
    if memory.budget is None:
        return "the machine does not say how much is free"
    return (
        f"of {format_bytes(memory.budget)} that may be used; {format_bytes(memory.free)} are free"
    )
