"""FabricPadMin on one device: equality to the un-split batch, its iterator, and what it refuses."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from lightning.fabric import Fabric, strategies
from torch import Tensor, nn

from lightning_padmin import PadMinConfig, PadMinError
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.errors import BatchError, ConfigError
from lightning_padmin.integrations.fabric import FabricPadMin, micro_batched_backward

CONFIG = PadMinConfig(token_budget=support.BUDGET, launch_cost=4)
HOWS = ["token-mean", "row-mean", "sum"]


def fresh(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return support.TinyLM().to(dtype)


def loss_of(model: nn.Module, batch: dict[str, Tensor], how: str = "token-mean") -> Tensor:
    return support.reduce_loss(support.token_losses(model(batch["input_ids"]), batch["labels"]), batch["labels"], how)


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return support.make_batch(support.LENGTHS)


def gradient_of_whole(batch: dict[str, Tensor], how: str = "token-mean") -> tuple[Tensor, float]:
    model = fresh()
    loss = loss_of(model, batch, how)
    loss.backward()
    return support.flat_gradient(model), loss.item()


@pytest.mark.parametrize("how", HOWS)
def test_loop_gives_the_gradient_and_loss_of_the_whole_batch(
    fabric: Fabric, batch: dict[str, Tensor], how: Any
) -> None:
    model = fabric.setup_module(fresh())
    pad = FabricPadMin(fabric, PadMinConfig(token_budget=support.BUDGET, launch_cost=4, loss_reduction=how))
    total, shapes = 0.0, []
    for micro, weight in pad.micro_batches(batch, model):
        loss = loss_of(model, micro, how) * weight
        fabric.backward(loss)
        total += loss.item()
        shapes.append(tuple(micro["input_ids"].shape))
    gradient, whole = gradient_of_whole(batch, how)
    assert shapes == [(1, 24), (1, 20), (2, 12), (4, 6), (2, 3)]
    assert support.relative(support.flat_gradient(model), gradient) <= 1e-12
    assert total == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("how", HOWS)
def test_backward_gives_the_gradient_and_loss_of_the_whole_batch(
    fabric: Fabric, batch: dict[str, Tensor], how: Any
) -> None:
    model = fabric.setup_module(fresh())
    config = PadMinConfig(token_budget=support.BUDGET, launch_cost=4, loss_reduction=how)
    loss = micro_batched_backward(fabric, model, batch, lambda micro: loss_of(model, micro, how), config)
    gradient, whole = gradient_of_whole(batch, how)
    assert support.relative(support.flat_gradient(model), gradient) <= 1e-12
    assert loss.item() == pytest.approx(whole, rel=1e-12)
    assert loss.shape == ()
    assert not loss.requires_grad


@pytest.mark.usefixtures("equal_weights")
@pytest.mark.parametrize("how", HOWS)
def test_negative_control_equal_weights(fabric: Fabric, batch: dict[str, Tensor], how: Any) -> None:
    model = fabric.setup_module(fresh())
    config = PadMinConfig(token_budget=support.BUDGET, launch_cost=4, loss_reduction=how)
    micro_batched_backward(fabric, model, batch, lambda micro: loss_of(model, micro, how), config)
    assert support.relative(support.flat_gradient(model), gradient_of_whole(batch, how)[0]) > 0.1


def train(fabric: Fabric, pad: FabricPadMin | None, clip: dict[str, float]) -> tuple[list[Tensor], Tensor]:
    """Three optimizer steps of two batches each; gradients before each step, and parameters at the end."""
    model = fresh()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    gradients = []
    for index, batch in enumerate(support.ragged_batches(6)):
        more = index % 2 == 0
        pairs: Any = [(batch, 1.0)] if pad is None else pad.micro_batches(batch, model, is_accumulating=more)
        for micro, weight in pairs:
            fabric.backward(loss_of(model, micro) * weight / 2)
        if not more:
            if clip:
                fabric.clip_gradients(model, optimizer, **clip)
            gradients.append(support.flat_gradient(model))
            optimizer.step()
            optimizer.zero_grad()
    return gradients, support.flat_parameters(model)


@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.05}, {"clip_val": 0.002}], ids=str)
def test_accumulation_and_clipping(fabric: Fabric, clip: dict[str, float]) -> None:
    pad = FabricPadMin(fabric, CONFIG)
    plain, split = train(fabric, None, clip), train(fabric, pad, clip)
    assert len(plain[0]) == len(split[0]) == 3
    assert max(support.relative(a, b) for a, b in zip(split[0], plain[0], strict=True)) <= 1e-12
    assert support.relative(split[1], plain[1]) <= 1e-11
    assert pad.stats.micro_batches == 30


def test_bf16_mixed_is_as_far_from_float64_as_the_whole_batch(batch: dict[str, Tensor]) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    truth, distances = gradient_of_whole(batch)[0], []
    for config in (PadMinConfig(enabled=False), CONFIG):
        model = fabric.setup_module(fresh(torch.float32))
        FabricPadMin(fabric, config).backward(batch, model, lambda micro, model=model: loss_of(model, micro))
        distances.append(support.relative(support.flat_gradient(model), truth))
    whole, split = distances
    assert 1e-4 < whole < 0.05
    assert split < 2 * whole


def test_compiled_model(fabric: Fabric, batch: dict[str, Tensor]) -> None:
    model = fabric.setup_module(torch.compile(fresh(), backend="eager"))
    FabricPadMin(fabric, CONFIG).backward(batch, model, lambda micro: loss_of(model, micro))
    assert support.relative(support.flat_gradient(model), gradient_of_whole(batch)[0]) <= 1e-12


def test_callers_batch_is_not_changed(fabric: Fabric, batch: dict[str, Tensor]) -> None:
    before = copy.deepcopy(batch)
    model = fabric.setup_module(fresh())
    for micro, _ in FabricPadMin(fabric, CONFIG).micro_batches(batch, model):
        for tensor in micro.values():
            tensor.zero_()
    assert batch.keys() == before.keys()
    for name, tensor in batch.items():
        assert torch.equal(tensor, before[name])


def test_disabled_yields_the_batch_itself_once(fabric: Fabric) -> None:
    model, odd = fabric.setup_module(nn.BatchNorm1d(3)), object()
    pad = FabricPadMin(fabric, PadMinConfig(enabled=False))
    (step,) = pad.micro_batches(odd, model)
    assert step.batch is odd
    assert step.weight == 1.0
    assert step.is_last
    pad.micro_batches(odd, model)  # not gone through, and nobody minds
    pad.micro_batches(odd, model)
    assert pad.metrics() == {}
    assert pad.stats.batches == 0


def test_planning_errors_come_before_the_loop(fabric: Fabric, batch: dict[str, Tensor]) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, CONFIG)
    with pytest.raises(BatchError, match="'attention_mask' is all zero"):
        pad.micro_batches(batch | {"attention_mask": torch.zeros_like(batch["attention_mask"])}, model)
    with pytest.raises(PadMinError, match="extra"):
        pad.micro_batches(batch | {"extra": torch.zeros(10, 24)}, model)
    assert len(list(pad.micro_batches(batch, model))) == 5  # nothing is left of the two


class Switch:
    """Stands in for `fabric.no_backward_sync`: tells whether gradients would be reduced."""

    def __init__(self) -> None:
        self.blocked = 0

    @contextmanager
    def __call__(self, module: Any, enabled: bool = True) -> Iterator[None]:
        self.blocked += enabled
        try:
            yield
        finally:
            self.blocked -= enabled


@pytest.fixture
def switch(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> Switch:
    switch = Switch()
    monkeypatch.setattr(fabric, "no_backward_sync", switch)
    return switch


@pytest.mark.parametrize(("more", "blocked"), [(False, [1, 1, 1, 1, 0]), (True, [1] * 5)])
def test_when_gradients_are_reduced(
    fabric: Fabric, switch: Switch, batch: dict[str, Tensor], more: bool, blocked: list[int]
) -> None:
    model = fabric.setup_module(fresh())
    steps = FabricPadMin(fabric, CONFIG).micro_batches(batch, model, is_accumulating=more)
    assert [switch.blocked for _ in steps] == blocked
    steps = FabricPadMin(fabric, CONFIG, defer_sync=False).micro_batches(batch, model, is_accumulating=more)
    assert [switch.blocked for _ in steps] == [0] * 5
    assert switch.blocked == 0


def test_disabled_reduces_as_told(fabric: Fabric, switch: Switch, batch: dict[str, Tensor]) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, PadMinConfig(enabled=False))
    for more in (True, False):
        assert [switch.blocked for _ in pad.micro_batches(batch, model, is_accumulating=more)] == [int(more)]


def test_a_loop_that_breaks_is_refused_once_and_leaves_nothing_blocked(
    fabric: Fabric, switch: Switch, batch: dict[str, Tensor]
) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, CONFIG)
    for micro in pad.micro_batches(batch, model):
        if micro.index == 1:
            assert switch.blocked == 1
            break
    assert switch.blocked == 0
    with pytest.raises(BatchError, match=r"left after 2 of 5 micro-batches.*discard"):
        pad.micro_batches(batch, model)
    assert len(list(pad.micro_batches(batch, model))) == 5
    assert pad.stats.batches == 1  # of the other nothing has been counted


def test_a_loop_that_raises(fabric: Fabric, switch: Switch, batch: dict[str, Tensor]) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, replace(CONFIG, check="off"))

    def fails(micro: Any) -> Tensor:
        raise KeyError("no loss")

    with pytest.raises(KeyError, match="no loss"):
        pad.backward(batch, model, fails)
    assert switch.blocked == 0
    with pytest.raises(BatchError, match="left after 1 of 5 micro-batches"):
        pad.micro_batches(batch, model)


def test_an_iterator_that_is_kept_ends_with_the_next_call(
    fabric: Fabric, switch: Switch, batch: dict[str, Tensor]
) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, CONFIG)
    kept = pad.micro_batches(batch, model)
    next(kept)
    assert switch.blocked == 1
    with pytest.raises(BatchError, match="left after 1 of 5"):
        pad.micro_batches(batch, model)
    assert switch.blocked == 0
    assert list(kept) == []
    never_started = pad.micro_batches(batch, model)
    with pytest.raises(BatchError, match="left after 0 of 5"):
        pad.micro_batches(batch, model)
    assert list(never_started) == []


def test_discard_gives_a_loop_up(fabric: Fabric, switch: Switch, batch: dict[str, Tensor]) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, CONFIG)
    pad.discard()  # nothing to give up
    kept = pad.micro_batches(batch, model)
    next(kept)
    pad.discard()
    assert switch.blocked == 0
    assert len(list(pad.micro_batches(batch, model))) == 5
    assert pad.metrics()["padmin/micro_batches"] == 5


def test_batch_without_loss_tokens_moves_nothing(fabric: Fabric, batch: dict[str, Tensor]) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, CONFIG)
    empty = batch | {"labels": torch.full_like(batch["labels"], -100)}
    with pytest.warns(UserWarning, match="no loss tokens at all"):
        loss = pad.backward(empty, model, lambda micro: loss_of(model, micro))
    assert loss.item() == 0
    assert (support.flat_gradient(model) == 0).all()
    assert len(support.flat_gradient(model)) == sum(p.numel() for p in model.parameters())


class Outputs:
    """What no walk over containers understands."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize("wrap", [lambda logits: {"logits": logits}, lambda logits: (logits, None), Outputs])
def test_batch_without_loss_tokens_and_other_outputs(fabric: Fabric, batch: dict[str, Tensor], wrap: Any) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fresh()

        def forward(self, input_ids: Tensor) -> Any:
            return wrap(self.inner(input_ids))

    def loss_fn(micro: Any) -> Tensor:
        outputs = model(micro["input_ids"])
        logits = outputs.logits if isinstance(outputs, Outputs) else dict(enumerate(outputs)).get(0)
        logits = outputs["logits"] if isinstance(outputs, dict) else logits
        valid = micro["labels"][:, 1:] != -100
        losses = support.token_losses(logits, micro["labels"].clamp(min=0))
        return (losses * valid).sum() / valid.sum()  # whose derivative is 0/0 too

    model, pad = fabric.setup_module(Wrapped()), FabricPadMin(fabric, CONFIG)
    empty = batch | {"labels": torch.full_like(batch["labels"], -100)}
    with pytest.warns(UserWarning, match="no loss tokens at all"):
        pad.backward(empty, model, loss_fn)
    # An object of one's own hides the tensors that zeros could start from: as without this library, then.
    assert torch.isnan(support.flat_gradient(model)).any() == (wrap is Outputs)


@pytest.mark.parametrize("wrong", [None, 1.0, torch.ones(2), torch.ones(2, 3)], ids=repr)
def test_loss_function_must_return_one_number(fabric: Fabric, batch: dict[str, Tensor], wrong: Any) -> None:
    model = fabric.setup_module(fresh())
    with pytest.raises(ConfigError, match=r"loss_fn returned a .*expected the loss"):
        FabricPadMin(fabric, CONFIG).backward(batch, model, lambda micro: wrong)


def test_metrics_equal_a_hand_count_and_start_again(fabric: Fabric, batch: dict[str, Tensor]) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, CONFIG)
    for _ in range(2):
        pad.backward(batch, model, lambda micro: loss_of(model, micro))
    # 24 | 20 | 12 12 | 6 6 6 6 | 3 2: slots 24 + 20 + 24 + 24 + 6 = 98 of 10 x 24.
    assert support.without_audits(pad.metrics()) == pytest.approx(
        {
            "padmin/waste": 1 - 97 / 98,
            "padmin/waste_before": 1 - 97 / 240,
            "padmin/real_tokens": 2 * 97,
            "padmin/loss_tokens": 2 * 87,
            "padmin/slots": 2 * 98,
            "padmin/micro_batches": 10,
            "padmin/longest_row": 24,
            "padmin/dummies": 0,
            "padmin/over_budget_rows": 0,
            "padmin/idle": 0,
        }
    )
    assert pad.metrics() == {}
    assert pad.stats.batches == 2


def test_metrics_reach_fabrics_loggers_under_the_prefix(batch: dict[str, Tensor]) -> None:
    memory = support.Memory()
    fabric = Fabric(accelerator="cpu", devices=1, loggers=memory)
    model = fabric.setup_module(fresh())
    pad = FabricPadMin(fabric, PadMinConfig(token_budget=support.BUDGET, launch_cost=4, log_prefix="pad."))
    pad.backward(batch, model, lambda micro: loss_of(model, micro))
    fabric.log_dict(pad.metrics(), 3)
    ((step, row),) = memory.rows
    assert step == 3
    assert row["pad.slots"] == 98


def test_counters_are_part_of_a_checkpoint(fabric: Fabric, batch: dict[str, Tensor], tmp_path: Path) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, CONFIG)
    pad.backward(batch, model, lambda micro: loss_of(model, micro))
    fabric.save(tmp_path / "state.ckpt", {"model": model, "pad": pad})
    other = FabricPadMin(fabric, CONFIG)
    fabric.load(tmp_path / "state.ckpt", {"model": model, "pad": other})
    assert other.stats == pad.stats
    assert other.stats.slots == 98


def test_batch_norm_is_refused_while_it_trains(fabric: Fabric, batch: dict[str, Tensor]) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = fresh()
            self.norm = nn.BatchNorm1d(support.VOCABULARY).double()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.norm(self.lm(input_ids).transpose(1, 2)).transpose(1, 2)

    model, pad = fabric.setup_module(Normed()), FabricPadMin(fabric, CONFIG)
    with pytest.raises(ArchitectureError, match="norm is a BatchNorm1d in training mode"):
        pad.micro_batches(batch, model)
    model.eval()
    pad.backward(batch, model, lambda micro: loss_of(model, micro))
    split = support.flat_gradient(model)
    model.zero_grad()
    loss_of(model, batch).backward()
    assert support.relative(split, support.flat_gradient(model)) <= 1e-12
    model.train()  # checked before each batch
    with pytest.raises(ArchitectureError, match="BatchNorm1d"):
        pad.micro_batches(batch, model)


@pytest.mark.parametrize(
    "child",
    [
        nn.BatchNorm1d(4, track_running_stats=False).eval(),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    ],
    ids=lambda child: type(child).__name__,
)
def test_other_state_over_the_batch_is_refused(fabric: Fabric, batch: dict[str, Tensor], child: nn.Module) -> None:
    model = fabric.setup_module(nn.ModuleDict({"lm": fresh(), "child": child}))
    with pytest.raises(ArchitectureError, match=r"child.*is a .*split batch trains something else"):
        FabricPadMin(fabric, CONFIG).micro_batches(batch, model)


def with_config(**values: Any) -> nn.Module:
    model = fresh()
    model.config = SimpleNamespace(model_type="llama", **values)
    return model


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rope_scaling": {"rope_type": "dynamic"}}, "depends on the longest row"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.01}, "balance loss"),
    ],
)
def test_architectures_that_depend_on_the_batch_are_refused(
    fabric: Fabric, batch: dict[str, Tensor], values: dict[str, Any], reason: str
) -> None:
    model, pad = fabric.setup_module(with_config(**values)), FabricPadMin(fabric, CONFIG)
    for _ in range(2):
        with pytest.raises(ArchitectureError, match=reason):
            pad.micro_batches(batch, model)


def test_corrections_are_told_once(fabric: Fabric, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys.modules[FabricPadMin.__module__], "rank_zero_info", said.append)
    inner = with_config()
    inner.config.model_type = "gpt2"
    model, pad = fabric.setup_module(inner), FabricPadMin(fabric, CONFIG)
    for _ in range(2):
        list(pad.micro_batches(batch, model))
    assert len(said) == 1
    assert "gpt2" in said[0]


def test_encoder_decoder_labels_run_along_the_decoder(fabric: Fabric) -> None:
    source, target = support.make_batch([9, 9, 4, 2]), support.make_batch([3, 5, 9, 2])
    batch = {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        "labels": target["labels"],
    }
    model = fabric.setup_module(with_config(is_encoder_decoder=True))
    pad = FabricPadMin(fabric, PadMinConfig(token_budget=14, launch_cost=0))
    shapes = [
        (tuple(micro["input_ids"].shape), tuple(micro["labels"].shape)) for micro, _ in pad.micro_batches(batch, model)
    ]
    assert sorted(shapes) == [((1, 2), (1, 2)), ((1, 4), (1, 9)), ((1, 9), (1, 3)), ((1, 9), (1, 5))]


def test_models_are_not_kept_alive(fabric: Fabric, batch: dict[str, Tensor]) -> None:
    model, pad = fabric.setup_module(fresh()), FabricPadMin(fabric, CONFIG)
    list(pad.micro_batches(batch, model))
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_model_must_come_from_fabric(fabric: Fabric, batch: dict[str, Tensor]) -> None:
    bare = fresh()
    with pytest.raises(ConfigError, match=r"model=TinyLM: expected .*setup_module"):
        FabricPadMin(fabric, CONFIG).micro_batches(batch, bare)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(bare.parameters()))
    with pytest.raises(ConfigError, match=r"model=.*SGD"):
        FabricPadMin(fabric, CONFIG).micro_batches(batch, optimizer)


def test_arguments_are_checked(fabric: Fabric, batch: dict[str, Tensor]) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"fabric=.*Trainer.*expected a lightning.fabric.Fabric.*PadMinCallback"):
        FabricPadMin(trainer)
    with pytest.raises(ConfigError, match=r"config={'token_budget': 8}: expected a PadMinConfig"):
        FabricPadMin(fabric, {"token_budget": 8})
    with pytest.raises(ConfigError, match="defer_sync='last': expected True, False or None"):
        FabricPadMin(fabric, defer_sync="last")
    with pytest.raises(ConfigError, match="is_accumulating=1: expected True or False"):
        FabricPadMin(fabric).micro_batches(batch, fabric.setup_module(fresh()), is_accumulating=1)


def on(monkeypatch: pytest.MonkeyPatch, strategy: Any) -> Fabric:
    """A Fabric that says it has this strategy, which may need what is not installed here."""
    fabric = Fabric(accelerator="cpu", devices=1)
    monkeypatch.setattr(fabric, "_strategy", strategy)
    return fabric


class OwnStrategy(strategies.Strategy):
    pass


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (strategies.DeepSpeedStrategy, "gradient_accumulation_steps.*DDPStrategy"),
        (strategies.XLAStrategy, "does not know when it reduces gradients.*DDPStrategy"),
        (strategies.XLAFSDPStrategy, "does not know when it reduces gradients"),
        (strategies.SingleDeviceXLAStrategy, "does not know when it reduces gradients"),
        (strategies.DataParallelStrategy, "does not know when it reduces gradients"),
        (OwnStrategy, "does not know when it reduces gradients"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_strategies_that_are_not_supported(monkeypatch: pytest.MonkeyPatch, kind: type, reason: str) -> None:
    concrete = type(kind.__name__, (kind,), {})
    concrete.__abstractmethods__ = frozenset()
    fabric = on(monkeypatch, concrete.__new__(concrete))
    with pytest.raises(ConfigError, match=f"strategy={kind.__name__}: .*{reason}.*enabled=False"):
        FabricPadMin(fabric)
    FabricPadMin(fabric, PadMinConfig(enabled=False))


def test_model_parallel_refuses_to_defer(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = on(monkeypatch, strategies.ModelParallelStrategy(lambda model, mesh: model))
    with pytest.raises(ConfigError, match=r"defer_sync=True with ModelParallelStrategy.*zero_grad does not reach"):
        FabricPadMin(fabric, defer_sync=True)
    FabricPadMin(fabric)
    FabricPadMin(fabric, defer_sync=False)
