"""Docstrings and comments, in C++ and JavaScript too, start with a verb or a noun phrase, not with
a relative word. Nor does what stands behind a colon, there and in the docs: an explanation of
`rows` says "rows of the step"."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
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
    r":\**\s+"
    r"(?:whose|of|as|by|that|those|what|whatever|which|how|where|who|whoever)\b"
)
_PYTHON_TEXT = re.compile(
    r"""
    "{3}(?:\\[\s\S]|[^\\])*?"{3}
    |'{3}(?:\\[\s\S]|[^\\])*?'{3}
    |"(?:\\[\s\S]|[^"\\\n])*"
    |'(?:\\[\s\S]|[^'\\\n])*'
    |\#.*                             # a comment begins within no string
    """,
    re.VERBOSE,
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
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, text
            case _:
                continue


def has_suspects(literals: Iterable[str]) -> bool:
    """Return whether one of these literals offends if it is a docstring. To see which are, a file
    has to be parsed, which takes ten times as long. Escapes are for the parser too."""
    for literal in literals:
        is_long = literal.startswith(('"""', "'''"))
        text = literal[3:-3] if is_long else literal[1:-1]
        if first_word(text) in FORBIDDEN or _EXPLAINED.search(text) or (is_long and "\\" in text):
            return True
    return False


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments; lines below each other are one."""
    found: list[tuple[int, str]] = []
    last, line, end = -1, 1, 0
    for match in _PYTHON_TEXT.finditer(source):
        if match.group().startswith("#"):
            line, end = line + source.count("\n", end, match.start()), match.start()
            text, at = match.group().lstrip("#:! "), line
            if line == last + 1:
                at, before = found.pop()
                text = f"{before}\n{text}"
            found.append((at, text))
            last = line
    yield from found


def explanations(texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of explanations that begin with a relative word."""
    for line, text in texts:
        for found in _EXPLAINED.finditer(text):
            before = max(text.rfind(" ", 0, max(found.start() - 30, 0)), 0)
            place = line + text.count("\n", 0, found.start())
            yield place, " ".join(text[before : found.end() + 30].split())


def offences(source: str) -> list[tuple[int, str]]:
    literals = (each for each in _PYTHON_TEXT.findall(source) if not each.startswith("#"))
    texts = [*(docstrings(source) if has_suspects(literals) else ()), *comments(source)]
    first = [(line, text[:60]) for line, text in texts if first_word(text) in FORBIDDEN]
    return sorted([*first, *explanations(texts)])


def cpp_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments in C++ or JavaScript."""
    for comment in _CPP_COMMENT.finditer(source):
        if not comment.group().startswith('"'):
            text = re.sub(r"^[ \t]*(?://+|/?\*+/?)[ \t]*", "", comment.group(), flags=re.MULTILINE)
            yield source.count("\n", 0, comment.start()) + 1, text.lstrip("! \t\n")


def cpp_offences(source: str) -> list[tuple[int, str]]:
    """Return (line, text) of comments that offend; of first words, only those of whole comments
    count. Behind code a small letter is no excuse."""
    texts = list(cpp_comments(source))
    first = [
        (line, text[:60]) for line, text in texts if first_word(text).capitalize() in FORBIDDEN
    ]
    return sorted([*first, *explanations(texts)])


def doc_offences(source: str) -> list[tuple[int, str]]:
    """Return (line, text) of explanations that offend, outside blocks of code."""
    blank = re.sub(
        r"^ *```.*?^ *```$",
        lambda block: "\n" * block.group().count("\n"),
        source,
        flags=re.DOTALL | re.MULTILINE,
    )
    return list(explanations([(1, blank)]))


@cache
def rooms() -> dict[str, list[Path]]:
    """Return the files of the package by their room."""
    found: dict[str, list[Path]] = {}
    for path in SOURCE.rglob("*.py"):
        found.setdefault(path.relative_to(SOURCE).parts[0], []).append(path)
    return found


def offences_in(paths: Iterable[Path], find: Callable[[str], list[tuple[int, str]]]) -> str:
    return "\n".join(
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted(paths)
        for line, text in find(path.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("room", sorted(rooms()))
def test_first_words_are_plain(room: str):
    """Turns red for a docstring such as "Whether it fits.": write "Return whether it fits."."""
    found = offences_in(rooms()[room], offences)
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


def test_explanations_in_the_docs_are_plain():
    """Turns red for "Limits" explained by "those on memory": write "limits on memory"."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.md")]
    assert len(pages) > 40
    found = offences_in(pages, doc_offences)
    assert not found, found


def test_comments_of_the_page_are_plain():
    modules = [*SOURCE.rglob("*.js"), *(ROOT / "tests").rglob("*.mjs")]
    assert modules
    found = offences_in(modules, cpp_offences)
    assert not found, found


@pytest.mark.parametrize(
    "source",
    [
        '"""What it is."""',  # Bad example
        'class A:\n    """By name."""',  # Bad example
        'def f():\n    """\n    Whether it fits."""',  # Bad example
        'X = 1\n"""Of the pool."""',  # Bad example
        "x = 1  # As in vLLM",  # Bad example
        "# How it works\n# in two lines",  # Bad example
        'def f():\n    """Return it.\n\n    rows: of the step."""',  # Bad example
        '"""Plan a step. rows, blocks: those that it takes."""',  # Bad example
        '"""Plan a step. rows: in order; names: by row."""',  # Bad example
        '"""Take in a result: what one rank has lost is lost."""',  # Bad example
        '"""Serve others, under limits:\nthose on memory come first."""',  # Bad example
        "# Rows of a step:\n# as many as fit",  # Bad example
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
        ("// What it is.\nint a;", 1),  # Bad example
        ("int a;\n\n  // Of two rows,\n  // all of them", 3),  # Bad example
        ("int a;  // by row", 1),  # Bad example
        ("int a;  // rows\n// As in the other", 2),  # Bad example
        ('f("a // b");  // from here on', 1),  # Bad example
        ("/* Whether it\nfits */", 1),  # Bad example
        ("/**\n * How it works.\n */", 1),  # Bad example
        ("int a;\n/** Adds x. y:\n * of the rows. */", 2),  # Bad example
        ("// Adds x.\n// y: as in z", 2),  # Bad example
    ],
)
def test_an_offence_in_cpp_is_found(source: str, line: int):
    assert [found for found, _ in cpp_offences(source)] == [line]


def test_an_offence_in_docs_is_found():
    text = "# Title\n\n```\na: what\n```\n\n- **Limits**: those on\nmemory"  # Bad example
    assert [line for line, _ in doc_offences(text)] == [7]


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
