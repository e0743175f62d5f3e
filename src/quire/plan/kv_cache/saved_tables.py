"""Block tables of a sequence that has no slot."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SavedTables"]


@dataclass(frozen=True, slots=True, eq=False)
class SavedTables:
    """Blocks that a sequence left behind: swapped to the host, or pinned on the device.

    num_tokens: tokens with K/V. first: index of the first block that the window of each layer group
    still needed. blocks: host or device blocks of each group from there on. checkpoint: checkpoint
    of the recurrent state after these tokens, or in a pin at the last place within them where a
    prefix can end; None without states, or if there is no such place.
    """

    num_tokens: int
    first: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    checkpoint: int | None = None

    def all_blocks(self) -> list[int]:
        """Return the blocks of all groups; each as often as it is named."""
        return [block for blocks in self.blocks for block in blocks]
