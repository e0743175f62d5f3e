"""Values within a body that is read piece by piece. Errors name the place."""

from __future__ import annotations

from typing import Any, cast

from quire.server.requests.errors import RefusedError

__all__ = ["Fields", "fields_of", "optional_string", "refused", "string_of"]

Fields = dict[str, Any]
"""An object of JSON."""

_MAX_SHOWN = 80


def fields_of(value: object, place: str) -> Fields:
    """Return an object. Raises RefusedError for anything else."""
    if not isinstance(value, dict):
        raise refused(place, value, "Send an object.")
    return cast("Fields", value)


def string_of(fields: Fields, name: str, place: str) -> str:
    """Return the text of a field. Raises RefusedError for anything else. place: path of the object,
    such as `tools[0]`."""
    value: object = fields.get(name)
    if not isinstance(value, str):
        raise refused(f"{place}.{name}", value, "Send a string.")
    return value


def optional_string(fields: Fields | None, name: str, place: str) -> str | None:
    """Return the text of a field that may be null or missing, as its object may. RefusedError as of
    `string_of`."""
    if fields is None or fields.get(name) is None:
        return None
    return string_of(fields, name, place)


def refused(place: str, value: object, advice: str) -> RefusedError:
    """Return the error of a value that may not stand at this place, such as `tools[0].name`."""
    shown = "missing" if value is None else repr(value)[:_MAX_SHOWN]
    param = place.partition("[")[0].partition(".")[0]
    return RefusedError(f"{place} is {shown}. {advice}", param=param)
