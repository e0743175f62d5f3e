"""The launch message of a front process, and its exit statuses."""

from __future__ import annotations

import msgspec

from quire.engine.supervision.supervisor import SettingValue
from quire.server.settings import ServerSettings

__all__ = ["BAD_CONFIG", "FrontLaunch"]

BAD_CONFIG = 2
"""Exit status: another start with these settings would fail too."""


class FrontLaunch(msgspec.Struct, frozen=True):
    """front: number of this process and of its engine client, never used before. listener: open
    descriptor of the listening socket. directory: directory of the engine core. engine: values of
    `EngineSettings` by name. heartbeat_s: seconds between heartbeats."""

    front: int
    listener: int
    directory: str
    engine: dict[str, SettingValue]
    server: ServerSettings
    heartbeat_s: float
