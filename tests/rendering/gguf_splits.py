"""Tokens that llama.cpp makes of 500 texts for each rule of `tokenizer.ggml.pre` that quire knows.

    pip install --target /tmp/llama xllamacpp
    PYTHONPATH=/tmp/llama python -m tests.rendering.gguf_splits

Run by hand after a rule was added; tests read only what it wrote. The vocabulary is trained on the
texts as they are, so that its tokens cross every border that a rule could draw, and it has words
that no merge makes.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
import urllib.request
from array import array
from pathlib import Path
from typing import Any

import torch

from quire.text.rendering.gguf import SPLITS
from tests.gguf_writer import float_tensor, write_gguf
from tests.real.inputs import texts as common_texts

FILE = Path(__file__).with_name("gguf_splits.json.gz")
NUM_TEXTS = 500
NUM_TOKENS = 4000
NUM_LONE_WORDS = 60
WIDTH = 32
PIECES = (  # noqa: SIM905  separated by ¦
    "can't¦CAN'T¦we'Ve¦I'D¦'ll¦''s¦it’s¦O'Neil¦y'all're¦fooBarBAZ¦HTTPServer2Go¦ПриветМир¦"
    "ÉCOLE¦École¦straßeÄpfel¦ǅungla¦ʰʲ¦हिन्दी में लिखो¦ภาษาไทยง่าย¦العَرَبِيَّة¦עִבְרִית¦"
    "தமிழ்¦বাংলা¦ქართული¦Հայերեն¦Ꭰ ᏣᎳᎩ¦ἀρχή¦अ१२३४५¦１２３４５¦1234567¦0.00001¦1,000,000.50¦"
    "2024-05-17T08:09:10Z¦²³¹¦ⅣⅫ¦①②¦½¼¦3rd¦v2.10.3b1¦0xDEADbeef¦１２３ａｂｃ¦ＡＢＣ！？¦「引用」、。¦"
    "中文，英文mixed混合123¦ひらがなカタカナ漢字ー¦한국어123¦㄰ㄅㄆ¦𠀀𠮷¦!!??¦...///\n¦//\n\n¦;\r\n¦(){}[]<>¦$+=<>^~|`¦"
    "#$%&*@¦€£¥₿¦±×÷≠≤¦→⇒∀∃¦“”‘’«»¦–—…¦ \n\n ¦\n \n¦\t\n\t¦\r\r\n¦   \n   x¦  x¦\u2003\u2009¦"
    "\u00a0\u00a0x¦\u3000。¦\u0085¦\u2028¦\ufeff¦\u200d\u200c¦\x00\x1f¦\x1b[0m¦👍🏽¦🏳️‍🌈¦©®™¦"
    "a\u0300\u0301b¦\u0301¦_a__b_¦-x--y¦a/b\\c¦https://x.y/Zz?q=1¦user@mail.org¦"
    "    return self._x[1:-1]\n¦if(x==1){y+=2;}¦<|x|>¦[INST]¦```py\n¦- [ ] a\n¦| a | b |\n"
).split("¦")


def texts() -> list[str]:
    draw = random.Random(48)
    found = common_texts([], NUM_TEXTS // 2)
    while len(found) < NUM_TEXTS:
        parts = []
        for _ in range(draw.randint(1, 7)):
            parts.append(draw.choice(PIECES))
            parts.append(draw.choice(("", "", "", " ", " ", "  ", "\n", "'", "1", "x", "。")))
        found.append("".join(parts))
    return found


def vocabulary(given: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = spelled
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=10,
        show_progress=False,
    )
    tokenizer.train_from_iterator(given, trainer)  # pyright: ignore[reportUnknownMemberType]
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    words = [
        part
        for text in given
        for word in text.split()
        for part, _ in spelled.pre_tokenize_str(word)
    ]
    lone = [word for word in dict.fromkeys(words) if word not in model["vocab"] and len(word) < 30]
    return tokens + lone[:NUM_LONE_WORDS], merges


def metadata(pre: str, tokens: list[str], merges: list[str]) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": array("i", [3] + [1] * (len(tokens) - 1)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
    }


def write_model(path: Path, values: dict[str, Any]) -> Path:
    """A file that llama.cpp loads: its server wants weights beside the vocabulary."""
    shape = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": WIDTH,
        "feed_forward_length": WIDTH,
        "attention.head_count": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    weights = {f"blk.0.{name}.weight": torch.zeros(WIDTH, WIDTH) for name in square}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        weights[f"{name}.weight"] = torch.zeros(WIDTH)
    weights["token_embd.weight"] = torch.zeros(len(values["tokenizer.ggml.tokens"]), WIDTH)
    return write_gguf(
        path,
        values | {f"llama.{key}": value for key, value in shape.items()},
        {name: float_tensor(each) for name, each in weights.items()},
    )


def of_llama_cpp(file: Path, given: list[str]) -> tuple[list[list[int]], list[int]]:
    """Ids of each text alone, and of "a" with the tokens that stand around texts."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params: Any = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), 64, 1
    params.warmup = False
    server: Any = xllamacpp.Server(params)

    def tokens(text: str, add_special: bool) -> list[int]:
        asked = {"content": text, "add_special": add_special, "parse_special": False}
        request = urllib.request.Request(
            server.listening_address + "/tokenize",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]

    return [tokens(text, False) for text in given], tokens("a", True)


def main() -> None:
    import xllamacpp  # pyright: ignore[reportMissingImports]

    given = texts()
    tokens, merges = vocabulary(given)
    common: list[list[int]] = []
    rules: dict[str, Any] = {}
    for pre in sys.argv[1:] or SPLITS:
        with tempfile.TemporaryDirectory() as folder:
            file = write_model(Path(folder) / "m.gguf", metadata(pre, tokens, merges))
            ids, marked = of_llama_cpp(file, given)
        common = common or ids
        other = {i: each for i, each in enumerate(ids) if each != common[i]}
        rules[pre] = {"marked": marked, "other": other}
    result = {
        "made_by": f"xllamacpp {xllamacpp.__version__}",
        "texts": given,
        "tokens": tokens,
        "merges": merges,
        "common": common,
        "rules": rules,
    }
    written = json.dumps(result, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(written, 9, mtime=0))


if __name__ == "__main__":
    main()
