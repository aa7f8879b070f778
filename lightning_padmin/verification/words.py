"""What a gradient check found, as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_padmin.batch import Field, Schema
from lightning_padmin.config import PadMinConfig
from lightning_padmin.verification.explain import (
    Advice,
    Status,
    as_options,
    as_schema,
    declarations,
    declared_options,
    listed,
)


@dataclass(frozen=True)
class Said:
    """What sentences are about.

    Attributes:
        rows: how many were probed.
        limit: largest relative difference that counts as none.
        schema: of the batch.
        config: the declarations.
        advice: what can be done instead.
        shift: how many labels at the beginning of a row are predicted from before it.
        is_joint: whether the model ran in chunks.
        is_packed: whether rows were packed.
        loses_targets: whether the roll takes labels.
        knows_rows: whether rows were compared with themselves alone.
        alternatives: entries as what they may be in place of what they were taken for.
        written: what the step writes once per call, in words.
        heard: names of what may depend on outputs of padding.
    """

    rows: int
    limit: float
    schema: Schema
    config: PadMinConfig
    advice: Advice
    shift: int
    is_joint: bool
    is_packed: bool
    loses_targets: bool
    knows_rows: bool
    alternatives: Sequence[tuple[str, Field]]
    written: str = ""
    heard: Sequence[str] = ()

    @property
    def declared(self) -> str:
        """What is declared of the loss."""
        if self.advice.reduction is None:
            return declared_options(self.config)
        return f"{self.advice.reduction} with label_shift={self.shift}"


def words_of(status: Status, matching: int, value: float, parameter: str, said: Said) -> str:
    """The finding as sentences.

    Args:
        status: what was found.
        matching: declarations or entries that would have matched, as bits.
        value: the relative difference.
        parameter: where it is.
        said: what the sentences are about.
    """
    n, way = said.rows, "split" if not said.is_joint else "joint"
    differs = (
        f"{way} gradients of {n} rows differ from the un-split ones: relative difference {value:.2g} (limit "
        f"{said.limit:.0e}), most in {parameter!r}. "
    )
    if said.is_packed:
        differs += (
            "Rows were packed (layout='pack'): the step must hand batch['position_ids'] and use_cache=False on to "
            "the model, as model(**batch) does, and must not need the mask, which is None. "
        )
    if status is Status.EXACT:
        return f"{way} gradients of {n} rows are the un-split ones (relative difference {value:.1e})"
    if status is Status.ROLLED:
        lost = "labels on first tokens of left-padded rows are gone, or " if said.loses_targets else ""
        known = ". Rolled, each row is trained as it is without padding" if said.knows_rows else ""
        return (
            f"rolling left padding changes gradients (relative difference {value:.2g}): {lost}this model reads "
            f"padding, or counts positions by column{known}"
        )
    if status is Status.RANDOM:
        untold = (
            f"{differs}The training step draws random numbers outside of dropout, or is another function at each call, "
            f"so whether the {way} is exact cannot be told"
        )
        if said.is_joint or said.is_packed:
            return f"{untold}: make sure of it with a deterministic step, or set check='off'"
        return (
            f"{untold}, with torch's random numbers held fixed either: draw them with torch, for each row of the "
            f"batch, or make sure of it yourself and set check='off'. {said.advice.coupled}"
        )
    if status is Status.ROUTING:
        return (
            f"{differs}In half precision that can be tokens which rounding sends to other experts. Whether the "
            "split is exact cannot be told: run the first steps in float32 once"
        )
    if status is Status.NO_GRADIENT:
        return f"gradients of {n} rows are zero or not finite un-split, so there is nothing to compare with"
    if status is Status.PROMPTS:
        return (
            f"{differs}The roll makes the difference, and slots that {said.schema.mask!r} leaves out hold "
            "different tokens: it seems to leave out prompts, not padding. Give a mask of all real tokens "
            f"(mask_key), and keep what carries loss in {said.config.labels_key!r} or loss_mask_key"
        )
    if status is Status.COLUMNS:
        chosen = [option for k, option in enumerate(said.alternatives) if not matching or matching >> k & 1]
        if matching:
            return (
                f"{differs}The roll makes the difference, and it is gone if {listed(chosen)}: declare "
                f"{as_schema(chosen)}"
            )
        return (
            f"{differs}The roll makes the difference, and whether numbers of columns have a part in it cannot be "
            f"told: they may be in {', '.join(repr(path) for path, _ in chosen)}. Declare each in batch_schema: "
            "'column' if its values are columns of the padded batch, else 'row'"
        )
    if status is Status.PADDING:
        return (
            f"{differs}A row with padding behind it is trained otherwise than without: the model or the loss reads "
            "padding (a normalisation or a mean over all columns, a backward recurrence without packed sequences, "
            "a mask that is not passed on). Have it leave out padding by the mask"
            + (f", or {said.advice.off}" if said.is_joint else f". If the loss alone reads it: {said.advice.coupled}")
        )
    if status is Status.OUTPUTS:
        read = [name for k, name in enumerate(said.heard) if matching >> k & 1]
        return (
            f"{', '.join(read) or 'a logged value'} of the step depends on outputs where rows have padding: with other "
            f"numbers there it moves by {value:.2g} of itself. In chunks the model does not compute these slots, and "
            "they hold zeros, so that this is not what it is un-split. Mask outputs by the attention mask, or "
            f"{said.advice.off}"
        )
    if status is Status.WRITES and said.is_joint:
        return (
            f"each call of a model writes into {said.written}, and in chunks it is called several times per batch: "
            f"counters and averages run ahead. Do that once per batch, {said.advice.once}. {said.advice.coupled}. What "
            "is meant to be written per call, and changes nothing that is trained, may be named in its class: "
            "padmin_per_call = ('name',)"
        )
    if status is Status.WRITES:
        return (
            f"the training step writes into {said.written} whenever it is called. Split, it is called once per "
            "micro-batch, not once per batch: counters and averages run ahead, queues and lists fill with parts of "
            f"batches. Do that once per batch, {said.advice.once}. {said.advice.coupled}. What is meant to be written "
            "per call, and changes nothing that is trained, may be named in its class: padmin_per_call = ('name',)"
        )
    if status is Status.DECLARATION:
        candidates = enumerate(declarations(said.config, said.schema))
        choices = " or ".join(as_options(changes) for index, changes in candidates if matching >> index & 1)
        told = "" if " or " not in choices else " (these rows do not tell which)"
        return f"{differs}{said.declared} is not what the training step does: set {choices}{told}"
    if status is Status.WEIGHTS:
        return (
            f"{differs}The loss weighs rows in another way than {said.declared} says. If the batch tells "
            "their weights, give loss_reduction=function of the batch that returns them, (rows,), or a "
            "loss_mask_key. If the model's outputs do (a softmax over rows), the loss couples rows. "
            f"{said.advice.coupled}"
        )
    couples = f"{differs}No weights of the micro-batches would match: the loss or the model couples rows "
    if said.is_joint:
        return f"{couples}inside of the model, or returns what cannot be chunked: {said.advice.off}"
    return (
        f"{couples}(in-batch negatives, a quantile over the batch, a balance loss of experts, two terms that are "
        f"reduced in different ways). {said.advice.coupled}"
    )


__all__ = ["Said", "words_of"]
