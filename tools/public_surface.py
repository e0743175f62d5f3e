"""Write or compare what quire offers: names, settings, flags, routes, bodies and metrics.

    PYTHONPATH=OLD/src python -m tools.public_surface --write /tmp/before.json
    python -m tools.public_surface --compare /tmp/before.json

OLD is a checkout of the old commit. The second command prints one line for each difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import quire

__all__ = ["differences", "main", "surface"]

LIMIT_S = 120.0
SETTINGS = ("quire.config.settings:EngineSettings", "quire.server.settings:ServerSettings")
MODULES = (
    "quire", "quire.outputs", "quire.inputs", "quire.sampling_params", "quire.hooks", "quire.lora",
    "quire.bundled", "quire.training", "quire.protocol",
)  # fmt: skip
_COMMAND = re.compile(r"^ {4}([a-z][a-z-]*)(?: |$)", re.MULTILINE)
_FLAG = re.compile(r"^ {2}((?:-|--)[a-z].*)$", re.MULTILINE)
_METRIC = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)


def main() -> int:
    """Write what is offered, or compare it. 1 when something is missing or differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", type=Path, metavar="FILE")
    mode.add_argument("--compare", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = surface()
    if options.write is not None:
        options.write.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
        print(f"{len(found)} entries of {Path(quire.__file__).parent} in {options.write}")
        return 0
    before = cast("dict[str, str]", json.loads(options.compare.read_text()))
    lines = list(differences(before, found))
    print(*lines, f"{len(before)} entries before, {len(found)} now", sep="\n")
    return 1 if any(not line.startswith("new ") for line in lines) else 0


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each entry that is gone, differs or is new, in this order."""
    yield from (f"gone {name}: {before[name]}" for name in sorted(before.keys() - now.keys()))
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            yield f"differs {name}: {before[name]} before, {now[name]} now"
    yield from (f"new {name}: {now[name]}" for name in sorted(now.keys() - before.keys()))


def surface() -> dict[str, str]:
    """Return all entries by name."""
    return {**_names(), **_settings(), **_flags(), **_served()}


def _names() -> dict[str, str]:
    modules = {name: importlib.import_module(name) for name in MODULES}
    return {f"name {at}.{name}": "" for at, module in modules.items() for name in module.__all__}


def _settings() -> dict[str, str]:
    found: dict[str, str] = {}
    for place in SETTINGS:
        module, _, name = place.partition(":")
        for each in dataclasses.fields(getattr(importlib.import_module(module), name)):
            default = "" if each.default is dataclasses.MISSING else repr(each.default)
            found[f"setting {name}.{each.name}"] = f"{each.type} = {default}"
    return found


def _flags() -> dict[str, str]:
    """Commands with what follows their flags, and flags with values; the words may change."""
    found: dict[str, str] = {}
    pending = [(name,) for name in _COMMAND.findall(_help())]
    while pending:
        command = pending.pop()
        text = _help(*command)
        usage = text.partition("\n")[0]
        found[f"command {' '.join(command)}"] = usage.rpartition("] ")[2]
        if usage.endswith(" ..."):
            pending += [(*command, name) for name in _COMMAND.findall(text)]
        for line in _FLAG.findall(text):
            flag, values = _flag_of(line)
            found[f"flag {' '.join(command)} {flag}"] = values
    return found


def _flag_of(line: str) -> tuple[str, str]:
    """Return the long name of a flag, and its whole line without the help."""
    stated = re.split(r" {2,}", line)[0]
    names = re.findall(r"--[a-z0-9][a-z0-9-]*", stated) or [stated]
    return names[0], stated


def _help(*command: str) -> str:
    environment = {**os.environ, "COLUMNS": "10000"}
    return subprocess.run(
        [sys.executable, "-m", "quire", *command, "--help"],
        env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S,
    ).stdout  # fmt: skip


def _served() -> dict[str, str]:
    """Routes, bodies and answers of /openapi.json, and names of /metrics."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with TemporaryDirectory() as data:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", "--port", str(port), "--data-dir", data],
            stderr=subprocess.DEVNULL,
        )
        try:
            _read(port, "/health")
            document: dict[str, Any] = json.loads(_read(port, "/openapi.json"))
            metrics = _METRIC.findall(_read(port, "/metrics"))
        finally:
            process.terminate()
            process.wait(LIMIT_S)
    found = {f"metric {name}": kind for name, kind in metrics}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            statuses = " ".join(sorted(operation["responses"]))
            found[f"route {method.upper()} {path}"] = statuses
    for name, schema in document["components"]["schemas"].items():
        for field, each in schema.get("properties", {}).items():
            found[f"field {name}.{field}"] = json.dumps(_without_words(each), sort_keys=True)
    return found


def _without_words(schema: Any) -> Any:
    """Return a schema without titles and descriptions."""
    if isinstance(schema, dict):
        items = cast("dict[str, Any]", schema).items()
        words = ("title", "description")
        return {key: _without_words(each) for key, each in items if key not in words}
    if isinstance(schema, list):
        return [_without_words(each) for each in cast("list[Any]", schema)]
    return schema


def _read(port: int, path: str) -> str:
    """Return the answer with status 200; wait for the server until then."""
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT_S) as got:
                return got.read().decode()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
