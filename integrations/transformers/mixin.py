"""`PadMinTrainerMixin`: padding removed inside of the Trainer of transformers.

    class MyTrainer(PadMinTrainerMixin, Trainer): ...
    trainer = MyTrainer(..., padmin=PadMinConfig(token_budget=16_384))

Where the loss is a sum over the number of targets of the whole accumulation window (`num_items_in_batch`, as models of
transformers take it), every partition of the window's rows is exact: they are pooled, planned together, and dealt over
the same number of steps. Where it is a mean over each batch, each batch is split by itself.

With `mode="joint"` every step runs as stock, on whole batches, and calls of models inside of it run in chunks: for
losses that couple rows, for batches of any shape, and for steps that do more than one pass. With `mode="auto"`, the
default, that is what happens where splitting would change training, or else steps run as they came.

The mixin only passes calls on to `engine.Engine`, which it keeps in one attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_padmin.config import PadMinConfig, resolve_for_class
from lightning_padmin.integrations.transformers.engine import Engine
from lightning_padmin.stats import PaddingStats


class PadMinTrainerMixin:
    """Put before `Trainer`; takes the keyword `padmin`, a `PadMinConfig`.

    Without it: `PADMIN_*` variables, then the file of `accelerate launch`, then the defaults.

    Gradients, optimizer steps, the logged loss and evaluation are those of the Trainer without it.

    Raises:
        ConfigError: the Trainer, its arguments or its version are not supported; names the fix.
        ArchitectureError: the model's outputs for a row depend on the rows that run with it.
        PadMinError: for a batch that is malformed, on all ranks, before its first forward pass.
    """

    _padmin: Engine | None = None  # while the stock constructor runs

    def __init__(self, *args: Any, padmin: PadMinConfig | None = None, **options: Any) -> None:
        config = resolve_for_class(padmin)
        super().__init__(*args, **options)
        self._padmin = Engine(self, config)

    @property
    def padding_stats(self) -> PaddingStats:
        """Counts of this rank's training passes so far."""
        return PaddingStats() if self._padmin is None else self._padmin.stats

    def train(self, *args: Any, **options: Any) -> Any:
        """Stock; ranks hear why another one has ended."""
        stock = super().train  # type: ignore[misc]
        if self._padmin is None:
            return stock(*args, **options)
        with self._padmin.training():
            return stock(*args, **options)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Stock; each batch comes with the chunks that its step is going to run."""
        if self._padmin is not None:
            self._padmin.agree()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        return (batches, num_items) if self._padmin is None else self._padmin.window(batches, num_items)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One stock step: forward and backward passes of its chunks."""
        stock = super().training_step  # type: ignore[misc]
        step = stock if self._padmin is None else self._padmin.step_in_place_of(stock)
        loss: Tensor = step(model, inputs, num_items_in_batch)
        if self._padmin is not None:
            self._padmin.keep()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Adds `padmin/*`: counts of the training passes since the last time, over all ranks, ratios last."""
        if self._padmin is not None and "loss" in logs:
            logs.update(self._padmin.metrics())
        super().log(logs, *args, **options)  # type: ignore[misc]


__all__ = ["PadMinTrainerMixin"]
