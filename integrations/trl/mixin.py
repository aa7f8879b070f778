"""`PadMinMixin`: padding removed inside of TRL's trainers: GRPO, RLOO, SFT, DPO, Reward, KTO.

    class MyTrainer(PadMinMixin, GRPOTrainer): ...
    trainer = MyTrainer(..., padmin=PadMinConfig(token_budget=16_384))

Trainers that learn from a dataset run their backbone in chunks inside of their own loss (`offline`). For online
ones (GRPO, RLOO) `mode` of the configuration says how:

    split     reference, old-policy and training passes in chunks; each chunk of the training pass is sent backward by
              itself through the trainer's own loss; rows of the whole accumulation window are regrouped together
    joint     the same passes in chunks that keep one graph per stock micro-batch
    replay    split for losses that couple rows: log-probs first, the stock loss on them, then chunk by chunk again
    auto      split where the trainer's own loss separates over rows (checked on the first window that can tell, and on
              later ones that show something new), else replay; joint for the balance loss of experts and for losses
              that run the model themselves

The mixin only passes calls on to an engine, `online.Engine` or `offline.OfflineEngine`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_padmin.config import PadMinConfig, resolve_for_class
from lightning_padmin.integrations.common import Session
from lightning_padmin.stats import PaddingStats

_NEEDS = "trl>=0.29"
try:
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    from lightning_padmin.integrations.trl.offline import OfflineEngine
    from lightning_padmin.integrations.trl.online import Engine
    from lightning_padmin.integrations.trl.support import is_offline, refuse_class
except Exception as error:  # an old TRL beside new packages fails in any way
    found = getattr(sys.modules.get("trl"), "__version__", None)
    try:
        found = found or importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"PadMinMixin needs TRL: pip install '{_NEEDS}'") from error
    raise ImportError(
        f"trl {found} is installed, and PadMinMixin needs {_NEEDS}: it cannot be imported ({error}). "
        f"pip install -U '{_NEEDS}'"
    ) from error


class SwitchedOff:
    """With `enabled=False`: other ranks hear of it, and all else is the trainer's own.

    Args:
        session: of the mixin.

    Attributes:
        session: the same.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def begin(self) -> None:
        """Nothing is kept between steps."""

    def step_in_place_of(self, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The stock training step."""
        return stock

    def metrics(self) -> dict[str, float | int]:
        """None."""
        return {}


class PadMinMixin:
    """Put before a trainer of TRL; takes the keyword `padmin`, a `PadMinConfig`.

    Without it: `PADMIN_*` variables, then the file of `accelerate launch`, then the defaults.

    Gradients, optimizer steps and logged metrics are those of the trainer without it.

    Raises:
        ConfigError: the trainer, its arguments or its version are not supported; names the fix.
        ArchitectureError: the model's outputs for a row depend on the rows that run with it.
    """

    _padmin: Engine | OfflineEngine | SwitchedOff | None = None  # while the stock constructor runs

    def __init__(self, *args: Any, padmin: PadMinConfig | None = None, **options: Any) -> None:
        config = resolve_for_class(padmin)
        if config.enabled:
            refuse_class(type(self))
        super().__init__(*args, **options)
        session = Session("PadMinMixin", config, is_main=lambda: self.accelerator.is_main_process)  # type: ignore[attr-defined]
        session.announce()
        session.audits.prove_in(self.args.output_dir)  # type: ignore[attr-defined]
        if not config.enabled:
            self._padmin = SwitchedOff(session)
        elif is_offline(type(self)):
            self._padmin = OfflineEngine(self, session)
        else:
            self._padmin = Engine(self, session, super()._get_per_token_logps_and_entropies)  # type: ignore[misc]

    @property
    def padding_stats(self) -> PaddingStats:
        """Counts of this rank's training passes so far."""
        return PaddingStats() if self._padmin is None else self._padmin.session.stats

    def train(self, *args: Any, **options: Any) -> Any:
        """Stock, from the beginning of an accumulation window, wherever an earlier training was given up."""
        stock = super().train  # type: ignore[misc]
        if self._padmin is None:
            return stock(*args, **options)
        self._padmin.begin()
        self._padmin.session.kept.begin()
        with self._padmin.session.telling_others():
            return stock(*args, **options)

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """The stock batches of an accumulation window; looked at where parameters are sharded."""
        found = super().get_batch_samples(*args, **options)  # type: ignore[misc]
        if self._padmin is not None:  # by now a checkpoint is loaded
            self._padmin.session.kept.resume(self.state)  # type: ignore[attr-defined]
        if isinstance(self._padmin, OfflineEngine):
            self._padmin.before_window(*found)
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One stock step: its share of the window's chunks."""
        if self._padmin is not None:  # by now every rank has made its trainer
            self._padmin.session.agree()
        stock = super().training_step  # type: ignore[misc]
        step = stock if self._padmin is None else self._padmin.step_in_place_of(stock)
        loss: Tensor = step(model, inputs, num_items_in_batch)
        if self._padmin is not None:
            self._padmin.session.kept.keep(self.state)  # type: ignore[attr-defined]
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        """In chunks under the token budget; the same values, 0 where the completion is masked."""
        stock = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        score = self._padmin.scores if isinstance(self._padmin, Engine) else stock
        scores: tuple[Any, ...] = score(*args, **options)
        return scores

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Adds `padmin/*` to what training logs."""
        if self._padmin is not None and "loss" in logs:
            logs.update(self._padmin.metrics())
        super().log(logs, *args, **options)  # type: ignore[misc]


class PadMinGRPOTrainer(PadMinMixin, GRPOTrainer):
    """GRPO with padding removed."""


class PadMinRLOOTrainer(PadMinMixin, RLOOTrainer):
    """RLOO with padding removed."""


__all__ = ["PadMinGRPOTrainer", "PadMinMixin", "PadMinRLOOTrainer"]
