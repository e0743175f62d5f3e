"""Properties of a plan."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from quire.protocol.step import StepPlan

FURTHER_COLUMNS = {
    "store_tier", "store_dst", "store_ticket", "copy_dst", "load_tier", "load_dst", "load_ticket",
    "rewind_tokens", "start_fork_dst", "stash_checkpoint",
    "append_token", "delta_tokens", "draft_token", "save_checkpoint", "save_drafts",
}  # fmt: skip
TABLES = {"table_group", "table_slot", "table_index", "table_block"}


@pytest.mark.parametrize(
    "name",
    [field.name for field in fields(StepPlan) if field.name not in {"step_id"} | FURTHER_COLUMNS],
)
def test_only_new_blocks_keep_the_rows(name: str) -> None:
    """Turns red when a change is forgotten, also one that a plan learns later: rows would go on as
    if it had not been asked for."""
    some = (
        np.ones(1, np.int32) if isinstance(getattr(StepPlan(0), name), np.ndarray) else (object(),)
    )
    plan = StepPlan(0, **{name: some})  # type: ignore[arg-type]
    assert plan.keeps_rows == (name in TABLES)
    assert StepPlan(0).keeps_rows
