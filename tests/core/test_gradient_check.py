"""The first-batch check by itself: what it says of a loss, a declaration, a model, on one rank and on two."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import ranks
import support
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.batch.row_table import measure
from lightning_padmin.batch.schema import infer_schema
from lightning_padmin.errors import GradientCheckError, PeerError
from lightning_padmin.verification.gradient_check import Advice, Outcome, check_gradients

LENGTHS = [3, 9, 5, 7]


class Step:
    """A model and a training step that reduces its losses in some way."""

    def __init__(self, how: str = "token-mean", model: nn.Module | None = None, shift: bool = True) -> None:
        torch.manual_seed(0)
        self.model = (support.TinyLM() if model is None else model).double()
        self.how, self.count = how, 0

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        self.count += 1
        losses = support.token_losses(self.model(batch["input_ids"]), batch["labels"])
        if self.how == "softmax":
            return torch.logsumexp(losses.sum(1), 0)
        if self.how == "coupled":
            sums = losses.sum(1)
            return (sums - sums.mean()).square().sum() / 10
        if self.how == "all tokens":
            return losses.sum() / losses.numel()
        if self.how == "nothing":
            return losses.sum() * 0
        if self.how == "random":
            return (losses * torch.rand(losses.shape)).sum() / (batch["labels"][:, 1:] != -100).sum()
        return support.reduce_loss(losses, batch["labels"], self.how)


def check(step: Any, batch: dict[str, Tensor] | None = None, **options: Any) -> Outcome | None:
    names = set(options) & set(PadMinConfig.__dataclass_fields__)
    config = PadMinConfig(**{name: options.pop(name) for name in names})
    batch = support.make_batch(LENGTHS) if batch is None else batch
    schema = infer_schema(batch, config.fields, pad_token_id=0)
    table = measure(batch, schema, loss_reduction=config.loss_reduction, label_shift=config.label_shift)
    return check_gradients(step, batch, schema, table, config, step.model, **options)


@pytest.mark.parametrize("how", ["token-mean", "row-mean", "sum"])
def test_declarations(how: str) -> None:
    outcome = check(Step(how), loss_reduction=how)
    assert outcome is not None
    assert (outcome.told, outcome.final, outcome.notable) == (True, True, False)
    assert outcome.difference < 1e-9
    assert outcome.words.startswith("split gradients of 4 rows are the un-split ones")
    for other in {"token-mean", "row-mean", "sum"} - {how}:
        with pytest.raises(GradientCheckError, match=f"loss_reduction='{other}'.* is not what .* set .*'{how}'"):
            check(Step(how), loss_reduction=other)


def test_rows_that_tell_no_reduction_apart() -> None:
    outcome = check(Step("row-mean"), support.make_batch([5, 5, 5]))
    assert outcome is not None
    assert (outcome.told, outcome.final) == (True, False)
    assert check(Step("row-mean"), support.make_batch([5, 5, 5]), more_than_told=True) is None
    assert check(Step("token-mean"), more_than_told=True) is not None


class ReadsPadding(Step):
    """Its loss is a mean over all slots."""

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["input_ids"]).square().mean()


def test_too_few_rows() -> None:
    assert check(Step(), support.make_batch([5])) is None
    assert check(Step(), support.make_batch([5, 5], without_loss=[1])) is None


def test_one_row_with_padding() -> None:
    """All that a batch of one row can tell: whether its padding is read."""
    for batch in (support.make_batch([5], width=8), support.make_batch([5, 6], without_loss=[1])):
        outcome = check(Step(), batch)
        assert outcome is not None
        assert (outcome.told, outcome.final) == (True, False)
        assert outcome.difference <= 1e-12
    reads = ReadsPadding()
    with pytest.raises(GradientCheckError, match="A row with padding behind it is trained otherwise than without"):
        check(reads, support.make_batch([5], width=8))
    assert check(reads, support.make_batch([5])) is None


def test_losses_that_couple_rows() -> None:
    with pytest.raises(GradientCheckError, match="No weights of the micro-batches would match: the loss or the model"):
        check(Step("coupled"))
    with pytest.raises(GradientCheckError, match="do something else altogether"):
        check(Step("coupled"), advice=Advice(coupled="do something else altogether"))
    with pytest.raises(
        GradientCheckError, match="The loss weighs rows in another way than loss_reduction='token-mean'"
    ):
        check(Step("softmax"))
    with pytest.raises(GradientCheckError, match="first-batch check: "):
        check(Step("all tokens"))


def test_nothing_to_compare_with() -> None:
    outcome = check(Step("nothing"))
    assert outcome is not None
    assert (outcome.told, outcome.final, outcome.notable) == (False, False, False)
    assert "are zero or not finite" in outcome.words


def test_random_numbers() -> None:
    """Of each token: told with numbers that depend on the row alone."""
    outcome = check(Step("random"))
    assert outcome is not None
    assert (outcome.told, outcome.final, outcome.notable) == (True, True, False)
    assert outcome.difference < 1e-9


def test_a_model_that_reads_padding_on_the_left() -> None:
    batch = support.make_batch(LENGTHS, left=[6, 0, 4, 2])
    outcome = check(Step(), batch)
    assert outcome is not None
    assert (outcome.told, outcome.notable) == (True, True)
    assert outcome.difference > 1e-3
    assert outcome.words.startswith("rolling left padding changes gradients")
    batch["input_ids"][0, :6] = torch.arange(1, 7)
    with pytest.raises(GradientCheckError, match="it seems to leave out prompts, not padding"):
        check(Step(), batch)


class Backward(nn.Module):
    """Reads what is behind a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(support.VOCABULARY, 4)
        self.head = nn.Linear(4, support.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        return self.head(hidden + hidden.flip(1).cumsum(1).flip(1))


def test_a_model_that_reads_padding_on_the_right() -> None:
    with pytest.raises(GradientCheckError, match="A row with padding behind it is trained otherwise than without"):
        check(Step("row-mean", Backward()), loss_reduction="row-mean")


def test_the_limit() -> None:
    class Off(Step):
        def __call__(self, batch: dict[str, Tensor]) -> Tensor:
            return super().__call__(batch) * (1.05 if len(batch["input_ids"]) == 4 else 1)

    with pytest.raises(GradientCheckError, match=r"relative difference 0.04\d* \(limit 1e-03\)"):
        check(Off())
    outcome = check(Off(), tolerance=0.06)
    assert outcome is not None
    assert outcome.told
    assert 0.04 < outcome.difference < 0.06


def test_columns_that_nobody_has_declared() -> None:
    class Answers(Step):
        def __call__(self, batch: dict[str, Tensor]) -> Tensor:
            logits = self.model(batch["input_ids"])
            rows = torch.arange(len(logits))
            chosen = logits[rows, batch["answer"]].log_softmax(-1)[:, 3]
            return -chosen.mean()

    model = nn.Sequential(nn.Embedding(support.VOCABULARY, 6), nn.Linear(6, support.VOCABULARY))
    batch = support.make_batch(LENGTHS, left=[6, 0, 4, 2]) | {"answer": torch.tensor([7, 3, 6, 4])}
    step = Answers(model=model)
    with pytest.raises(GradientCheckError, match=r"declare batch_schema=\{'answer': 'column'\}"):
        check(step, batch, loss_reduction="row-mean")
    outcome = check(step, batch, loss_reduction="row-mean", batch_schema={"answer": "column"})
    assert outcome is not None
    assert outcome.told


def test_labels_on_first_tokens() -> None:
    """A loss that does not shift: declared as one that does, some rows tell."""

    class Unshifted(Step):
        def __call__(self, batch: dict[str, Tensor]) -> Tensor:
            logits = self.model(batch["input_ids"])
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    batch = support.make_batch(LENGTHS, prompt=2)
    batch["labels"][0, 0] = 3
    outcome = check(Unshifted(), batch, label_shift=0, first_labels=True)
    assert outcome is not None
    assert outcome.tells_first
    with pytest.raises(GradientCheckError, match="label_shift=0"):
        check(Unshifted(), batch, label_shift=1, first_labels=True)
    without = support.make_batch(LENGTHS, prompt=2)
    assert check(Unshifted(), without, label_shift=0, first_labels=True) is None
    plain = check(Step(), batch)
    assert plain is not None


def test_joint_gradients() -> None:
    outcome = check(Step("coupled"), joint=nullcontext)
    assert outcome is not None
    assert outcome.words.startswith("joint gradients of 4 rows are the un-split ones")
    step = Step("coupled")

    class Wrong:
        def __enter__(self) -> None:
            step.how = "sum"

        def __exit__(self, *arguments: object) -> None:
            step.how = "coupled"

    with pytest.raises(GradientCheckError, match="joint gradients of 4 rows differ"):
        check(step, joint=Wrong)


def test_what_a_step_raises_is_told_with_where_it_was() -> None:
    class Broken(Step):
        def __call__(self, batch: dict[str, Tensor]) -> Tensor:
            raise ValueError("four rows only")

    with pytest.raises(ValueError, match="four rows only") as caught:
        check(Broken())
    assert "Raised by the first-batch check" in caught.value.__notes__[0]


def test_nothing_is_left_behind() -> None:
    step = Step()
    step.model.embedding.weight.grad = torch.ones_like(step.model.embedding.weight)
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    check(step)
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    assert (step.model.embedding.weight.grad == 1).all()
    assert step.model.head.weight.grad is None


@pytest.mark.parametrize("wrong", [None, "declaration", "error", "few rows", "nothing"])
def test_two_ranks_come_to_one_answer(wrong: str | None) -> None:
    both, found = ranks.Ranks(2), {}

    class Broken(Step):
        def __call__(self, batch: dict[str, Tensor]) -> Tensor:
            raise ValueError("on one rank")

    def run(rank: int) -> None:
        step: Step = Step("row-mean" if wrong == "declaration" and rank else "token-mean")
        if wrong == "nothing" and rank == 0:
            step = Step("nothing")
        if wrong == "error" and rank:
            step = Broken()
        batch = support.make_batch([5] if wrong == "few rows" and rank else LENGTHS, seed=rank)
        try:
            found[rank] = check(step, batch, exchange=both.exchange_of(rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if wrong is None:
        assert found[0] == found[1]
        assert found[0].told
    elif wrong == "declaration":
        assert type(found[0]) is type(found[1]) is GradientCheckError
        assert str(found[0]) == str(found[1])
        assert "first-batch check (rank 1): " in str(found[0])
    elif wrong == "nothing":  # the other rank's difference is larger, and says less
        assert found[0] == found[1]
        assert not found[0].told
    elif wrong == "error":
        assert type(found[0]) is PeerError
        assert type(found[1]) is ValueError
    else:
        assert found == {0: None, 1: None}
