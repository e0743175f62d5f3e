"""The table of groups of tests that need not run again (`tests/gates.py`), and their sources.

To import this takes the standard library alone, as before an installation there are no packages.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GATES", "Gate"]

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Gate:
    """A group and what it depends on.

    tests: globs of its test files. covers: globs of all other files that decide how they end; a
    test holds them against imports. tools: names in `VERSIONS`, or of installed packages.

    sets: whether a proof is of the kernel sets that its processor runs, and of no others. widest:
    whether it is of the widest of them, and not of all others. vendor:
    whether it is of processors of one vendor (csrc/native/vendor.h). all_sets: whether the group
    needs sets that the processor does not run. needs: the set without which its tests are skipped.
    command: function to run where there are no test files; returns the number of its checks, or
    raises SystemExit.
    """

    name: str
    tests: tuple[str, ...]
    covers: tuple[str, ...]
    tools: tuple[str, ...]
    sets: bool = False
    widest: bool = False
    vendor: bool = False
    all_sets: bool = False
    needs: str = ""
    command: Callable[[], int] | None = None


def _compile_all_sets() -> int:
    """Compile each set for this architecture somewhere else, and return how many there are."""
    from quire.base.platform import detect_platform
    from quire.ops.compile import ISAS, CompileError, compile_kernels

    architecture = detect_platform().cpu.architecture
    wanted = {isa.name for isa in ISAS if architecture in isa.architectures}
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = compile_kernels(Path(folder), isas=sorted(wanted))
        except CompileError as error:
            raise SystemExit(str(error)) from None
    missing = wanted - {path.stem.removeprefix("libquire_") for path in made}
    if missing:
        raise SystemExit(f"The compiler does not know {', '.join(sorted(missing))}.")
    return len(wanted)


def _check_wheel() -> int:
    done = subprocess.run([sys.executable, "-m", "tools.check_wheel"], cwd=ROOT, check=False)
    if done.returncode != 0:
        raise SystemExit("The wheel is not whole, see above.")
    return 1


def _check_types() -> int:
    """Return the number of files in which pyright finds no error."""
    done = subprocess.run([sys.executable, "-m", "pyright"], cwd=ROOT, check=False)
    if done.returncode != 0:
        raise SystemExit("Types are wrong, see above.")
    return sum(1 for _ in (ROOT / "src").rglob("*.py"))


TYPED_PACKAGES = (
    *("torch", "numpy", "triton", "transformers", "msgspec", "pyzmq", "pyyaml", "pillow"),
    *("tokenizers", "jinja2", "safetensors", "huggingface-hub", "llguidance", "tqdm"),
    *("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "prometheus-client"),
)
COMPILING = (
    *("src/quire/ops/csrc/**", "src/quire/ops/compile/**"),
    *("src/quire/base/platform/cgroups.py", "src/quire/base/platform/cpu.py"),
)
KERNELS = (
    "src/quire/ops/**",
    *(
        f"src/quire/base/platform/{name}.py"
        for name in ("__init__", "amd", "cgroups", "cpu", "facts")
    ),
    *(
        f"src/quire/base/platform/{name}.py"
        for name in ("gpu", "gpu_facts", "nvml", "priority", "shared_region")
    ),
    "src/quire/base/platform/torch_build.py",
    *(f"src/quire/ops/distributed/{name}.py" for name in ("__init__", "collectives", "plain")),
    "src/quire/base/errors.py",
    "src/quire/config/env.py",
    "src/quire/config/kv_layout.py",
    "src/quire/config/model_spec.py",
    "src/quire/config/packed/block_kinds.py",
    "src/quire/config/packed/table_format.py",
    "src/quire/config/quantization.py",
    "src/quire/config/shard.py",
    "tests/profiles.py",
    "tests/pairs.py",
    "tests/processors.py",
    "tests/conftest.py",
    "tests/ops/conftest.py",
    "tests/ops/tile_emulator.*",
)
MODELS = (
    *KERNELS,
    *(
        "src/quire/compute/models/*.py",
        "src/quire/compute/models/generic/**",
        "src/quire/compute/models/hybrid/**",
    ),
    *(
        "src/quire/compute/layers/**",
        "src/quire/compute/attention/**",
        "src/quire/compute/quantization/**",
    ),
    *(
        f"src/quire/config/media/{name}.py"
        for name in (
            "gemma3",
            "idefics3",
            "image_spec",
            "projector",
            "qwen_vl",
            "registry",
            "siglip",
        )
    ),
    "src/quire/compute/models/towers/**",
    *("src/quire/config/families/**", "src/quire/config/packed/**", "src/quire/config/gguf/**"),
    *(
        f"src/quire/config/{name}.py"
        for name in ("__init__", "checkpoint", "generation", "hf", "hub", "rope", "sentence")
    ),
    *(f"src/quire/protocol/{name}.py" for name in ("codec", "grammar", "sampling_params")),
    *(
        "src/quire/protocol/parameters/**",
        "src/quire/base/platform/**",
        "src/quire/base/foreign.py",
    ),
    *("tests/models/families.py", "tests/models/family_bases.py", "tests/models/harness.py"),
)
OPERATIONS = (
    *(f"src/quire/ops/linear/{name}/contract.py" for name in ("blocks", "plain", "tables")),
    "src/quire/ops/linear/int8/activations.py",
    "src/quire/ops/pointwise/activation/contract.py",
)
"""Files of operations that `config` reads."""
SCHEDULING = (
    *("src/quire/plan/scheduler/**", "src/quire/plan/kv_cache/**", "src/quire/plan/speculation/**"),
    *("src/quire/config/**", "src/quire/protocol/**", "src/quire/base/platform/**"),
    *("src/quire/hooks/**", "src/quire/base/telemetry/**", "src/quire/plan/grammar/**"),
    *("src/quire/bundled/**", "src/quire/text/rendering/**", "src/quire/compute/executor/base.py"),
    *(f"src/quire/engine/core/{name}.py" for name in ("adapters", "engine_core", "pin_list")),
    *(f"src/quire/engine/core/{name}.py" for name in ("hook_runner", "hook_session")),
    *(f"src/quire/engine/core/{name}.py" for name in ("event_publisher", "moving_blocks")),
    *(f"src/quire/compute/runner/{name}.py" for name in ("drafts", "halves", "pooling", "rows")),
    *("src/quire/compute/executor/__init__.py", "src/quire/compute/worker/recovery.py"),
    *OPERATIONS,
    *("src/quire/__init__.py", "src/quire/base/errors.py", "src/quire/base/foreign.py"),
    *("tests/engine/fake_engine.py", "tests/executor/fake*.py", "tests/conftest.py"),
    *("tests/pairs.py", "tests/profiles.py", "tests/waiting.py"),
)
GATES = (
    Gate("kernel-sets", (), COMPILING, ("compiler",), all_sets=True, command=_compile_all_sets),
    Gate(
        "sanitizers",
        ("tests/ops/test_sanitizers.py",),
        KERNELS,
        ("compiler", "torch", "numpy"),
        sets=True,
        widest=True,
    ),
    Gate(
        "tiles",
        (
            "tests/ops/test_tiles.py",
            "tests/ops/test_tile_*.py",
            "tests/ops/test_attention_tiles.py",
        ),
        (*KERNELS, "tests/ops/test_paged_attention.py", "tests/waiting.py"),
        ("compiler", "torch", "numpy"),
        sets=True,
        vendor=True,
        all_sets=True,
        needs="avx512_bf16",
    ),
    Gate(
        "compilation",
        ("tests/ops/test_compile.py", "tests/ops/test_compiled.py"),
        (*KERNELS, "hatch_build.py", "tests/waiting.py", "tests/platform/machine_files.py"),
        ("compiler", "torch", "numpy"),
    ),
    Gate(
        "triton",
        ("tests/ops/test_triton*.py",),
        (
            *(*KERNELS, "tests/ops/triton/compiler.py", "tests/ops/triton/interpreter.py"),
            "tests/ops/triton/interpreted_[!c]*.py",  # callers depend on more than kernels
            *("tests/ops/test_paged_attention.py", "tests/ops/test_rope_and_write_kv.py"),
        ),
        ("torch", "triton", "numpy"),
    ),
    Gate(
        "attention",
        (
            "tests/ops/test_paged_attention.py",
            "tests/ops/test_last_key.py",
            "tests/ops/test_attention_bf16.py",
            "tests/ops/test_int8_cache.py",
        ),
        KERNELS,
        ("compiler", "torch", "numpy"),
        sets=True,
        vendor=True,
    ),
    Gate(
        "products",
        ("tests/ops/test_linear*.py", "tests/ops/test_experts.py"),
        (*KERNELS, "tests/waiting.py"),
        ("compiler", "torch", "numpy"),
        sets=True,
        vendor=True,
    ),
    Gate(
        "providers",
        ("tests/ops/test_providers.py", "tests/ops/test_references.py"),
        (*KERNELS, "tests/ops/test_paged_attention.py"),
        ("compiler", "torch", "numpy"),
        sets=True,
        vendor=True,
    ),
    Gate(
        "families",
        (
            *("tests/models/test_golden.py", "tests/models/test_generic.py"),
            *("tests/models/test_forward_ops.py", "tests/models/test_changed_keys.py"),
            *("tests/models/test_tensor_parallel.py", "tests/models/test_batch_bits.py"),
        ),
        (
            *(*MODELS, "src/quire/bundled/**", "src/quire/base/telemetry/kv_events.py"),
            *("src/quire/compute/worker/weight_stash.py", "tests/models/ranks.py"),
        ),
        ("compiler", "torch", "numpy", "transformers"),
        sets=True,
        vendor=True,
    ),
    Gate(
        "loading",
        (
            *(f"tests/models/test_{name}.py" for name in ("gguf", "int8_cache", "latent_packed")),
            *("tests/models/test_loader.py", "tests/models/test_packed*.py"),
            *("tests/quantization/test_[cgo]*.py", "tests/quantization/test_quantize.py"),
            *("tests/config/test_packed.py", "tests/layers/test_*.py"),
        ),
        (
            *(*MODELS, "src/quire/compute/models/heads/**", "src/quire/config/**"),
            *("src/quire/bundled/**", "src/quire/base/telemetry/**", "src/quire/protocol/**"),
            "src/quire/__init__.py",
            *(f"src/quire/text/rendering/{name}.py" for name in ("folder", "gguf", "pieces")),
            *("src/quire/compute/worker/weight_stash.py", "tests/models/ranks.py"),
            *("tests/models/test_golden.py", "tests/gguf_*.py", "tests/packed_writer.py"),
        ),
        ("compiler", "torch", "numpy", "transformers", "safetensors", "tokenizers", "hypothesis"),
        sets=True,
        vendor=True,
    ),
    Gate(
        "sampling",
        ("tests/sampling/test_*.py",),
        (
            *(*KERNELS, "src/quire/compute/sampling/**", "src/quire/protocol/**"),
            "src/quire/base/foreign.py",
            *("src/quire/base/telemetry/**", "src/quire/base/platform/**", "src/quire/__init__.py"),
            "tests/sampling/*.py",
        ),
        ("compiler", "torch", "numpy", "scipy", "msgspec", "hypothesis"),
        sets=True,
        vendor=True,
    ),
    Gate(
        "scheduling",
        ("tests/scheduler/test_*.py", "tests/kv_cache/test_*.py"),
        (*SCHEDULING, "tests/scheduler/**", "tests/kv_cache/**", "tests/kv_subscriber.py"),
        ("numpy", "msgspec", "pyzmq", "hypothesis"),
    ),
    Gate(
        "grammars",
        ("tests/grammar/test_[!r]*.py", "tests/grammar/test_relaxed.py"),
        (*SCHEDULING, "tests/grammar/[!t]*.py", "tests/dialect/models.py"),
        ("numpy", "msgspec", "hypothesis", "llguidance", "tokenizers", "jsonschema"),
    ),
    Gate(
        "dialects",
        tuple(
            f"tests/dialect/test_{name}.py"
            for name in ("call_ids", "detect", "formats", "thinking")
        ),
        (*SCHEDULING, "src/quire/text/dialect/**", "tests/dialect/[!t]*.py"),
        ("numpy", "msgspec", "hypothesis", "llguidance", "tokenizers", "jinja2", "jsonschema"),
    ),
    Gate(
        "rendering",
        ("tests/rendering/test_*.py",),
        (
            *("src/quire/text/rendering/**", "src/quire/config/**", "src/quire/protocol/**"),
            *("src/quire/bundled/**", "src/quire/base/foreign.py", "src/quire/base/errors.py"),
            *(f"src/quire/text/dialect/{name}.py" for name in ("harmony", "spec", "tools")),
            *("src/quire/server/generation/history.py", "src/quire/base/platform/**"),
            *(*OPERATIONS, "src/quire/base/telemetry/**", "src/quire/__init__.py"),
            *("tests/rendering/**", "tests/gguf_*.py", "tests/dialect/chat_templates.py"),
            *("tests/real/inputs.py", "tests/profiles.py", "tests/pairs.py", "tests/conftest.py"),
        ),
        ("transformers", "tokenizers", "jinja2", "torch", "numpy", "msgspec", "hypothesis"),
    ),
    Gate(
        "page",
        ("tests/server/test_page_browser.py", "tests/server/test_page_replay.py"),
        (
            *("src/quire/**", "tests/server/page/*.json*", "tools/page_pictures.py"),
            *(f"tests/server/{name}.py" for name in ("conftest", "in_memory", "page_faults")),
            *(f"tests/server/{name}.py" for name in ("responses", "running", "scripted", "wire")),
            *("tests/engine/fake_engine.py", "tests/executor/fake*.py"),
            *("tests/grammar/bundled_tokens.py", "tests/conftest.py", "tests/waiting.py"),
            *("tests/image_writer.py", "tests/profiles.py", "tests/pairs.py"),
        ),
        ("chromium", "playwright", "axe-playwright-python"),
    ),
    Gate(
        "types",
        (),
        ("src/**", "pyproject.toml"),
        ("pyright", *TYPED_PACKAGES),
        command=_check_types,
    ),
    Gate(
        "wheel",
        (),
        (
            *("src/quire/**", "pyproject.toml", "hatch_build.py", "Dockerfile", ".dockerignore"),
            *("README.md", "LICENSE", "tools/check_wheel.py"),
        ),
        ("compiler",),
        command=_check_wheel,
    ),
)
