"""GRPO with the mixin against GRPO without: gradients at every optimizer step, and every logged metric."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import transformers
import trl_cases as cases

from lightning_padmin.integrations.trl import passes as trl_passes
from lightning_padmin.integrations.trl import window as trl_window

# Older releases have no vespo, and a luspo that reads padding, which is refused (test_trl_modes.py).
NEWER = {"vespo": (1, 0), "luspo": (1, 16)}
LOSSES = [
    loss
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    if NEWER.get(loss, (0,)) <= cases.RELEASE
]
MODES = ("joint", "split", "replay")


def options(loss: str, beta: float, iterations: int) -> dict[str, Any]:
    return {"loss_type": loss, "beta": beta, "num_iterations": iterations, "max_steps": 3}


def equal(loss: str, beta: float, iterations: int, mode: str) -> None:
    wanted = cases.stock(options(loss, beta, iterations))
    found = cases.train(cases.OURS, options(loss, beta, iterations), cases.padmin(mode))
    cases.same(found, wanted)
    assert found.largest <= 96
    stats = found.trainer.padding_stats
    assert stats.slots <= 0.85 * stats.slots_before
    assert stats.batches == 2 * len(found.gradients)


# Each of the three modes with old policy and reference model or without them; the other losses are with all of them.
@pytest.mark.parametrize(
    ("loss", "beta", "iterations", "mode"),
    [(loss, 0.2, 2, "split") for loss in ("grpo", "bnpo", "dapo", "cispo")]
    + [(loss, 0.0, 1, "split") for loss in ("grpo", "dapo")]
    + [("bnpo", 0.2, 2, "joint"), ("dapo", 0.0, 1, "joint"), ("grpo", 0.2, 2, "replay"), ("dapo", 0.0, 1, "replay")],
)
def test_gradients_and_metrics(loss: str, beta: float, iterations: int, mode: str) -> None:
    equal(loss, beta, iterations, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_and_metrics_of_all(loss: str, beta: float, iterations: int, mode: str) -> None:
    equal(loss, beta, iterations, mode)


def test_clipping_is_at_work_in_what_is_compared() -> None:
    logs = cases.stock(options("grpo", 0.2, 2)).logs
    assert max(each.get("clip_ratio/region_mean", 0.0) for each in logs) > 0.05


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_negative_control_every_chunk_weighs_the_same(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a loop does that takes the loss of each chunk by itself and divides by their number."""
    monkeypatch.setattr(trl_passes.Passes, "_split", cases.equally(trl_passes.Passes._split))
    found = cases.train(cases.OURS, options(loss, 0.0, 1), cases.padmin("split"))
    assert cases.gradient_difference(found, cases.stock(options(loss, 0.0, 1))) > 0.1


@pytest.mark.parametrize("mode", ["split", "joint"])
def test_log_probs_are_those_of_stock_and_zero_where_masked(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    original = trl_window.Window.__init__
    monkeypatch.setattr(
        trl_window.Window, "__init__", lambda self, *args: (original(self, *args), kept.append(self))[0]
    )
    wanted: list[Any] = []
    stock_class, _ = cases.trainers(cases.GRPOTrainer, seeing(wanted))
    found: list[Any] = []
    _, ours_class = cases.trainers(cases.GRPOTrainer, outer=(seeing(found),))
    chosen = options("grpo", 0.0, 1) | {"max_steps": 1}
    cases.train(stock_class, chosen, None)
    cases.train(ours_class, chosen, cases.padmin(mode, check="off"))
    values = [values for values, _, _ in found]
    masks = [mask for _, _, mask in wanted]
    if mode == "split":
        (window,) = kept
        values = [entry.buffers[:2] for entry in window.entries]
        assert all(not buffer.requires_grad for entry in window.entries for buffer in entry.buffers)
    else:
        assert not kept
    assert len(values) == len(wanted) == 2
    for mine, (theirs, _, _), mask in zip(values, wanted, masks, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a * mask, b * mask, rtol=1e-4, atol=2e-5)
            assert not a[mask == 0].any()


def seeing(calls: list[Any]) -> type:
    """A layer that keeps log-probs and entropies of training passes, with the model's inputs and the mask."""

    class Seeing:
        def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, keep: int, **more: Any) -> Any:
            outputs = super()._get_per_token_logps_and_entropies(model, ids, mask, keep, **more)
            if torch.is_grad_enabled():
                calls.append(([each.detach() for each in outputs[:2]], ids, mask[:, -keep:]))
            return outputs

    return Seeing


class InFloat64:
    """Log-probs of plain logits: the fused head of TRL sums in float32."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: Any = None, **_: Any
    ) -> Any:
        outputs = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        log_probs = outputs.logits[:, :-1].log_softmax(-1)
        chosen = log_probs.gather(2, input_ids[:, 1:, None]).squeeze(2)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        # The first column has nothing before it.
        per_token = (torch.nn.functional.pad(each, (1, 0))[:, -logits_to_keep:] for each in (chosen, entropy))
        return (*per_token, None)


def opt() -> torch.nn.Module:
    """Positions are looked up, counted over the mask: nothing of it is computed in float32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0}
    tokens = {"vocab_size": cases.VOCABULARY, "pad_token_id": cases.PAD, "eos_token_id": cases.EOS, "bos_token_id": 1}
    config = transformers.OPTConfig(**sizes, **tokens, word_embed_proj_dim=32, max_position_embeddings=64)
    return cases.scaled(transformers.OPTForCausalLM(config), 4.0).double()


@pytest.mark.skipif(cases.RELEASE < (1, 4), reason="its log-prob function returns two values, this test's own three")
@pytest.mark.parametrize("loss", ["grpo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_in_float64_only_rounding_is_left(loss: str) -> None:
    chosen = options(loss, 0.2, 2)
    stock, ours = cases.trainers(cases.GRPOTrainer, InFloat64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wanted = cases.train(stock, chosen, None, opt)
        for mode in MODES:
            found = cases.train(ours, chosen, cases.padmin(mode), opt)
            assert cases.gradient_difference(found, wanted) <= 1e-12
            assert cases.metric_difference(found, wanted)[0] <= 1e-12
            assert found.trainer.padding_stats.slots < 0.85 * found.trainer.padding_stats.slots_before
    finally:
        torch.set_default_dtype(before)
