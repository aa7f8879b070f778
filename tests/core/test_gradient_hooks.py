"""Hooks on gradients: what is read from their source, what is watched, and how they are taken away for a check."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from lightning_padmin import PadMinConfig, iter_micro_batches, verify_equivalence
from lightning_padmin.architectures.gradient_hooks import GradientHookError, HookWatch, reenters, without_user_hooks
from lightning_padmin.architectures.hook_reading import Effect, read_hook

NORMS: list[Any] = []
MASK = torch.tensor([1.0, 0.0, 1.0])
FIX = "Do it elsewhere"


def clip(gradient: Tensor, bound: float) -> Tensor:
    return torch.clamp(gradient, -bound, bound)


def normalise(gradient: Tensor) -> Tensor | None:
    norm = gradient.norm()
    if norm > 1:
        return gradient / norm
    return None


@torch.no_grad()
def noisy(gradient: Tensor) -> Tensor:
    return gradient + 0.01 * torch.randn_like(gradient)


def clamped_in_place(gradient: Tensor) -> None:
    gradient.data.clamp_(-1, 1)


def reports(gradient: Tensor) -> None:
    if not torch.isfinite(gradient).all() or gradient.abs().max() > 1e4:
        print("large", gradient.norm().item())


def freezes_rows(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[:2] = 0
    return gradient


def centred(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(dim=-1, keepdim=True)


def starred(*gradients: Tensor) -> Tensor:
    return clip(*gradients, 3.0)


class Keeper:
    """Bound methods, and an object that can be called."""

    def __init__(self) -> None:
        self.seen = 0
        self.optimizer = {0: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)}

    def observe(self, gradient: Tensor) -> None:
        self.seen += 1
        self.keep(gradient.detach().cpu())

    def keep(self, value: Tensor) -> None:
        NORMS.append(value.pow(2).sum().sqrt().item())

    def limit(self, gradient: Tensor) -> Tensor:
        return clip(gradient, float(self.seen))

    def __call__(self, gradient: Tensor) -> Tensor:
        return self.limit(gradient)

    def step(self, parameter: nn.Parameter) -> None:
        self.optimizer[id(parameter)].step()
        self.optimizer[id(parameter)].zero_grad()


CHANGES: dict[str, Callable[..., Any]] = {
    "a method": lambda g: g.clamp(-1, 1),
    "a function": lambda g: torch.clamp(g, max=1.0),
    "a partial": functools.partial(clip, bound=1.0),
    "a partial of torch's own": functools.partial(torch.clamp, min=-1.0),
    "torch's own": torch.sign,
    "a bound method": Keeper().limit,
    "an object": Keeper(),
    "over a condition": normalise,
    "under a decorator": noisy,
    "in place, past the version": clamped_in_place,
    "by any number of arguments": starred,
    "random": lambda g: g * random.random(),
    "by functional": lambda g: nn.functional.normalize(g, dim=0),
}
LOOKS: dict[str, Callable[..., Any]] = {
    "keeps a norm": lambda g: NORMS.append(g.norm()),
    "keeps a copy": lambda g: NORMS.append(g.detach().clone()),
    "a bound method": Keeper().observe,
    "prints": reports,
}
LINEAR: dict[str, Callable[..., Any]] = {
    "a factor": lambda g: g * 0.1,
    "reversed": lambda g: -g,
    "a mask": lambda g: g * MASK.to(g.device),
    "a mask by where": lambda g: torch.where(MASK > 0, g, torch.zeros_like(g)),
    "rows set to zero": freezes_rows,
    "centred": centred,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_gradients_is_read(name: str) -> None:
    assert read_hook(CHANGES[name]).effect is Effect.CHANGES


@pytest.mark.parametrize("name", LOOKS)
def test_what_only_looks_is_read(name: str) -> None:
    assert read_hook(LOOKS[name]).effect is Effect.OBSERVES


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_read(name: str) -> None:
    assert read_hook(LINEAR[name]).effect is Effect.LINEAR


def takes_away(parameter: nn.Parameter) -> None:
    parameter.grad = None


def descends(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad


OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)


def step_and_forget() -> None:
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()


AFTER: dict[str, tuple[Callable[..., Any], Effect]] = {
    "steps of its own optimizer": (Keeper().step, Effect.CHANGES),
    "steps elsewhere": (lambda p: step_and_forget(), Effect.CHANGES),
    "descends by itself": (descends, Effect.CHANGES),
    "takes gradients away": (takes_away, Effect.CHANGES),
    "clips": (lambda p: nn.utils.clip_grad_norm_([p], 1.0), Effect.CHANGES),
    "keeps a norm": (lambda p: NORMS.append(p.grad.norm().item()), Effect.OBSERVES),
    "scales": (lambda p: p.grad.mul_(0.5), Effect.UNKNOWN),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_runs_behind_accumulation_is_read(name: str) -> None:
    hook, effect = AFTER[name]
    assert read_hook(hook, is_parameter=True).effect is effect


def test_what_wandb_watches_with_is_left_alone() -> None:
    history = pytest.importorskip("wandb.integration.torch.wandb_torch").TorchHistory()
    module = support.TinyLM()
    history.add_log_gradients_hook(module, name="model", prefix="", log_freq=1)
    assert {read_hook(h).effect for p in module.parameters() for h in p._backward_hooks.values()} == {Effect.OBSERVES}
    HookWatch(FIX).look(module)


# Watched, where the source does not tell. `eval` leaves no source.


def split_gradient(module: nn.Module, watch: HookWatch, lengths: Any = support.LENGTHS, seed: int = 0) -> Tensor:
    """Of one batch, micro-batch by micro-batch."""
    module.zero_grad()
    batch = support.make_batch(lengths, seed=seed)
    watch.look(module)
    for micro in iter_micro_batches(batch, PadMinConfig(token_budget=support.BUDGET, launch_cost=4)):
        with watch.around(micro.index, micro.count):
            losses = support.token_losses(module(micro.batch["input_ids"]), micro.batch["labels"])
            (support.reduce_loss(losses, micro.batch["labels"], "token-mean") * micro.weight).backward()
    return support.flat_gradient(module)


def whole_gradient(module: nn.Module, seed: int = 0) -> Tensor:
    module.zero_grad()
    batch = support.make_batch(support.LENGTHS, seed=seed)
    losses = support.token_losses(module(batch["input_ids"]), batch["labels"])
    support.reduce_loss(losses, batch["labels"], "token-mean").backward()
    return support.flat_gradient(module)


def tiny() -> nn.Module:
    torch.manual_seed(1)
    return support.TinyLM().double()


def hidden(words: str, **names: Any) -> Callable[..., Any]:
    return eval(words, {"torch": torch, **names})  # type: ignore[no-any-return]


def test_a_clamp_that_bites_later_is_found_in_the_batch_where_it_does() -> None:
    module, watch, bound = tiny(), HookWatch(FIX), [1e9]
    module.head.weight.register_hook(hidden("lambda g: g.clamp(-bound[0], bound[0])", bound=bound))
    before = support.flat_parameters(module)
    split, wanted = split_gradient(module, watch), whole_gradient(module)
    assert support.relative(split, wanted) <= 1e-12
    bound[0] = 1e-3
    with pytest.raises(GradientHookError, match=r"'head.weight' has a hook \(register_hook\).*makes something else"):
        split_gradient(module, watch)
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(support.flat_parameters(module), before)
    # The control: without the watch it trains something else.
    assert support.relative(_unwatched(module), wanted) > 0.05


def _unwatched(module: nn.Module) -> Tensor:
    module.zero_grad()
    batch = support.make_batch(support.LENGTHS)
    for micro in iter_micro_batches(batch, PadMinConfig(token_budget=support.BUDGET, launch_cost=4)):
        losses = support.token_losses(module(micro.batch["input_ids"]), micro.batch["labels"])
        (support.reduce_loss(losses, micro.batch["labels"], "token-mean") * micro.weight).backward()
    return support.flat_gradient(module)


@pytest.mark.parametrize(
    "words",
    ["lambda g: g * 0.5", "lambda g: g.mul_(0.5)", "lambda g: g * mask", "lambda g: None", "lambda g: seen.append(g)"],
)
def test_what_turns_out_linear_is_exact(words: str) -> None:
    module, seen = tiny(), []
    module.head.bias.register_hook(hidden(words, mask=torch.arange(23) % 2, seen=seen))
    split = split_gradient(module, HookWatch(FIX))
    seen.clear()
    assert support.relative(split, whole_gradient(module)) <= 1e-12


def without_nan(gradient: Tensor) -> Tensor:
    if torch.isnan(gradient).any() or not gradient.isfinite().all():
        return torch.zeros_like(gradient)
    return gradient


def without_large(gradient: Tensor) -> Tensor:
    if torch.isnan(gradient).any() or gradient.norm() > 1e-3:
        return torch.zeros_like(gradient)
    return gradient


def test_a_hook_against_what_is_not_finite_is_watched() -> None:
    """Exact where all is finite; where a part of the gradient is not, the whole one would have been left out."""
    assert read_hook(without_nan).effect is Effect.UNKNOWN
    assert read_hook(without_large).effect is Effect.CHANGES  # control
    module = tiny()
    module.head.weight.register_hook(without_nan)
    assert support.relative(split_gradient(module, HookWatch(FIX)), whole_gradient(module)) <= 1e-12
    module, fired = tiny(), [0]

    def spoil(gradient: Tensor) -> Tensor:
        fired[0] += 1
        return gradient * torch.tensor(float("nan") if fired[0] == 2 else 1.0)

    module.head.register_full_backward_pre_hook(lambda _, gradients: (spoil(gradients[0]),))
    module.head.weight.register_hook(without_nan)
    with pytest.raises(GradientHookError, match=r"something else of parts.*without_nan"):
        split_gradient(module, HookWatch(FIX))


@pytest.mark.parametrize(
    "words",
    ["lambda g: g / g.norm()", "lambda g: g + 1.0", "lambda g: (g.data.sign_(), None)[1]", "lambda g: g * next(n)"],
)
def test_what_turns_out_otherwise_is_refused(words: str) -> None:
    module = tiny()
    module.head.weight.register_hook(hidden(words, n=iter(range(1, 99))))
    with pytest.raises(GradientHookError, match=r"head\.weight"):
        split_gradient(module, HookWatch(FIX))


def test_a_step_that_cannot_be_read_is_undone() -> None:
    module = tiny()
    optimizer = torch.optim.SGD([module.head.weight], lr=0.1)
    module.head.weight.register_post_accumulate_grad_hook(hidden("lambda p: o.step()", o=optimizer))
    before = support.flat_parameters(module)
    with pytest.raises(GradientHookError, match="writes into parameters"):
        split_gradient(module, HookWatch(FIX))
    assert torch.equal(support.flat_parameters(module), before)


@pytest.mark.parametrize(
    ("words", "exact"), [("lambda p: [p.grad.mul_(m)].clear()", True), ("lambda p: [p.grad.mul_(0.5)].clear()", False)]
)
def test_what_is_done_to_accumulated_gradients(words: str, exact: bool) -> None:
    """A mask of zeros and ones may be taken again and again, a factor may not."""
    module = tiny()
    module.head.bias.register_post_accumulate_grad_hook(hidden(words, m=torch.arange(23) % 2))
    if exact:
        assert support.relative(split_gradient(module, HookWatch(FIX)), whole_gradient(module)) <= 1e-12
    else:
        with pytest.raises(GradientHookError, match="done again for each micro-batch"):
            split_gradient(module, HookWatch(FIX))


def test_nothing_stays_behind_and_removal_works() -> None:
    module, watch = tiny(), HookWatch(FIX)
    hook = hidden("lambda g: g * 2")
    handle = module.head.weight.register_hook(hook)
    split_gradient(module, watch)
    assert list(module.head.weight._backward_hooks.values()) == [hook]
    with pytest.raises(ZeroDivisionError), watch.around(0, 2):
        raise ZeroDivisionError
    assert list(module.head.weight._backward_hooks.values()) == [hook]
    with watch.around(0, 2):
        handle.remove()
    assert not module.head.weight._backward_hooks


def test_a_single_micro_batch_is_as_ever() -> None:
    module, watch = tiny(), HookWatch(FIX)
    module.head.weight.register_hook(hidden("lambda g: g.clamp(-1e-4, 1e-4)"))
    split_gradient(module, watch, lengths=[4, 4])


def test_hooks_that_come_later_are_read_too() -> None:
    module, watch = tiny(), HookWatch(FIX)
    watch.look(module)
    module.embedding.weight.register_hook(lambda g: g.clamp(-1, 1))
    with pytest.raises(
        GradientHookError, match=r"embedding.weight.*<lambda> of .*test_gradient_hooks.py:\d+.*elsewhere"
    ):
        watch.look(module)


def test_optimizers_that_torch_puts_into_the_backward_pass() -> None:
    module = tiny()
    _apply_optimizer_in_backward(torch.optim.SGD, module.head.parameters(), {"lr": 0.1})
    with pytest.raises(GradientHookError, match=r"'head.weight'.*_apply_optimizer_in_backward.*SGD"):
        HookWatch(FIX).look(module)


def test_hooks_on_modules() -> None:
    """Rows have gradients of their own there: what treats entries one by one is exact, norms are not."""
    module = tiny()
    module.head.register_full_backward_hook(lambda m, i, o: (i[0].clamp(-1e-4, 1e-4),))
    assert support.relative(split_gradient(module, HookWatch(FIX)), whole_gradient(module)) <= 1e-12
    module.head.register_full_backward_hook(lambda m, i, o: NORMS.append(o[0].norm()))
    HookWatch(FIX).look(module)
    module.head.register_full_backward_hook(lambda m, i, o: (i[0] / i[0].norm(),))
    with pytest.raises(GradientHookError, match=r"'head'.*register_full_backward_hook"):
        HookWatch(FIX).look(module)


def test_without_user_hooks() -> None:
    module, fired = tiny(), []
    hooks = [lambda g: fired.append(1), lambda g: g * 2]
    for hook in hooks:
        module.head.weight.register_hook(hook)
    module.head.weight.register_post_accumulate_grad_hook(lambda p: fired.append(2))
    with without_user_hooks(module):
        plain = whole_gradient(module)
        added = module.head.weight.register_hook(lambda g: None)
    assert not fired
    assert list(module.head.weight._backward_hooks.values())[:2] == hooks
    assert len(module.head.weight._backward_hooks) == 3
    added.remove()
    assert support.relative(whole_gradient(module), plain) > 0.05
    assert fired == [1, 2]


def test_verification_fires_no_hook() -> None:
    module, fired = tiny(), []
    module.head.weight.register_hook(lambda g: fired.append(1) or g.clamp(-1e-9, 1e-9))
    module.head.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return support.reduce_loss(
            support.token_losses(module(batch["input_ids"]), batch["labels"]), batch["labels"], "token-mean"
        )

    report = verify_equivalence(loss, support.make_batch(support.LENGTHS), PadMinConfig(token_budget=24), module=module)
    assert report.is_exact
    assert not fired


def test_re_entrant_checkpoints_are_told() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **sizes))
    assert not reenters(model)
    for value in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": value})
        assert reenters(model) is value
