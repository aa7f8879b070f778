"""One rank of test_trainer_joint_processes.py: `python trainer_joint_worker.py RESULT_FILE`, rank from LOCAL_RANK.

Trainers of transformers in joint mode under DistributedDataParallel with gloo, against stock ones.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import joint_cases as cases
import torch

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import PadMinWarning

RANK = int(os.environ["LOCAL_RANK"])
TWO = {"ddp_backend": "gloo", "per_device_train_batch_size": 4}

# Stock needs to be told of the head, which these losses do not use.
UNUSED: dict[type, dict[str, Any]] = {
    each: {"ddp_find_unused_parameters": True} for each in (cases.Contrastive, cases.OwnStep)
}


class Late(cases.Own):
    """Outputs at padding come into the loss when the training has begun, on one rank alone."""

    def loss_of(self, outputs: Any, inputs: Any) -> torch.Tensor:
        loss = self.token_loss(outputs, inputs)
        return loss + 0.1 * outputs.hidden_states[-1].mean() if RANK and self.state.global_step >= 2 else loss


class Reads(cases.Own):
    """They do so from the beginning."""

    def loss_of(self, outputs: Any, inputs: Any) -> torch.Tensor:
        return self.token_loss(outputs, inputs) + RANK * 0.1 * outputs.hidden_states[-1].mean()


def compared(step: type | None, padmin: PadMinConfig = cases.JOINT, **options: Any) -> dict[str, Any]:
    stock, ours = (cases.train(step, padmin=each, **TWO, **options) for each in (None, padmin))
    assert ours.trainer.accelerator.num_processes == 2
    return {
        "gradients": cases.apart(ours, stock),
        "logs": cases.logs_apart(ours, stock),
        "parameters": ours.parameters,
        "apart": float((ours.parameters - stock.parameters).abs().max()),
        "way": ours.trainer._padmin._training.way,
        "waste": (ours.trainer.padding_stats.waste_before, ours.trainer.padding_stats.waste),
    }


def outcome(step: type) -> str:
    try:
        cases.train(step, padmin=cases.JOINT, **TWO)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def auto(step: type | None, **options: Any) -> dict[str, Any]:
    """Under `mode="auto"`, and what is told of ways."""
    padmin = PadMinConfig(token_budget=None, launch_cost=4, pad_token_id=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PadMinWarning)
        found = compared(step, padmin, **options)
    words = [str(each.message) for each in caught if issubclass(each.category, PadMinWarning)]
    return found | {"told": [each for each in words if "mode='auto'" in each]}


def main() -> dict[str, Any]:
    split = PadMinConfig(token_budget=64, launch_cost=4, pad_token_id=0, check="off", batch_schema={"kind": "row"})
    checkpoints = {"gradient_checkpointing": True}
    return {
        **{step.__name__: compared(step, **UNUSED.get(step, {})) for step in cases.OWN},
        "window": compared(cases.WarmUp, gradient_accumulation_steps=2),
        "checkpoints": compared(cases.WarmUp, gradient_checkpointing_kwargs={"use_reentrant": False}, **checkpoints),
        "control": compared(cases.Weighted, split),
        "other chunks": compared(cases.WarmUp, replace(cases.JOINT, token_budget=30)),
        "auto split": auto(None, gradient_accumulation_steps=2),
        "auto weighted": auto(cases.Weighted, gradient_accumulation_steps=2),
        "auto adversarial": auto(cases.Adversarial),
        "auto choices": auto(None, make=lambda: cases.bert(cases.CHOICES[0]), collator=cases.CHOICES[1]),
        "auto own step": auto(cases.OwnStep, **UNUSED[cases.OwnStep]),
        "auto reads": auto(Reads),
        "reads": outcome(Reads),
        "late": outcome(Late),
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.save(main(), Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
