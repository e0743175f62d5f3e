"""Measured choices of products, kept on disk."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.ops.linear.plain.tiles import Tiles

__all__ = ["ChoiceCache", "Choices"]

_log = logging.getLogger("quire.ops.linear.plain")

Choices = Mapping[int, Tiles | None]
"""Winners by number of rows (1, 2, 4, … `MAX_FEW_ROWS`): the cut of the product in Triton, or None
for the vendor's product."""


class ChoiceCache:
    """One JSON file per environment, so measurements by another GPU, torch or Triton are not read.
    A file that cannot be read counts as empty and is replaced. A file that cannot be written costs
    a measurement at the next start. Both are logged once.

    environment: facts that the measurements depend on, such as names and versions.
    """

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self._path = path
        self._environment = dict(environment)
        self._known = self._read()

    def get(self, name: str) -> Choices | None:
        """Return the measured choices for the matrix `name`, or None."""
        return self._known.get(name)

    def put(self, name: str, choices: Choices) -> None:
        """Keep a choice, also for processes that start later."""
        self._known = {**self._read(), **self._known, name: choices}
        document = {
            "environment": self._environment,
            "choices": {name: _encoded(choices) for name, choices in self._known.items()},
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, suffix=".tmp", delete=False
            ) as file:
                json.dump(document, file, indent=1)
            os.replace(file.name, self._path)  # a reader sees either the old file or the new one
        except OSError as error:
            _log.warning("Measured matrix products are not kept: %s.", error)

    def _read(self) -> dict[str, Choices]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            if document["environment"] != self._environment:
                return {}
            return {name: _decoded(each) for name, each in document["choices"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning(
                "%s is ignored, and matrix products are measured again: %s.",
                self._path,
                str(error) or type(error).__name__,
            )
            return {}


def _encoded(choices: Choices) -> dict[str, Any]:
    return {str(rows): tiles and asdict(tiles) for rows, tiles in choices.items()}


def _decoded(stored: Mapping[str, Any]) -> Choices:
    """Raises what a document of another shape makes it raise."""
    return {int(rows): None if each is None else _tiles(each) for rows, each in stored.items()}


def _tiles(stored: Mapping[str, Any]) -> Tiles:
    if not all(isinstance(value, int) and value > 0 for value in stored.values()):
        raise ValueError(f"{stored} are no tiles")
    return Tiles(**stored)
