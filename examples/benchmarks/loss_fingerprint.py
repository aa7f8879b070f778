"""What it costs to tell the kind of a loss from its graph, as a share of the training step it belongs to.

    python examples/benchmarks/loss_fingerprint.py                       # SmolLM2-135M, 4 x 128 tokens
    python examples/benchmarks/loss_fingerprint.py --layers 4 --rows 2   # quicker

Losses take turns. A step is forward and backward; the fingerprint is taken between them, as in training, and its time
is both that of the first one of each graph, when nothing of it is in the caches yet, and the median of `--calls` more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _speed import models
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightning_padmin.verification import fingerprint

LARGEST_SHARE = 1e-3
Step = Callable[[], Tensor]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=None, help="of SmolLM2, the lowest; all if left out")
    parser.add_argument("--model", default="smollm2", choices=models.NAMES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="cpu where other programs run too")
    parser.add_argument("--threads", type=int)
    return parser.parse_args(arguments)


def policy_loss(log_probs: Tensor, rows: int) -> Tensor:
    """Clipped ratios with a penalty for the distance from a reference, a mean over rows of means over tokens."""
    ratio, advantages = (log_probs - log_probs.detach()).exp(), torch.randn(rows, 1)
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    gap = log_probs.detach() + 0.1 - log_probs
    carries = torch.ones_like(log_probs)
    return (((0.04 * (gap.exp() - gap - 1) - gain) * carries).sum(1) / carries.sum(1)).mean()


def steps(options: argparse.Namespace) -> dict[str, tuple[Step, nn.Module]]:
    """Losses by name, each with the module whose gradients are cleared after it."""
    small = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 64))
    model = models.build(options.model, 256, options.layers or (None if options.model == "smollm2" else 4), 1024)
    vocabulary = model.config.vocab_size
    shape = (options.rows, options.width)

    def train(*parts: str) -> PreTrainedModel:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not parts or any(part in name for part in parts))
        return model

    def cross_entropy() -> Tensor:
        ids = torch.randint(0, 64, (8, 16))
        return F.cross_entropy(small(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def causal(*parts: str) -> Step:
        def step() -> Tensor:
            ids = torch.randint(0, vocabulary, shape)
            return train(*parts)(input_ids=ids, labels=ids).loss

        return step

    def policy(*parts: str) -> Step:
        def step() -> Tensor:
            ids = torch.randint(0, vocabulary, shape)
            logits = train(*parts)(input_ids=ids).logits[:, :-1]
            chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            return policy_loss(chosen, len(ids))

        return step

    attention = ("q_proj", "v_proj")
    return {
        "small cross entropy": (cross_entropy, small),
        f"{options.model}, all weights": (causal(), model),
        f"{options.model}, weights of attention": (causal(*attention), model),
        f"{options.model}, policy loss": (policy(), model),
        f"{options.model}, policy loss, attention": (policy(*attention), model),
    }


def timed(step: Step, module: nn.Module, calls: int, clock: Clock) -> tuple[float, float, float, int]:
    """Seconds of the step, of its first fingerprint, of one more; and how many facts there are."""
    begin = clock()
    loss = step()
    forward = clock() - begin
    begin = clock()
    facts = len(fingerprint(loss).resolve())
    first, more = clock() - begin, []
    for _ in range(calls):
        begin = clock()
        fingerprint(loss).resolve()
        more.append(clock() - begin)
    begin = clock()
    loss.backward()
    backward = clock() - begin
    module.zero_grad(set_to_none=True)
    return forward + backward, first, statistics.median(more), facts


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if no fingerprint of a step of the large model takes more than 0.1% of it."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    taken: dict[str, list[tuple[float, float, float, int]]] = {}
    prepared = steps(options)
    for turn in range(options.repeats + 1):
        for name, (step, module) in prepared.items():
            times = timed(step, module, options.calls, CLOCKS[options.clock])
            if turn:  # the first turn is a warm-up
                taken.setdefault(name, []).append(times)
    print(f"{'loss':42} {'step ms':>9} {'first us':>9} {'again us':>9} {'share':>9} facts")
    worst = 0.0
    for name, rows in taken.items():
        seconds, first, again = (statistics.median(row[place] for row in rows) for place in range(3))
        share = statistics.median(row[1] / row[0] for row in rows)
        worst = max(worst, share if name.startswith(options.model) else 0.0)
        print(f"{name:42} {seconds * 1e3:9.2f} {first * 1e6:9.0f} {again * 1e6:9.0f} {share:9.3%} {rows[0][3]:5}")
    print(f"medians of {options.repeats} turns by the {options.clock} clock, {options.rows} x {options.width} tokens")
    return int(worst > LARGEST_SHARE)


if __name__ == "__main__":
    raise SystemExit(main())
