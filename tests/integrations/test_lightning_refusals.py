"""Set-ups and batches that are refused, with the message that names the fix, and what is left behind: nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import support
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceXLAStrategy, XLAStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core import rank_zero
from support import LENGTHS, Module, loader, make_batch, padmin, quiet_trainer, ragged_batches
from torch import Tensor, nn

from lightning_padmin import PadMinCallback, PadMinConfig, PadMinError
from lightning_padmin.errors import BatchError, ConfigError, SchemaError
from lightning_padmin.integrations.lightning import loop as lightning_loop


def assert_stock_again(trainer: pl.Trainer, stock: Any) -> None:
    """The Trainer has its own loop back, and trains as if the callback had never been there."""
    assert trainer.fit_loop.epoch_loop.automatic_optimization is stock
    assert type(stock) is _AutomaticOptimization
    assert "log" not in vars(trainer.fit_loop.epoch_loop._results)
    assert all(callback._restore is None for callback in trainer.callbacks if isinstance(callback, PadMinCallback))
    trainer.callbacks = []
    other, alone = Module(), Module()
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit_loop.max_epochs = 1
    trainer.should_stop = False
    trainer.fit(other, loader(ragged_batches(2)))
    assert other.shapes == [(10, 24)] * 2
    support.fit(alone, ragged_batches(2))
    assert torch.equal(other.gradients[0], alone.gradients[0])


def refused(
    kind: type[BaseException],
    match: str,
    module: pl.LightningModule,
    data: Any,
    *callbacks: pl.Callback,
) -> None:
    """The fit raises, and leaves the Trainer as it was."""
    trainer = quiet_trainer(*callbacks)
    stock = trainer.fit_loop.epoch_loop.automatic_optimization
    with pytest.raises(kind, match=match):
        trainer.fit(module, data)
    assert_stock_again(trainer, stock)


# Set-ups


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Fetches(Module):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


def test_joint_mode_with_manual_optimization() -> None:
    module = Module()
    module.automatic_optimization = False
    match = r"mode='joint' needs automatic optimization.*lightning_padmin\.PaddedForward"
    refused(MisconfigurationException, match, module, loader(ragged_batches(1)), padmin(mode="joint"))


def test_dataloader_iter() -> None:
    match = r"training_step\(dataloader_iter\) fetches its own batches, .*: take `batch`"
    refused(MisconfigurationException, match, Fetches(), loader(ragged_batches(1)), padmin())


@pytest.mark.parametrize("kind", [CombinedLoader, dict, list])
def test_several_loaders(kind: Any) -> None:
    loaders: Any = {"a": loader(ragged_batches(1)), "b": loader(ragged_batches(1))}
    if kind is list:
        loaders = list(loaders.values())
    name = "list" if kind is list else "dict"
    match = f"the training loader is a {name} of several loaders.*use one loader"
    data = CombinedLoader(loaders, "max_size") if kind is CombinedLoader else loaders
    refused(MisconfigurationException, match, Module(), data, padmin())


def test_a_combined_loader_of_one_is_one_loader() -> None:
    module = Module()
    quiet_trainer(padmin()).fit(module, CombinedLoader(loader(ragged_batches(1)), "max_size"))
    assert len(module.shapes) == 5


class Normed(Module):
    """A batch normalization over the hidden states."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.model.norm = norm.double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.model.rnn(self.model.embedding(batch["input_ids"]))[0]
        logits = self.model.head(self.model.norm(states.flatten(0, 1)).view_as(states))
        return support.reduce_loss(support.token_losses(logits, batch["labels"]), batch["labels"], self.how)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_normalization(norm: Any) -> None:
    match = rf"model\.norm is a {norm.__name__} in training mode: .*Put it in eval mode"
    refused(MisconfigurationException, match, Normed(norm(12)), loader(ragged_batches(1)), padmin())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'.*longest row of the call"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.01}, "balance loss of weight 0.01.*PaddedForward"),
    ],
)
def test_architectures_that_cannot_be_split(options: dict[str, Any], match: str) -> None:
    module = Module()
    module.model.config = SimpleNamespace(model_type="mixtral", **options)
    refused(MisconfigurationException, match, module, loader(ragged_batches(2)), padmin())


@pytest.mark.parametrize(
    "child", [nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)]
)
def test_state_that_counts_forward_passes(child: nn.Module) -> None:
    module = Module()
    module.child = child
    refused(MisconfigurationException, "how often it runs", module, loader(ragged_batches(2)), padmin())


def test_batch_normalization_without_running_statistics() -> None:
    module = Normed(nn.BatchNorm1d(12, track_running_stats=False).eval())
    match = r"model\.norm is a BatchNorm1d without running statistics"
    refused(MisconfigurationException, match, module, loader(ragged_batches(1)), padmin())


@pytest.mark.parametrize("hook", ["__init__", "on_train_start", "on_train_epoch_start"])
def test_frozen_batch_normalization_passes(hook: str) -> None:
    class Frozen(Normed):
        def __init__(self) -> None:
            super().__init__(nn.BatchNorm1d(12))
            if hook == "__init__":
                self.model.norm.eval()

    def freeze(self: Normed) -> None:
        self.model.norm.eval()

    if hook != "__init__":
        setattr(Frozen, hook, freeze)
    assert support.fit_pair(Frozen, ragged_batches(3)).gradient <= 1e-12


def test_batch_normalization_that_is_unfrozen_later() -> None:
    class Unfreezes(Normed):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.model.norm.train()

    module = Unfreezes(nn.BatchNorm1d(12).eval())
    match = r"model\.norm is a BatchNorm1d in training mode"
    refused(MisconfigurationException, match, module, loader(ragged_batches(2)), padmin())
    assert len(module.gradients) == 1


@pytest.mark.parametrize("kind", [XLAStrategy, SingleDeviceXLAStrategy])
def test_strategies(kind: type[Any]) -> None:
    trainer, callback = quiet_trainer(padmin()), padmin()
    stock = trainer.fit_loop.epoch_loop.automatic_optimization
    trainer._accelerator_connector.strategy = kind.__new__(kind)  # needs a GPU, or a package, to be made properly
    with pytest.raises(MisconfigurationException, match=f"does not support {kind.__name__}: use one device, 'ddp'"):
        callback.on_fit_start(trainer, Module())
    assert trainer.fit_loop.epoch_loop.automatic_optimization is stock


def test_ddp_is_supported() -> None:
    trainer, callback = quiet_trainer(strategy=DDPStrategy(process_group_backend="gloo")), padmin()
    callback.on_fit_start(trainer, Module())
    callback.teardown(trainer, Module(), "fit")


class SecondCallback(PadMinCallback):
    pass


def test_two_callbacks() -> None:
    two = SecondCallback(token_budget=8), padmin()
    match = "the Trainer has two PadMinCallbacks: a batch can be split once"
    refused(MisconfigurationException, match, Module(), loader(ragged_batches(1)), *two)
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `PadMinCallback`"):
        quiet_trainer(padmin(), padmin())


def test_a_second_callback_that_is_off_does_no_harm() -> None:
    module = Module()
    support.fit(module, ragged_batches(1), SecondCallback(enabled=False), padmin())
    assert len(module.shapes) == 5


def test_a_loop_that_was_replaced_already() -> None:
    class Other(_AutomaticOptimization):
        pass

    trainer = quiet_trainer(padmin())
    other = trainer.fit_loop.epoch_loop.automatic_optimization = Other(trainer)
    with pytest.raises(MisconfigurationException, match="optimization loop is a Other: something else has replaced it"):
        trainer.fit(Module(), loader(ragged_batches(1)))
    assert trainer.fit_loop.epoch_loop.automatic_optimization is other


def test_changed_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Any, optimizer: Any, batch_idx: int) -> None: ...

    monkeypatch.setattr(_AutomaticOptimization, "_make_closure", changed)
    trainer = quiet_trainer(padmin())
    stock = trainer.fit_loop.epoch_loop.automatic_optimization
    match = r"_make_closure takes \['self', 'optimizer', 'batch_idx'\], expected \['self', 'kwargs', .*checked with"
    with pytest.raises(MisconfigurationException, match=match):
        trainer.fit(Module(), loader(ragged_batches(1)))
    assert trainer.fit_loop.epoch_loop.automatic_optimization is stock


@pytest.mark.parametrize("hook", ["_make_zero_grad_fn", "_training_step"])
def test_missing_hooks(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    monkeypatch.delattr(_AutomaticOptimization, hook)
    with pytest.raises(MisconfigurationException, match=f"{hook} is gone"):
        padmin().on_fit_start(quiet_trainer(), Module())


@pytest.mark.parametrize(
    ("version", "old"), [("2.5.1", True), ("2.4.0.post1", True), ("2.5.2", False), ("2.7.0rc1", False)]
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, old: bool) -> None:
    monkeypatch.setattr(lightning, "__version__", version)
    if not old:
        return lightning_loop.check_signatures()
    match = rf"lightning {version}: PadMinCallback needs lightning>=2\.5\.2"
    return refused(MisconfigurationException, match, Module(), loader(ragged_batches(1)), padmin())


def test_the_other_package_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    # Importing it replaces the logger that both packages share; put back, so that no later test depends on the order.
    monkeypatch.setattr(rank_zero, "log", rank_zero.log)
    other = pytest.importorskip("pytorch_lightning")

    class Plain(other.LightningModule):
        pass

    trainer = other.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(MisconfigurationException, match=r"this Trainer comes from pytorch_lightning.*: import"):
        padmin().on_fit_start(trainer, Plain())


# Options

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"token_budget": 0}, r"token_budget=0: expected an integer of at least 1 or None"),
    ({"token_budget": -8}, r"token_budget=-8"),
    ({"token_budget": True}, r"token_budget=True"),
    ({"token_budget": 8.0}, r"token_budget=8\.0"),
    ({"tokn_budget": 1}, r"PadMinCallback has no option 'tokn_budget' \(got 1\); did you mean 'token_budget'\?"),
    ({"loss_reduction": "mean"}, r"loss_reduction='mean': expected one of 'token-mean', 'row-mean', 'sum'"),
    ({"normalize": "world"}, r"normalize='world'"),
    ({"enabled": "yes"}, r"enabled='yes': expected True or False"),
    ({"log_reduce": {"rows": "median"}}, r"log_reduce\['rows'\]='median'"),
    ({"log_reduce": []}, r"log_reduce=\[\]: expected a mapping"),
    ({"batch_schema": 0}, r"batch_schema=0: expected a mapping"),
    ({"static_keys": "images"}, r"static_keys='images': expected a list of keys"),
    ({"config": {"token_budget": 8}}, r"config=\{'token_budget': 8\}: expected a PadMinConfig"),
    ({"config": PadMinConfig(), "token_budget": 8}, r"got config and token_budget=8: put it into the config"),
]


@pytest.mark.parametrize(("options", "match"), BAD_OPTIONS)
def test_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        PadMinCallback(**options)


# Batches: what the core says of them, here by the entry that it names and the fix


def changed(**entries: Callable[[dict[str, Tensor]], Any]) -> dict[str, Any]:
    batch = make_batch(LENGTHS)
    return batch | {key: function(batch) for key, function in entries.items()}


def _labels_in_padding(batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"].clone()
    labels[9, 20] = 1
    return labels


class Custom:
    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch


BAD_BATCHES: dict[str, tuple[Any, type[PadMinError], str]] = {
    "an object": (Custom(make_batch([3])), SchemaError, r"batch of type Custom: expected a mapping"),
    "a tensor": (torch.ones(3, 4), SchemaError, r"batch of type Tensor"),
    "no mask": (
        {key: value for key, value in make_batch(LENGTHS).items() if key != "attention_mask"},
        SchemaError,
        r"mask_key='attention_mask'.*no such entry.*input_ids, labels",
    ),
    "mask all zero": (
        changed(attention_mask=lambda batch: torch.zeros_like(batch["labels"])),
        BatchError,
        r"'attention_mask' is all zero",
    ),
    "mask of another width": (
        changed(attention_mask=lambda batch: torch.ones(10, 25)),
        SchemaError,
        r"'input_ids' has shape \(10, 24\).*25",
    ),
    "mask with a dimension too many": (
        changed(attention_mask=lambda batch: torch.ones(10, 1, 24)),
        SchemaError,
        r"'attention_mask'.*\(10, 1, 24\).*\(rows, width\)",
    ),
    "labels in trimmed columns": (
        changed(labels=_labels_in_padding),
        BatchError,
        r"'labels'.*padding slots.*row 9.*set them to -100",
    ),
    "an unknown entry": (
        changed(extra=lambda batch: torch.ones(10, 24)),
        SchemaError,
        r"'extra' has shape \(10, 24\).*Declare batch_schema",
    ),
    "no labels": (
        {key: value for key, value in make_batch(LENGTHS).items() if key != "labels"},
        BatchError,
        r"the batch has no labels.*labels_key",
    ),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("position", [0, 1])
def test_batches(name: str, position: int) -> None:
    """Before its first forward pass; as the first batch, and after one that was fine."""
    batch, kind, match = BAD_BATCHES[name]
    module = Module()
    refused(kind, match, module, loader([*ragged_batches(position), batch]), padmin())
    assert len(module.shapes) == 5 * position


# Nothing stays half-installed


class Boom(Exception):
    pass


class Raises(pl.Callback):
    """In a hook, once the splitting loop is in."""

    def __init__(self, hook: str, error: BaseException) -> None:
        def raising(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            assert isinstance(loop, lightning_loop.AutoOptimization)
            raise error

        setattr(self, hook, raising)


HOOKS = ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"]
HOOKS += ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
HOOKS += ["on_train_batch_end", "on_train_epoch_end", "on_train_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_a_hook(hook: str) -> None:
    refused(Boom, "here", Module(), loader(ragged_batches(2)), padmin(), Raises(hook, Boom("here")))


class Stops(Module):
    """training_step raises in one micro-batch."""

    def __init__(self, callback: PadMinCallback, at: int, error: BaseException) -> None:
        super().__init__()
        self.callback, self.at, self.error = [callback], at, error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.callback[0].micro_index, self.callback[0].micro_count) == (self.at, 5):
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_an_exception_in_training_step(at: int) -> None:
    callback = padmin()
    module = Stops(callback, at, Boom("here"))
    refused(Boom, "here", module, loader(ragged_batches(2)), callback)
    assert len(module.shapes) == at
    assert module.gradients == []


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Lightning ignores further interrupts once it has seen one."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("where", ["training_step", "on_train_start"])
def test_an_interrupt(where: str) -> None:
    callback = padmin()
    extra: list[pl.Callback] = []
    module: Module = Stops(callback, 2, KeyboardInterrupt())
    if where != "training_step":
        module, extra = Module(), [Raises(where, KeyboardInterrupt())]
    refused(SystemExit, "1", module, loader(ragged_batches(2)), callback, *extra)


def test_after_a_failed_fit_the_callback_works_again() -> None:
    callback = padmin()
    data = loader(ragged_batches(1))
    trainer = quiet_trainer(callback)
    stock = trainer.fit_loop.epoch_loop.automatic_optimization
    with pytest.raises(Boom):
        trainer.fit(Stops(callback, 1, Boom()), data)
    module = Module()
    quiet_trainer(callback).fit(module, data)
    assert len(module.shapes) == 5
    assert_stock_again(trainer, stock)


def test_a_trainer_that_could_not_tell_us_of_its_end() -> None:
    """Another callback fails in on_exception, before ours is told."""

    class FailsTwice(Raises):
        def on_exception(self, *arguments: Any) -> None:
            raise RuntimeError("again")

    callback = padmin()
    broken = quiet_trainer(FailsTwice("on_train_start", Boom()), callback)
    stock = broken.fit_loop.epoch_loop.automatic_optimization
    with pytest.raises(RuntimeError, match="again"):
        broken.fit(Module(), loader(ragged_batches(1)))
    module = Module()
    quiet_trainer(callback).fit(module, loader(ragged_batches(1)))
    assert len(module.shapes) == 5
    assert broken.fit_loop.epoch_loop.automatic_optimization is stock
