"""Resolves the user's settings to those of the engine: every open value is chosen, with a reason.

Pure: the same settings, model and machine give the same answer, and nothing is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.base.errors import ConfigError
from quire.base.platform import Platform
from quire.config import env
from quire.config.checkpoint import Checkpoint
from quire.config.device import (
    check_threads,
    choose_device,
    choose_dtype,
    choose_seqs,
    choose_step_tokens,
)
from quire.config.kv_layout import FP8_DTYPES, KVLayout
from quire.config.memory.amounts import format_bytes
from quire.config.memory.budget import (
    MemoryBudget,
    check_host_memory,
    device_budget,
    host_budget,
)
from quire.config.memory.fixed_bytes import FixedOf, device_fixed, host_fixed
from quire.config.memory.plan import (
    MemoryPlan,
    adapter_bytes,
    states_bytes,
    weight_bytes,
)
from quire.config.memory.pool_size import PoolBounds, PoolSizing
from quire.config.memory.ranks import (
    check_rank_invariant,
    check_ranks,
    describe_rank,
    rank_layout,
    rank_weight_bytes,
)
from quire.config.model_spec import ModelSpec
from quire.config.packed.choices import choose_activation_bits, describe_quantization
from quire.config.resolved import ResolvedSettings
from quire.config.rope import LongRopeScaling
from quire.config.rules import Case, check_rules
from quire.config.settings import EngineSettings
from quire.config.speculation.draft_model import Draft

__all__ = ["Decision", "Resolved", "resolve"]

CHECKPOINTS_PER_SEQUENCE = 4
"""Ends of the system prompt, of two turns, and of the prompt before its last lines."""

CHECKPOINTS_SHARE, FEWEST_CHECKPOINTS = 8, 8
"""The default takes at most an eighth of the memory beside weights, but leaves some."""

STATES_SHARE = 4
"""A quarter of the memory beside weights is the most that rows have by default for their states."""

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block: small enough that a sequence wastes little (Kwon et al. 2023, section 7.2)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the start-up report."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """All that start-up needs to know. spec: model in the dtype of the computation. platform: the
    machine, with the device that was chosen. draft: draft model or heads, in the same dtype."""

    settings: ResolvedSettings
    spec: ModelSpec
    layout: KVLayout
    memory: MemoryPlan
    decisions: tuple[Decision, ...]
    platform: Platform
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class _Steps:
    """Sizes of a step, with the reason of each."""

    max_num_seqs: tuple[int, str]
    max_num_batched_tokens: tuple[int, str]
    num_threads: tuple[int, str]


@dataclass(frozen=True, slots=True)
class _Room:
    """Room in memory. context, num_blocks: value and reason. plan: distribution of all bytes."""

    context: tuple[int, str]
    num_blocks: tuple[int, str]
    num_host_blocks: int
    num_checkpoints: int
    plan: MemoryPlan


def resolve(
    settings: EngineSettings,
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    platform: Platform,
    draft: Draft | None = None,
) -> Resolved:
    """Choose what is open and check that all of it fits together and into memory.

    checkpoint: headers of the weight files; None when weights are made up (load_format="dummy").
    draft: a model that guesses tokens, whose K/V lie beside those of `spec`, block by block.
    Raises ConfigError when it cannot fit, naming the largest value that would.
    """
    layouts = () if checkpoint is None else checkpoint.packed
    device = choose_device(settings.device, platform)
    platform = replace(platform, device=device[0])
    check_rules(Case(settings, spec, layouts, device[0], draft))
    if settings.rank_invariant:
        check_rank_invariant(settings, spec, platform)
    if settings.tensor_parallel_size > 1:
        check_ranks(settings, spec, platform, has_draft_model=bool(draft and not draft.is_cut))
    dtype = choose_dtype(settings, spec, platform)
    spec = replace(spec, dtype=dtype[0])
    draft = None if draft is None else draft.with_dtype(dtype[0])
    if spec.whole_prompts:
        settings = _of_whole_prompts(settings)
    kv_dtype = _kv_dtype(settings, dtype[0])
    layout = KVLayout.of_model(spec, settings.block_size or DEFAULT_BLOCK_SIZE, kv_dtype)
    most = _most_rows(settings, spec, checkpoint, platform, layout)
    steps = _choose_steps(settings, spec, platform, most)
    room = _choose_room(settings, spec, checkpoint, platform, draft, layout, steps)
    isas, isa_decisions = _choose_isas(settings, platform)
    bits = choose_activation_bits(settings, layouts, device[0], dtype[0])
    recovery = _choose_recovery(settings, spec)
    decisions = (
        Decision("device", *device),
        Decision("dtype", *dtype),
        Decision("quantization", *describe_quantization(settings, spec, layouts, device[0])),
        *(
            []
            if bits.reason is None
            else [Decision("activation_bits", str(bits.value), bits.reason)]
        ),
        _decided("kv_cache_dtype", kv_dtype, settings.kv_cache_dtype != "auto", "the model's"),
        Decision("max_model_len", f"{room.context[0]:,}", room.context[1]),
        *_describe_longrope(spec, room.context[0]),
        _counted("max_num_seqs", steps.max_num_seqs),
        _counted("max_num_batched_tokens", steps.max_num_batched_tokens),
        _decided(
            "block_size",
            str(layout.block_size),
            settings.block_size is not None,
            "little of a last block is wasted",
        ),
        _counted("num_kv_blocks", room.num_blocks),
        Decision("preemption", *recovery),
        *_describe_disk(settings, spec, layout, device[0]),
        Decision("num_threads", str(steps.num_threads[0]), steps.num_threads[1]),
        *_describe_ranks(spec, settings.tensor_parallel_size),
        *_describe_replicas(settings.data_parallel_size),
        *isa_decisions,
        *_describe_draft(draft, settings, layout),
    )
    resolved = ResolvedSettings.of(
        settings,
        device=device[0],
        dtype=dtype[0],
        activation_bits=bits.value,
        kv_cache_dtype=kv_dtype,
        max_model_len=room.context[0],
        block_size=layout.block_size,
        num_kv_blocks=room.num_blocks[0],
        num_host_blocks=room.num_host_blocks,
        num_state_checkpoints=room.num_checkpoints,
        preemption_mode=recovery[0],
        max_num_seqs=steps.max_num_seqs[0],
        max_num_batched_tokens=steps.max_num_batched_tokens[0],
        long_prefill_token_threshold=_choose_threshold(settings, spec, room.context[0]),
        num_threads=steps.num_threads[0],
        **isas,
    )
    return Resolved(resolved, spec, layout, room.plan, decisions, platform, draft)


def _choose_steps(
    settings: EngineSettings, spec: ModelSpec, platform: Platform, most_rows: _MostRows | None
) -> _Steps:
    num_seqs = choose_seqs(settings, spec, platform)
    if most_rows is not None:
        num_seqs = most_rows.check(settings, num_seqs)
    step_tokens = choose_step_tokens(settings, spec, platform, num_seqs[0])
    return _Steps(num_seqs, step_tokens, _choose_threads(settings, platform))


@dataclass(frozen=True, slots=True)
class _MostRows:
    """Bound on rows with recurrent states. room: bytes of memory beside weights. of_row: bytes that
    each row needs."""

    room: int
    of_row: int

    def check(self, settings: EngineSettings, chosen: tuple[int, str]) -> tuple[int, str]:
        """Return max_num_seqs and why. ConfigError if as many rows as asked for do not fit."""
        size, room = format_bytes(self.of_row), format_bytes(max(self.room, 0))
        if settings.max_num_seqs is None:
            most = max(self.room // STATES_SHARE // self.of_row, 1)
            if chosen[0] <= most:
                return chosen
            reason = f"recurrent states of {size} a row take a quarter of {room} beside weights"
            return most, reason
        if chosen[0] * self.of_row > self.room:
            raise ConfigError(
                f"max_num_seqs={chosen[0]}: recurrent states of {size} a row do not fit into "
                f"{room} beside weights. Give at most {max(self.room // 2 // self.of_row, 1)}."
            )
        return chosen


def _most_rows(
    settings: EngineSettings,
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    platform: Platform,
    layout: KVLayout,
) -> _MostRows | None:
    """Return the bound of a process on rows with states; None if there are none, or if the machine
    does not say how much memory is free."""
    if not layout.state_bytes:
        return None
    ranks = settings.tensor_parallel_size
    of_rank, rank_platform = _of_rank(settings, platform)
    limit = host_budget(of_rank, rank_platform).limit
    if limit is None:
        return None
    weights = weight_bytes(spec, checkpoint, settings.quantization, platform.device)
    own = rank_layout(layout, ranks)
    of_row = states_bytes(own, 1, 0) - states_bytes(own, 0, 0)
    return _MostRows(limit - rank_weight_bytes(spec, weights, ranks), of_row)


def _choose_room(
    settings: EngineSettings,
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    platform: Platform,
    draft: Draft | None,
    layout: KVLayout,
    steps: _Steps,
) -> _Room:
    """Share the memory of one process between weights, steps and the KV cache. layout: KV layout of
    all ranks together. Raises ConfigError if the memory does not suffice."""
    ranks = settings.tensor_parallel_size
    of_rank, rank_platform = _of_rank(settings, platform)
    own_layout = rank_layout(layout, ranks)
    host_blocks = _choose_host_blocks(of_rank, own_layout)
    num_seqs, step_tokens = steps.max_num_seqs[0], steps.max_num_batched_tokens[0]
    weights = weight_bytes(spec, checkpoint, settings.quantization, platform.device)
    limit = host_budget(of_rank, rank_platform).limit
    room = None if limit is None else limit - rank_weight_bytes(spec, weights, ranks)
    checkpoints = _choose_checkpoints(settings, own_layout.state_bytes, num_seqs, room)
    budget, fixed = _memory_of_device(
        of_rank,
        spec,
        own_layout,
        rank_platform,
        weights=rank_weight_bytes(spec, weights, ranks)
        + adapter_bytes(spec, settings)
        + _draft_bytes(draft, settings, step_tokens, num_seqs),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=step_tokens,
        num_host_blocks=host_blocks,
        num_checkpoints=checkpoints,
        num_threads=steps.num_threads[0],
    )
    sizing = PoolSizing(
        of_rank,
        spec,
        own_layout,
        fixed=fixed,
        budget=budget,
        bounds=PoolBounds(num_seqs, step_tokens),
        draft_page=0 if draft is None else draft.page_bytes(layout),
    )
    context = sizing.choose_context()
    blocks = sizing.choose_blocks(context[0])
    return _Room(context, blocks, host_blocks, checkpoints, sizing.plan(context[0], blocks[0]))


def _choose_checkpoints(
    settings: EngineSettings, state_bytes: int, max_num_seqs: int, room: int | None
) -> int:
    """room: bytes of memory beside weights, None if that is unknown."""
    if not state_bytes or not settings.enable_prefix_caching:
        return 0
    if settings.num_state_checkpoints is not None:
        return settings.num_state_checkpoints
    usual = CHECKPOINTS_PER_SEQUENCE * max_num_seqs
    if room is None:
        return usual
    most = max(room // CHECKPOINTS_SHARE // state_bytes, FEWEST_CHECKPOINTS)
    return min(usual, most)


def _kv_dtype(settings: EngineSettings, dtype: str) -> str:
    asked = dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    return FP8_DTYPES.get(asked, asked)


def _of_rank(settings: EngineSettings, platform: Platform) -> tuple[EngineSettings, Platform]:
    """The settings and the machine for one process, if several share its memory alike. Sizes that
    are asked for are those of all ranks, wherever they are."""
    ranks, local = settings.tensor_parallel_size, _num_processes(settings)
    if max(ranks, local) == 1:
        return settings, platform
    cache, swap = settings.kv_cache_memory, settings.swap_space
    own = replace(
        settings,
        kv_cache_memory=None if cache is None else max(cache // ranks, 1),
        swap_space=None if swap is None else swap // ranks,
    )
    return own, replace(platform, free_bytes=platform.free_bytes // local)


def _num_processes(settings: EngineSettings) -> int:
    """Return how many processes share this machine. Ray finds room for the memory and the threads
    of each rank, so that it has a machine of its own, or its part of a larger one."""
    is_placed = settings.distributed_executor_backend == "ray"
    return settings.data_parallel_size * (1 if is_placed else settings.tensor_parallel_size)


def _describe_ranks(spec: ModelSpec, ranks: int) -> tuple[Decision, ...]:
    if ranks == 1:
        return ()
    return (Decision("tensor_parallel_size", str(ranks), describe_rank(spec, ranks)),)


def _describe_replicas(replicas: int) -> tuple[Decision, ...]:
    if replicas == 1:
        return ()
    return (Decision("data_parallel_size", str(replicas), "engines; sizes are those of one"),)


def _of_whole_prompts(settings: EngineSettings) -> EngineSettings:
    """Return the settings for models whose prompts must be computed in one step: a cached or
    swapped part of a prompt is of no use, and prompts are not cut."""
    return replace(
        settings,
        enable_prefix_caching=False,
        preemption_mode="recompute",
        long_prefill_token_threshold=None,
        max_num_partial_prefills=None,
        max_long_partial_prefills=None,
    )


def _describe_draft(
    draft: Draft | None, settings: EngineSettings, layout: KVLayout
) -> tuple[Decision, ...]:
    if draft is None:
        return ()
    weights = format_bytes(draft.weight_bytes(settings.quantization))
    has_pages = draft.page_bytes(layout) > 0
    reason = f"{weights} of weights{'; each block holds its K/V too' if has_pages else ''}"
    return (Decision("draft_model", draft.name, reason),)


def _draft_bytes(
    draft: Draft | None, settings: EngineSettings, step_tokens: int, num_seqs: int
) -> int:
    """Return the bytes of a draft model's weights and of its steps."""
    if draft is None:
        return 0
    return draft.weight_bytes(settings.quantization) + draft.step_bytes(step_tokens, num_seqs)


def _memory_of_device(
    settings: EngineSettings,
    spec: ModelSpec,
    layout: KVLayout,
    platform: Platform,
    *,
    weights: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_host_blocks: int,
    num_checkpoints: int,
    num_threads: int,
) -> tuple[MemoryBudget, FixedOf]:
    """Return the engine's budget of the memory in which tensors live, and its needs there beside
    the KV cache."""
    captures = not settings.enforce_eager
    if platform.device == "cpu":
        captures = captures and not settings.torch_compile
        return host_budget(settings, platform), host_fixed(
            spec,
            layout,
            weights=weights,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_host_blocks=num_host_blocks,
            num_checkpoints=num_checkpoints,
            num_threads=num_threads,
            image_memory=settings.image_cache + settings.image_memory,
            captures=captures,
        )
    check_host_memory(num_host_blocks * layout.page_bytes, platform)
    return device_budget(settings, *_device_memory(platform)), device_fixed(
        spec,
        layout,
        weights=weights,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        captures=captures,
    )


def _device_memory(platform: Platform) -> tuple[int, int]:
    """Bytes of the GPU in all, and free: the host's where it has none of its own."""
    gpu = platform.gpu
    if gpu is None or not gpu.memory_bytes:
        return platform.memory_bytes, platform.free_bytes
    return gpu.memory_bytes, gpu.free_bytes


def _counted(name: str, chosen: tuple[int, str]) -> Decision:
    return Decision(name, f"{chosen[0]:,}", chosen[1])


def _decided(name: str, value: str, asked: bool, reason: str) -> Decision:
    return Decision(name, value, "as asked" if asked else reason)


def _describe_longrope(spec: ModelSpec, context: int) -> tuple[Decision, ...]:
    """Describe which of LongRoPE's two sets of factors counts. One set serves all sequences: K in
    the cache stays as it was rotated, while `transformers` changes over when a sequence becomes
    longer."""
    scalings = [rope.scaling for rope in spec.ropes if rope is not None]
    found = next((each for each in scalings if isinstance(each, LongRopeScaling)), None)
    if found is None:
        return ()
    trained = found.original_max_positions
    if context <= trained:
        reason = f"no sequence is longer than the {trained:,} tokens of the training"
        return (Decision("longrope", "short factors", reason),)
    reason = f"of short prompts too; max_model_len={trained} gives those the short ones"
    return (Decision("longrope", "long factors", reason),)


def _choose_host_blocks(settings: EngineSettings, layout: KVLayout) -> int:
    """Blocks of the swap space. ConfigError if it holds not even one."""
    if not settings.swap_space or settings.preemption_mode == "recompute":
        return 0
    count = settings.swap_space // layout.page_bytes
    if count == 0:
        raise ConfigError(
            f"swap_space={settings.swap_space} bytes hold no KV block, which has "
            f"{layout.page_bytes}. Give more, or 0 for none."
        )
    return count


def _describe_disk(
    settings: EngineSettings, spec: ModelSpec, layout: KVLayout, device: str
) -> tuple[Decision, ...]:
    """Return the contents of `kv_disk`, and what a hit there saves. ConfigError where the K/V of a
    model cannot go to a disk."""
    if settings.kv_disk is None:
        return ()
    refused = {
        "num_state_checkpoints is 0, without which nothing is found": (
            bool(spec.states or spec.wide_states) and settings.num_state_checkpoints == 0
        ),
        "enable_prefix_caching is off": not settings.enable_prefix_caching,
        "the ranks that Ray places have no common disk": (
            settings.tensor_parallel_size > 1 and settings.distributed_executor_backend == "ray"
        ),
        f"the device is {device}, and K/V are read into host memory alone": device != "cpu",
    }
    for reason, holds in refused.items():
        if holds:
            raise ConfigError(
                f"kv_disk={settings.kv_disk!r} cannot be used: {reason}. Leave it out."
            )
    num_ranks = settings.tensor_parallel_size
    sizes = layout.stored_sizes(spec, num_ranks)
    block_bytes = num_ranks * sizes.block_bytes
    count = settings.kv_disk_bytes // block_bytes
    if not spec.has_kv:
        states = f"{count // sizes.num_state_parts:,} recurrent states in {settings.kv_disk}"
        size = format_bytes(sizes.num_state_parts * block_bytes)
        reason = f"{states}; a hit reads one of {size} instead of computing"
        return (Decision("kv_disk", format_bytes(settings.kv_disk_bytes), reason),)
    tokens = count // max(layout.blocks_for(layout.hit_tokens), 1) * layout.hit_tokens
    size = format_bytes(layout.blocks_for(1024) * block_bytes)
    reason = (
        f"{tokens:,} tokens in {settings.kv_disk}; a hit of 1,024 reads {size} instead of computing"
    )
    return (Decision("kv_disk", format_bytes(settings.kv_disk_bytes), reason),)


def _choose_recovery(settings: EngineSettings, spec: ModelSpec) -> tuple[str, str]:
    """preemption_mode and why. Host memory is the device's on a CPU, where more KV blocks preempt
    less than the same bytes of swap space; on a GPU nobody but the operator knows how much of the
    host's memory may be pinned."""
    if spec.whole_prompts:
        return settings.preemption_mode, "a prompt is computed whole"
    if spec.states and settings.preemption_mode == "auto":
        return "recompute", "checkpoints of recurrent states shorten it"
    if settings.preemption_mode != "auto":
        return settings.preemption_mode, "as asked"
    if not settings.swap_space:
        return "recompute", "there is no swap_space"
    return "auto", "swapped or computed again, by what either costs here"


def _choose_threads(settings: EngineSettings, platform: Platform) -> tuple[int, str]:
    """num_threads and why. Small models too take all cores: a second thread loses a fifth beside a
    program that is always busy (benchmarks/results/threads_cpu.json), but beside a server's front
    under load it gains a third (serving.json and serving_1_thread.json there)."""
    processes = _num_processes(settings)
    if settings.num_threads is not None:
        asked, cores = "as asked, or by OMP_NUM_THREADS", platform.cpu.num_cores
        if platform.device == "cpu":
            check_threads(settings.num_threads, cores)
        if settings.num_threads > cores:
            asked += f"; more than the usable cores, {cores}: they will wait for each other"
        return settings.num_threads, asked
    if platform.device != "cpu":
        return platform.cpu.num_cores, "one per usable core; they load weights only"
    if processes > 1:
        return max(platform.cpu.num_cores // processes, 1), "of each process; they share the cores"
    return platform.cpu.num_cores, "one per usable core"


def _choose_isas(
    settings: EngineSettings, platform: Platform
) -> tuple[dict[str, str | None], tuple[Decision, ...]]:
    """Return linear_isa and attention_isa, with the reasons. Nothing is measured here: the engine's
    owner has done that before (`engine/kernel_choice.py`)."""
    asked = {"linear_isa": settings.linear_isa, "attention_isa": settings.attention_isa}
    nothing = dict.fromkeys(asked)
    if platform.device != "cpu":
        return nothing, ()
    forced = env.cpu_isa()
    if forced is not None:
        words = "by QUIRE_CPU_ISA, as all kernels"
        return nothing, tuple(Decision(name, forced, words) for name in asked)
    if settings.attention_backend is not None:
        del asked["attention_isa"]
    handed = "as asked, or as the owner of the engine chose"
    open_value, open_reason = "auto", "by processor flags"
    if platform.kernels_problem is not None:
        open_value, open_reason = "none", f"plain torch: {platform.kernels_problem}"
    return nothing | asked, tuple(
        Decision(name, isa or open_value, open_reason if isa is None else handed)
        for name, isa in asked.items()
    )


def _choose_threshold(settings: EngineSettings, spec: ModelSpec, context: int) -> int | None:
    """long_prefill_token_threshold; None: a prompt takes what a step has room for. Prompts that are
    to be computed side by side need one, and vLLM's choice is 4 % of the context. An image that is
    computed whole is never too long."""
    if asked := settings.long_prefill_token_threshold:
        if asked < spec.least_chunk:
            raise ConfigError(
                f"long_prefill_token_threshold={asked} is less than the {spec.least_chunk} tokens "
                "of an image, which this model computes in one step. Give at least "
                f"{spec.least_chunk}."
            )
        return asked
    is_wanted = (settings.max_num_partial_prefills or 1) > 1 or settings.max_long_partial_prefills
    return max(spec.least_chunk, context * 4 // 100) if is_wanted else None
