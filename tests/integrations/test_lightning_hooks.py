"""Gradient hooks, `on_after_backward` and noise under PadMinCallback, FabricPadMin and PadMin (Accelerate)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import Module, fit, fit_pair, padmin, ragged_batches
from torch import Tensor, nn

from lightning_padmin import PaddedForward, PadMinConfig
from lightning_padmin.architectures.findings import ArchitectureError, inspect_model
from lightning_padmin.architectures.gradient_hooks import GradientHookError, HookWatch
from lightning_padmin.errors import PadMinError
from lightning_padmin.integrations.accelerate import PadMin
from lightning_padmin.integrations.fabric import FabricPadMin
from lightning_padmin.integrations.lightning import loop as lightning_loop

CONFIG = PadMinConfig(token_budget=support.BUDGET, launch_cost=4)


# on_after_backward


class Normalised(Module):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad /= p.grad.norm() + 1e-8


class Penalised(Module):
    def on_after_backward(self) -> None:
        if (self.trainer.fit_loop.batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            for p in self.parameters():
                p.grad += 0.05 * p.detach()


class Noises(pl.Callback):
    """A callback that draws random numbers for the gradient, the same for every batch."""

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        generator = torch.Generator().manual_seed(trainer.fit_loop.batch_idx)
        for p in module.parameters():
            p.grad += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)


@pytest.mark.parametrize("make", [Normalised, Penalised])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_whole_gradients_in_on_after_backward(make: type[Module], accumulate: int) -> None:
    pair = fit_pair(make, ragged_batches(4), accumulate_grad_batches=accumulate)
    assert pair.gradient <= 1e-12
    assert pair.parameters <= 1e-12


def test_whole_gradients_in_a_callback() -> None:
    assert fit_pair(Module, ragged_batches(3), callbacks=lambda: [Noises()]).gradient <= 1e-12


def test_control_in_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def every(trainer: pl.Trainer, is_last: bool, look: Any) -> Any:
        return stock(trainer, True, look)

    stock = lightning_loop.around_backward
    monkeypatch.setattr(lightning_loop, "around_backward", every)
    for make in (Normalised, Penalised):
        assert fit_pair(make, ragged_batches(2)).gradient > 0.05


class ByHand(Normalised):
    """With manual optimization."""

    def __init__(self, callback: Any = None) -> None:
        super().__init__()
        self.automatic_optimization, self.callback = False, [callback]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (callback,) = self.callback
        for micro, weight in [(batch, 1.0)] if callback is None else callback.micro_batches(batch):
            self.manual_backward(self.loss(micro) * weight)
        self.optimizers().step()
        self.gradients.append(support.flat_gradient(self.model))
        self.optimizers().zero_grad()


def test_whole_gradients_with_manual_optimization() -> None:
    callback = padmin()
    stock, split = ByHand(), ByHand(callback)
    fit(stock, ragged_batches(2))
    fit(split, ragged_batches(2), callback)
    for found, wanted in zip(split.gradients, stock.gradients, strict=True):
        assert support.relative(found, wanted) <= 1e-12
    assert Precision.post_backward.__module__.startswith("lightning")


# Hooks that the step itself puts on parameters, and on hidden states


def masks(gradient: Tensor) -> Tensor:
    return gradient * 0.1


def clamps(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def looks(gradient: Tensor) -> None:
    gradient.norm()


class PutsBefore(Module):
    """Puts hooks there in on_before_backward, and takes them away in on_after_backward."""

    hook: Any = staticmethod(masks)

    def on_before_backward(self, loss: Tensor) -> None:
        self.handles = [p.register_hook(self.hook) for p in self.model.head.parameters()]

    def on_after_backward(self) -> None:
        for handle in self.handles:
            handle.remove()


class PutsInStep(PutsBefore):
    """Hooks in training_step, each of which goes when it has run."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.model.head.weight
        if batch_idx:  # the check has looked at the batch before

            def once(gradient: Tensor) -> Any:
                handle.remove()
                return self.hook(gradient)

            handle = weight.register_hook(once)
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.handles: list[Any] = []


class PutsOnModule(PutsBefore):
    """A hook of a module, once per step."""

    def on_before_backward(self, loss: Tensor) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        handle = self.model.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.1,))
        loss = super().training_step(batch, batch_idx)
        self.handles = [handle]
        return loss


@pytest.mark.parametrize(
    ("make", "hook", "words"),
    [
        (PutsBefore, masks, "stays there when"),
        (PutsBefore, clamps, "not linear"),
        (PutsInStep, clamps, "not linear"),
        (PutsOnModule, masks, "stays there when"),
    ],
)
def test_hooks_put_there_in_each_micro_batch(
    make: type[Module], hook: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "hook", staticmethod(hook))
    module = make()
    with pytest.raises(GradientHookError, match=words):
        fit(module, ragged_batches(2), padmin())
    assert all(p.grad is None for p in module.parameters())
    assert Precision.pre_backward.__module__.startswith("lightning")
    with monkeypatch.context() as patch:
        patch.setattr(HookWatch, "look_late", lambda *_: None)
        patch.setattr(HookWatch, "look", lambda *_, **__: None)
        assert fit_pair(make, ragged_batches(2)).gradient > 0.05


@pytest.mark.parametrize("make", [PutsBefore, PutsInStep])
def test_hooks_put_there_in_each_micro_batch_that_only_look(
    make: type[Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "hook", staticmethod(looks))
    assert fit_pair(make, ragged_batches(2)).gradient <= 1e-12


class BendsStates(Module):
    """Bends the gradient of each hidden state, which is the same in a micro-batch as in the batch."""

    hook: Any = staticmethod(clamps)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states = self.model.rnn(self.model.embedding(batch["input_ids"]))[0]
        if states.requires_grad:
            states.register_hook(self.hook)
        losses = support.token_losses(self.model.head(states), batch["labels"])
        return support.reduce_loss(losses, batch["labels"], self.how)


def by_token(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-3)


def by_batch(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


@pytest.mark.parametrize("hook", [clamps, by_token, torch.sign])
@pytest.mark.parametrize("how", ["token-mean", "row-mean"])
def test_gradients_of_hidden_states_bent_one_by_one(hook: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BendsStates, "hook", staticmethod(hook))
    assert fit_pair(partial(BendsStates, how), ragged_batches(2), options={"loss_reduction": how}).gradient <= 1e-9


@pytest.mark.parametrize("hook", [by_batch])
def test_gradients_of_hidden_states_bent_together(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BendsStates, "hook", staticmethod(hook))
    with pytest.raises(PadMinError, match="couples rows"):
        fit(BendsStates(), ragged_batches(1), padmin())
    monkeypatch.setattr(BendsStates, "hook", staticmethod(clamps))
    with pytest.raises(PadMinError, match="differ from the un-split"):
        fit(BendsStates("row-mean"), ragged_batches(1), padmin())


# Hooks on parameters, in each adapter


class Clamped(Module):
    """The recipe against exploding gradients; they explode in the last batch, behind the check."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (100 if batch_idx == 2 else 1)


class Stepping(Module):
    """PyTorch's optimizer step in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.own = {p: torch.optim.Adam([p], lr=0.01) for p in self.model.parameters()}
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(self.step_of)

    def step_of(self, parameter: nn.Parameter) -> None:
        self.own[parameter].step()
        self.own[parameter].zero_grad()

    def configure_optimizers(self) -> None:
        return None


class OwnBackward(Module):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        loss.backward()
        for p in self.parameters():
            p.grad.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Clamped, r"'model.embedding.weight' has a hook \(register_hook\).*Clamped.*test_lightning_hooks.py:\d+"),
        (Stepping, r"register_post_accumulate_grad_hook\) that takes an optimizer step.*Stepping.step_of.*configure"),
        (OwnBackward, r"OwnBackward.backward changes the gradient in place.*on_after_backward"),
    ],
)
def test_refused_before_anything_runs(make: type[Module], match: str) -> None:
    module = make()
    with pytest.raises(MisconfigurationException, match=match):
        fit(module, ragged_batches(3), padmin(check="off"))
    assert not module.shapes


class Later(Module):
    """A hook that comes in the course of training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.head.weight.register_hook(torch.sign)


def test_a_hook_that_comes_later() -> None:
    module = Later()
    with pytest.raises(GradientHookError, match=r"'model.head.weight'.*sign"):
        fit(module, ragged_batches(3), padmin(check="off"))
    assert len(module.gradients) == 1


def test_a_clamp_that_cannot_be_read_and_bites_later() -> None:
    module, callback = Module(), padmin()
    module.model.head.weight.register_hook(eval("lambda g: g.clamp(-bound[0], bound[0])", {"bound": (bound := [1e9])}))
    module.on_train_batch_start = lambda batch, index: bound.__setitem__(0, 1e9 if index < 2 else 1e-3)
    with pytest.raises(GradientHookError, match="makes something else of parts of a gradient"):
        fit(module, ragged_batches(3), callback)
    assert len(module.gradients) == 2
    assert all(p.grad is None for p in module.parameters())
    assert "_call" not in repr(module.model.head.weight._backward_hooks)


class Observed(Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        for p in self.parameters():
            p.register_hook(lambda gradient: self.norms.append(gradient.norm().item()))
            p.register_post_accumulate_grad_hook(lambda p: self.norms.append(p.grad.norm().item()))
        self.model.head.weight.register_hook(lambda gradient: gradient * 0.5)


def test_observers_and_factors_are_left_alone() -> None:
    pair = fit_pair(Observed, ragged_batches(3))
    assert pair.gradient <= 1e-12
    assert len(pair.split.norms) == 5 * len(pair.plain.norms)


def fabric_loop(module: nn.Module, batches: Any) -> Tensor:
    fabric = Fabric(accelerator="cpu", devices=1)
    model, pad = fabric.setup_module(module), FabricPadMin(fabric, CONFIG)
    for batch in batches:
        for micro, weight in pad.micro_batches(batch, model):
            fabric.backward(_loss(model, micro) * weight)
    return support.flat_gradient(module)


def accelerate_loop(module: nn.Module, batches: Any) -> Tensor:
    accelerator = Accelerator(cpu=True)
    model, pad = accelerator.prepare(module), PadMin(accelerator, CONFIG)
    for batch in batches:
        for micro, weight in pad.micro_batches(batch, model):
            accelerator.backward(_loss(model, micro) * weight)
    return support.flat_gradient(module)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = support.token_losses(model(batch["input_ids"]), batch["labels"])
    return support.reduce_loss(losses, batch["labels"], "token-mean")


LOOPS = [fabric_loop, accelerate_loop]


def tiny() -> nn.Module:
    torch.manual_seed(1)
    return support.TinyLM().double()


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_the_users_own(loop: Callable[..., Tensor]) -> None:
    batches = ragged_batches(2)
    module = tiny()
    module.head.weight.register_hook(lambda gradient: torch.clamp(gradient, -1, 1))
    with pytest.raises(GradientHookError, match=r"'head.weight'.*behind the loop over micro_batches"):
        loop(module, batches)
    assert module.head.weight.grad is None
    module = tiny()
    module.head.weight.register_hook(eval("lambda g: g.clamp(-1e-4, 1e-4)"))
    with pytest.raises(GradientHookError, match=r"'head.weight'"):
        loop(module, batches)
    assert module.head.weight.grad is None
    module, plain = tiny(), tiny()
    for each in (module, plain):
        each.head.weight.register_hook(eval("lambda g: g * 0.5"))
    for batch in batches:
        _loss(plain, batch).backward()
    assert support.relative(loop(module, batches), support.flat_gradient(plain)) <= 1e-12


# Noise by the width of the call


def neftune_hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    magnitude = 5 / torch.sqrt(torch.tensor(output.size(1) * output.size(2)))
    return output + torch.zeros_like(output).uniform_(-magnitude, magnitude)


def noisy_hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    _, width, _ = output.shape
    return output + torch.randn_like(output) * (0.1 * width**-0.5)


def plain_noise(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Of one size, whatever the width."""
    return output + 0.01 * torch.randn_like(output) / math.sqrt(output.shape[-1])


class NoisyEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        found = super().forward(ids)
        noise = torch.rand_like(found) * 2 - 1
        return found + noise * (5 / math.sqrt(found.shape[1] * found.shape[2])) if self.training else found


def with_hook(hook: Any, model: nn.Module) -> nn.Module:
    model.embedding.register_forward_hook(hook)
    return model


def with_class(model: nn.Module) -> nn.Module:
    model.embedding = NoisyEmbedding(support.VOCABULARY, 12)
    return model


def with_attribute(model: nn.Module, alpha: float = 5.0) -> nn.Module:
    model.embedding.neftune_noise_alpha = alpha
    return model


NOISES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "by its name": partial(with_hook, neftune_hook),
    "by its source": partial(with_hook, noisy_hook),
    "of a class": with_class,
    "by the attribute": with_attribute,
}


@pytest.mark.parametrize("name", NOISES)
def test_noise_by_the_width_is_refused(name: str) -> None:
    module = Module()
    NOISES[name](module.model)
    with pytest.raises(MisconfigurationException, match=r"model.embedding.*noise.*width of the call"):
        fit(module, ragged_batches(1), padmin())
    assert not module.shapes
    for loop in LOOPS:
        with pytest.raises(ArchitectureError, match="width of the call"):
            loop(NOISES[name](tiny()), ragged_batches(1))
    with pytest.raises(ArchitectureError, match="width of the call"):
        PaddedForward(NOISES[name](tiny()))


def test_noise_that_comes_later_is_refused() -> None:
    class Comes(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.model.embedding.register_forward_hook(neftune_hook)

    module = Comes()
    with pytest.raises((MisconfigurationException, PadMinError), match="width of the call"):
        fit(module, ragged_batches(3), padmin(check="off"))
    assert len(module.gradients) <= 2


def test_noise_that_is_off_or_of_one_size_is_not() -> None:
    assert not inspect_model(with_attribute(tiny(), 0.0))
    off = with_hook(neftune_hook, tiny())
    off.embedding.neftune_noise_alpha = None
    assert not inspect_model(off)
    assert not inspect_model(with_hook(plain_noise, tiny()))
