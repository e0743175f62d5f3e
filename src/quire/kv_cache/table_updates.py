"""Block updates for a plan: table entries that changed, and copies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

__all__ = ["TableUpdates", "UpdateLog"]


@dataclass(slots=True)
class TableUpdates:
    """Table entries that changed since the last drain, and the copies that must precede them:
    within the device, out to the host (swap_out_src is on the device) and in from it. save_slot,
    save_checkpoint: slots whose recurrent states are kept after the next step, and where."""

    group: list[int] = field(default_factory=list[int])
    slot: list[int] = field(default_factory=list[int])
    index: list[int] = field(default_factory=list[int])
    block: list[int] = field(default_factory=list[int])
    copy_src: list[int] = field(default_factory=list[int])
    copy_dst: list[int] = field(default_factory=list[int])
    swap_out_src: list[int] = field(default_factory=list[int])
    swap_out_dst: list[int] = field(default_factory=list[int])
    swap_in_src: list[int] = field(default_factory=list[int])
    swap_in_dst: list[int] = field(default_factory=list[int])
    save_slot: list[int] = field(default_factory=list[int])
    save_checkpoint: list[int] = field(default_factory=list[int])
    swap_in_ticket: list[int] = field(default_factory=list[int])

    @property
    def has_rare(self) -> bool:
        """True if there is anything but table entries."""
        return bool(self.copy_src or self.swap_out_src or self.swap_in_src or self.save_slot)


class UpdateLog:
    """Gathers updates until a plan carries them. References to blocks are the caller's."""

    def __init__(self) -> None:
        self.pending = TableUpdates()

    def drain(self) -> TableUpdates:
        """Return the changes since the last call; the caller changes none of them."""
        pending = self.pending
        if not (pending.block or pending.has_rare):
            return pending  # as in most steps that decode: 13 lists need not be made anew
        self.pending = TableUpdates()
        return pending

    def entries(self, group: int, slots: list[int], index: list[int], blocks: list[int]) -> None:
        """The entries at `index` [N] of `slots` [N] name `blocks` [N] from now on."""
        pending = self.pending
        pending.group.extend([group] * len(blocks))
        pending.slot.extend(slots)
        pending.index.extend(index)
        pending.block.extend(blocks)

    def forget_entries(self, slots: Collection[int]) -> None:
        """Drop the entries of these slots."""
        pending = self.pending
        kept = [i for i, owner in enumerate(pending.slot) if owner not in slots]
        for column in (pending.group, pending.slot, pending.index, pending.block):
            column[:] = [column[i] for i in kept]

    def copy(self, src: int, dst: int) -> None:
        self.pending.copy_src.append(src)
        self.pending.copy_dst.append(dst)

    def forget_copies(self, is_needed: Callable[[int], bool]) -> list[int]:
        """Drop the copies into blocks that are not needed; their sources."""
        return _filter_pairs(self.pending.copy_src, self.pending.copy_dst, is_needed)

    def swap_out(self, place: dict[int, int]) -> None:
        """Copy device blocks to host blocks."""
        self.pending.swap_out_src.extend(place.keys())
        self.pending.swap_out_dst.extend(place.values())

    def forget_swaps_out(self, unused: set[int]) -> None:
        """Drop the copies into these host blocks."""
        pending = self.pending
        if not unused.isdisjoint(pending.swap_out_dst):
            _filter_pairs(pending.swap_out_src, pending.swap_out_dst, lambda b: b not in unused)

    def save_state(self, slot: int, checkpoint: int) -> None:
        """Keep a slot's state; what the same plan would have kept in the checkpoint is not."""
        pending = self.pending
        _filter_pairs(pending.save_slot, pending.save_checkpoint, lambda c: c != checkpoint)
        pending.save_slot.append(slot)
        pending.save_checkpoint.append(checkpoint)

    def swap_in(self, ticket: int, host: int, block: int) -> None:
        """Copy a host block to a device block, as part of the work under `ticket`."""
        self.pending.swap_in_src.append(host)
        self.pending.swap_in_dst.append(block)
        self.pending.swap_in_ticket.append(ticket)


def _filter_pairs(
    sources: list[int], destinations: list[int], is_needed: Callable[[int], bool]
) -> list[int]:
    """Keep, in place, the pairs whose destination is needed; the sources of the others."""
    pairs = list(zip(sources, destinations, strict=True))
    kept = [(src, dst) for src, dst in pairs if is_needed(dst)]
    sources[:] = [src for src, _ in kept]
    destinations[:] = [dst for _, dst in kept]
    return [src for src, dst in pairs if not is_needed(dst)]
