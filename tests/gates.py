"""Groups of tests that need not run again while all that they depend on is the same.

Each group of `tests/gate_table.py` says what it depends on: files, and versions of tools.
`tests/gates.json` has the digest of these under which a group last passed. As a plugin of pytest
(`-p tests.gates`, which `make test` and `.ci/run` give) this leaves out the files of groups with
the same digest. `make gates` runs all groups, or those in GATES="sanitizers triton", and alone
writes the file.

    python -m tests.gates              # which groups would run, and why
    python -m tests.gates prove NAMES  # `make gates`
    python -m tests.gates skips NAME   # status 0 if that group need not run
    python -m tests.gates sets         # kernel sets to compile: native or all

Before an installation there are no packages: to import this takes the standard library alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gate_table import GATES, Gate

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
KERNEL_BUILD = ROOT / "src/quire/ops/compile/build.py"


@dataclass(frozen=True, slots=True)
<<<<<<< HEAD
class Gate:
    """A group and what it depends on.

    tests: globs of its test files. covers: globs of all other files that decide how they end; a
    test holds them against imports. tools: names in `VERSIONS`, or of installed packages.

    sets: whether a proof is of the kernel sets that its processor runs, and of no others. widest:
    whether it is of the widest of them, and not of all others. vendor:
    whether it is of processors of one vendor (csrc/native/vendor.h). all_sets: whether the group
    needs sets that the processor does not run. command: function to run where there are no test
    files; returns the number of its checks, or raises SystemExit.
    """

    name: str
    tests: tuple[str, ...]
    covers: tuple[str, ...]
    tools: tuple[str, ...]
    sets: bool = False
    widest: bool = False
    vendor: bool = False
    all_sets: bool = False
    command: Callable[[], int] | None = None


def _compile_all_sets() -> int:
    """Compile each set for this architecture somewhere else, and return how many there are."""
    from quire.ops.compile import ISAS, CompileError, compile_kernels
    from quire.platform import detect_platform

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


COMPILING = (
    *("src/quire/ops/csrc/**", "src/quire/ops/compile/**"),
    *("src/quire/platform/cgroups.py", "src/quire/platform/cpu.py"),
)
KERNELS = (
    "src/quire/ops/**",
    *(f"src/quire/platform/{name}.py" for name in ("__init__", "amd", "cgroups", "cpu", "facts")),
    *(f"src/quire/platform/{name}.py" for name in ("gpu", "gpu_facts", "nvml", "shared_region")),
    "src/quire/platform/torch_build.py",
    *(f"src/quire/distributed/{name}.py" for name in ("__init__", "collectives", "plain")),
    "src/quire/errors.py",
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
    *("src/quire/models/*.py", "src/quire/models/generic/**", "src/quire/models/hybrid/**"),
    *("src/quire/layers/**", "src/quire/attention/**", "src/quire/quantization/**"),
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
    "src/quire/models/towers/**",
    *("src/quire/config/families/**", "src/quire/config/packed/**", "src/quire/config/gguf/**"),
    *(
        f"src/quire/config/{name}.py"
        for name in ("__init__", "checkpoint", "generation", "hf", "hub", "rope", "sentence")
    ),
    *(f"src/quire/protocol/{name}.py" for name in ("codec", "grammar", "sampling_params")),
    *("src/quire/protocol/parameters/**", "src/quire/platform/**", "src/quire/foreign.py"),
    *("tests/models/families.py", "tests/models/family_bases.py", "tests/models/harness.py"),
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
            "tests/models/test_forward_ops.py",
        ),
        MODELS,
        ("compiler", "torch", "numpy", "transformers"),
        sets=True,
        vendor=True,
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


@dataclass(frozen=True, slots=True)
=======
>>>>>>> gate
class Proof:
    """A pass of a group. digest: digest of its files. versions: versions of its tools. sets: kernel
    sets that its processor ran, best first."""

    digest: str
    versions: dict[str, str]
    commit: str
    date: str
    machine: str
    vendor: str
    sets: tuple[str, ...]
    tests: int
    seconds: float


def files_of(globs: Sequence[str], root: Path | None = None) -> list[Path]:
    """Return the files that match, each once. A name that ends in `**` means all files below."""
    found: set[Path] = set()
    for glob in globs:
        for path in (root or ROOT).glob(glob + "/*" if glob.endswith("**") else glob):
            made = "__pycache__" in path.parts or "_lib" in path.parts
            if path.is_file() and not made:
                found.add(path)
    return sorted(found)


def digest_of(gate: Gate, root: Path | None = None) -> str:
    """Return a digest of the contents of its files. It does not know where a file lies."""
    paths = files_of((*gate.tests, *gate.covers), root)
    contents = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()[:32]


def versions_of(gate: Gate) -> dict[str, str]:
    return {tool: version_of(tool) for tool in ("python", *gate.tools)}


@cache
def version_of(tool: str) -> str:
    """Return the version of a tool or of an installed package; "none" without it."""
    if tool in VERSIONS:
        return VERSIONS[tool]()
    try:
        return importlib.metadata.version(tool)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _compiler() -> str:
    """Return the first line of the compiler that builds the kernels (ops/compile/build.py)."""
    named = os.environ.get("CXX", "")
    for words in [[named], shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]:
        if words and shutil.which(words[0]):
            done = subprocess.run([*words, "--version"], capture_output=True, text=True)
            return done.stdout.partition("\n")[0]
    return "none"


def _chromium() -> str:
    """Return the version of the browser that tests of the page use."""
    path = shutil.which("chromium")
    if path is None:
        return "none"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"[\d.]{5,}", done.stdout)
    return found[0] if found else "none"


VERSIONS: Mapping[str, Callable[[], str]] = {
    "python": lambda: "{}.{}".format(*sys.version_info),
    "compiler": _compiler,
    "chromium": _chromium,
}


@cache
def this_processor() -> tuple[str, str, tuple[str, ...]]:
    """Return the name of the processor, its vendor, and the kernel sets that it runs."""
    sys.path.insert(0, str(ROOT / "src"))  # before an installation too
    try:
        from quire.platform.cpu import detect_cpu
    finally:
        del sys.path[0]

    cpu = detect_cpu()
    tiles = set() if cpu.tiles_refused else {"amx_tile"}
    runs = cpu.features - {"amx_tile"} | (cpu.features & tiles)
    sets = tuple(isa.name for isa in _build_file().ISAS if runs.issuperset(isa.all_features))
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        facts = ""  # not Linux
    vendor = re.search(r"^vendor_id\s*: (\w+)", facts, re.MULTILINE)
    return cpu.model_name, vendor[1] if vendor else "", sets


def _build_file() -> Any:
    """Return ops/compile/build.py without its package, which takes seconds to import."""
    name, path = "quire_kernel_build", KERNEL_BUILD
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_proofs() -> dict[str, list[Proof]]:
    """Return the proofs of each group that were kept."""
    if not RECORD.exists():
        return {}
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    return {
        name: [Proof(**{**each, "sets": tuple(each["sets"])}) for each in proofs]
        for name, proofs in kept.items()
    }


def write_proof(gate: Gate, proof: Proof) -> None:
    """Keep a proof, in place of those of other files or tools and of the same processor."""
    proofs = read_proofs()
    others = [
        each
        for each in proofs.get(gate.name, [])
        if (each.digest, each.versions) == (proof.digest, proof.versions)
        and (each.vendor, each.sets) != (proof.vendor, proof.sets)
    ]
    proofs[gate.name] = [*others, proof]
    names = [gate.name for gate in GATES]
    kept = {name: [asdict(each) for each in proofs[name]] for name in names if name in proofs}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def standing(
    gate: Gate, proofs: Mapping[str, Sequence[Proof]], root: Path | None = None
) -> Proof | str:
    """Return the proof that holds here and now, or the reason why there is none."""
    known = proofs.get(gate.name, ())
    digest, versions = digest_of(gate, root), versions_of(gate)
    same = [each for each in known if each.digest == digest]
    if not same:
        return "its files have changed" if known else "nobody has proven it yet"
    equal = [each for each in same if each.versions == versions]
    if not equal:
        was = same[0].versions
        other = [f"{tool} {versions[tool]}" for tool in versions if was.get(tool) != versions[tool]]
        return f"it was proven with other tools than {', '.join(other)}"
    if not gate.sets:
        return equal[0]
    name, vendor, sets = this_processor()
    for proof in equal:
        has_sets = set(sets) <= set(proof.sets)
        if gate.widest:
            has_sets = sets[:1] == proof.sets[:1]
        if has_sets and (proof.vendor == vendor or not gate.vendor):
            return proof
    machines = {f"{each.machine} ({', '.join(each.sets)})" for each in equal}
    return f"it was proven on {' and '.join(sorted(machines))}, and not on {name}"


def line_of(gate: Gate, found: Proof | str) -> str:
    """Return what the end of a run says about a group."""
    if isinstance(found, str):
        return f"{gate.name}: to run, since {found}"
    return (
        f"{gate.name}: not run; {found.tests} passed in {found.seconds:.0f} s at {found.commit}, "
        f"{found.date} ({RECORD.relative_to(ROOT)})"
    )


def _now(gate: Gate, digest: str, tests: int, seconds: float) -> Proof:
    model, vendor, _ = this_processor()
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return Proof(
        digest=digest,
        versions=versions_of(gate),
        commit=commit.stdout.strip(),
        date=datetime.now(UTC).date().isoformat(),
        machine=model,
        vendor=vendor,
        sets=_sets_that_ran() if gate.sets else (),
        tests=tests,
        seconds=round(seconds, 1),
    )


def _sets_that_ran() -> tuple[str, ...]:
    """Return the kernel sets that are compiled and that this processor runs."""
    from quire.ops.native.binding import see_kernels
    from quire.platform import detect_platform

    return see_kernels(detect_platform()).kernels


# The plugin follows.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", default="", help="groups whose pass is written down, with commas")


def pytest_configure(config: pytest.Config) -> None:
    names = [name for name in config.getoption("--prove").split(",") if name]
    if not names:
        config.pluginmanager.register(Skips(read_proofs()))
    elif not hasattr(config, "workerinput"):
        config.pluginmanager.register(Proofs([gate for gate in GATES if gate.name in names]))


class Skips:
    """Leaves out the files of groups that are proven, unless the command names them."""

    def __init__(self, proofs: Mapping[str, Sequence[Proof]]) -> None:
        self._found = [(gate, standing(gate, proofs)) for gate in GATES if gate.tests]
        proven = [gate for gate, found in self._found if isinstance(found, Proof)]
        self._files = {path for gate in proven for path in files_of(gate.tests)}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path in self._files else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("gates")
        for gate, found in self._found:
            terminalreporter.line(line_of(gate, found))


class Proofs:
    """Watches the tests of some groups, and keeps what they prove."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._digests = {gate: digest_of(gate) for gate in gates}
        self._outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[file][report.outcome] += 1

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        ended = exitstatus in (0, 1)  # all passed, or some failed; and nothing else went wrong
        terminalreporter.section("gates")
        for gate, digest in self._digests.items():
            files = [path.relative_to(ROOT).as_posix() for path in files_of(gate.tests)]
            problem = self.problem_of(files) if ended else "the run did not end"
            if digest != digest_of(gate):
                problem = "its files changed meanwhile"
            if problem is None:
                passed = sum(self._outcomes[file]["passed"] for file in files)
                took = sum(self._seconds[file] for file in files)
                write_proof(gate, _now(gate, digest, passed, took))
            terminalreporter.line(f"{gate.name}: {problem or 'proven'}")

    def problem_of(self, files: Sequence[str]) -> str | None:
        """Return why these files prove nothing, or None. The reason is a failure, or a file without
        a pass."""
        failed = sum(self._outcomes[file]["failed"] for file in files)
        if failed:
            return f"{failed} failed"
        idle = [file for file in files if not self._outcomes[file]["passed"]]
        return f"no test of {', '.join(idle)} ran on this machine" if idle else None


# The command follows.


def prove(names: Sequence[str]) -> int:
    """Run groups and keep what passed. Returns 1 if one did not."""
    chosen = [gate for gate in GATES if gate.name in names or not names]
    by_tests = [gate for gate in chosen if gate.tests]
    status = max([_prove_by_command(gate) for gate in chosen if gate.command], default=0)
    if by_tests:
        files = [str(path) for gate in by_tests for path in files_of(gate.tests)]
        command = [
            *(sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"),
            *("--no-loadscope-reorder", "-p", "tests.durations", "-p", "tests.gates"),
            *("--prove", ",".join(gate.name for gate in by_tests)),
        ]
        status |= subprocess.run([*command, *files], cwd=ROOT, check=False).returncode
    return min(status, 1)


def _prove_by_command(gate: Gate) -> int:
    digest, started = digest_of(gate), time.monotonic()
    assert gate.command is not None
    try:
        tests = gate.command()
    except SystemExit as error:
        sys.stdout.write(f"{gate.name}: {error}\n")
        return 1
    if digest != digest_of(gate):
        sys.stdout.write(f"{gate.name}: its files changed meanwhile\n")
        return 1
    write_proof(gate, _now(gate, digest, tests, time.monotonic() - started))
    sys.stdout.write(f"{gate.name}: proven\n")
    return 0


def sets_to_compile() -> str:
    """Return "all" if a group that needs all kernel sets has to run, else "native". Before an
    installation this asks for its files alone where tools are missing: ask again afterwards."""
    proofs = read_proofs()
    for gate in GATES:
        is_ready = "none" not in versions_of(gate).values()
        has_files = digest_of(gate) in [each.digest for each in proofs.get(gate.name, ())]
        is_proven = has_files and not (is_ready and isinstance(standing(gate, proofs), str))
        if gate.all_sets and not is_proven:
            return "all"
    return "native"


def main(arguments: Sequence[str]) -> int:
    proofs = read_proofs()
    match arguments:
        case []:
            for gate in GATES:
                sys.stdout.write(line_of(gate, standing(gate, proofs)) + "\n")
        case ["prove", *names]:
            _check_names(names)
            return prove(names)
        case ["skips", name]:
            _check_names([name])
            gate = next(gate for gate in GATES if gate.name == name)
            found = standing(gate, proofs)
            sys.stdout.write(line_of(gate, found) + "\n")
            return int(isinstance(found, str))
        case ["sets"]:
            sys.stdout.write(sets_to_compile() + "\n")
        case _:
            raise SystemExit(__doc__)
    return 0


def _check_names(names: Sequence[str]) -> None:
    known = [gate.name for gate in GATES]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"No gates {', '.join(unknown)}; there are: {', '.join(known)}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
