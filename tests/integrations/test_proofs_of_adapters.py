"""What adapters log, keep and write down of audits. Steps, passes and checks themselves: other files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support import Memory, Module, fit, loader, make_batch, padmin, quiet_trainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import GradientCheckError, PadMinError, PadMinWarning
from lightning_padmin.integrations.common import Session
from lightning_padmin.integrations.fabric import FabricPadMin
from lightning_padmin.integrations.transformers import PadMinTrainerMixin

LENGTHS = [8, 4, 4, 2]


def batches(count: int, **options: Any) -> list[Any]:
    return [make_batch(LENGTHS, seed=seed, **options) for seed in range(count)]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "padmin" / "proof.jsonl").read_text().splitlines()]


def test_lightning_writes_metrics_checkpoint_and_proof(tmp_path: Path) -> None:
    memory, saver = Memory(), ModelCheckpoint(tmp_path, save_last=True)
    logger = CSVLogger(tmp_path, name="logs", version=0)
    options: dict[str, Any] = {"logger": [logger, memory], "log_every_n_steps": 1, "enable_checkpointing": True}
    fit(Module(), batches(4), padmin(), saver, **options)
    found = [(row["padmin/audits"], row["padmin/audit_worst"]) for _, row in memory.of("padmin/")]
    assert 0 < found[-1][1] < 1e-9
    configuration, *audits = lines_of(tmp_path / "logs" / "version_0")
    assert configuration["options"]["token_budget"] == padmin().config.token_budget
    assert {(line["kind"], line["way"]) for line in audits} == {("audit", "split")}
    steps = [line["step"] for line in audits]
    assert {1, 3} <= set(steps) <= {1, 2, 3, 4}  # when they are due, and what is new
    assert [count for count, _ in found] == [sum(step <= k for step in steps) for k in (1, 2, 3, 4)]
    assert {"'labels' is int64", "padding behind rows"} <= set(audits[0]["facets"])
    assert not any("padding behind rows" in line["facets"] for line in audits[1:])
    assert max(line["difference"] for line in audits) == found[-1][1]
    assert all(line["difference"] <= line["limit"] and line["rows"] >= 2 for line in audits)
    assert audits[-1]["slots"] >= audits[-1]["micro_batches"] >= 2
    # The checkpoint holds plain values; resumed, steps and audits are counted on, and the first batch is audited.
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["PadMinCallback"]
    assert [(each["step"], each["audits"]) for each in state["audits"]] == [(4, len(audits))]
    resumed, again = padmin(), Memory()
    trainer = quiet_trainer(resumed, max_epochs=2, logger=again, log_every_n_steps=1)
    trainer.fit(Module(), loader(batches(4)), ckpt_path=tmp_path / "last.ckpt")
    counts = [row["padmin/audits"] for _, row in again.of("padmin/")]
    assert counts[0] > len(audits)
    assert [(each["step"], each["audits"]) for each in resumed.state_dict()["audits"]] == [(8, counts[-1])]


def test_a_refused_audit_is_written_down(tmp_path: Path) -> None:
    options: dict[str, Any] = {"logger": CSVLogger(tmp_path, name="logs", version=0)}
    with pytest.raises(GradientCheckError):
        fit(Module(), batches(2), padmin(loss_reduction="sum"), **options)
    _, refused = lines_of(tmp_path / "logs" / "version_0")
    assert (refused["kind"], refused["step"]) == ("refused", 1)
    assert refused["words"].startswith("first-batch check")
    # Where nobody asked for files there is none, and neither where nothing is audited.
    assert not list(tmp_path.glob("elsewhere*"))
    off = CSVLogger(tmp_path, name="logs", version=1)
    memory = Memory()
    fit(Module(), batches(2), padmin(check="first-batch"), logger=[off, memory], log_every_n_steps=1)
    assert not (tmp_path / "logs" / "version_1" / "padmin").exists()
    assert not any("audit" in name for _, row in memory.rows for name in row)


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "logs" / "version_0").mkdir(parents=True)
    (tmp_path / "logs" / "version_0" / "padmin").write_text("a file")
    callback = padmin()
    with pytest.warns(PadMinWarning, match="cannot be written"):
        fit(Module(), batches(3), callback, logger=CSVLogger(tmp_path, name="logs", version=0))
    assert callback.stats.batches == 3


def test_checkpoints_of_a_session() -> None:
    """Of all adapters but the Trainer: from before there were audits, malformed, of other ranks, and copies."""
    session = Session("PadMin", PadMinConfig())
    ledger = session.audits.ledger()
    assert ledger is not None
    ledger.begin_step()
    ledger.passed(1e-7, {"a"})
    state = json.loads(json.dumps(session.state_dict()))
    other = Session("PadMin", PadMinConfig())
    other.load_state_dict({"stats": state["stats"]})
    assert other.audits.metrics("padmin/") == {"padmin/audits": 0}
    for bad in (None, {}, [1], [{"step": 1}], [state["audits"][0] | {"facets": {"a": "x"}}]):
        with pytest.raises(PadMinError, match="audits of a checkpoint"):
            other.load_state_dict(state | {"audits": bad})
    other.load_state_dict(state, counts=False)
    assert other.audits.metrics("padmin/") == {"padmin/audits": 1, "padmin/audit_worst": 1e-7, "padmin/mode": 0}
    again = pickle.loads(pickle.dumps(other)).audits.ledger()
    assert (again.step, again.audits, again.has_passed, again.facets) == (1, 1, False, {"a": 1})
    again.begin_step()
    again.show({"a"})
    assert again.wants
    # Ledgers go by the order of trainings; one that is loaded in the middle of a training goes on too.
    running = other.audits.ledger()
    assert running is not None
    other.load_state_dict(state)
    assert (running.step, other.audits.metrics("")["audits"]) == (1, 1)


def test_fabric_keeps_audits_beside_counts(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(Exception, match="proof_dir=3"):
        FabricPadMin(fabric, proof_dir=3)  # type: ignore[arg-type]
    pad = FabricPadMin(fabric, PadMinConfig(token_budget=8), proof_dir=tmp_path)
    ledger = pad._session.audits.ledger()
    ledger.begin_step()
    ledger.passed(1e-8, {"a"})
    fabric.save(tmp_path / "state.ckpt", {"pad": pad})
    other = FabricPadMin(fabric, PadMinConfig(token_budget=8))
    other.load_state_dict(torch.load(tmp_path / "state.ckpt", weights_only=True)["pad"])
    assert other.state_dict()["audits"][0]["audits"] == 1


class Ours(PadMinTrainerMixin, Trainer):
    pass


def trained(folder: Path, steps: int, resume: bool = False) -> Ours:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=23, **sizes))
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        restore_callback_states_from_checkpoint=resume,
    )
    rows = [{name: value[0] for name, value in make_batch([length], seed=length).items()} for length in (8, 4, 3, 2)]

    def collate(samples: Any) -> Any:
        columns = {name: [sample[name] for sample in samples] for name in rows[0]}
        fills = {"labels": -100}
        return {
            name: torch.nn.utils.rnn.pad_sequence(column, batch_first=True, padding_value=fills.get(name, 0))
            for name, column in columns.items()
        }

    trainer = Ours(model, arguments, train_dataset=rows * 5, data_collator=collate, padmin=PadMinConfig(token_budget=8))
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def kept_in(checkpoint: Path) -> tuple[int, int]:
    saved = json.loads((checkpoint / "trainer_state.json").read_text())
    (kept,) = saved["stateful_callbacks"]["PadMinAudits"]["attributes"]["audits"]
    return kept["step"], kept["audits"]


def test_a_trainer_keeps_audits_in_its_state(tmp_path: Path) -> None:
    first = trained(tmp_path, 2)
    written = [line["padmin/audits"] for line in first.state.log_history if "padmin/audits" in line]
    assert kept_in(tmp_path / "checkpoint-2") == (2, written[-1])
    configuration, *audits = lines_of(tmp_path)
    assert configuration["kind"] == "configuration"
    assert [line["kind"] for line in audits] == ["audit"] * written[-1]
    resumed = trained(tmp_path, 4, resume=True)
    step, count = kept_in(tmp_path / "checkpoint-4")
    assert step == 4
    assert count > written[-1]
    assert resumed.state.log_history[-2]["padmin/audits"] == count
    assert sum(line["kind"] == "audit" for line in lines_of(tmp_path)) == count
    assert 3 in [line["step"] for line in lines_of(tmp_path)[len(audits) + 1 :] if line["kind"] == "audit"]
    # A checkpoint from before there were audits.
    path = tmp_path / "checkpoint-4" / "trainer_state.json"
    saved = json.loads(path.read_text())
    del saved["stateful_callbacks"]["PadMinAudits"]
    path.write_text(json.dumps(saved))
    trained(tmp_path, 6, resume=True)
    assert kept_in(tmp_path / "checkpoint-6")[0] == 2


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_trainers_of_trl(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("trl")
    import offline_cases
    import trl_cases

    more: dict[str, Any] = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    if kind == "grpo":
        trainer = trl_cases.build(trl_cases.OURS, {"loss_type": "dapo"} | more, trl_cases.padmin("split"))
        trainer.train()
        logs = [line for line in trainer.state.log_history if "padmin/audits" in line]
    else:
        logs = offline_cases.trained("sft", trl_cases.qwen2(), PadMinConfig(token_budget=96), **more).logs
        logs = [line for line in logs if "padmin/audits" in line]
    assert len(logs) == 2
    step, count = kept_in(tmp_path / "checkpoint-2")
    assert count == logs[-1]["padmin/audits"] >= 1
    assert step == 2
    configuration, *audits = lines_of(tmp_path)
    assert configuration["adapter"] == "PadMinMixin"
    assert [(line["kind"], line["way"]) for line in audits] == [
        ("audit", "split" if kind == "grpo" else "joint")
    ] * count
    assert max(line["difference"] for line in audits) == logs[-1]["padmin/audit_worst"] < 1e-4
