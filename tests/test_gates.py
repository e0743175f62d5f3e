"""Conditions under which a group of tests is left out or runs again."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests import gates
from tests.gate_table import GATES, Gate
from tests.gates import Proof

ROOT = gates.ROOT
NAMES = [gate.name for gate in GATES]
OWN = ("quire", "tests", "tools")
OPTIONAL = ("chromium", "playwright", "axe-playwright-python")
"""Tools without which a group's tests are left out, each with a line."""
BY_TESTS = [gate for gate in GATES if gate.tests]


def name_of(gate: Gate) -> str:
    return gate.name


def proof_of(gate: Gate, **more: object) -> Proof:
    """A pass on this machine, just now."""
    model, vendor, sets = gates.this_processor()
    digest, versions = gates.digest_of(gate), gates.versions_of(gate)
    proof = Proof(digest, versions, "abc", "2026-01-01", model, vendor, sets, 7, 1.0)
    return replace(proof, **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the files of a group once: no test changes those of the project."""
    monkeypatch.setattr(gates, "digest_of", digest_once)


def digest_once(gate: Gate, root: Path | None = None) -> str:
    return DIGEST_OF(gate, root) if root else digest_of_project(gate)


@cache
def digest_of_project(gate: Gate) -> str:
    return DIGEST_OF(gate)


@cache
def files_of(glob: str) -> tuple[Path, ...]:
    """Files of the project, in order."""
    return tuple(gates.files_of([glob]))


DIGEST_OF = gates.digest_of


@pytest.fixture(params=GATES, ids=name_of)
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Gate, Path]:
    """A group, and a folder with the first and the last file of each of its globs."""
    gate: Gate = request.param
    files = (files_of(glob) for glob in (*gate.tests, *gate.covers))
    for path in {path for found in files for path in (found[0], found[-1])}:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return gate, tmp_path


def test_one_byte_makes_a_group_run_and_a_move_does_not(
    copied: tuple[Gate, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The byte is in a source, a test or a header. Turns red when a change is left unproven, or
    when moved files cost a proof."""
    gate, root = copied
    proofs = {gate.name: [proof_of(gate, digest=gates.digest_of(gate, root))]}
    assert isinstance(gates.standing(gate, proofs, root), Proof)
    files = gates.files_of((*gate.tests, *gate.covers), root)
    changed = [gates.files_of([glob], root)[-1] for glob in (*gate.tests, *gate.covers)]
    with monkeypatch.context() as bytes_alone:  # change: the same files are there each time
        bytes_alone.setattr(gates, "files_of", lambda *_: files)
        for path in changed:
            before = path.read_bytes()
            path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            assert gates.standing(gate, proofs, root) == "its files have changed", path
            path.write_bytes(before)
    for glob in gate.covers:
        if glob.endswith("**"):
            moved = gates.files_of([glob], root)[0]
            elsewhere = root / glob.removesuffix("**") / "a_new_folder" / "of_another.name"
            elsewhere.parent.mkdir()
            moved.rename(elsewhere)
            (elsewhere.parent / "__pycache__").mkdir()
            (elsewhere.parent / "__pycache__" / "made.pyc").write_bytes(b"made")
    assert isinstance(gates.standing(gate, proofs, root), Proof)
    assert gates.files_of((*gate.tests, *gate.covers), root)[0].exists()


@pytest.mark.parametrize("gate", GATES, ids=name_of)
def test_another_version_of_a_tool_makes_a_group_run(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs, versions = {gate.name: [proof_of(gate)]}, gates.version_of
    for tool in ("python", *gate.tools):
        assert versions(tool) != "none" or tool in OPTIONAL
        with monkeypatch.context() as other:
            newer = lambda each, tool=tool: versions(each) + "1" * (each == tool)  # noqa: E731
            wanted = f"it was proven with other tools than {tool} {versions(tool)}1"
            other.setattr(gates, "version_of", newer)
            assert gates.standing(gate, proofs) == wanted


@pytest.mark.parametrize("gate", GATES, ids=name_of)
def test_another_processor_is_not_proven(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when kernels count as proven that the machine of the proof could not run."""
    proofs = {gate.name: [proof_of(gate, vendor="A", sets=("avx512", "avx2"))]}

    def is_proven(vendor: str, *sets: str) -> bool:
        monkeypatch.setattr(gates, "this_processor", lambda: ("a machine", vendor, sets))
        return isinstance(gates.standing(gate, proofs), Proof)

    assert is_proven("A", "avx512", "avx2")
    for sets in (("avx2",), ()):
        assert is_proven("A", *sets) == (not gate.widest)
    assert is_proven("B", "avx512", "avx2") == (not gate.vendor)
    assert is_proven("A", "avx512_vnni", "avx512", "avx2") == (not gate.sets)


def test_each_glob_matches_and_no_test_file_is_in_two_groups() -> None:
    """Turns red when a renamed file is no longer covered, or no longer left out."""
    files = [path for gate in GATES for glob in gate.tests for path in files_of(glob)]
    assert len(files) == len(set(files)) and all(path.name.startswith("test_") for path in files)
    for gate in GATES:
        assert bool(gate.tests) != bool(gate.command)
        for glob in (*gate.tests, *gate.covers):
            assert files_of(glob), f"{gate.name}: nothing is called {glob}"
    assert len(set(NAMES)) == len(NAMES) and not any(set(name) & set(" ,") for name in NAMES)
    assert set(gates.read_proofs()) <= set(NAMES)


@cache
def module_file(name: str) -> Path | None:
    """The file of one of our modules, or None."""
    base = ROOT / ("src" if name.startswith("quire") else "")
    path = base.joinpath(*name.split("."))
    found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return found if name.split(".")[0] in OWN and found.is_file() else None


@cache
def imported(path: Path) -> frozenset[Path]:
    """Files that give names to this one. A package between them does not count."""
    text = path.read_text(encoding="utf-8")
    lines, found = text.splitlines(), set[Path | None]()
    to_visit: list[ast.AST] = [ast.parse(text)]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.Import):
            found |= {module_file(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = module_file(f"{node.module}.{alias.name}")
                found.add(inside or module_file(node.module))
        elif not (isinstance(node, ast.If) and is_for_types(node, lines)):
            for part in ("body", "handlers", "orelse", "finalbody", "cases"):
                to_visit += getattr(node, part, ())
    return frozenset(path for path in found if path is not None)


def is_for_types(node: ast.If, lines: Sequence[str]) -> bool:
    condition = lines[node.test.lineno - 1 : node.test.end_lineno]
    return any("TYPE_CHECKING" in line for line in condition)


@pytest.mark.parametrize("gate", BY_TESTS, ids=name_of)
def test_a_group_covers_all_that_it_imports(gate: Gate) -> None:
    """Turns red when a test, or a module that it imports, comes to depend on a file whose changes
    would not be seen."""
    covered = {path for glob in (*gate.tests, *gate.covers) for path in files_of(glob)}
    for path in covered:
        if path.suffix == ".py":
            missing = imported(path) - covered
            assert not missing, f"{path.relative_to(ROOT)} imports {sorted(missing)}"


TOY = """
import sys
from pathlib import Path
import pytest
from tests import gates

root = Path(sys.argv[1])
gates.ROOT, gates.RECORD = root, root / "gates.json"
gates.GATES = (
    gates.Gate("toy", ("room/test_toy.py",), ("covered",), ("numpy",)),
    gates.Gate("idle", ("room/test_idle.py",), ("covered",), ()),
)
plugins = ["-p", "xdist.plugin", "-p", "tests.gates", "-p", "no:cacheprovider"]
options = ["-q", *plugins, "-c", "/dev/null", "--rootdir", sys.argv[1]]
sys.exit(pytest.main([*options, *sys.argv[2:]]))
"""


def test_a_proven_group_is_left_out_with_a_line(tmp_path: Path) -> None:
    """The group goes from nothing to a proof, to a change, to a failure. Turns red when a group is
    left out that is not proven, when only skipped tests or failures count as a proof, or when a run
    other than `make gates` writes the file."""
    room, record = tmp_path / "room", tmp_path / "gates.json"
    room.mkdir()
    (tmp_path / "covered").write_text("1")
    (room / "test_toy.py").write_text("def test_toy():\n    assert open('covered').read() != '0'\n")
    (room / "test_idle.py").write_text("import pytest\npytest.skip('', allow_module_level=True)\n")
    (room / "test_other.py").write_text("def test_other():\n    pass\n")

    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        "PATH": "/usr/bin",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of others, which take time to load
    }

    def run(*options: str, workers: int = 0) -> str:
        words = [sys.executable, "-W", "ignore", "-c", TOY, str(tmp_path), *options]
        words += ["-n", str(workers)]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.stderr, done.stderr
        return done.stdout

    assert "toy: to run, since nobody has proven it yet" in (out := run("room", workers=1))
    assert "2 passed" in out and not record.exists()
    out = run("--prove", "toy,idle", "room/test_toy.py", "room/test_idle.py", workers=1)
    assert "toy: proven" in out and "idle: no test of room/test_idle.py ran" in out
    [proof] = json.loads(record.read_text())["toy"]
    assert (proof["tests"], proof["sets"], set(proof["versions"])) == (1, [], {"python", "numpy"})
    kept = record.read_bytes()
    out = run("room", workers=1)
    assert "1 passed" in out and "toy: not run; 1 passed in " in out and "(gates.json)" in out
    assert "1 passed" in run("room/test_toy.py"), "who names a file wants it to run"
    (tmp_path / "covered").write_text("0")
    assert "1 failed, 1 passed" in (out := run("room"))
    assert "toy: to run, since its files have changed" in out
    assert "toy: 1 failed" in run("--prove", "toy", "room/test_toy.py")
    assert record.read_bytes() == kept


def test_all_sets_are_compiled_where_a_group_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when CI compiles what nobody has to prove, or leaves out what has to be."""
    sets = ("avx512_bf16", "avx2")
    proofs = {gate.name: [proof_of(gate, vendor="A", sets=sets)] for gate in GATES}
    monkeypatch.setattr(gates, "read_proofs", lambda: proofs)
    monkeypatch.setattr(gates, "this_processor", lambda: ("a machine", "A", sets))
    assert gates.sets_to_compile() == "native"
    for name in ("attention", "wheel"):
        del proofs[name]
    assert gates.sets_to_compile() == "native"
    versions = gates.version_of
    # Before an installation, and with another version than that of the proof.
    for torch, asked in (("none", "native"), ("9", "all")):
        with monkeypatch.context() as other:
            known = lambda tool, torch=torch: torch if tool == "torch" else versions(tool)  # noqa: E731
            other.setattr(gates, "version_of", known)
            assert gates.sets_to_compile() == asked
            [proof] = proofs["tiles"]
            proofs["tiles"] = [replace(proof, digest="of other files")]
            assert gates.sets_to_compile() == "all"
            with monkeypatch.context() as lesser:  # all tests of the group are skipped there
                lesser.setattr(gates, "this_processor", lambda: ("a machine", "A", ("avx2",)))
                assert gates.sets_to_compile() == "native"
            proofs["tiles"] = [proof]
    del proofs["kernel-sets"]
    assert gates.sets_to_compile() == "all"


def test_a_command_that_fails_proves_nothing_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when a set that does not compile, or a wheel that does not serve, is kept as a
    pass."""

    def fail() -> int:
        raise SystemExit("no compiler")

    bad, good = (
        Gate(name, (), ("tests/gates.py",), (), command=command)
        for name, command in (("bad", fail), ("good", int))
    )
    monkeypatch.setattr(gates, "GATES", (bad, good))
    monkeypatch.setattr(gates, "RECORD", tmp_path / "gates.json")
    assert gates.prove([]) == 1
    assert set(gates.read_proofs()) == {"good"}
    assert gates.prove(["good"]) == 0


def test_a_group_that_does_not_exist_is_named() -> None:
    with pytest.raises(SystemExit, match=r"No gates sanitizer; there are: kernel-sets, "):
        gates.main(["prove", "sanitizer"])
