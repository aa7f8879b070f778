"""Running a loss for its gradient alone: without dropout, and with what it writes into put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_padmin.runtime.changes import Change
from lightning_padmin.runtime.keeper import Keeper
from lightning_padmin.runtime.patching import Shared, replaced
from lightning_padmin.runtime.random_state import RandomState
from lightning_padmin.runtime.writes import Writes

# Attributes that trainers keep data in.
DATA_OF_TRAINERS = ("train_dataset", "eval_dataset", "_buffered_inputs", "train_dataloader", "eval_dataloader")
# Attributes that hold objects of frameworks into which their users write figures.
_BESIDE_TRAINERS = ("state", "control", "callback_handler")
_HALF = (torch.float16, torch.bfloat16)
_STOCK_ATTENTION: Any = F.scaled_dot_product_attention
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class _Watch(TorchFunctionMode):
    """Switches dropout off where it is called, and notices half precision.

    `eval()` would do more: fused mixers take another path there.
    """

    _PLAIN = (*(getattr(F, name) for name in _DROPOUTS), torch.dropout)

    def __init__(self) -> None:
        super().__init__()
        self.saw_half = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dropout returns a copy of its input; attention runs with probability 0."""
        kwargs = dict(kwargs or {})
        if function in self._PLAIN:
            result = _kept_whole(*args, **kwargs)
        elif function is _STOCK_ATTENTION:
            result = _attention(function, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
        self.saw_half = self.saw_half or (isinstance(result, Tensor) and result.dtype in _HALF)
        return result


def _kept_whole(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # A copy, as dropout gives one: what follows may write into it.
    return input.clone()


def _attention(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    elif "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    return function(*args, **kwargs)


def attention_inside(function: Any) -> Any:
    """Of what `without_dropout` has put in place of attention, the function that it runs; others as they are."""
    while isinstance(function, partial) and function.func is _attention:
        function = function.args[0]
    return function


@contextmanager
def _functions_without_dropout() -> Iterator[None]:
    now = F.scaled_dot_product_attention  # the user's own, where one was written over it
    with (
        replaced(F, **dict.fromkeys(_DROPOUTS, _kept_whole)),
        replaced(F, scaled_dot_product_attention=partial(_attention, now)),
    ):
        yield


_functions = Shared(_functions_without_dropout)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[_Watch]:
    """No dropout inside, in forward passes and where checkpointing computes them again; recurrent layers included.

    Yields:
        An object whose `saw_half` tells whether anything was computed in half precision.
    """
    watch = _Watch()
    with ExitStack() as stack:
        # The mode is not on where a backward pass computes a forward pass again, nor inside of functions that handle
        # modes themselves; these look the functions up by name.
        stack.enter_context(_functions.on())
        for child in module.modules():
            if isinstance(child, nn.RNNBase) and child.dropout:
                stack.enter_context(replaced(child, dropout=0.0))
        stack.enter_context(watch)
        yield watch


def holders_of(trainer: Any) -> list[object]:
    """A trainer, and what belongs to it that `compute_loss` may write into besides."""
    found = [getattr(trainer, name, None) for name in _BESIDE_TRAINERS]
    return [trainer, *(each for each in found if each is not None)]


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """What `ModuleState` keeps is put back afterwards, whatever happens."""
    state = ModuleState(module)
    try:
        with state.watching():
            yield
    finally:
        state.restore()


class ModuleState:
    """What a training step may write into, as it is now: gradients, weights, buffers, hooks, attributes, random state.

    Gradients are taken away until `restore`. Attributes are kept with what is inside of them, see `keeper`, however
    deep, up to some 100,000 items. Memory is copied when it is written into inside of `watching`, and small buffers at
    once, see `writes`. Not kept is what neither the module nor a holder leads to.

    Args:
        module: the module.
        holders: objects whose attributes the step may write into besides: the trainer that it is a method of.
        skip: attributes of holders that hold data, which is not looked through.
    """

    def __init__(self, module: nn.Module, holders: Sequence[object] = (), skip: Collection[str] = ()) -> None:
        self._writes = Writes()
        keeper = Keeper(self._writes, module, holders, skip=skip)
        self._undo, self._looks, self._restarts = keeper.undo, keeper.looks, keeper.restarts
        self._writes.settle()
        self._random = RandomState()
        self._gradients = [(p, p.grad) for p in keeper.leaves]
        self._drop_gradients()  # what is accumulated meanwhile must not go into these

    def watching(self) -> AbstractContextManager[None]:
        """Passes run inside; what they write into is copied before."""
        return self._writes.watching()

    @property
    def copied(self) -> int:
        """Bytes of memory that copies take."""
        return self._writes.copied

    def restore(self) -> None:
        """Puts everything back; may be called again."""
        self.clear()
        for p, gradient in self._gradients:
            p.grad = gradient

    def clear(self) -> None:
        """Puts everything back but the gradients, which stay away for the next pass."""
        self._random.restore()
        self._drop_gradients()
        with torch.no_grad():
            for undo in self._undo:
                undo()
            self._writes.restore()

    def changes(self) -> list[Change]:
        """What differs now from what is kept, or was written into: not gradients, flags, hooks and random state."""
        return [change for look in self._looks for change in look()]

    def restart(self) -> None:
        """Puts random generators and what `changes` leave out back: what runs next finds them as the first pass did."""
        self._random.restore()
        with torch.no_grad():
            for undo in self._restarts:
                undo()

    def _drop_gradients(self) -> None:
        for p, _ in self._gradients:
            p.grad = None


class AttributeState:
    """What is in the attributes of objects and was not made by a framework, as it is now; see `keeper`.

    Models among them are left alone, and so are random generators of the process.

    Args:
        holders: the objects.
        skip: names of attributes that hold data.
        most_items: of all containers together; what is larger is left alone.
    """

    def __init__(self, holders: Sequence[object], skip: Collection[str] = (), most_items: int = 10_000) -> None:
        self._writes = Writes()
        options: dict[str, Any] = {"skip": skip, "most_items": most_items, "with_models": False, "tells": False}
        self._undo = Keeper(self._writes, None, holders, **options).undo
        self._writes.settle()

    def watching(self) -> AbstractContextManager[None]:
        """See `ModuleState.watching`."""
        return self._writes.watching()

    def restore(self) -> None:
        """Puts everything back; may be called again."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
            self._writes.restore()
