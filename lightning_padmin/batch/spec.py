"""What the user said of a batch's entries and of its loss, as far as reading a batch needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_padmin.batch.fields import Field, Schema


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Names and declarations of a batch's entries; each as the option of that name.

    Attributes:
        mask_key: the mask of the input axis.
        labels_key: the labels; None: not labels say what carries loss.
        decoder_mask_key: the mask of the decoder axis.
        loss_mask_key: what selects or weighs loss tokens.
        fields: declared fields by path, or by last part of a path.
        static_keys: entries that all rows share.
        ignore_index: label without loss, which fills labels up.
        pad_token_id: what fills token ids up; None if unknown.
    """

    mask_key: str = "attention_mask"
    labels_key: str | None = "labels"
    decoder_mask_key: str = "decoder_attention_mask"
    loss_mask_key: str | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    static_keys: tuple[str, ...] = ()
    ignore_index: int = -100
    pad_token_id: int | None = None

    @property
    def paths(self) -> list[str]:
        """What may lie inside of a list, which is then walked into."""
        roles = (self.mask_key, self.labels_key, self.decoder_mask_key, self.loss_mask_key)
        return [*self.fields, *self.static_keys, *(key for key in roles if key is not None and "." in key)]

    def declared_by(self, schema: Schema) -> BatchSpec:
        """With all that is known of another batch declared."""
        return replace(
            self,
            mask_key=schema.mask,
            labels_key=schema.labels or self.labels_key,
            decoder_mask_key=schema.decoder_mask or self.decoder_mask_key,
            loss_mask_key=schema.loss_mask or self.loss_mask_key,
            fields={**self.fields, **schema.fields},
        )


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """How the training step reduces its loss over the rows of a batch.

    Attributes:
        reduction: `"token-mean"`, `"row-mean"`, `"sum"`, or a function batch -> (B,) of non-negative weights.
        shift: 1 if the loss shifts labels by one; None: 1 on the input axis, 0 on the decoder axis.
        ignore_index: label without loss.
    """

    reduction: str | Callable[[Any], Tensor] = "token-mean"
    shift: int | None = None
    ignore_index: int = -100

    def unasked(self) -> LossSpec:
        """Where the loss is nobody's concern: every row counts the same."""
        return replace(self, reduction="row-mean")
