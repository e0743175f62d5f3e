"""The composition root: the one file that sees both plan and data, and wires them."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from quire.config import ModelSpec, env, resolve_model_folder
from quire.config.render_plan import render_plan
from quire.config.resolve import Resolved
from quire.config.settings import EngineSettings
from quire.config.startup import StartupPlan, plan_startup
from quire.engine.client import EngineClient, InProcessClient
from quire.engine.core import EngineCore
from quire.kv_cache import BlockHasher, KVManager
from quire.platform import Platform, detect_platform
from quire.rendering import Renderer
from quire.scheduler import POLICIES, Admission, Scheduler

if TYPE_CHECKING:
    from quire.models import LoadFormat

__all__ = ["Engine", "build_engine"]


@dataclass(frozen=True, slots=True)
class Engine:
    """What a front works with. default_sampling: the model's recommended sampling parameters."""

    client: EngineClient
    renderer: Renderer
    spec: ModelSpec
    resolved: Resolved
    default_sampling: Mapping[str, object]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends a sequence: the tokens of the checkpoint's configs and the tokenizer's own,
        which in a chat model may be the only one that ends a turn."""
        tokenizer = self.renderer.tokenizer
        own = None if tokenizer is None else tokenizer.eos_token_id
        return frozenset((*self.spec.eos_token_ids, *(() if own is None else (own,))))


def build_engine(settings: EngineSettings) -> Engine:
    """Plan, say what was decided, load, and wire. `settings.model` must be set.

    Raises ConfigError if the engine cannot start as asked; nothing is left behind then.
    """
    platform = detect_platform()
    plan = plan_startup(settings, platform)
    renderer = _build_renderer(settings, plan)
    if not plan.resolved.settings.quiet:
        print(render_plan(plan.resolved), file=sys.stderr)  # noqa: T201  the start-up report
    started = time.monotonic()
    core, providers = _build_core(plan, platform)
    if not plan.resolved.settings.quiet:
        seconds = time.monotonic() - started
        print(f"{providers}; loaded in {seconds:.1f} s", file=sys.stderr)  # noqa: T201
    return Engine(
        client=InProcessClient(core),
        renderer=renderer,
        spec=plan.resolved.spec,
        resolved=plan.resolved,
        default_sampling=_default_sampling(plan.resolved),
    )


def _build_renderer(settings: EngineSettings, plan: StartupPlan) -> Renderer:
    folder = plan.folder
    if settings.tokenizer is not None:
        folder = resolve_model_folder(settings.tokenizer, settings.revision, settings.download_dir)
    return Renderer.from_folder(
        folder,
        vocab_size=plan.resolved.spec.vocab_size,
        skip_tokenizer_init=plan.resolved.settings.skip_tokenizer_init,
        chat_template=settings.chat_template,
    )


def _build_core(plan: StartupPlan, platform: Platform) -> tuple[EngineCore, str]:
    """The core, and a sentence on the kernels that serve it. Imports torch."""
    env.limit_spinning()
    from quire.attention import backend_of_isa
    from quire.executor.in_process import InProcessExecutor
    from quire.ops import force_isa
    from quire.worker import Worker, WorkerSettings

    resolved, chosen = plan.resolved, plan.resolved.settings
    scheduler = _build_scheduler(resolved, plan.folder)
    worker_settings = WorkerSettings(
        spec=resolved.spec,
        folder=plan.folder,
        layout=resolved.layout,
        num_blocks=chosen.num_kv_blocks,
        max_num_seqs=chosen.max_num_seqs,
        max_model_len=chosen.max_model_len,
        dtype=chosen.dtype,
        quantization=chosen.quantization,
        kv_dtype=chosen.kv_cache_dtype,
        load_format=cast("LoadFormat", chosen.load_format),  # settings.py checks it
        seed=chosen.seed,
        platform=platform,
        forced_ops=dict(force_isa(env.cpu_isa())),
        attention_backend=chosen.attention_backend or backend_of_isa(env.cpu_isa()),
        num_threads=chosen.num_threads,
        show_progress=not chosen.quiet,
    )
    executor = InProcessExecutor(lambda: Worker(worker_settings))
    return EngineCore(scheduler, executor, chosen.depth), executor.providers


def _build_scheduler(resolved: Resolved, folder: Path) -> Scheduler:
    chosen, layout = resolved.settings, resolved.layout
    kv = KVManager(
        [group.window for group in layout.groups],
        layout.block_size,
        chosen.num_kv_blocks,
        chosen.max_num_seqs,
        chosen.max_model_len,
    )
    key = hashlib.blake2b(str(folder).encode(), digest_size=32).digest()
    return Scheduler(
        kv=kv,
        hasher=BlockHasher(layout.block_size, key),
        policy=POLICIES[chosen.scheduling_policy](),
        admission=Admission(
            layout,
            chosen.num_kv_blocks,
            chosen.max_num_seqs,
            chosen.max_num_batched_tokens,
            chosen.max_model_len,
        ),
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        max_model_len=chosen.max_model_len,
        enable_prefix_caching=chosen.enable_prefix_caching,
    )


def _default_sampling(resolved: Resolved) -> Mapping[str, object]:
    """The checkpoint's generation_config.json, as sampling parameters."""
    if resolved.settings.generation_config == "none":
        return {}
    stated = resolved.spec.generation
    values: dict[str, object] = {
        "temperature": stated.temperature,
        "top_p": stated.top_p,
        "top_k": stated.top_k,
        "min_p": stated.min_p,
        "repetition_penalty": stated.repetition_penalty,
        "max_tokens": stated.max_new_tokens,
    }
    return {name: value for name, value in values.items() if value is not None}
