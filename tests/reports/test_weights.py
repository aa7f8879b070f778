"""Kinds of faults in weighing micro-batches: by rows or tokens, over ranks, and losses that cannot be split."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from ranks import Ranks
from support import TinyLM, flat_gradient, make_batch, reduce_loss, relative, token_losses
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lightning_padmin import MicroBatcher, MicroBatches, PaddedForward, PadMinConfig, PadMinWarning, verify_equivalence
from lightning_padmin.architectures import ArchitectureError, screen


def given_losses(losses: list[list[float]]) -> dict[str, Tensor]:
    """A batch in which token j + 1 of row i has the loss `losses[i][j]`; the first of each row has none."""
    batch = make_batch([len(row) + 1 for row in losses])
    batch["loss"] = torch.zeros(batch["labels"].shape)
    for i, row in enumerate(losses):
        batch["loss"][i, 1 : len(row) + 1] = torch.tensor(row)
    return batch


def reduced(batch: dict[str, Tensor], how: str) -> float:
    return float(reduce_loss(batch["loss"][:, 1:], batch["labels"], how))


def split(batch: Any, how: str = "token-mean", **options: Any) -> MicroBatches:
    config = PadMinConfig(
        loss_reduction=how, launch_cost=0, batch_schema={"loss": {"kind": "position", "fill": 0.0}}, **options
    )
    return MicroBatcher(config).prepare(batch)


def weighted(parts: MicroBatches, how: str = "token-mean") -> float:
    return sum(weight * reduced(micro, how) for micro, weight in parts)


def unweighted(parts: MicroBatches, how: str = "token-mean") -> float:
    return sum(reduced(micro, how) for micro, _ in parts) / len(parts)


# Losses per row (a row of n tokens that all have it): a micro-batch of the long row, one of the others.
BY_ROW = [
    ([0.3, 0.6, 0.9, 2.0], [2, 2, 2, 6], 0.95, 1.30),
    ([1.0, 1.0, 4.0], [1, 1, 9], 2.0, 2.5),
    ([0.5, 0.7, 0.3, 0.5, 3.0], [3, 3, 3, 3, 8], 1.0, 1.75),
]


@pytest.mark.parametrize(("losses", "tokens", "right", "wrong"), BY_ROW)
def test_r11_losses_per_row_weigh_by_rows(losses: Any, tokens: Any, right: float, wrong: float) -> None:
    batch = given_losses([[loss] * n for loss, n in zip(losses, tokens, strict=True)])
    parts = split(batch, "row-mean")
    assert len(parts) == 2
    assert weighted(parts, "row-mean") == pytest.approx(right, rel=1e-6) == reduced(batch, "row-mean")
    assert unweighted(parts, "row-mean") == pytest.approx(wrong, rel=1e-6)
    by_tokens = sum(
        weight * reduced(micro.batch, "row-mean") for micro, weight in zip(parts, split(batch).weights, strict=True)
    )
    assert abs(by_tokens - right) > 0.1


COUNTS = [
    # labels, mask, targets after roll and shift, what a plain count says
    ([[5, 6, 7], [8, 9, -100]], [[1, 1, 1], [1, 1, 0]], 3, 5),
    ([[0, 5, 6, 7], [0, 0, 0, 9]], [[1, 1, 1, 1], [1, 1, 1, 1]], 6, 8),
    ([[-100, 5, -100, 7], [4, -100, -100, -100]], [[1, 1, 1, 1], [1, 0, 0, 0]], 2, 3),
]


@pytest.mark.parametrize(("labels", "mask", "right", "plain"), COUNTS)
def test_r13_targets_are_counted_with_the_shift(labels: Any, mask: Any, right: int, plain: int) -> None:
    batch = {"input_ids": torch.tensor(mask), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}
    parts = split(batch)
    assert parts.stats.loss_tokens == right
    assert int((batch["labels"] != -100).sum()) == plain != right
    sums = sum(float((micro["labels"][:, 1:] != -100).sum()) for micro, _ in parts)
    assert sums / right == 1.0, "every loss being 1, so is their mean"
    assert sums / plain < 1, "the fault"


@pytest.mark.parametrize(
    ("labels", "mask", "right", "before"),
    [
        ([[-100, -100, 5, 6]], [[0, 0, 1, 1]], 1, 2),
        ([[-100, 5, 6, 7], [1, 2, 3, 4]], [[0, 1, 1, 1], [1, 1, 1, 1]], 5, 6),
        ([[-100, -100, -100, 7], [-100, 3, 4, 5]], [[0, 0, 0, 1], [0, 1, 1, 1]], 2, 4),
    ],
)
def test_r13_targets_are_counted_after_the_roll(labels: Any, mask: Any, right: int, before: int) -> None:
    """The first token of a left-padded row was predicted from padding; once rolled nothing comes before it."""
    batch = {"input_ids": torch.tensor(mask), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}
    with pytest.warns(PadMinWarning, match="have a label on their first real token"):
        parts = split(batch)
    assert parts.stats.loss_tokens == right
    assert sum(int((micro["labels"][:, 1:] != -100).sum()) for micro, _ in parts) == right
    assert int((batch["labels"][:, 1:] != -100).sum()) == before != right


def on_ranks(batches: list[dict[str, Tensor]], **options: Any) -> list[MicroBatches]:
    """The micro-batches of each rank, with threads in place of processes."""
    ranks, found = Ranks(len(batches)), [None] * len(batches)

    def run(rank: int) -> None:
        config = PadMinConfig(launch_cost=0, batch_schema={"loss": {"kind": "position", "fill": 0.0}}, **options)
        found[rank] = MicroBatcher(config, exchange=ranks.exchange_of(rank)).prepare(batches[rank])  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert None not in found
    return found  # type: ignore[return-value]


UNEVEN = [
    # the token losses of each rank's rows, the mean over all tokens, the mean of the ranks' means
    ([[[3.0]], [[1.0] * 9]], 1.2, 2.0),
    ([[[4.0], [4.0]], [[0.0] * 4, [0.0] * 2]], 1.0, 2.0),
    ([[[1.0]], [[2.0] * 3], [[6.0] * 2, [6.0] * 4]], 4.3, 3.0),
]


@pytest.mark.parametrize(("losses", "right", "wrong"), UNEVEN)
def test_r22_one_mean_over_the_tokens_of_all_ranks(losses: Any, right: float, wrong: float) -> None:
    batches = [given_losses(rows) for rows in losses]
    parts = on_ranks(batches, normalize="global")
    assert len({len(each) for each in parts}) == 1
    local = [weighted(each) for each in parts]
    assert sum(local) / len(local) == pytest.approx(right, rel=1e-6)
    tokens = [sum(map(len, rows)) for rows in losses]
    sums = [sum(map(sum, rows)) for rows in losses]
    assert local == pytest.approx([s * len(losses) / sum(tokens) for s in sums], rel=1e-6)
    by_rank = [weighted(each) for each in on_ranks(batches)]  # each rank's own mean: what DDP alone does
    assert sum(by_rank) / len(by_rank) == pytest.approx(wrong, rel=1e-6)


def contrast(model: TinyLM, batch: dict[str, Tensor]) -> Tensor:
    """A loss that needs the other rows: each row against all of its batch."""
    z = nn.functional.normalize(model.rnn(model.embedding(batch["input_ids"]))[1][0], dim=1)
    return nn.functional.cross_entropy(z @ z.roll(1, 0).T / 0.1, torch.arange(len(z)))


def mismatched(model: TinyLM, batch: dict[str, Tensor]) -> Tensor:
    """Pairs each row with the next, as an estimate of a divergence from mismatched pairs does; alone with itself."""
    z = model.rnn(model.embedding(batch["input_ids"]))[1][0]
    return (z * z.roll(1, 0)).sum(1).mean()


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("loss", [contrast, mismatched])
def test_r28_a_loss_that_pairs_rows_is_not_taken_per_micro_batch(loss: Any, rows: int) -> None:
    torch.manual_seed(1)
    model = TinyLM().double()
    batch = make_batch([3 * n + 2 for n in range(rows)])
    config = PadMinConfig(loss_reduction="row-mean", max_rows=1)
    report = verify_equivalence(lambda inputs: loss(model, inputs), batch, config, module=model)
    assert not report.is_exact
    (gradients,) = [check for check in report.checks if "gradients" in check.name]
    assert gradients.difference > 1e-2, "the fault: split all the same"
    assert "couples rows" in gradients.words


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_r28_chunks_of_the_model_call_leave_such_a_loss_as_it_is(rows: int) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner = TinyLM().double()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            return {"logits": self.inner(input_ids)}

    def coupled(logits: Tensor) -> Tensor:
        sums = token_losses(logits, batch["labels"]).sum(1)
        return torch.logsumexp(sums, 0) + (sums * sums.roll(1, 0)).mean()

    batch = make_batch([3 * n + 2 for n in range(rows)])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    gradients = []
    for mode in (None, "joint", "replay"):
        model = Named()
        forward = model if mode is None else PaddedForward(model, PadMinConfig(max_rows=1), mode)
        coupled(forward(**inputs)["logits"]).backward()
        if mode is not None:
            assert len(forward.micro_batches) == rows
            forward.backward_pending()
        gradients.append(flat_gradient(model))
    assert max(relative(each, gradients[0]) for each in gradients[1:]) <= 1e-12


def balance(experts: list[int], mask: list[int] | None = None) -> float:
    """The balance loss of two experts, for tokens of which each goes to one of them."""
    chosen = torch.tensor([[50.0, -50.0] if expert == 0 else [-50.0, 50.0] for expert in experts])
    return float(load_balancing_loss_func((chosen,), 2, 1, None if mask is None else torch.tensor([mask])))


@pytest.mark.parametrize(
    ("real", "pads", "with_padding"), [([0, 1], 6, 1.5625), ([0, 1, 0, 1], 4, 1.25), ([0, 0, 1, 1, 1, 0], 2, 1.0625)]
)
def test_r57_the_balance_loss_is_of_real_tokens_and_of_all_of_them(real: Any, pads: int, with_padding: float) -> None:
    tokens, mask = real + [0] * pads, [1] * len(real) + [0] * pads
    assert balance(tokens, mask) == pytest.approx(1.0) == balance(real)
    assert balance(tokens) == pytest.approx(with_padding, rel=1e-5), "the fault: padding counts"
    parts = [[each for each in real if each == expert] for expert in (0, 1)]
    assert [balance(part) for part in parts] == pytest.approx([2.0, 2.0]), "the fault: taken per micro-batch"


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    heads = {"num_key_value_heads": 2, "output_router_logits": True, "experts_implementation": "eager"}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=23, **sizes, **experts, **heads)).double()
    for name, parameter in model.named_parameters():
        if "gate" in name:
            nn.init.normal_(parameter)  # experts that rows take unevenly
    return model


@pytest.mark.parametrize("lengths", [[9, 3, 2, 2], [5, 8], [12, 12, 1, 4, 3]])
@torch.no_grad()
def test_r57_chunks_of_the_model_call_count_the_balance_loss_once(lengths: list[int]) -> None:
    batch, model = make_batch(lengths), mixtral()
    wanted = model(**batch)
    forward = PaddedForward(model, PadMinConfig(token_budget=max(lengths), launch_cost=0))
    found = forward(**batch)
    assert len(forward.micro_batches) > 1
    assert float(found.aux_loss) == pytest.approx(float(wanted.aux_loss), rel=1e-6)
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-6)
    config = PadMinConfig(token_budget=max(lengths), launch_cost=0)
    parts = [(model(**micro), weight) for micro, weight in MicroBatcher(config).prepare(batch)]
    per_part = sum(weight * float(outputs.aux_loss) for outputs, weight in parts)
    assert abs(per_part - float(wanted.aux_loss)) > 1e-3, "the fault: the shares of a sum are no balance"
    with pytest.raises(ArchitectureError, match=r"balance loss of weight 0\.5"):
        screen(model).refuse()
