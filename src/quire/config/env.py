"""The only file that reads the environment. Variables are for debugging and paths, not features.

| variable | meaning |
|---|---|
| `QUIRE_CPU_ISA` | kernels of one instruction set: `avx512`, `avx2`, or `none` for plain torch |
"""

from __future__ import annotations

import os

from quire.errors import ConfigError

__all__ = ["CPU_ISAS", "cpu_isa"]

CPU_ISAS = ("avx512", "avx2", "none")


def cpu_isa() -> str | None:
    """`QUIRE_CPU_ISA`, or None when unset. Raises ConfigError for a name that does not exist."""
    return _choice("QUIRE_CPU_ISA", CPU_ISAS)


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
