"""The walls of the house: the imports that a room may have (docs/architecture.md, "Rooms")."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "quire"

GROUPS = ("base", "plan", "compute", "text", "entrypoints")
"""Folders of rooms. Each room in them stands on a floor of its own."""
COMMON = ("errors", "foreign", "telemetry", "protocol", "platform", "config")
PLAN = ("kv_cache", "grammar", "speculation", "scheduler")
DATA = (
    "ops", "attention", "formats", "quantization", "sampling", "layers", "models",
    "lora", "kv_transfer", "runner", "worker", "executor",
)  # fmt: skip
FRONT = (
    "hooks", "rendering", "dialect", "bundled", "idioms", "vllm_names", "engine_args", "engine",
    "server", "llm_engine", "llm_vectors", "llm", "async_llm", "client", "training", "bench",
    "simulator", "cli", "__main__",
)  # fmt: skip
VLLM_NAMES = ("inputs", "lora", "outputs", "sampling_params")
"""Modules at the top that are called as vLLM's."""
SEES_EVERYTHING = ("engine", "training", "bench", "simulator")
LIGHT = (
    "base.errors", "protocol", "config", "base.platform", "plan.kv_cache", "plan.scheduler",
    "text.rendering", "text.dialect", "compute.runner.rows", "engine.core.engine_core",
    "base.telemetry", "engine.supervision.host", "engine.supervision.core_process",
    "engine.model_front", "engine.build", "compute.executor.processes.group",
)  # fmt: skip
SUB_ROOMS = {
    "server": (
        "requests", "settings", "readings", "http", "prefixes", "generation", "sessions", "openai",
        "anthropic", "responses", "batches", "routes", "app", "processes",
    ),
    "ops": (
        "compile", "operation", "random_tensors", "native", "distributed", "exchange",
        "triton_provider", "pointwise", "norm", "kv", "linear", "moe", "attention", "recurrent",
        "rows", "sampling", "check", "registry", "compiled", "kernel_timing",
    ),
    "engine": (
        "core", "clients", "provenance", "model_front", "kernel_choice", "fingerprint", "disk_tier",
        "build", "stated_media", "regenerate", "supervision", "convert",
    ),
}  # fmt: skip
"""Rooms within packages that have some, lower ones first."""
MUTUAL = {("config", "ops"): "the `read.py` of a format stands on a floor of its own, above ops"}
"""Folders that import each other, and why."""
MAX_ENTRIES = 20
"""Files and folders at the top of the package."""
MAX_FILES = 20
MAX_LINES = 600
MAX_FUNCTION = 100
MAX_ARGUMENTS, MAX_WIDE = 7, 16
"""Arguments of a constructor, and how many constructors may take more: lower it as they go."""
TORCH_FREE = (
    *COMMON,
    *PLAN,
    "rendering",
    "dialect",
    "server",
    "client",
    "cli",
    "bundled",
)


def _floor(parts: Sequence[str]) -> str:
    """Return the room of a dotted name below quire; a module at the top is its own room.

    A format of checkpoints has one folder, `config/packed/NAME`. Its `read.py` imports torch and
    stands on a floor of the data side, "formats".
    """
    if parts[0] in GROUPS and len(parts) > 1 and parts[1] != "__init__":
        return parts[1]
    if parts[0] in VLLM_NAMES:
        return "vllm_names"
    return "formats" if parts[:2] == ["config", "packed"] and "read" in parts else parts[0]


@functools.cache
def _modules() -> list[tuple[str, Path]]:
    """(package, file) of every source file."""
    files = sorted(SOURCE.rglob("*.py"))
    return [(_floor([*path.relative_to(SOURCE).with_suffix("").parts]), path) for path in files]


def _files(package: str) -> list[Path]:
    return [path for name, path in _modules() if name == package]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a source file. imports: dotted names. functions: (line, lines) of each.
    constructors: (line, arguments) of each. names: names that it assigns at its top."""

    imports: frozenset[str]
    functions: tuple[tuple[int, int], ...]
    constructors: tuple[tuple[int, int], ...]
    names: frozenset[str]


@functools.cache
def _facts(path: Path) -> Facts:
    """Parse a file once for all tests, and keep no tree."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports, names = set[str](), set[str]()
    functions: list[tuple[int, int]] = []
    constructors: list[tuple[int, int]] = []
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1))
            if node.name == "__init__":
                given = node.args
                count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
                constructors.append((node.lineno, count))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return Facts(frozenset(imports), tuple(functions), tuple(constructors), frozenset(names))


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield all statements, those of functions and classes too, and look into no expression."""
    to_visit: list[ast.AST] = [*tree.body]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.stmt):
            yield node
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            to_visit += getattr(node, part, ())


def _imports(path: Path) -> frozenset[str]:
    """Dotted names of everything that a file imports."""
    return _facts(path).imports


def _allowed(package: str) -> set[str]:
    """Packages of quire that `package` may import, itself included."""
    for group in (COMMON, PLAN, DATA):
        if package in group:
            below = set(group[: group.index(package) + 1])
            return below | set(COMMON if group is not COMMON else ())
    if package == "__init__":
        names = {"llm", "llm_engine", "async_llm", "engine_args", "vllm_names"}
        return names | {"protocol", "errors"}
    if package in GROUPS:
        return set()  # its rooms are imported one by one
    assert package in FRONT, f"package {package!r} has no floor: add it to docs and to this test"
    allowed = {*COMMON, *FRONT[: FRONT.index(package) + 1]}
    return allowed | {*PLAN, *DATA} if package in SEES_EVERYTHING else allowed


BY_PACKAGE = pytest.mark.parametrize("package", sorted({package for package, _ in _modules()}))


@BY_PACKAGE
def test_imports_go_downwards(package: str) -> None:
    reaching: dict[str, set[str]] = {}
    for path in _files(package):
        names = [name.split(".")[1:] for name in _imports(path) if name.startswith("quire.")]
        used = {_floor(name) for name in names}
        reaching[str(path)] = used - _allowed(package)
    assert not any(reaching.values()), {path: up for path, up in reaching.items() if up}


def test_no_two_folders_import_each_other() -> None:
    """Imports within functions count too. The lower folder gets what both need."""
    used = {
        (path.relative_to(SOURCE).with_suffix("").parts[0], name.split(".")[1])
        for _, path in _modules()
        for name in _imports(path)
        if name.startswith("quire.")
    }
    pairs = {(one, other) for one, other in used if one < other and (other, one) in used}
    assert pairs == set(MUTUAL)


@BY_PACKAGE
def test_plan_and_front_import_no_torch(package: str) -> None:
    if package in TORCH_FREE:
        heavy = {"torch", "transformers", "triton"}
        for path in _files(package):
            found = heavy & {name.split(".")[0] for name in _imports(path)}
            assert not found, f"{path} imports {found}"


@pytest.mark.parametrize("package", SUB_ROOMS)
def test_sub_rooms_import_downwards(package: str) -> None:
    floors = SUB_ROOMS[package]
    for path in (SOURCE / package).rglob("*.py"):
        room = path.relative_to(SOURCE / package).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in floors, f"{path} stands on no floor of {package}"
        names = [name.split(".") for name in _imports(path)]
        used = {name[2] for name in names if name[:2] == ["quire", package] and len(name) > 2}
        above = used & set(floors[floors.index(room) + 1 :])
        assert not above, f"{path} reaches up: {sorted(above)}"


def _read_by_people(folder: Path) -> list[Path]:
    suffixes = {".py", ".h", ".cpp", ".js", ".mjs", ".css", ".html", ".svg", ".md"}
    return [path for path in folder.rglob("*") if path.suffix in suffixes]


def test_few_things_stand_at_the_top() -> None:
    made = {"__pycache__"}
    entries = sorted({path.name for path in SOURCE.iterdir()} - made)
    assert len(entries) <= MAX_ENTRIES, f"{len(entries)} at the top: {entries}"


def test_folders_are_small_enough_to_read() -> None:
    folders = Counter(path.parent for path in _read_by_people(SOURCE))
    for folder, count in folders.items():
        assert count <= MAX_FILES, f"{folder} has {count} files: make sub-rooms"


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "benchmarks", "examples"])
def test_files_are_short_enough_to_read(folder: str) -> None:
    for path in _read_by_people(SOURCE.parents[1] / folder):
        count = path.read_text(encoding="utf-8").count("\n")
        assert count <= MAX_LINES, f"{path} has {count} lines: move a topic out of it"


def test_functions_are_short_enough_to_read() -> None:
    """Kernels in Triton are one function each."""
    for _, path in _modules():
        for line, count in () if path.stem.startswith("triton") else _facts(path).functions:
            assert count <= MAX_FUNCTION, f"{path}:{line} has {count} lines: cut it"


def test_few_constructors_take_many_arguments() -> None:
    wide: list[str] = []
    for _, path in _modules():
        for line, count in _facts(path).constructors:
            wide += [f"{path}:{line} takes {count}"] * (count > MAX_ARGUMENTS)
    assert len(wide) <= MAX_WIDE, f"{len(wide)} take more than {MAX_ARGUMENTS}: pass a section"


def test_only_build_sees_both_plan_and_data() -> None:
    for package, path in _modules():
        if package == "engine" and path.name != "build.py":
            names = [name.split(".")[1:] for name in _imports(path)]
            used = {_floor(name) for name in names if name}
            sides = (used & set(PLAN), used & (set(DATA) - {"executor"}))
            assert not all(sides), f"{path} sees both sides: {sides}"


@pytest.mark.parametrize("package", LIGHT)
def test_importing_a_light_package_loads_no_torch(package: str) -> None:
    """A lazy import that stopped being lazy would make every start seconds slower."""
    loaded = _imported_in_turn()
    assert package in loaded, "a package before it loads torch, or does not import"
    assert not loaded[package], "it loads torch"


@functools.cache
def _imported_in_turn() -> dict[str, bool]:
    """Return whether torch is loaded after each import of `LIGHT`, up to the first that loads it.
    One process imports all, as they mostly import the same."""
    code = (
        "import sys\nfrom importlib import import_module\n"
        "for name in sys.argv[1:]:\n"
        "    import_module(f'quire.{name}')\n"
        "    print(name, 'torch' in sys.modules)\n"
        "    if 'torch' in sys.modules: break\n"
    )
    command = [sys.executable, "-c", code, *LIGHT]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    words = [line.split() for line in done.stdout.splitlines()]
    return {name: loads == "True" for name, loads in words}


def test_importing_llm_loads_nothing_that_only_an_engine_needs() -> None:
    """Turns red when a program that has no engine yet waits for one's modules."""
    rooms = {f"quire.{name}" for name in ("config", "rendering", "dialect", "engine", "scheduler")}
    code = f"import sys; from quire import LLM; print(*{rooms | {'asyncio'}} & {{*sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert loaded.stdout.split() == []


def test_every_package_lists_its_public_names() -> None:
    for path in SOURCE.rglob("__init__.py"):
        assert "__all__" in _facts(path).names, f"{path} has no __all__"


def test_no_drawers() -> None:
    drawers = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert not [path for path in SOURCE.rglob("*.py") if path.name in drawers]
