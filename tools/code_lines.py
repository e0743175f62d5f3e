"""Count the lines of code in `src`: lines that hold part of a statement, without docstrings.

python -m tools.code_lines [FOLDER …]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Lines of Python source that hold code; a docstring, a comment or a blank line is none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main(folders: list[str]) -> None:
    """Print the count of each package, the largest first, and their sum."""
    for folder in folders or ["src/quire"]:
        root, counts = Path(folder), Counter[str]()
        for path in root.rglob("*.py"):
            counts[path.relative_to(root).parts[0]] += code_lines(path.read_text())
        for name, count in counts.most_common():
            print(f"{count:7} {name}")
        print(f"{counts.total():7} {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
