"""JSON Schemas: their structure, the keywords that no grammar can enforce, and patterns."""

from quire.protocol.json_schema.tree import LISTS, Node, modernize, resolved, subschemas
from quire.protocol.json_schema.unsupported import (
    all_unsupported,
    allow_others,
    find_malformed,
    find_unknown_type,
    find_unsupported,
    num_chars_to_read,
    without_unsupported,
)

__all__ = [
    "LISTS",
    "Node",
    "all_unsupported",
    "allow_others",
    "find_malformed",
    "find_unknown_type",
    "find_unsupported",
    "modernize",
    "num_chars_to_read",
    "resolved",
    "subschemas",
    "without_unsupported",
]
