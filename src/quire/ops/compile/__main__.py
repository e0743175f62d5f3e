"""`python -m quire.ops.compile`: compiles the C++ kernels of this checkout by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.ops.compile.build import ISAS, LIBRARY_FOLDER, CompileError, compile_kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, and print the libraries one per line. Returns 1 if any cannot be compiled."""
    parser = argparse.ArgumentParser(prog="python -m quire.ops.compile", description=__doc__)
    parser.add_argument("--output", type=Path, default=LIBRARY_FOLDER)
    parser.add_argument("--isa", action="append", choices=[isa.name for isa in ISAS])
    parser.add_argument("--missing", action="store_true", help="keep those of these sources")
    parser.add_argument("--sanitize", action="store_true", help="address and undefined behaviour")
    options = parser.parse_args(arguments)
    try:
        libraries = compile_kernels(
            options.output,
            isas=options.isa,
            sanitize=options.sanitize,
            keep_current=options.missing,
            report=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
        )
        problem = None
    except CompileError as error:
        libraries, problem = error.libraries, error
    sys.stdout.writelines(f"{path}\n" for path in libraries)
    if problem is None:
        return 0
    sys.stderr.write(f"{'some ' if libraries else ''}kernels not compiled: {problem}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
