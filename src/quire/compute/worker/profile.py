"""Recording of what steps do, for finding lost time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from quire.base.errors import RequestError

__all__ = ["StepProfile"]


class StepProfile:
    """torch's profiler over the thread that computes. It sees calls of torch and kernels of a GPU;
    of C++ kernels on a CPU only the time between them."""

    def __init__(self) -> None:
        self._running: tuple[profile, Path] | None = None

    def start(self, directory: str, device: torch.device) -> None:
        """RequestError if one runs already, or the folder cannot be made."""
        if self._running is not None:
            raise RequestError("a profile is being recorded already: stop it first")
        try:
            folder = Path(directory)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"the profile cannot be written to {directory!r}: {error}"
            ) from error
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=activities)
        recording.start()
        self._running = recording, folder

    def stop(self) -> str:
        """The file, in Chrome's trace format. RequestError if none runs."""
        if self._running is None:
            raise RequestError("no profile is being recorded: start one first")
        (recording, folder), self._running = self._running, None
        recording.stop()
        path = folder / f"quire-{os.getpid()}-{time.time_ns()}.trace.json"
        recording.export_chrome_trace(str(path))
        return str(path)
