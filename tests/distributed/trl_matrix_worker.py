"""One rank of test_trl_matrix.py: `python trl_matrix_worker.py RESULT_FILE SHARDING CASE ...`, rank from LOCAL_RANK.

Trainers of transformers and TRL on two gloo processes, with long rows on rank 0 and short ones on rank 1, as stock and
with padding removed: how far apart they end up. SHARDING is ddp, fsdp1, fsdp2, or zero0 to zero3; a CASE is a key of
`CASES`.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

# Where transformers and DeepSpeed look for their place among the processes, as soon as they are imported.
os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "DS_ACCELERATOR": "cpu"}
os.environ["ACCELERATE_USE_CPU"] = "true" if sys.argv[2] == "ddp" else "false"
if sys.argv[2].startswith("fsdp"):
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": sys.argv[2][-1],
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }
if sys.argv[2].startswith("zero"):
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
import trl_cases as cases
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_callback import PrinterCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from lightning_padmin import PadMinConfig, PadMinWarning
from lightning_padmin.integrations.transformers import PadMinTrainerMixin
from lightning_padmin.integrations.transformers import engine as trainer_engine
from lightning_padmin.integrations.trl import PadMinMixin
from lightning_padmin.integrations.trl import passes as trl_passes
from lightning_padmin.microbatching.micro_batches import MicroBatches

KIND, RANK = sys.argv[2], int(os.environ["LOCAL_RANK"])
TYPES = {"ddp": "MULTI_CPU", "fsdp1": "FSDP", "fsdp2": "FSDP"} | {f"zero{stage}": "DEEPSPEED" for stage in range(4)}
ROWS, WINDOW = 6, 2
TRAINERS: dict[str, tuple[type, type, type]] = {
    "trainer": (Trainer, TrainingArguments, PadMinTrainerMixin),
    "sft": (SFTTrainer, SFTConfig, PadMinMixin),
    "dpo": (DPOTrainer, DPOConfig, PadMinMixin),
    "reward": (RewardTrainer, RewardConfig, PadMinMixin),
    "kto": (KTOTrainer, KTOConfig, PadMinMixin),
    "grpo": (GRPOTrainer, GRPOConfig, PadMinMixin),
    "rloo": (RLOOTrainer, RLOOConfig, PadMinMixin),
}
ONLINE = ("grpo", "rloo")


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        trainer: a key of TRAINERS.
        options: of the trainer's arguments.
        engine: of DeepSpeed's configuration.
        padmin: options of ours.
        layers: classes in front of the trainer.
        make: the model.
        by_name: whether the trainer loads it from a folder, under ZeRO-3 in parts.
        more: further arguments of the trainer.
        resumes: whether the last step is of another trainer, which goes on from a checkpoint.
        control: whether the same is trained with wrong weights, too.
    """

    trainer: str
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    padmin: dict[str, Any] = field(default_factory=dict)
    layers: tuple[type, ...] = ()
    make: Callable[[], nn.Module] | None = None
    by_name: bool = False
    more: Callable[[], dict[str, Any]] = dict
    resumes: bool = False
    control: bool = False


class InOrder:
    """Batches as they stand in the dataset: even ones go to rank 0."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


def rows_of(trainer: str) -> Dataset:
    def words(length: int, start: int) -> str:
        return " " + " ".join(f"w{3 + (start + k) % (cases.VOCABULARY - 3)}" for k in range(length))

    lengths = [each for _ in range(3 * WINDOW) for each in ([30, 25, 14, 9, 5, 3], [6, 5, 4, 4, 3, 3])]
    flat = [length for batch in lengths for length in batch]
    rows = [words(length, 7 * k) for k, length in enumerate(flat)]
    if trainer == "trainer":
        encoded = cases.tokenizer()(rows)["input_ids"]
        return Dataset.from_dict({"input_ids": encoded, "labels": [[-100, *row[1:]] for row in encoded]})
    if trainer == "sft":
        return Dataset.from_dict({"text": rows})
    others = [words(length + 2, 5 * k) for k, length in enumerate(flat)]
    prompts = ["w5 w6"] * len(flat)
    if trainer == "kto":
        return Dataset.from_dict(
            {"prompt": prompts, "completion": rows, "label": [k % 3 > 0 for k in range(len(flat))]}
        )
    return Dataset.from_dict({"prompt": prompts, "chosen": rows, "rejected": others})


def engine_config(**own: Any) -> dict[str, Any]:
    """Sizes are for models of some thousand parameters: many buckets, and none that stays gathered."""
    small = {"reduce_bucket_size": 2000, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 2000}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": int(KIND[-1]), **small, **own.pop("zero", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own would be compiled first
        **own,
    }


def arguments(case: Case, folder: str) -> Any:
    """Three optimizer steps of windows of two batches, clipped, under a schedule."""
    online: dict[str, Any] = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 24,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "beta": 0.2,
    }
    options = {
        "output_dir": folder,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": WINDOW,
        "max_steps": 3,
        "learning_rate": 0.05 if case.trainer != "reward" else 0.6,
        "max_grad_norm": {"kto": 0.8, "reward": 0.3}.get(case.trainer, 2.0),  # below the norms of all steps
        "lr_scheduler_type": "linear",
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "disable_tqdm": True,
        "ddp_timeout": 60,
        "seed": 3,
        "use_cpu": KIND == "ddp",
        **(online if case.trainer in ONLINE else {}),
        **case.options,
    }
    if KIND.startswith("zero"):
        options["deepspeed"] = engine_config(**case.engine)
    # Else half precision is for devices only, as soon as no argument says CPU.
    with mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True):
        return TRAINERS[case.trainer][1](**options)


class Trajectory(TrainerCallback):
    """Parameters at the beginning and after each step, and what was logged."""

    def __init__(self) -> None:
        self.points: list[Tensor] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.points.append(parameters(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.points.append(parameters(model))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append({key: value for key, value in logs.items() if isinstance(value, int | float)})


def parameters(model: nn.Module) -> Tensor:
    """All of them; under FSDP1 this rank's shards. A collective."""
    gathered: AbstractContextManager[Any] = nullcontext()
    if KIND == "zero3":
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with gathered:
        return torch.cat([cases.whole(p.detach()).double().flatten().clone() for p in model.parameters()])


def rewarding() -> nn.Module:
    """A backbone with one score per row."""
    config = cases.qwen2().config
    config.num_labels = 1
    torch.manual_seed(0)
    return cases.scaled(transformers.Qwen2ForSequenceClassification(config))


def build(case: Case, padmin: PadMinConfig | None, output: str) -> Any:
    AcceleratorState._reset_state(False)
    GradientState._reset_state()
    if KIND != "ddp" and PartialState._shared_state:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # as before the first one
    base, _, mixin = TRAINERS[case.trainer]
    unset_hf_deepspeed_config()  # of the last trainer: models would be made in parts
    model = (case.make or (rewarding if case.trainer == "reward" else cases.qwen2))()
    given = arguments(case, output)
    folder = cases.saved(model) if case.by_name or case.trainer not in ("trainer", "sft") else ""
    model.config._name_or_path = folder  # where a reference model is found
    more: dict[str, Any] = {"train_dataset": None, "processing_class": cases.tokenizer(), **case.more()}
    own: tuple[type, ...] = (InOrder,)
    if case.trainer in ONLINE:
        own = (cases.Uneven, cases.Scripted)
        more |= {"train_dataset": cases.prompts(), "reward_funcs": cases.reward}
    else:
        more["train_dataset"] = rows_of(case.trainer)
    if case.trainer == "trainer":
        more["data_collator"] = DataCollatorForSeq2Seq(cases.tokenizer())
    if padmin is not None:
        more["padmin"] = padmin
    kinds = (*case.layers, *own, *(() if padmin is None else (mixin,)), base)
    trainer = type("Ours" if padmin else "Stock", kinds, {})(
        model=folder if case.by_name else model, args=given, **more
    )
    trainer.remove_callback(PrinterCallback)
    assert trainer.accelerator.distributed_type.value == TYPES[KIND]
    return trainer


_counts = itertools.count()


def train(case: Case, padmin: PadMinConfig | None) -> dict[str, Any]:
    output = Path(sys.argv[1]).with_name(f"{next(_counts)}")  # the same on both ranks
    trainer, seen = build(case, padmin, str(output)), Trajectory()
    trainer.add_callback(seen)
    trainer.train()
    if case.resumes:
        trainer = build(case, padmin, str(output))
        seen.points, seen.logs = seen.points[:1], []
        trainer.add_callback(seen)
        trainer.train(resume_from_checkpoint=str(output / "checkpoint-2"))
        seen.points = [seen.points[0], seen.points[-1]]
    engine = trainer.model_wrapped if KIND.startswith("zero") else None
    return {
        "points": seen.points,
        "logs": seen.logs,
        "steps": getattr(engine, "global_steps", trainer.state.global_step),
        "stats": trainer.padding_stats.state_dict() if padmin is not None else {},
        "mode": getattr(getattr(trainer, "_padmin", None), "mode", ""),
    }


@contextmanager
def wrong(trainer: str) -> Iterator[None]:
    """Chunks that weigh something else; of calls in chunks, outputs of other rows."""
    if trainer == "trainer":
        weighted = trainer_engine.Engine._weighted
        factors = itertools.cycle((0.5, 1.5))

        def badly(self: Any, weight: float, *args: Any) -> Any:
            return weighted(self, weight * next(factors), *args)

        with mock.patch.object(trainer_engine.Engine, "_weighted", badly):
            yield
    elif trainer in ONLINE:
        with mock.patch.object(trl_passes.Passes, "_split", cases.equally(trl_passes.Passes._split)):
            yield
    else:
        restore = MicroBatches.restore_rows
        with mock.patch.object(MicroBatches, "restore_rows", lambda self, parts: restore(self, parts).roll(1, 0)):
            yield


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Of parameters after each step, the largest difference as a part of how far stock has moved them by then."""
    assert len(found["points"]) == len(wanted["points"]) > 1
    start = wanted["points"][0]
    pairs = zip(found["points"][1:], wanted["points"][1:], strict=True)
    return max(float((a - b).abs().max() / (b - start).abs().max()) for a, b in pairs)


def compared(case: Case) -> dict[str, Any]:
    config = {"token_budget": 32 if case.trainer not in ONLINE else 96, "launch_cost": 4, **case.padmin}
    stock, ours = train(case, None), train(case, PadMinConfig(**config))
    logs = [cases.Record(logs=each["logs"]) for each in (ours, stock)]
    worst, name = cases.metric_difference(*logs) if RANK == 0 else (0.0, "")
    found = {
        "displacement": apart(ours, stock),
        "metric": worst,
        "metric_name": name,
        "steps": (ours["steps"], stock["steps"], len(stock["points"]) - 1),
        "norms": [log["grad_norm"] for log in stock["logs"] if "grad_norm" in log],
        "logged": sorted({key for log in stock["logs"] for key in log}),
        "stats": ours["stats"],
        "mode": ours["mode"],
    }
    if case.control:
        with wrong(case.trainer):
            found["control"] = apart(train(case, PadMinConfig(**config, check="off")), stock)
    return found


class Truncated:
    """Most completions lose all tokens on rank 1."""

    completion_length, share = 24, 0.9

    @property
    def long_share(self) -> float:
        return (0.0, self.share)[RANK]


class Halved(Truncated):
    """Some of them, so that rows that carry loss run there once more as dummies."""

    share = 0.5


def with_adapters() -> dict[str, Any]:
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)}


OFFLOADED = {"zero": {"offload_optimizer": {"device": "cpu"}}}
CASES = {name: Case(name, control=True) for name in TRAINERS}
CASES |= {f"grpo {mode}": Case("grpo", padmin={"mode": mode}) for mode in ("joint", "replay")}
CASES |= {
    "windows of two generations": Case(
        "grpo", {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "loss_type": "bnpo"}
    ),
    "two windows of a generation": Case(
        "grpo", {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "grpo"}
    ),
    "dr_grpo": Case("grpo", {"loss_type": "dr_grpo", "beta": 0.0}),
    "clipped by the engine": Case("grpo", engine={"gradient_clipping": 2.0}),
    "without rows": Case("grpo", {"mask_truncated_completions": True, "loss_type": "bnpo"}, layers=(Truncated,)),
    "few rows": Case(
        "grpo",
        {"mask_truncated_completions": True, "loss_type": "bnpo"},
        layers=(Halved,),
        padmin={"token_budget": 16},
    ),
    "checkpointing": Case("grpo", {"gradient_checkpointing": True}),
    "quantile": Case("grpo", {"top_entropy_quantile": 0.5}),
    "audit": Case("grpo", padmin={"check": "audit", "audit_every": 1}),
    "audit of rloo": Case("rloo", padmin={"check": "audit", "audit_every": 1}),
    "audit joint": Case("grpo", padmin={"check": "audit", "audit_every": 1, "mode": "joint"}),
    "offloaded": Case("grpo", engine=OFFLOADED),
    "by name": Case("grpo", by_name=True),
    "adapters": Case("grpo", {"learning_rate": 1.0}, more=with_adapters),
    "bf16": Case("grpo", {"bf16": True}),
    "resumed": Case("grpo", {"save_strategy": "steps", "save_steps": 2}, resumes=True),
}


def outcome(name: str) -> Any:
    """Its figures, or the error in words."""
    try:
        return compared(CASES[name])
    except Exception as error:
        import traceback

        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    warnings.simplefilter("ignore", PadMinWarning)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if KIND != "ddp":
        # Accelerate knows these on devices only; all it needs of them is a backend and a name.
        PartialState._prepare_backend = lambda *args, **options: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    if KIND.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled first
    results = {name: outcome(name) for name in sys.argv[3:]}
    torch.save(results, Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
