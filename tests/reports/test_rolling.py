"""Kinds of faults in rolling and trimming: where padding is, and what a model makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import TinyLM, relative
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from lightning_padmin import MicroBatcher, PaddedForward, PadMinConfig, compact
from lightning_padmin.errors import SchemaError

ROWS = PadMinConfig(loss_reduction="row-mean", launch_cost=0)
Logits = Callable[[Any], Tensor]


def batch(ids: list[list[int]], mask: list[list[int]], **more: Any) -> dict[str, Tensor]:
    tensors = {"input_ids": ids, "attention_mask": mask} | more
    return {name: torch.as_tensor(value) for name, value in tensors.items()}


def rolled_by(ids: list[int], shift: int) -> list[int]:
    return ids[shift:] + ids[:shift]


def scores(logits: Tensor, ids: Tensor) -> Tensor:
    """(B, L - 1) log-probs of each token but the first."""
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)


def tiny() -> Logits:
    torch.manual_seed(1)
    model = TinyLM().double()
    return lambda inputs: model(inputs["input_ids"])


# prompts padded on the left, completions on the right: (prompt, completion) of each row
BOTH_SIDES = [
    [([7], [8]), ([4, 5, 6], [9, 3])],
    [([7, 2, 3], [8, 1, 5]), ([4], [9])],
    [([3, 4], [5, 6, 7, 8]), ([1, 2, 3, 4, 5], [6]), ([9], [9, 9])],
]


@pytest.mark.parametrize("rows", BOTH_SIDES)
def test_r01_completions_are_scored_where_they_are_in_each_row(rows: list[tuple[list[int], list[int]]]) -> None:
    wide, keep = (max(len(row[k]) for row in rows) for k in (0, 1))
    ids = [[0] * (wide - len(p)) + p + c + [0] * (keep - len(c)) for p, c in rows]
    mask = [[0] * (wide - len(p)) + [1] * len(p + c) + [0] * (keep - len(c)) for p, c in rows]
    whole, logits = batch(ids, mask), tiny()
    packed = compact(whole)
    assert packed.batch["input_ids"].tolist() == [
        (p + c + [0] * len(ids[0]))[: packed.batch["input_ids"].shape[1]] for p, c in rows
    ]
    outputs = logits(packed.batch)
    found = scores(packed.restore(outputs), whole["input_ids"])[:, -keep:]
    naive = scores(outputs, packed.batch["input_ids"])[:, -keep:]  # the fault: the last columns of what was rolled
    faults = 0
    for row, (p, c) in enumerate(rows):
        alone = scores(logits({"input_ids": torch.tensor([p + c])}), torch.tensor([p + c]))[0, -len(c) :]
        torch.testing.assert_close(found[row, : len(c)], alone, rtol=1e-12, atol=1e-12)
        faults += not torch.allclose(naive[row, : len(c)], alone)
    assert faults


HOLES = [
    ([0, 0, 11, 12, 13, 14], [0, 0, 1, 0, 1, 1], [11, 12, 13, 14, 0, 0], [1, 0, 1, 1, 0, 0]),
    ([0, 11, 12, 13, 14, 15], [0, 1, 0, 0, 1, 1], [11, 12, 13, 14, 15, 0], [1, 0, 0, 1, 1, 0]),
    ([0, 0, 0, 4, 5, 6], [0, 0, 0, 1, 0, 1], [4, 5, 6, 0, 0, 0], [1, 0, 1, 0, 0, 0]),
]


@pytest.mark.parametrize(("ids", "mask", "right_ids", "right_mask"), HOLES)
def test_r02_only_leading_padding_is_shifted(ids: Any, mask: Any, right_ids: Any, right_mask: Any) -> None:
    other = [7] * 6  # as wide as the batch, so that nothing is trimmed
    packed = compact(batch([ids, other], [mask, [1] * 6]))
    assert packed.batch["input_ids"][0].tolist() == right_ids
    assert packed.batch["attention_mask"][0].tolist() == right_mask
    assert packed.lengths[0] == sum(mask) + right_mask[: packed.lengths[0]].count(0) > sum(mask)
    by_count = rolled_by(ids, mask.count(0))
    by_sorting = [token for token, real in zip(ids, mask, strict=True) if real]
    assert by_count != right_ids
    assert by_sorting != right_ids[: len(by_sorting)]


@pytest.mark.parametrize("loss_mask", [[0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 1]])
def test_r02_a_loss_mask_does_not_say_where_padding_is(loss_mask: list[int]) -> None:
    whole = batch([[0, 0, 11, 12, 13, 14]], [[0, 0, 1, 1, 1, 1]], completion_mask=[loss_mask])
    config = PadMinConfig(loss_mask_key="completion_mask", label_shift=0)
    (micro,) = MicroBatcher(config).prepare(whole)
    assert micro.batch["input_ids"].tolist() == [[11, 12, 13, 14]]
    assert micro.batch["completion_mask"].tolist() == [loss_mask[2:]]
    by_loss = rolled_by([0, 0, 11, 12, 13, 14], loss_mask.index(1))[: sum(loss_mask)]
    assert by_loss != [11, 12, 13, 14]


CUTS = [
    ([[5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 5, 6]], [3, 6], 3),
    ([[5, 0, 0, 0], [1, 2, 3, 4]], [1, 4], 2),
    ([[5, 6, 0, 0, 0], [1, 2, 3, 4, 5], [9, 0, 0, 0, 0]], [2, 5, 1], 2),
]


@pytest.mark.parametrize(("ids", "sums", "cap"), CUTS)
def test_r03_nothing_is_trimmed_that_is_real_in_some_row(ids: list[list[int]], sums: list[int], cap: int) -> None:
    mask = [[1] * n + [0] * (len(ids[0]) - n) for n in sums]
    packed = compact(batch(ids, mask))
    assert packed.batch["input_ids"].tolist() == ids
    assert packed.batch["attention_mask"].sum(dim=1).tolist() == sums
    cut = [sum(row[-cap:]) for row in mask]  # the fault: the last columns of rows that were flushed to the left
    assert min(cut) == 0 < min(sums)
    # A cap belongs before the batch is padded, per row; whatever comes out of it is rolled whole.
    tails = [row[:n][-cap:] for row, n in zip(ids, sums, strict=True)]
    width = max(map(len, tails))
    capped = batch([[0] * (width - len(t)) + t for t in tails], [[0] * (width - len(t)) + [1] * len(t) for t in tails])
    assert [row[:n] for row, n in zip(compact(capped).batch["input_ids"].tolist(), sums, strict=False)] == tails


@pytest.mark.parametrize("left", [[2, 0], [0, 5], [3, 3]])
def test_r03_every_row_keeps_its_loss_tokens(left: list[int]) -> None:
    width = 10
    mask = torch.tensor([[0] * n + [1] * 4 + [0] * (width - 4 - n) for n in left])
    labels = torch.where((mask == 1) & (mask.cumsum(1) > 1), 7, -100)
    micro_batches = MicroBatcher(PadMinConfig(launch_cost=0)).prepare(
        {"input_ids": mask * 7, "attention_mask": mask, "labels": labels}
    )
    for micro in micro_batches:
        assert ((micro.batch["labels"][:, 1:] != -100).sum(dim=1) == 3).all()
        assert micro.batch["labels"].shape[1] == 4
    assert int((labels[:, -4:] != -100).sum()) < 6, "the fault: the last columns of the batch"


PAD_IS_EOS = [
    ([[4, 5, 2, 2]], [[1, 1, 1, 0]], [[4, 5, 2]]),
    ([[2, 2, 4, 5]], [[0, 1, 1, 1]], [[2, 4, 5]]),
    ([[2, 2, 2, 2, 2]], [[0, 1, 1, 0, 0]], [[2, 2]]),
    ([[2, 3, 2, 4, 2, 2]], [[0, 1, 1, 1, 1, 0]], [[3, 2, 4, 2]]),
]


@pytest.mark.parametrize(("ids", "mask", "right"), PAD_IS_EOS)
def test_r35_the_mask_alone_says_what_padding_is(ids: Any, mask: Any, right: Any) -> None:
    labels = torch.where(torch.tensor(mask) == 1, torch.tensor(ids), -100)
    labels[0, mask[0].index(1)] = -100  # the first token of a row has nothing before it
    whole = batch(ids, mask, labels=labels)
    for pad_token_id in (None, 2):
        (micro,) = MicroBatcher(PadMinConfig(pad_token_id=pad_token_id)).prepare(whole)
        assert micro.batch["input_ids"].tolist() == right
        assert micro.batch["labels"][0, -1] == right[0][-1], "the label of the last token is kept"
    assert sum(token != 2 for token in ids[0]) != len(right[0]), "the fault: lengths from token ids"


@pytest.mark.parametrize("ids", [[[4, 5, 2, 2]], [[2, 2, 4, 5]], [[0, 0, 3]]])
def test_r35_without_a_mask_nothing_is_guessed(ids: list[list[int]]) -> None:
    with pytest.raises(SchemaError, match="Padding is never guessed from token ids"):
        compact({"input_ids": torch.tensor(ids)})


def recurrence(inputs: Any) -> Tensor:
    """h = h / 2 + x, as (B, L, 1)."""
    states, h = [], torch.zeros(len(inputs["input_ids"]))
    for column in inputs["input_ids"].T:
        h = h / 2 + column
        states.append(h)
    return torch.stack(states, dim=1)[..., None]


@pytest.mark.parametrize(
    ("ids", "pads", "right", "wrong"),
    [
        ([1, 1, 2, 4], 2, [2.0, 5.0], [2.75, 5.375]),
        ([8, 2, 4], 1, [2.0, 5.0], [6.0, 7.0]),
        ([1, 1, 1, 6], 3, [6.0], [6.875]),
    ],
)
def test_r37_the_state_begins_with_the_row(ids: list[int], pads: int, right: list[float], wrong: list[float]) -> None:
    length = len(ids)
    mask = [0] * pads + [1] * (length - pads)
    whole = batch([ids, [3] * length], [mask, [1] * length])
    packed = compact(whole)
    assert packed.restore(recurrence(packed.batch))[0, pads:, 0].tolist() == right
    assert recurrence(whole)[0, pads:, 0].tolist() == wrong


def mamba() -> nn.Module:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=20, hidden_size=16, state_size=4, num_hidden_layers=2, use_bias=True, pad_token_id=0
    )
    model = MambaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, bos_token_id=None, eos_token_id=None, **sizes)).double().eval()


def each_alone(model: nn.Module, lengths: list[int]) -> tuple[float, float]:
    """How far rows are from themselves alone: rolled and regrouped, and as they came, padded on the left."""
    width = max(lengths)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    ids = torch.randint(1, 20, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    forward = PaddedForward(model, PadMinConfig(token_budget=width, launch_cost=0))
    with torch.no_grad():
        rolled = forward(input_ids=ids, attention_mask=mask).logits
        came = model(input_ids=ids, attention_mask=mask).logits
        alone = [model(input_ids=ids[k : k + 1, -n:]).logits[0] for k, n in enumerate(lengths)]
    assert len(forward.micro_batches) > 1
    found, wrong = (
        max(relative(outputs[k, -n:], alone[k]) for k, n in enumerate(lengths)) for outputs in (rolled, came)
    )
    return found, wrong


@pytest.mark.parametrize("lengths", [[2, 4], [1, 5, 3], [6, 2, 2, 5]])
def test_r37_a_state_space_model_sees_each_row_alone(lengths: list[int]) -> None:
    found, wrong = each_alone(mamba(), lengths)
    assert found <= 1e-12
    assert wrong > 1e-3


@pytest.mark.parametrize("lengths", [[2, 4], [1, 6, 3], [9, 2, 2, 8]])
def test_r15_learned_positions_begin_with_the_row(lengths: list[int]) -> None:
    """The reference is each row alone; results differ from those of the left-padded batch, which are the fault."""
    found, wrong = each_alone(gpt2(), lengths)
    assert found <= 1e-12
    assert wrong > 1e-3
