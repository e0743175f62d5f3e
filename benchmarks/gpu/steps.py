"""Cost of a decode step on the host, and the kernels that it runs on the device."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import Part
from benchmarks.gpu.shapes import QWEN_SMALL, TINY, model_folder
from quire import LLM, SamplingParams
from quire.compute.worker import Worker
from quire.plan.scheduler import Scheduler

__all__ = ["host_times", "kernels"]

_METHODS: tuple[tuple[type, str], ...] = (
    (Scheduler, "plan"),
    (Scheduler, "apply"),
    (Worker, "launch"),
)
_SHOWN_KERNELS = 25


def host_times(part: Part) -> None:
    """Microseconds that the host spends in a step of decodes alone, by what it does there."""
    for batch in (2,) if part.is_dry else (1, 32, 256):
        with _timed_methods() as times, _opened(part, batch) as llm:
            for _ in range(2):  # a size is captured after it was wanted
                _decode(llm, batch, 8 if part.is_dry else 128)
            for seconds in times.values():
                seconds.clear()
            started = time.perf_counter()
            tokens = 8 if part.is_dry else 256
            _decode(llm, batch, tokens)
            step = (time.perf_counter() - started) / tokens
        part.figure(f"{batch} sequences: whole step", "µs", [step * 1e6])
        for name, seconds in times.items():
            steady = seconds[len(seconds) // 4 :]  # the first steps compute prompts
            part.figure(f"{batch} sequences: {name}", "µs", [each * 1e6 for each in steady])


def kernels(part: Part) -> None:
    """Kernels of a decode step: the difference between a long and a short run, so that prompts
    drop out. On a CPU operations of torch are counted in their place."""
    short, long = (4, 8) if part.is_dry else (16, 48)
    for batch in (2,) if part.is_dry else (1, 256):
        for eager in (False, True):
            with _opened(part, batch, enforce_eager=eager) as llm:
                for _ in range(2):  # a size is captured after it was wanted
                    _decode(llm, batch, long)
                before, after = (_profiled(part, llm, batch, tokens) for tokens in (short, long))
            name = f"{batch} sequences, {'eager' if eager else 'graphs'}"
            _report(part, name, before, after, long - short)


def _report(part: Part, name: str, before: Counter[str], after: Counter[str], steps: int) -> None:
    """`before`, `after`: microseconds by kernel, and calls under "calls of" the kernel."""
    added = Counter(after)
    added.subtract(before)
    calls = {key: count / steps for key, count in added.items() if key.startswith("calls of ")}
    spent = {key: µs / steps for key, µs in added.items() if not key.startswith("calls of ")}
    part.figure(f"{name}: kernels per step", "", [sum(calls.values())])
    part.figure(f"{name}: time in kernels per step", "µs", [sum(spent.values())])
    longest = sorted(spent, key=lambda key: -spent[key])[:_SHOWN_KERNELS]
    table = [
        [key[:120], round(calls[f"calls of {key}"], 2), round(spent[key], 2)] for key in longest
    ]
    part.note(f"{name}: kernel, calls and µs per step", table)


def _profiled(part: Part, llm: LLM, batch: int, tokens: int) -> Counter[str]:
    """Time and calls of what ran on the device in a run, out of the profiler's own trace."""
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CPU] if part.is_dry else [activity.CUDA]
    with torch.profiler.profile(activities=wanted) as profiler:
        _decode(llm, batch, tokens)
        part.synchronize()
        if part.is_dry:  # the profiler does not see what other threads do on a CPU
            for _ in range(tokens):
                torch.ones(2).add_(1)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("cpu_op",) if part.is_dry else ("kernel", "gpu_memcpy", "gpu_memset")
    found: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in kinds:
            found[event["name"]] += event.get("dur", 0)
            found[f"calls of {event['name']}"] += 1
    return found


def _decode(llm: LLM, batch: int, tokens: int) -> None:
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=tokens, detokenize=False)
    limit = llm.engine.spec.vocab_size - 1
    clock = time.monotonic_ns()  # other prompts each time: none is found in the cache
    prompts = [[(clock + 7 * row + i * i) % limit for i in range(32)] for row in range(batch)]
    llm.generate(prompts, params, use_tqdm=False)


@contextmanager
def _opened(part: Part, batch: int, **settings: Any) -> Iterator[LLM]:
    with (
        model_folder(TINY if part.is_dry else QWEN_SMALL) as folder,
        LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            device=part.device.type,
            max_model_len=512,
            max_num_seqs=batch,
            quiet=True,
            **settings,
        ) as llm,
    ):
        yield llm


@contextmanager
def _timed_methods() -> Iterator[Mapping[str, list[float]]]:
    """Seconds of each call of `_METHODS`, by name, while this is open."""
    times: dict[str, list[float]] = {}
    originals: list[tuple[type, str, Callable[..., Any]]] = []
    for owner, name in _METHODS:
        original = getattr(owner, name)
        originals.append((owner, name, original))
        seconds = times.setdefault(f"{owner.__name__}.{name}", [])
        setattr(owner, name, _timed(original, seconds))
    try:
        yield times
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - started)

    return timed
