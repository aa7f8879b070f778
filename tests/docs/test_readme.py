"""Every Python snippet of the README, run on a tiny model, by its result: the same as without this library.

Budgets are made small, so that batches are really split.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
import transformers
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_padmin import PadMinCallback, PadMinConfig

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LENGTHS = [24, 20, 12, 12, 6, 6, 6, 3]


def snippet(words: str) -> str:
    """The one snippet with these words, with a budget that splits."""
    (found,) = [each for each in SNIPPETS if words in each]
    return found.replace("16_384", "48").replace("MyTrainer(...", "MyTrainer(**options")


def run(words: str, **names: Any) -> dict[str, Any]:
    exec(compile(snippet(words), "README.md", "exec"), names)
    return names


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=support.VOCABULARY, **sizes))


def batch(seed: int = 0) -> dict[str, Tensor]:
    return support.make_batch(LENGTHS, seed=seed)


def trained(model: Any, step: Callable[[Any], None] | None = None) -> Tensor:
    """Parameters after one plain SGD step."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(**batch()).loss.backward()
    if step is not None:
        step(plain)
    optimizer.step()
    return support.flat_parameters(plain)


def same(model: nn.Module, wanted: Tensor) -> None:
    torch.testing.assert_close(support.flat_parameters(model), wanted, rtol=0, atol=1e-6)


def test_all_snippets_are_here() -> None:
    named = re.findall(r"\b(?:run|snippet)\(\s*\"(.*?)\"", Path(__file__).read_text(encoding="utf-8"))
    assert all(any(words in each for words in named) for each in SNIPPETS)
    assert len(SNIPPETS) == 11


def test_lightning() -> None:
    def trainer(**options: Any) -> pl.Trainer:
        return support.quiet_trainer(*options["callbacks"])

    names = run("from lightning_padmin import PadMinCallback", Trainer=trainer)
    plain, split = support.Module(), support.Module()
    support.fit(plain, [batch()])
    names["trainer"].fit(split, support.loader([batch()]))
    assert support.relative(split.gradients[0], plain.gradients[0]) <= 1e-12
    assert len(split.shapes) > 1


def test_packing() -> None:
    class Model(support.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def loss(self, batch: Any) -> Tensor:
            return self.model(**batch).loss

    def trainer(**options: Any) -> pl.Trainer:
        return support.quiet_trainer(*options["callbacks"])

    names = run("layout=", Trainer=trainer, PadMinCallback=PadMinCallback)
    plain, packed = Model(), Model()
    support.fit(plain, [batch()])
    names["trainer"].fit(packed, support.loader([batch()]))
    assert support.relative(packed.gradients[0], plain.gradients[0]) <= 1e-5
    assert packed.shapes[-1][0] == 1


def test_manual_optimization() -> None:
    class Manual(support.Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            run("self.manual_backward", self=self, batch=batch, padmin=callback)

    callback, plain, manual = PadMinCallback(token_budget=48), support.Module(), Manual()
    support.fit(plain, [batch()])
    support.fit(manual, [batch()], callback)
    torch.testing.assert_close(support.flat_parameters(manual), support.flat_parameters(plain), rtol=0, atol=1e-12)
    assert callback.stats.micro_batches > 1


def test_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, own = Fabric(accelerator="cpu", devices=1), llama()
    wanted = trained(own)
    model, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
    logged: list[Any] = []
    monkeypatch.setattr(fabric, "log_dict", lambda metrics, step: logged.append(metrics))
    run("FabricPadMin(fabric", fabric=fabric, model=model, optimizer=optimizer, batch=batch(), step=0)
    same(own, wanted)
    assert logged[0]["padmin/micro_batches"] > 1


def options_of(trainer: str) -> dict[str, Any]:
    import trl_cases as cases

    if trainer == "trl":
        arguments = cases.arguments(cases.GRPOConfig, max_steps=1)
        given = {"reward_funcs": cases.reward, "train_dataset": cases.prompts(), "processing_class": cases.tokenizer()}
        return {"model": cases.qwen2(), "args": arguments} | given
    rows = [{name: value[k] for name, value in batch().items()} for k in range(len(LENGTHS))]
    folder = tempfile.mkdtemp()
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=1, use_cpu=True, report_to=[], save_strategy="no", optim="sgd"
    )
    return {"model": llama(), "args": arguments, "train_dataset": rows}


def test_the_trainer_of_transformers() -> None:
    names = run("class MyTrainer(PadMinTrainerMixin, Trainer)", options=options_of("transformers"))
    names["trainer"].train()
    stock = transformers.Trainer(**options_of("transformers"))
    stock.train()
    same(names["trainer"].model, support.flat_parameters(stock.model))
    assert names["trainer"].padding_stats.micro_batches > 1


def test_trl() -> None:
    import trl_cases as cases

    class Scripted(cases.Scripted, cases.GRPOTrainer):
        pass

    source = snippet("class MyTrainer(PadMinMixin, GRPOTrainer)").replace("from trl import GRPOTrainer\n", "")
    names: dict[str, Any] = {"GRPOTrainer": Scripted, "options": options_of("trl")}
    exec(compile(source, "README.md", "exec"), names)
    ours, stock = cases.run(names["trainer"]), cases.run(Scripted(**options_of("trl")))
    assert cases.gradient_difference(ours, stock) <= 1e-5
    assert names["trainer"].padding_stats.micro_batches > names["trainer"].padding_stats.batches


def test_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADMIN_TOKEN_BUDGET", "48")
    accelerator, own = Accelerator(cpu=True), llama()
    wanted = trained(own, lambda plain: torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    optimizer: Any = torch.optim.SGD(own.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, scheduler = accelerator.prepare(own, optimizer, scheduler)
    logged: list[Any] = []
    monkeypatch.setattr(accelerator, "log", lambda metrics, step: logged.append(metrics))
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": [batch()], "step": 0}
    run("pad = PadMin(accelerator)", accelerator=accelerator, **names)
    same(own, wanted)
    assert logged[0]["padmin/micro_batches"] > 1


def test_a_loop_of_your_own() -> None:
    model = llama()
    wanted, whole = trained(model), float(model(**batch()).loss)
    names = run(
        "iter_micro_batches(batch", model=model, batch=batch(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    same(model, wanted)
    assert names["total"] == pytest.approx(whole, abs=1e-6)


def test_batches_of_similar_lengths() -> None:
    given = {"lengths": LENGTHS * 20, "dataset": list(range(160)), "collate": lambda rows: rows}
    names = run("LengthBucketBatchSampler(lengths", DataLoader=DataLoader, **given)
    assert sorted(index for rows in names["loader"] for index in rows) == list(range(160))


def test_losses_that_couple_rows() -> None:
    def coupled(logits: Tensor, labels: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return torch.logsumexp(losses.sum(1), 0)

    model, rows = llama(), batch()
    given = {"ids": rows["input_ids"], "mask": rows["attention_mask"], "labels": rows["labels"]}
    names = run("PaddedForward(model", model=model, any_loss=coupled, PadMinConfig=PadMinConfig, **given)
    wanted = coupled(model(input_ids=given["ids"], attention_mask=given["mask"]).logits, rows["labels"])
    assert float(names["loss"]) == pytest.approx(float(wanted), rel=1e-5)


def test_waste_in_the_progress_bar() -> None:
    shown: list[float] = []

    class Keeps(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            shown.append(float(trainer.progress_bar_metrics.get("waste", -1.0)))

    names = run("class ShowsWaste", Callback=pl.Callback)
    callbacks = (PadMinCallback(token_budget=48), names["ShowsWaste"](), Keeps())
    support.fit(support.Module(), [batch(), batch(1)], *callbacks, log_every_n_steps=1)
    assert 0 < shown[-1] < 0.5
