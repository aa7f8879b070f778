"""`PadMinArguments`: the options as flat `padmin_*` fields, for parsers that make a command line of dataclasses.

    parser = TrlParser((ScriptArguments, GRPOConfig, PadMinArguments))          # or HfArgumentParser
    script, arguments, padmin = parser.parse_args_and_config()
    trainer = MyTrainer(..., args=arguments, padmin=padmin.to_config())

Such a parser puts the fields of all its dataclasses under one roof, and those of TRL and transformers have names like
`pad_to_multiple_of` too: hence the prefix. It takes `str`, numbers, `bool`, literals and lists of them: hence the plain
types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_padmin.config.environment import BY_ITS_CLASS, is_main_process, parse_option, resolve, say_once
from lightning_padmin.config.options import PadMinConfig
from lightning_padmin.errors import ConfigError

_PREFIX = "padmin_"
_OPTIONS = {field.name: field for field in dataclasses.fields(PadMinConfig)}
_NOTES = {
    "batch_schema": " As JSON.",
    "log_reduce": " As JSON.",
    "call_masks": " As JSON.",
    "loss_reduction": " A function can be given in code alone.",
}


def _like(name: str) -> Any:
    """A field that is not given, with the explanation that the option has in `PadMinConfig`."""
    option = _OPTIONS[name]
    about = option.metadata["help"] + _NOTES.get(name, "")
    if option.default is not dataclasses.MISSING:
        about += f" Default: {option.default}."
    return dataclasses.field(default=None, metadata={"help": about})


@dataclass(kw_only=True)
class PadMinArguments:
    """Every option of `PadMinConfig` as `padmin_<name>`; None means "not given".

    Options that may be none are text: `"8192"` or `"none"`. Files in YAML may give integers, lists and mappings.

    Example:
        >>> PadMinArguments(padmin_token_budget="8192").to_config().token_budget
        8192
    """

    padmin_enabled: bool | None = _like("enabled")
    padmin_token_budget: str | None = _like("token_budget")
    padmin_mode: Literal["auto", "split", "joint", "replay"] | None = _like("mode")
    padmin_layout: Literal["pad", "pack", "auto"] | None = _like("layout")
    padmin_check: Literal["audit", "first-batch", "off"] | None = _like("check")
    padmin_audit_every: int | None = _like("audit_every")
    padmin_loss_reduction: Literal["token-mean", "row-mean", "sequence-mean", "sum"] | None = _like("loss_reduction")
    padmin_normalize: Literal["rank", "global"] | None = _like("normalize")
    padmin_label_shift: str | None = _like("label_shift")
    padmin_ignore_index: int | None = _like("ignore_index")
    padmin_pad_token_id: str | None = _like("pad_token_id")
    padmin_mask_key: str | None = _like("mask_key")
    padmin_labels_key: str | None = _like("labels_key")
    padmin_decoder_mask_key: str | None = _like("decoder_mask_key")
    padmin_loss_mask_key: str | None = _like("loss_mask_key")
    padmin_batch_schema: str | None = _like("batch_schema")
    padmin_static_keys: list[str] | None = _like("static_keys")
    padmin_pad_to_multiple_of: int | None = _like("pad_to_multiple_of")
    padmin_shape_buckets: str | None = _like("shape_buckets")
    padmin_max_rows: str | None = _like("max_rows")
    padmin_cost_multiple_of: str | None = _like("cost_multiple_of")
    padmin_attention_width: str | None = _like("attention_width")
    padmin_launch_cost: str | None = _like("launch_cost")
    padmin_method: Literal["optimal", "greedy"] | None = _like("method")
    padmin_log_prefix: str | None = _like("log_prefix")
    padmin_log_reduce: str | None = _like("log_reduce")
    padmin_call_masks: str | None = _like("call_masks")

    def to_config(self) -> PadMinConfig:
        """The configuration: options given here, then `PADMIN_*`, then the file of `accelerate launch`, then defaults.

        Raises:
            ConfigError: a value that cannot be read or is out of range; names the field.
        """
        given: dict[str, Any] = {}
        for name in _OPTIONS:
            value = getattr(self, _PREFIX + name)
            if value is not None:
                given[name] = _parsed(name, value)
        resolved = resolve(arguments=given, otherwise=BY_ITS_CLASS)
        if not resolved.source.startswith(BY_ITS_CLASS.source):
            say_once(resolved, is_main_process())
        return resolved.config


def _parsed(name: str, value: Any) -> Any:
    field = _PREFIX + name
    if name == "enabled" and not isinstance(value, bool):
        raise ConfigError(f"{field}={value!r}: expected true or false")
    if isinstance(value, str):
        return parse_option(name, value, field)
    # A file in YAML gives mappings and lists, and a boolean for a bare `off`.
    return dict(value) if isinstance(value, Mapping) else value


__all__ = ["PadMinArguments"]
