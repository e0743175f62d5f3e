"""The record of a measurement: figures, their spread, and all that is needed to repeat it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.platform.outputs import check_output
from quire.config.resolve import Resolved
from quire.entrypoints.bench.machine import Limits, Machine, current_commit, describe_machine

__all__ = ["BenchRecord", "Spread", "new_record", "percentile", "spread_of"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, range and values of one figure over the repeats."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """figures: values by name with unit. limits: limits of the machine, measured in the same run,
    or None."""

    benchmark: str
    command: tuple[str, ...]
    commit: str | None
    time: str
    machine: Machine
    limits: Limits | None
    seed: int
    settings: dict[str, Any]
    workload: dict[str, Any]
    figures: dict[str, Spread]

    def save(self, path: Path) -> None:
        """Write as JSON. Raises ConfigError if the file cannot be written."""
        output = check_output("the record of the run", path, makes_folder=True)
        try:
            output.path.parent.mkdir(parents=True, exist_ok=True)
            output.write(json.dumps(asdict(self), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"Results cannot be written to {path} ({error.strerror}). Give another file."
            ) from error


def new_record(
    benchmark: str,
    command: Sequence[str],
    resolved: Resolved | None,
    limits: Limits | None,
    *,
    seed: int,
    workload: dict[str, Any],
    figures: dict[str, Spread],
) -> BenchRecord:
    """Return a record of what ran just now. resolved: settings of the engine in this process, None
    if it was measured from outside. Absolute paths lose their folders: others have
    none of these."""
    settings = {} if resolved is None else asdict(resolved.settings)
    return BenchRecord(
        benchmark=benchmark,
        command=tuple(_without_folders(list(command))),
        commit=current_commit(),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine(),
        limits=limits,
        seed=seed,
        settings=_without_folders(settings),
        workload=_without_folders(workload),
        figures=figures,
    )


def _without_folders(value: Any) -> Any:
    """Return the value with each absolute path in it cut: to one from here, or to its name."""
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(each) for each in value]
    if not isinstance(value, str | Path):
        return value
    path, here = Path(value), Path.cwd()
    if not path.is_absolute() or len(path.parts) < 3 or not _is_directory(path.parent):
        return value  # /rerank and /v1/completions are no paths
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a text that is too long for a path
        return False


def spread_of(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), tuple(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation between the closest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
