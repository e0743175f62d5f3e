"""The composition root: the one file that sees both plan and data, and wires them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.base.errors import ConfigError, RequestError
from quire.base.platform import detect_platform
from quire.base.platform.shared_region import SharedRegion
from quire.base.platform.streams import say
from quire.base.telemetry.flight.dump import (
    DumpFolder,
    FaultDumps,
    FlightDump,
    collect,
    user_folder,
)
from quire.base.telemetry.flight.record import FlightRecorder
from quire.base.telemetry.flight.stacks import StackPlace
from quire.base.telemetry.kv_events import parse_kv_events
from quire.bundled import BUNDLED_NAME, bundled_model_path
from quire.compute.executor import Executor
from quire.compute.executor.processes.messages import RankLaunch, computes_with
from quire.config import ModelSpec, env
from quire.config.kv_disk.folder import OpenStore
from quire.config.memory.measured import render_measured, replan
from quire.config.render_plan import render_plan
from quire.config.resolve import Resolved
from quire.config.resolved import ResolvedSettings
from quire.config.sentence import SentenceSettings
from quire.config.settings import EngineSettings, setting_values
from quire.config.speculation import parse_speculation
from quire.config.startup import StartupPlan, fetch, plan_startup
from quire.engine.clients.in_process import EngineClient, InProcessClient
from quire.engine.core.engine_core import EngineCore, PlanObserver
from quire.engine.core.event_publisher import EventPublisher
from quire.engine.core.hook_runner import HookRunner
from quire.engine.core.hook_session import TokenTexts
from quire.engine.core.pin_list import PinList
from quire.engine.disk_tier import (
    StoreNews,
    disk_key,
    num_state_parts,
    open_store,
    pin_again,
    weights_digest,
)
from quire.engine.fingerprint import fingerprint
from quire.engine.kernel_choice import Measure, choose_kernels, see_kernels
from quire.engine.model_front import load_model_front, load_tokenizer
from quire.engine.provenance import Provenance, engine_facts
from quire.hooks import OutputHook
from quire.hooks.load import load_hooks
from quire.ops.kernel_timing import time_kernels
from quire.plan.grammar import Grammars
from quire.plan.grammar.guidance import GuidanceGrammars
from quire.plan.grammar.vocabulary import Encode, Vocabulary
from quire.plan.kv_cache import BlockHasher, KVManager
from quire.plan.kv_cache.disk_index import DiskIndex
from quire.plan.scheduler import Feasibility, Scheduler, make_policy
from quire.plan.speculation import DraftMethods
from quire.protocol.control import Allocate, MeasureRecovery, OpenDisk, Report
from quire.protocol.receipts import Witness
from quire.protocol.recovery import ALWAYS_SWAP, RecoveryCosts
from quire.protocol.request import EngineRequest
from quire.protocol.status import FETCHING, PLANNING, EngineFacts
from quire.text.rendering import Renderer
from quire.text.rendering.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.compute.executor.processes.executor import Ranks

__all__ = ["BuiltCore", "Engine", "HookArgument", "block_hasher", "build_core", "build_engine"]

HookArgument = str | OutputHook | Mapping[str, OutputHook]
"""An argument of `load_hooks`."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine in this process. default_sampling: the model's recommended sampling parameters.
    recovery_costs: costs that decide whether preempted requests are swapped; None if they never
    are. sentences: defaults that turn hidden states into vectors, for requests that name none.
    provenance, facts: contents of receipts."""

    client: EngineClient
    renderer: Renderer
    spec: ModelSpec
    resolved: Resolved
    default_sampling: Mapping[str, object]
    eos_token_ids: frozenset[int]
    provenance: Provenance
    facts: EngineFacts
    recovery_costs: RecoveryCosts | None = None
    sentences: SentenceSettings = field(default_factory=SentenceSettings)

    def witness(self, request: EngineRequest) -> Witness | None:
        """Return what makes the receipt of a request; None if it asks for none. Errors as of
        `Provenance.witness`."""
        model = self.resolved.settings.model or ""
        name = BUNDLED_NAME if model == str(bundled_model_path()) else model
        return self.provenance.witness(request, self.facts, name)


@dataclass(frozen=True, slots=True)
class BuiltCore:
    """report: the executor's report of its start. facts: contents of receipts. kv_store: folder of
    the store of K/V that it or another replica writes; empty if there is none."""

    core: EngineCore
    resolved: Resolved
    report: Report
    recovery_costs: RecoveryCosts | None
    facts: EngineFacts
    kv_store: str = ""


@dataclass(frozen=True, slots=True)
class _Disk:
    """store: files of K/V on disk, and the index of what they hold."""

    store: OpenStore
    index: DiskIndex


def build_engine(
    settings: EngineSettings,
    measure: Measure = time_kernels,
    hooks: Sequence[HookArgument] = (),
) -> Engine:
    """Plan, say what was decided, load, and wire. `settings.model` must be set.

    measure: timing used to choose kernels (`choose_kernels`). hooks: hooks beside those of the
    settings. Raises ConfigError if the engine cannot start as asked; nothing is left behind then.
    """
    if settings.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={settings.data_parallel_size}: an engine of this process is one. "
            "Leave it out, or use quire serve."
        )
    platform = see_kernels(detect_platform())
    kernels = choose_kernels(settings, platform, measure)
    plan = plan_startup(kernels.settings, platform)
    plan = replace(plan, resolved=kernels.explained(plan.resolved))
    front = load_model_front(settings, plan.folder, plan.resolved.spec)
    started = time.monotonic()
    flight, stacks = _flight_of_process(plan)
    built = _load_core(plan, flight, hooks=hooks, on_lost=flight.fault, stacks=stacks)
    if not settings.quiet:
        seconds = time.monotonic() - started
        say(f"{built.report.kernels}; loaded in {seconds:.1f} s\n")
    return Engine(
        client=InProcessClient(built.core),
        renderer=front.renderer,
        spec=plan.resolved.spec,
        resolved=built.resolved,
        default_sampling=front.default_sampling,
        eos_token_ids=front.eos_token_ids,
        provenance=front.provenance,
        facts=built.facts,
        recovery_costs=built.recovery_costs,
        sentences=front.sentences,
    )


def _flight_of_process(plan: StartupPlan) -> tuple[FlightRecorder, StackPlace | None]:
    """Return a recorder that writes a dump of this process and of its ranks when a fault comes, and
    the place of the ranks' stacks; None without ranks."""
    has_ranks = plan.resolved.settings.tensor_parallel_size > 1
    folder = Path(tempfile.mkdtemp(prefix="quire-stacks-")) if has_ranks else None

    def take(reason: str) -> FlightDump:
        directories = [] if folder is None else [folder]
        return collect(reason, "engine", directories, [flight.snapshot()])

    flight = FlightRecorder(on_fault=FaultDumps(DumpFolder(user_folder()), take).fault)
    if folder is None:
        return flight, None
    weakref.finalize(flight, shutil.rmtree, folder, ignore_errors=True)
    return flight, StackPlace(str(folder), "engine")


def build_core(
    settings: EngineSettings,
    on_phase: Callable[[str], None],
    on_plan: PlanObserver,
    on_lost: Callable[[str], None],
    free_bytes: int | None = None,
    replica: int = 0,
    *,
    flight: FlightRecorder,
    stacks: StackPlace,
) -> BuiltCore:
    """Build the core alone, for a process whose requests are rendered elsewhere. Errors as above.
    Its kernels are those of the settings, or follow from processor flags: it measures none.

    on_phase: told the name of each phase of the start when it begins. on_lost: told why no more
    steps can be computed, when a process that computes a part of them has ended. free_bytes,
    replica: same meaning as in `Launch`. flight: log of steps. stacks: place of the ranks' stacks.
    """
    on_phase(FETCHING)
    fetch(settings)
    on_phase(PLANNING)
    platform = see_kernels(detect_platform())
    if free_bytes is not None:
        platform = replace(platform, free_bytes=free_bytes)
    plan = plan_startup(settings, platform)
    on_phase("loading")
    return _load_core(
        plan, flight, on_plan, on_lost=on_lost, replica=replica, on_phase=on_phase, stacks=stacks
    )


def _load_core(
    plan: StartupPlan,
    flight: FlightRecorder,
    on_plan: PlanObserver | None = None,
    hooks: Sequence[HookArgument] = (),
    *,
    on_lost: Callable[[str], None],
    replica: int = 0,
    on_phase: Callable[[str], None] = lambda _: None,
    stacks: StackPlace | None,
) -> BuiltCore:
    runner = _hook_runner(plan, hooks)  # what is wrong with hooks is said before weights are read
    if not plan.resolved.settings.quiet:
        say(f"{render_plan(plan.resolved)}\n")
    return _build_core(plan, flight, on_plan, runner, on_lost, replica, on_phase, stacks)


def _hook_runner(plan: StartupPlan, more: Sequence[HookArgument]) -> HookRunner | None:
    """Return a runner of the hooks of the settings and `more`, None if there are none."""
    settings = plan.asked
    found = load_hooks([*settings.output_hooks, *more])
    if not found.has_any:
        return None
    has_text = not settings.skip_tokenizer_init
    texts = TokenTexts(load_tokenizer(settings, plan.folder) if has_text else None)
    return HookRunner(found, texts, settings.output_hook_timeout)


def _build_core(
    plan: StartupPlan,
    flight: FlightRecorder,
    on_plan: PlanObserver | None,
    hooks: HookRunner | None,
    on_lost: Callable[[str], None],
    replica: int,
    on_phase: Callable[[str], None],
    stacks: StackPlace | None,
) -> BuiltCore:
    """Imports torch."""
    env.limit_spinning()
    env.order_gpus()
    if plan.resolved.settings.torch_compile:
        env.keep_compiled()
    resolved, chosen = plan.resolved, plan.resolved.settings
    executor = _executor(plan, on_lost, stacks)
    with contextlib.ExitStack() as undo:
        undo.callback(executor.shutdown)
        report = executor.start()
        hasher = block_hasher(plan, report)
        resolved = _allocate(executor, plan, report)
        disk = _open_disk(executor, plan, hasher, report)
        costs = _recovery_costs(executor, chosen.preemption_mode)
        report = replace(report, plan=render_plan(resolved))
        events = parse_kv_events(chosen.kv_events_config)
        publisher = None if events is None else EventPublisher(events, replica)
        if publisher is not None:
            undo.callback(publisher.close)
        flight.note_facts(_facts(resolved, report))
        scheduler = _build_scheduler(resolved, hasher, costs, hooks, disk and disk.index, flight)
        pin_list = None if disk is None else _pin_list(disk, chosen)
        core = EngineCore(
            scheduler,
            executor,
            chosen.depth,
            on_plan,
            report,
            _grammars(plan),
            hooks,
            chosen.max_loras if chosen.enable_lora else 0,
            takes_functions=chosen.tensor_parallel_size == 1,
            rank_pids=_rank_pids(executor, chosen.distributed_executor_backend),
            publisher=publisher,
            pin_list=pin_list,
        )
        undo.pop_all()
        undo.callback(core.shutdown)
        facts = engine_facts(plan, report, has_hooks=hooks is not None and hooks.watches_all)
        store = ""
        if disk is not None and pin_list is not None:
            if pins := pin_list.read():
                on_phase("pinning prefixes")
                pin_again(core, scheduler, pins)
            pin_list.begin()
            store = str(disk.store.files.folder)
        undo.pop_all()
        return BuiltCore(core, resolved, report, costs, facts, store)


def _pin_list(disk: _Disk, chosen: ResolvedSettings) -> PinList | None:
    """Return the list of the store's pins. A replica that reads it holds the same as the one that
    writes it; another server has none."""
    store = disk.store
    if not (store.is_writer or (chosen.data_parallel_size > 1 and store.files.is_siblings)):
        return None
    return PinList(store.files, store.header.identity, is_writer=store.is_writer)


def _facts(resolved: Resolved, report: Report) -> dict[str, str]:
    """Return what was decided at the start, and why."""
    decisions = {each.name: f"{each.value} ({each.reason})" for each in resolved.decisions}
    return {"kernels": report.kernels, **decisions}


def _rank_pids(executor: Executor, backend: str) -> Callable[[], Sequence[int]]:
    """Return what gives the processes of all ranks; with several on this host, rank 0's too."""
    from quire.compute.executor.processes.executor import ProcessExecutor

    if not isinstance(executor, ProcessExecutor) or backend == "ray":
        return tuple
    return lambda: (os.getpid(), *executor.pids)


def _grammars(plan: StartupPlan) -> Grammars | None:
    """Return the grammars over the model's tokens; None if it was started without a tokenizer. The
    tokenizer is read when the first grammar comes."""
    settings, spec = plan.asked, plan.resolved.spec
    if settings.skip_tokenizer_init:
        return None

    def load() -> tuple[Vocabulary, Encode]:
        tokenizer = load_tokenizer(settings, plan.folder)
        return _vocabulary_of(tokenizer, spec), partial(tokenizer.encode, add_special_tokens=False)

    return GuidanceGrammars(load, spec.eos_token_ids)


def _vocabulary_of(tokenizer: Tokenizer, spec: ModelSpec) -> Vocabulary:
    """The model's tokens as grammars take them. RequestError if the bytes of a token depend on its
    neighbours."""
    if tokenizer.decoder_plan.kind == "opaque":
        raise RequestError(
            "structured output is not offered for this model: what a token of its tokenizer "
            "stands for depends on the tokens beside it"
        )
    ids = range(min(tokenizer.vocab_size, spec.vocab_size))
    tokens = [tokenizer.token_bytes(i) for i in ids]
    tokens += [b""] * (spec.vocab_size - len(tokens))
    ends = [tokenizer.eos_token_id, *spec.eos_token_ids, 0]
    special = sorted(i for i in tokenizer.special_ids if i < spec.vocab_size)
    return Vocabulary(tokens, special, next(i for i in ends if i is not None))


def _allocate(executor: Executor, plan: StartupPlan, report: Report) -> Resolved:
    """Make the KV pool. The plan as it is then: on a GPU, of sizes that were measured before."""
    resolved = plan.resolved
    if report.measured is not None:
        settled = replan(plan.asked, resolved, report.measured)
        if not settled.settings.quiet:
            say(f"{render_measured(resolved, settled)}\n")
        resolved = settled
    chosen = resolved.settings
    executor.control(Allocate(chosen.num_kv_blocks, chosen.max_model_len))
    return resolved


def block_hasher(plan: StartupPlan, report: Report) -> BlockHasher:
    """Return the naming of blocks, which is the same in every engine of a fleet with the same model
    and secret. Names on a disk outlive the engine, so that a secret is kept beside them, and they
    depend on every byte of the weights."""
    kv_disk, weights = plan.resolved.settings.kv_disk, b""
    secret = env.block_name_secret()
    if kv_disk is not None:
        secret = secret or disk_key(kv_disk)
        weights = weights_digest(kv_disk, plan.checkpoint)
    secret = secret or secrets.token_bytes(32)
    key = hashlib.blake2b(secret, digest_size=32, person=b"quire blocks").digest()
    root = fingerprint(plan.resolved, plan.checkpoint, report.kernel_family, weights)
    return BlockHasher(plan.resolved.layout.block_size, key, root)


def _open_disk(
    executor: Executor, plan: StartupPlan, hasher: BlockHasher, report: Report
) -> _Disk | None:
    """Open the files of K/V on disk, and read what they hold; None without a folder for them."""
    chosen = plan.resolved.settings
    if chosen.kv_disk is None:
        return None
    model = plan.asked.model or str(plan.folder)
    root, kernels = hasher.root(), computes_with(report)
    store = open_store(plan.resolved, chosen.kv_disk, model, root, kernels)
    header, files = store.header, store.files
    try:
        executor.control(
            OpenDisk(
                folder=str(files.folder),
                is_writer=store.is_writer,
                slot_bytes=header.slot_bytes,
                num_slots=header.num_slots,
                num_state_parts=num_state_parts(plan.resolved),
                lock=store.lock,
            )
        )
        records = files.read_records(header)
    except BaseException:
        store.close()
        raise
    news = None if store.is_writer else StoreNews(files, header)
    index = DiskIndex(header.num_slots, records, news=news)
    if not chosen.quiet:
        role = "" if store.is_writer else ", which another process writes"
        say(f"{index.num_named:,} KV blocks are in {files.folder}{role}\n")
    return _Disk(store, index)


def _recovery_costs(executor: Executor, preemption_mode: str) -> RecoveryCosts | None:
    """Return the costs that decide whether preempted requests are swapped; None if they never
    are."""
    if preemption_mode == "swap":
        return ALWAYS_SWAP
    return executor.control(MeasureRecovery()).recovery_costs if preemption_mode == "auto" else None


def _executor(
    plan: StartupPlan, on_lost: Callable[[str], None], stacks: StackPlace | None
) -> Executor:
    """Import torch, after other ranks have been started, so that all import it at once."""
    if plan.resolved.settings.tensor_parallel_size > 1:
        ranks = _ranks(plan, on_lost, stacks)
        try:
            ranks.start()
            return _executor_of(plan, ranks)
        except BaseException:
            ranks.shutdown()
            ranks.close()
            raise
    from quire.compute.executor.in_process import InProcessExecutor
    from quire.compute.worker import Worker
    from quire.compute.worker.planned import worker_settings

    settings = worker_settings(plan)
    if plan.resolved.settings.rank_invariant:  # its sums end as those of several ranks
        region = SharedRegion.create(1)
        region.close()  # no other process maps it
        settings = replace(settings, meeting=region)
    return InProcessExecutor(lambda: Worker(settings))


def _ranks(plan: StartupPlan, on_lost: Callable[[str], None], stacks: StackPlace | None) -> Ranks:
    """Return the ranks beside that of this process, to be started."""
    platform, chosen = plan.resolved.platform, plan.resolved.settings
    launch = RankLaunch(
        rank=0,
        size=chosen.tensor_parallel_size,
        settings=setting_values(replace(plan.asked, num_threads=chosen.num_threads)),
        free_bytes=platform.free_bytes,
        memory_bytes=platform.memory_bytes,
    )
    if chosen.distributed_executor_backend == "ray":
        from quire.compute.executor.ray import RayRankGroup

        return RayRankGroup(
            launch,
            on_lost,
            rank_bytes=plan.resolved.memory.total,
            host_bytes=platform.free_bytes // chosen.data_parallel_size,
        )
    from quire.compute.executor.processes.group import RankGroup

    return RankGroup(msgspec.structs.replace(launch, stacks=stacks), on_lost)


def _executor_of(plan: StartupPlan, ranks: Ranks) -> Executor:
    """Return the executor of ranks that have been started."""
    from quire.compute.executor.processes.executor import ProcessExecutor
    from quire.compute.worker import Worker
    from quire.compute.worker.planned import worker_settings

    settings = worker_settings(plan)
    return ProcessExecutor(lambda meeting: Worker(replace(settings, meeting=meeting)), ranks)


def _build_scheduler(
    resolved: Resolved,
    hasher: BlockHasher,
    recovery_costs: RecoveryCosts | None,
    hooks: HookRunner | None,
    disk: DiskIndex | None,
    flight: FlightRecorder,
) -> Scheduler:
    chosen, layout = resolved.settings, resolved.layout
    kv = KVManager(
        layout,
        chosen.num_kv_blocks,
        chosen.max_num_seqs,
        chosen.max_model_len,
        chosen.num_host_blocks,
        chosen.num_state_checkpoints,
        keeps_evicted=chosen.enable_prefix_caching,
        disk=disk,
        tells_events=parse_kv_events(chosen.kv_events_config) is not None,
        num_state_parts=num_state_parts(resolved),
    )
    return Scheduler(
        kv=kv,
        hasher=hasher,
        policy=make_policy(chosen),
        feasibility=Feasibility(
            layout,
            chosen.num_kv_blocks,
            chosen.max_num_seqs,
            chosen.max_num_batched_tokens,
            chosen.max_model_len,
            draws_tokens=resolved.spec.draws_tokens,
            num_classes=resolved.spec.num_classes,
        ),
        settings=chosen,
        max_model_len=chosen.max_model_len,
        enable_prefix_caching=chosen.enable_prefix_caching,
        recovery_costs=recovery_costs,
        watches=None if hooks is None else hooks.watches,
        methods=DraftMethods(parse_speculation(chosen.speculative_config)),
        vocab_size=resolved.spec.vocab_size,
        whole_prompts=resolved.spec.whole_prompts,
        flight=flight,
    )
