"""One rank of test_trainer_shards.py: `python trainer_shards_worker.py RESULT_FILE KIND SCENARIO ...`.

Trainers of transformers that keep batches whole, under FSDP with gloo, against stock ones in float64: five chunks on
rank 0, one on rank 1. KIND is "fsdp1" or "fsdp2".
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

# Where transformers looks for its place among the processes, as soon as it is imported.
os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "false"}
os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu", "LOCAL_SIZE": "2"}
os.environ |= {
    "ACCELERATE_USE_FSDP": str("fsdp" in sys.argv[2]).lower(),
    "FSDP_VERSION": sys.argv[2][-1],
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
sys.path.insert(0, str(Path(__file__).parents[1]))

import joint_cases as cases
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import SequentialSampler

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import PadMinWarning

KIND, RANK = sys.argv[2], int(os.environ["LOCAL_RANK"])
# Natural counts under BUDGET: five chunks on rank 0, one on rank 1.
FIVE, ONE = [30, 24, 15, 15, 8, 8, 8, 6], [3, 3, 2, 3, 3, 3, 2, 3]
BUDGET, BATCHES = 30, 3
JOINT = PadMinConfig(mode="joint", token_budget=BUDGET, launch_cost=4)
SPLIT = PadMinConfig(token_budget=BUDGET, launch_cost=4, pad_token_id=0, check="off", batch_schema={"kind": "row"})
AUTO = PadMinConfig(token_budget=None, launch_cost=4, pad_token_id=0)


def data(both: Sequence[list[int]] = (FIVE, ONE)) -> list[dict[str, Any]]:
    """Even batches are those of rank 0."""
    made = []
    for batch in range(2 * BATCHES):
        lengths = both[batch % 2]
        turn = 3 * batch % len(lengths)
        for row, length in enumerate(lengths[turn:] + lengths[:turn]):
            ids = [1 + (7 * batch + 5 * row + k * (k + 3)) % (cases.VOCABULARY - 1) for k in range(length)]
            made.append({"input_ids": ids, "labels": [-100, *ids[1:]], "kind": (batch + row) % 3})
    return made


class InOrder:
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class Remembering(cases.Remembering):
    def weights(self) -> list[Tensor]:
        if KIND == "fsdp2" or not isinstance(self.model_wrapped, FullyShardedDataParallel):
            return super().weights()
        with FullyShardedDataParallel.summon_full_params(self.model_wrapped):
            return [each.detach().clone() for each in self.model.parameters()]


class Adversarial(cases.Adversarial):
    """The same where each rank has a part of the embedding, and of its gradient."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if KIND == "fsdp2":
            return super().training_step(model, inputs, num_items_in_batch)
        loss: Tensor = super(cases.Adversarial, self).training_step(model, dict(inputs), num_items_in_batch)
        weight = self.accelerator.unwrap_model(model).get_input_embeddings().weight
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        norm = gradient.square().sum()
        torch.distributed.all_reduce(norm)
        moved = 0.5 * gradient / norm.sqrt()
        weight.data.add_(moved)
        again = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(again / self.args.gradient_accumulation_steps)
        weight.data.sub_(moved)
        return loss


def norm_of_shards(self: Any, *_: Any) -> Tensor:
    """In place of the first FSDP's own, which is in float32."""
    squares = [each.grad.square().sum() for each in self.parameters() if each.grad is not None]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum()
    torch.distributed.all_reduce(total)
    return total.sqrt()


class LateWeights:
    """Classes are weighed from the third step on, when a check is due."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        weight = torch.linspace(0.1, 3, cases.VOCABULARY, dtype=outputs.logits.dtype)
        loss = cases.Own.token_loss(self, outputs, inputs, weight=weight if self.state.global_step >= 2 else None)
        return (loss, outputs) if return_outputs else loss


class LateReads(cases.Own):
    """Outputs at padding come into the loss in the third step, on the rank that has long rows."""

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        loss = self.token_loss(outputs, inputs)
        reads = RANK == 0 and self.state.global_step >= 2
        return loss + 0.1 * outputs.hidden_states[-1].mean() * int(reads)


class Raises(cases.Own):
    """The loss of one rank fails in the third step, but for stock."""

    def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
        if RANK == 1 and self.state.global_step >= 2 and hasattr(self, "padding_stats"):
            raise ValueError("no such row")
        return self.token_loss(outputs, inputs)


MODES = {
    "joint": JOINT,
    "replay": replace(JOINT, mode="replay"),
    "auto": AUTO,
    "bounded": replace(AUTO, token_budget=BUDGET),
    "split": SPLIT,
}
STEPS = {step.__name__: step for step in (*cases.OWN, Remembering, Adversarial, LateWeights, LateReads, Raises)}


def of_deepspeed() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": int(KIND[-1])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def train(step: type | None, padmin: PadMinConfig | None, **options: Any) -> cases.Record:
    kind = InOrder if step is None else type(step.__name__, (step, InOrder), {})
    own: dict[str, Any] = {"per_device_train_batch_size": 8, "ddp_timeout": 60, "use_cpu": False, "data": data()}
    own |= {"max_grad_norm": 1.0 if KIND == "fsdp2" else 0.0}
    if KIND.startswith("zero"):
        own |= {"deepspeed": of_deepspeed(), "max_grad_norm": 1.0, "make": lambda: cases.llama().float()}
    return cases.train(kind, padmin=padmin, **(own | options))


def compared(step: type | None, padmin: PadMinConfig = JOINT, **options: Any) -> dict[str, Any]:
    stock = train(step, None, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PadMinWarning)
        try:
            ours = train(step, padmin, **options)
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    assert ours.trainer.accelerator.distributed_type.value == ("FSDP" if KIND.startswith("fsdp") else "DEEPSPEED")
    ledger = ours.trainer._padmin._training.ledger
    words = [str(each.message) for each in caught if issubclass(each.category, PadMinWarning)]
    return {
        "gradients": apart(ours, stock),
        "logs": cases.logs_apart(ours, stock),
        "apart": float((parameters(ours) - parameters(stock)).abs().max()),
        "moved": float((parameters(stock) - torch.cat([p.flatten() for p in cases.llama().parameters()])).abs().max())
        if KIND.startswith("zero")
        else 1,
        "way": ours.trainer._padmin._training.way,
        "stats": ours.trainer.padding_stats.state_dict(),
        "said": words,
        "audits": [] if ledger is None else [each.step for each in ledger.record],
    }


def parameters(record: cases.Record) -> Tensor:
    if not KIND.startswith("zero"):
        return record.parameters
    import deepspeed

    own = list(record.trainer.model.parameters())
    with deepspeed.zero.GatheredParameters(own) if KIND == "zero3" else nullcontext():
        return torch.cat([each.detach().double().flatten() for each in own])


def apart(found: cases.Record, wanted: cases.Record) -> float:
    """As `cases.apart`, over the parts that this rank has."""
    if KIND.startswith("zero"):  # whose engine keeps them
        return 0.0
    assert len(found.gradients) == len(wanted.gradients) > 1
    both = zip(found.gradients, wanted.gradients, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in both)


MORE: dict[str, dict[str, Any]] = {
    "window": {"gradient_accumulation_steps": 2},
    "checkpoints": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "full rows": {"data": data((FIVE, [3] * 8))},
}


def outcome(name: str) -> dict[str, Any]:
    """`MODE STEP`, and what is in `MORE`, by commas."""
    case, *more = name.split(", ")
    mode, step = case.split(" ")
    options = {name: value for each in more for name, value in MORE[each].items()}
    return compared(STEPS.get(step), MODES[mode], **options)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # Accelerate knows FSDP on devices only; all it needs of them is a backend and a name.
    PartialState._prepare_backend = lambda *args, **options: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    FullyShardedDataParallel.clip_grad_norm_ = norm_of_shards  # type: ignore[method-assign]
    results = {name: outcome(name) for name in sys.argv[3:]}
    torch.save(results, Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
    if not any("refused" in each for each in results.values()):
        torch.distributed.barrier()
    os._exit(0)  # whose threads may still wait for each other
