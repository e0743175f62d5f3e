"""Thinking as an opaque text, for APIs whose clients keep it and send it back unread. It is neither
secret nor proof: a client may put any thinking into its conversation anyway. So any server can read
it, also after a restart."""

from __future__ import annotations

import base64
import binascii

__all__ = ["seal", "unseal"]

_MARK = "quire1."


def seal(text: str) -> str:
    """Return the opaque form, of an empty text too, since clients drop an empty one."""
    return _MARK + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode("ascii")


def unseal(sealed: str) -> str | None:
    """Return the text; None for the seal of another server, which is no fault."""
    if not sealed.startswith(_MARK):
        return None
    try:
        data = base64.urlsafe_b64decode(sealed[len(_MARK) :].encode("ascii"))
        return data.decode("utf-8")
    except (binascii.Error, UnicodeError):
        return None
