"""Which kind of loss: the same for every batch of a training, another when the training changes."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_padmin.verification import Fact, Fingerprint, fingerprint, what_changed

HIDDEN, CLASSES = 8, 11


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


class Net(nn.Module):
    """A body and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, rows: int = 4, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, (N, C) shifted logits, (N,) labels with some of -100."""
        hidden = self.body(torch.randn(rows, width, HIDDEN)).tanh()
        labels = torch.randint(0, CLASSES, (rows, width))
        labels[torch.rand(rows, width) < 0.2] = -100
        labels[:, 1] = 1
        return hidden, self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def ce(net: Net, rows: int, width: int, **options: Any) -> Tensor:
    _, logits, labels = net(rows, width)
    return F.cross_entropy(logits, labels, **options)


def pairs(net: Net, rows: int, width: int) -> Tensor:
    pooled = F.normalize(net(rows, width)[0].mean(1), dim=-1)
    return F.cross_entropy(pooled @ pooled.T * net.scale, torch.arange(rows))


def rows_of(net: Net, rows: int, width: int) -> Tensor:
    _, logits, labels = net(rows, width)
    return F.cross_entropy(logits, labels, reduction="none")


Loss = Callable[[Net, int, int], Tensor]


def flooding(level: float) -> Loss:
    return lambda net, rows, width: (ce(net, rows, width) - level).abs() + level


def hard_tokens(most: int) -> Loss:
    def loss(net: Net, rows: int, width: int) -> Tensor:
        losses = rows_of(net, rows, width)
        return losses.topk(min(most, len(losses))).values.mean()

    return loss


def focal(gamma: float | Tensor) -> Loss:
    def loss(net: Net, rows: int, width: int) -> Tensor:
        losses = rows_of(net, rows, width)
        return ((1 - (-losses).exp()) ** gamma * losses).mean()

    return loss


def terms(net: Net, count: int, factor: float = 1.0) -> Tensor:
    return torch.stack([ce(net, 3, 4) * factor for _ in range(count)]).sum()


def weighed(*factors: float) -> Callable[..., Tensor]:
    """Terms of one kind and their coefficients in one tensor."""
    return lambda *a: torch.stack([ce(*a) for _ in factors]) @ torch.tensor(factors)


def policy(clip: bool = True, beta: float = 0.0, delta: float | None = None) -> Loss:
    def loss(net: Net, rows: int, width: int) -> Tensor:
        logps = -rows_of(net, rows, width).view(rows, -1)
        ratio = (logps - logps.detach()).exp()
        if delta is not None:
            ratio = ratio.clamp(max=delta)
        advantages = torch.randn(rows, 1)
        objective = ratio * advantages
        if clip:
            objective = torch.min(objective, ratio.clamp(0.8, 1.2) * advantages)
        mask = (torch.rand_like(logps) < 0.8).float()
        per_token = -objective
        if beta:
            reference = logps.detach() + 0.1
            per_token = per_token + beta * ((reference - logps).exp() - (reference - logps) - 1)
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()

    return loss


COEFFICIENT = torch.tensor([0.0])
SAME: dict[str, Loss] = {
    "cross entropy": ce,
    "label smoothing": lambda *a: ce(*a, label_smoothing=0.1),
    "pairs": pairs,
    "with pairs": lambda *a: ce(*a) + 0.1 * pairs(*a),
    "annealing": lambda *a: ce(*a) + random.choice([0.1, 0.2, 1.0, 3.0]) * pairs(*a),
    "annealing, a tensor": lambda *a: ce(*a) + torch.rand(()).add(0.1) * pairs(*a),
    "flooding": flooding(0.1),
    "hard tokens": hard_tokens(3),
    "focal": lambda *a: focal(random.choice([0.5, 2.0, 3.0]))(*a),
    "policy": policy(beta=0.1, delta=2.0),
    "policy gradient in a loop": lambda net, rows, width: sum(
        -torch.randn(()) * row.mean() for row in rows_of(net, rows, width).view(rows, -1)
    ),
    "rows in a loop": lambda net, rows, width: sum((ce(net, 2, width) for _ in range(rows)), start=torch.zeros(())),
    "stacked rows": lambda net, rows, width: terms(net, rows + 30 * (width % 2)),
    "stacked rows and weights": lambda net, rows, width: weighed(*(torch.rand(rows) + 0.1).tolist())(net, 2, width),
    "divided by tokens": lambda net, rows, width: rows_of(net, rows, width).sum() / torch.tensor(rows * width),
    "per row": lambda net, rows, width: (rows_of(net, rows, width) * torch.randint(0, 2, (rows * (width - 1),))).mean(),
    "penalty": lambda *a: ce(*a) + 0.01 * sum(p.pow(2).sum() for p in a[0].parameters()),
}


def keys(loss: Loss, net: Net, batches: Iterable[tuple[int, int]]) -> set[str]:
    return {fingerprint(loss(net, *batch)).key for batch in batches}


@pytest.mark.parametrize("name", SAME)
def test_another_batch_is_the_same_loss(name: str) -> None:
    batches = [(random.randint(2, 9), random.randint(3, 12)) for _ in range(12 if name == "stacked rows" else 100)]
    assert len(keys(SAME[name], Net(), batches)) == 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_row_is_the_same_loss(reduction: str) -> None:
    """Reshaping it is a view, and of several rows a copy."""
    net, loss = Net(), lambda *batch: ce(*batch, reduction=reduction)
    assert len(keys(loss, net, [(1, 6), (4, 6)])) == 1
    names = [{fact.operation for fact in fingerprint(loss(net, rows, 6)).resolve()} for rows in (1, 4)]
    assert not any("View" in name or "Clone" in name for each in names for name in each)


def test_kinds_differ_from_each_other() -> None:
    net, same = Net(), {("with pairs", "annealing"), ("with pairs", "annealing, a tensor")}
    found = {name: fingerprint(loss(net, 4, 6)).key for name, loss in SAME.items()}
    assert len(set(found.values())) >= len(found) - len(same) - 1


CHANGES: dict[str, tuple[Loss, Loss, str]] = {
    "a coefficient leaves 0": (
        lambda *a: ce(*a) + 0.0 * pairs(*a),
        lambda *a: ce(*a) + 0.1 * pairs(*a),
        "MulBackward0 of NllLossBackward0 with a factor (other) that was 0",
    ),
    "one in a tensor": (
        lambda *a: ce(*a) + torch.tensor(0.0) * pairs(*a),
        lambda *a: ce(*a) + torch.tensor(0.1) * pairs(*a),
        "that was 0",
    ),
    "one in a tensor of one entry": (
        lambda *a: (ce(*a) + torch.zeros(1) * pairs(*a)).sum(),
        lambda *a: (ce(*a) + torch.ones(1) * pairs(*a)).sum(),
        "that was 0",
    ),
    "one that is yes or no": (
        lambda *a: ce(*a) + torch.tensor(False) * pairs(*a),
        lambda *a: ce(*a) + torch.tensor(True) * pairs(*a),
        "that was 0",
    ),
    "coefficients in a tensor": (
        lambda *a: (torch.tensor([1.0, 0.0]) * torch.stack([ce(*a), pairs(*a)])).sum(),
        lambda *a: (torch.tensor([1.0, 0.2]) * torch.stack([ce(*a), pairs(*a)])).sum(),
        "MulBackward0 of StackBackward0 with a factor (self, term 2) that was 0",
    ),
    "coefficients put side by side": (
        lambda *a: (torch.cat([ce(*a)[None], pairs(*a)[None]])[None] * torch.tensor([0.0, 1.0])).sum(),
        lambda *a: (torch.cat([ce(*a)[None], pairs(*a)[None]])[None] * torch.tensor([0.5, 1.0])).sum(),
        "with a factor (other, term 1) that was 0",
    ),
    "tasks in turn by a tensor": (
        weighed(1.0, 0.0),
        weighed(0.0, 1.0),
        "DotBackward0 of StackBackward0 with a factor (tensor, term 2) that was 0",
    ),
    "one of many coefficients": (weighed(*[1.0] * 8, 0.0), weighed(*[1.0] * 9), "with a factor (tensor) that was 0"),
    "in torch.add": (
        lambda *a: torch.add(ce(*a), pairs(*a), alpha=0.0),
        lambda *a: torch.add(ce(*a), pairs(*a), alpha=0.3),
        "that was 0",
    ),
    "in torch.lerp": (
        lambda *a: torch.lerp(ce(*a), pairs(*a), 0.0),
        lambda *a: torch.lerp(ce(*a), pairs(*a), 0.3),
        "that was 0",
    ),
    "a term appears": (ce, lambda *a: ce(*a) + pairs(*a), "AddBackward0"),
    "a term in torch.where": (
        lambda *a: ce(*a) + torch.where(torch.tensor(False), pairs(*a), 0.0),
        lambda *a: ce(*a) + torch.where(torch.tensor(True), pairs(*a), 0.0),
        "WhereBackward0 of NllLossBackward0 with a factor (condition) that was 0",
    ),
    "flooding turns": (flooding(0.1), flooding(50.0), "AbsBackward0 of a negative number"),
    "flooding by relu": (
        lambda *a: F.relu(ce(*a) - 0.1),
        lambda *a: F.relu(ce(*a) - 50.0),
        "ReluBackward0 of SubBackward0 with a factor (result) that is 0",
    ),
    "a clamp takes hold": (
        lambda *a: ce(*a).clamp(max=50.0),
        lambda *a: ce(*a).clamp(max=0.1),
        "ClampBackward1 of a positive number minus its max",
    ),
    "a maximum changes sides": (
        lambda *a: torch.maximum(ce(*a), torch.tensor(0.1)),
        lambda *a: torch.maximum(ce(*a), torch.tensor(50.0)),
        "MaximumBackward0 of a negative number minus its other",
    ),
    "hard tokens begin to choose": (hard_tokens(64), hard_tokens(8), "TopkBackward0 that leaves entries out"),
    "a mask begins to choose": (
        lambda *a: rows_of(*a)[torch.ones(a[1] * (a[2] - 1), dtype=torch.bool)].mean(),
        lambda *a: rows_of(*a)[torch.arange(a[1] * (a[2] - 1)) > 2].mean(),
        "IndexBackward0 that leaves entries out",
    ),
    "masked_select": (
        lambda *a: rows_of(*a).masked_select(torch.ones(a[1] * (a[2] - 1), dtype=torch.bool)).mean(),
        lambda *a: rows_of(*a).masked_select(torch.arange(a[1] * (a[2] - 1)) > 2).mean(),
        "MaskedSelectBackward0 that leaves entries out",
    ),
    "columns beyond a limit": (
        lambda net, rows, width: rows_of(net, rows, width).view(rows, -1)[:, :100].mean(),
        lambda net, rows, width: rows_of(net, rows, width).view(rows, -1)[:, :3].mean(),
        "SliceBackward0 with cut=the part beyond a limit of dimension 1",
    ),
    "mean, sum": (ce, lambda *a: ce(*a, reduction="sum"), "NllLossBackward0 with reduction='sum'"),
    "class weights": (ce, lambda *a: ce(*a, weight=torch.rand(CLASSES)), "NllLossBackward0 with weight=given"),
    "class weights that were ones": (
        lambda *a: ce(*a, weight=torch.ones(CLASSES)),
        lambda *a: ce(*a, weight=torch.linspace(0.1, 1, CLASSES)),
        "NllLossBackward0 with weight of all classes=not equal",
    ),
    "another ignored label": (
        ce,
        lambda *a: F.cross_entropy(a[0](*a[1:])[1], torch.ones(a[1] * (a[2] - 1)).long(), ignore_index=3),
        "NllLossBackward0 with ignore_index=3",
    ),
    "label smoothing": (ce, lambda *a: ce(*a, label_smoothing=0.1), "AddBackward0"),
    "focal from 0": (focal(0.0), focal(2.0), "PowBackward0 of RsubBackward1 with a factor (exponent) that was 0"),
    "focal from 0, a tensor": (focal(torch.tensor(0.0)), focal(torch.tensor(2.0)), "that was 0"),
    "a mean is squared": (
        lambda *a: ce(*a) ** 1.0,
        lambda *a: ce(*a) ** 2.0,
        "PowBackward0 of NllLossBackward0 with a factor (exponent) that was 1",
    ),
    "tasks in turn by their factors": (
        lambda *a: 1.0 * ce(*a) + 0.0 * rows_of(*a).mean(),
        lambda *a: 0.0 * ce(*a) + 1.0 * rows_of(*a).mean(),
        "MulBackward0 of MeanBackward0 with a factor (other) that was 0",
    ),
    "terms of one kind come in one by one": (
        lambda *a: sum(factor * ce(*a) for factor in (1.0, 0.0, 0.0)),
        lambda *a: sum(factor * ce(*a) for factor in (1.0, 0.5, 0.0)),
        "MulBackward0 of NllLossBackward0 with a factor (other) that was 0",
    ),
    "a policy with a reference": (policy(), policy(beta=0.1), "AddBackward0"),
    "a ratio with a limit": (policy(clip=False), policy(clip=False, delta=2.0), "ClampBackward1"),
    "a penalty": (ce, lambda *a: ce(*a) + 0.1 * a[0].head.weight.pow(2).sum(), "PowBackward0"),
    "another head": (
        ce,
        lambda net, rows, width: F.cross_entropy(
            net.other(net(rows, width)[0]).flatten(0, 1), torch.ones(rows * width).long()
        ),
        "AddmmBackward0 with outputs=3",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_another_loss_and_said(name: str) -> None:
    before, after, said = CHANGES[name]
    net = Net()
    old, new = fingerprint(before(net, 4, 6)), fingerprint(after(net, 5, 7))
    assert old.key != new.key
    assert said in what_changed(old, new)
    for loss, found in ((before, old), (after, new)):  # the control: without the change, other batches are the same
        assert keys(loss, net, [(4, 8), (3, 6), (7, 9)]) == {found.key}


def test_tasks_in_turn_are_two_losses() -> None:
    net = Net()

    def step(number: int) -> Tensor:
        return pairs(net, 3 + number % 4, 5) if number % 2 else ce(net, 3 + number % 4, 5)

    assert len({fingerprint(step(number)).key for number in range(12)}) == 2
    assert "no longer AddBackward0" in what_changed(fingerprint(step(0) + step(2)), fingerprint(step(0)))
    assert what_changed(fingerprint(step(0)), fingerprint(step(2))) == ""


# Models


def tiny(config: str, model: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    made = getattr(transformers, config)(**sizes, num_key_value_heads=1, vocab_size=32, **options)
    return getattr(transformers, model)(made).train()


def ids_of(rows: int, width: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (rows, width))
    mask = torch.ones_like(ids)
    mask[0, width // 2 + 1 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


SHAPES = [(2, 4), (3, 9), (8, 17), (5, 40), (16, 6)]


@pytest.mark.parametrize("trained", ["all", "some weights in each layer", "the lowest layer", "lora"])
def test_a_language_model(trained: str) -> None:
    model = tiny("LlamaConfig", "LlamaForCausalLM", attention_dropout=0.1)
    if trained == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    elif trained != "all":
        part = "q_proj" if "each" in trained else "layers.0.mlp"
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part in name)
    found = {fingerprint(model(**ids_of(*shape)).loss).key for shape in SHAPES}
    counted = {fingerprint(model(**ids_of(*shape), num_items_in_batch=torch.tensor(9)).loss).key for shape in SHAPES}
    assert len(found) == len(counted) == 1
    assert found != counted


def test_a_mixture_of_experts_with_and_without_its_router_in_the_loss() -> None:
    model = tiny("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)

    def found(coefficient: float) -> dict[str, Fingerprint]:
        model.router_aux_loss_coef = coefficient
        every = [fingerprint(model(**ids_of(*shape), output_router_logits=True).loss) for shape in SHAPES]
        return {each.key: each for each in every}

    zero, one, two = found(0.0), found(0.1), found(0.2)
    assert len(zero) == len(one) == 1
    assert list(one) == list(two)
    assert list(zero) != list(one)
    said = what_changed(*zero.values(), *one.values())
    assert "MulBackward0 of MulBackward0 with a factor (other) that was 0" in said


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_a_recurrent_model_over_however_many_steps(kind: type[nn.Module], frozen_head: bool) -> None:
    body, head, embed = (
        kind(HIDDEN, HIDDEN, batch_first=True, num_layers=2),
        nn.Linear(HIDDEN, 5),
        nn.Embedding(9, HIDDEN),
    )
    head.requires_grad_(not frozen_head)

    def loss(width: int, penalty: float = 0.0) -> Tensor:
        ids = torch.randint(0, 9, (3, width))
        hidden, _ = body(embed(ids))
        value = F.cross_entropy(head(hidden).flatten(0, 1), torch.randint(0, 5, (3 * width,)))
        return value + penalty * hidden.abs().mean() if penalty else value

    assert len({fingerprint(loss(width)).key for width in (20, 33, 200)}) == 1
    assert len({fingerprint(loss(width, 0.1)).key for width in (20, 33, 200)}) == 1
    assert "AbsBackward0" in what_changed(fingerprint(loss(200)), fingerprint(loss(20, 0.1)))


# The walk


def test_the_model_is_not_looked_into() -> None:
    net = Net()
    found = {fact.operation for fact in fingerprint(ce(net, 4, 6)).resolve()}
    assert "TanhBackward0" not in found
    hidden, logits, labels = net()
    loss = F.cross_entropy(logits, labels) + hidden.pow(2).mean()
    assert "TanhBackward0" in {fact.operation for fact in fingerprint(loss).resolve()}  # below is a trained product
    known = {fact.operation for fact in fingerprint(loss, stop={hidden.grad_fn, logits.grad_fn}).resolve()}
    assert known == {"AddBackward0", "MeanBackward0", "PowBackward0", "NllLossBackward0", "LogSoftmaxBackward0"}


def test_no_more_operations_than_asked_for() -> None:
    value = torch.ones(3, requires_grad=True)
    loss = value.sum()
    for _ in range(2000):
        loss = (loss * 0.5).exp().log()
    loss = loss + 0.0 * loss
    assert len(fingerprint(loss, most=3).resolve()) < len(fingerprint(loss).resolve())
    assert fingerprint(loss, most=0).resolve() == frozenset()


def test_a_loss_without_a_graph_and_one_whose_graph_is_gone() -> None:
    net = Net()
    assert fingerprint(torch.tensor(1.0)).resolve() == frozenset()
    loss = flooding(0.1)(net, 4, 6)
    whole = fingerprint(loss)
    loss.backward()
    assert {fact.operation for fact in fingerprint(loss).resolve()} == {fact.operation for fact in whole.resolve()}


class Fused(torch.autograd.Function):
    """As fused losses do: hidden states and the head's weight in, one number out."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.alpha = 0.0
        return (hidden @ weight.T).logsumexp(-1).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError


def test_a_fused_loss_is_its_name() -> None:
    net = Net()
    found = fingerprint(Fused.apply(net()[0], net.head.weight)).resolve()
    assert found == {Fact("FusedBackward")}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_not_run_again(reentrant: bool) -> None:
    net, calls = Net(), []

    def part(hidden: Tensor) -> Tensor:
        calls.append(1)
        return (net.head(hidden).log_softmax(-1) * torch.rand(())).pow(2).mean()

    loss = checkpoint(part, net()[0], use_reentrant=reentrant)
    found = fingerprint(0.5 * loss)
    assert len(calls) == 1
    assert any(
        fact.operation == ("CheckpointFunctionBackward" if reentrant else "PowBackward0") for fact in found.resolve()
    )
    loss.backward()
    assert len(calls) == 2


def test_hooks_on_saved_tensors_are_not_run() -> None:
    unpacked: list[Any] = []

    def unpack(value: Tensor) -> Tensor:
        unpacked.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        loss = (ce(Net(), 4, 6) - 0.1).abs()
    fingerprint(loss).resolve()
    assert not unpacked
    loss.backward()
    assert unpacked


class Marker:
    """Lives as long as the node of a graph that it is put into."""


def test_nothing_of_the_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[fingerprint.__module__], "_is_near", lambda value: False)
    net = Net()
    losses = rows_of(net, 4, 6)
    losses.grad_fn.metadata["marker"] = marker = Marker()
    loss = (losses.mean() - 50.0).abs() * 0.5
    alive, value = weakref.ref(marker), weakref.ref(losses)
    found = fingerprint(loss)
    gc.disable()
    try:
        del losses, marker
        assert alive() is not None  # the control
        del loss
        assert alive() is None
        assert value() is None
    finally:
        gc.enable()
    assert Fact("AbsBackward0", "self", "negative") in found.resolve()


def test_numbers_on_an_accelerator_are_read_once_and_late(monkeypatch: pytest.MonkeyPatch) -> None:
    coefficient, net = torch.zeros(()), Net()
    loss = (ce(net, 4, 6) - 50.0).abs() + coefficient * pairs(net, 4, 6) + torch.tensor(True) * pairs(net, 4, 6)
    at_once = fingerprint(loss)
    monkeypatch.setattr(sys.modules[fingerprint.__module__], "_is_near", lambda value: False)
    late = fingerprint(loss)
    coefficient.fill_(1.0)  # another step's
    assert at_once.scalars == ()
    assert late.static < at_once.static
    assert {each.dtype for each in late.scalars} == {torch.float32, torch.bool}
    assert all(each.ndim == 1 and not each.requires_grad for each in late.scalars)
    assert late.key == at_once.key
    copies = []
    again, tolist = fingerprint(loss), Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: copies.append(1) or tolist(self))
    assert again.resolve() is again.resolve()
    assert again.key != late.key  # the factor is not 0 now
    assert copies == [1]


def test_the_key_is_the_same_in_every_process() -> None:
    loss = torch.ones(2, requires_grad=True).sum() * 0.0
    assert fingerprint(loss).key == "9bc556a28540"
    assert sorted(map(str, fingerprint(loss).resolve())) == [
        "MulBackward0",
        "MulBackward0 of SumBackward0 with a factor (other) that is 0",
        "SumBackward0",
    ]
