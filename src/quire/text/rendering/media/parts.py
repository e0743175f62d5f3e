"""Images among the parts of messages, in the forms of the APIs that clients use."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from quire.base.errors import RequestError, quoted
from quire.config.media.image_spec import IMAGE_KEY
from quire.text.rendering.media.sources import ImageSource, RowsSource, StoredFile, path_or_url
from quire.text.rendering.message_check import (
    IMAGE_MARK,
    IMAGE_PART_TYPES,
    ROWS_PART_TYPE,
    TEXT_ONLY,
)

__all__ = ["IMAGE_FIELDS", "image_part", "image_source", "images_of", "in_order", "take_images"]

IMAGE_FIELDS = ("multi_modal_data", "multi_modal_uuids")
"""Fields of a prompt for images and their names, as in vLLM."""

LONGEST_PLACE = 200
"""Characters of a path in a request that an error shows."""

LONGEST_UUID = 256
"""Characters of a caller's name for an image."""


def take_images(messages: object) -> tuple[object, tuple[ImageSource, ...]]:
    """Return the messages with a mark in place of each image, and the images in order.

    Takes `image_url` (an object or a text) and `image_pil` parts as in vLLM, `input_image` parts,
    and `image` parts as in `transformers`. Anything else stays. Raises RequestError, which names
    the place, for a part that names no image.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages, ()
    items = cast("Sequence[object]", messages)
    found: list[ImageSource] = []
    taken = [
        _without_images(message, f"messages[{index}]", found) for index, message in enumerate(items)
    ]
    return (taken, tuple(found)) if found else (items, ())


def in_order(
    messages: Sequence[dict[str, Any]], images: Sequence[ImageSource]
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Return messages with bare marks, as templates know them, and the images in the order of
    these: messages may have changed places. RequestError for a mark of no image."""
    taken = dict(enumerate(images))
    found: list[ImageSource] = []
    bare = [
        {**message, "content": [_bare(part, taken, found) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    for image in taken.values():
        raise RequestError(f"{image.place} has no place in the prompt: leave the image out")
    return bare, found


def _bare(part: Any, taken: dict[int, ImageSource], found: list[ImageSource]) -> Any:
    fields = cast("dict[str, Any]", part if isinstance(part, dict) else {})
    if fields.get("type") != IMAGE_MARK:
        return cast("object", part)
    image = taken.pop(fields.get("index", -1), None)
    if image is None:
        raise RequestError(f"messages have an image. {TEXT_ONLY}")
    found.append(image)
    return {"type": IMAGE_MARK}


def images_of(prompt: Mapping[str, Any]) -> tuple[ImageSource, ...]:
    """Return the images of a prompt's `multi_modal_data`, {"image": one or a list}: an image of
    Pillow, bytes, a path, a URL, or a tensor with rows of the encoder. `multi_modal_uuids` has a
    name or None for each; one that is named may be None, if it came before. Raises RequestError for
    media of other kinds, and for other numbers of names."""
    data, uuids = (prompt.get(field) for field in IMAGE_FIELDS)
    given: Any = _of_images(data, IMAGE_FIELDS[0], "image")
    if getattr(given, "ndim", 0) == 3 and hasattr(given, "detach"):
        given = list(given)  # rows of several images in one tensor
    items, names = _listed(given), _listed(_of_images(uuids, IMAGE_FIELDS[1], "name"))
    if names and len(items) < 2 and all(item is None for item in items):
        items = [None] * len(names)
    if names and len(names) != len(items):
        raise RequestError(
            f"multi_modal_uuids has {len(names)} names for {len(items)} images: give a name or "
            "None for each"
        )
    return tuple(
        ImageSource(place, _given_rows(item) or path_or_url(item), None, uuid)
        for place, item, uuid in _named(items, names or [None] * len(items))
        if item is not None or uuid is not None
    )


def _named(
    items: Sequence[object], names: Sequence[object]
) -> Iterator[tuple[str, object, str | None]]:
    """Yield images with their places and names. RequestError for names that are none."""
    for index, (item, name) in enumerate(zip(items, names, strict=True)):
        place = f"{IMAGE_FIELDS[0]}.{IMAGE_KEY}[{index}]"
        if item is None and name is not None:
            place = f"{IMAGE_FIELDS[1]}.{IMAGE_KEY}[{index}]"
        yield place, item, _checked_uuid(name, f"{IMAGE_FIELDS[1]}.{IMAGE_KEY}[{index}]")


def _of_images(data: object, field: str, what: str) -> object:
    """Return what a field of a prompt has for images; None if it has nothing. what: noun for one
    of them."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise RequestError(f'{field} is {quoted(data)}: give {{"{IMAGE_KEY}": {what}}}')
    fields = cast("Mapping[str, object]", data)
    for kind, value in fields.items():
        if kind != IMAGE_KEY and value is not None:
            raise RequestError(
                f"{field} has {quoted(kind)}, which no model has an encoder for: give "
                f'"{IMAGE_KEY}" alone'
            )
    return fields.get(IMAGE_KEY)


def _listed(given: object) -> list[object]:
    if given is None:
        return []
    return list(cast("Sequence[object]", given)) if isinstance(given, list | tuple) else [given]


def _given_rows(item: Any) -> RowsSource | None:
    """Return rows of the encoder, which come as a tensor of torch, alone or in an object with a
    grid; None for an image of another kind."""
    grid: Any = None
    if isinstance(item, Mapping):
        fields = cast("Mapping[str, Any]", item)
        item, grid = fields.get(ROWS_PART_TYPE), fields.get("image_grid_thw")
    if not hasattr(item, "detach"):
        return None
    from safetensors.numpy import save

    data = save({ROWS_PART_TYPE: item.detach().cpu().float().contiguous().numpy()})
    # The program may change its lists later, and a name may outlive the call.
    return RowsSource(data, grid.tolist() if hasattr(grid, "tolist") else copy.deepcopy(grid))


def image_part(source: ImageSource) -> dict[str, Any]:
    """Return the part of a chat for an image that came in the form of another API. It is JSON, as
    conversations are kept so, and remembers its place in the request."""
    value, more = source.value, {"detail": source.detail, "place": source.place}
    named = {} if source.uuid is None else {"uuid": source.uuid}
    if isinstance(value, StoredFile):
        return {"type": "input_image", "file_id": value.file_id, **more, **named}
    return {"type": "image_url", "image_url": {"url": value, **more}, **named}


def _without_images(message: object, place: str, found: list[ImageSource]) -> object:
    if not isinstance(message, Mapping):
        return message
    fields = cast("Mapping[str, Any]", message)
    content = fields.get("content")
    if not isinstance(content, list | tuple):
        return cast("object", message)
    parts: list[object] = []
    for index, part in enumerate(cast("Sequence[Any]", content)):
        given = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
        kind: object = given.get("type")
        if not isinstance(kind, str) or kind not in IMAGE_PART_TYPES:
            parts.append(cast("object", part))
            continue
        parts.append({"type": IMAGE_MARK, "index": len(found)})
        found.append(image_source(given, f"{place}.content[{index}]"))
    return {**fields, "content": parts}


def image_source(part: Mapping[str, Any], place: str) -> ImageSource:
    """Return the image of a part, whose path in the request is `place`. RequestError for a part
    that names none."""
    kind, base = str(part.get("type")), place
    if kind == ROWS_PART_TYPE:
        return _rows_source(part, f"{place}.{kind}")
    name = {"input_image": "image_url"}.get(kind, kind)
    value, detail = part.get(name), part.get("detail")
    if part.get("file_id") is not None:
        if value is not None:
            raise RequestError(f"{place} has {name} and file_id: send one of them")
        place = _own_place(part, f"{place}.file_id")
        value = _stored_file(part["file_id"], place)
    elif kind == "image" and value is None and part.get("url") is not None:
        value, place = part["url"], f"{place}.url"
    else:
        place = f"{place}.{name}"
    uuid = _checked_uuid(part.get("uuid"), f"{base}.uuid")
    fields = cast("Mapping[str, Any]", {})
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        place = _own_place(fields, f"{place}.url")
        value, detail = fields.get("url"), fields.get("detail", detail)
    if detail is not None and not isinstance(detail, str):
        raise RequestError(f"{place} has the detail {quoted(detail)}: send a text such as auto")
    if value is None and uuid is not None:
        return ImageSource(_own_place(fields, f"{base}.uuid"), None, detail, uuid)
    if value is None:
        raise RequestError(f"{place} is missing: send a data: URL with the image")
    if isinstance(value, str) and not value:
        raise RequestError(f"{place} is empty: send a data: URL with the image")
    return ImageSource(place, value, detail, uuid)


def _rows_source(part: Mapping[str, Any], place: str) -> ImageSource:
    """Return an image that is encoded already: base64, or an object with a grid beside it."""
    for name in ("uuid", "detail", "file_id"):
        if part.get(name) is not None:
            raise RequestError(
                f"{place} is given with {name}, which it does not take: leave it out"
            )
    value, grid = part.get(ROWS_PART_TYPE), None
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        value, grid = fields.get(ROWS_PART_TYPE), fields.get("image_grid_thw")
        for name in fields:
            if name not in (ROWS_PART_TYPE, "image_grid_thw"):
                raise RequestError(f"{place} has {quoted(name)}, which is not known: leave it out")
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{place} is {quoted(value)}: send the base64 of torch.save(tensor, file), with rows "
            "[tokens, hidden size] of one image"
        )
    return ImageSource(place, RowsSource(value, grid))


def _checked_uuid(uuid: object, place: str) -> str | None:
    """Return a caller's name for an image. RequestError, which names the place, for one that is
    none."""
    if uuid is None or (isinstance(uuid, str) and 0 < len(uuid) <= LONGEST_UUID):
        return uuid
    raise RequestError(f"{place} is {quoted(uuid)}: send a text of 1 to {LONGEST_UUID} characters")


def _own_place(fields: Mapping[str, Any], place: str) -> str:
    """Return the path that a part remembers; `place` if it has none."""
    given = fields.get("place")
    return given if isinstance(given, str) and len(given) < LONGEST_PLACE else place


def _stored_file(file_id: object, place: str) -> StoredFile:
    if not isinstance(file_id, str) or not file_id:
        raise RequestError(f"{place} is {quoted(file_id)}: send the id of an uploaded file")
    return StoredFile(file_id)
