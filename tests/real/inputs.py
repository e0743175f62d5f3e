"""Texts, conversations, prompts and questions that quire and other engines are given."""

from __future__ import annotations

import random

__all__ = ["CONVERSATIONS", "PROMPTS", "QUESTIONS", "texts"]

_PIECES = (  # noqa: SIM905  separated by ¦
    "the quick brown fox¦I'll¦they're¦don't¦naïve café¦Zürich¦straße¦'s¦'S¦CamelCase¦ALLCAPS¦"
    "  ¦   ¦\n¦\n\n¦\r\n¦\t¦\t\t¦ \n ¦\u00a0¦\u200b¦\u3000¦         ¦                 ¦"
    "def f(x: int) -> str:\n    return f'{x!r}'\n¦#include <stdio.h>\n¦x += 1;  // y¦</div>¦"
    "{'a': [1, 2.5e-3, null]}¦SELECT * FROM t WHERE a<>b;¦https://example.org/a?b=c%20d#e¦"
    "🙂¦👩‍👩‍👧‍👦¦🇩🇪🇫🇷¦❤️¦𝕳𝖊𝖑𝖑𝖔¦𓀀¦½¦Ⅷ¦²¦٣٤¦१२३¦0123456789¦1,234.56¦3.14159¦"
    "你好,世界¦日本語のテキスト¦カタカナ¦한국어 문장¦สวัสดี¦مرحبا بالعالم¦שלום¦Привет, мир¦Ελληνικά¦"
    "e\u0301¦ạ̈́¦ﬁ¦İstanbul¦!!!¦...¦—¦“quoted”¦(a)[b]{c}¦\\n¦\x7f¦\x01¦_¦__init__"
).split("¦")


def texts(special_tokens: list[str], count: int = 2000) -> list[str]:
    """Return the same texts each time; about one in ten holds one of `special_tokens`."""
    draw = random.Random(20)
    found = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 8)):
            parts.append(draw.choice(_PIECES))
            parts.append(draw.choice(("", "", " ", " ", "\n")))
        if special_tokens and draw.random() < 0.1:
            parts.insert(draw.randrange(len(parts)), draw.choice(special_tokens))
        found.append("".join(parts))
    return found


CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2 + 2? "}],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another\n\none, 請."},
    ],
]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "To make a good cup of coffee, you first",
    "In 1969, the first people to land on the Moon",
    "Water boils at a lower temperature on mountains because",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "The recipe calls for two eggs, a cup of flour and",
    "import numpy as np\n\nx = np.",
    "A list of European countries:\n1.",
    "Photosynthesis is the process by which",
    "The old man looked at the sea and said,",
    "SELECT name, age FROM users WHERE",
    "The main difference between a virus and a bacterium is",
    "Shakespeare wrote many plays, including",
    "Today's weather forecast:",
    "An electric motor works by",
    "The quick brown fox",
]

QUESTIONS = [
    "What is the capital of Italy?",
    "How do plants make their food?",
    "Write a short poem about rain.",
    "Why is the sky blue?",
    "Explain what a prime number is.",
    "What should I pack for a week at the beach?",
    "How does a bicycle stay upright?",
    "Name three inventions of the nineteenth century.",
    "What is the difference between weather and climate?",
    "Give me a recipe for pancakes.",
]
