"""Train the bundled model on the CPU; a stopped run can be resumed.

Run from the repository root, after tokenizer.py:
    python tools/bundled_model/train.py --checkpoint FOLDER
The defaults are those of the bundled weights. Ctrl-C stops it; the same command goes on.
The learning rate is constant until the last D steps, where it falls to zero, so N may still be
changed while D has not begun. The last L of these steps see rows of 2048 tokens instead of 512,
and so does the extension: more steps, for which the learning rate rises once more and falls again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import Batch, CorpusRows, DialogueRows, Mix, make_batch
from corpus import load_corpus
from export import export_weights
from model import ModelConfig, TinyLlama
from muon import Muon
from tokenizer import BUNDLED
from tokenizers import Tokenizer
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

SEED = 20261120
SHORT_ROW, LONG_ROW = 512, 2048
MUON_LR, ADAM_LR, WARM_UP = 0.02, 2e-3, 60
EXTENSION_FACTOR = 0.4  # of the learning rates, where the extension begins


@dataclass(frozen=True)
class Schedule:
    """Length of the run and of its phases, in steps."""

    steps: int
    decay_steps: int
    long_steps: int
    extension_steps: int

    @property
    def total(self) -> int:
        return self.steps + self.extension_steps

    def factor(self, step: int) -> float:
        """Return the factor of the learning rates."""
        if step >= self.steps:
            return EXTENSION_FACTOR * (self.total - step) / self.extension_steps
        return min(1.0, (step + 1) / WARM_UP, (self.steps - step) / self.decay_steps)

    def row_length(self, step: int) -> int:
        return LONG_ROW if step >= self.steps - self.long_steps else SHORT_ROW


@dataclass(frozen=True)
class Workers:
    """Processes that share the rows of a step.

    They meet once a step. On a machine with other work this is faster than as many threads, which
    meet after every operation and wait each time for the one that was interrupted.
    """

    rank: int
    count: int

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replace every tensor by its sum over the processes."""
        if self.count > 1:
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            distributed.all_reduce(flat)
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))


class Trainer:
    """Model, optimizers and the number of steps done."""

    def __init__(self, checkpoint: Path, compiled: bool, workers: Workers) -> None:
        torch.manual_seed(SEED)
        self._workers = workers
        self.model = TinyLlama(ModelConfig())
        self.step = 0
        matrices = [
            w
            for name, w in self.model.named_parameters()
            if name.startswith("layers") and w.ndim == 2
        ]
        others = [w for w in self.model.parameters() if all(w is not matrix for matrix in matrices)]
        self._muon = Muon(matrices, momentum=0.95, weight_decay=0.05)
        self._adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self._loss = torch.compile(self._weighted_loss) if compiled else self._weighted_loss
        self._file = checkpoint / "state.pt"
        if self._file.exists():
            self._load()

    def _weighted_loss(
        self, inputs: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(inputs)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        weighted = losses.view_as(weights) * weights
        return weighted.sum(), (weighted.sum(1) / weights.sum(1)).detach()

    def update(self, batch: Batch, factor: float) -> Tensor:
        """One step; returns the mean loss of every row, in nats per token."""
        own = slice(self._workers.rank, None, self._workers.count)
        arrays = (batch.inputs[own], batch.targets[own], batch.weights[own])
        loss, losses = self._loss(*(torch.from_numpy(array.copy()) for array in arrays))
        (loss / float(batch.weights.sum())).backward()
        row_losses = torch.zeros(len(batch.inputs))
        row_losses[own] = losses
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        self._workers.add_up([row_losses, *gradients])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._muon.step(MUON_LR * factor)
        for group in self._adam.param_groups:
            group["lr"] = ADAM_LR * factor
        self._adam.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        return row_losses

    def save(self) -> None:
        """Write the whole state; an interrupted write leaves the old one."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "config": asdict(self.model.config),
            "model": self.model.state_dict(),
            "muon": self._muon.state_dict(),
            "adam": self._adam.state_dict(),
        }
        partial = self._file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._file)

    def _load(self) -> None:
        state = torch.load(self._file, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])


class Log:
    """Mean losses since the last line, printed and appended to log.jsonl."""

    def __init__(self, folder: Path, mix: Mix) -> None:
        self._file = folder / "log.jsonl"
        self._mix = mix
        self._dialogue: list[float] = []
        self._library: list[float] = []
        self._start, self._steps = time.monotonic(), 0

    def add(self, step: int, length: int, row_losses: Tensor) -> None:
        talk = self._mix.dialogue_rows(step, length)
        self._dialogue += row_losses[:talk].tolist()
        self._library += row_losses[talk:].tolist()
        self._steps += 1

    def write(self, step: int) -> None:
        seconds = time.monotonic() - self._start
        line = {
            "step": step,
            "library_loss": round(sum(self._library) / max(1, len(self._library)), 4),
            "dialogue_loss": round(sum(self._dialogue) / max(1, len(self._dialogue)), 4),
            "tokens_per_second": round(self._steps * self._mix.tokens_per_step / seconds),
            "seconds": round(seconds, 1),
        }
        with self._file.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
        print(line, flush=True)
        self._dialogue, self._library = [], []
        self._start, self._steps = time.monotonic(), 0


def train(rank: int, options: argparse.Namespace) -> None:
    """Run from the checkpoint, or from the beginning, to the last step; then export."""
    torch.set_num_threads(options.threads)
    workers = Workers(rank, options.processes)
    if workers.count > 1:
        meeting = f"tcp://127.0.0.1:{options.port}"
        distributed.init_process_group("gloo", meeting, rank=rank, world_size=workers.count)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    schedule = Schedule(
        options.steps, options.decay_steps, options.long_steps, options.extension_steps
    )
    mix = Mix(options.tokens_per_step, options.early_share, options.late_share, options.late_from)
    library = CorpusRows(load_corpus(), tokenizer, SEED)
    dialogues = DialogueRows(tokenizer, SEED, options.tool_share, options.drills_from)
    trainer = Trainer(options.checkpoint, options.compiled, workers)
    for done in range(trainer.step):
        length = schedule.row_length(done)
        for _ in range(mix.rows(length) - mix.dialogue_rows(done, length)):
            library.next_start(length)
    log = Log(options.checkpoint, mix)
    while trainer.step < schedule.total:
        step, length = trainer.step, schedule.row_length(trainer.step)
        batch = make_batch(library, dialogues, mix, step, length)
        log.add(step, length, trainer.update(batch, schedule.factor(step)))
        if rank == 0 and trainer.step % 20 == 0:
            log.write(trainer.step)
        if rank == 0 and (trainer.step % 50 == 0 or trainer.step == schedule.total):
            trainer.save()
    if rank == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        export_weights(trainer.model, options.output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of state and log")
    parser.add_argument("--output", type=Path, default=BUNDLED, help="folder of the model")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--decay-steps", type=int, default=600)
    parser.add_argument("--long-steps", type=int, default=36)
    parser.add_argument("--extension-steps", type=int, default=200)
    parser.add_argument("--tokens-per-step", type=int, default=6144)
    parser.add_argument("--early-share", type=float, default=0.4, help="dialogues at first")
    parser.add_argument("--late-share", type=float, default=0.6, help="dialogues later")
    parser.add_argument("--late-from", type=int, default=700, help="first step of the late share")
    parser.add_argument("--tool-share", type=float, default=0.5)
    parser.add_argument("--drills-from", type=int, default=1400, help="first step with drills")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2))
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--port", type=int, default=29533, help="where the processes meet")
    parser.add_argument("--eager", dest="compiled", action="store_false")
    options = parser.parse_args()
    options.checkpoint.mkdir(parents=True, exist_ok=True)
    if options.processes == 1:
        train(0, options)
    else:
        spawn(train, (options,), options.processes)


if __name__ == "__main__":
    main()
