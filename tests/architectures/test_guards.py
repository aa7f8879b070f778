"""What is known of an architecture before it runs, and that what it says is so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures.cases import LENGTHS, Case
from architectures.zoo import BY_NAME, TABLE, Architecture, quiet
from support import TinyLM, relative
from torch import nn

from lightning_padmin.architectures import (
    ArchitectureError,
    Finding,
    Findings,
    inspect_model,
    scan_chunk,
    screen,
    words_of,
)


def _rules(model: nn.Module, severity: str = "") -> set[str]:
    return {finding.rule for finding in inspect_model(model) if severity in ("", finding.severity)}


def _variant(name: str, **options: Any) -> Architecture:
    base = BY_NAME[name]
    return replace(base, options={**base.options, **options})


@pytest.mark.parametrize("architecture", TABLE, ids=lambda architecture: architecture.name)
def test_agrees_with_the_table(architecture: Architecture) -> None:
    """Nothing here is refused, and "correct" is said of those that stock left padding gets wrong, of no other."""
    found = screen(architecture.build())
    found.refuse()
    findings = found.told
    assert found.corrects == (architecture.stock == "wrong"), findings
    assert any(finding.rule == "fused-scan" for finding in findings) == ("fused" in architecture.note)


_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.0],
    "long_factor": [4.0, 8.0],
    "factor": 8.0,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Phi3", {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 8}),
        ("Llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 8}),
    ],
    ids=["longrope", "dynamic"],
)
def test_limits_rope_that_depends_on_the_longest_row(name: str, options: Mapping[str, Any]) -> None:
    case = Case(_variant(name, **options))
    found = screen(case.model)
    assert (found.refused, found.row_limit) == ((), 8)  # shorter rows are exact
    (finding,) = [each for each in inspect_model(case.model) if each.severity == "refuse"]
    assert "longest row" in finding.reason
    together = case.batch("right")
    short = [k for k, length in enumerate(LENGTHS) if length <= 6]
    alone = {key: value[short, :6] for key, value in together.items()}
    with torch.no_grad():
        regrouped, whole = case.logits(alone), case.logits(together)[short, :6]
    real = alone["attention_mask"] == 1
    assert relative(regrouped[real], whole[real]) > 1e-3, "regrouping changes nothing, so why refuse?"


def test_same_models_with_fixed_rope_pass() -> None:
    fixed = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert screen(_variant("Llama", rope_parameters=fixed).build()) == Findings()


@pytest.mark.parametrize("place", ["nested", "per layer"])
def test_finds_rope_wherever_it_is_configured(place: str) -> None:
    class Config:
        model_type = "unheard-of"

    class Model(nn.Module):
        config = Config()

    inner = Config()
    if place == "nested":
        inner.rope_scaling = {"type": "su"}  # type: ignore[attr-defined]
        Model.config.text_config = inner  # type: ignore[attr-defined]
    else:
        parts = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "dynamic"}}
        Model.config.rope_parameters = parts  # type: ignore[attr-defined]
    (finding,) = inspect_model(Model())
    assert (finding.rule, finding.severity) == ("length-dependent-rope", "refuse")


class _WithBatchNorm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = TinyLM()
        self.norm = nn.BatchNorm1d(12, **options)


def test_refuses_batch_norm_that_depends_on_the_batch() -> None:
    model = _WithBatchNorm()
    with pytest.raises(ArchitectureError, match=r"norm \(BatchNorm1d\)"):
        screen(model).refuse()
    assert screen(model.eval()) == Findings()
    with pytest.raises(ArchitectureError):  # without running statistics eval mode depends on the batch too
        screen(_WithBatchNorm(track_running_stats=False).eval()).refuse()


@pytest.mark.parametrize(
    ("name", "weight"),
    [("Mixtral", "router_aux_loss_coef"), ("GraniteMoe", "router_aux_loss_coef"), ("JetMoe", "aux_loss_coef")],
)
def test_refuses_an_active_balance_loss(name: str, weight: str) -> None:
    model = _variant(name, output_router_logits=True, **{weight: 0.1}).build()
    with pytest.raises(ArchitectureError, match="balance loss"):
        screen(model).refuse()
    assert "balance-loss" not in _rules(_variant(name, output_router_logits=True, **{weight: 0.0}).build())


def test_balance_loss_does_not_separate() -> None:
    """Why it is refused: the mean over micro-batches is another number, whatever the weights."""
    case = Case(_variant("Mixtral", output_router_logits=True, router_aux_loss_coef=0.1))
    batch = case.batch("right")
    batch.pop("labels")
    parts = [{key: value[rows] for key, value in batch.items()} for rows in ([0, 1], [2, 3], [4, 5])]
    with torch.no_grad(), quiet():
        whole = case.model(**batch).aux_loss
        losses = torch.stack([case.model(**part).aux_loss for part in parts])
    assert losses.min() > whole + 1e-3


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("Falcon-H1", {"mamba_proj_bias": True}),
        ("GraniteMoeHybrid", {"mamba_proj_bias": True}),
        ("Nemotron-H", {"use_bias": True}),
        ("Nemotron-H", {"mamba_proj_bias": True}),
        ("Zamba2", {"add_bias_linear": True}),
        ("LFM2-MoE", {"conv_bias": True}),
        ("DeBERTa-v2", {"position_biased_input": False}),
        ("Llama4", {"attn_temperature_tuning": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_left_padding_rule_follows_the_options(name: str, option: Mapping[str, Any]) -> None:
    case = Case(_variant(name, **option))
    with torch.no_grad():
        logits = case.logits(case.batch("left"))
    wrong = case.logit_difference(logits, range(len(LENGTHS)), case.starts("left")[0]) > 1e-6
    assert ("left-padding" in _rules(case.model)) == wrong


def test_fused_scans_are_mentioned() -> None:
    """Their kernels are not on every machine; without them left padding is exact."""
    assert _rules(BY_NAME["Mamba2"].build()) == {"fused-scan"}
    assert "fused-scan" in _rules(BY_NAME["Zamba2"].build(), "advise")
    assert not _rules(BY_NAME["Qwen3-Next"].build())


def test_sparse_indexers_are_mentioned() -> None:
    assert _rules(BY_NAME["DeepSeek-V3.2"].build(), "advise") == {"sparse-indexer"}
    assert not _rules(BY_NAME["DeepSeek-V3"].build())


def test_xlstm_names_its_width() -> None:
    findings = inspect_model(BY_NAME["xLSTM"].build())
    (finding,) = [finding for finding in findings if finding.rule == "chunked-width"]
    assert "pad_to_multiple_of=4" in finding.reason
    assert [finding.severity for finding in findings] == ["correct", "advise"]


@pytest.mark.parametrize(
    ("chunk", "names"),
    [
        (4, ["Mamba2", "Bamba", "Falcon-H1", "GraniteMoeHybrid", "Nemotron-H", "Zamba2"]),
        (None, ["Llama", "Mamba", "Jamba", "LFM2", "Qwen3-Next", "Bert", "T5"]),
    ],
)
def test_scan_chunk(chunk: int | None, names: list[str]) -> None:
    assert {scan_chunk(BY_NAME[name].build()) for name in names} == {chunk}


def test_refusals_come_first_and_all_are_named() -> None:
    class Model(_WithBatchNorm):
        def __init__(self) -> None:
            super().__init__()
            self.dense = _variant("Llama", rope_parameters=_DYNAMIC).build()
            self.experts = _variant("Mixtral", output_router_logits=True).build()
            self.old = BY_NAME["GPT-2"].build()

    findings = inspect_model(Model())
    assert [finding.severity for finding in findings] == ["refuse", "refuse", "refuse", "correct"]
    assert len(set(findings)) == len(findings)
    assert all(isinstance(finding, Finding) and finding.where for finding in findings)
    told = " ".join(map(words_of, findings))
    for word in ("dynamic", "balance loss", "BatchNorm1d"):
        assert word in told


def test_a_plain_module_has_no_findings() -> None:
    assert screen(TinyLM()) == Findings()
