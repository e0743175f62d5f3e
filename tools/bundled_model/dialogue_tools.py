"""Tool tasks of the generated dialogues: a declared tool, a wish it fulfils, and the right call.

Names of tools and parameters vary, and some tools are put together from verbs, things and invented
words, so that a model can only be right by reading the declaration.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dialogue_data as data

Json = dict[str, Any]


@dataclass(frozen=True)
class ToolTask:
    """A tool, one wish, the arguments of the right call, its result and the closing sentence.

    Two tools of one `kind` could fulfil the same wish, so a dialogue declares at most one of them.
    """

    kind: str
    tool: Json
    user: str
    arguments: Json
    result: str
    answer: str

    @property
    def name(self) -> str:
        return self.tool["function"]["name"]

    @property
    def key(self) -> str:
        return f"tool/{sorted(map(str, self.arguments.values()))}"


Task = Callable[[random.Random], ToolTask]


def tool_spec(
    name: str, description: str, parameters: dict[str, str], optional: tuple[str, ...] = ()
) -> Json:
    """An OpenAI tool declaration; `parameters` maps a name to its JSON type."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": [key for key in parameters if key not in optional],
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def as_json(values: Json) -> str:
    """JSON as the chat template writes it: key order kept, spaces after commas and colons."""
    return json.dumps(values, ensure_ascii=False)


def say_result(values: Json) -> str:
    """The closing sentence for a result that has no sentence of its own."""
    return "The " + " and the ".join(f"{key} is {value}" for key, value in values.items()) + "."


def weather(rng: random.Random) -> ToolTask:
    key = rng.choice(("city", "location", "place"))
    name = rng.choice(("get_weather", "weather", "get_current_weather", "fetch_weather"))
    note = rng.choice(("Get the weather of a city.", "Get the current weather.", "Weather report",
                       "Get the current weather in a given location", ""))  # fmt: skip
    where = data.city(rng)
    arguments: Json = {key: where}
    parameters = {key: "string"}
    forms = ("What is the weather in {x}?", "What's the weather like in {x}?", "weather in {x}",
             "How is the weather in {x}?", "Tell me the weather in {x}.", "Is it warm in {x}?",
             "What is the weather in {x} today?", "Will it rain in {x}?", "How is it in {x} now?",
             "Weather for {x} please", "Can you check the weather in {x}?")  # fmt: skip
    user = rng.choice(forms).format(x=where)
    if rng.random() < 0.4:
        parameters["unit"] = "string"
        if rng.random() < 0.5:
            arguments["unit"] = unit = rng.choice(("celsius", "fahrenheit"))
            user = user.rstrip("?.") + f" in {unit}?"
    degrees, sky = rng.randint(-9, 38), rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy"))
    result = as_json({"temperature": degrees, "condition": sky})
    answer = f"In {where} it is {degrees} degrees and {sky}."
    return ToolTask(
        "weather", tool_spec(name, note, parameters, ("unit",)), user, arguments, result, answer
    )


def clock(rng: random.Random) -> ToolTask:
    key = rng.choice(("city", "timezone", "place", "location"))
    name = rng.choice(("get_time", "current_time", "get_current_time", "clock"))
    where = data.city(rng)
    forms = ("What time is it in {x}?", "Tell me the time in {x}.", "How late is it in {x}?",
             "What is the time in {x}?", "time in {x}", "Current time in {x}?")  # fmt: skip
    now = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    tool = tool_spec(name, rng.choice(("Get the current time.", "Time of a city")), {key: "string"})
    answer = f"In {where} it is {now}."
    return ToolTask(
        "clock",
        tool,
        rng.choice(forms).format(x=where),
        {key: where},
        as_json({"time": now}),
        answer,
    )


def arithmetic(rng: random.Random) -> ToolTask:
    verb, sign, phrases = rng.choice((
        ("add", "+", ("Add {a} and {b}.", "What is {a} plus {b}?", "What is {a} + {b}?",
                      "Use the tool to add {a} and {b}.")),
        ("multiply", "*", ("Multiply {a} by {b}.", "What is {a} times {b}?", "What is {a} * {b}?")),
        ("subtract", "-", ("Subtract {b} from {a}.", "What is {a} minus {b}?",
                           "What is {a} - {b}?")),
    ))  # fmt: skip
    a, b = rng.randint(2, rng.choice((99, 999))), rng.randint(2, rng.choice((99, 999)))
    value = {"+": a + b, "*": a * b, "-": a - b}[sign]
    user = rng.choice(phrases).format(a=a, b=b)
    if rng.random() < 0.4:
        name = rng.choice(("calculator", "calculate", "evaluate"))
        tool = tool_spec(name, "Evaluate an arithmetic expression.", {"expression": "string"})
        arguments: Json = {"expression": f"{a} {sign} {b}"}
    else:
        left, right = rng.choice((("a", "b"), ("x", "y"), ("first", "second")))
        kind = rng.choice(("integer", "number"))
        name = rng.choice((verb, f"{verb}_numbers"))
        tool = tool_spec(name, f"{verb.capitalize()} two numbers.", {left: kind, right: kind})
        arguments = {left: a, right: b}
    result = str(value) if rng.random() < 0.4 else as_json({"result": value})
    return ToolTask("arithmetic", tool, user, arguments, result, f"The result is {value}.")


def search(rng: random.Random) -> ToolTask:
    key = rng.choice(("query", "q", "text"))
    name = rng.choice(("search", "web_search", "search_web", "find_documents"))
    query = data.phrase(rng)
    forms = ("Search for {x}.", "Search the web for {x}.", "Find pages about {x}.",
             "Look up {x}.", "Please search for {x}", "I want to read about {x}.")  # fmt: skip
    found, title = rng.randint(1, 90), data.phrase(rng).capitalize()
    tool = tool_spec(name, rng.choice(("Search the web.", "Find documents.")), {key: "string"})
    answer = f'I found {found} pages, the first is "{title}".'
    result = as_json({"count": found, "title": title})
    return ToolTask("search", tool, rng.choice(forms).format(x=query), {key: query}, result, answer)


def message(rng: random.Random) -> ToolTask:
    name = rng.choice(("send_message", "send_email", "send_mail", "message"))
    whom, what = rng.choice((("to", "text"), ("recipient", "body"), ("name", "message")))
    who, text = data.person(rng), data.phrase(rng)
    forms = ("Send {n} the message: {t}", "Tell {n}: {t}", "Write to {n}: {t}",
             "Send a message to {n} that says {t}", "Message {n}: {t}")  # fmt: skip
    tool = tool_spec(name, "Send a message to a person.", {whom: "string", what: "string"})
    user = rng.choice(forms).format(n=who, t=text)
    result = as_json({"status": "sent"})
    return ToolTask(
        "message", tool, user, {whom: who, what: text}, result, f"I sent the message to {who}."
    )


def reminder(rng: random.Random) -> ToolTask:
    name = rng.choice(("set_reminder", "add_reminder", "remind", "create_reminder"))
    day, text = rng.choice(data.DAYS), data.phrase(rng)
    what = rng.choice(("text", "title", "note"))
    forms = ("Remind me on {d} about {t}.", "Set a reminder for {d}: {t}",
             "On {d} remind me of {t}.",
             "I need a reminder for {t} on {d}.")  # fmt: skip
    tool = tool_spec(name, "Set a reminder.", {what: "string", "day": "string"})
    user = rng.choice(forms).format(d=day, t=text)
    answer = f"I will remind you on {day}."
    return ToolTask(
        "reminder", tool, user, {what: text, "day": day}, as_json({"status": "ok"}), answer
    )


def translate(rng: random.Random) -> ToolTask:
    name = rng.choice(("translate", "translate_text"))
    language = rng.choice(("French", "German", "Spanish", "Italian", "Polish", "Greek", "Dutch"))
    target = rng.choice(("language", "target", "to"))
    text, foreign = data.phrase(rng), f"{data.invented_word(rng)} {data.invented_word(rng)}"
    forms = ("Translate {t} to {x}.", "How do you say {t} in {x}?", "What is {t} in {x}?",
             "Translate into {x}: {t}")  # fmt: skip
    tool = tool_spec(name, "Translate a text.", {"text": "string", target: "string"})
    user = rng.choice(forms).format(t=text, x=language)
    arguments = {"text": text, target: language}
    answer = f'In {language} it is "{foreign}".'
    return ToolTask("translate", tool, user, arguments, as_json({"translation": foreign}), answer)


def lamp(rng: random.Random) -> ToolTask:
    name = rng.choice(("set_lamp", "switch_light", "light", "control_light"))
    room = rng.choice(("kitchen", "hall", "garden", "cellar", "office", data.invented_word(rng)))
    state = rng.choice(("on", "off"))
    forms = ("Turn {s} the light in the {r}.", "Turn the {r} light {s}.",
             "Switch {s} the {r} lamp.",
             "Light {s} in the {r} please.")  # fmt: skip
    tool = tool_spec(name, "Switch a light on or off.", {"room": "string", "state": "string"})
    user = rng.choice(forms).format(s=state, r=room)
    result = as_json({"status": "ok"})
    answer = f"The light in the {room} is {state}."
    return ToolTask("lamp", tool, user, {"room": room, "state": state}, result, answer)


def price(rng: random.Random) -> ToolTask:
    name = rng.choice(("get_price", "stock_price", "get_stock_price", "price"))
    key = rng.choice(("symbol", "item", "name", "ticker"))
    item = data.invented_word(rng).upper()[:4] if rng.random() < 0.5 else rng.choice(data.THINGS)
    forms = ("What is the price of {x}?", "How much does {x} cost?", "price of {x}",
             "Tell me the price of {x}.", "Look up the price of {x}.")  # fmt: skip
    value = rng.choice((rng.randint(1, 999), round(rng.uniform(1, 99), 2)))
    tool = tool_spec(name, "Get the price of an item.", {key: "string"})
    result = as_json({"price": value})
    return ToolTask(
        "price",
        tool,
        rng.choice(forms).format(x=item),
        {key: item},
        result,
        f"The price is {value}.",
    )


def read_file(rng: random.Random) -> ToolTask:
    name = rng.choice(("read_file", "open_file", "cat", "get_file"))
    key = rng.choice(("path", "filename", "file"))
    stem = rng.choice((data.invented_word(rng), rng.choice(data.THINGS)))
    path = f"{stem}.{rng.choice(('txt', 'py', 'md', 'json', 'csv'))}"
    if rng.random() < 0.3:
        path = f"{rng.choice(data.THINGS)}/{path}"
    forms = ("Read the file {x}.", "Show me {x}.", "What is in {x}?", "Open {x}", "Print {x}.")
    content = data.phrase(rng)
    tool = tool_spec(name, "Read a file.", {key: "string"})
    answer = f"The file says: {content}"
    return ToolTask(
        "read_file", tool, rng.choice(forms).format(x=path), {key: path}, content, answer
    )


_VERBS = ("create", "delete", "update", "find", "book", "start", "stop", "count", "list", "get",
          "order", "rename", "check", "close", "lock", "move", "print", "show", "buy")  # fmt: skip
_NOUNS = ("ticket", "user", "room", "order", "task", "note", "file", "table", "event", "song",
          "job",
          "account", "album", "page", "door", "server", "folder", "flight", "invoice")  # fmt: skip


_KEYS = ("title", "name", "id", "count", "size", "color", "owner", "date", "level", "label")
_NUMBER_KEYS = frozenset({"id", "count", "size", "level"})


def _drawn_value(rng: random.Random, key: str) -> str | int:
    """A value that fits the name of a parameter."""
    if key in _NUMBER_KEYS:
        return rng.randint(1, 999)
    if key == "color":
        return rng.choice(("red", "blue", "green", "black", "white", "yellow"))
    if key == "owner":
        return data.person(rng)
    if key == "date":
        return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return data.phrase(rng) if rng.random() < 0.5 else data.invented_word(rng)


def built(rng: random.Random) -> ToolTask:
    """A tool nobody has seen: a verb, a thing, and one to three parameters named in the wish."""
    verb = rng.choice(_VERBS) if rng.random() < 0.8 else data.invented_word(rng)
    noun = rng.choice(_NOUNS) if rng.random() < 0.8 else data.invented_word(rng)
    keys = rng.sample((*_KEYS, data.invented_word(rng)), rng.choice((1, 1, 2, 2, 3)))
    arguments: Json = {key: _drawn_value(rng, key) for key in keys}
    parameters = {key: "integer" if key in _NUMBER_KEYS else "string" for key in keys}
    pairs = [f"{key} {value}" for key, value in arguments.items()]
    listing = " and ".join([", ".join(pairs[:-1]), pairs[-1]]) if len(pairs) > 1 else pairs[0]
    forms = ("{v} the {n} with {x}.", "Please {v} a {n} with {x}.", "{v} {n}: {x}",
             "I want to {v} a {n} with {x}.", "Can you {v} the {n} with {x}?")  # fmt: skip
    user = rng.choice(forms).format(v=verb, n=noun, x=listing)
    shown = rng.random()
    note = f"{verb.capitalize()} a {noun}." if shown < 0.7 else ""
    declared = list(parameters)
    rng.shuffle(declared)
    tool = tool_spec(f"{verb}_{noun}", note, {key: parameters[key] for key in declared})
    if rng.random() < 0.5:
        values: Json = {"status": rng.choice(("ok", "done", "failed", "open", "closed"))}
    else:
        values = {rng.choice((f"{noun}_id", "number", "total")): rng.randint(1, 9999)}
        if rng.random() < 0.4:
            values["status"] = rng.choice(("ok", "done", "new"))
    user = user[0].upper() + user[1:]
    return ToolTask(f"{verb} {noun}", tool, user, arguments, as_json(values), say_result(values))


TASKS: tuple[tuple[Task, float], ...] = (
    (weather, 2.5), (clock, 1.0), (arithmetic, 1.6), (search, 1.3), (message, 1.2), (reminder, 1.0),
    (translate, 1.0), (lamp, 0.8), (price, 1.0), (read_file, 1.0), (built, 3.5),
)  # fmt: skip


def draw_task(rng: random.Random) -> ToolTask:
    """One tool task of a kind chosen by weight."""
    tasks, weights = zip(*TASKS, strict=True)
    chosen: Task = rng.choices(tasks, weights)[0]
    return chosen(rng)
