"""Train a layer of EAGLE for the bundled model on the CPU, in at most half an hour.

Run from the repository root:
    python tools/bundled_model/train_head.py --output src/quire/bundled/eagle

The text is that of the model. The projection of the layer is fitted first, by least squares, to the
states that come next; then all of it learns the model's distribution of the next token. It guesses
from the model's states first, then from the states that it guessed itself, as it does for the
second and further drafts of a step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import Batch, CorpusRows, DialogueRows, Mix, make_batch
from corpus import load_corpus
from evaluate import load_bundled
from head import EagleHead, export_head, states_of
from model import TinyLlama
from muon import Muon
from tokenizer import BUNDLED
from tokenizers import Tokenizer
from torch import Tensor

SEED = 20261126
MUON_LR, ADAM_LR, WARM_UP = 0.01, 2e-3, 30
FIT_STEPS = 24
"""Batches of the fit, before the steps of the training."""

STATE_WEIGHT = 0.2
"""Share of the loss that is the distance between states."""

PASSES = 2
"""Times that a row is guessed, each from the states that the time before has guessed."""


@dataclass(frozen=True)
class Losses:
    """Losses of one step: total, and for each pass the share of tokens on which the guess is the
    model's own first choice."""

    total: float
    agreed: list[float]


class HeadTrainer:
    """Layer and optimizers; the model stays as it is."""

    def __init__(self, model: TinyLlama) -> None:
        torch.manual_seed(SEED)
        self._model = model.requires_grad_(False)
        self.head = EagleHead(model.config)
        named = list(self.head.named_parameters())
        matrices = [w for name, w in named if name.startswith("layers") and w.ndim == 2]
        others = [w for _, w in named if all(w is not matrix for matrix in matrices)]
        self._muon = Muon(matrices, momentum=0.95, weight_decay=0.02)
        self._adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.inference_mode()
    def fit(self, batches: Iterable[Batch]) -> None:
        """Set the projection to what comes closest to the next states of these batches."""
        size = self._model.config.hidden_size
        square = torch.zeros(2 * size + 1, 2 * size + 1, dtype=torch.float64)
        cross = torch.zeros(2 * size + 1, size, dtype=torch.float64)
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                known = states_of(self._model, torch.from_numpy(batch.inputs)).float()
            embedded = self._model.embed_tokens(torch.from_numpy(batch.targets[:, :-1]))
            given = torch.cat((embedded, known[:, :-1]), dim=-1).flatten(0, 1)
            given = torch.cat((given, torch.ones(len(given), 1)), dim=1)
            square += (given.T @ given).double()
            cross += (given.T @ known[:, 1:].flatten(0, 1)).double()
        square += torch.eye(len(square)) * 1e-4 * square.diagonal().mean()
        found = torch.linalg.solve(square, cross).float().T
        self.head.fc.weight.copy_(found[:, :-1])
        self.head.fc.bias.copy_(found[:, -1])

    def update(self, batch: Batch, factor: float) -> Losses:
        """One step."""
        with torch.autocast("cpu", torch.bfloat16):
            losses, total = self._losses(batch)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._muon.step(MUON_LR * factor)
        for group in self._adam.param_groups:
            group["lr"] = ADAM_LR * factor
        self._adam.step()
        self.head.zero_grad(set_to_none=True)
        return losses

    def _losses(self, batch: Batch) -> tuple[Losses, Tensor]:
        model = self._model
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        weights = torch.from_numpy(batch.weights)[:, 1:]
        with torch.no_grad():
            known = states_of(model, inputs).float()
            goal = known[:, 1:]
            logits = F.linear(goal, model.embed_tokens.weight).float()
            law, best = logits.softmax(-1), logits.argmax(-1)
            embedded = model.embed_tokens(targets[:, :-1])
        states = known[:, :-1]
        total = torch.zeros(())
        agreed: list[float] = []
        for turn in range(PASSES):
            guessed = self.head(embedded, states).float()
            scores = F.linear(guessed, model.embed_tokens.weight).float()
            of_law = -(law * scores.log_softmax(-1)).sum(-1)
            of_state = F.smooth_l1_loss(guessed, goal, reduction="none").sum(-1)
            loss = of_law + STATE_WEIGHT * of_state / goal.shape[-1] ** 0.5
            total = total + 0.8**turn * (loss * weights).sum() / weights.sum()
            right = (scores.argmax(-1) == best).float()
            agreed.append(float((right * weights).sum() / weights.sum()))
            states = torch.cat((known[:, :1], guessed[:, :-1]), dim=1)
        return Losses(float(total.detach()), agreed), total


def train(options: argparse.Namespace) -> None:
    """Run all steps, or until the time is over; then export."""
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    library = CorpusRows(load_corpus(), tokenizer, SEED)
    dialogues = DialogueRows(tokenizer, SEED, tool_share=0.5, drills_from=0)
    mix = Mix(options.tokens_per_step, options.talk, options.talk, 0)
    model = load_bundled(BUNDLED)
    trainer, started = HeadTrainer(model), time.monotonic()
    first = range(FIT_STEPS)
    trainer.fit(make_batch(library, dialogues, mix, step, options.row) for step in first)
    for step in range(FIT_STEPS, options.steps):
        used = (time.monotonic() - started) / (60 * options.minutes)
        done = max(step / options.steps, used)  # the rate falls to zero by steps or by time
        if done >= 1:
            break
        factor = min(1.0, (step - FIT_STEPS + 1) / WARM_UP, 2.5 * (1 - done))
        batch = make_batch(library, dialogues, mix, step, options.row)
        losses = trainer.update(batch, factor)
        if step % 20 == FIT_STEPS % 20:
            agreed = " ".join(f"{share:.3f}" for share in losses.agreed)
            seconds = time.monotonic() - started
            print(f"{step}: {seconds:.0f} s, loss {losses.total:.3f}, agreed {agreed}", flush=True)
        if step % 50 == 49:
            export_head(trainer.head, model.config, options.output)
    export_head(trainer.head, model.config, options.output)
    print(f"{time.monotonic() - started:.0f} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the layer")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--minutes", type=float, default=25, help="the most that it may take")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--row", type=int, default=512, help="tokens of a row")
    parser.add_argument("--talk", type=float, default=0.5, help="share of dialogues")
    parser.add_argument("--threads", type=int, default=2)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
