"""What the first-batch check tries in place of what was declared, and how it says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from lightning_padmin.batch import Field, RowTable, Schema, measure
from lightning_padmin.config import PadMinConfig
from lightning_padmin.verification.rows import Ints

_REDUCTIONS = ("token-mean", "row-mean", "sum")


class Status(IntEnum):
    """What a rank found; where ranks differ, the largest holds."""

    EXACT = 0
    ROLLED = 1
    RANDOM = 2
    NO_GRADIENT = 3
    ROUTING = 4
    # From here on training would change.
    PROMPTS = 5
    COLUMNS = 6
    PADDING = 7
    DECLARATION = 8
    WEIGHTS = 9
    COUPLED = 10
    WRITES = 11
    OUTPUTS = 12


@dataclass(frozen=True)
class Advice:
    """What a user of one adapter can do, as its own options say it.

    Attributes:
        coupled: where rows are coupled.
        off: how to go on without this library.
        once: where things are done once per batch.
        reduction: what is declared of the loss, where the configuration does not say it.
    """

    coupled: str = (
        "Call the model through lightning_padmin.PaddedForward, so that the loss sees the whole batch, or use "
        "enabled=False"
    )
    off: str = "use enabled=False"
    once: str = "where the optimizer steps"
    reduction: str | None = None


def listed(options: Sequence[tuple[str, Field]]) -> str:
    """What alternatives say of their entries."""
    columns = [repr(path) for path, field in options if field.kind == "column"]
    rows = [repr(path) for path, field in options if field.kind == "row"]
    said = [f"the numbers of columns in {', '.join(columns)} move with their rows"] if columns else []
    said += [f"{', '.join(rows)} stay as they are (their names say columns)"] if rows else []
    return " and ".join(said)


def as_schema(options: Sequence[tuple[str, Field]]) -> str:
    """The option that declares them so."""

    def declared(field: Field) -> str:
        return repr(field.kind) if field.axis == "input" else f"Field({field.kind!r}, axis={field.axis!r})"

    return "batch_schema={" + ", ".join(f"{path!r}: {declared(field)}" for path, field in options) + "}"


def group_weights(table: RowTable, groups: Sequence[Ints], reduction: object) -> list[float]:
    """Weight of each group's loss among the groups, as `MicroBatcher` gives it."""
    if reduction == "sum":
        return [1.0] * len(groups)
    own = [float(table.weight[group].sum()) for group in groups]
    return [weight / sum(own) for weight in own]


def declarations(config: PadMinConfig, schema: Schema) -> Iterator[dict[str, Any]]:
    """Other declarations to try: changed options, simplest first."""
    shifts = [{}] if schema.labels is None else [{}, {"label_shift": 0}, {"label_shift": 1}]
    for shift in shifts:
        for reduction in _REDUCTIONS:
            changes = {"loss_reduction": reduction} if reduction != config.loss_reduction else {}
            if changes or shift:
                yield changes | shift
    if config.loss_mask_key is not None:
        yield {"loss_reduction": "token-mean", "loss_mask_key": None}
    elif len(schema.widths) == 1 or schema.decoder_mask is not None:  # else labels say where rows end
        # Labels would select among the tokens of a loss mask.
        without = {} if schema.labels is None else {"labels_key": None}
        yield {"loss_reduction": "token-mean", **without, "loss_mask_key": schema.mask}


def measured(batch: Any, schema: Schema, config: PadMinConfig, changes: dict[str, Any]) -> RowTable:
    """The row table under changed options."""
    if "loss_mask_key" in changes:
        mask = changes["loss_mask_key"]
        schema = replace(schema, loss_mask=mask, labels=schema.labels if mask is None else None)
    return measure(
        batch,
        schema,
        ignore_index=config.ignore_index,
        label_shift=changes.get("label_shift", config.label_shift),
        loss_reduction=changes.get("loss_reduction", config.loss_reduction),
    )


def as_options(changes: dict[str, Any]) -> str:
    """As one would write them."""
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())


def declared_options(config: PadMinConfig) -> str:
    """What the configuration says of the loss."""
    options = {"loss_reduction": config.loss_reduction, "label_shift": config.label_shift}
    return as_options({name: value for name, value in options.items() if value is not None})
