"""A chunked model call: outputs and gradients of the whole batch, for losses that couple rows too."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import support
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import BatchError, ConfigError
from lightning_padmin.forward.padded_forward import PaddedForward

LENGTHS = [5, 9, 3, 12, 11, 4, 7, 2]
LEFT = [2, 0, 1, 0, 1, 0, 5, 0]
CONFIG = PadMinConfig(token_budget=24, launch_cost=2)


class Model(nn.Module):
    """Takes a batch by keyword, returns a mapping with per-position, per-row and flattened outputs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.dropout = support.TinyLM(), nn.Dropout(dropout)
        self.double()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        self.shapes.append(tuple(input_ids.shape))
        logits = self.dropout(self.inner(input_ids))
        pooled = (logits * attention_mask[..., None]).sum(1)
        return {"logits": logits, "pooled": pooled, "hidden_states": (logits, logits * 2), "nothing": None}


def coupled(outputs: Any, labels: Tensor) -> Tensor:
    """No mean over rows: a soft maximum over them, and the lowest tokens of the whole batch."""
    losses = support.token_losses(outputs["logits"], labels)
    valid = labels[:, 1:] != -100
    chosen = losses[valid]
    quantile = chosen[chosen >= torch.quantile(chosen.detach(), 0.6)].sum()
    return torch.logsumexp(losses.sum(1), 0) + quantile + torch.logsumexp(outputs["pooled"].sum(1), 0)


def inputs(left: list[int] | None = None) -> tuple[dict[str, Tensor], Tensor]:
    batch = support.make_batch(LENGTHS, left=left)
    return batch, batch.pop("labels")


@pytest.mark.parametrize("mode", ["joint", "replay"])
def test_equal_to_the_whole_batch_for_a_loss_that_couples_rows(mode: Any) -> None:
    batch, labels = inputs()
    stock, chunked = Model(), Model()
    expected = stock(**batch)
    coupled(expected, labels).backward()
    forward = PaddedForward(chunked, CONFIG, mode)
    outputs = forward(**batch)
    loss = coupled(outputs, labels)
    loss.backward()
    forward.backward_pending()
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(outputs["logits"][real], expected["logits"][real], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(outputs["hidden_states"][1][real], 2 * expected["logits"][real], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(outputs["pooled"], expected["pooled"], rtol=1e-12, atol=1e-14)
    assert bool((outputs["logits"][~real] == 0).all())
    assert outputs["nothing"] is None
    wanted = support.flat_gradient(stock)
    assert support.relative(support.flat_gradient(chunked), wanted) <= 1e-12
    assert forward.micro_batches is not None
    assert len(forward.micro_batches) > 2
    assert len(chunked.shapes) == len(forward.micro_batches) * (1 if mode == "joint" else 2)
    assert all(rows * width <= 24 for rows, width in chunked.shapes)


def test_split_micro_batches_would_be_wrong_for_that_loss() -> None:
    batch, labels = inputs()
    stock, split = Model(), Model()
    coupled(stock(**batch), labels).backward()
    forward = PaddedForward(split, CONFIG)
    forward(**batch)
    assert forward.micro_batches is not None
    for slots in forward.micro_batches.slot_maps:
        rows = torch.as_tensor(slots.rows)
        part = {key: value[rows, : slots.widths[0]] for key, value in batch.items()}
        weight = len(rows) / len(labels)
        (coupled(split(**part), labels[rows, : slots.widths[0]]) * weight).backward()
    assert support.relative(support.flat_gradient(split), support.flat_gradient(stock)) > 1e-2


def test_left_padding_gives_each_row_what_it_gives_alone() -> None:
    batch, _ = inputs(LEFT)
    model = Model()
    outputs = PaddedForward(model, CONFIG)(**batch)
    stock = model(**batch)["logits"]
    worst = 0.0
    for row, (length, before) in enumerate(zip(LENGTHS, LEFT, strict=True)):
        columns = slice(before, before + length)
        alone = model.inner(batch["input_ids"][row : row + 1, columns])[0]
        torch.testing.assert_close(outputs["logits"][row, columns], alone, rtol=1e-12, atol=1e-14)
        worst = max(worst, float((stock[row, columns] - alone).abs().max()))
    assert worst > 1e-3


def test_replay_draws_the_same_dropout_twice() -> None:
    batch, labels = inputs()
    gradients = []
    for mode in ("joint", "replay"):
        model = Model(dropout=0.4)
        torch.manual_seed(11)
        forward = PaddedForward(model, CONFIG, mode)  # type: ignore[arg-type]
        coupled(forward(**batch), labels).backward()
        state = torch.get_rng_state()
        forward.backward_pending()
        assert torch.equal(torch.get_rng_state(), state)
        gradients.append(support.flat_gradient(model))
    assert support.relative(gradients[1], gradients[0]) <= 1e-12


def test_no_sync_is_entered_for_all_but_the_last() -> None:
    batch, labels = inputs()
    for mode, times in (("joint", 1), ("replay", 2)):
        inside: list[bool] = []
        state = {"on": False}

        @contextmanager
        def no_sync(state: dict[str, bool] = state) -> Any:
            state["on"] = True
            yield
            state["on"] = False

        model = Model()
        model.register_forward_hook(lambda *_, inside=inside, state=state: inside.append(state["on"]))
        forward = PaddedForward(model, CONFIG, mode, no_sync)  # type: ignore[arg-type]
        coupled(forward(**batch), labels).backward()
        forward.backward_pending()
        assert inside == ([True] * (len(inside) // times - 1) + [False]) * times


def test_without_gradients_replay_runs_once() -> None:
    batch, _ = inputs()
    model = Model()
    forward = PaddedForward(model, CONFIG, "replay")
    with torch.no_grad():
        forward(**batch)
    forward(**batch)  # nothing was pending
    assert forward.micro_batches is not None
    assert len(model.shapes) == 2 * len(forward.micro_batches)


def test_refusals() -> None:
    batch, labels = inputs()
    forward = PaddedForward(Model(), CONFIG)
    with pytest.raises(BatchError, match="'labels' is among the inputs"):
        forward(**batch, labels=labels)
    with pytest.raises(BatchError, match="by its name"):
        forward(batch["input_ids"])
    with pytest.raises(ConfigError, match="mode='split'"):
        PaddedForward(Model(), CONFIG, "split")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a PadMinConfig"):
        PaddedForward(Model(), 96)  # type: ignore[arg-type]
    replay = PaddedForward(Model(), CONFIG, "replay")
    replay(**batch)
    with pytest.raises(BatchError, match="call backward_pending"):
        replay(**batch)


def test_outputs_that_could_be_two_things_must_be_declared() -> None:
    batch, _ = inputs()
    same = {key: value[:2, :3] for key, value in batch.items()}

    def ambiguous(input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"scores": input_ids.double(), "total": input_ids.double().sum()}

    with pytest.raises(BatchError, match="output 'scores'"):
        PaddedForward(ambiguous, CONFIG)(**same)
    declared = PaddedForward(ambiguous, CONFIG, outputs={"scores": "position", "total": "drop"})(**same)
    assert torch.equal(declared["scores"], same["input_ids"].double())
    assert declared["total"] is None


# Dummies


def one_more(values: Any) -> Any:
    """An exchange with another rank, which has two micro-batches more than this one has rows."""
    mine = np.asarray(values)
    other = mine.copy()
    if len(mine) > 1:
        other[1] = len(LENGTHS) + 2
    return np.stack([mine, other])


class Extreme(Model):
    """Some outputs are not finite, or their sum is not; counts calls that were sent backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.backward = kind, 0
        self.inner.head.register_full_backward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.backward += 1

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        outputs = super().forward(input_ids, attention_mask)
        logits = outputs["logits"]
        if self.kind in ("banned", "infinite"):
            logits = logits.clone()
            logits[..., 20:] = torch.finfo(logits.dtype).min if self.kind == "banned" else -float("inf")
        elif self.kind == "overflow":
            logits = logits.half() + 60_000
        elif self.kind == "undefined":  # of a token that no label asks for
            logits = logits.masked_fill((input_ids == 22)[..., None], float("nan"))
        return outputs | {"logits": logits}


@pytest.mark.parametrize("mode", ["joint", "replay"])
@pytest.mark.parametrize("kind", ["finite", "banned", "infinite", "overflow", "undefined"])
def test_values_of_dummies_reach_nothing(kind: str, mode: Any) -> None:
    batch, labels = inputs()
    batch["input_ids"][7, 0] = 22  # of the shortest row, which dummies are copies of
    labels = labels.masked_fill((labels > 19) | (batch["input_ids"] == 22).roll(1, 1), -100)
    found = []
    for exchange in (None, one_more):
        model = Extreme(kind)
        forward = PaddedForward(model, CONFIG, mode, exchange=exchange)
        logits = forward(**batch)["logits"]
        logits.mul_(0.5)  # outputs are the caller's, who may write into them
        real = (labels[:, 1:] != -100).nonzero(as_tuple=True)
        loss = torch.logsumexp(nn.functional.cross_entropy(logits[:, :-1][real].double(), labels[:, 1:][real]), 0)
        loss.backward()
        forward.backward_pending()
        assert forward.micro_batches is not None
        assert model.backward == len(forward.micro_batches)  # or another rank would wait
        found.append((loss.detach(), support.flat_gradient(model)))
        assert (forward.micro_batches.stats.dummies > 0) is (exchange is not None)
    assert torch.isfinite(found[0][0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3 if kind == "overflow" else 1e-12, atol=1e-14)


def test_a_multiple_of_a_dummys_outputs_would_not_be_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: zero times what is not finite."""
    from lightning_padmin.forward.outputs import Assembler

    def added(self: Any, joined: Tensor, parts: Any) -> Tensor:
        return joined + sum(dummy.sum() * 0 for dummy in parts[len(self._batches.plan) :])

    monkeypatch.setattr(Assembler, "_with_dummies", added)
    batch, _ = inputs()
    logits = PaddedForward(Extreme("banned"), CONFIG, exchange=one_more)(**batch)["logits"]
    assert bool(torch.isnan(logits).any())
