"""Model folders with small tokenizers of the usual kinds, trained on a few lines of text."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from quire.text.rendering import Tokenizer

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it?",
    "def add(a, b):\n    return a + b  # two spaces\n\n\n\tx = {'key': [1, 2.5]}",
    "你好,世界。今天天气很好。 日本語のテキスト、カタカナ。 한국어 문장도 있다.",
    "שלום עולם — مرحبا بالعالم، كيف الحال؟",
    "emoji 😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 é e\u0301 n\u0303 Å ﬁ ½ ² Ⅷ",
    "naïve café Straße ÅNGSTRÖM İstanbul ǅ",
    "   leading and trailing   ",
    "",
    " ",
    "\n",
    "\u200b\ufeff\u00a0\u2028x\r\ny\x00z",
    "<|end|> inside <s> text </s> and <extra>",
    "a" * 50 + " " * 20 + "!" * 30,
)
SPECIALS = {
    "byte_level": ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"],
    "metaspace": ["<unk>", "<s>", "</s>"],
    "unigram": ["<pad>", "</s>", "<unk>"],
    "word_piece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _corpus() -> list[str]:
    return [text for text in TEXTS for _ in range(4)]


def gpt2_like() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    _train_bpe(backend, 420, SPECIALS["byte_level"])
    return backend


def qwen_like() -> Backend:
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _split_bytes()
    backend.decoder = decoders.ByteLevel()
    _train_bpe(backend, 420, SPECIALS["byte_level"])
    return backend


def llama3_like() -> Backend:
    backend = Backend(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = _split_bytes()
    backend.decoder = decoders.ByteLevel()
    _train_bpe(backend, 420, SPECIALS["byte_level"])
    bos = backend.token_to_id("<|begin|>")
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<|begin|> $A", special_tokens=[("<|begin|>", bos)]
            ),
        ]
    )
    return backend


def llama2_like() -> Backend:
    """SentencePiece BPE with bytes for unknown characters, in the older form of the file."""
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    _train_bpe(trained, 500, SPECIALS["metaspace"], alphabet_limit=60)
    data = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = {token: index for index, token in enumerate(SPECIALS["metaspace"])}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + sorted(data["vocab"]):
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in data["merges"]]
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(SPECIALS["metaspace"])
    return backend


def gemma_like() -> Backend:
    """Make `llama2_like` without the space before the first word."""
    backend = llama2_like()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def t5_like() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        _corpus(),
        trainers.UnigramTrainer(
            vocab_size=300,
            special_tokens=SPECIALS["unigram"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", backend.token_to_id("</s>"))]
    )
    return backend


def bert_like() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        _corpus(),
        trainers.WordPieceTrainer(
            vocab_size=400, special_tokens=SPECIALS["word_piece"], show_progress=False
        ),
    )
    return backend


def old_bpe_like() -> Backend:
    """A decoder that looks at neighbours: the end-of-word mark becomes a space, or nothing last."""
    backend = Backend(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    backend.train_from_iterator(
        _corpus(),
        trainers.BpeTrainer(vocab_size=400, end_of_word_suffix="</w>", show_progress=False),
    )
    return backend


def word_level_like() -> Backend:
    """No decoder at all: tokens are joined by spaces."""
    backend = Backend(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(
        _corpus(), trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    )
    return backend


BUILDERS = {
    "gpt2": gpt2_like,
    "qwen": qwen_like,
    "llama3": llama3_like,
    "llama2": llama2_like,
    "gemma": gemma_like,
    "t5": t5_like,
    "bert": bert_like,
    "old_bpe": old_bpe_like,
    "word_level": word_level_like,
}
# The decoder of the last kind looks across tokens, so streams of any ids are not always exact.
EXACT = tuple(name for name in BUILDERS if name != "old_bpe")


def _split_bytes() -> Any:
    from tokenizers import Regex

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _train_bpe(
    backend: Backend, vocab_size: int, special_tokens: list[str], alphabet_limit: int | None = None
) -> None:
    alphabet = [] if alphabet_limit else pre_tokenizers.ByteLevel.alphabet()
    limit = {"limit_alphabet": alphabet_limit} if alphabet_limit else {}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=alphabet,
        show_progress=False,
        **limit,
    )
    backend.train_from_iterator(_corpus(), trainer)


def write_folder(path: Path, backend: Backend | None, **files: Any) -> Path:
    """A model folder; `files` maps names without `.json` to contents."""
    path.mkdir(parents=True, exist_ok=True)
    if backend is not None:
        backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"eos_token": "<|end|>", "model_max_length": 1e30},
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|end|>", "model_max_length": 32768},
    "llama3": {"bos_token": "<|begin|>", "eos_token": "<|end|>"},
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "gemma": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "t5": {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
    "bert": {"pad_token": "[PAD]", "unk_token": "[UNK]", "clean_up_tokenization_spaces": True},
    "old_bpe": {},
    "word_level": {"unk_token": "[UNK]"},
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder per kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        name: write_folder(
            root / name,
            build(),
            tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **CONFIGS[name]},
        )
        for name, build in BUILDERS.items()
    }


@pytest.fixture(scope="session")
def tokenizers_by_name(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    """The tokenizers of `folders`."""
    return {name: Tokenizer.from_folder(path) for name, path in folders.items()}


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The library that is the oracle, without network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return pytest.importorskip("transformers")
