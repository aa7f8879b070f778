"""Where the configuration comes from: explicit argument, variables, file, off."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker
from torch import Tensor, nn

from lightning_padmin import PadMinConfig, run
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.cli import launch
from lightning_padmin.config import Resolved, accelerate_file, environment, launch_arguments, read_variables, resolve
from lightning_padmin.config.options import option_names
from lightning_padmin.errors import BatchError, ConfigError
from lightning_padmin.integrations.accelerate import PadMin

CONFIG = PadMinConfig(token_budget=support.BUDGET, launch_cost=4)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    monkeypatch.setattr(environment, "_said", set())
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def on(tmp_path: Path) -> Path:
    return written(tmp_path / "on.yaml", {"enabled": True, "token_budget": 100, "max_rows": 3})


def written(file: Path, section: Any) -> Path:
    file.write_text(f"distributed_type: 'NO'\ndynamo_config:\n  padmin: {json.dumps(section)}\n")
    return file


def with_file(file: Path, **more: str) -> Mapping[str, str]:
    return {"PADMIN_CONFIG_FILE": str(file), **more}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = support.TinyLM()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        return support.reduce_loss(support.token_losses(self.inner(input_ids), labels), labels, "token-mean")


# --- resolution


def test_nothing_is_off() -> None:
    assert resolve(environment={}) == Resolved(
        PadMinConfig(enabled=False), "no explicit argument, no PADMIN_* variable"
    )


def test_the_file_switches_on_and_is_named(on: Path) -> None:
    resolved = resolve(environment=with_file(on))
    assert resolved.config == PadMinConfig(token_budget=100, max_rows=3)
    assert str(resolved) == f"padmin: on, token_budget=100 (dynamo_config.padmin in {on})"


def test_variables_go_over_the_file_option_by_option(on: Path) -> None:
    resolved = resolve(environment=with_file(on, PADMIN_TOKEN_BUDGET="50"))
    assert (resolved.config.token_budget, resolved.config.max_rows) == (50, 3)
    assert resolved.source == f"environment variable PADMIN_TOKEN_BUDGET, then dynamo_config.padmin in {on}"


def test_names_that_are_no_options_are_left_alone() -> None:
    assert read_variables({"PADMIN_CACHE": "/somewhere", "PADMIN_RESULTS": "a.json", "OTHER": "1"}) == {}


def test_an_explicit_argument_goes_over_both(on: Path) -> None:
    resolved = resolve(CONFIG, with_file(on, PADMIN_TOKEN_BUDGET="50"))
    assert resolved == Resolved(CONFIG, "explicit argument")


def test_an_explicit_false_wins_over_true_below(on: Path) -> None:
    off = PadMinConfig(enabled=False)
    assert not resolve(off, with_file(on, PADMIN_ENABLED="true")).config.enabled
    resolved = resolve(environment=with_file(on, PADMIN_ENABLED="false"))
    assert not resolved.config.enabled
    assert str(resolved).startswith("padmin: off (environment variable PADMIN_ENABLED")


def test_true_in_a_variable_wins_over_false_in_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "off.yaml", {"enabled": False, "token_budget": 100})
    assert not resolve(environment=with_file(file)).config.enabled
    assert not resolve(environment=with_file(file, PADMIN_TOKEN_BUDGET="50")).config.enabled
    assert resolve(environment=with_file(file, PADMIN_ENABLED="true")).config == PadMinConfig(token_budget=100)


VALUES = {
    "enabled": [("true", True), ("False", False), ("1", True), ("0", False)],
    "token_budget": [("8192", 8192), ("none", None)],
    "mode": [("split", "split")],
    "check": [("off", "off"), ("audit", "audit")],
    "audit_every": [("100", 100), ("0", 0)],
    "loss_reduction": [("sum", "sum"), ("sequence-mean", "row-mean")],
    "normalize": [("global", "global")],
    "label_shift": [("0", 0), ("None", None)],
    "ignore_index": [("-1", -1)],
    "pad_token_id": [("7", 7), ("null", None)],
    "mask_key": [("mask", "mask"), ("1", "1")],
    "labels_key": [("targets", "targets"), ("none", None)],
    "decoder_mask_key": [("dmask", "dmask")],
    "loss_mask_key": [("loss_mask", "loss_mask"), ("none", None)],
    "batch_schema": [('{"segments": "position"}', None)],
    "call_masks": [('{"encoder": "~mask"}', {"encoder": "~mask"})],
    "static_keys": [("a, b", ("a", "b"))],
    "pad_to_multiple_of": [("8", 8)],
    "max_rows": [("3", 3)],
    "cost_multiple_of": [("256", 256)],
    "layout": [("auto", "auto")],
    "shape_buckets": [("16", 16), ("none", None)],
    "attention_width": [("4096", 4096)],
    "launch_cost": [("0", 0), ("measured", "measured")],
    "method": [("greedy", "greedy")],
    "log_prefix": [("p/", "p/")],
    "log_reduce": [('{"rows": "sum"}', {"rows": "sum"})],
}


def test_every_option_has_a_variable() -> None:
    assert set(VALUES) == set(option_names())


@pytest.mark.parametrize(("name", "text", "value"), [(n, t, v) for n, pairs in VALUES.items() for t, v in pairs])
def test_a_variable_is_parsed_and_can_be_passed_on(name: str, text: str, value: Any) -> None:
    variables = {f"PADMIN_{name.upper()}": text}
    found = PadMinConfig(**read_variables(variables))
    if name == "batch_schema":
        assert found.fields["segments"].kind == "position"
    else:
        assert getattr(found, name) == value
    passed_on = environment.as_variables(read_variables(variables))
    assert PadMinConfig(**read_variables(passed_on)) == found


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PADMIN_TOKEN_BUGET": "8"}, "PADMIN_TOKEN_BUGET='8'.*nearest is PADMIN_TOKEN_BUDGET"),
        ({"PADMIN_ENABLED": "yes"}, "PADMIN_ENABLED='yes': expected true or false"),
        ({"PADMIN_ENABLED": ""}, "PADMIN_ENABLED='': expected true or false"),
        ({"PADMIN_TOKEN_BUDGET": "8k"}, "PADMIN_TOKEN_BUDGET: token_budget='8k'"),
        ({"PADMIN_TOKEN_BUDGET": "0"}, "PADMIN_TOKEN_BUDGET: token_budget=0"),
        ({"PADMIN_MODE": "splt"}, "PADMIN_MODE: mode='splt'"),
        ({"PADMIN_LOG_REDUCE": "rows"}, "PADMIN_LOG_REDUCE='rows': expected JSON"),
        ({"PADMIN_CONFIG_FILE": "/nowhere.yaml"}, "PADMIN_CONFIG_FILE='/nowhere.yaml': there is no such file"),
    ],
)
def test_a_variable_that_cannot_be_read_is_an_error(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(environment=variables)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"token_buget": 8}, "on.yaml: PadMinConfig has no option 'token_buget'.*token_budget"),
        ({"enabled": "true"}, "on.yaml: enabled='true': expected True or False"),
        ({"enabled": 1}, "on.yaml: enabled=1: expected True or False"),
        (True, "on.yaml: True: expected options"),
        (None, "on.yaml: dynamo_config.padmin is empty"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, section: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(environment=with_file(written(tmp_path / "on.yaml", section)))


def test_a_section_that_is_spelled_nearly_right_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "on.yaml"
    file.write_text("dynamo_config: {pad_min: {enabled: true}}")
    with pytest.raises(ConfigError, match="'pad_min'; did you mean 'padmin'"):
        resolve(environment=with_file(file))


@pytest.mark.parametrize("text", ["a: [", "- 1"])
def test_a_file_that_is_no_mapping_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "on.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"on\.yaml"):
        resolve(environment=with_file(file))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("python /bin/accelerate launch --cpu x.py", ["--cpu", "x.py"]),
        ("/bin/accelerate-launch x.py", ["x.py"]),
        ("python -m accelerate.commands.launch x.py", ["x.py"]),
        ("python /site-packages/accelerate/commands/launch.py x.py", ["x.py"]),
        ("python -m accelerate.commands.accelerate_cli launch x.py", ["x.py"]),
        ("accelerate config", None),
        ("python train.py accelerate launch", None),
        ("bash", None),
        ("", None),
    ],
)
def test_which_command_lines_are_the_launcher(command: str, arguments: list[str] | None) -> None:
    assert launch_arguments(command.split()) == arguments


def test_the_file_is_found_as_the_launcher_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.config import config_args

    default = written(tmp_path / "default.yaml", {})
    monkeypatch.setattr(config_args, "default_config_file", str(default))
    found = accelerate_file.config_file_of
    assert found(["--config_file", "a.yaml", "x.py"], tmp_path) == tmp_path / "a.yaml"
    assert found(["--config-file", "/b.yaml", "--num_processes", "2", "x.py", "--config_file", "no"], tmp_path) == Path(
        "/b.yaml"
    )
    assert found(["x.py"], tmp_path) == default
    assert found(["--cpu", "x.py"], tmp_path) is None
    with pytest.raises(ConfigError, match=r"launch --newer x\.py` reads is not known here: set PADMIN_CONFIG_FILE"):
        found(["--newer", "x.py"], tmp_path)


# --- the object


def test_the_source_is_printed_once(accelerator: Accelerator, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        PadMin(accelerator, CONFIG)
    assert capsys.readouterr().out == "padmin: on, token_budget=24 (explicit argument)\n"


def test_off_without_any_configuration(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "launcher_file", lambda: None)
    pad, batch = PadMin(accelerator), object()
    assert not pad.enabled
    (step,) = pad.micro_batches(batch, nn.Linear(1, 1))
    micro, weight = step
    assert micro is batch
    assert weight == 1.0
    assert pad.metrics() == {}


def prepared(accelerator: Accelerator) -> tuple[Any, dict[str, Tensor]]:
    return accelerator.prepare_model(Model().double()), support.make_batch(support.LENGTHS)


def test_a_loop_that_was_left_is_refused_at_the_next(accelerator: Accelerator) -> None:
    (model, batch), pad = prepared(accelerator), PadMin(accelerator, CONFIG)
    for micro, weight in pad.micro_batches(batch, model):
        accelerator.backward(model(**micro) * weight)
        break
    with pytest.raises(BatchError, match="left after 1 of 5 micro-batches"):
        pad.micro_batches(batch, model)
    for micro, weight in pad.micro_batches(batch, model):
        accelerator.backward(model(**micro) * weight)
    assert pad.stats.batches == 1


def test_a_loop_can_be_given_up(accelerator: Accelerator) -> None:
    (model, batch), pad = prepared(accelerator), PadMin(accelerator, CONFIG)
    next(pad.micro_batches(batch, model))
    pad.discard()
    pad.micro_batches(batch, model)


def test_two_models_at_once_are_refused(accelerator: Accelerator) -> None:
    (model, batch), pad = prepared(accelerator), PadMin(accelerator, CONFIG)
    other = accelerator.prepare_model(Model().double())
    first = pad.micro_batches(batch, model)
    next(first)
    with pytest.raises(BatchError, match=r"another model \(Model\): loops of two models"):
        pad.micro_batches(batch, other)


def test_two_models_one_after_the_other_are_fine(accelerator: Accelerator) -> None:
    (model, batch), pad = prepared(accelerator), PadMin(accelerator, CONFIG)
    for each in (model, accelerator.prepare_model(Model().double())):
        for micro, weight in pad.micro_batches(batch, each):
            accelerator.backward(each(**micro) * weight)
    assert pad.stats.batches == 2


def test_backward_twice_for_one_micro_batch_is_refused(accelerator: Accelerator) -> None:
    (model, batch), pad = prepared(accelerator), PadMin(accelerator, CONFIG)

    def twice() -> None:
        for micro, weight in pad.micro_batches(batch, model):
            accelerator.backward(model(**micro) * weight)
            accelerator.backward(model(**micro) * weight)

    with pytest.raises(BatchError, match="backward was called twice for micro-batch 1 of 5"):
        twice()
    pad.discard()
    assert "backward" not in vars(accelerator)


def test_no_backward_for_a_micro_batch_is_refused(accelerator: Accelerator) -> None:
    (model, batch), pad = prepared(accelerator), PadMin(accelerator, CONFIG)

    def never() -> None:
        for micro, weight in pad.micro_batches(batch, model):
            (model(**micro) * weight).backward()

    with pytest.raises(BatchError, match="backward was not called for micro-batch 1 of 5"):
        never()
    assert "backward" not in vars(accelerator)


def test_batch_normalization_in_training_mode_is_refused(accelerator: Accelerator) -> None:
    pad, batch = PadMin(accelerator, CONFIG), support.make_batch(support.LENGTHS)
    with pytest.raises(ArchitectureError, match="BatchNorm1d in training mode"):
        pad.micro_batches(batch, nn.Sequential(nn.BatchNorm1d(3)))


def test_what_is_no_accelerator_model_or_mode_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(ConfigError, match="accelerator=3"):
        PadMin(3, CONFIG)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a PadMinConfig"):
        PadMin(accelerator, {"token_budget": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode='joint'"):
        PadMin(accelerator, PadMinConfig(mode="joint"))
    with pytest.raises(ConfigError, match="model=int"):
        PadMin(accelerator, CONFIG).micro_batches({}, 3)  # type: ignore[arg-type]


def test_counters_are_part_of_a_checkpoint(accelerator: Accelerator, tmp_path: Path) -> None:
    (model, batch), pad = prepared(accelerator), PadMin(accelerator, CONFIG)
    accelerator.register_for_checkpointing(pad)
    for micro, weight in pad.micro_batches(batch, model):
        accelerator.backward(model(**micro) * weight)
    accelerator.save_state(str(tmp_path))
    kept, pad.stats = pad.stats, type(pad.stats)()
    accelerator.load_state(str(tmp_path))
    assert pad.stats == kept
    assert kept.micro_batches == 5


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, Any]]] = []

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        assert step is not None
        self.rows.append((step, values))


def test_trackers_get_metrics_once_per_step(accelerator: Accelerator) -> None:
    memory = Memory()
    accelerator = Accelerator(cpu=True, log_with=memory, gradient_accumulation_steps=2)
    accelerator.init_trackers("any")
    (model, batch), pad = prepared(accelerator), PadMin(accelerator, CONFIG)
    for step in range(4):
        with accelerator.accumulate(model):
            for micro, weight in pad.micro_batches(batch, model):
                accelerator.backward(model(**micro) * weight)
        if accelerator.sync_gradients:
            accelerator.log(pad.metrics(), step)
    assert [step for step, _ in memory.rows] == [1, 3]
    assert all(row["padmin/micro_batches"] == 10 for _, row in memory.rows)
    assert pad.metrics() == {}


def test_the_model_is_not_kept_alive(accelerator: Accelerator) -> None:
    pad, model = PadMin(accelerator, CONFIG), Model().double()
    for micro, weight in pad.micro_batches(support.make_batch(support.LENGTHS), model):
        accelerator.backward(model(**micro) * weight)
    gone = weakref.ref(model)
    del model, micro
    gc.collect()
    assert gone() is None


# --- what `padmin launch` does before it launches


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        ({"padmin_config": {"token_buget": 3}}, "padmin_config in a.yaml: PadMinConfig has no option 'token_buget'"),
        ({"padmin_config": None}, "padmin_config is empty"),
        ({"padmin_config": {"enabled": True}, "dynamo_config": {"padmin": {}}}, "leave one of them out"),
    ],
)
def test_sections_that_launch_refuses(whole: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        launch.take_section(whole, Path("a.yaml"))


def test_run_is_put_in_front_of_the_script() -> None:
    from accelerate.commands.launch import launch_command_parser

    def inserted(*arguments: str) -> tuple[bool, list[str]]:
        options = launch_command_parser().parse_args(list(arguments))
        launch.insert_run(options)
        return bool(options.module), [options.training_script, *options.training_script_args]

    assert inserted("x.py", "--a", "-m") == (True, ["lightning_padmin.run", "x.py", "--a", "-m"])
    assert inserted("-m", "pkg.train", "--a") == (True, ["lightning_padmin.run", "-m", "pkg.train", "--a"])
    assert inserted("-m", "lightning_padmin.run", "x.py") == (True, ["lightning_padmin.run", "x.py"])
    assert inserted("--no_python", "x") == (False, ["x"])


# --- what `lightning_padmin.run` does to trainers


def test_trainers_get_the_mixin_that_goes_with_them() -> None:
    from transformers import Trainer

    from lightning_padmin.integrations.transformers import PadMinTrainerMixin

    class Mine(Trainer):
        pass

    class Ours(PadMinTrainerMixin, Trainer):
        pass

    class OursToo(Ours):
        pass

    made = run.with_mixin(Mine, CONFIG)
    assert made.__mro__[1:4] == (PadMinTrainerMixin, Mine, Trainer)
    assert made.__name__ == "Mine"
    for kind in (Ours, OursToo, made):
        assert run.with_mixin(kind, CONFIG) is kind


def test_trainers_of_trl_get_theirs() -> None:
    trl = pytest.importorskip("trl")
    from lightning_padmin.integrations.trl.mixin import PadMinGRPOTrainer, PadMinMixin

    assert run.with_mixin(trl.GRPOTrainer, CONFIG).__mro__[1:3] == (PadMinMixin, trl.GRPOTrainer)
    assert run.with_mixin(PadMinGRPOTrainer, CONFIG) is PadMinGRPOTrainer


@pytest.mark.parametrize("arguments", [[], ["-m"], ["nowhere.py"]])
def test_run_says_how_it_is_used(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage"):
        run.main(arguments)


def test_run_names_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADMIN_TOKEN_BUGET", "3")
    with pytest.raises(SystemExit, match="PADMIN_TOKEN_BUGET"):
        run.main(["x.py"])
