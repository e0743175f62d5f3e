"""Compiles the C++ kernels and finds compiled ones. Never imports torch."""

from quire.ops.compile.build import (
    ISAS,
    LIBRARY_FOLDER,
    SOURCE_FOLDER,
    CompileError,
    Isa,
    build_hash,
    compile_kernels,
    find_compiler,
    library_path,
    maker,
)

__all__ = [
    "ISAS",
    "LIBRARY_FOLDER",
    "SOURCE_FOLDER",
    "CompileError",
    "Isa",
    "build_hash",
    "compile_kernels",
    "find_compiler",
    "library_path",
    "maker",
]
