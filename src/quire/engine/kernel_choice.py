"""Choice of kernels for 16-bit products on a CPU: processor flags suggest some, and a measurement
may show others to be much faster.

Kernels of different instruction sets round differently, so that the choice is part of the bits of
every result. Whoever owns an engine (`LLM`, or the process with the supervisor) chooses once, and
hands the choice on as settings: a core that replaces one that died, whose streams it continues to
the byte, never measures.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import quire
from quire.base.errors import ConfigError
from quire.base.platform import Platform
from quire.config import env
from quire.config.device import check_threads
from quire.config.resolve import Decision, Resolved
from quire.config.settings import EngineSettings
from quire.config.startup import with_threads
from quire.ops.compile import ISAS, build_hash
from quire.ops.kernel_timing import (
    FEW_ROWS,
    MANY_ROWS,
    Product,
    Seconds,
    kernel_families,
    time_kernels,
)
from quire.ops.native.binding import native_unavailable, see_kernels

__all__ = ["KernelChoices", "Measure", "choose_kernels", "see_kernels"]

_log = logging.getLogger("quire.engine")

Measure = Callable[[Product, Sequence[str], int, Platform], Seconds | None]
"""The signature of `time_kernels`."""

MUCH_FASTER, NO_SLOWER = 1.25, 0.95
"""Speeds, as multiples of the flags' kernels, that other kernels must reach to be taken: for one
number of rows, and for the other. Most processors are within these bounds, and keep bits that
depend on flags alone."""


@dataclass(frozen=True, slots=True)
class KernelChoices:
    """settings: settings with the chosen kernels. decisions: each choice and its reason."""

    settings: EngineSettings
    decisions: tuple[Decision, ...] = ()

    def explained(self, resolved: Resolved) -> Resolved:
        """`resolved`, made from these settings, with the reasons."""
        made = {each.name: each for each in self.decisions}
        return replace(
            resolved, decisions=tuple(made.get(each.name, each) for each in resolved.decisions)
        )


def choose_kernels(
    settings: EngineSettings, platform: Platform, measure: Measure = time_kernels
) -> KernelChoices:
    """Fill in `linear_isa` and `attention_isa` where they are open and a CPU computes.

    What was measured is kept in `env.cache_folder()` for the next start. Raises ConfigError if a
    setting asks for kernels that cannot run here, or for threads that would hardly compute.
    """
    if _computes_on_gpu(settings, platform) or env.cpu_isa() is not None:
        return KernelChoices(settings)
    num_threads = with_threads(settings, platform).num_threads or platform.cpu.num_cores
    check_threads(num_threads, platform.cpu.num_cores)
    attention: Product = "int8_attention" if settings.kv_cache_dtype == "int8" else "attention"
    products: dict[str, Product] = {"linear_isa": "linear", "attention_isa": attention}
    if settings.attention_backend is not None:
        del products["attention_isa"]
    decisions: list[Decision] = []
    for name, product in products.items():
        asked = getattr(settings, name)
        if asked is not None:
            _check_asked(name, asked, platform)
            decisions.append(Decision(name, asked, "as asked"))
            continue
        # Another number of ranks may measure other speeds.
        families = () if settings.rank_invariant else kernel_families(product, platform)
        if families:
            chosen = _choose(product, families, num_threads, platform, measure)
            decisions.append(Decision(name, *chosen))
    chosen_isas: dict[str, Any] = {each.name: each.value for each in decisions}
    return KernelChoices(replace(settings, **chosen_isas), tuple(decisions))


def _computes_on_gpu(settings: EngineSettings, platform: Platform) -> bool:
    if settings.device == "auto":
        return platform.gpu is not None and platform.gpu_problem is None
    return settings.device != "cpu"


def _check_asked(name: str, isa: str, platform: Platform) -> None:
    reason = native_unavailable(isa, platform)
    if reason is not None:
        raise ConfigError(
            f"Setting {name} cannot be {isa!r} here: {reason}. Give another instruction set, or "
            "leave it out."
        )


# --- from seconds to a choice --------------------------------------------------------------------


def _choose(
    product: Product,
    families: Sequence[str],
    num_threads: int,
    platform: Platform,
    measure: Measure,
) -> tuple[str, str]:
    """The instruction set, and why."""
    suggested = families[0]
    if len(families) == 1:
        return suggested, "by processor flags"
    record = _Record.of(product, families, num_threads, platform)
    seconds = record.read()
    if seconds is None:
        seconds = measure(product, families, num_threads, platform)
        if seconds is None:
            return suggested, "by processor flags; the machine was too busy to measure"
        seconds = record.keep(seconds)
    return _faster(seconds, suggested)


def _faster(seconds: Seconds, suggested: str) -> tuple[str, str]:
    gains = {
        isa: tuple(was / now for was, now in zip(seconds[suggested], times, strict=True))
        for isa, times in seconds.items()
    }
    better = [
        isa for isa, gain in gains.items() if max(gain) >= MUCH_FASTER and min(gain) >= NO_SLOWER
    ]
    if not better:
        return suggested, "by processor flags; measured: no other kernels are much faster"
    best = max(better, key=lambda isa: math.prod(gains[isa]))
    few, many = gains[best]
    return best, (
        f"measured: {few:.2f} and {many:.2f} times as fast as {suggested} for {FEW_ROWS} and "
        f"{MANY_ROWS} rows"
    )


# --- what is kept --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Record:
    """One file for one product in one environment. Measurements with other threads, by another
    processor or version, are in other files.

    A file that cannot be read counts as none. One that cannot be written costs a measurement at the
    next start. The first of several engines that measure at once is believed by all.
    """

    path: Path
    environment: Mapping[str, str]
    families: tuple[str, ...]

    @classmethod
    def of(
        cls, product: Product, families: Sequence[str], num_threads: int, platform: Platform
    ) -> _Record:
        newest = next(isa for isa in ISAS if isa.name == families[0])
        environment = {
            "product": product,
            "processor": platform.cpu.model_name,
            "flags": " ".join(sorted(platform.cpu.features)),
            "threads": str(num_threads),
            "quire": quire.__version__,
            "kernels": f"{', '.join(families)}; {build_hash(newest)}",
        }
        digest = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]
        path = env.cache_folder() / f"{product}_{digest}.json"
        return cls(path, environment, tuple(families))

    def read(self) -> Seconds | None:
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            if document["environment"] != self.environment:
                return None
            return self._decoded(document["seconds"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error) or type(error).__name__
            _log.warning("%s is ignored, and kernels are measured again: %s.", self.path, reason)
            return None

    def keep(self, seconds: Seconds) -> Seconds:
        """Store the seconds. Returns the seconds on disk afterwards, or `seconds` if nothing can be
        stored."""
        document = {"environment": self.environment, "seconds": seconds}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp") as file:
                json.dump(document, file, indent=1)
                file.flush()
                return self._published(Path(file.name), seconds)
        except OSError as error:
            _log.warning("Measured kernels are not kept: %s.", error)
            return seconds

    def _published(self, written: Path, seconds: Seconds) -> Seconds:
        try:
            os.link(written, self.path)
        except FileExistsError:
            others = self.read()
            if others is not None:
                return others
            self.path.unlink(missing_ok=True)  # it cannot be read
            os.link(written, self.path)
        return seconds

    def _decoded(self, stored: Mapping[str, Sequence[float]]) -> Seconds:
        """Raises ValueError, or what a document of another shape makes it raise."""
        seconds = {isa: (float(few), float(many)) for isa, (few, many) in stored.items()}
        if tuple(seconds) != self.families:
            raise ValueError(f"it has {', '.join(seconds)}, not {', '.join(self.families)}")
        if not all(0 < each < math.inf for times in seconds.values() for each in times):
            raise ValueError(f"{dict(stored)} are no seconds")
        return seconds
