"""The only file that reads the environment. Variables are for debugging and paths, not features.

| variable | meaning |
|---|---|
| `QUIRE_CPU_ISA` | kernels of one instruction set (`CPU_ISAS` below), or `none` for plain torch |
| `OMP_NUM_THREADS` | threads that compute, where the setting `num_threads` is not given |
| `OMP_WAIT_POLICY`, `GOMP_SPINCOUNT` | how idle threads wait; set here unless the user has |
| `QUIRE_<FLAG>` | a flag of the command line, such as `QUIRE_MAX_MODEL_LEN` for `--max-model-len` |
"""

from __future__ import annotations

import os

from quire.errors import ConfigError

__all__ = [
    "CPU_ISAS",
    "cpu_isa",
    "flag_value",
    "flag_variable",
    "limit_spinning",
    "num_threads",
]

SPIN_COUNT = "1000"
"""Rounds for which an idle thread of torch spins before it sleeps. GNU OpenMP spins milliseconds
by default, which takes the processor from the very thread that is waited for when another program
runs beside the engine. Torch's threads load weights, and compute only where there are no compiled
kernels."""

CPU_ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "none")


def cpu_isa() -> str | None:
    """`QUIRE_CPU_ISA`, or None when unset. Raises ConfigError for a name that does not exist."""
    return _choice("QUIRE_CPU_ISA", CPU_ISAS)


def num_threads() -> int | None:
    """`OMP_NUM_THREADS`, or None when unset. Raises ConfigError unless it is a positive integer."""
    value = os.environ.get("OMP_NUM_THREADS")
    if not value:
        return None
    first = value.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise ConfigError(
            f"Environment variable OMP_NUM_THREADS has no such value: {value!r}. "
            "Unset it or give a positive integer."
        )
    return int(first)


def limit_spinning() -> None:
    """Let idle math threads sleep soon. Must run before torch is imported; has no effect after."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def flag_variable(flag: str) -> str:
    """The variable that stands for a flag: `QUIRE_MAX_MODEL_LEN` for `--max-model-len`."""
    return "QUIRE_" + flag.lstrip("-").replace("-", "_").upper()


def flag_value(flag: str) -> str | None:
    """The value of a flag's variable; None when it is unset or empty."""
    return os.environ.get(flag_variable(flag)) or None


def _choice(name: str, allowed: tuple[str, ...]) -> str | None:
    value = os.environ.get(name)
    if value is None or value == "":
        return None
    if value not in allowed:
        raise ConfigError(
            f"Environment variable {name} has no such value: {value!r}. "
            f"Unset it or give one of: {', '.join(allowed)}."
        )
    return value
