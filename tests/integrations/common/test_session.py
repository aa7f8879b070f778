"""What adapters do alike: one session, one training for each model, one way for every batch."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_padmin import MicroBatcher, PadMinConfig
from lightning_padmin.errors import ArchitectureError, BatchError, ConfigError
from lightning_padmin.integrations.common import FirstBatches, Outcome, Session, Topology, Training
from lightning_padmin.integrations.common import first_batch as first_batch_module
from lightning_padmin.integrations.common import session as session_module
from lightning_padmin.integrations.common import topology as topology_module

CONFIG = PadMinConfig(token_budget=8)


def batch_of(*lengths: int) -> dict[str, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.arange(1, mask.numel() + 1).view(mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def training_of(session: Session, model: nn.Module | None = None, **options: Any) -> Training:
    return Training(session, model or KEPT, Topology(), fix_of_hooks="Do not", **options)


KEPT = nn.Linear(2, 2)  # a training keeps no model alive


class Refused(Exception):
    pass


def around(micro: Any) -> Any:
    return nullcontext()


# Topology.


def test_a_process_alone_has_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a process group of others' is there."""
    asked: list[Any] = []
    monkeypatch.setattr(topology_module, "exchange_all", lambda values, group=None: asked.append(group))
    assert Topology().exchange([3]).tolist() == [[3]]
    assert Topology(group="half").exchange_of_counts([3]).tolist() == [[3]]
    assert not asked
    Topology(world=2).exchange([3])
    Topology(world=2, group="half").exchange([3])
    Topology(world=2, group="half").exchange_of_counts([3])
    assert asked == [None, None, "half"]


@pytest.mark.parametrize(
    ("kind", "static", "grows", "tells"),
    [
        ("ddp", False, True, True),
        ("ddp", False, False, False),
        ("ddp", True, True, False),
        ("single", False, True, False),
        ("sharded", False, True, False),
        ("engine", False, True, False),
    ],
)
def test_ranks_tell_each_other_of_errors_where_only_the_last_pass_is_collective(
    kind: Any, static: bool, grows: bool, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology_module, "board_of_all", lambda: "of all")
    assert (Topology(0, 2, kind, static).board(grows) == "of all") is tells


# Options, words, other ranks.


class Announced:
    """In place of an announcement."""

    def __init__(self, said: list[Any]) -> None:
        self.said = said

    def agree(self, patience: float = 15) -> list[dict[str, str]]:
        self.said.append(patience)
        return [{"a": "1"}]


def test_loops_agree_once_with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def announce(name: str, config: PadMinConfig, **facts: str) -> Announced:
        said.append((name, facts))
        return Announced(said)

    monkeypatch.setattr(session_module, "announce", announce)
    session = Session("PadMin", CONFIG)
    assert session.agree() == []
    session.announce(a="1")
    session.agree_in_loop()
    session.agree_in_loop()
    assert said == [("PadMin", {"a": "1"}), 60]
    session.announce()
    assert session.agree() == [{"a": "1"}]
    assert session.agree() == []
    assert said[2:] == [("PadMin", {}), 15]


def test_packs_need_that_nothing_speaks_against_them() -> None:
    told: list[str] = []

    def policy(layout: Any, why: str | None) -> Any:
        config = PadMinConfig(layout=layout)
        session = Session("PadMin", config, tell=told.append, refusal=Refused)
        return session.pack_policy(lambda: why, lambda: {"model": KEPT})

    def asked() -> str:
        raise AssertionError

    assert Session("PadMin", CONFIG).pack_policy(asked, asked) is None  # type: ignore[arg-type]
    with pytest.raises(Refused, match=r"^layout='pack': it rains. Use layout='pad'$"):
        policy("pack", "it rains")
    assert policy("auto", "it rains") is None
    assert told == ["PadMin: layout='pad': it rains"]
    assert policy("pack", None).is_demanded
    with pytest.raises(ConfigError, match=r"a loop over PadMin\.micro_batches"):
        Session("PadMin", PadMinConfig(layout="pack")).refuse_packs("PadMin.micro_batches")


# Loops and counts.


def test_a_loop_counts_at_its_end() -> None:
    session = Session("PadMin", CONFIG)
    training = training_of(session)
    planned = training.prepare(batch_of(4, 4, 2))
    for _ in session.loop(planned, around):
        assert session.stats.batches == 0
    assert session.stats.batches == 1
    next(iter(session.loop(planned, around)))
    with pytest.raises(BatchError, match="was left after 1 of 2 micro-batches"):
        session.loops.refuse_unfinished()
    assert session.stats.batches == 1
    next(iter(session.loop(planned, around)))
    session.discard()
    session.loops.refuse_unfinished()
    assert session.metrics(Topology())["padmin/micro_batches"] == 2
    assert session.metrics(Topology()) == {}


def test_switched_off_a_batch_comes_as_it_is() -> None:
    session, batch = Session("PadMin", PadMinConfig(enabled=False)), batch_of(4, 2)
    ((micro, weight),) = session.loop_as_it_came(batch)
    assert micro is batch
    assert weight == 1.0
    assert session.loops.never_started
    assert session.stats.batches == 0
    assert session.metrics(Topology(world=2)) == {}  # no collective


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_counts_by_itself(duplicate: Callable[[Session], Session]) -> None:
    session = Session("PadMin", CONFIG)
    training = session.training(KEPT, lambda: training_of(session))
    assert session.training(KEPT, lambda: pytest.fail("made twice")) is training
    planned = training.prepare(batch_of(4, 4, 2))
    session.count(planned.stats)
    next(iter(session.loop(planned, around)))
    other = duplicate(session)
    other.count(planned.stats)
    assert (session.stats.batches, other.stats.batches) == (1, 2)
    other.loops.refuse_unfinished()
    assert other.training(KEPT, lambda: training_of(other)) is not training


# One model.


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.config: Any = type("Config", (), {"model_type": "gpt2", "is_encoder_decoder": False})()


def test_a_model_is_heeded_until_it_passes() -> None:
    told: list[str] = []
    session, model = Session("PadMin", CONFIG, tell=told.append), Batched()
    training = training_of(session, model)
    for _ in range(2):
        with pytest.raises(ArchitectureError, match="norm"):
            training.prepare(batch_of(4, 2))
    assert not told
    model.eval()
    training.prepare(batch_of(4, 2))
    training.prepare(batch_of(4, 2))
    assert len(told) == 1
    assert told[0].startswith("PadMin: Batched.config: gpt2: ")
    model.train()
    with pytest.raises(ArchitectureError, match="norm is a BatchNorm1d in training mode"):
        training.prepare(batch_of(4, 2))
    tolerant = training_of(session, model, tolerate={"batch-norm"})
    tolerant.heed()  # it may still be frozen


def test_no_model_is_kept_alive() -> None:
    session = Session("PadMin", CONFIG)

    def there() -> weakref.ref[nn.Module]:
        model = nn.Linear(2, 2)
        session.training(model, lambda: training_of(session, model)).prepare(batch_of(4, 2))
        return weakref.ref(model)

    found = there()
    gc.collect()
    assert found() is None


def test_an_adapter_decides_what_is_checked_and_in_which_order() -> None:
    seen: list[Training] = []
    model = Batched()  # a training keeps none alive
    training = training_of(Session("PadMin", CONFIG), model, check=seen.append)
    training.prepare(batch_of(4, 2))
    assert seen == [training]


# The way of a batch.


class Gate:
    """In place of a PackGate."""

    def __init__(self) -> None:
        self.style, self.verdict, self.changes, self.is_demanded = None, True, 0, False

    def __call__(self, lengths: Any) -> bool:
        return True

    def give_up(self, why: str) -> None:
        self.verdict = False


WAYS: dict[str, Callable[[Training, Any], Any]] = {
    "prepare": lambda training, batch: training.prepare(batch),
    "prepare_made": lambda training, batch: training.prepare_made(lambda: batch),
    "prepare_window": lambda training, batch: training.prepare_window([batch]),
    "read": lambda training, batch: training.read(batch),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_batch_goes_one_way_with_one_exchange(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, said = list[MicroBatcher](), list[Any]()
    original = Training._pass

    def counted(self: Training, by: Any, *arguments: Any, **options: Any) -> Any:
        passed.append(by or self.main)
        return original(self, by, *arguments, **options)

    def exchange(values: Any, group: Any = None) -> Any:
        said.append(values)
        return np.asarray([list(values)] * 2, dtype=np.int64)

    monkeypatch.setattr(Training, "_pass", counted)
    monkeypatch.setattr(topology_module, "exchange_all", exchange)
    training = Training(Session("PadMin", CONFIG), KEPT, Topology(world=2), fix_of_hooks="Do not")
    WAYS[way](training, batch_of(4, 4, 2))
    assert passed == [training.main]
    assert len(said) == 1


def test_rows_are_packed_once_the_step_has_been_seen_to_take_packs() -> None:
    session = Session("PadMin", PadMinConfig(token_budget=8, layout="pack"))
    ready = training_of(session)
    ready.use_gate(Gate(), asks_of_step=False)
    assert ready.packs is None
    assert ready.prepare(batch_of(4, 4, 2)).plan.is_packed
    training = training_of(session)
    training.use_gate(Gate(), asks_of_step=True)
    assert training.packs is not None
    assert not training.prepare(batch_of(4, 4, 2)).plan.is_packed
    outcome = Outcome(0.0, True, True, False, "")
    looked: list[Any] = []

    def gradients(style: Any, read: Any) -> Outcome:
        looked.append(read)
        return outcome

    training.packs._of = lambda check: bool(check() is outcome)  # type: ignore[method-assign]
    training.gate.style = object()  # type: ignore[union-attr, assignment]
    training.prove(lambda by: by.read_made_together(lambda: batch_of(4, 4, 2)), gradients)
    training.prove(lambda by: pytest.fail("it is known"), gradients)
    assert len(looked) == 1
    assert training.may_pack
    training.main.has_changed = True
    training._pass(None, lambda batcher, may_pack: may_pack, plans=False)
    assert training.may_pack
    training._pass(None, lambda batcher, may_pack: may_pack)  # models have become others
    assert not training.may_pack


def test_what_differs_goes_before_what_is_known() -> None:
    training = training_of(Session("PadMin", CONFIG))
    seen: list[Any] = []
    batcher = training.batcher(PadMinConfig(token_budget=4), before_reading=lambda: seen.append("own"))
    assert len(training.prepare(batch_of(4, 4, 2), batcher)) == 3
    assert seen == ["own"]
    assert len(training.prepare(batch_of(4, 4, 2))) == 2
    assert len(training.prepare(batch_of(4, 4, 2), min_micro_batches=3)) == 3


# The first batches.


def outcome(told: bool, final: bool, first: bool = False) -> Outcome:
    return Outcome(0.0, told, final, False, "", first)


@pytest.mark.parametrize(
    ("heard", "due", "told", "first", "passed"),
    [
        ([None], True, False, True, False),
        ([outcome(True, True)], False, True, True, True),
        ([outcome(True, True, True)], False, True, False, True),
        ([outcome(True, False)], True, True, True, False),
        ([outcome(True, False), outcome(False, True)], False, True, False, False),
        ([outcome(False, True)], False, False, False, False),
        ([outcome(False, False)] * 3, True, False, True, False),
        ([outcome(False, False)] * 4, False, False, True, False),
        ([outcome(True, False)] + [outcome(False, False)] * 5, True, True, True, False),
        ([None] * 6, False, False, True, False),
    ],
)
def test_first_batches(
    heard: list[Outcome | None], due: bool, told: bool, first: bool, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_batch_module, "MOST_BATCHES", 7 if heard[0] else 6)
    batches = FirstBatches(True, most_without_gradient=4)
    for each in heard:
        assert batches.is_due
        batches.heard(each)
    assert (batches.is_due, batches.told, batches.first_is_open, batches.has_passed) == (due, told, first, passed)
    assert batches.count == len(heard)


def test_first_labels_have_a_count_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_batch_module, "MOST_BATCHES", 2)
    batches = FirstBatches(True)
    batches.heard(outcome(True, True))
    batches.heard_of_first_labels(outcome(True, True))
    assert batches.first_is_open
    batches.heard_of_first_labels(None)
    assert not batches.first_is_open
    off = FirstBatches(False)
    assert not off.is_due
    assert not off.first_is_open
