"""The near end of an engine that lives in a process of its own (child.py)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks.peers.engines.engine import EngineOptions, Moment, Timeline, UnavailableError

__all__ = ["EngineEndedError", "EngineProcess", "EngineRun"]

CLOSE_SECONDS = 30
ROOT = Path(__file__).parents[3]


class EngineEndedError(Exception):
    """The process of an engine ended before it answered; the message says how, on one line."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """idle_seconds, idle_cpu_seconds: time since the run before, or since the engine was opened,
    and processor time that its process took meanwhile."""

    timeline: Timeline
    idle_seconds: float
    idle_cpu_seconds: float


class EngineProcess:
    """An engine that is loaded. settings: its own settings, for the record.

    title: name in messages. module: the adapter to import there. python: the interpreter.
    environment: variables of the process. Raises UnavailableError if the engine cannot run there,
    EngineEndedError if its process ends meanwhile.
    """

    def __init__(
        self,
        title: str,
        module: str,
        options: EngineOptions,
        python: str,
        environment: Mapping[str, str],
    ) -> None:
        self._title = title
        self._errors = TemporaryFile()  # noqa: SIM115  closed with the process
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.peers.engines.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise UnavailableError(f"{python} does not start ({error.strerror})") from error
        try:
            self.settings = self._open(module, options)
        except BaseException:
            self.close()
            raise

    def _open(self, module: str, options: EngineOptions) -> dict[str, Any]:
        wanted = asdict(options) | {"model": str(options.model), "work_dir": str(options.work_dir)}
        answer = self._ask({"module": module, "options": wanted})
        if "unavailable" in answer:
            raise UnavailableError(answer["unavailable"])
        return answer["settings"]

    def run(self, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> EngineRun:
        """Call `run_requests` in the process. Raises EngineEndedError."""
        answer = self._ask({
            "prompts": [list(map(int, prompt)) for prompt in prompts],
            "output_lengths": list(output_lengths),
        })  # fmt: skip
        found, idle = answer["timeline"], answer["idle"]
        moments = tuple(
            Moment(moment["seconds"], tuple(moment["counts"]), moment["kernel_seconds"])
            for moment in found["moments"]
        )
        timeline = Timeline(tuple(found["prompt_lengths"]), tuple(found["output_lengths"]), moments)
        return EngineRun(timeline, idle["seconds"], idle["cpu_seconds"])

    def peak_bytes(self) -> int:
        """The most memory that the process has held so far, mapped files included (Linux)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) << 10

    def close(self) -> None:
        """End the process, by force if it does not answer."""
        process = self._process
        try:
            process.communicate(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        self._errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise EngineEndedError(self._how_it_ended())
        return json.loads(answer)

    def _how_it_ended(self) -> str:
        status = self._process.wait(CLOSE_SECONDS)
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(printed) if line.strip()), "no message")
        return f"{self._title}: its process ended with status {status}: {last}"
