"""`quire replay`: makes the answer of a receipt again, and says whether it is the same."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError, RequestError
from quire.config.adapters import AdapterFolders
from quire.entrypoints.cli.flags.engine import add_engine_flags, given_settings, image_bounds
from quire.entrypoints.cli.parser import CommandParser
from quire.protocol.receipts import Receipt, read_key, read_receipts

if TYPE_CHECKING:
    from quire.engine.stated_media import GivenMedia

__all__ = ["add_arguments", "run"]

EXIT_DIFFERENT = 1


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("receipt", type=Path, help="JSON file of a receipt, or of a list of them")
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="LoRA adapter that computed the answer, if one did"
    )
    parser.add_argument(
        "--media", nargs="+", action="extend", default=[], metavar="FILE_OR_URL",
        help="images of the prompt, or its embeddings (torch.save), as they were sent, in order",
    )  # fmt: skip
    parser.add_argument(
        "--receipt-key",
        metavar="FILE",
        help="key by which the operator must have signed it",
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
        key = read_key(Path(options.receipt_key))
        for receipt in receipts:
            if not receipt.is_signed_by(key):
                print(f"different: the key of {options.receipt_key} did not sign {receipt.id}")
                return EXIT_DIFFERENT
    for receipt, found in _replayed(receipts, options):
        if found:
            print(f"different: {found}")
            return EXIT_DIFFERENT
        print(f"equal: {_told(receipt)}")
    return 0


def _replayed(
    receipts: Sequence[Receipt], options: argparse.Namespace
) -> Iterator[tuple[Receipt, str]]:
    """Yield each receipt with its first difference in words. Those that follow one another and
    state the same settings have one engine, which has these but for those that were given."""
    from quire.engine.regenerate import receipt_settings, regenerate
    from quire.engine.stated_media import is_tensor, stated_media
    from quire.entrypoints.llm import LLM

    def settings_of(receipt: Receipt) -> dict[str, Any]:
        return {"model": receipt.evidence.model, **receipt_settings(receipt)}

    given = {"quiet": True, **given_settings(options)}
    if options.adapter is not None:
        given["enable_lora"] = True
    media = _media(options)
    if any(is_tensor(each.data) for each in media):
        given["enable_prompt_embeds"] = True
    for stated, alike in groupby(receipts, settings_of):
        with LLM(**{**stated, **given}) as llm:
            folders = AdapterFolders(llm.engine.resolved.settings.max_lora_rank)
            for receipt in alike:
                adapter = None
                if options.adapter is not None:
                    name = receipt.evidence.adapter or options.adapter
                    adapter = folders.ref(name, options.adapter)
                count = len(stated_media(receipt))
                own, media = media[:count], media[count:]
                first = llm.llm_engine.take_handles(len(receipt.statement.samples) + count)
                yield receipt, regenerate(llm.engine, receipt, adapter, own, first_handle=first)
    if media:
        raise RequestError(f"--media has {len(media)} files more than the prompts have media.")


def _media(options: argparse.Namespace) -> list[GivenMedia]:
    from quire.engine.stated_media import GivenMedia, is_tensor
    from quire.text.rendering.media.attached import attached_bytes

    max_bytes, max_pixels = image_bounds(options)
    found = [
        GivenMedia(name, attached_bytes(name, max_bytes, max_pixels)) for name in options.media
    ]
    for each in found:
        if len(each.data) > max_bytes and is_tensor(each.data):  # and so it was cut off
            raise RequestError(
                f"{each.name} has more than {max_bytes:,} bytes. Give a larger --max-image-bytes."
            )
    return found


def _told(receipt: Receipt) -> str:
    samples = receipt.statement.samples
    tokens = sum(each.num_tokens for each in samples)
    answers = "1 answer" if len(samples) == 1 else f"{len(samples)} answers"
    return f"{answers}, {tokens} tokens and their log-probabilities ({receipt.id})"
