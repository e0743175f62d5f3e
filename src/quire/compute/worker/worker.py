"""One process, one device: the model, its KV pool and the runner over them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.base.errors import ConfigError, EngineError, RequestError
from quire.compute.kv_transfer.disk_blocks import DiskBlocks, open_disk
from quire.compute.lora.bank import AdapterBank, HostAdapter
from quire.compute.models import check_replacements
from quire.compute.runner.forward import NOT_FINITE
from quire.compute.runner.media import MediaStore
from quire.compute.runner.pending import PendingStep
from quire.compute.worker.assemble import Assembly, PoolSize, assemble
from quire.compute.worker.device_memory import CudaMemory, DeviceMemory
from quire.compute.worker.images import EncodedImage, ImageEncoder
from quire.compute.worker.largest_steps import LargestSteps
from quire.compute.worker.load import LoadedModel, load, open_device
from quire.compute.worker.profile import StepProfile
from quire.compute.worker.prompt_embeds import digest_of, read_embeds
from quire.compute.worker.recovery import measure_recovery
from quire.compute.worker.replacements import Replacements, as_tensor, first_sentence, read_files
from quire.compute.worker.settings import WorkerSettings
from quire.compute.worker.tickets import TicketedStep
from quire.compute.worker.turns import Turns
from quire.compute.worker.weight_stash import DroppedTensors, WeightStash
from quire.config.kv_disk.folder import StoreFiles
from quire.protocol.adapters import AdapterRef
from quire.protocol.block_moves import BlockMove, MoveOutcome
from quire.protocol.control import (
    Allocate,
    ControlOp,
    Inspect,
    LoadWeights,
    MeasuredMemory,
    MeasureRecovery,
    OpenDisk,
    Report,
    Sleep,
    StartProfile,
    StopProfile,
    UpdateWeights,
    Wake,
)
from quire.protocol.media import ImageRows, ImageTiles, MediaInfo
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.request import Weights
from quire.protocol.step import IntArray, LateInput, StepPlan, StepResult

__all__ = ["Worker"]


class Worker:
    """Starts in two phases: construction loads the model, `allocate` takes the memory of the KV
    pool. Between them `measure_memory` finds out how much there is for it.

    Raises ConfigError if the model cannot be loaded as asked.
    """

    def __init__(self, settings: WorkerSettings, memory: DeviceMemory | None = None) -> None:
        """memory: meter of the device's memory; None takes the device's own, which a CPU lacks."""
        self._settings = settings
        self._device = open_device(settings.platform)
        self._memory = memory or _own_memory(settings, self._device)
        try:
            self._loaded: LoadedModel | None = load(settings, self._device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"The model does not fit into the GPU's memory: {first_sentence(error)}. Free "
                "some of it, or use a smaller model."
            ) from error
        self._bank = _bank_of(self._loaded, settings)
        self._media = MediaStore(self._device)
        self._turns = Turns() if self._device.type == "cpu" else Turns(share=0.0)
        self._images = self._image_encoder()
        self._embed_width = self._loaded.given.width
        self._size = PoolSize(0, settings.chosen.max_model_len)
        self._assembly: Assembly | None = None
        self._disk: DiskBlocks | None = None
        self._stash: WeightStash | None = None
        self._replaced = Replacements()
        self._weights = Weights()
        self._weights_version = 0
        self._sleep_level = 0
        self._profile = StepProfile()
        self._report = Report(
            kernels=self._loaded.kernels,
            kernel_family=self._loaded.kernel_family,
            numerics=self._loaded.numerics,
            unstable=self._loaded.unstable,
        )

    def _image_encoder(self) -> ImageEncoder | None:
        loaded, chosen = self._loaded, self._settings.chosen
        if loaded is None or loaded.tower is None or loaded.spec.images is None:
            return None
        return ImageEncoder(
            loaded.tower,
            loaded.spec.images,
            self._device,
            chosen.image_cache,
            chosen.num_threads,
            self._turns,
        )

    def measure(self) -> Report:
        """Report what was loaded, and the memory of steps where it can be measured. Call before
        `allocate`."""
        return replace(self._report, measured=self.measure_memory())

    def control(self, op: ControlOp) -> Report:
        """Carry out an operation between steps. EngineError for one that is not a worker's."""
        report = self._report
        if isinstance(op, Allocate):
            self.allocate(op.num_blocks, op.max_model_len)
        elif isinstance(op, MeasureRecovery):
            report = replace(report, recovery_costs=self.measure_recovery())
        elif isinstance(op, OpenDisk):
            self._open_disk(op)
        elif isinstance(op, Sleep):
            self.sleep(op.level)
        elif isinstance(op, Wake):
            self.wake()
        elif isinstance(op, UpdateWeights):
            self.update_weights(op.tensors, op.version)
        elif isinstance(op, LoadWeights):
            self.load_weights(op)
        elif isinstance(op, StartProfile):
            self._profile.start(op.directory, self._device)
        elif isinstance(op, StopProfile):
            report = replace(report, profile=self._profile.stop())
        elif not isinstance(op, Inspect):
            raise EngineError(f"{type(op).__name__} is no operation of a worker")
        return replace(
            report,
            weights_version=self._weights_version,
            weights=self._weights,
            loaded=LoadWeights(self._replaced.files or (), self._weights.version),
            sleep_level=self._sleep_level,
        )

    def sleep(self, level: int) -> None:
        """Give the memory of the KV pool back; at level 2 that of the weights too, and at level 1
        move them from a GPU to host memory."""
        self._synchronize()
        if self._disk is not None:
            self._disk.cancel_all()  # moves would keep the pool
        parts = (self._loaded, self._stash, self._images) if level == 2 else ()
        dropped = DroppedTensors(self._assembly, *parts)
        del parts
        self._assembly = None
        if level == 2:
            self._loaded = self._stash = self._images = None
        elif self._device.type != "cpu" and self._loaded is not None and self._stash is None:
            self._stash = WeightStash(self._loaded.model)
        if self._bank is not None and (self._loaded is None or self._stash is not None):
            self._bank.let_go()
        self._sleep_level = max(self._sleep_level, level)
        dropped.collect(self)
        if self._device.type == "cuda":
            gc.collect()  # other cycles may hold memory of the device
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the memory again. Raises ConfigError if another program has taken it; then the
        worker sleeps on."""
        try:
            if self._loaded is None:
                self._loaded = load(self._settings, self._device, self._replaced.tensors)
                self._images = self._image_encoder()
            if self._stash is not None:
                self._stash.restore()
                self._stash = None
            if self._bank is not None and not self._bank.is_serving:
                assert self._loaded.adapters is not None, "as before it slept"
                with torch.inference_mode():
                    self._bank.serve(self._loaded.model, self._loaded.adapters)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"The weights do not fit into the GPU's memory any more: {first_sentence(error)}. "
                "Free some of it and wake the engine again."
            ) from error
        self.allocate(self._size.num_blocks, self._size.max_model_len)
        self._sleep_level = 0

    def update_weights(self, tensors: Mapping[str, Any], version: str = "") -> None:
        """Load the model again with these tensors in place of the checkpoint's. While awake.
        version: their label; empty for the number of replacements so far.

        Raises RequestError or ConfigError if they are refused, and nothing changes then. Raises
        EngineError if they cannot be loaded: the old ones are there again, or the worker sleeps;
        the K/V are lost.
        """
        given = {name: as_tensor(name, value) for name, value in tensors.items()}
        self._check_replacements(given)
        copies = {name: tensor.clone() for name, tensor in given.items()}
        self._replace(Replacements.of({**self._replaced.tensors, **copies}), version)

    def load_weights(self, op: LoadWeights) -> None:
        """Load the model again with the tensors of files, and of no others, in place of the
        checkpoint's. Errors as of `update_weights`."""
        is_awake = self._loaded is not None and not self._sleep_level
        if is_awake and not op.is_trial and op.files == self._replaced.files:
            self._weights = replace(self._weights, version=op.version)
            return
        tensors = read_files(op.files)
        self._check_replacements(tensors)
        if not op.is_trial:
            self._replace(Replacements.of(tensors, op.files), op.version)

    def _check_replacements(self, given: Mapping[str, torch.Tensor]) -> None:
        if self._loaded is None or self._sleep_level:
            raise RequestError("the engine sleeps: wake it up before its weights are replaced")
        settings = self._settings
        check_replacements(self._loaded.model, settings.folder, settings.load_format, given)

    def _replace(self, replaced: Replacements, version: str) -> None:
        self.sleep(2)
        kept, self._replaced = self._replaced, replaced
        reason: str | None = None
        try:
            self.wake()
        except BaseException as error:  # noqa: BLE001  its traceback would keep the new model alive
            reason = str(error) or repr(error)
        if reason is not None:
            self._replaced = kept
            raise self._recovered_from(reason)
        self._weights_version += 1
        self._weights = Weights(version or str(self._weights_version), replaced.digest)

    def _recovered_from(self, reason: str) -> EngineError:
        """Load the model as it was before new weights could not be loaded; return what to say. The
        new ones may be loaded, and only the KV pool have had no room: they go first."""
        self.sleep(2)
        with contextlib.suppress(Exception):
            self.wake()
        became = "the engine goes on with the old ones"
        if self._sleep_level:
            became = "nor can the old ones again, so the engine sleeps: free memory and wake it up"
        return EngineError(f"the new weights cannot be loaded ({reason}): {became}")

    def measure_memory(self) -> MeasuredMemory | None:
        """Compute the largest steps there may be, over a KV pool of a few blocks, and see what they
        take; None where nothing measures, and the prediction of the plan holds. Before `allocate`.

        Raises ConfigError if not even they fit, EngineError if the device computes no step.
        """
        memory, settings = self._memory, self._settings
        if memory is None:
            return None
        weights = memory.tensors()
        loaded = max(memory.held(), weights)
        memory.watch()
        steps = LargestSteps(
            settings.chosen.max_num_seqs,
            settings.chosen.max_num_batched_tokens,
            settings.chosen.max_model_len,
            settings.layout,
            None if settings.spec.draws_tokens else "mean",
        )
        try:
            self._assemble(PoolSize(steps.num_blocks, settings.chosen.max_model_len))
            failed = [failure for plan in steps.plans() for failure in self.execute(plan).failed]
        except torch.OutOfMemoryError as error:
            raise self._too_large(first_sentence(error)) from error
        if memory.num_refused():  # the runner has computed the rows again in halves
            raise self._too_large("memory ran out")
        for failure in failed:
            if failure.message != NOT_FINITE:  # as random weights may make it
                raise EngineError(f"The device computes no step: {failure.message}")
        peak = memory.most_held() - steps.num_blocks * settings.layout.page_bytes
        self._assembly = None
        gc.collect()
        memory.held()
        return MeasuredMemory(memory.total, memory.free, weights, loaded, max(peak, loaded))

    def _too_large(self, reason: str) -> ConfigError:
        return ConfigError(
            f"A step of {self._settings.chosen.max_num_batched_tokens:,} tokens does not fit into "
            f"the GPU's memory beside the model: {reason}. Lower max_num_batched_tokens, "
            "max_num_seqs or max_model_len."
        )

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Make the KV pool and what computes over it. Raises ConfigError if the memory for it has
        gone to somebody else meanwhile."""
        settings = self._settings
        self._size = PoolSize(
            num_blocks, max_model_len, settings.chosen.num_host_blocks, settings.max_captured_rows
        )
        try:
            self._assemble(self._size)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"The KV cache of {num_blocks:,} blocks does not fit into the GPU's memory any "
                f"more: {first_sentence(error)}. Lower gpu_memory_utilization, or start again."
            ) from error

    def _assemble(self, size: PoolSize) -> None:
        if self._loaded is None:
            raise EngineError("the engine has been shut down: start a new one")
        with torch.inference_mode():
            self._assembly = assemble(self._loaded, self._settings, size, self._media)
        self._synchronize()  # what was made lies on another stream than the one that computes

    def _synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def put_media(self, handle: int, data: object) -> MediaInfo:
        """See `Executor.put_media`. Any thread may call it, also while a step is launched."""
        if isinstance(data, ImageTiles):
            image = self._encoded(data)
            self._media.put(handle, image.rows)
            num_tokens, num_bytes = len(image.rows), image.num_kept_bytes
            return MediaInfo(num_tokens, image.digest, image.was_kept, num_bytes)
        rows = self._image_rows(data) if isinstance(data, ImageRows) else self._given_rows(data)
        self._media.put(handle, rows)
        return MediaInfo(len(rows), digest_of(rows))

    def _encoded(self, tiles: ImageTiles) -> EncodedImage:
        encoder = self._images
        if encoder is None and self._sleep_level:
            raise RequestError("the engine sleeps: wake it up, and send the image again")
        if encoder is None:
            raise RequestError("the served model takes text only: leave the image out")
        return encoder.encode(tiles, getattr(torch, self._settings.chosen.dtype))

    def _image_rows(self, image: ImageRows) -> torch.Tensor:
        chosen, images = self._settings.chosen, self._settings.spec.images
        if images is None or not chosen.enable_mm_embeds:
            raise RequestError(
                "image_embeds is given, but this engine takes no encoded images: start it with "
                "enable_mm_embeds (--enable-mm-embeds)"
            )
        width, dtype = (1 + images.num_deep) * self._embed_width, getattr(torch, chosen.dtype)
        num_rows = range(image.num_rows, image.num_rows + 1)
        return read_embeds(image.data, width, num_rows, dtype, "image_embeds")

    def _given_rows(self, data: object) -> torch.Tensor:
        if not self._settings.chosen.enable_prompt_embeds:
            raise RequestError(
                "prompt_embeds is given, but this engine takes no embeddings: start it with "
                "enable_prompt_embeds (--enable-prompt-embeds)"
            )
        chosen = self._settings.chosen
        dtype: torch.dtype = getattr(torch, chosen.dtype)
        return read_embeds(data, self._embed_width, range(1, self._size.max_model_len), dtype)

    def media_bytes(self, handle: int) -> bytes:
        """Return the rows under a handle. Any thread may call it until they are dropped."""
        return self._media.get(handle).contiguous().view(torch.uint8).numpy().tobytes()

    def put_rows(self, handle: int, num_rows: int, data: bytes) -> None:
        """Take rows of the worker of rank 0, from its `media_bytes`. Any thread may call it."""
        dtype: torch.dtype = getattr(torch, self._settings.chosen.dtype)
        self._media.put(handle, torch.frombuffer(bytearray(data), dtype=dtype).view(num_rows, -1))

    def drop_media(self, handles: Sequence[int]) -> None:
        """See `Executor.drop_media`. In the thread that launches steps."""
        self._media.drop(handles)

    def read_adapter(self, ref: AdapterRef) -> HostAdapter:
        """Return an adapter in host memory. Any thread may call it, beside steps. RequestError for
        one that cannot be used."""
        if self._bank is None:
            raise RequestError(
                f"the request names the adapter {ref.name!r}, but this engine takes none: start it "
                "with enable_lora (--enable-lora)"
            )
        return self._bank.read(ref)

    def put_adapter(self, slot: int, adapter: HostAdapter) -> None:
        """Have rows with `slot` + 1 compute with this adapter. In the thread that launches steps;
        no row may use the slot."""
        assert self._bank is not None, "an adapter was read"
        self._synchronize()
        with torch.inference_mode():
            self._bank.put(slot, adapter)
        self._synchronize()

    def _open_disk(self, op: OpenDisk) -> None:
        memory = None if self._assembly is None else self._assembly.memory
        if memory is not None and memory.num_state_parts > op.num_state_parts:
            raise EngineError(
                f"a recurrent state takes {memory.num_state_parts} blocks of the K/V store, and "
                f"{op.num_state_parts} were counted: this is a fault, please report it"
            )
        files, rank = StoreFiles(Path(op.folder)), self._settings.shard.rank
        try:
            self._disk = open_disk(
                files.slots_of(rank),
                files.header_of(rank),
                op.slot_bytes,
                op.num_slots,
                is_writer=op.is_writer,
                lock=op.lock if rank == 0 else None,
            )
        except OSError as error:
            raise ConfigError(
                f"the K/V store cannot be opened ({error}). Give another kv_disk."
            ) from error

    def start_move(self, move: BlockMove, done: Future[MoveOutcome]) -> None:
        """Give a move to the disk's threads, which end `done`. In the thread that launches steps,
        so that those before it have been computed."""
        memory = None if self._assembly is None else self._assembly.memory
        if self._disk is None or memory is None:  # asleep
            done.set_result(move.all_lost)
            return
        self._disk.start(move, memory, done)

    def cancel_move(self, ticket: int) -> None:
        """See `Executor.cancel_move`. In the thread that launches steps."""
        if self._disk is not None:
            self._disk.cancel(ticket)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step; see `Runner.launch`. After `allocate`. Copies of blocks are made in the
        order of the steps, so their tickets end with the step that starts them."""
        assert self._assembly is not None, "allocate comes first"
        step = self._turns.step(partial(self._assembly.runner.launch, plan))
        if not plan.started:
            return step
        done, failed = self._assembly.tiers.take_ended(plan.started)
        return TicketedStep(step, done, failed)

    def late(self, late: LateInput) -> None:
        """Hand over what a step awaits that is launched in another thread."""
        assert self._assembly is not None, "allocate comes first"
        self._assembly.runner.late_inputs.put(late)

    def made_drafts(self, step_id: int, *, wait: bool) -> Mapping[int, IntArray] | None:
        """See `Executor.made_drafts`. In another thread than steps are launched."""
        assert self._assembly is not None, "allocate comes first"
        return self._assembly.runner.made_drafts.of_step(step_id, wait=wait)

    def give_up_waiting(self) -> None:
        """Steps that await late input fail, now and from now on."""
        if self._assembly is not None:
            self._assembly.runner.late_inputs.close()
            self._assembly.runner.made_drafts.close()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step."""
        return self.launch(plan).result()

    def measure_recovery(self) -> RecoveryCosts:
        """Measure the costs of bringing a preempted request back, before any request is served."""
        assert self._assembly is not None, "allocate comes first"
        settings, size = self._settings, self._size
        return measure_recovery(
            self.execute,
            self._copy_out,
            layout=settings.layout,
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            longest_step=min(settings.chosen.max_num_batched_tokens, size.max_model_len - 1),
        )

    @torch.inference_mode()
    def _copy_out(self, src: IntArray, dst: IntArray) -> None:
        """Blocks to the host, and wait until they are there."""
        assert self._assembly is not None, "allocate comes first"
        with self._assembly.computing():
            self._assembly.tiers.host.copy_out(src, dst)
        self._synchronize()

    def close(self) -> None:
        """Let go of all memory, the device's too, so that another engine may take it. What is to be
        saved on the disk is, for a while."""
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        with contextlib.suppress(RuntimeError):  # a device that broke has nothing to give back
            self._synchronize()
            self._assembly = self._loaded = self._images = None
            if self._device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
        self._assembly = self._loaded = self._images = None


def _bank_of(loaded: LoadedModel, settings: WorkerSettings) -> AdapterBank | None:
    if loaded.adapters is None:
        return None
    chosen = settings.chosen
    dtype: torch.dtype = getattr(torch, chosen.dtype)
    return AdapterBank(loaded.model, loaded.adapters, dtype, chosen.adapters_in_host)


def _own_memory(settings: WorkerSettings, device: torch.device) -> DeviceMemory | None:
    if device.type == "cpu":
        return None
    gpu = settings.platform.gpu
    return CudaMemory(device, 0 if gpu is None else gpu.free_bytes)
