"""Measure the bundled model: bits per byte on held-out library files, and scripted dialogues.

Run from the repository root: python tools/bundled_model/evaluate.py --output RESULT.json
A dialogue is right when the greedy answer to its last turn equals the expected message (for a tool
call: the same name and the same arguments as JSON values) and the model itself ends the turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Corpus, Document, load_corpus
from dialogues import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    SCRIPTED_SEED,
    SPECIAL_TOKENS,
    TOOL_CALL,
    Dialogue,
    Json,
    render,
    scripted_dialogues,
)
from export import load_checkpoint
from model import ModelConfig, TinyLlama
from ngram import KneserNey, byte_symbols
from safetensors.torch import load_file
from tokenizer import BUNDLED
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED = ROOT / "tests" / "bundled" / "scripted_dialogues.json"
WINDOW, STRIDE = 2048, 1024
MAX_NEW_TOKENS = 160


def load_bundled(folder: Path) -> TinyLlama:
    """The exported bf16 weights, widened to float32."""
    model = TinyLlama(ModelConfig())
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w.float() for name, w in tensors.items()})
    return model


@torch.inference_mode()
def document_bits(model: TinyLlama, ids: list[int], bos: int) -> float:
    """Bits for a document; a token sees at least STRIDE tokens before it, where there are."""
    total, done = 0.0, 0
    sequence = [bos, *ids]
    while done < len(ids):
        begin = max(0, done - STRIDE)
        window = torch.tensor(sequence[begin : begin + WINDOW + 1])
        losses = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        total += float(losses[done - begin :].sum()) / math.log(2)
        done = begin + len(losses)
    return total


def model_bits_per_byte(
    model: TinyLlama, tokenizer: Tokenizer, documents: tuple[Document, ...]
) -> float:
    bos = SPECIAL_TOKENS.index(BOS)
    bits = sum(
        document_bits(model, tokenizer.encode(document.text, add_special_tokens=False).ids, bos)
        for document in documents
    )
    return bits / sum(len(document.text.encode()) for document in documents)


def ngram_bits_per_byte(corpus: Corpus, tokenizer: Tokenizer, order: int) -> dict[str, float]:
    """Kneser-Ney models over bytes and over our tokens, trained on the same library text."""

    def tokens(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    size = sum(len(document.text.encode()) for document in corpus.held_out)
    figures: dict[str, float] = {}
    # The padding (id 0) occurs in no text, so it can mark the boundary of token texts.
    kinds = (("byte", byte_symbols, 256, 256), ("token", tokens, tokenizer.get_vocab_size(), 0))
    for label, symbols, vocabulary, boundary in kinds:
        texts = [symbols(document.text) for document in corpus.train]
        model = KneserNey(texts, order, vocabulary, boundary)
        bits = sum(model.bits(symbols(document.text)) for document in corpus.held_out)
        figures[label] = bits / size
    return figures


@dataclass(frozen=True)
class Answer:
    """Text that the model wrote, and whether it ended the turn itself."""

    text: str
    ended: bool


@torch.inference_mode()
def answer(model: TinyLlama, tokenizer: Tokenizer, prompt: str) -> Answer:
    """The greedy answer to a rendered prompt."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    begin = len(ids)
    stops = {tokenizer.token_to_id(END), tokenizer.token_to_id(EOS)}
    while len(ids) - begin < MAX_NEW_TOKENS:
        following = int(model(torch.tensor([ids]))[0, -1].argmax())
        if following in stops:
            return Answer(tokenizer.decode(ids[begin:], skip_special_tokens=False), True)
        ids.append(following)
    return Answer(tokenizer.decode(ids[begin:], skip_special_tokens=False), False)


def prompt_of(messages: list[Json], tools: list[Json]) -> str:
    """The prompt for the next assistant turn."""
    return "".join(text for text, _ in render(Dialogue("", messages, tools))) + ASSISTANT


def is_right(expected: Json, given: Answer) -> bool:
    if not given.ended:
        return False
    if "tool_calls" not in expected:
        return given.text == expected["content"]
    function = expected["tool_calls"][0]["function"]
    wanted = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    if not given.text.startswith(TOOL_CALL):
        return False
    try:
        return json.loads(given.text.removeprefix(TOOL_CALL)) == wanted
    except json.JSONDecodeError:
        return False


def dialogue_scores(
    model: TinyLlama, tokenizer: Tokenizer, scripted: list[Json], verbose: bool
) -> Json:
    """Right answers in all and by category; `every_turn_right` asks for the earlier turns too."""
    right, asked = Counter[str](), Counter[str]()
    every_turn = 0
    for entry in scripted:
        messages = [*entry["messages"], entry["expected"]]
        verdicts: list[bool] = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                given = answer(model, tokenizer, prompt_of(messages[:place], entry["tools"]))
                verdicts.append(is_right(message, given))
                if verbose and not verdicts[-1]:
                    print(
                        f"{entry['id']} {entry['category']}: {messages[place - 1]}\n"
                        f"   {message}\n   {given}"
                    )
        asked[entry["category"]] += 1
        right[entry["category"]] += verdicts[-1]
        every_turn += all(verdicts)
    by_category = {name: f"{right[name]}/{asked[name]}" for name in sorted(asked)}
    return {
        "right": right.total(),
        "of": asked.total(),
        "every_turn_right": every_turn,
        "by_category": by_category,
    }


def write_scripted(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(scripted_dialogues(), indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def machine() -> Json:
    """Describe the machine of the figures."""
    cpu_file = Path("/proc/cpuinfo")
    cpu_lines = cpu_file.read_text(encoding="utf-8").splitlines() if cpu_file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in cpu_lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, help="measure a training checkpoint instead")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--only-dialogues", action="store_true")
    parser.add_argument("--seed", type=int, help="other scripted dialogues than those of the tests")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--write-scripted", action="store_true", help=f"write {SCRIPTED.name} and stop"
    )
    parser.add_argument("--verbose", action="store_true", help="print wrong answers")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.write_scripted:
        write_scripted(SCRIPTED)
        return
    began = time.monotonic()
    model = load_checkpoint(options.checkpoint)[0] if options.checkpoint else load_bundled(BUNDLED)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    scripted = (
        json.loads(SCRIPTED.read_text(encoding="utf-8"))
        if options.seed is None
        else scripted_dialogues(options.seed, options.count)
    )
    figures: Json = {
        "machine": machine(),
        "command": "python " + " ".join(sys.argv),
        "commit": "see git log of this file",
        "seed": SCRIPTED_SEED if options.seed is None else options.seed,
    }
    figures["dialogues"] = dialogue_scores(model, tokenizer, scripted, options.verbose)
    if not options.only_dialogues:
        corpus = load_corpus()
        figures["corpus_sha256"] = corpus.sha256
        figures["held_out_files"] = [document.name for document in corpus.held_out]
        figures["held_out_bytes"] = sum(len(document.text.encode()) for document in corpus.held_out)
        ngrams = ngram_bits_per_byte(corpus, tokenizer, order=5)
        figures["bits_per_byte"] = {
            "model": round(model_bits_per_byte(model, tokenizer, corpus.held_out), 4),
            "byte_5_gram": round(ngrams["byte"], 4),
            "token_5_gram": round(ngrams["token"], 4),
        }
    figures["seconds"] = round(time.monotonic() - began, 1)
    text = json.dumps(figures, indent=2) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
