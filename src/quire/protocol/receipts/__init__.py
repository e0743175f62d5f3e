"""Receipts: statements on how an answer was made, from which it can be made again."""

from quire.protocol.receipts.receipt import (
    Difference,
    Evidence,
    Receipt,
    SampleEvidence,
    SampleStatement,
    Statement,
    first_difference,
    logprob_bits,
    read_key,
    read_receipts,
)
from quire.protocol.receipts.witness import Witness, request_statement, with_replaced

__all__ = [
    "Difference",
    "Evidence",
    "Receipt",
    "SampleEvidence",
    "SampleStatement",
    "Statement",
    "Witness",
    "first_difference",
    "logprob_bits",
    "read_key",
    "read_receipts",
    "request_statement",
    "with_replaced",
]
