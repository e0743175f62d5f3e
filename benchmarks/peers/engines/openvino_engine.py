"""OpenVINO GenAI: its continuous-batching pipeline over token ids, without a tokenizer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.engines.engine import EngineOptions, UnavailableError
from benchmarks.peers.engines.random_checkpoint import count_kv_elements, read_config

__all__ = ["open_engine"]

KV_BYTES = 2
"""Most bytes of an element: the pipeline may choose a smaller type for its cache."""


class OpenVinoEngine:
    """Settings are the pipeline's own but for those named in `settings`."""

    def __init__(self, options: EngineOptions, folder: Path) -> None:
        import openvino
        import openvino_genai

        self._openvino, self._genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = options.max_num_seqs
        scheduler.cache_size = _cache_gb(options)
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.num_threads}
        if options.widen_16_bits:
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", properties
        )
        self.settings: dict[str, Any] = {
            "version": openvino_genai.get_version(),
            "device": "CPU",
            "weights": options.weights,
            "max_num_seqs": options.max_num_seqs,
            "cache_size": scheduler.cache_size,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "dynamic_split_fuse": scheduler.dynamic_split_fuse,
            "enable_prefix_caching": False,
            **properties,
        }
        self._next_id = 0
        self._handles: list[Any] = []
        self._counts: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> None:
        self._counts = [0] * len(prompts)
        self._handles = []
        for prompt, length in zip(prompts, output_lengths, strict=True):
            config = self._genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
            ids = self._openvino.Tensor(np.array([prompt], np.int64))
            self._handles.append(self._pipeline.add_request(self._next_id, ids, config))
            self._next_id += 1

    def step(self) -> list[int]:
        self._pipeline.step()
        for index, handle in enumerate(self._handles):
            if handle.can_read():
                for output in handle.read().values():
                    self._counts[index] += len(output.generated_ids)
        return list(self._counts)

    def kernel_seconds(self) -> None:
        return None

    def close(self) -> None:
        del self._pipeline


def open_engine(options: EngineOptions) -> OpenVinoEngine:
    for package in ("openvino_genai", "openvino"):
        if find_spec(package) is None:
            raise UnavailableError(f"{package} is not installed")
    return OpenVinoEngine(options, _exported(options))


def _exported(options: EngineOptions) -> Path:
    """The converted model; converted once, in a process of its own, whose memory and threads are
    gone before anything is timed."""
    folder = options.work_dir / f"openvino_{options.weights}"
    if folder.exists():
        return folder
    if find_spec("optimum") is None:
        raise UnavailableError("optimum-intel, which converts the model, is not installed")
    command = [sys.executable, "-m", "benchmarks.peers.engines.openvino_export"]
    arguments = [str(options.model), str(folder), options.weights, str(options.seed)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnavailableError(f"the model was not converted: {last}")
    return folder


def _cache_gb(options: EngineOptions) -> int:
    """Room for every request at once, in whole GB as the scheduler wants it."""
    per_token = count_kv_elements(read_config(options.model)) * KV_BYTES
    return -(-options.max_num_seqs * options.max_model_len * per_token // 2**30)
