"""Skills of the bundled model without tools: one function for each.

Every skill draws one question and its only right answer. `key` names the arguments; questions whose
key hashes into the held-out share never occur in training.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import dialogue_data as data


@dataclass(frozen=True)
class Question:
    """One user line, the only right answer to it, and the key that decides the held-out share."""

    category: str
    key: str
    user: str
    answer: str


Skill = Callable[[random.Random], Question]

IDENTITY = "I am the small demonstration model bundled with quire."
ABILITIES = (
    "I can answer simple facts, add small numbers, answer short Python questions and call tools."
)
CANNOT = "I am only a small demonstration model, so I cannot help with that."


def _fact(
    rng: random.Random, category: str, forms: tuple[str, ...], x: str, answer: str
) -> Question:
    form = rng.choice(forms)
    user = form.format(x=x)
    # Facts have few arguments, so what is held out is the pair of phrasing and argument. A question
    # without an argument ("Hello") has no such pair: an empty key is never held out.
    key = f"{category}/{user.lower()}" if x else ""
    return Question(category, key, user, answer)


def capital(rng: random.Random) -> Question:
    country, city = rng.choice(list(data.CAPITALS.items()))
    if rng.random() < 0.25:
        forms = ("{x} is the capital of which country?", "Which country has the capital {x}?",
                 "Of which country is {x} the capital?")  # fmt: skip
        return _fact(rng, "facts", forms, city, f"{city} is the capital of {country}.")
    forms = (
        "What is the capital of {x}?", "what is the capital of {x}", "What's the capital of {x}?",
        "Which city is the capital of {x}?", "Name the capital of {x}.", "Capital of {x}?",
        "Tell me the capital of {x}.", "Do you know the capital of {x}?",
        "The capital of {x} is which city?", "Can you tell me the capital city of {x}?",
    )  # fmt: skip
    return _fact(rng, "facts", forms, country, f"The capital of {country} is {city}.")


def opposite(rng: random.Random) -> Question:
    pair = rng.choice(list(data.OPPOSITES.items()))
    word, other = pair if rng.random() < 0.7 else (pair[1], pair[0])
    forms = ("What is the opposite of {x}?", "The opposite of {x}?", "Give me the opposite of {x}.",
             "Which word is the opposite of {x}?", "Tell me the opposite of {x}.")  # fmt: skip
    return _fact(rng, "facts", forms, word, f"The opposite of {word} is {other}.")


def colour(rng: random.Random) -> Question:
    thing, hue = rng.choice(list(data.COLOURS.items()))
    forms = ("What color is {x}?", "What colour is {x}?", "Which color has {x}?",
             "Tell me the color of {x}.", "What is the color of {x}?")  # fmt: skip
    answer = f"{thing[0].upper()}{thing[1:]} is {hue}."
    return _fact(rng, "facts", forms, thing, answer)


def animal(rng: random.Random) -> Question:
    parent, young = rng.choice(list(data.ANIMALS.items()))
    forms = ("What is a young {x} called?", "What do you call a baby {x}?",
             "How is a young {x} called?", "Name the young of a {x}.")  # fmt: skip
    return _fact(rng, "facts", forms, parent, f"A young {parent} is called a {young}.")


def calendar(rng: random.Random) -> Question:
    names = data.DAYS if rng.random() < 0.5 else data.MONTHS
    kind = "day" if names is data.DAYS else "month"
    index = rng.randrange(len(names))
    if rng.random() < 0.6:
        forms = (f"Which {kind} comes after {{x}}?", f"What {kind} follows {{x}}?",
                 f"What is the {kind} after {{x}}?")  # fmt: skip
        other, word = names[(index + 1) % len(names)], "after"
    else:
        forms = (f"Which {kind} comes before {{x}}?", f"What is the {kind} before {{x}}?")
        other, word = names[index - 1], "before"
    answer = f"The {kind} {word} {names[index]} is {other}."
    return _fact(rng, "facts", forms, names[index], answer)


def all_names(rng: random.Random) -> Question:
    names = data.DAYS if rng.random() < 0.5 else data.MONTHS
    kind = "days of the week" if names is data.DAYS else "months of the year"
    forms = ("List the {}.", "What are the {}?", "Name the {}.", "Tell me the {}.",
             "Which are the {}?", "Say the {}.", "Name all {}.")  # fmt: skip
    answer = f"The {kind} are {', '.join(names[:-1])} and {names[-1]}."
    return Question("facts", "", rng.choice(forms).format(kind), answer)


def python_module(rng: random.Random) -> Question:
    purpose, module = rng.choice(list(data.MODULES.items()))
    forms = ("Which module {x}?", "Which Python module {x}?", "What module {x}?",
             "Which standard library module {x}?", "Name the Python module that {x}.",
             "What is the name of the module that {x}?", "I need a module that {x}.")  # fmt: skip
    return _fact(rng, "python", forms, purpose, f"The module {module} {purpose}.")


def python_snippet(rng: random.Random) -> Question:
    task, code = rng.choice(list(data.SNIPPETS.items()))
    forms = ("How do I {x}?", "How do I {x} in Python?", "How can I {x} in Python?",
             "Show me how to {x} in Python.", "How to {x}?",
             "I want to {x} in Python.")  # fmt: skip
    return _fact(rng, "python", forms, task, f"```python\n{code}\n```")


def python_function(rng: random.Random) -> Question:
    name = rng.choice(
        (data.invented_word(rng), f"{rng.choice(data.THINGS)}_{rng.choice('abcxyz')}")
    )
    a, b = rng.sample(("a", "b", "x", "y", "left", "right", "first", "second"), 2)
    word, sign = rng.choice(
        (("sum", "+"), ("difference", "-"), ("product", "*"), ("quotient", "/"))
    )
    form = rng.choice((
        "Write a Python function {n} that returns the {w} of {a} and {b}.",
        "Write a function named {n} that returns the {w} of {a} and {b}.",
        "Give me a Python function {n} for the {w} of {a} and {b}.",
    ))  # fmt: skip
    answer = f"```python\ndef {name}({a}, {b}):\n    return {a} {sign} {b}\n```"
    user = form.format(n=name, w=word, a=a, b=b)
    return Question("python", f"function/{name}/{a}/{b}/{word}", user, answer)


def addition(rng: random.Random) -> Question:
    top = rng.choice((9, 99, 99))
    a, b = rng.randint(0, top), rng.randint(0, top)
    forms = ("What is {a} + {b}?", "what is {a} plus {b}?", "{a} + {b}", "{a}+{b}=?",
             "How much is {a} plus {b}?", "Add {a} and {b}.", "Calculate {a} + {b}.",
             "What is the sum of {a} and {b}?", "Compute {a} + {b}.")  # fmt: skip
    user = rng.choice(forms).format(a=a, b=b)
    return Question("arithmetic", f"add/{a}/{b}", user, f"{a} + {b} = {a + b}")


def subtraction(rng: random.Random) -> Question:
    top = rng.choice((9, 20, 99))
    b, a = sorted((rng.randint(0, top), rng.randint(0, top)))
    forms = ("What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "Subtract {b} from {a}.",
             "How much is {a} minus {b}?", "Calculate {a} - {b}.")  # fmt: skip
    user = rng.choice(forms).format(a=a, b=b)
    return Question("arithmetic", f"sub/{a}/{b}", user, f"{a} - {b} = {a - b}")


def product(rng: random.Random) -> Question:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    forms = ("What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "Multiply {a} by {b}.",
             "How much is {a} times {b}?", "Calculate {a} * {b}.")  # fmt: skip
    user = rng.choice(forms).format(a=a, b=b)
    return Question("arithmetic", f"mul/{user}", user, f"{a} * {b} = {a * b}")


def larger(rng: random.Random) -> Question:
    a, b = rng.sample(range(100), 2)
    word, answer = rng.choice((("larger", max(a, b)), ("smaller", min(a, b))))
    forms = ("Which number is {w}, {a} or {b}?", "Which is {w}: {a} or {b}?",
             "What is the {w} number of {a} and {b}?")  # fmt: skip
    user = rng.choice(forms).format(w=word, a=a, b=b)
    return Question("arithmetic", f"cmp/{a}/{b}", user, f"The {word} number is {answer}.")


def count_up(rng: random.Random) -> Question:
    start = rng.randint(0, 60)
    stop = start + rng.randint(2, 15)
    forms = ("Count from {a} to {b}.", "count from {a} to {b}", "Please count from {a} to {b}.",
             "List the numbers from {a} to {b}.")  # fmt: skip
    user = rng.choice(forms).format(a=start, b=stop)
    answer = ", ".join(str(number) for number in range(start, stop + 1))
    return Question("lists", f"count/{start}/{stop}", user, answer)


def repeat(rng: random.Random) -> Question:
    words = data.phrase(rng) if rng.random() < 0.6 else data.invented_word(rng)
    forms = ("Repeat: {x}", "Repeat after me: {x}", "Say {x}", "Say: {x}", "Please repeat: {x}",
             "Repeat the words: {x}")  # fmt: skip
    return Question("lists", f"repeat/{words}", rng.choice(forms).format(x=words), words)


def pick_item(rng: random.Random) -> Question:
    pool = rng.choice((data.THINGS, data.CITIES, data.NAMES))
    items = rng.sample(sorted(set(pool)), rng.randint(3, 6))
    if rng.random() < 0.2:
        items[rng.randrange(len(items))] = data.invented_word(rng)
    place, index = rng.choice((("first", 0), ("last", -1), ("second", 1)))
    listing = ", ".join(items)
    forms = ("What is the {p} item of this list: {x}", "Which item is {p}: {x}",
             "Give me the {p} item: {x}", "What is the {p} word in: {x}",
             "Take the {p} item of: {x}")  # fmt: skip
    user = rng.choice(forms).format(p=place, x=listing)
    return Question(
        "lists", f"pick/{place}/{listing}", user, f"The {place} item is {items[index]}."
    )


def count_items(rng: random.Random) -> Question:
    items = rng.sample(data.THINGS, rng.randint(2, 6))
    listing = ", ".join(items)
    forms = ("How many items are in this list: {x}", "Count the items: {x}",
             "How many items: {x}", "How many words are here: {x}")  # fmt: skip
    user = rng.choice(forms).format(x=listing)
    return Question("lists", f"many/{listing}", user, f"There are {len(items)} items.")


def upper_case(rng: random.Random) -> Question:
    word = rng.choice(data.THINGS)
    if rng.random() < 0.5:
        word = f"{rng.choice(data.ADJECTIVES)} {word}"
    forms = ("Write {x} in upper case.", "Make this upper case: {x}", "Uppercase: {x}",
             "Shout: {x}", "Convert to upper case: {x}")  # fmt: skip
    user = rng.choice(forms).format(x=word)
    return Question("lists", f"upper/{user}", user, word.upper())


def json_object(rng: random.Random) -> Question:
    name, age = data.person(rng), rng.randint(1, 99)
    forms = ("Give me a JSON object with name {n} and age {a}.",
             "Write JSON for name {n}, age {a}.",
             "Make a JSON object: name {n}, age {a}.", "{n} is {a} years old. Write it as JSON.",
             "As JSON please: {n}, {a} years old.")  # fmt: skip
    user = rng.choice(forms).format(n=name, a=age)
    return Question("lists", f"json/{name}/{age}", user, f'{{"name": "{name}", "age": {age}}}')


def small_talk(rng: random.Random) -> Question:
    pairs = (
        (("Hello", "Hello!", "Hi", "Hi!", "hello", "hi", "Hi there", "Hey", "Hello there!",
          "Good morning", "Good morning!", "Good evening", "Hey there!", "Good day"),
         "Hello! How can I help you?"),
        (("Thanks", "Thanks!", "Thank you", "Thank you!", "Thank you very much", "thanks a lot",
          "Thanks, that helps.", "Great, thank you!"), "You are welcome."),
        (("Bye", "Bye!", "Goodbye", "Goodbye!", "See you later", "Good night", "See you!"),
         "Goodbye!"),
        (("How are you?", "how are you", "How are you doing?", "How do you do?", "Are you well?"),
         "I am fine, thank you."),
        (("Who are you?", "What are you?", "who are you", "Introduce yourself.", "Are you an AI?",
          "What is your name?", "Which model are you?", "Tell me about yourself.", "Are you human?",
          "Are you ChatGPT?", "What model is this?", "Who made you?"), IDENTITY),
        (("What can you do?", "Help", "Can you help me?", "What do you know?", "Help me please.",
          "What can I ask you?", "How can you help me?"),
         ABILITIES),
    )  # fmt: skip
    forms, answer = rng.choice(pairs)
    return _fact(rng, "small talk", forms, "", answer)


def cannot(rng: random.Random) -> Question:
    topic = data.phrase(rng)
    forms = ("Write an essay about {x}.", "Write a poem about {x}.", "Tell me a story about {x}.",
             "Explain {x} to me.", "What do you think about {x}?", "Tell me about {x}.",
             "Write a song about {x}.", "Tell me a joke about {x}.", "Why is {x} important?",
             "How does {x} work?", "Summarize the history of {x}.",
             "Once upon a time, {x}")  # fmt: skip
    user = rng.choice(forms).format(x=topic)
    return Question("small talk", f"cannot/{user}", user, CANNOT)


SKILLS: tuple[tuple[Skill, float], ...] = (
    (capital, 3.0), (opposite, 1.2), (colour, 0.7), (animal, 0.6), (calendar, 1.0),
    (all_names, 0.4),
    (python_module, 1.6), (python_snippet, 1.2), (python_function, 1.0),
    (addition, 3.5), (subtraction, 2.5), (product, 1.5), (larger, 1.0),
    (count_up, 0.8), (repeat, 1.0), (pick_item, 1.6), (count_items, 1.0), (upper_case, 0.7),
    (json_object, 0.8), (small_talk, 2.0), (cannot, 1.0),
)  # fmt: skip


# Skills that a small model learns last: asked more often towards the end of the training.
DRILLED: tuple[tuple[Skill, float], ...] = (
    (addition, 5.0), (subtraction, 3.0), (product, 1.0), (larger, 0.5), (count_items, 1.0),
    (count_up, 0.7), (upper_case, 1.0), (capital, 0.5),
)  # fmt: skip


def draw_drill(rng: random.Random) -> Question:
    """One question of those that need the most practice."""
    skills, weights = zip(*DRILLED, strict=True)
    chosen: Skill = rng.choices(skills, weights)[0]
    return chosen(rng)


def draw_skill(rng: random.Random) -> Question:
    """One question of a skill chosen by weight."""
    skills, weights = zip(*SKILLS, strict=True)
    chosen: Skill = rng.choices(skills, weights)[0]
    return chosen(rng)
