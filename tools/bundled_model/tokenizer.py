"""Train the byte-level BPE tokenizer on the corpus and on a sample of the dialogues.

Run from the repository root: python tools/bundled_model/tokenizer.py
Writes tokenizer.json, tokenizer_config.json and chat_template.jinja of the bundled model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import Corpus, load_corpus
from dialogues import BOS, END, EOS, PAD, SPECIAL_TOKENS, make_dialogue, render
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
SAMPLE_DIALOGUES = 12_000
BUNDLED = Path(__file__).resolve().parents[2] / "src" / "quire" / "bundled"
# Words with their leading space, single digits (so that numbers can be copied and added digit by
# digit), runs of signs, and white space; a run before a word leaves its last space to the word.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|tools|>' -}}
{%- for tool in tools -%}
{%- set f = tool.function if tool.function is defined else tool -%}
{%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- f.name + '(' -}}
{%- if f.parameters and f.parameters.properties -%}
{%- set required = f.parameters.required or [] -%}
{%- for name, schema in f.parameters.properties.items() -%}
{%- if not loop.first -%}{{- ', ' -}}{%- endif -%}
{{- name + ('' if name in required else '?') + ': ' + (schema.type | default('any') | string) -}}
{%- endfor -%}
{%- endif -%}
{{- ')' -}}
{%- if f.description -%}{{- ' ' + f.description -}}{%- endif -%}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}
{%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>' + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function if call.function is defined else call -%}
{{- '<|tool_call|>{"name": ' + (f.name | tojson) + ', "arguments": ' -}}
{{- (f.arguments if f.arguments is string else f.arguments | tojson) + '}' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|tool|>' + text(message.content) + '<|end|>' -}}
{%- elif message.role in ('system', 'developer') -%}
{{- '<|system|>' + text(message.content) + '<|end|>' -}}
{%- else -%}
{{- '<|user|>' + text(message.content) + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def training_texts(corpus: Corpus) -> Iterator[str]:
    """Library text and, without their markers, a sample of dialogues."""
    for document in corpus.train:
        yield document.text
    rng = random.Random("tokenizer")
    for _ in range(SAMPLE_DIALOGUES):
        dialogue = make_dialogue(rng, held_out=False, with_tools=rng.random() < 0.5)
        for text, _ in render(dialogue):
            if text.endswith(END):
                yield text.removesuffix(END).split("|>")[-1]


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """A tokenizer with the special tokens first (id 0 is the padding)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(corpus), trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """Return the settings that `transformers` reads beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }


def main() -> None:
    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus)
    BUNDLED.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(BUNDLED / "tokenizer.json"))
    config = json.dumps(tokenizer_config(), indent=2) + "\n"
    (BUNDLED / "tokenizer_config.json").write_text(config, encoding="utf-8")
    (BUNDLED / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    sample = "".join(document.text for document in corpus.held_out)
    tokens = len(tokenizer.encode(sample, add_special_tokens=False).ids)
    print(
        f"{tokenizer.get_vocab_size()} tokens, {len(sample.encode()) / tokens:.3f} bytes per token"
    )


if __name__ == "__main__":
    main()
