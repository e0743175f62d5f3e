"""JSON Schemas: what stands where, what no grammar can hold to, and what patterns mean."""

from quire.protocol.json_schema.tree import LISTS, Node, modernize, resolved, subschemas
from quire.protocol.json_schema.unsupported import (
    all_unsupported,
    allow_others,
    find_malformed,
    find_unsupported,
    without_unsupported,
)

__all__ = [
    "LISTS",
    "Node",
    "all_unsupported",
    "allow_others",
    "find_malformed",
    "find_unsupported",
    "modernize",
    "resolved",
    "subschemas",
    "without_unsupported",
]
