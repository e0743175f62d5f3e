"""`quire replay`: makes the answer of a receipt again, and says whether it is the same."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.cli.flags.engine import add_engine_flags, given_settings
from quire.cli.parser import CommandParser
from quire.config.adapters import AdapterFolders
from quire.errors import ConfigError, RequestError
from quire.platform.private_files import read_private
from quire.protocol.receipts import Receipt, check_key, read_receipts

__all__ = ["add_arguments", "run"]

EXIT_DIFFERENT = 1


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("receipt", type=Path, help="JSON file of a receipt, or of a list of them")
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="LoRA adapter that computed the answer, if one did"
    )
    parser.add_argument(
        "--receipt-key", metavar="FILE", help="key of the operator: its signature must be there"
    )
    add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Say "equal", or name the first difference; then the status is 1. ConfigError or RequestError,
    and so 2, if the answer cannot be made again."""
    try:
        receipts = read_receipts(options.receipt.read_bytes())
    except OSError as error:
        raise ConfigError(f"{options.receipt} cannot be read: {error.strerror}.") from error
    except RequestError as error:
        raise RequestError(f"{options.receipt}: {error}") from error
    if options.receipt_key is not None:
        key = check_key(read_private(Path(options.receipt_key)))
        for receipt in receipts:
            if not receipt.is_signed_by(key):
                print(f"different: the key of {options.receipt_key} did not sign {receipt.id}")
                return EXIT_DIFFERENT
    for receipt in receipts:
        if found := _replay(receipt, options):
            print(f"different: {found}")
            return EXIT_DIFFERENT
        print(f"equal: {_told(receipt)}")
    return 0


def _replay(receipt: Receipt, options: argparse.Namespace) -> str:
    """Return the first difference in words. It starts an engine with the settings that the receipt
    states, but for those that were given."""
    from quire.engine.regenerate import receipt_settings, regenerate
    from quire.llm import LLM

    stated = receipt_settings(receipt)
    settings = {"model": receipt.evidence.model, "quiet": True, **stated, **given_settings(options)}
    if options.adapter is not None:
        settings["enable_lora"] = True
    with LLM(**settings) as llm:
        adapter = None
        if options.adapter is not None:
            folders = AdapterFolders(llm.engine.resolved.settings.max_lora_rank)
            adapter = folders.ref(receipt.evidence.adapter or options.adapter, options.adapter)
        return regenerate(llm.engine, receipt, adapter)


def _told(receipt: Receipt) -> str:
    samples = receipt.statement.samples
    tokens = sum(each.num_tokens for each in samples)
    answers = "1 answer" if len(samples) == 1 else f"{len(samples)} answers"
    return f"{answers}, {tokens} tokens and their log-probabilities ({receipt.id})"
