"""One rank of the scenarios in test_ddp.py: `python ddp_worker.py RESULT_FILE SCENARIO ...`, rank from LOCAL_RANK.

Each scenario runs real Trainers under DDPStrategy with gloo and returns what the test compares.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import support
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from lightning_padmin import PaddedForward, PadMinCallback, PadMinConfig

RANK = int(os.environ["LOCAL_RANK"])
# Natural counts under BUDGET: five micro-batches on rank 0, one on rank 1.
BUDGET = 24
UNEVEN = ([[24, 20, 12, 12, 6, 6, 6, 6, 3, 2]], [[4, 3, 5, 2]])
FIVE, ONE = UNEVEN[0][0], UNEVEN[1][0]


def batches(
    seed: int = 0, count: int = 5, lengths: Sequence[Sequence[int]] = (FIVE, ONE)
) -> list[dict[str, torch.Tensor]]:
    """This rank's batches; in every one rank 0 has `lengths[0]`, rank 1 `lengths[1]`, in another order each time."""
    own = list(lengths[RANK])
    return [
        support.make_batch(own[k % len(own) :] + own[: k % len(own)], seed=seed + 7 * k + RANK) for k in range(count)
    ]


def callback(**options: Any) -> PadMinCallback:
    return PadMinCallback(**({"token_budget": BUDGET, "launch_cost": 4} | options))


def fit(
    module: support.Module, data: Sequence[Any], *callbacks: Any, ddp: dict[str, Any] | None = None, **options: Any
) -> Any:
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60), **(ddp or {}))
    defaults = {
        "strategy": strategy,
        "devices": 2,
        "plugins": [LightningEnvironment()],
        "use_distributed_sampler": False,
    }
    return support.fit(module, data, *callbacks, **(defaults | options))


def record(module: support.Module) -> dict[str, Any]:
    return {
        "gradients": module.gradients,
        "parameters": support.flat_parameters(module.model),
        "losses": module.losses,
        "shapes": module.shapes,
    }


def pair(
    make: Callable[[], support.Module], data: Sequence[Any], options: dict[str, Any], **fit_options: Any
) -> dict[str, Any]:
    """The same fit without and with the callback."""
    plain, split, added = make(), make(), callback(**options)
    fit(plain, data, **fit_options)
    trainer = fit(split, data, added, **fit_options)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"plain": record(plain), "split": record(split), "stats": added.stats.state_dict(), "logged": logged}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def uneven() -> Any:
    """Counts 5 against 1, accumulate 2 with a ragged tail, clipping, AdamW."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    return pair(lambda: support.Module(optimizer=adamw), batches(), {}, **options)


def equal_weights() -> Any:
    """Negative control: every micro-batch weighs 1/K."""
    with support.equal_weights():
        return pair(support.Module, batches(count=2), {})


def logged() -> Any:
    """What reaches the loggers, for two batches with a hand count in the test."""
    directory = Path(sys.argv[1]).with_suffix("") / "csv"
    logger = CSVLogger(directory, name="", version="")
    added = callback()
    trainer = fit(support.Module(), batches(count=2), added, logger=logger, log_every_n_steps=1)
    return {
        "callback_metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "csv": (directory / "metrics.csv").read_text() if RANK == 0 else "",
        "stats": added.stats.state_dict(),
    }


def out_of_rows() -> Any:
    """Four micro-batches against two rows: two dummies. torchmetrics and outputs must not see them."""

    class Counting(support.Module):
        def __init__(self) -> None:
            super().__init__(output=lambda batch, loss: {"loss": loss, "first": batch["input_ids"][:, 0]})
            self.rows = torchmetrics.SumMetric(sync_on_compute=False)
            self.firsts: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.rows.update(float(len(batch["input_ids"])))
            self.log("rows", self.rows, on_epoch=True, on_step=False)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.firsts.append((outputs["first"], batch["input_ids"][:, 0]))
            super().on_train_batch_end(outputs, batch, batch_idx)

    data = batches(count=2, lengths=([8, 8, 8, 8], [3, 3]))
    made: list[Counting] = []

    def make() -> Counting:
        made.append(Counting())
        return made[-1]

    result = pair(make, data, {"token_budget": 8})
    return result | {"firsts": made[1].firsts, "rows": [float(result["logged"]["rows"]), 2 * len(data[0]["labels"])]}


def no_loss_on_one_rank() -> Any:
    """Rank 1 has no loss token in its second batch; against rank 0's gradient halved (the average with zero)."""
    data = batches(count=2)
    if RANK == 1:
        data[1]["labels"].fill_(-100)
    module = support.Module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, data, callback(), max_steps=2)
    first = support.Module()
    fit(first, data[:1], callback())
    second = support.Module()
    second.model.load_state_dict(first.model.state_dict())
    second.loss(data[1]).backward()
    own = support.flat_gradient(second.model) if RANK == 0 else torch.zeros_like(module.gradients[1])
    told = [str(w.message) for w in caught if "no loss tokens" in str(w.message)]
    return {"gradient": module.gradients[1], "own": own, "told": told}


def global_mean() -> Any:
    """normalize="global": the gradient of the token mean over both ranks' rows."""
    module = support.Module()
    fit(module, batches(count=1), callback(normalize="global"))
    per_rank = support.Module()
    fit(per_rank, batches(count=1), callback())
    both = [support.make_batch(lengths, seed=rank) for rank, lengths in enumerate((FIVE, ONE))]
    by_hand = support.Module()
    losses = [support.token_losses(by_hand.model(b["input_ids"]), b["labels"]).sum() for b in both]
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in both)
    (sum(losses) / tokens).backward()
    return {
        "gradient": module.gradients[0],
        "by_hand": support.flat_gradient(by_hand.model),
        "per_rank": per_rank.gradients[0],
    }


def one_rank_malformed() -> Any:
    """Rank 1's mask is all zero: both ranks raise before a forward pass, and the next fit works."""
    data = batches(count=1)
    if RANK == 1:
        data[0]["attention_mask"].zero_()
    module = support.Module()
    try:
        fit(module, data, callback())
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "nothing raised"
    again = pair(support.Module, batches(count=1), {})
    return {"message": message, "forwards": len(module.shapes), "again": again}


class Limited(support.Module):
    """Has no memory for micro-batches of more slots than `most`."""

    def __init__(self, most: int | None, backward: bool = False, other: bool = False) -> None:
        super().__init__()
        self.register_buffer("sent", torch.zeros(3))  # DDP sends buffers before a synchronised forward pass
        self.most, self.in_backward, self.other = most, backward, other

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.most is None or batch["input_ids"].numel() <= self.most:
            return loss
        if self.in_backward:
            loss.register_hook(self.fail)
            return loss
        return self.fail()

    def fail(self, *_: Any) -> Any:
        raise KeyError("no memory is needed for this") if self.other else torch.OutOfMemoryError("CUDA out of memory.")


def out_of_memory() -> Any:
    """One rank runs out: in the first of five micro-batches, in the last, in the only one; forward and backward."""

    def outcome(most: int | None, budget: int, lengths: Any = (FIVE, ONE), **options: Any) -> Any:
        module = Limited(most, **options)
        before = support.flat_parameters(module)
        try:
            fit(module, batches(count=2, lengths=lengths), callback(token_budget=budget, check="off"))
        except Exception as error:
            same = torch.equal(before, support.flat_parameters(module))
            return f"{type(error).__name__}: {error}", same and all(p.grad is None for p in module.parameters())
        return "", len(module.gradients)

    mine = [24, None][RANK]
    return {
        "first": outcome([47, None][RANK], 48, backward=False),
        "backward": outcome([47, None][RANK], 48, backward=True),
        "with the budget it names": outcome([47, None][RANK], 24),
        "last": outcome([None, 4][RANK], 24, lengths=([24, 12], [5, 6])),
        "only": outcome([None, 9][RANK], 200, lengths=([24, 24], [5, 6])),
        "a single row": outcome([None, 4][RANK], 24, lengths=([24, 12, 12], [7])),
        "another error": outcome(mine, 48, other=True),
    }


def checked() -> Any:
    """The first-batch check: a wrong declaration that only rank 1's rows show, right ones, and an error in the step."""

    def outcome(module: support.Module, lengths: Any, strategy: dict[str, Any] | None = None, **options: Any) -> Any:
        before = support.flat_parameters(module)
        try:
            fit(module, batches(count=2, lengths=lengths), callback(**options), ddp=strategy)
        except Exception as error:
            return f"{type(error).__name__}: {error}", torch.equal(before, support.flat_parameters(module))
        return "", len(module.gradients)

    class Fails(support.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if RANK == 1:
                raise RuntimeError("no such thing")
            return super().training_step(batch, batch_idx)

    class Gathers(support.Module):
        """A collective of the user's in the step: both ranks have to run it equally often."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + 0 * self.all_gather(loss.detach()).sum()

    class Contrasts(support.Module):
        """Negatives of both ranks: the ranks have to run equally many rows."""

        def loss(self, batch: Any) -> torch.Tensor:
            z = token_sums(self, batch)
            return torch.logsumexp(self.all_gather(z, sync_grads=True).flatten() - z.sum(), 0)

    def token_sums(module: support.Module, batch: Any) -> torch.Tensor:
        return support.token_losses(module.model(batch["input_ids"]), batch["labels"]).sum(1)

    one_tells = ([6] * 8, FIVE)
    return {
        "contrasts": outcome(Contrasts(), ([6, 6, 5, 5, 4, 3, 3, 2], [24, 23, 22, 22, 21, 20, 20, 19])),
        "both": outcome(support.Module("row-mean"), (FIVE, ONE)),
        "one_tells": outcome(support.Module("row-mean"), one_tells),
        "sum": outcome(support.Module("sum"), (FIVE, ONE)),
        "static_graph": outcome(support.Module("sum"), (FIVE, ONE), {"static_graph": True}),
        "right": [
            outcome(support.Module(how), (FIVE, ONE), loss_reduction=how) for how in ("token-mean", "row-mean", "sum")
        ],
        "fails": outcome(Fails(), (FIVE, ONE)),
        "gathers": outcome(Gathers(), (FIVE, ONE)),
        "one_row_on_one_rank": outcome(support.Module("row-mean"), (FIVE, [7])),
    }


def audited() -> Any:
    """What is new on rank 1 alone is looked at on both: batch 3 has another class, or a term that couples rows."""

    class Weighted(support.Module):
        weights = (1.0, 1.0)

        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = self.model(batch["input_ids"])[:, 0, :2]
            weight = torch.tensor(self.weights, dtype=logits.dtype)
            return torch.nn.functional.cross_entropy(logits, batch["classes"], weight=weight)

    class Coupled(support.Module):
        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = super().loss(batch)
            if RANK == 1 and self.global_step >= 4:
                loss = loss + self.model(batch["input_ids"]).std()
            return loss

    def steps(module: support.Module, **options: Any) -> Any:
        data = batches(count=6, lengths=[FIVE, FIVE])
        for k, batch in enumerate(data):
            batch["classes"] = torch.zeros(len(FIVE), dtype=torch.int64)
            batch["classes"][::3] = int(RANK == 1 and k >= 4 and isinstance(module, Weighted))
        checked: list[int] = []
        inner = callback(**options)

        class Seen(support.pl.Callback):
            def on_train_batch_start(self, *_: Any) -> None:
                training = inner._training
                checked.append(0 if training is None or training.ledger is None else training.ledger.audits)

        try:
            fit(module, data, inner, Seen())
        except Exception as error:
            return str(error), len(module.gradients), checked
        return support.flat_parameters(module), len(module.gradients), checked

    schema = {"labels": "position"}
    declared: dict[str, Any] = {"labels_key": "classes", "loss_reduction": "row-mean", "batch_schema": schema}
    right = {how: steps(Weighted(), check=how, **declared) for how in ("audit", "off")}
    wrong = Weighted()
    wrong.weights = (0.2, 0.8)
    return {
        "right": right,
        "class": steps(wrong, **declared),
        "term": steps(Coupled()),
    }


def joint() -> Any:
    """A loss that couples rows, in both modes for it: five chunks on rank 0, one on rank 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Coupled(support.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
            self.model = LlamaForCausalLM(LlamaConfig(vocab_size=support.VOCABULARY, **sizes))

        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            return torch.logsumexp(support.token_losses(logits, batch["labels"]).sum(1) / 10, 0)

    found = {mode: pair(Coupled, batches(count=4), {"mode": mode}, accumulate_grad_batches=2) for mode in WHOLE}
    by_itself = {"mode": "auto", "loss_reduction": "row-mean"}  # above the budget on rank 0 alone
    return found | {"auto": pair(Coupled, batches(count=4), by_itself)}


WHOLE = ("joint", "replay")


class OwnLoss(support.Module):
    """A model of transformers that takes its own loss."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": support.VOCABULARY}
        if leaks:
            from transformers import OPTConfig, OPTForCausalLM

            self.model = OPTForCausalLM(OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0))
        else:
            from transformers import Qwen2Config, Qwen2ForCausalLM

            self.model = Qwen2ForCausalLM(Qwen2Config(**sizes, intermediate_size=24, num_key_value_heads=1))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss


def packed() -> Any:
    """layout="pack": more packs on rank 0 than on rank 1, whose first batch is one row and tells nothing."""
    found = {"uneven": pair(OwnLoss, batches(count=4), {"layout": "pack"}, accumulate_grad_batches=2)}
    late = batches(count=2) if RANK == 0 else [support.make_batch([5], seed=3), *batches(count=1)]
    found["late"] = pair(OwnLoss, late, {"layout": "pack"})
    try:
        fit(OwnLoss(leaks=True), batches(count=2), callback(layout="pack"))
    except Exception as error:
        found["leaks"] = f"{type(error).__name__}: {error}"
    data = batches(count=3)
    if RANK == 0:
        row = int(data[1]["attention_mask"].sum(1).argmax())
        data[1]["attention_mask"][row, 2] = 0
        data[1]["labels"][row, 2] = -100
    try:
        fit(OwnLoss(), data, callback(layout="pack", mode="joint"))
    except Exception as error:
        found["holes"] = f"{type(error).__name__}: {error}"
    return found


class Manual(support.Module):
    """Manual optimization, two batches per step."""

    def __init__(self, added: PadMinCallback | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.added = [added]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pairs = [(batch, 1.0)] if self.added[0] is None else self.added[0].micro_batches(batch)
        for micro, weight in pairs:
            self.manual_backward(self.loss(micro) * weight / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def manual() -> Any:
    plain, added = Manual(None), callback()
    split = Manual(added)
    fit(plain, batches(count=4))
    fit(split, batches(count=4), added)
    return {"plain": record(plain), "split": record(split), "stats": added.stats.state_dict()}


def reductions() -> Any:
    """How often DistributedDataParallel reduces a bucket in one batch of five micro-batches."""
    calls = [0]

    def hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch refuses string annotations here
        calls[0] += 1
        work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    class Counted(support.Module):
        def on_train_start(self) -> None:  # Lightning's own option registers hooks on CUDA only
            self.trainer.strategy.model.register_comm_hook(None, hook)

    counts = []
    for added in ([], [callback()]):
        calls[0] = 0
        fit(Counted(), batches(count=3), *added)
        counts.append(calls[0])
    return counts


def synchronised_logging() -> Any:
    """self.log(sync_dist=True) per step with uneven counts: no hang, the values of the un-split run."""

    class Logging(support.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch["labels"]))
            rows = torch.tensor(float(len(batch["labels"])))
            self.log("rows", rows, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")
            return loss

    values = []
    for added in ([], [callback()]):
        trainer = fit(Logging(), batches(count=3), *added)
        values.append({k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("padmin")})
    return values


def variants() -> Any:
    """DDP with find_unused_parameters, and with a static graph."""
    return {
        "find_unused": pair(support.Module, batches(count=2), {}, ddp={"find_unused_parameters": True}),
        "static_graph": pair(support.Module, batches(count=2), {}, ddp={"static_graph": True}),
        "bucket_view": pair(support.Module, batches(count=2), {}, ddp={"gradient_as_bucket_view": True}),
    }


def flushed() -> Any:
    """Fewer steps than log_every_n_steps: metrics are written at the end, merged over ranks."""
    trainer = fit(support.Module(), batches(count=2), callback(), log_every_n_steps=50)
    return {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("padmin/")}


def padded_forward() -> Any:
    """A chunked model call under DistributedDataParallel, five chunks against one, for a loss that couples rows."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=RANK, world_size=2, timeout=timedelta(seconds=60))

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner = support.TinyLM().double()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.inner(input_ids)}

    def coupled(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(support.token_losses(outputs["logits"], labels).sum(1), 0)

    batch = batches(count=1)[0]
    labels = batch.pop("labels")
    alone = Named()
    coupled(alone(**batch), labels).backward()
    expected = support.flat_gradient(alone)
    torch.distributed.all_reduce(expected)
    found = {}
    for mode in ("joint", "replay"):
        parallel = torch.nn.parallel.DistributedDataParallel(Named())
        forward = PaddedForward(parallel, PadMinConfig(token_budget=BUDGET, launch_cost=4), mode, parallel.no_sync)
        coupled(forward(**batch), labels).backward()
        forward.backward_pending()
        found[mode] = support.flat_gradient(parallel)
    return {"expected": expected / 2, "found": found, "chunks": len(forward.micro_batches or ())}


def one_rank_ends_early() -> Any:
    """Rank 1 has two batches, rank 0 four: nobody may wait for the other's next collective until the timeout."""
    fit(support.Module(), batches(count=4 - 2 * RANK), callback(), log_every_n_steps=50)


def one_rank_fails() -> Any:
    """Rank 1 raises in its second micro-batch. Never returns a result; both processes must end."""

    class Failing(support.Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if RANK == 1 and len(self.shapes) == 1:
                raise RuntimeError("rank 1 fails in its second micro-batch")
            return super().training_step(batch, batch_idx)

    fit(Failing(), batches(count=2), callback())


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, names = Path(sys.argv[1]), sys.argv[2:]
    results = {name: globals()[name]() for name in names}
    torch.save(results, output.with_suffix(f".rank{RANK}.pt"))
