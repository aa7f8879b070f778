"""What the mixin refuses, with the words it does so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
import transformers
import trl
import trl_cases as cases

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import BatchError, ConfigError
from lightning_padmin.integrations.trl import hooks as trl_stock
from lightning_padmin.integrations.trl import images as trl_images
from lightning_padmin.integrations.trl import support as trl_refusals
from lightning_padmin.integrations.trl.mixin import PadMinGRPOTrainer, PadMinMixin, PadMinRLOOTrainer


def test_other_trainers() -> None:
    kind = type("Mine", (PadMinMixin, transformers.Trainer), {})
    with pytest.raises(ConfigError, match="Mine: PadMinMixin supports DPOTrainer, GRPOTrainer, KTOTrainer"):
        kind(model=None)


def test_no_trainer_at_all_and_the_wrong_order() -> None:
    with pytest.raises(ConfigError, match="PadMinMixin supports DPOTrainer"):
        type("Mine", (PadMinMixin,), {})()
    with pytest.raises(TypeError, match="padmin"):  # the mixin comes first, or the trainer does not know the keyword
        type("Mine", (cases.GRPOTrainer, PadMinMixin), {})(model=None, padmin=PadMinConfig())


def test_ready_made_classes() -> None:
    for kind in (PadMinGRPOTrainer, PadMinRLOOTrainer):
        trl_refusals.refuse_class(kind)


def test_configuration_of_another_type() -> None:
    with pytest.raises(ConfigError, match="expected a PadMinConfig"):
        PadMinGRPOTrainer(model=None, padmin={"token_budget": 5})


def test_another_algorithm() -> None:
    with pytest.raises(ConfigError, match=r"normalize='global': .* the trainer's own"):
        cases.build(cases.OURS, {}, cases.padmin(normalize="global"))


@pytest.mark.parametrize("options", [{"shape_buckets": 8}, {"launch_cost": "measured"}])
def test_options_without_a_meaning(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}=.* is not for trainers of TRL"):
        cases.build(cases.OURS, {}, cases.padmin(**options))


def test_a_changed_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Any, model: Any, tokens: Any) -> None: ...

    monkeypatch.setattr(cases.GRPOTrainer, trl_stock.LOG_PROBS, changed)
    words = rf"trl {trl.__version__}: GRPOTrainer\.{trl_stock.LOG_PROBS} takes .*'tokens'.*checked with 1\.16\.0"
    with pytest.raises(ConfigError, match=words):
        PadMinGRPOTrainer(model=None, reward_funcs=None)
    monkeypatch.setattr(cases.GRPOTrainer, trl_stock.LOG_PROBS, None)
    monkeypatch.delattr(cases.GRPOTrainer, trl_stock.LOG_PROBS)
    with pytest.raises(ConfigError, match=rf"GRPOTrainer\.{trl_stock.LOG_PROBS} is gone"):
        PadMinGRPOTrainer(model=None, reward_funcs=None)


def test_an_old_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "0.28.9")
    with pytest.raises(ConfigError, match=r"trl 0\.28\.9 is installed, and PadMinMixin needs trl>=0\.29"):
        PadMinGRPOTrainer(model=None, reward_funcs=None)


def test_images_of_an_old_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "1.15.2")
    with pytest.raises(BatchError, match=r"pixel_values: how releases before TRL 1\.16 hand images over"):
        trl_images.by_row({"pixel_values": torch.zeros(2, 3), "num_images": [1, 1]})
    assert trl_images.by_row({"pixel_values": None}) == {}


def test_a_missing_attribute() -> None:
    with pytest.raises(ConfigError, match=r"SimpleNamespace\._buffered_inputs is gone"):
        trl_stock.check_attributes(SimpleNamespace())


def trainer(**changes: Any) -> Any:
    """What `refuse_trainer` looks at."""
    accelerator = {"parallelism_config": None, "distributed_type": SimpleNamespace(value="NO")}
    parts = {"args": {"n_gpu": 1, "use_liger_kernel": False}, "accelerator": accelerator, "model": {}}
    spaces = {name: SimpleNamespace(**(values | changes.get(name, {}))) for name, values in parts.items()}
    return SimpleNamespace(**spaces, _buffered_inputs=None, _step=0, _metrics={})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"args": {"n_gpu": 2}}, "n_gpu=2: DataParallel .* one process per device"),
        ({"args": {"use_liger_kernel": True}}, "use_liger_kernel=True: .* Set it to False"),
        ({"accelerator": {"parallelism_config": SimpleNamespace(cp_enabled=True)}}, "parallelism_config with cp"),
        ({"accelerator": {"parallelism_config": SimpleNamespace(tp_enabled=True)}}, "parallelism_config with tp"),
        (
            {"accelerator": {"distributed_type": SimpleNamespace(value="MEGATRON_LM")}},
            "MEGATRON_LM.*FSDP and DeepSpeed",
        ),
        ({"accelerator": {"distributed_type": SimpleNamespace(value="XLA")}}, "distributed_type=XLA"),
        ({"model": {"peft_config": {"default": SimpleNamespace(is_prompt_learning=True)}}}, "virtual tokens"),
    ],
)
def test_arguments(changes: dict[str, Any], words: str) -> None:
    trl_refusals.refuse_trainer(trainer())
    with pytest.raises(ConfigError, match=words):
        trl_refusals.refuse_trainer(trainer(**changes))
