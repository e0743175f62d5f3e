"""Train the bundled model by reinforcement (GRPO) to write one letter more often.

    python examples/grpo.py --steps 200 --output grpo.json --save trained

Each step draws a group of answers per prompt. An answer's advantage is its reward less the mean of
its group, over their deviation (Shao et al. 2024, arXiv:2402.03300, section 4.1). Log-probabilities
of the draws and of the training forward are the same bits, so on-policy ratios are exactly 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quire import LLM, CompletionOutput, SamplingParams
from quire.entrypoints.bench.record import new_record, spread_of
from quire.training import PolicyModel, sampled_log_probs

QUESTIONS = (
    "What is your name?",
    "What can you do?",
    "Describe the city of Lima.",
    "Tell me a story.",
)
CLIP = 0.2
LARGEST_NORM = 1.0


@dataclass(frozen=True)
class Step:
    """reward: mean over the answers. ratio_error: largest |ratio − 1| over the drawn tokens."""

    reward: float
    ratio_error: float
    seconds: float


def train(
    llm: LLM,
    policy: PolicyModel,
    prompts: Sequence[list[int]],
    reward: Callable[[CompletionOutput], float],
    *,
    steps: int,
    group: int = 4,
    max_tokens: int = 16,
    learning_rate: float = 5e-5,
    seed: int = 0,
    report: Callable[[int, Step], None] = lambda _number, _step: None,
) -> list[Step]:
    """Train with one update per step, on all prompts. reward: reward of an answer."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    done: list[Step] = []
    for number in range(steps):
        started = time.perf_counter()
        params = SamplingParams(
            n=group,
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0,
            seed=seed + number,
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        answers = [answer for output in outputs for answer in output.outputs]
        rewards = torch.tensor([reward(answer) for answer in answers]).view(-1, group)
        centered = rewards - rewards.mean(1, keepdim=True)
        advantages = (centered / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        sequences = [
            [*prompt, *answer.token_ids]
            for prompt, output in zip(prompts, outputs, strict=True)
            for answer in output.outputs
        ]
        drawn = [sampled_log_probs(answer) for answer in answers]
        scored = [values[-len(old) :] for values, old in zip(policy(sequences), drawn, strict=True)]
        ratios = (torch.cat(scored) - torch.cat(drawn)).exp()
        factors = advantages.repeat_interleave(torch.tensor([len(old) for old in drawn]))
        clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratios * factors, clipped * factors).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), LARGEST_NORM)
        optimizer.step()
        policy.push()
        error = float((ratios.detach() - 1).abs().max())
        done.append(Step(float(rewards.mean()), error, time.perf_counter() - started))
        report(number, done[-1])
    return done


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a model to write one letter more often.")
    parser.add_argument("--model", help="a folder or hub id; the bundled model by default")
    parser.add_argument("--letter", default="e")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--group", type=int, default=4, help="answers per prompt and step")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="a JSON file for the curve")
    parser.add_argument("--save", type=Path, help="a folder for the trained model")
    options = parser.parse_args(arguments)
    if options.group < 2:
        parser.error(f"--group {options.group}: give 2 or more, since answers are compared")
    with LLM(
        options.model, dtype="float32", max_model_len=512, num_threads=options.threads, quiet=True
    ) as llm:
        torch.set_num_threads(options.threads)  # an engine with kernels leaves torch one
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True
            )
            for text in QUESTIONS
        ]
        done = train(
            llm,
            policy := PolicyModel(llm),
            prompts,
            lambda answer: float(answer.text.count(options.letter)),
            steps=options.steps,
            group=options.group,
            max_tokens=options.max_tokens,
            learning_rate=options.learning_rate,
            seed=options.seed,
            report=lambda number, step: print(
                f"step {number}: reward {step.reward:.2f}, largest |ratio - 1| "
                f"{step.ratio_error:g}, {step.seconds:.2f} s",
                flush=True,
            ),
        )
        if options.save is not None:
            policy.save(options.save)
        if options.output is not None:
            new_record(
                "grpo",
                ["python", "examples/grpo.py", *(arguments or sys.argv[1:])],
                llm.engine.resolved,
                None,
                seed=options.seed,
                workload={
                    "reward": f"letters {options.letter!r} in an answer",
                    "prompts": len(prompts),
                    "group": options.group,
                    "max_tokens": options.max_tokens,
                    "learning_rate": options.learning_rate,
                    "torch_threads": options.threads,
                },
                figures={
                    "reward": spread_of([step.reward for step in done]),
                    "largest_ratio_error": spread_of([step.ratio_error for step in done]),
                    "step_seconds": spread_of([step.seconds for step in done]),
                },
            ).save(options.output)


if __name__ == "__main__":
    main()
