"""The training text: Python's own library sources, its language reference and its docstrings.

All of it comes with the interpreter, so the corpus needs no download. A file is held out by a hash
of its path inside the library, never by chance, so that every run splits alike.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 5
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "__pycache__", "ensurepip"})
# Generated tables: long runs of numbers that teach nothing, and a file that describes the machine.
SKIPPED_PREFIXES = (
    "encodings/cp",
    "encodings/iso",
    "encodings/mac",
    "encodings/koi",
    "pydoc_data/",
    "_sysconfigdata",
)
EXTENSION_MODULES = (
    "builtins", "math", "cmath", "itertools", "functools", "collections", "time", "datetime", "sys",
    "array", "zlib", "select", "socket", "struct", "io", "os", "re", "json", "threading", "signal",
    "marshal", "gc", "operator", "random", "unicodedata", "binascii", "hashlib", "decimal",
    "sqlite3",
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One text of the corpus and where it came from: a path in the library, or a made-up name."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents, with one hash over all names and texts."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    sha256: str


def is_held_out(name: str) -> bool:
    """True for about HELD_OUT_PERCENT of all names, always the same ones."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def library_files(root: Path) -> Iterator[Document]:
    """Every source file of the library below `root`, in the order of its path."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        name = relative.as_posix()
        if SKIPPED_FOLDERS.intersection(relative.parts) or name.startswith(SKIPPED_PREFIXES):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= 200:
            yield Document(name, text)


def language_reference() -> Iterator[Document]:
    """The chapters of the language reference that `help()` shows."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document(f"topics/{name}", text)


def docstrings() -> Iterator[Document]:
    """Signatures and docstrings of modules written in C, whose sources are not installed."""
    for module_name in EXTENSION_MODULES:
        module = importlib.import_module(module_name)
        parts: list[str] = []
        for name in sorted(vars(module)):
            if name.startswith("_"):
                continue
            thing = getattr(module, name)
            if inspect.isbuiltin(thing) or inspect.isclass(thing):
                parts.extend(_described(f"{module_name}.{name}", thing))
        if parts:
            yield Document(f"docstrings/{module_name}", "\n\n".join(parts) + "\n")


def _described(name: str, thing: object) -> Iterator[str]:
    if isinstance(thing.__doc__, str):
        yield f"{name}\n{inspect.cleandoc(thing.__doc__)}"
    if not inspect.isclass(thing) or thing.__module__ not in EXTENSION_MODULES:
        return
    for attribute, member in sorted(vars(thing).items()):
        text = getattr(member, "__doc__", None)
        if inspect.isroutine(member) and not attribute.startswith("_") and isinstance(text, str):
            yield f"{name}.{attribute}\n{inspect.cleandoc(text)}"


def load_corpus() -> Corpus:
    """Read the corpus of this interpreter; only library files can be held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = list(library_files(root))
    train = [document for document in files if not is_held_out(document.name)]
    held_out = [document for document in files if is_held_out(document.name)]
    train += [*language_reference(), *docstrings()]
    digest = hashlib.sha256()
    for document in [*train, *held_out]:
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return Corpus(tuple(train), tuple(held_out), digest.hexdigest())


def main() -> None:
    corpus = load_corpus()
    for label, documents in (("train", corpus.train), ("held out", corpus.held_out)):
        size = sum(len(document.text.encode()) for document in documents)
        print(f"{label}: {len(documents)} documents, {size} bytes")
    print(f"python {sys.version.split()[0]}, sha256 {corpus.sha256}")


if __name__ == "__main__":
    main()
