"""The only file that reads the environment, but for what hides GPUs and processor flags from a
process, which are facts of the machine (`platform/`). Variables are for debugging and paths, not
features.

| variable | meaning |
|---|---|
| `QUIRE_CPU_ISA` | kernels of one instruction set (`CPU_ISAS` below), or `none` for plain torch |
| `QUIRE_HIDDEN_CPU_FLAGS` | processor flags to take for absent (`avx512_bf16,amx_tile`) |
| `QUIRE_GPU_KERNELS` | kernels on a GPU (`GPU_KERNELS` below), `none` for plain torch |
| `CUDA_DEVICE_ORDER` | which number a GPU has; set here to `PCI_BUS_ID` unless the user has |
| `OMP_NUM_THREADS` | threads that compute, up to the cores, where `num_threads` is not given |
| `OMP_WAIT_POLICY`, `GOMP_SPINCOUNT` | how idle threads wait; set here unless the user has |
| `QUIRE_BLOCK_NAME_SECRET` | key of names of KV blocks; that of `kv_disk` or random if unset |
| `QUIRE_KERNEL_SETS` | read where kernels are compiled: `all`, `native`, or names of sets |
| `QUIRE_SOAK` | factor on the number of examples that quire's own tests try |
| `QUIRE_<FLAG>` | a flag of the command line, such as `QUIRE_MAX_MODEL_LEN` for `--max-model-len` |
| `VLLM_API_KEY` | as `QUIRE_API_KEY`, where that is not set |
| `XDG_CONFIG_HOME` | where the user's file of defaults is, `quire.yaml`; `~/.config` if unset |
| `XDG_CACHE_HOME` | where measurements of this machine are kept, in `quire`; `~/.cache` if unset |
| `TORCHINDUCTOR_CACHE_DIR` | where torch keeps what it compiles; set here unless the user has |
| `TRITON_INTERPRET` | Triton's own: 1 runs its kernels on a CPU, slowly; for tests |
"""

from __future__ import annotations

import os
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.platform.cpu import HIDDEN_FLAGS_VARIABLE

__all__ = [
    "CPU_ISAS",
    "GPU_KERNELS",
    "KERNEL_FLAGS",
    "KERNEL_ISAS",
    "OWN_VARIABLES",
    "block_name_secret",
    "cache_folder",
    "check_kernels",
    "cpu_isa",
    "flag_setting",
    "flag_variable",
    "gpu_kernels",
    "keep_compiled",
    "limit_spinning",
    "num_threads",
    "openai_api_key",
    "openai_base_url",
    "order_gpus",
    "quire_variables",
    "triton_interpreter",
    "user_config_file",
]

SPIN_COUNT = "1000"
"""Rounds for which an idle thread of torch spins before it sleeps. GNU OpenMP spins milliseconds
by default, which takes the processor from the very thread that is waited for when another program
runs beside the engine. Torch's threads load weights, and compute only where there are no compiled
kernels."""

FOREIGN_VARIABLES = {"--api-key": ("VLLM_API_KEY",)}
"""Variables of vLLM that deployments set, by flag: a key that was set there must not be lost."""

GPU_KERNELS = ("triton", "none")

KERNEL_ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2")

CPU_ISAS = (*KERNEL_ISAS, "none")

KERNEL_FLAGS = (
    *("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"),
)
"""Flags of processors that kernels ask for, as Linux names them."""

MIN_SECRET_CHARS = 16

_PREFIX = "QUIRE_"
OWN_VARIABLES = (
    "QUIRE_BLOCK_NAME_SECRET",
    "QUIRE_CPU_ISA",
    "QUIRE_GPU_KERNELS",
    HIDDEN_FLAGS_VARIABLE,
    "QUIRE_KERNEL_SETS",
    "QUIRE_SOAK",
)
"""Variables of quire that belong to no flag."""


def cpu_isa() -> str | None:
    """`QUIRE_CPU_ISA`, or None when unset. Raises ConfigError for a name that does not exist."""
    return _choice("QUIRE_CPU_ISA", CPU_ISAS)


def gpu_kernels() -> str | None:
    """`QUIRE_GPU_KERNELS`, or None when unset. Raises ConfigError for one that does not exist."""
    return _choice("QUIRE_GPU_KERNELS", GPU_KERNELS)


def block_name_secret() -> bytes | None:
    """`QUIRE_BLOCK_NAME_SECRET`, which engines that share named blocks have in common; None when
    unset. Raises ConfigError for one that can be guessed."""
    given = os.environ.get("QUIRE_BLOCK_NAME_SECRET")
    if given is None:
        return None
    if len(given) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"QUIRE_BLOCK_NAME_SECRET has {len(given)} characters and could be guessed. Give at "
            f"least {MIN_SECRET_CHARS} random ones, or unset it for a random one in each engine."
        )
    return given.encode()


def check_kernels() -> None:
    """Raises ConfigError if a variable names kernels, or hides flags, that do not exist, on
    whichever device."""
    cpu_isa()
    gpu_kernels()
    hidden = os.environ.get(HIDDEN_FLAGS_VARIABLE) or None
    unknown = sorted(set(hidden.split(",")) - set(KERNEL_FLAGS)) if hidden else []
    if unknown:
        raise ConfigError(
            f"Environment variable {HIDDEN_FLAGS_VARIABLE} hides {', '.join(map(repr, unknown))}, "
            f"which no kernel asks for. Give some of {', '.join(KERNEL_FLAGS)}, with commas."
        )


def order_gpus() -> None:
    """Let CUDA number GPUs as the driver's tools do, so that the GPU of the plan is the one that
    computes. Must run before CUDA starts; has no effect after."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def cache_folder() -> Path:
    """Return the folder for measurements that are kept between starts. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or "~/.cache").expanduser() / "quire"


def user_config_file() -> Path:
    """Return the file of the user's defaults of flags. It may not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "quire.yaml"


def keep_compiled() -> None:
    """Let torch's compiler keep what it makes beside our own measurements, unless the user names a
    place. Must run before it compiles; has no effect after."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torch_compile"))


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


def triton_interpreter() -> bool:
    """Return whether kernels in Triton are interpreted. Has to be set before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def limit_spinning() -> None:
    """Let idle math threads sleep soon. Must run before torch is imported; has no effect after."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def openai_base_url() -> str | None:
    """`OPENAI_BASE_URL`, or None when unset: the server that OpenAI's clients ask."""
    return os.environ.get("OPENAI_BASE_URL") or None


def openai_api_key() -> str | None:
    """`OPENAI_API_KEY`, or None when unset."""
    return os.environ.get("OPENAI_API_KEY") or None


def flag_variable(flag: str) -> str:
    """`QUIRE_MAX_MODEL_LEN` of `--max-model-len`."""
    return _PREFIX + flag.lstrip("-").replace("-", "_").upper()


def quire_variables() -> list[str]:
    """The variables that are set, not empty, and named as if they were quire's."""
    return [name for name, value in os.environ.items() if name.startswith(_PREFIX) and value]


def flag_setting(flag: str, *, may_be_empty: bool = False) -> tuple[str, str] | None:
    """The variable that stands for a flag (`QUIRE_MAX_MODEL_LEN` for `--max-model-len`) and its
    value; None when it is unset, or empty unless that counts."""
    for variable in (flag_variable(flag), *FOREIGN_VARIABLES.get(flag, ())):
        value = os.environ.get(variable)
        if value or (may_be_empty and value is not None):
            return variable, value
    return None


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
