"""Items of an input that name items of earlier answers instead of repeating them."""

from __future__ import annotations

from collections.abc import Callable

from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.requests.places import Fields, string_of
from quire.server.responses.items import response_of

__all__ = ["Answers", "with_referenced"]

Answers = Callable[[str], tuple[list[Fields], int]]
"""Gives the output of a response by its id, and the bytes of its items. RefusedError 404 if there
is none."""


def with_referenced(items: list[Fields], answers: Answers, limits: Limits) -> list[Fields]:
    """Return items with those of earlier answers in place of references. Raises RefusedError, 404
    for an item that is not found, and if they are longer than any request could be."""
    known: dict[str, Fields] = {}
    read: set[str] = set()
    num_bytes = 0
    found: list[Fields] = []
    for index, item in enumerate(items):
        if item.get("type") != "item_reference":
            found.append(item)
            continue
        item_id = string_of(item, "id", f"input[{index}]")
        response_id = response_of(item_id)
        if response_id is not None and response_id not in read:
            try:
                output, size = answers(response_id)
            except RefusedError:
                raise _missing(item_id) from None
            num_bytes += size
            if num_bytes > limits.max_body_bytes:
                raise RefusedError(
                    f"input refers to items of responses with more than {limits.max_body_bytes} "
                    "bytes (max_body_bytes). Refer to less of the conversation.",
                    param="input",
                )
            read.add(response_id)
            known |= {each["id"]: each for each in output}
        if item_id not in known:
            raise _missing(item_id)
        # Each stands once in a conversation, so an item that is found is used up.
        found.append(known.pop(item_id))
    return found


def _missing(item_id: str) -> RefusedError:
    """Return the error of a reference to nothing, or to what the input has already."""
    return RefusedError(
        f"There is no item {item_id[:80]!r} to refer to. Its response was made by another key, was "
        "not stored, is deleted, or has made room for newer ones; or input refers to it twice. "
        "Send the item itself.",
        status=404,
        param="input",
    )
