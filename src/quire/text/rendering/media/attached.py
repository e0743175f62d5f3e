"""Images that a person attaches to a message: files and URLs of their own choice."""

from __future__ import annotations

import base64
import os
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.text.rendering.media.decode import media_type
from quire.text.rendering.media.fetch import (
    Addresses,
    ImageFetcher,
    all_addresses,
    global_addresses,
)
from quire.text.rendering.media.sources import ImageSource, MediaAccess, path_or_url

__all__ = ["attached_bytes", "attached_image"]


def attached_image(name: str, max_bytes: int, max_pixels: int) -> dict[str, Any]:
    """Return the part of a chat with the image of a file, or of a file:, http: or https: URL, as
    JSON that any server takes. max_bytes, max_pixels: bounds of the image. Raises RequestError,
    which names it, for what is not there or is no image."""
    data = attached_bytes(name, max_bytes, max_pixels)
    kind = media_type(data, name, max_bytes, max_pixels)
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def attached_bytes(name: str, max_bytes: int, max_pixels: int) -> bytes:
    """Return the contents of a file, or of a data:, file:, http: or https: URL, and one byte more
    than `max_bytes` of a longer file. Raises RequestError for what is not there."""
    # A person may read all files that the system lets them read, and fetch from any host.
    fetch = ImageFetcher(None, max_bytes, _addresses_of(name))
    access = MediaAccess(max_bytes, max_pixels, Path("/"), fetch)
    data = access.read(ImageSource(name, path_or_url(os.path.expanduser(name))))
    assert isinstance(data, bytes), "it is no image of Pillow"
    return data


def _addresses_of(name: str) -> Addresses:
    """Return a resolver that takes the host in a URL as it is, which may be in the person's own
    network. Hosts that it redirects to must be global."""

    def addresses(host: str, port: int) -> Sequence[str]:
        is_named = host == (urllib.parse.urlsplit(name).hostname or "").rstrip(".")
        return (all_addresses if is_named else global_addresses)(host, port)

    return addresses
