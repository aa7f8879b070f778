"""One rank of the scenarios in test_trl_processes.py: `python trl_worker.py RESULT_FILE KIND SCENARIO ...`.

Rank from LOCAL_RANK. Each scenario trains with GRPO under DDP or FSDP with gloo and returns what the test compares.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Where transformers looks for its place among the processes, as soon as it is imported.
os.environ["RANK"] = os.environ["LOCAL_RANK"]
os.environ["WORLD_SIZE"] = "2"
os.environ["ACCELERATE_USE_CPU"] = "true" if sys.argv[2] == "ddp" else "false"
os.environ["ACCELERATE_USE_FSDP"] = "false" if sys.argv[2] == "ddp" else "true"
os.environ["FSDP_VERSION"] = sys.argv[2][-1]
os.environ["FSDP_AUTO_WRAP_POLICY"] = "NO_WRAP"
os.environ["FSDP_USE_ORIG_PARAMS"] = "true"
os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import transformers
import trl_cases as cases
from accelerate import PartialState
from accelerate.utils import DistributedType

from lightning_padmin import PadMinWarning
from lightning_padmin.integrations.trl import passes as trl_passes

KIND = sys.argv[2]  # ddp, fsdp1, fsdp2
RANK = int(os.environ["LOCAL_RANK"])
OPTIONS = {
    "num_iterations": 2,
    "beta": 0.2,
    "max_steps": 3,
    "loss_type": "dapo",
    "ddp_timeout": 60,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 2,
    "use_cpu": KIND == "ddp",
}


class Truncated:
    """Most completions lose all tokens on rank 1."""

    @property
    def long_share(self) -> float:
        return (0.0, 0.8)[RANK]


def result(record: cases.Record) -> dict[str, Any]:
    return {
        "gradients": record.gradients,
        "parameters": record.parameters,
        "logs": record.logs,
        "stats": record.trainer.padding_stats.state_dict() if hasattr(record.trainer, "padding_stats") else {},
        "mode": record.trainer._padmin.mode if hasattr(record.trainer, "padding_stats") else "",
        "kind": record.trainer.accelerator.distributed_type.value,
    }


def compared(
    *modes: str,
    layer: type = cases.Uneven,
    make: Callable[[], Any] = cases.qwen2,
    padmin: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The same training without the mixin and in each mode."""
    stock, ours = cases.trainers(outer=(layer,))
    padmin = padmin or {}
    found = {"stock": result(cases.train(stock, OPTIONS | options, None, make))}
    for mode in modes:
        found[mode] = result(cases.train(ours, OPTIONS | options, cases.padmin(mode, **padmin), make))
    return found


def dapo() -> Any:
    return compared("split", "joint", "replay", "auto")


def grpo() -> Any:
    return compared("split", loss_type="grpo", steps_per_generation=4)


def packed() -> Any:
    return compared("split", "joint", padmin={"layout": "pack", "token_budget": 48}, max_steps=2)


def quantile() -> Any:
    """Over all ranks' tokens."""
    return compared("auto", "joint", top_entropy_quantile=0.5, entropy_coef=0.1)


def adaptive_entropy() -> Any:
    return compared("split", "replay", use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=2.0)


def truncated() -> Any:
    options = {"mask_truncated_completions": True, "loss_type": "bnpo"}
    return compared("split", "replay", "joint", layer=Truncated, **options)


def checkpointing() -> Any:
    return compared("split", "replay", "joint", gradient_checkpointing=True, max_steps=2)


def couples_on_one_rank() -> Any:
    """The check fails on rank 1 alone; both ranks replay."""

    class Coupled(cases.Uneven):
        def get_off_policy_mask(self, per_token_logps: Any, mask: Any, **_: Any) -> Any:
            factor = (per_token_logps.detach() * mask).sum().abs() / mask.sum().clamp(min=1)
            return (factor if RANK == 1 else torch.ones(())).expand(len(mask), 1)

    return compared("auto", layer=Coupled, off_policy_mask_threshold=100.0)


class CouplesLater(cases.Uneven):
    """A term that couples rows, from the second step on, on rank 1 alone."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*args, **options)
        if torch.is_grad_enabled():
            self.values = outputs[0]
        return outputs

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        mask = inputs["completion_mask"]
        if RANK == 1 and self.state.global_step >= 1:
            loss = loss + 0.5 * ((self.values * mask).sum() / mask.sum()) ** 2
        return loss


def refusal(layer: type, mode: str, make: Callable[[], Any] = cases.qwen2) -> str:
    """The error of a training, and after which step it came."""
    trainer = cases.build(cases.trainers(outer=(layer,))[1], OPTIONS, cases.padmin(mode), make)
    try:
        trainer.train()
    except Exception as error:
        return f"{trainer.state.global_step} {type(error).__name__}: {error}"
    return "trained"


def couples_later_on_one_rank() -> Any:
    return compared("auto", layer=CouplesLater), refusal(CouplesLater, "split")


def reads_padding() -> Any:
    """Every position sees the mean over all columns."""

    def averaging() -> Any:
        model = cases.qwen2()
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: output + output.mean(1, keepdim=True)
        )
        return model

    return refusal(cases.Uneven, "split", averaging), refusal(cases.Uneven, "joint", averaging)


def equal_weights() -> Any:
    """Negative control."""
    original = trl_passes.Passes._split
    trl_passes.Passes._split = cases.equally(original)
    try:
        return compared("split", max_steps=1)
    finally:
        trl_passes.Passes._split = original


def one_rank_refuses() -> Any:
    """Rows on rank 0 are longer than the model can be regrouped for."""

    def limited() -> Any:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
        return cases.qwen2(max_position_embeddings=30, rope_parameters=rope)

    _, ours = cases.trainers(outer=(cases.Uneven,))
    try:
        cases.train(ours, OPTIONS, cases.padmin("split"), limited)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def out_of_memory() -> Any:
    """Rank 1 has no memory for the first training pass of a window, or for its last."""

    def outcome(largest: bool) -> str:
        _, ours = cases.trainers(outer=(cases.Uneven,))
        trainer = cases.build(ours, OPTIONS, cases.padmin("split", check="off"))
        passes = [0]

        def check(module: Any, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                passes[0] += 1
                if RANK == 1 and passes[0] == (1 if largest else len(trainer._padmin._passes.window.order)):
                    raise torch.OutOfMemoryError("CUDA out of memory.")

        trainer.accelerator.unwrap_model(trainer.model).register_forward_pre_hook(check, with_kwargs=True)
        try:
            trainer.train()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "trained"

    return outcome(True), outcome(False)


def scenario(name: str) -> Any:
    """Its results; in words, why there are none."""
    try:
        return globals()[name]()
    except pytest.skip.Exception as skipped:
        return str(skipped)


if __name__ == "__main__":
    warnings.simplefilter("ignore", PadMinWarning)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    output = Path(sys.argv[1])
    if KIND != "ddp":
        # Accelerate knows FSDP on devices only; all it needs of them is a backend and a name.
        PartialState._prepare_backend = lambda *args, **options: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    results = {name: scenario(name) for name in sys.argv[3:]}
    torch.save(results, output.with_suffix(f".rank{RANK}.pt"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
