"""Docstrings and comments, in C++ too, start with a verb or a noun phrase, not with a relative
word. Neither does the explanation of a parameter ("rows: rows of the step", not "rows: of the
step")."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "quire"
KERNELS = SOURCE / "ops" / "csrc"
FORBIDDEN = frozenset(
    (
        *("Of", "That", "Those", "By", "As", "Until", "From"),
        *("What", "Where", "Whether", "Which", "Who", "How"),
    )
)
_EXPLAINED = re.compile(
    r"(?:^|[.;\n(]\s*|,\s)"  # the start of a text or of a sentence
    r"[a-z_][a-z_0-9]*(?:, [a-z_0-9]+)*: "  # parameters or fields
    r"(?:whose|of|as|by|that|those|what|which|how|where|who)\b"
)
_CPP_COMMENT = re.compile(
    r"""^[ \t]*//.*(?:\n[ \t]*//.*)*  # lines of their own, one below the other
    |//.*                             # behind code
    |/\*[\s\S]*?\*/
    |"(?:\\.|[^"\\\n])*"              # a string, which may hold slashes
    """,
    re.MULTILINE | re.VERBOSE,
)


def first_word(text: str) -> str:
    found = re.match(r"[A-Za-z]+", text.strip())
    return found.group() if found else ""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of docstrings, also of those behind attributes and constants."""
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments; of a comment over several lines, only the first."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield token.start[0], token.string.lstrip("#:! ")
            last = token.start[0]


def offences(source: str) -> list[tuple[int, str]]:
    texts = [*docstrings(source), *comments(source)]
    first = [(line, text[:60]) for line, text in texts if first_word(text) in FORBIDDEN]
    explained = [
        (line, text[found.start() : found.start() + 60].strip())
        for line, text in docstrings(source)
        for found in _EXPLAINED.finditer(text)
    ]
    return sorted([*first, *explained])


def cpp_offences(source: str) -> list[tuple[int, str]]:
    """Return (line, text) of comments that offend; of a comment over several lines, only the first
    word counts. Behind code a small letter is no excuse."""
    found = []
    for comment in _CPP_COMMENT.finditer(source):
        text = comment.group().lstrip("/*! \t\n")
        is_string = comment.group().startswith('"')
        if not is_string and first_word(text).capitalize() in FORBIDDEN:
            found.append((source.count("\n", 0, comment.start()) + 1, text[:60]))
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def offences_in(paths: Iterable[Path], find: Callable[[str], list[tuple[int, str]]]) -> str:
    return "\n".join(
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted(paths)
        for line, text in find(path.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("room", sorted({room_of(path) for path in SOURCE.rglob("*.py")}))
def test_first_words_are_plain(room: str):
    """Turns red for a docstring such as "Whether it fits.": write "Return whether it fits."."""
    found = offences_in((path for path in SOURCE.rglob("*.py") if room_of(path) == room), offences)
    assert not found, found


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests", "tools"])
def test_first_words_beside_the_package_are_plain(folder: str):
    found = offences_in((ROOT / folder).rglob("*.py"), offences)
    assert not found, found


def test_first_words_in_kernels_are_plain():
    """Turns red for a comment such as "// Where a row starts": write "// Returns the start"."""
    sources = [*KERNELS.rglob("*.h"), *KERNELS.rglob("*.cpp")]
    assert sources
    found = offences_in(sources, cpp_offences)
    assert not found, found


@pytest.mark.parametrize(
    "source",
    [
        '"""What it is."""',
        'class A:\n    """By name."""',
        'def f():\n    """\n    Whether it fits."""',
        'X = 1\n"""Of the pool."""',
        "x = 1  # As in vLLM",
        "# How it works\n# in two lines",
        'def f():\n    """Return it.\n\n    rows: of the step."""',
        '"""Plan a step. rows, blocks: those that it takes."""',
        '"""Plan a step. rows: in order; names: by row."""',
    ],
)
def test_an_offence_is_found(source: str):
    assert len(offences(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Return whether it fits."""',
        "# Two lines,\n# Of which one is ours",
        "x = 'What'",
        '"""Plan a step. rows: rows of the step. is_last: whether none follows."""',
    ],
)
def test_plain_text_passes(source: str):
    assert not offences(source)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("// What it is.\nint a;", 1),
        ("int a;\n\n  // Of two rows,\n  // all of them", 3),
        ("int a;  // by row", 1),
        ("int a;  // rows\n// As in the other", 2),
        ('f("a // b");  // from here on', 1),
        ("/* Whether it\nfits */", 1),
        ("/**\n * How it works.\n */", 1),
    ],
)
def test_an_offence_in_cpp_is_found(source: str, line: int):
    assert [found for found, _ in cpp_offences(source)] == [line]


@pytest.mark.parametrize(
    "source",
    [
        "// Returns whether it fits.",
        "// Two lines,\n// Of which one is ours",
        'f("// What");',
        "int a;  // offset of a row",
        "}  // namespace quire",
    ],
)
def test_plain_cpp_passes(source: str):
    assert not cpp_offences(source)
