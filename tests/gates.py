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
        from quire.base.platform.cpu import detect_cpu
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
    from quire.base.platform import detect_platform
    from quire.ops.native.binding import see_kernels

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
    _, _, sets = this_processor()
    for gate in GATES:
        is_ready = "none" not in versions_of(gate).values()
        has_files = digest_of(gate) in [each.digest for each in proofs.get(gate.name, ())]
        is_proven = has_files and not (is_ready and isinstance(standing(gate, proofs), str))
        runs_here = not gate.needs or gate.needs in sets
        if gate.all_sets and runs_here and not is_proven:
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
