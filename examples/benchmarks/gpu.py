"""The table of policy_update.py on one CUDA GPU: bfloat16, full lengths, and packing by a kernel for variable lengths.

    python examples/benchmarks/gpu.py [--model qwen2 bamba] [--rows 64] [--json FILE] [--plot FILE]

Takes the options of policy_update.py with other defaults: a larger model, 64 rows of a reinforcement-learning run as
they are, budget 32,768. Packing uses flash-attn if it is installed, else `torch.nn.attention.varlen`. Minutes on a
data-centre GPU; what does not fit in memory is named in its row. Without a CUDA GPU: exit code 2.

Gradients in bfloat16 differ by rounding, so they are first compared in float32 on a few short rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import policy_update
import torch

DEFAULTS = {
    "model": ["qwen2"],
    "rows": 64,
    "scale": 1,
    "budget": 32_768,
    "hidden": 1024,
    "layers": 12,
    "vocabulary": 8192,
    "dtype": "bfloat16",
    "device": "cuda",
    "sweep": True,
}
EXACT = "--dtype float32 --rows 8 --scale 16 --budget 1024 --repeats 1 --hidden 256 --layers 4"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 0, 1 if gradients differ, or 2 without a GPU."""
    options = policy_update.parse(arguments, **DEFAULTS)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py needs a CUDA GPU, and torch sees none; policy_update.py runs on CPUs", file=sys.stderr)
        return 2
    torch.backends.cudnn.allow_tf32 = False  # or float32 convolutions would not be float32
    few = policy_update.parse([*EXACT.split(), "--model", *options.model, "--device", options.device])
    return policy_update.execute(few) or policy_update.execute(options)


if __name__ == "__main__":
    raise SystemExit(main())
