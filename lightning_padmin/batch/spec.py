"""What the user said of a batch's entries, as far as reading a batch needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
