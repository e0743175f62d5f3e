"""Updates of the weights of a running engine: a start, tensors in several calls, and a finish that
all replicas and ranks carry out, or none."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import shutil
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec

from quire.base.errors import ConfigError, EngineError, EngineUnavailableError, RequestError
from quire.config.checkpoint import find_weight_files, read_header
from quire.engine.clients.async_client import AsyncEngineClient
from quire.protocol.control import Inspect, LoadWeights, Report
from quire.server.generation.adapters import within
from quire.server.requests.errors import RefusedError
from quire.server.requests.weight_bodies import WeightUpdateInfo

__all__ = ["BACKEND", "WeightUpdates"]

BACKEND = "file"
"""Name of the transport: tensors come in bodies or files, and reach the engine as files."""

HOW = (
    'Send {"update_info": {"names", "dtype_names", "shapes", "tensors"}} with the numbers in '
    'base64, or {"update_info": {"path"}} of safetensors files under --weights-folder.'
)
"""Advice on bodies of /update_weights."""

_DTYPES = {"float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2),
           "bfloat16": ("BF16", 2)}  # fmt: skip
"""Dtypes of torch by name: names in safetensors files, and bytes of a number."""

_CHECKED = ".safetensors"
_OPEN = "open"
_COUNT = "count"
_LOCK = "lock"


class WeightUpdates:
    """The update that is open, in files that all fronts of an engine see."""

    def __init__(self, client: AsyncEngineClient) -> None:
        """Raises RefusedError 501 for an engine without a folder."""
        directories = client.directories
        if not directories:
            raise RefusedError(
                "Weights are updated in an engine of its own process. Start it by quire serve.",
                status=501,
            )
        self._client = client
        self._root = directories[0] / "weights"

    @contextlib.contextmanager
    def _locked(self, *, is_shared: bool = False) -> Generator[None]:
        """Keep other calls off the update, those of other fronts too. RefusedError 409 while one is
        under way. is_shared: keep off all but those that add tensors too."""
        self._root.mkdir(mode=0o700, exist_ok=True)
        file = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_NB | (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX))
            except BlockingIOError as error:
                raise RefusedError(
                    "Another request starts, fills or finishes an update of weights. Wait for its "
                    "answer, then POST /start_weight_update and send all tensors.",
                    status=409,
                ) from error
            yield
        finally:
            os.close(file)

    async def start(self) -> None:
        """Open an update. One that was open is dropped. RefusedError 409 as in `finish`."""
        with self._locked():
            await self._drop()
            await asyncio.to_thread(self._start)

    def _start(self) -> None:
        name = f"{time.time_ns():020d}"
        (self._root / name).mkdir(mode=0o700)
        self._note(_OPEN, name)

    async def drop(self) -> None:
        """Forget the update that is open, if there is one. RefusedError 409 as in `finish`."""
        with self._locked():
            await self._drop()

    async def _drop(self) -> None:
        report = await self._client.control(Inspect())
        await asyncio.to_thread(self._close, report.loaded.files)

    def _folder(self) -> Path:
        """Return the folder of the update that is open. RefusedError without one."""
        try:
            return self._root / (self._root / _OPEN).read_text()
        except OSError as error:
            raise RefusedError(
                "No update of weights is open. POST /start_weight_update first."
            ) from error

    async def add(self, info: WeightUpdateInfo, weights_folder: str | None) -> None:
        """Add tensors to the update that is open. Raises RefusedError or RequestError, naming the
        tensor, and adds none of them, if one is not of the model; RefusedError 409 as in `finish`.
        weights_folder: folder of the files that may be named; None if none may."""
        is_of_gpus = info.packed is not None or info.ipc_handles_pickled is not None
        if is_of_gpus or (info.path is None and info.tensors is None):
            raise RefusedError(
                "update_info has no tensors: this server joins no group of NCCL, and opens no "
                f"handles of a GPU's memory. {HOW}",
                status=501,
                param="update_info",
            )
        if info.path is not None and info.tensors is not None:
            raise RefusedError(
                "update_info has tensors and a path. Send one of them.", param="update_info"
            )
        with self._locked(is_shared=True):
            await self._add(info, weights_folder)

    async def _add(self, info: WeightUpdateInfo, weights_folder: str | None) -> None:
        files: list[Path] = []
        try:
            await asyncio.to_thread(self._stage, info, weights_folder, files)
            await self._client.control(LoadWeights(tuple(map(str, files)), is_trial=True))
            await asyncio.to_thread(
                lambda: [each.rename(each.with_suffix(_CHECKED)) for each in files]
            )
        except BaseException:
            await asyncio.to_thread(lambda: [each.unlink(missing_ok=True) for each in files])
            raise

    def _stage(self, info: WeightUpdateInfo, weights_folder: str | None, files: list[Path]) -> None:
        """Write tensors to files, and list these. They are not part of the update before they get
        `_CHECKED`."""
        folder = self._folder()
        if info.path is None:
            files.append(_new_file(folder))
            _write(files[0], info)
            return
        for source in _sources(info.path, weights_folder):
            files.append(_new_file(folder))
            shutil.copyfile(source, files[-1])  # its owner may write it while the engine reads

    async def finish(self, version: str | None) -> str:
        """Have the engine compute with the tensors of the update; others stay. Return its version.

        RefusedError or RequestError if it is refused, and EngineError if the weights cannot be
        loaded: then the engine has its old weights and the update is dropped. It stays open for
        another try after EngineUnavailableError, which a sleeping engine raises too. RefusedError
        409 while another call starts, fills or finishes an update.
        """
        with self._locked():
            return await self._finish(version)

    async def _finish(self, version: str | None) -> str:
        new = await asyncio.to_thread(lambda: sorted(self._folder().glob(f"*{_CHECKED}")))
        if not new:
            raise RefusedError(f"The update has no tensors. POST /update_weights first. {HOW}")
        report = await self._client.control(Inspect())
        files = [*report.loaded.files, *map(str, new)]
        needed = await asyncio.to_thread(_needed, files)
        number = await asyncio.to_thread(self._num_finished) + 1
        op = LoadWeights(tuple(needed), version or str(number))
        try:
            await self._load(op)
        except EngineUnavailableError:
            raise
        except BaseException as error:
            is_refused = isinstance(error, RequestError)
            if is_refused and (await self._client.control(Inspect())).sleep_level:
                raise EngineUnavailableError(
                    "the engine sleeps and takes no weights: POST /wake_up, then "
                    "/finish_weight_update again, since the update stays open"
                ) from error
            await self._drop()
            raise
        await asyncio.to_thread(self._finished, number, needed)
        return op.version

    async def _load(self, op: LoadWeights) -> Report:
        await self._client.control(msgspec.structs.replace(op, is_trial=True))
        try:
            return await self._client.control(op)
        except RequestError as error:  # what is wrong with the tensors was said before
            raise EngineError(str(error)) from error

    def _num_finished(self) -> int:
        try:
            return int((self._root / _COUNT).read_text())
        except OSError:
            return 0

    def _finished(self, number: int, needed: Sequence[str]) -> None:
        """Count the update, and remove files that the engine does not read any more."""
        self._note(_COUNT, str(number))
        self._close(needed)

    def _note(self, file: str, text: str) -> None:
        """Write a file whole, in place of what it was before."""
        partial = self._root / f"partial-{text}"
        partial.write_text(text)
        partial.rename(self._root / file)

    def _close(self, needed: Sequence[str]) -> None:
        """Close the update, and remove all files but those that are needed."""
        if not self._root.is_dir():
            return
        (self._root / _OPEN).unlink(missing_ok=True)
        kept = {Path(each) for each in needed}
        for folder in self._root.iterdir():
            if not folder.is_dir():
                continue
            for file in folder.iterdir():
                if file not in kept:
                    file.unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()


def _needed(files: Sequence[str]) -> list[str]:
    """Return the files that have a tensor which no later one has, in their order."""
    seen = set[str]()
    needed: list[str] = []
    for each in reversed(files):
        names = {tensor.name for tensor in read_header(Path(each))}
        if not names <= seen:
            needed.append(each)
        seen |= names
    return needed[::-1]


def _new_file(folder: Path) -> Path:
    """Return a path that sorts after all files added before."""
    return folder / f"{time.time_ns():020d}.new"


def _write(path: Path, info: WeightUpdateInfo) -> None:
    """Write the tensors of a body to a safetensors file. Raises RefusedError for a body that
    contradicts itself."""
    names, dtypes, shapes = info.names or [], info.dtype_names or [], info.shapes or []
    tensors = info.tensors or []
    if not len(names) == len(dtypes) == len(shapes) == len(tensors):
        raise RefusedError(
            f"update_info has {len(names)} names, {len(dtypes)} dtype_names, {len(shapes)} shapes "
            f"and {len(tensors)} tensors. Send one of each for every tensor.",
            param="update_info",
        )
    header: dict[str, object] = {}
    start = 0
    for name, dtype, shape, data in zip(names, dtypes, shapes, tensors, strict=True):
        stored, num_bytes = _DTYPES.get(dtype.removeprefix("torch."), ("", 0))
        if not stored or name in header:
            wrong = "comes twice" if stored else f"has dtype {dtype[:32]!r}"
            raise RefusedError(
                f"Tensor {name[:128]!r} {wrong}. Send each once, in {', '.join(_DTYPES)}.",
                param="update_info",
            )
        wanted = math.prod(shape) * num_bytes
        if len(data) != wanted or min(shape, default=0) < 0:
            raise RefusedError(
                f"Tensor {name[:128]!r} has {len(data)} bytes, but shape {shape} of {dtype} takes "
                f"{wanted}. Send all of its numbers.",
                param="update_info",
            )
        offsets = [start, start + len(data)]
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": offsets}
        start += len(data)
    _write_file(path, header, tensors)


def _write_file(path: Path, header: dict[str, object], tensors: Sequence[bytes]) -> None:
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)
    with path.open("xb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.writelines(tensors)


def _sources(path: str, weights_folder: str | None) -> Sequence[Path]:
    """Return the files that a path names. Raises RefusedError unless it lies in the folder."""
    if weights_folder is None:
        raise RefusedError(
            "Weights are read from one folder alone, which this server was not given. Start it "
            "with --weights-folder, or send the tensors.",
            param="update_info",
        )
    root = Path(weights_folder)
    found = within(root, path)
    try:
        files = () if found is None else (found,) if found.is_file() else find_weight_files(found)
    except ConfigError as error:
        raise RefusedError(f"{error}.", param="update_info") from error
    if not files or any(within(root, str(each)) is None for each in files):  # or a link in it
        raise RefusedError(
            f"path {path[:200]!r} is outside of the folder for weights. Give one in it.",
            param="update_info",
        )
    return files
