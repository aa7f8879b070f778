"""Prompt and completion lengths, and the batches that are made of them.

A batch has the layout of online reinforcement learning: prompts padded on the left, completions on the right, and an
advantage for each row. Token ids are random; a row has the same ones however wide the batch is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints: TypeAlias = NDArray[np.int64]
Batch: TypeAlias = dict[str, Any]

EXAMPLES = Path(__file__).parents[2]
FILES = {
    "rl": EXAMPLES / "data" / "rl_lengths.csv",
    "gsm8k": EXAMPLES / "data" / "gsm8k_token_lengths.csv",
}
# What the run is configured for: longest prompt and longest completion, in tokens.
CONFIGURED = {"rl": (4096, 8192), "gsm8k": (256, 512)}
IGNORED = -100


def read_lengths(path: str | Path) -> Ints:
    """(n, 2) prompt and completion lengths, in tokens, of a CSV file with one line of headings."""
    return np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64, ndmin=2)


@dataclass(frozen=True)
class Workload:
    """One optimizer batch.

    Attributes:
        lengths: (B, 2) prompt and completion tokens of each row.
        configured: longest prompt and completion that the run allows.
        micro_rows: rows of a micro-batch where rows are counted.
        budget: most slots of a micro-batch where slots are counted.
        vocabulary: token ids are below this.
    """

    lengths: Ints
    configured: tuple[int, int]
    micro_rows: int
    budget: int
    vocabulary: int
    device: str = "cpu"

    @property
    def totals(self) -> Ints:
        """(B,) tokens of each row."""
        return self.lengths.sum(axis=1)

    @property
    def real_tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.lengths.sum())

    def batch(self, prompt_width: int | None = None, completion_width: int | None = None) -> Batch:
        """The batch, as wide as asked for; by default as its longest prompt and its longest completion need."""
        longest = self.lengths.max(axis=0)
        left, right = prompt_width or int(longest[0]), completion_width or int(longest[1])
        shape = (len(self.lengths), left + right)
        ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
        mask = torch.zeros(shape, dtype=torch.long)
        source = torch.Generator().manual_seed(0)
        for row, (prompt, completion) in enumerate(self.lengths.tolist()):
            tokens = torch.randint(1, self.vocabulary, (prompt + completion,), generator=source)
            ids[row, left - prompt : left + completion] = tokens
            mask[row, left - prompt : left + completion] = 1
            labels[row, left : left + completion] = tokens[prompt:]
        advantages = torch.randn(len(self.lengths), generator=source)
        made = {"input_ids": ids, "attention_mask": mask, "labels": labels, "advantages": advantages}
        return {name: tensor.to(self.device) for name, tensor in made.items()}

    def rectangle(self) -> Workload:
        """As many rows and tokens (rounded up to whole rows) in rows of one length: no padding at all."""
        rows = len(self.lengths)
        width = -(-self.real_tokens // rows)
        prompt = min(width - 1, round(float(self.lengths[:, 0].mean())))
        even = np.tile(np.array([prompt, width - prompt]), (rows, 1))
        return Workload(even, self.configured, self.micro_rows, self.budget, self.vocabulary, self.device)


def draw(lengths: Ints, rows: int, scale: int, seed: int) -> Ints:
    """(rows, 2) lengths, drawn without replacement and divided by `scale`; at least one token each."""
    chosen = np.random.default_rng(seed).choice(len(lengths), rows, replace=rows > len(lengths))
    return np.maximum(1, lengths[chosen] // scale)


def loss_tokens(batch: Batch) -> Tensor:
    """(B, L - 1) bool, the predictions that carry loss; the first label has nothing before it."""
    return batch["labels"][:, 1:] != IGNORED
