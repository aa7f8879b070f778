"""Which architectures keep the documents of a pack apart: proven ones against rows alone, the others refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures.cases import Case, relative
from architectures.zoo import TABLE, Architecture

from lightning_padmin import PaddedForward
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.microbatching.batcher import MicroBatcher
from lightning_padmin.verification.leak import PackGate

# Without kernels of mixers. Facts about transformers that the tests below measure.
LEAKING = {
    *("Llama4", "Bloom", "MPT", "XGLM", "BioGPT", "OPT", "gpt-oss"),
    *("Mamba", "FalconMamba", "Mamba2", "RecurrentGemma", "RWKV", "xLSTM"),
    *("Jamba", "Bamba", "Falcon-H1", "GraniteMoeHybrid", "Nemotron-H", "Zamba2"),
    *("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE", "Olmo-Hybrid", "LFM2", "LFM2-MoE", "MiniMax", "Kimi-Linear"),
}
CAUSAL = [architecture for architecture in TABLE if architecture.kind == "causal"]
OTHERS = [architecture for architecture in TABLE if architecture.kind in ("masked-lm", "classification")]
NAMED = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Mixtral", "Qwen3Moe")


def leaks(architecture: Architecture) -> bool:
    return architecture.name.split(",")[0] in LEAKING


def named(architectures: list[Architecture]) -> list[Any]:
    return [pytest.param(each, id=each.name.replace(" ", "-").replace(",", "")) for each in architectures]


def config_of(case: Case, **options: Any) -> Any:
    return replace(case.config(**options), layout="pack", pad_to_multiple_of=1)


def attention(case: Case, how: str) -> None:
    case.model.set_attn_implementation(how)
    assert case.model.config._attn_implementation == how


def check(case: Case) -> None:
    """Logits and gradients of packs, and of a loss that couples rows, against each row alone."""
    bound, config = case.architecture.bound, config_of(case, loss_reduction="token-mean")
    batches = MicroBatcher(config, gate=PackGate({"": case.model}, config)).prepare(case.batch("two-sided"))
    assert len(batches) >= 2
    assert any(len(slots) > 1 for slots in batches.slot_maps)
    assert batches.stats.waste == 0
    weighted, unweighted = 0.0, 0.0
    for micro, slots in zip(batches, batches.slot_maps, strict=True):
        logits = case.logits(micro.batch)
        alone = torch.cat([case.truth.logits[row] for row in micro.rows])
        assert relative(logits[0].detach().double(), alone) <= bound
        gradient = case.gradient(case.token_mean(logits, micro.batch["labels"]))
        weighted, unweighted = weighted + micro.weight * gradient, unweighted + gradient / len(batches)
        assert slots.slots == len(alone)
    assert relative(weighted, case.truth.token_mean) <= bound
    assert relative(unweighted, case.truth.token_mean) > 1e-2, "weights of 1/K would pass too"
    batch = case.batch("left")
    labels = batch.pop("labels")
    forward = PaddedForward(case.model, config)
    logits = forward(**batch, **case.architecture.forward).logits
    assert forward.micro_batches is not None
    assert forward.micro_batches.plan.is_packed
    assert case.logit_difference(logits, range(len(case.rows)), case.starts("left")[0]) <= bound
    assert relative(case.gradient(case.coupled(logits, labels)), case.truth.coupled) <= bound


@pytest.mark.parametrize("architecture", named([each for each in CAUSAL if not leaks(each)]))
def test_proven(architecture: Architecture) -> None:
    check(Case(architecture))


@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", named([each for each in CAUSAL if each.name in NAMED]))
def test_proven_with_each_attention(architecture: Architecture, how: str) -> None:
    case = Case(architecture)
    attention(case, how)
    check(case)


def without_labels(case: Case) -> dict[str, torch.Tensor]:
    return {name: each for name, each in case.batch("right").items() if name != "labels"}


def test_all_that_are_named_are_there() -> None:
    assert {each.name for each in CAUSAL} >= set(NAMED)


@pytest.mark.parametrize("architecture", named([each for each in CAUSAL if leaks(each)] + OTHERS))
def test_refused_with_what_was_measured(architecture: Architecture) -> None:
    case = Case(architecture)
    config = config_of(case, loss_reduction="sum")
    gate = PackGate({"model": case.model}, config)
    with pytest.raises(ArchitectureError, match=r"layout='pack': model \(") as error:
        MicroBatcher(config, gate=gate).prepare(
            {**case.batch("right"), "labels": case.batch("right")["input_ids"] * 0 - 100}
        )
    leak = gate.leaks["model"]
    assert not leak.is_none
    assert str(leak) in str(error.value)
    if not leak.failure:
        assert max(leak.outputs, leak.outputs_alone) > 1e-6, "nothing leaks: say so in the table"
    with pytest.raises(ArchitectureError):
        PaddedForward(case.model, config)(**without_labels(case))
