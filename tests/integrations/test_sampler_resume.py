"""LengthBucketBatchSampler inside of a Lightning fit that is stopped in the middle of an epoch and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import quiet_trainer

from lightning_padmin import LengthBucketBatchSampler
from lightning_padmin.errors import ConfigError

LENGTHS = [24, 20, 12, 12, 6, 6, 6, 6, 3, 2, 9, 17, 5, 5, 4, 1]
EPOCHS = 3


class Loader(torch.utils.data.DataLoader[Any]):
    """Keeps the sampler's place, which Lightning asks for."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.batch_sampler.state_dict()  # type: ignore[union-attr]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch_sampler.load_state_dict(state)  # type: ignore[union-attr]


class Keeps(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), list[tuple[int, list[int]]]()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch.tolist()))
        return self.layer(batch[:, None].float()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stops(pl.Callback):
    """Saves after so many batches, as a run that is interrupted has."""

    def __init__(self, after: int, path: Path) -> None:
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.after:
            trainer.save_checkpoint(self.path)


def fit(*callbacks: pl.Callback, checkpoint: Path | None = None, budget: int = 24) -> Keeps:
    module, sampler = Keeps(), LengthBucketBatchSampler(LENGTHS, budget)
    trainer = quiet_trainer(*callbacks, max_epochs=EPOCHS)
    trainer.fit(module, Loader(list(range(len(LENGTHS))), batch_sampler=sampler), ckpt_path=checkpoint)
    return module


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("stop", [1, 3, 9])
def test_every_epoch_is_the_one_without_a_stop(stop: int, tmp_path: Path) -> None:
    saved = tmp_path / "stopped.ckpt"
    whole = fit(Stops(stop, saved)).seen
    assert fit(checkpoint=saved).seen == whole[stop:]
    for epoch in range(EPOCHS):
        assert sorted(row for at, rows in whole if at == epoch for row in rows) == list(range(len(LENGTHS)))
    with pytest.raises(ConfigError, match="token_budget: 24 when it was saved, 30 here"):
        fit(checkpoint=saved, budget=30)
