"""State that a training step advances once per call is named; what each call writes anew is not."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ranks
import support
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.batch.row_table import measure
from lightning_padmin.batch.schema import infer_schema
from lightning_padmin.errors import GradientCheckError
from lightning_padmin.verification import check_gradients
from lightning_padmin.verification.writes import advanced, as_integers, freeze, may_have_advanced, named, same, text_of


@dataclass
class Progress:
    """What users keep in objects of their own."""

    step: int = 0


class Model(nn.Module):
    """A small model with places that steps write into."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = support.TinyLM().double()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.count, self.beta, self.level = 0, 0.0, torch.zeros((), dtype=torch.float64)
        self.outs: list[Any] = []
        self.recent: deque[float] = deque(maxlen=50)
        self.seen: dict[str, Any] = {"losses": {"sum": 0.0}, "tokens": 0, "by": Counter()}
        self.progress, self.history = Progress(), np.zeros(4)
        self.register_buffer("queue", torch.zeros(16, dtype=torch.float64))
        self.register_buffer("frozen", torch.ones(600, 10, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.full((3,), 0.5, dtype=torch.float64))
        self.shadow = [p.detach().clone() for p in self.net.parameters()]
        self.bank: Any = None
        self.cache: dict[Any, Any] = {}
        self.last: Any = None
        self.started = self.took = 0.0
        self.flag = False
        self.metric = torchmetrics.MeanMetric()
        self.lock = threading.Lock()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On tensors this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Write = Callable[[Model, Tensor, dict[str, Tensor]], Any]


def set_(**values: Any) -> Write:
    def write(m: Model, loss: Tensor, batch: Any) -> None:
        for name, value in values.items():
            setattr(m, name, value(m, loss, batch))

    return write


def ema(m: Model, loss: Tensor, batch: Any) -> None:
    with torch.no_grad():
        for mine, theirs in zip(m.teacher.parameters(), m.net.parameters(), strict=True):
            mine.mul_(0.99).add_(theirs, alpha=0.01)


def ema_of_data(m: Model, loss: Tensor, batch: Any) -> None:
    for mine, theirs in zip(m.teacher.parameters(), m.net.parameters(), strict=True):
        mine.data = mine.data * 0.999 + theirs.data * 0.001


def shadow(m: Model, loss: Tensor, batch: Any) -> None:
    m.shadow = [0.9 * mine + 0.1 * theirs.detach() for mine, theirs in zip(m.shadow, m.net.parameters(), strict=True)]


def enqueue(m: Model, loss: Tensor, batch: Any) -> None:
    m.queue[m.count % 16] = loss.detach()
    m.count += 1


def roll(m: Model, loss: Tensor, batch: Any) -> None:
    m.queue = torch.cat([m.queue[1:], loss.detach()[None]])


def count_in_array(m: Model, loss: Tensor, batch: Any) -> None:
    m.history[0] += 1


def scratch(m: Model, loss: Tensor, batch: Any) -> None:
    m.queue[:3] = loss.detach()


def cached(m: Model, loss: Tensor, batch: Any) -> Tensor:
    return m.cache.setdefault(batch["input_ids"].shape[1], torch.ones(batch["input_ids"].shape[1]))


def timed(m: Model, loss: Tensor, batch: Any) -> None:
    m.started = time.perf_counter()
    sum(range(1000))
    m.took = time.perf_counter() - m.started


def of_metric(m: Model, loss: Tensor, batch: Any) -> None:
    m.metric.update(loss.detach().float())
    m.last = float(m.metric.mean_value)


ADVANCES: dict[str, tuple[Write, str]] = {
    "counter": (set_(count=lambda m, *_: m.count + 1), "'count'"),
    "annealed": (set_(beta=lambda m, *_: min(1.0, m.beta + 0.05)), "'beta'"),
    "level as a tensor": (set_(level=lambda m, *_: (m.level + 0.05).clamp(max=1)), "'level'"),
    "average": (set_(beta=lambda m, loss, _: 0.9 * m.beta + 0.1 * loss.item()), "'beta'"),
    "teacher": (ema, "'teacher.*embedding.weight', .* more"),
    "teacher by data": (ema_of_data, "'teacher.*embedding.weight', .* more"),
    "averages in a list": (shadow, "'shadow'"),
    "buffer of steps": (lambda m, *_: m.steps.add_(1), "'steps'"),
    "list": (lambda m, loss, _: m.outs.append(loss.detach()), "'outs'"),
    "deque": (lambda m, loss, _: m.recent.append(loss.item()), "'recent'"),
    "new list": (set_(outs=lambda m, loss, _: [*m.outs, loss.item()]), "'outs'"),
    "nested": (lambda m, loss, _: m.seen["losses"].update(sum=m.seen["losses"]["sum"] + loss.item()), "'losses'.*sum"),
    "Counter": (lambda m, *_: m.seen["by"].update(["step"]), "'by'.*step"),
    "own object": (lambda m, *_: setattr(m.progress, "step", m.progress.step + 1), "'progress.step'"),
    "new object": (set_(progress=lambda m, *_: Progress(m.progress.step + 1)), "'progress'"),
    "array": (count_in_array, "'history'"),
    "queue": (enqueue, "'queue'.*|'count'"),
    "rolled queue": (roll, "'queue'"),
    "submodule": (lambda m, *_: setattr(m.net, "calls", getattr(m.net, "calls", 0) + 1), "'net.calls'"),
    "made in the first call": (set_(bank=lambda m, loss, _: 0.5 * (m.bank or 0.0) + loss.item()), "'bank'"),
    "switch": (set_(flag=lambda m, *_: not m.flag), "'flag'"),
    "frozen weights": (lambda m, *_: m.frozen.mul_(0.999), "'frozen'"),
}
WRITES_ANEW: dict[str, Write] = {
    "nothing": lambda *_: None,
    "last": set_(last=lambda m, loss, _: loss.item()),
    "last tensors": set_(last=lambda m, loss, batch: {"loss": [loss.detach()], "ids": batch["input_ids"]}),
    "in place": lambda m, loss, _: m.queue.fill_(loss.detach()),
    "in part": scratch,
    "cache": cached,
    "first call": set_(bank=lambda m, loss, _: torch.randn(3) if m.bank is None else m.bank),
    "normalised": lambda m, *_: m.scale.div_(m.scale.norm()),
    "clamped": lambda m, *_: m.scale.clamp_(0, 1),
    "largest": lambda m, loss, batch: m.level.copy_(m.level.maximum(loss.detach())),
    "random": set_(last=lambda *_: torch.rand(3)),
    "time": timed,
    "text": set_(last=lambda *_: f"{time.time_ns()}"),
    "of a metric": of_metric,
    "metric": lambda m, loss, _: m.metric.update(loss.detach().float()),
    # Sums over tokens and rows are what they are without a split.
    "tokens": lambda m, loss, batch: m.seen.update(tokens=m.seen["tokens"] + int((batch["labels"] != -100).sum())),
    "rows": set_(level=lambda m, loss, batch: m.level + len(batch["labels"])),
    "cleared": lambda m, loss, _: (m.outs.clear(), m.outs.append(loss.detach())),
}


def check(write: Write, **options: Any) -> Any:
    model = Model()
    before = copy.deepcopy({name: value for name, value in vars(model).items() if name not in ("lock", "_modules")})

    def step(batch: dict[str, Tensor]) -> Tensor:
        losses = support.token_losses(model.net(batch["input_ids"]), batch["labels"])
        loss = support.reduce_loss(losses, batch["labels"], "token-mean")
        write(model, loss, batch)
        return loss

    batch = support.make_batch([3, 9])
    config = PadMinConfig()
    schema = infer_schema(batch, config.fields, pad_token_id=0)
    table = measure(batch, schema, loss_reduction="token-mean", label_shift=None)
    try:
        return check_gradients(step, batch, schema, table, config, model, **options)
    finally:
        for name in ("count", "beta", "seen", "progress", "outs", "cache", "last", "took", "flag"):
            assert getattr(model, name) == before[name], name
        assert torch.equal(model.queue, before["_buffers"]["queue"])


def test_what_advances_with_each_call_is_named() -> None:
    for what, (write, path) in ADVANCES.items():
        with pytest.raises(GradientCheckError, match=f"writes into .*({path}).* whenever it is called") as caught:
            check(write)
        assert "once per batch, where the optimizer steps" in str(caught.value), what


def test_what_each_call_writes_anew_is_none_of_it() -> None:
    for what, write in WRITES_ANEW.items():
        outcome = check(write)
        assert outcome is not None, what
        assert outcome.told or what == "random", what


def test_a_step_without_writes_has_no_passes_more() -> None:
    def calls(write: Write) -> int:
        seen = []

        def counted(*arguments: Any) -> None:
            seen.append(None)
            write(*arguments)

        check(counted)
        return len(seen)

    plain = calls(WRITES_ANEW["nothing"])
    assert calls(WRITES_ANEW["last"]) == plain + 2
    assert calls(WRITES_ANEW["in place"]) == plain + 4


def test_nothing_is_asked_where_the_step_runs_once() -> None:
    outcome = check(ADVANCES["counter"][0], joint=nullcontext)
    assert outcome is not None
    assert outcome.told


def test_two_ranks_name_what_one_of_them_writes() -> None:
    together, said = ranks.Ranks(2), [""] * 2

    def run(rank: int) -> None:
        def write(m: Model, loss: Tensor, batch: Any) -> None:
            if rank == 1:
                m.count += 1

        try:
            check(write, exchange=together.exchange_of(rank))
        except GradientCheckError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said[0] == said[1]
    assert "first-batch check (rank 1): the training step writes into 'count' whenever" in said[0]
    assert together.calls[0] == together.calls[1]


def test_frozen_values() -> None:
    a = freeze([1, 2.0, {"x": torch.ones(5000)}, "text", None, np.float32(2)])
    assert same(a, freeze([1, 2.0 + 1e-7, {"x": torch.ones(5000) * (1 + 1e-7)}, "toxt", None, np.float32(2)]))
    assert not same(a, freeze([1, 2.0, {"x": torch.ones(5000) * 1.001}, "text", None, np.float32(2)]))
    assert not same(a, freeze([2, 2.0, {"x": torch.ones(5000)}, "text", None, np.float32(2)]))
    assert not same(freeze(torch.zeros(2)), freeze(torch.zeros(3)))
    assert same(freeze(torch.tensor([float("nan"), 1])), freeze(torch.tensor([float("nan"), 1])))
    assert not same(freeze(True), freeze(False))
    loop: list[Any] = []
    loop.append(loop)
    assert same(freeze(loop), freeze(loop))


def test_names_fit_into_an_exchange() -> None:
    assert named(["a", "b"]) == "'a', 'b'"
    assert named(["a", "x['b']"]) == "'a', \"x['b']\""
    many = named(["layer." * 20 + str(k) for k in range(9)])
    assert many.endswith("and 8 more")
    assert text_of(np.array(as_integers(many))) == many
    assert text_of(np.array(as_integers("'größe'"))) == "'größe'"


def test_what_calls_in_chunks_move_on() -> None:
    """Three calls in place of one; a number that is moved once is apart by rounding, however much that is."""
    whole = {"count": 5, "mean": 1.0, "rounded": 1.0, "anew": 3.0, "list": (list, {0: 1.0})}
    chunks = {"count": 7, "mean": 1.2, "rounded": 1.0001, "anew": 4.0, "list": (list, {0: 1.1})}
    twice = {"count": 6, "mean": 1.1, "rounded": 1.5, "anew": 3.0, "list": (list, {0: 1.0, 1: 1.0})}
    assert set(may_have_advanced(whole, chunks)) == set(whole)
    assert advanced(whole, chunks, twice) == ["count", "mean"]
    assert may_have_advanced(whole, whole | {"new": 1}) == []
