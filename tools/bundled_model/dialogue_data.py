"""Word lists of the generated dialogues: facts with one answer, names, and invented words."""

from __future__ import annotations

import random

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Iceland": "Reykjavik", "Ireland": "Dublin", "Poland": "Warsaw",
    "Austria": "Vienna", "Hungary": "Budapest", "Greece": "Athens", "Turkey": "Ankara",
    "Russia": "Moscow", "Ukraine": "Kyiv", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Serbia": "Belgrade", "Croatia": "Zagreb", "Slovenia": "Ljubljana", "Slovakia": "Bratislava",
    "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius", "Belgium": "Brussels",
    "Switzerland": "Bern", "Albania": "Tirana", "Egypt": "Cairo", "Morocco": "Rabat",
    "Kenya": "Nairobi", "Ghana": "Accra", "Ethiopia": "Addis Ababa", "Senegal": "Dakar",
    "Tunisia": "Tunis", "Uganda": "Kampala", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Nepal": "Kathmandu", "Vietnam": "Hanoi", "Thailand": "Bangkok",
    "Indonesia": "Jakarta", "Mongolia": "Ulaanbaatar", "Iran": "Tehran", "Iraq": "Baghdad",
    "Jordan": "Amman", "Lebanon": "Beirut", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago",
    "Peru": "Lima", "Colombia": "Bogota", "Ecuador": "Quito", "Uruguay": "Montevideo",
    "Australia": "Canberra", "New Zealand": "Wellington",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "open": "closed",
    "early": "late", "light": "dark", "old": "new", "hard": "soft", "wet": "dry", "full": "empty",
    "happy": "sad", "strong": "weak", "rich": "poor", "long": "short", "clean": "dirty",
    "loud": "quiet", "near": "far", "left": "right", "true": "false", "up": "down", "day": "night",
    "first": "last", "inside": "outside", "deep": "shallow", "thick": "thin",
}  # fmt: skip

COLOURS = {
    "grass": "green", "snow": "white", "blood": "red", "coal": "black", "a banana": "yellow",
    "a lemon": "yellow", "a clear sky": "blue", "a ripe tomato": "red", "chocolate": "brown",
    "a carrot": "orange", "milk": "white", "a frog": "green", "the sea": "blue", "a raven": "black",
}  # fmt: skip

ANIMALS = {
    "dog": "puppy",
    "cat": "kitten",
    "cow": "calf",
    "horse": "foal",
    "sheep": "lamb",
    "goat": "kid",
    "hen": "chick",
    "duck": "duckling",
    "bear": "cub",
    "goose": "gosling",
}

MODULES = {
    "reads and writes JSON": "json", "reads CSV files": "csv",
    "handles dates and times": "datetime",
    "makes random numbers": "random", "works with regular expressions": "re",
    "parses command line arguments": "argparse", "starts other programs": "subprocess",
    "compresses data with gzip": "gzip", "reads ZIP archives": "zipfile",
    "reads tar archives": "tarfile", "talks to SQLite databases": "sqlite3",
    "has square roots and sines": "math", "has exact fractions": "fractions",
    "runs code in threads": "threading", "has coroutines and event loops": "asyncio",
    "writes log messages": "logging", "computes hashes": "hashlib", "copies files": "shutil",
    "makes temporary files": "tempfile", "handles paths as objects": "pathlib",
    "has unit tests": "unittest", "has data classes": "dataclasses",
    "has abstract base classes": "abc", "encodes bytes as base64": "base64",
    "counts things in a dictionary": "collections", "keeps a heap": "heapq",
    "opens network sockets": "socket", "prints data prettily": "pprint", "has enumerations": "enum",
}  # fmt: skip

SNIPPETS = {
    "open a file": 'with open("file.txt") as f:\n    text = f.read()',
    "read a file line by line": (
        'with open("file.txt") as f:\n    for line in f:\n        print(line)'
    ),
    "write a file": 'with open("file.txt", "w") as f:\n    f.write("text")',
    "sort a list": "items.sort()",
    "reverse a list": "items.reverse()",
    "add an item to a list": "items.append(item)",
    "find the length of a list": "len(items)",
    "join strings with commas": '", ".join(strings)',
    "split a string into words": "text.split()",
    "make a string upper case": "text.upper()",
    "parse JSON": "import json\n\ndata = json.loads(text)",
    "print JSON": "import json\n\nprint(json.dumps(data))",
    "loop over a dictionary": "for key, value in mapping.items():\n    print(key, value)",
    "catch an exception": "try:\n    work()\nexcept ValueError as error:\n    print(error)",
    "get the current time": "import datetime\n\nnow = datetime.datetime.now()",
    "pick a random item": "import random\n\nitem = random.choice(items)",
    "wait for one second": "import time\n\ntime.sleep(1)",
    "remove duplicates from a list": "unique = list(dict.fromkeys(items))",
}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip

NAMES = (
    "Ana", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Klara",
    "Leo", "Maria", "Nils", "Olga", "Paul", "Rosa", "Simon", "Tina", "Victor", "Wanda", "Xenia",
    "Yusuf", "Zoe", "Alice", "Bob", "Chen", "Dana", "Erik", "Fatima", "Hugo", "Ines", "John",
    "Kim", "Lena", "Marco", "Nora", "Omar", "Priya", "Ravi", "Sofia", "Tom", "Uma", "Mary",
)  # fmt: skip

CITIES = (
    *CAPITALS.values(), "London", "New York", "Boston", "Chicago", "San Francisco", "Seattle",
    "Toronto", "Sydney", "Melbourne", "Munich", "Hamburg", "Milan", "Naples", "Barcelona", "Porto",
    "Zurich", "Geneva", "Lyon", "Mumbai", "Shanghai", "Osaka", "Kyoto", "Seoul", "Singapore",
    "Dubai", "Istanbul", "Amsterdam", "Prague", "Paris", "Los Angeles", "Dallas", "Denver",
)  # fmt: skip

THINGS = (
    "apple", "pear", "plum", "cherry", "lemon", "bread", "milk", "cheese", "butter", "sugar",
    "salt", "rice", "tea", "coffee", "book", "pen", "lamp", "chair", "table", "door", "window",
    "house", "river", "stone", "tree", "flower", "bird", "fish", "horse", "cat", "dog", "boat",
    "car", "train", "bike", "road", "bridge", "cloud", "rain", "wind", "star", "moon", "sun",
    "fire", "gold", "iron", "paper", "box", "bag", "key", "clock", "phone", "shirt", "shoe", "hat",
)  # fmt: skip

TOPICS = (
    "solar power", "black holes", "Roman history", "jazz music", "electric cars", "bread recipes",
    "chess openings", "rain forests", "deep learning", "old maps", "wind energy", "green tea",
    "the moon landing", "cheap flights", "running shoes", "mountain bikes", "garden birds",
    "paper planes", "sea turtles", "steam engines", "coffee beans", "sorting algorithms",
    "cat food", "language models", "water filters", "winter coats", "city parks", "star maps",
)  # fmt: skip

ADJECTIVES = (
    "red", "blue", "green", "small", "big", "old", "new", "quiet", "bright", "dark", "cheap",
    "fast", "slow", "soft", "broken", "open", "empty", "early", "late", "happy",
)  # fmt: skip

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "tr", "st", "pl")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_CODAS = ("", "", "n", "r", "l", "s", "t", "k", "m")


def invented_word(rng: random.Random) -> str:
    """A pronounceable word that no list contains, so that only copying can answer."""
    syllables = rng.randint(2, 3)
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)
    )


def person(rng: random.Random) -> str:
    """A first name: mostly a common one, sometimes an invented one."""
    return rng.choice(NAMES) if rng.random() < 0.75 else invented_word(rng).capitalize()


def city(rng: random.Random) -> str:
    """A city: mostly a real one, sometimes an invented one."""
    return rng.choice(CITIES) if rng.random() < 0.75 else invented_word(rng).capitalize()


def phrase(rng: random.Random) -> str:
    """A short free text: a topic, some words, or an adjective with a thing."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(TOPICS)
    if kind < 0.7:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"
    if kind < 0.85:
        return f"{invented_word(rng)} {rng.choice(THINGS)}"
    return " ".join(rng.sample(THINGS, 2))
