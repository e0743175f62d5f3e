"""Makes a policy from its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from quire.base.errors import ConfigError
from quire.base.platform.interrupts import is_ctrl_c
from quire.config.resolved import ResolvedScheduler
from quire.config.settings import SCHEDULING_POLICIES
from quire.plan.scheduler.policies.fair import Fair
from quire.plan.scheduler.policies.fcfs import Fcfs
from quire.plan.scheduler.policies.guarded import Guarded
from quire.plan.scheduler.policies.policy import Policy
from quire.plan.scheduler.policies.priority import Priority
from quire.plan.scheduler.policies.srtf import Srtf
from quire.plan.scheduler.policies.two_level import TwoLevel

__all__ = ["make_policy"]


_MAKERS: Mapping[str, Callable[[ResolvedScheduler], Policy]] = {
    "fcfs": lambda _: Fcfs(),
    "priority": lambda s: Priority(s.priority_ageing_s),
    "srtf": lambda _: Srtf(),
    "two_level": lambda s: TwoLevel(
        s.staging_queue_size, s.max_num_batched_tokens, s.priority_ageing_s
    ),
    "fair": lambda _: Fair(),
}
"""One for each of `SCHEDULING_POLICIES`."""


def make_policy(settings: ResolvedScheduler) -> Policy:
    """Make `scheduling_policy`: one of `SCHEDULING_POLICIES`, or a class of the user's as
    `package.module:Class`, which is called without arguments. ConfigError if there is no such
    policy, or it cannot be made."""
    name = settings.scheduling_policy
    if name in _MAKERS:
        return _MAKERS[name](settings)
    module_name, _, class_name = name.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)()
    except BaseException as error:  # whatever the user's module or constructor raises
        if is_ctrl_c(error):
            raise
        raise _refused(name, f"gives {type(error).__name__}: {error}") from error
    if not isinstance(made, Policy):
        raise _refused(name, "is no Policy (quire.plan.scheduler.Policy lists what one needs)")
    return Guarded(made, name)


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"scheduling_policy {name!r} {why}. Give one of: {', '.join(SCHEDULING_POLICIES)}, or a "
        "class that can be imported, as package.module:Class."
    )
