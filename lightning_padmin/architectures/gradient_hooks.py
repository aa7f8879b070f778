"""Hooks on gradients where a batch is sent backward in parts: refused, left alone, or watched.

A hook on a parameter (`register_hook`, `register_post_accumulate_grad_hook`) runs once per micro-batch, on a part of
the gradient. What is known from its source to change gradients in another way than linearly, or to write parameters
(an optimizer step in the backward pass), is refused before any pass. What is known to look only, or to be linear, is
left alone. Around any other a guard stands while micro-batches run: within one batch, what comes out must be what went
in times one and the same factor, entry by entry; else an error is raised before the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_padmin.architectures.hook_reading import Effect, read_hook
from lightning_padmin.architectures.hook_source import module_of, name_of
from lightning_padmin.errors import GradientHookError

# Whose hooks make part of how gradients are reduced or kept: they are written for several backward passes.
_FRAMEWORKS = {
    *("deepspeed", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_padmin", "fairscale"),
    *("torch.nn.parallel", "torch.distributed", "torch._dynamo", "torch._functorch", "torch._inductor"),
    *("torch.utils.checkpoint", "transformers.trainer"),
}
_STEPS_IN_BACKWARD = ("torch.distributed.optim", "torch.distributed.algorithms")
_BY_VALUE = 4  # first firings of a hook, in which writes through `.data` are looked for too
_BEFORE, _AFTER = "register_hook", "register_post_accumulate_grad_hook"


def is_of_framework(hook: Any) -> bool:
    """Whether a hook belongs to what distributes the training, not to the user."""
    module = module_of(hook) + "."
    if any(module.startswith(f"{name}.") for name in _STEPS_IN_BACKWARD):
        return False
    return any(module.startswith(f"{name}.") for name in _FRAMEWORKS)


@contextmanager
def without_user_hooks(module: nn.Module) -> Iterator[None]:
    """Passes inside fire no hook that a user has put on a parameter of the module; those of frameworks stay."""
    taken: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
    for p in module.parameters():
        for _, table in _tables(p):
            if not all(is_of_framework(hook) for hook in table.values()):
                taken.append((table, dict(table)))
    # In place: the autograd engine holds the same dictionary.
    for table, kept in taken:
        for key, hook in kept.items():
            if not is_of_framework(hook):
                del table[key]
    try:
        yield
    finally:
        for table, kept in taken:
            now = dict(table)
            table.clear()
            table.update({key: hook for key, hook in kept.items() if key in now or not is_of_framework(hook)})
            table.update({key: hook for key, hook in now.items() if key not in kept})


def reenters(module: nn.Module) -> bool:
    """Whether a model of transformers is checkpointed by re-entrant calls, each of which fires hooks by itself."""
    for child in module.modules():
        function = getattr(child, "_gradient_checkpointing_func", None)
        is_on = getattr(child, "gradient_checkpointing", False) and function is not None
        if is_on and getattr(function, "keywords", {}).get("use_reentrant", False):
            return True
    return False


class HookWatch:
    """Looks after the hooks of one training.

    Args:
        fix: what the user may do instead, as the end of a message: a sentence, or a function that gives one.
    """

    def __init__(self, fix: str | Callable[[], str]) -> None:
        self._fix = fix
        self._keys: list[Any] | None = None  # of hooks as of the last look; torch gives no key twice
        self._guards: list[_Guard] = []
        self._late: set[Any] = set()  # keys of hooks put there by earlier micro-batches of this batch

    def look(
        self,
        module: nn.Module,
        parts: Iterable[nn.Module] | None = None,
        *,
        parameters: bool = True,
        wrapper: object = None,
    ) -> None:
        """Inspects hooks that are new since the last time; cheap where there are none.

        Args:
            module: whose parameters are trained.
            parts: modules whose own backward hooks count; default: all inside of `module`.
            parameters: False where each backward pass is one of a whole batch, so that hooks on parameters do as ever.
            wrapper: what reduces its gradients, if it is wrapped.

        Raises:
            GradientHookError: a hook makes something else of parts than of the whole; names it.
        """
        found = list(_hooks(module, parts)) if parameters else [h for h in _hooks(module, parts) if h.parameter is None]
        keys = [hook.key for hook in found]
        if keys == self._keys:
            return
        guards = []
        for hook in found:  # none is a guard: these stand while micro-batches run only
            if self._read(hook) is Effect.UNKNOWN and hook.parameter is not None:
                guards.append(_Guard(hook, module, self._refuse))
        if parameters:
            self._refuse_steps_in_backward(module, wrapper)
        self._guards, self._keys = guards, keys

    def look_late(self, module: nn.Module, index: int, count: int) -> None:
        """Inspects hooks that the step itself has put on parameters and modules, just before its backward pass.

        A step that does so once per batch does it once per micro-batch here: each hook must look only, or be linear
        and be gone again when the next one is put there.

        Args:
            module: whose parameters are trained.
            index: of the micro-batch.
            count: of the batch.

        Raises:
            GradientHookError: parts would be changed otherwise than the whole. Gradients have been dropped then.
        """
        if count == 1:
            return
        known, before = set(self._keys or ()), self._late if index else set()
        self._late = set()
        for hook in _hooks(module, None):
            if hook.key in known or isinstance(getattr(hook.function, "__self__", None), _Guard):
                continue
            try:
                effect = self._read(hook)
                if effect is Effect.OBSERVES:
                    continue
                if hook.key in before:
                    self._refuse(hook, "stays there when the next micro-batch puts another one beside it")
                if effect is Effect.UNKNOWN and hook.parameter is not None:
                    self._refuse(hook, "is put there in each step, and does what its source does not tell")
            except GradientHookError:
                _drop(module)
                raise
            self._late.add(hook.key)

    @contextmanager
    def around(self, index: int, count: int) -> Iterator[None]:
        """Around forward and backward pass of a micro-batch; guards stand inside.

        Args:
            index: of the micro-batch; with 0 a new batch begins.
            count: of the batch. A single one is a backward pass as without this library.

        Raises:
            GradientHookError: from within a backward pass. Gradients have been dropped then.
        """
        if count == 1 or not self._guards:
            yield
            return
        for guard in self._guards:
            if index == 0:
                guard.begin()
            guard.stand()
        try:
            yield
        finally:
            for guard in self._guards:
                guard.leave()

    def _read(self, hook: _Hook) -> Effect:
        """What a hook does; refuses it where parts are not as the whole."""
        reading = read_hook(hook.function, gradients=hook.gradients, is_parameter=hook.kind == _AFTER)
        changes = reading.effect is Effect.CHANGES
        if hook.parameter is None:
            changes = reading.steps or (changes and reading.reduces)
        if changes:
            self._refuse(hook, reading.why or "writes into gradients or parameters")
        return reading.effect

    def _refuse(self, hook: _Hook, why: str) -> None:
        fix = self._fix if isinstance(self._fix, str) else self._fix()
        what = "the whole batch's" if hook.parameter is not None else "a whole batch's"
        raise GradientHookError(
            f"{hook.name!r} has a hook ({hook.kind}) that {why}: {name_of(hook.function)}. It would act on each "
            f"micro-batch's part of the gradient, not on {what}. {fix}"
        )

    def _refuse_steps_in_backward(self, module: nn.Module, wrapper: object) -> None:
        """Optimizers that hook themselves to where gradients are accumulated, which cannot be looked into."""
        for name, p in module.named_parameters():
            inside = getattr(p, "_in_backward_optimizers", None)
            if inside:
                kind = type(inside[0]).__name__
                hook = _Hook(name, "_apply_optimizer_in_backward", type(inside[0]), {}, 0, p)
                self._refuse(hook, f"takes an optimizer step ({kind}) in the backward pass")
        for child in wrapper.modules() if isinstance(wrapper, nn.Module) else ():
            for function, _ in getattr(child, "_comm_hooks", ()):
                if "then_optimizer" in getattr(function, "__qualname__", ""):
                    name, p = next(module.named_parameters())
                    hook = _Hook(name, "_register_fused_optim", function, {}, 0, p)
                    self._refuse(hook, "takes an optimizer step in the backward pass")


@dataclass(frozen=True, eq=False)
class _Hook:
    """A hook of a user's, and where it is kept."""

    name: str
    kind: str
    function: Any
    table: MutableMapping[Any, Any]
    key: Any
    parameter: nn.Parameter | None
    gradients: tuple[int, ...] = (0,)


def _tables(parameter: nn.Parameter) -> Iterator[tuple[str, MutableMapping[Any, Any]]]:
    for kind, name in ((_BEFORE, "_backward_hooks"), (_AFTER, "_post_accumulate_grad_hooks")):
        table = getattr(parameter, name, None)
        if table:
            yield kind, table


def _hooks(module: nn.Module, parts: Iterable[nn.Module] | None) -> Iterator[_Hook]:
    for name, p in module.named_parameters():
        for kind, table in _tables(p):
            for key, function in table.items():
                if not is_of_framework(function):
                    yield _Hook(name, kind, function, table, key, p)
    roots = [("", module)] if parts is None else [(type(part).__name__, part) for part in parts]
    for prefix, root in roots:
        for name, child in root.named_modules(prefix=prefix):
            for kind, table, gradients in (
                ("register_full_backward_hook", child._backward_hooks, (1, 2)),
                ("register_full_backward_pre_hook", child._backward_pre_hooks, (1,)),
            ):
                for key, function in table.items() if table else ():
                    if not is_of_framework(function):
                        yield _Hook(name or type(child).__name__, kind, function, table, key, None, gradients)


class _Guard:
    """Stands in a hook's place, and looks at what the hook makes of each gradient."""

    def __init__(self, hook: _Hook, module: nn.Module, refuse: Callable[[_Hook, str], None]) -> None:
        self._hook, self._module, self._refuse = hook, module, refuse
        self._firings, self._acts = 0, False
        self._factors = _Factors(only_kept=hook.kind == _AFTER)
        self._call = self._after if hook.kind == _AFTER else self._before
        self._is_first = True

    def begin(self) -> None:
        """Another batch: what a hook does may change from one to the next, since each ends in a step."""
        self._factors = _Factors(only_kept=self._hook.kind == _AFTER)
        self._is_first = True

    def stand(self) -> None:
        if self._hook.key in self._hook.table:  # not removed meanwhile
            self._hook.table[self._hook.key] = self._call

    def leave(self) -> None:
        if self._hook.table.get(self._hook.key) == self._call:
            self._hook.table[self._hook.key] = self._hook.function

    @property
    def _by_value(self) -> bool:
        first, self._is_first = self._is_first, False
        self._firings += 1
        return first or self._acts or self._firings <= _BY_VALUE

    def _before(self, gradient: Tensor) -> Tensor | None:
        parameter = self._hook.parameter
        assert parameter is not None
        kept, weight, versions = gradient.detach(), None, (gradient._version, parameter._version)
        if self._by_value:
            kept, weight = kept.clone(), parameter.detach().clone()
        returned: Tensor | None = self._hook.function(gradient)
        self._look_at_parameter(weight, versions[1])
        found = gradient if returned is None else returned
        written = gradient._version != versions[0] or (weight is not None and not _same(gradient, kept))
        self._acts = self._acts or written or returned is not None
        if written and weight is None:
            self._fail("writes into the gradient in place, at times")
        if self._acts and not self._factors.hold(kept, found.detach()):
            self._fail("makes something else of parts of a gradient than of the whole")
        return returned

    def _after(self, parameter: nn.Parameter) -> Any:
        gradient = parameter.grad
        kept, weight = gradient, None
        versions = (None if gradient is None else gradient._version, parameter._version)
        if self._by_value:
            kept, weight = None if gradient is None else gradient.detach().clone(), parameter.detach().clone()
        returned = self._hook.function(parameter)  # something else than None is torch's to refuse
        self._look_at_parameter(weight, versions[1])
        if gradient is None or kept is None:
            return returned
        now = parameter.grad
        if now is None:
            self._fail("takes the gradient away")
            return returned
        written = now is not gradient or now._version != versions[0] or not _same(now, kept)
        self._acts = self._acts or written
        if written and weight is None:
            self._fail("writes into gradients, at times")
        if written and not self._factors.hold(kept, now.detach()):
            self._fail("writes into gradients, which would be done again for each micro-batch")
        return returned

    def _look_at_parameter(self, kept: Tensor | None, version: int) -> None:
        parameter = self._hook.parameter
        assert parameter is not None
        if parameter._version == version and (kept is None or _same(parameter, kept)):
            return
        if kept is not None:
            with torch.no_grad():
                parameter.copy_(kept)
        self._fail("writes into parameters")

    def _fail(self, why: str) -> None:
        _drop(self._module)
        self._refuse(self._hook, why)


def _drop(module: nn.Module) -> None:
    """Takes gradients of a part of a batch away."""
    for p in module.parameters():
        p.grad = None


class _Factors:
    """What entries of a gradient have been multiplied by so far in a batch.

    Args:
        only_kept: entries may be kept or set to zero alone. What has been accumulated passes through once per
            micro-batch, so any other factor would be taken several times.
    """

    def __init__(self, only_kept: bool) -> None:
        self._only_kept = only_kept
        self._known: Tensor | None = None  # nan where nothing is known

    def hold(self, before: Tensor, after: Tensor) -> bool:
        """Whether the same factors as before lead from one to the other; remembers new ones."""
        if before.shape != after.shape:
            return False
        wide = torch.float64 if before.dtype == torch.float64 else torch.float32
        slack = 16 * torch.finfo(before.dtype).eps
        old, new = (_dense(each).to(wide) for each in (before, after))
        finite = old.isfinite()
        factor = torch.where(finite, new / torch.where(finite, old, torch.ones_like(old)), new)
        nothing = (old == 0) | old.isnan() & new.isnan() | ~finite & ~new.isfinite()
        # From nothing comes nothing; what is not finite may only have been left out.
        wrong = (old == 0) & (new != 0) | ~finite & new.isfinite() & (new != 0)
        if self._only_kept:
            wrong |= ~nothing & (factor != 0) & ((factor - 1).abs() > slack)
        known = torch.full_like(old, torch.nan) if self._known is None else self._known
        compared = ~nothing & ~known.isnan()
        wrong |= compared & ~((factor - known).abs() <= slack * torch.maximum(factor.abs(), known.abs()))
        if bool(wrong.any()):
            return False
        self._known = torch.where(nothing | compared, known, factor)
        return True


def _dense(tensor: Tensor) -> Tensor:
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    dense: Tensor = local.to_dense() if local.is_sparse else local
    return dense


def _same(first: Tensor, second: Tensor) -> bool:
    a, b = _dense(first.detach()), _dense(second.detach())
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


__all__ = ["GradientHookError", "HookWatch", "is_of_framework", "reenters", "without_user_hooks"]
