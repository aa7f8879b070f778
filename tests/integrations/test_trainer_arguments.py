"""Parsers of transformers and TRL read `PadMinArguments` beside their own; mixins read `PADMIN_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")

import trl_cases as cases  # noqa: E402
from transformers import HfArgumentParser, Trainer, TrainingArguments  # noqa: E402

from lightning_padmin import PadMinArguments, PadMinConfig  # noqa: E402
from lightning_padmin.errors import ConfigError  # noqa: E402
from lightning_padmin.integrations.transformers import PadMinTrainerMixin  # noqa: E402

CONFIGS = ["GRPOConfig", "RLOOConfig", "SFTConfig", "DPOConfig", "RewardConfig", "KTOConfig"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_trl_parser(name: str, tmp_path: Path) -> None:
    kinds = (getattr(trl, name), trl.ModelConfig, PadMinArguments)
    own = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    words = ["--padmin_token_budget", "none", "--padmin_static_keys", "a", "b", "--padmin_enabled", "false"]
    trainer, _, padmin = trl.TrlParser(kinds).parse_args_and_config([*own, *words])
    assert trainer.output_dir == str(tmp_path)
    assert padmin.to_config() == PadMinConfig(token_budget=None, static_keys=("a", "b"), enabled=False)

    file = tmp_path / "config.yaml"
    file.write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\npadmin_token_budget: 640\npadmin_check: off\n"
        "padmin_log_reduce: {rows: sum}\npadmin_mode: joint\n"
    )
    more = ["--config", str(file), "--padmin_mode", "split"]
    *_, padmin = trl.TrlParser(kinds).parse_args_and_config(more)
    expected = PadMinConfig(token_budget=640, check="off", log_reduce={"rows": "sum"}, mode="split")
    assert padmin.to_config() == expected


def test_parser_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = HfArgumentParser((TrainingArguments, PadMinArguments))
    own = ["--output_dir", str(tmp_path), "--use_cpu"]
    _, padmin = parser.parse_args_into_dataclasses([*own, "--padmin_launch_cost", "9", "--padmin_enabled", "true"])
    assert padmin.to_config() == PadMinConfig(launch_cost=9)
    for bad in (["--padmin_mode", "fast"], ["--padmin_pad_to_multiple_of", "x"], ["--padmin_budget", "3"]):
        with pytest.raises((SystemExit, ValueError)):
            parser.parse_args_into_dataclasses([*own, *bad])
    capsys.readouterr()
    assert "Most slots (rows x longest row" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("kind", ["trl", "transformers"])
def test_mixins_read_variables(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Ours(PadMinTrainerMixin, Trainer):
        pass

    def make(**options: Any) -> tuple[PadMinConfig | None, bool]:
        """The configuration as the trainer has it, and whether it is switched on."""
        if kind == "trl":
            trainer = cases.build(cases.OURS, {}, **({"padmin": None} | options))
            engine = trainer._padmin
            return engine.session.config, engine.session.config.enabled
        trainer = Ours(
            model=cases.qwen2(), args=TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), **options
        )
        return trainer._padmin.config, trainer._padmin.config.enabled

    def budget(**options: Any) -> int | None:
        config, _ = make(**options)
        assert config is not None
        return config.token_budget

    assert budget() == 16_384
    monkeypatch.setenv("PADMIN_TOKEN_BUDGET", "96")
    assert budget() == 96
    assert budget(padmin=PadMinConfig(token_budget=7)) == 7
    monkeypatch.setenv("PADMIN_ENABLED", "false")
    assert not make()[1]
    assert make(padmin=PadMinConfig())[1]
    monkeypatch.setenv("PADMIN_TOKN_BUDGET", "1")
    with pytest.raises(ConfigError, match=r"PADMIN_TOKN_BUDGET='1': there is no such variable.*PADMIN_TOKEN_BUDGET"):
        make()
