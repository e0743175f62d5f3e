"""Find the text files of a folder that are nearest to a question.

    python examples/embed_folder.py a/folder "question" [--model M]

The bundled model knows no meanings, so it finds files with the same words at best.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire import LLM, PoolingParams

Vectors = npt.NDArray[np.float32]


def embed(llm: LLM, texts: list[str]) -> Vectors:
    """Return a vector of length 1 for each text: [texts, width]. Longer texts are cut to fit."""
    params = PoolingParams(normalize=True, truncate_prompt_tokens=-1)
    outputs = llm.embed(texts, pooling_params=params, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def nearest(llm: LLM, folder: Path, question: str, count: int) -> list[tuple[float, Path]]:
    """Return the files that are nearest to the question, with their cosines, best first."""
    files = sorted(path for path in folder.rglob("*.txt") if path.stat().st_size)
    vectors = embed(llm, [question, *(path.read_text(encoding="utf-8") for path in files)])
    cosines = vectors[1:] @ vectors[0]
    best = np.argsort(-cosines, kind="stable")[:count].tolist()
    return [(float(cosines[index]), files[index]) for index in best]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Find the files nearest to a question.")
    parser.add_argument("folder", type=Path, help="its files *.txt are read, subfolders included")
    parser.add_argument("question")
    parser.add_argument("--model", help="the bundled one if unset")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="files to show")
    options = parser.parse_args(arguments)
    with LLM(options.model, quiet=True) as llm:
        for cosine, path in nearest(llm, options.folder, options.question, options.top):
            print(f"{cosine:.3f} {path}")


if __name__ == "__main__":
    main()
