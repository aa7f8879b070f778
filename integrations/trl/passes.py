"""Forward and backward passes of one window through the trainer's own loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_padmin.integrations.common import RandomState
from lightning_padmin.integrations.trl import hooks as trl_stock
from lightning_padmin.integrations.trl.logprobs import Given, Scores, zero_of
from lightning_padmin.integrations.trl.window import Values, Window
from lightning_padmin.microbatching import MemoryGuard

StockLoss = Callable[[Mapping[str, Any], Values], tuple[Tensor, Given]]


class Passes:
    """A window, chunk by chunk.

    Args:
        trainer: of TRL.
        window: its rows and buffers.
        score: log-probs and entropies of a chunk.
        stock_loss: the trainer's own loss of prepared inputs, with log-probs and entropies in place of a forward pass.
        guard: around the pass of each chunk.
        listen: gets the loss of each stock micro-batch, with its graph, once its log-probs are there.
    """

    def __init__(
        self,
        trainer: Any,
        window: Window,
        score: Callable[[int], Scores],
        stock_loss: StockLoss,
        guard: MemoryGuard,
        listen: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.trainer, self.window, self.stock_loss, self._score = trainer, window, stock_loss, score
        self.guard, self._listen = guard, listen
        self._draws: list[RandomState] = []
        self._value: Tensor | None = None  # replay: of the window's loss

    # Log-probs first.

    def fill_buffers(self) -> None:
        """Log-probs of all chunks, without a graph; what random numbers they drew is kept."""
        window = self.window
        with torch.no_grad():
            for chunk in range(len(window.batches)):
                self._draws.append(RandomState())
                with MemoryGuard(window.batches, rank=self.trainer.accelerator.process_index).alone(chunk):
                    scores = self._score(chunk)
                window.start_buffers(scores)
                if not window.batches.is_dummy(chunk):
                    window.store(chunk, scores)
        window.clear_unseen()

    def forget_buffers(self) -> None:
        """As if `fill_buffers` had not run; random numbers included."""
        if self._draws:
            self._draws[0].restore()
        self._draws.clear()
        self.window.forget()

    def take_gradients(self, ends_window: bool) -> None:
        """Replay: the loss of every stock micro-batch, with its metrics, and its gradients at the log-probs.

        Args:
            ends_window: whether an optimizer step follows upon the window.
        """
        if not self._draws:
            self.fill_buffers()
        losses = []
        for index, entry in enumerate(self.window.entries):
            leaves = leaves_of(entry.buffers)
            with torch.enable_grad(), self._at(index, ends_window):
                loss, _ = self.stock_loss(entry.inputs, leaves)
            if self._listen is not None:
                self._listen(loss)
            entry.gradients = gradients_of(loss, leaves)
            losses.append(loss.detach())
        self._value = torch.stack(losses).sum()

    # Chunk by chunk.

    def loss_of(self, chunk: int) -> Callable[..., Tensor]:
        """What stands in the place of the trainer's `compute_loss` while a chunk runs."""

        def compute_loss(
            model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Tensor:
            return self._loss(chunk)

        return compute_loss

    def _loss(self, chunk: int) -> Tensor:
        """The chunk's part of the window's loss; its value is the whole loss in the last chunk, 0 before."""
        window = self.window
        with self._draws[chunk].again() if self._draws else nullcontext():
            scores = self._score(chunk)
        self.guard.forward_is_done(chunk)
        is_dummy = window.batches.is_dummy(chunk)
        if self._value is not None:
            loss = zero_of(scores) if is_dummy else window.pull(chunk, scores)
        else:
            # A dummy is sent backward through what others are: ZeRO-3 gathers in the order in which ranks pass modules.
            loss = self._split(chunk, scores) * 0 if is_dummy else self._split(chunk, scores)
        value = loss.new_zeros(())
        if chunk == window.order[-1]:
            value = self._value if self._value is not None else self._metrics()
        # What is reported is the stock loss; what is sent backward is this chunk's part.
        reported: Tensor = _Reported.apply(loss, value.to(loss))  # type: ignore[no-untyped-call]
        return reported

    def _split(self, chunk: int, scores: Scores) -> Tensor:
        window, parts = self.window, []
        window.start_buffers(scores)
        for e, live in window.with_live_rows(chunk, scores).items():
            with trl_stock.without_trace(self.trainer):
                parts.append(self.stock_loss(window.entries[e].inputs, live)[0])
        if not window.batches.is_dummy(chunk):
            window.store(chunk, scores)
        return torch.stack(parts).sum()

    def _metrics(self) -> Tensor:
        """The stock loss with its metrics, once for each stock micro-batch, in order, over all ranks."""
        window = self.window
        window.clear_unseen()
        ends = self.trainer.accelerator.sync_gradients
        losses = []
        for index, entry in enumerate(window.entries):
            leaves = leaves_of(entry.buffers)
            with torch.enable_grad(), self._at(index, ends):  # with a graph, as stock calls it
                loss = self.stock_loss(entry.inputs, leaves)[0]
            if self._listen is not None:
                self._listen(loss)
            free(loss, leaves)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _at(self, index: int, ends_window: bool) -> Any:
        last = ends_window and index == len(self.window.entries) - 1
        return trl_stock.as_if_synchronising(self.trainer, last)


class _Reported(torch.autograd.Function):
    """The second value with the first one's gradient; a sum of differences would not survive an infinite loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def leaves_of(buffers: Values) -> list[Tensor | None]:
    """Copies that gradients can be taken with respect to."""
    return [None if buffer is None else buffer.detach().clone().requires_grad_() for buffer in buffers]


def free(loss: Tensor, leaves: Sequence[Tensor | None]) -> None:
    """Has a graph let go of what it has saved, which hooks on saved tensors of the user's may hold in a circle."""
    gradients_of(loss, leaves)


def gradients_of(loss: Tensor, leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients at leaves; zeros where the loss does not depend on one."""
    present = [leaf for leaf in leaves if leaf is not None]
    found: Sequence[Tensor | None] = [None] * len(present)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, present, allow_unused=True)
    each = iter(torch.zeros_like(p) if f is None else f for p, f in zip(present, found, strict=True))
    return [None if leaf is None else next(each) for leaf in leaves]
