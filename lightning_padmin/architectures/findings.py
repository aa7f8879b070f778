"""What is known about an architecture from its configuration and its modules, before anything runs.

A finding either refuses (regrouping rows would change what the model computes), corrects (stock left padding is wrong
for this model, and rolling mends it), or advises. Each names the reason. Configurations are read by attribute only, so
that the core needs no transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm

from lightning_padmin.architectures.noise import noise_by_width, noise_words
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ArchitectureError as ArchitectureError  # was here

Severity = Literal["refuse", "correct", "advise"]


@dataclass(frozen=True)
class Finding:
    """One fact about a model.

    Attributes:
        rule: short name, as in the README's compatibility table.
        severity: `"refuse"`, `"correct"` or `"advise"`.
        where: the module or configuration that shows it.
        reason: one sentence, with the fix where there is one.
        exact_up_to: of a refusal: rows of at most this many positions are exact all the same.
    """

    rule: str
    severity: Severity
    where: str
    reason: str
    exact_up_to: int | None = None


# Scaled rotary embeddings whose frequencies depend on the longest position of the call ("su" is longrope's old name).
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}
_COLUMNS = "numbers positions by column, whatever the mask says"
_STATE = "lets padding into its state, whatever the mask says"
_SCALE = "scales attention by column numbers, whatever the mask says"
# Families whose stock forward pass gives a left-padded row other outputs than the row alone, and why.
_LEFT_PADDING = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gpt_bigcode", "biogpt", "xglm"), _COLUMNS),
    **dict.fromkeys(("bert", "albert", "electra", "distilbert"), _COLUMNS),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian"), _COLUMNS),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), _STATE),
    **dict.fromkeys(("ministral3", "llama4_text"), _SCALE),
    "hunyuan_v1_dense": "normalises queries after their rotation, so that it sees columns",
    "switch_transformers": "counts padding in the capacity of an expert",
}
# The same only where a configuration says so: family -> options of which one is on.
_LEFT_PADDING_IF = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "nemotron_h"), ("use_bias",)),
    **dict.fromkeys(("jamba", "bamba", "falcon_h1", "granitemoehybrid"), ("mamba_proj_bias",)),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("conv_bias",)),
    "zamba2": ("add_bias_linear",),
    "deberta-v2": ("position_biased_input",),
}
# Encoders whose classification head reads the first column, which is padding in a left-padded row.
_FIRST_COLUMN = {"roberta", "xlm-roberta", "camembert", "modernbert"}
# Scans with a fused kernel that, in training, masks padding before the convolution but not behind it.
_FUSED_SCANS = {"mamba", "falcon_mamba", "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"}


def inspect_model(model: nn.Module) -> list[Finding]:
    """Findings about a model, refusals first.

    Args:
        model: any module; configurations are those of its children that have a `model_type`.
    """
    findings: dict[Finding, None] = {}
    for where, config in _configs(model):
        for finding in _of_config(where, config):
            findings[finding] = None
        if config.model_type in _FIRST_COLUMN and type(model).__name__.endswith("ForSequenceClassification"):
            reason = "its head reads the first column, which is padding in a left-padded row; rolling corrects it"
            findings[Finding("first-column", "correct", where, f"{config.model_type}: {reason}")] = None
    for name, child in model.named_modules():
        if type(child).__name__.endswith("Indexer"):
            reason = "a sparse indexer can break ties by the width of the batch; check with verify_equivalence"
            findings[Finding("sparse-indexer", "advise", f"{type(child).__name__}", reason)] = None
        if isinstance(child, _BatchNorm) and (child.training or child.running_mean is None):
            reason = (
                "its statistics depend on which rows run together; put it in eval mode with running statistics or "
                "replace it (LayerNorm)"
            )
            findings[Finding("batch-norm", "refuse", f"{name} ({type(child).__name__})", reason)] = None
        noise = noise_by_width(child)
        if noise is not None:
            where = name or type(child).__name__
            findings[Finding("embedding-noise", "refuse", where, noise_words("it", noise))] = None
    order = {"refuse": 0, "correct": 1, "advise": 2}
    return sorted(findings, key=lambda finding: order[finding.severity])


def refuse_architecture(model: nn.Module) -> list[Finding]:
    """The findings that do not refuse.

    Raises:
        ArchitectureError: the model cannot be regrouped; the message names every reason.
    """
    findings = inspect_model(model)
    refusals = [finding for finding in findings if finding.severity == "refuse"]
    if refusals:
        raise ArchitectureError("; ".join(f"{finding.where}: {finding.reason}" for finding in refusals))
    return findings


def row_limit(findings: Iterable[Finding]) -> int | None:
    """The longest row for which refusals that depend on lengths do not hold; None where there is no such refusal."""
    return min((each.exact_up_to for each in findings if each.exact_up_to is not None), default=None)


def batch_statistics(model: nn.Module) -> str | None:
    """What is wrong with a module whose result depends on which rows run together, or on how often it runs.

    Batch normalization in training mode or without running statistics, other running statistics, spectral norm; noise
    that depends on the width of the call. A module's mode can change at any time, and so can its hooks, so adapters ask
    before every batch. None: nothing.
    """
    for name, child in model.named_modules():
        noise = noise_by_width(child) if child.training else None
        if noise is not None:
            return noise_words(name or "the model", noise)
        batch_norm = isinstance(child, _BatchNorm) and (child.training or child.running_mean is None)
        counting = isinstance(child, _NormBase) and child.training and child.track_running_stats
        if batch_norm or counting or (isinstance(child, _SpectralNorm) and child.training):
            mode = "in training mode" if child.training else "without running statistics"
            return (
                f"{name or 'the model'} is a {type(child).__name__} {mode}: what it does depends on which rows run "
                "together, or how often it runs, so a split batch trains something else. Put it in eval mode (with "
                "running statistics), replace it (LayerNorm), or use enabled=False"
            )
    return None


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether some configuration inside of the model says so."""
    configs = (getattr(child, "config", None) for child in model.modules())
    return any(getattr(config, "is_encoder_decoder", False) is True for config in configs)


def has_experts(model: nn.Module) -> bool:
    """Whether some configuration inside of the model routes tokens to experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    counts = (getattr(config, name, None) for _, config in _configs(model) for name in names)
    return any(isinstance(count, int) and count > 1 for count in counts)


def scan_chunk(model: nn.Module) -> int | None:
    """Positions per chunk of a chunked scan (Mamba2 and its hybrids), which pads inside to a multiple of it."""
    for _, config in _configs(model):
        for name in ("mamba_chunk_size", "chunk_size"):
            value = getattr(config, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                return value
    return None


def with_scan_chunk(config: PadMinConfig, model: nn.Module) -> PadMinConfig:
    """The options, with `cost_multiple_of` as the model has it where it is left open."""
    if config.cost_multiple_of is not None:
        return config
    return replace(config, cost_multiple_of=scan_chunk(model))


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and configuration of every module that has one, nested ones (text, decoder) included, each once."""
    seen: set[int] = set()
    for name, child in model.named_modules():
        config = getattr(child, "config", None)
        for suffix in ("", ".text_config", ".decoder", ".encoder"):
            part = getattr(config, suffix[1:], None) if suffix else config
            if isinstance(getattr(part, "model_type", None), str) and id(part) not in seen:
                seen.add(id(part))
                yield f"{name or type(child).__name__}.config{suffix}", part


def _of_config(where: str, config: Any) -> Iterator[Finding]:
    kind = config.model_type
    ropes = _ropes(config)
    for rope in sorted(ropes.keys() & _LENGTH_DEPENDENT_ROPE):
        limit = ropes[rope]
        shorter = "" if limit is None else f", train on rows of at most {limit} positions (which are exact)"
        yield Finding(
            "length-dependent-rope",
            "refuse",
            where,
            f"rope type {rope!r}: this model's rotary embedding depends on the longest row of the call, so a row gives "
            f"other outputs in a shorter micro-batch. Use a fixed scaling (linear, yarn, llama3){shorter}, or do not "
            "split",
            limit,
        )
    alpha = getattr(config, "neftune_noise_alpha", None)
    if alpha:
        yield Finding("embedding-noise", "refuse", where, noise_words("it", f"neftune_noise_alpha={alpha}"))
    weight = getattr(config, "router_aux_loss_coef", getattr(config, "aux_loss_coef", 0)) or 0
    if getattr(config, "output_router_logits", False) and weight > 0:
        yield Finding(
            "balance-loss",
            "refuse",
            where,
            f"output_router_logits with a balance loss of weight {weight}: that loss of the experts is taken over the "
            "whole batch and does not separate over micro-batches. Compute it on the outputs of a PaddedForward, or "
            "set output_router_logits=False",
        )
    why = _left_padding(config)
    if why is not None:
        yield Finding(
            "left-padding",
            "correct",
            where,
            f"{kind}: the stock forward pass {why}; rolling corrects that, so results differ from those of left-padded "
            "batches (and equal those of each row alone)",
        )
    elif kind in _FUSED_SCANS:
        yield Finding(
            "fused-scan",
            "advise",
            where,
            f"{kind}: in training its fused kernels let left padding into the state; rolling corrects that, so with "
            "these kernels results differ from those of left-padded batches (and equal those of each row alone)",
        )
    if kind == "xlstm":
        multiple = getattr(config, "chunk_size", 64)
        reason = (
            f"xlstm trains on widths that are multiples of chunk_size: set pad_to_multiple_of={multiple}, pad_token_id"
        )
        yield Finding("chunked-width", "advise", where, reason)


def _left_padding(config: Any) -> str | None:
    """Why a left-padded row gets other outputs than the row alone, None where it does not."""
    kind = config.model_type
    if kind == "llama4_text" and not getattr(config, "attn_temperature_tuning", True):
        return None
    for option in _LEFT_PADDING_IF.get(kind, ()):
        if getattr(config, option, False):
            return (
                _COLUMNS if kind == "deberta-v2" else f"adds a bias to padding ({option}) that a convolution then sees"
            )
    return _LEFT_PADDING.get(kind)


def _ropes(config: Any) -> dict[str, int | None]:
    """Type of each rotary scaling in a configuration (one for all layers, or one per kind of layer) -> original length.

    Up to that length frequencies are the original ones, so rows do not depend on one another.
    """
    found: dict[str, int | None] = {}
    for name in ("rope_scaling", "rope_parameters"):
        stack = [getattr(config, name, None)]
        while stack:
            part = stack.pop()
            if isinstance(part, Mapping):
                for kind in (value for key in ("rope_type", "type") if isinstance(value := part.get(key), str)):
                    found[kind] = _original_length(kind, part, config)
                stack.extend(part.values())
    return found


def _original_length(kind: str, rope: Mapping[str, Any], config: Any) -> int | None:
    name = "original_max_position_embeddings"
    values = [rope.get(name), getattr(config, name, None)]
    if kind == "dynamic":  # scaled from the configured length on; the original one, if given, is not looked at
        values = [getattr(config, "max_position_embeddings", None)]
    return next((value for value in values if isinstance(value, int) and value > 0), None)
