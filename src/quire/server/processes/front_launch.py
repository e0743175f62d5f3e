"""Launch message of a front process, and the meaning of its exit status."""

from __future__ import annotations

import msgspec

from quire.engine.supervision.supervisor import SettingValue
from quire.server.settings import ServerSettings

__all__ = ["BAD_CONFIG", "FrontLaunch"]

BAD_CONFIG = 2
"""Exit status: another start with these settings fails as well."""


class FrontLaunch(msgspec.Struct, frozen=True):
    """front: number of this process and of its engine client; no other one had it. listener: open
    descriptor of the listening socket. directory: of the engine core. engine: of `EngineSettings`,
    by name. heartbeat_s: from one sign of life to the next."""

    front: int
    listener: int
    directory: str
    engine: dict[str, SettingValue]
    server: ServerSettings
    heartbeat_s: float
