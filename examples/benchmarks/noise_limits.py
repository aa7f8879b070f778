"""How small a fault the gradient check still finds, by kind, on models of transformers on the CPU.

    python examples/benchmarks/noise_limits.py [--models llama smollm2] [--seeds 20] [--json FILE]

For each model, each precision (`bf16`: weights too; `mixed`: float32 weights, autocast; `float32`) and each seed, rows
of random lengths go through the check's own passes. Printed as Markdown: how far an exact split is from the un-split
batch beside the spread that the limit is taken from (a limit of `times` spreads must refuse no exact one), then the
share of probes in which a fault of each kind is refused with one limit for all models (0.1; in float32 1e-3) and with
the measured one. Exit code 1 if an exact split would be refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from _speed import models as speed_models
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_padmin import PadMinConfig
from lightning_padmin.architectures import has_experts
from lightning_padmin.batch import infer_schema, measure
from lightning_padmin.distributed import exchange_alone
from lightning_padmin.verification.compare import HALF_LIMIT, Tolerance
from lightning_padmin.verification.explain import group_weights
from lightning_padmin.verification.noise import measured_limit, narrowed_limit, rounded_otherwise
from lightning_padmin.verification.passes import LocalPasses
from lightning_padmin.verification.probe import make_probe
from lightning_padmin.verification.rows import choices
from lightning_padmin.verification.sketch import Sketches, combine

MODELS = ("llama", "qwen2", "gru", "mixtral", "qwen2-moe", "smollm2")
PRECISIONS = ("bf16", "mixed", "float32")
VOCABULARY, ROWS = 512, 8
RAGGED = (0.1, 0.25, 0.5, 0.9)  # lengths are this part of the middle one around it
HEAVIER = (1.02, 1.05, 1.1, 1.5, 5.0)
CLASSES = (1.1, 1.5, 5.0)
SHARES = (0.02, 0.05, 0.1, 0.2, 1.0)


class Recurrent(nn.Module):
    """A GRU in place of a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(VOCABULARY, 64), nn.GRU(64, 64, 2, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Logits of all tokens."""
        return transformers.modeling_outputs.CausalLMOutput(logits=self.head(self.rnn(self.embedding(input_ids))[0]))


def build(name: str) -> nn.Module:
    """A model of random weights, or SmolLM2-135M, in float32."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    if name == "gru":
        return Recurrent()
    if name == "smollm2":
        return speed_models.build("smollm2", 0, 30, 0)
    kind, more = {
        "llama": ("Llama", {}),
        "qwen2": ("Qwen2", {}),
        "mixtral": ("Mixtral", {"num_local_experts": 4}),
        "qwen2-moe": ("Qwen2Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    }[name]
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


class Step:
    """Token-mean cross-entropy; tokens of odd classes weigh `classes`, and so does what it is divided by."""

    def __init__(self, model: nn.Module, is_mixed: bool, tried: Sequence[float]) -> None:
        self.model, self.is_mixed, self.tried, self.classes = model, is_mixed, tried, 1.0
        self.is_half = is_mixed or next(model.parameters()).dtype is torch.bfloat16

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss."""
        with torch.autocast("cpu", torch.bfloat16) if self.is_mixed else nullcontext():
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:].flatten()
        losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels, ignore_index=-100, reduction="none")
        weight = torch.where(labels == -100, 0.0, torch.where(labels % 2 == 1, self.classes, 1.0))
        return (losses * weight).sum() / weight.sum()


def make_batch(seed: int, ragged: float, longest: int, vocabulary: int) -> dict[str, Tensor]:
    """Rows of random lengths; some of them have a label on their first token."""
    generator = np.random.default_rng(seed)
    middle = longest / (1 + ragged)
    lengths = generator.integers(round(middle * (1 - ragged)) + 2, longest + 1, size=ROWS)
    ids = torch.zeros(ROWS, int(lengths.max()), dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.as_tensor(generator.integers(1, vocabulary, size=length))
        mask[row, :length] = 1
        prompt = int(generator.integers(0, 2)) * int(length) // 4
        labels[row, prompt:length] = ids[row, prompt:length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def probe_once(step: Step, seed: int, longest: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    """What one probe says: of the exact split, then of each fault."""
    config = PadMinConfig(token_budget=ROWS * longest)
    batch = make_batch(seed, RAGGED[seed % len(RAGGED)], longest, vocabulary)
    schema = infer_schema(batch, config.fields, pad_token_id=0)
    table = measure(batch, schema, loss_reduction="token-mean", label_shift=1)
    choice = choices(table, ROWS * longest, HALF_LIMIT)
    probe = make_probe(batch, schema, table, config, max(choice), groups=choice[max(choice)].groups)
    passes = LocalPasses(step, batch, schema, step.model, probe, None)
    weights = group_weights(table, probe.groups, "token-mean")

    widest = HALF_LIMIT if step.is_half else Tolerance.for_(()).limit

    def far(found: Sketches, wanted: Sketches, limit: float = widest) -> float:
        return passes.difference(found, wanted, limit)[0]

    try:
        came = passes.came()
        again = rounded_otherwise(passes)
        exact = {"exact": far(passes.split(weights), came), "spread": far(again, came)}
        measure_limit = measured_limit if step.is_half else narrowed_limit
        limit = measure_limit(exact["spread"], widest, exchange_alone)
        limit = widest if has_experts(step.model) else limit  # as the check has it
        before = after = faults(step, passes, probe, table, weights, came, widest)
        if step.is_mixed:
            passes.in_float32, passes.parts, limit = True, None, Tolerance.for_(()).limit
            came = passes.came()
            exact["exact"] = far(passes.split(weights), came, limit)
            after = faults(step, passes, probe, table, weights, came, limit)
        yield exact | {"limit": limit, "kind": "none", "size": 0.0}
        for (kind, size, value), (_, _, now) in zip(before, after, strict=True):
            yield {"kind": kind, "size": size, "before": value > widest, "after": now > limit}
    finally:
        passes.restore()


def faults(
    step: Step,
    passes: LocalPasses,
    probe: Any,
    table: Any,
    weights: Sequence[float],
    came: Sketches,
    limit: float,
) -> list[tuple[str, float, float]]:
    """Kind, size and difference of each fault."""

    def far(found: Sketches, wanted: Sketches = came) -> float:
        return passes.difference(found, wanted, limit)[0]

    rows = np.array([len(group) for group in probe.groups]) / len(probe.rows)
    found = [("wrong reduction, shares off by", float(abs(rows[0] - weights[0])), far(passes.split(list(rows))))]
    first = np.array([table.loss_tokens[g].sum() + table.first_weight[g].sum() for g in probe.groups], dtype=float)
    shifted = first / first.sum()
    if abs(shifted[0] - weights[0]) > 1e-9:
        size = float(abs(shifted[0] - weights[0]))
        found.append(("wrong label_shift, shares off by", size, far(passes.split(list(shifted)))))
    one = [replace(probe.came, rows=r, start=s, length=n) for r, s, n in _each(probe.came)]
    share = group_weights(table, [np.array([row]) for row in probe.rows], "token-mean")
    alone = [passes.of([each]) for each in one]
    for heavier in HEAVIER:
        share_now = [w * (heavier if k == 0 else 1.0) for k, w in enumerate(share)]
        found.append(("one row weighs, times", heavier, far(combine(alone, share_now), combine(alone, share))))
    parts = passes.parts
    for classes in step.tried:
        step.classes, passes.parts = classes, None
        whole = passes.came()
        found.append(("class weights, of every other class", classes, far(passes.split(weights), whole)))
    step.classes, passes.parts = 1.0, parts
    return found


def _each(slots: Any) -> list[tuple[Any, Any, Any]]:
    return [(slots.rows[k : k + 1], slots.start[k : k + 1], slots.length[k : k + 1]) for k in range(len(slots))]


def bucket(kind: str, size: float) -> str:
    """Shares of one size are one line of the table."""
    if not kind.endswith("off by"):
        return f"{kind} {size:g}"
    low, high = next((a, b) for a, b in zip((0.0, *SHARES), SHARES, strict=False) if size <= b)
    return f"{kind} {100 * low:.0f} to {100 * high:.0f}%"


def report(name: str, precision: str, lines: Sequence[dict[str, Any]]) -> bool:
    """Prints what was found; returns whether every exact split passed."""
    exact = [each for each in lines if each["kind"] == "none"]
    values, spreads, limits = (np.array([each[key] for each in exact]) for key in ("exact", "spread", "limit"))
    times = (values / np.maximum(spreads, 1e-12)).max() if precision != "mixed" else float("nan")
    print(f"\n### {name}, {precision}: {len(exact)} probes\n")
    print(f"exact split: median {np.median(values):.1e}, most {values.max():.1e}; spread: median ", end="")
    print(
        f"{np.median(spreads):.1e}; most exact / spread {times:.2f}; limit {limits.min():.1e} to {limits.max():.1e}\n"
    )
    print("| fault | probes | found with one limit | found now |\n|---|---|---|---|")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for each in lines:
        if each["kind"] != "none":
            kinds.setdefault(bucket(each["kind"], each["size"]), []).append(each)
    for kind in sorted(kinds):
        found = [np.mean([each[key] for each in kinds[kind]]) for key in ("before", "after")]
        print(f"| {kind} | {len(kinds[kind])} | {found[0]:.0%} | {found[1]:.0%} |")
    sys.stdout.flush()
    return bool((values <= limits).all())


def main() -> int:
    """Runs all, prints tables, and writes every probe as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--longest", type=int, default=48, help="tokens of the longest row (default 48)")
    parser.add_argument("--without-classes", action="store_true", help="leave class weights out, half of the passes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    everything, fine = [], True
    for name in arguments.models:
        for precision in arguments.precisions:
            model = build(name).train()
            tried = () if arguments.without_classes else CLASSES
            step = Step(model.bfloat16() if precision == "bf16" else model, precision == "mixed", tried)
            vocabulary = VOCABULARY if name != "smollm2" else 40_000
            lines: list[dict[str, Any]] = []
            for seed in range(arguments.seeds):
                lines += probe_once(step, seed, arguments.longest, vocabulary)
            fine = report(name, precision, lines) and fine
            everything += [{"model": name, "precision": precision} | each for each in lines]
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(everything))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
