"""layout="pack" in GRPO and RLOO: gradients at every optimizer step and every metric, against stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("trl")

import trl_cases as cases
from transformers import Lfm2Config, Lfm2ForCausalLM

from lightning_padmin import PadMinConfig
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.trl import passes as trl_passes

PLAIN = {"loss_type": "dapo", "gradient_checkpointing": False}


def packs(mode: str = "auto", **options: Any) -> PadMinConfig:
    return cases.padmin(mode, **({"layout": "pack", "token_budget": 48} | options))


def lfm2() -> nn.Module:
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=cases.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        pad_token_id=0,
        eos_token_id=cases.EOS,
    )
    return Lfm2ForCausalLM(config)


@pytest.mark.parametrize("mode", ["split", "joint", "replay"])
@pytest.mark.parametrize(("loss_type", "beta"), [pytest.param("dapo", 0.0, marks=pytest.mark.slow), ("grpo", 0.2)])
def test_grpo(loss_type: str, beta: float, mode: str) -> None:
    options = PLAIN | {"loss_type": loss_type, "beta": beta}
    wanted = cases.stock(options)
    found = cases.train(cases.OURS, options, packs(mode))
    cases.same(found, wanted)
    stats = found.trainer.padding_stats
    assert stats.slots == stats.real_tokens < stats.slots_before
    assert stats.micro_batches > stats.batches or mode == "joint"
    assert found.largest <= 48


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split", "joint", "replay"])
@pytest.mark.parametrize("loss_type", ["bnpo", "dr_grpo", "cispo", "luspo", "sapo", "vespo"])
@pytest.mark.parametrize("iterations", [1, 2])
def test_all_losses(loss_type: str, iterations: int, mode: str) -> None:
    options = PLAIN | {"loss_type": loss_type, "beta": 0.2, "num_iterations": iterations}
    cases.same(cases.train(cases.OURS, options, packs(mode)), cases.stock(options))


def test_rloo() -> None:
    options = {"beta": 0.1, "gradient_checkpointing": False}
    wanted = cases.stock(options, cases.STOCK_RLOO)
    cases.same(cases.train(cases.OURS_RLOO, options, packs()), wanted)


def test_gradient_checkpointing() -> None:
    options = PLAIN | {"gradient_checkpointing": True}
    cases.same(cases.train(cases.OURS, options, packs("split")), cases.stock(options))


def test_an_equal_weight_for_every_pack_is_another_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_passes.Passes, "_split", cases.equally(trl_passes.Passes._split))
    found = cases.train(cases.OURS, PLAIN, packs("split", check="off"))
    assert cases.gradient_difference(found, cases.stock(PLAIN)) > 0.05


@pytest.mark.parametrize("mode", ["split", "joint"])
def test_adapters_with_checkpointing_and_a_reference(mode: str) -> None:
    """The reference pass switches adapters off, so nothing is decided there."""
    peft = pytest.importorskip("peft")
    options = {"loss_type": "dapo", "beta": 0.2, "gradient_checkpointing": True}

    def given() -> dict[str, Any]:
        return {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}

    torch.manual_seed(0)
    wanted = cases.train(cases.STOCK, options, None, **given())
    torch.manual_seed(0)
    found = cases.train(cases.OURS, options, packs(mode), **given())
    cases.same(found, wanted)
    assert found.trainer.padding_stats.waste == 0


@pytest.mark.parametrize("mode", ["split", "joint"])
def test_a_model_that_leaks_is_refused_before_it_is_trained(mode: str) -> None:
    trainer = cases.build(cases.OURS, PLAIN, packs(mode), lfm2)
    before = cases.flat(trainer.model).clone()
    with pytest.raises(ArchitectureError, match=r"layout='pack': model \(Lfm2ForCausalLM.*outputs change by"):
        trainer.train()
    assert torch.equal(cases.flat(trainer.model), before)


def test_auto_pads_here_and_says_why() -> None:
    with pytest.warns(UserWarning, match="layout='pad': packing is faster only with a fused kernel"):
        trainer = cases.build(cases.OURS, PLAIN, cases.padmin("split", layout="auto"), lfm2)
    found = cases.run(trainer)
    cases.same(found, cases.stock(PLAIN, make=lfm2))
    assert found.trainer.padding_stats.slots > found.trainer.padding_stats.real_tokens


def test_offline_trainers_are_not_packed() -> None:
    from lightning_padmin.integrations.trl.offline import _refuse_unsupported

    class SFTTrainer:
        args = None

    with pytest.raises(ConfigError, match="SFTTrainer packs by itself"):
        _refuse_unsupported(SFTTrainer(), PadMinConfig(layout="pack"))
    for options in ({"shape_buckets": 4}, {"launch_cost": "measured"}):
        with pytest.raises(ConfigError, match="is not for trainers of TRL"):
            _refuse_unsupported(SFTTrainer(), PadMinConfig(**options))
