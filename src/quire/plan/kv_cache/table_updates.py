"""Block updates for a plan: table entries that changed, and copies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from quire.protocol.step import NO_TICKET

__all__ = ["TableUpdates", "UpdateLog"]


@dataclass(slots=True)
class TableUpdates:
    """Table entries that changed since the last drain, and the copies that must precede them:
    within the device, out to places of tiers (store_src is on the device) and in from them.
    stash_slot, stash_checkpoint: slots that leave, and checkpoints for their recurrent states.
    save_slot, save_checkpoint, save_drafts: slots, checkpoints that keep their recurrent states
    after the next step, and the drafts that these states have seen."""

    group: list[int] = field(default_factory=list[int])
    slot: list[int] = field(default_factory=list[int])
    index: list[int] = field(default_factory=list[int])
    block: list[int] = field(default_factory=list[int])
    copy_src: list[int] = field(default_factory=list[int])
    copy_dst: list[int] = field(default_factory=list[int])
    store_src: list[int] = field(default_factory=list[int])
    store_tier: list[int] = field(default_factory=list[int])
    store_dst: list[int] = field(default_factory=list[int])
    store_ticket: list[int] = field(default_factory=list[int])
    load_tier: list[int] = field(default_factory=list[int])
    load_src: list[int] = field(default_factory=list[int])
    load_dst: list[int] = field(default_factory=list[int])
    load_ticket: list[int] = field(default_factory=list[int])
    stash_slot: list[int] = field(default_factory=list[int])
    stash_checkpoint: list[int] = field(default_factory=list[int])
    save_slot: list[int] = field(default_factory=list[int])
    save_checkpoint: list[int] = field(default_factory=list[int])
    save_drafts: list[int] = field(default_factory=list[int])

    @property
    def has_rare(self) -> bool:
        """True if there is anything but table entries."""
        rare = (self.copy_src, self.store_src, self.load_src, self.stash_slot, self.save_slot)
        return any(rare)

    def without_entries(self) -> TableUpdates:
        """Return updates with entries of their own and these lists of everything else."""
        return TableUpdates(
            [],
            [],
            [],
            [],
            self.copy_src,
            self.copy_dst,
            self.store_src,
            self.store_tier,
            self.store_dst,
            self.store_ticket,
            self.load_tier,
            self.load_src,
            self.load_dst,
            self.load_ticket,
            self.stash_slot,
            self.stash_checkpoint,
            self.save_slot,
            self.save_checkpoint,
            self.save_drafts,
        )


class UpdateLog:
    """Gathers updates until a plan carries them. References to blocks are the caller's."""

    def __init__(self) -> None:
        self.pending = TableUpdates()

    def drain(self) -> TableUpdates:
        """Return the changes since the last call; the caller changes none of them, and reads them
        before the next change. Steps that decode make few new lists."""
        pending = self.pending
        if pending.has_rare:
            self.pending = TableUpdates()
        elif pending.block:
            self.pending = pending.without_entries()
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

    def store(self, block: int, tier: int, place: int, ticket: int = NO_TICKET) -> None:
        """Copy a device block to a place of a tier."""
        pending = self.pending
        pending.store_src.append(block)
        pending.store_tier.append(tier)
        pending.store_dst.append(place)
        pending.store_ticket.append(ticket)

    def forget_stores(self, tier: int, places: Collection[int]) -> None:
        """Drop the copies into these places of a tier."""
        pending = self.pending
        pairs = zip(pending.store_tier, pending.store_dst, strict=True)
        kept = [i for i, (of, place) in enumerate(pairs) if of != tier or place not in places]
        for column in (
            pending.store_src,
            pending.store_tier,
            pending.store_dst,
            pending.store_ticket,
        ):
            column[:] = [column[i] for i in kept]

    def stash_state(self, slot: int, checkpoint: int) -> None:
        """Keep the state of a slot that leaves; what the same plan would have kept in the
        checkpoint is not."""
        pending = self.pending
        pairs = zip(pending.stash_slot, pending.stash_checkpoint, strict=True)
        kept = [*((each, of) for each, of in pairs if of != checkpoint), (slot, checkpoint)]
        pending.stash_slot[:], pending.stash_checkpoint[:] = map(list, zip(*kept, strict=True))

    def save_state(self, slot: int, checkpoint: int, num_drafts: int = 0) -> None:
        """Keep a slot's state after `num_drafts` drafts; what the same plan would have kept in the
        checkpoint is not."""
        pending = self.pending
        columns = (pending.save_slot, pending.save_checkpoint, pending.save_drafts)
        kept = [i for i, other in enumerate(pending.save_checkpoint) if other != checkpoint]
        for column, value in zip(columns, (slot, checkpoint, num_drafts), strict=True):
            column[:] = [*(column[i] for i in kept), value]

    def load(self, ticket: int, tier: int, place: int, block: int) -> None:
        """Copy a place of a tier to a device block, as part of the work under `ticket`."""
        self.pending.load_tier.append(tier)
        self.pending.load_src.append(place)
        self.pending.load_dst.append(block)
        self.pending.load_ticket.append(ticket)


def _filter_pairs(
    sources: list[int], destinations: list[int], is_needed: Callable[[int], bool]
) -> list[int]:
    """Keep, in place, the pairs whose destination is needed; the sources of the others."""
    pairs = list(zip(sources, destinations, strict=True))
    kept = [(src, dst) for src, dst in pairs if is_needed(dst)]
    sources[:] = [src for src, _ in kept]
    destinations[:] = [dst for _, dst in kept]
    return [src for src, dst in pairs if not is_needed(dst)]
