"""One rank of test_trl_images.py: `python trl_images_worker.py RESULT_FILE`.

GRPO under DDP with gloo, on rows with and without images.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

# Where transformers looks for its place among the processes, as soon as it is imported.
os.environ["RANK"] = os.environ["LOCAL_RANK"]
os.environ["WORLD_SIZE"] = "2"
os.environ["ACCELERATE_USE_CPU"] = "true"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
import trl_cases as cases
import trl_vision as vision

from lightning_padmin import PadMinWarning
from lightning_padmin.integrations.trl import logprobs as trl_logprobs

RANK = int(os.environ["LOCAL_RANK"])
OPTIONS = {
    "max_steps": 2,
    "loss_type": "dapo",
    "per_device_train_batch_size": 8,
    "ddp_timeout": 60,
}


def main() -> dict[Any, Any]:
    stock, ours = cases.trainers(outer=(cases.Uneven,))
    without: list[bool] = []
    joined = trl_logprobs.joined

    def watched(batch: Any) -> Any:
        found = joined(batch)
        without.append("pixel_values" not in found)
        return found

    trl_logprobs.joined = watched
    results: dict[Any, Any] = {}
    for unused in (False, True):
        # Checkpointing and the search for unused parameters exclude each other, and stock chooses by the former.
        options = OPTIONS | {"gradient_checkpointing": not unused, "ddp_find_unused_parameters": unused}
        for mode in ("stock", "split", "joint", "replay"):
            kind, padmin = (stock, None) if mode == "stock" else (ours, cases.padmin(mode))
            record = cases.train(kind, options, padmin, vision.qwen2_vl, **vision.given(counts=(1, 0, 2)))
            results[unused, mode] = cases.Record(record.gradients, record.logs, record.parameters)
    return results | {"chunks without images": any(without) and not all(without)}


if __name__ == "__main__":
    warnings.simplefilter("ignore", PadMinWarning)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    torch.save(main(), Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
