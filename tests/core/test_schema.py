"""What an entry is taken for, and what is refused because its size alone does not tell."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import support
import torch
from torch import Tensor

from lightning_padmin import Field, MicroBatcher, PadMinConfig, compact, iter_micro_batches
from lightning_padmin.batch.schema import Schema, find_path, infer_schema
from lightning_padmin.errors import BatchError, SchemaError

B, L = 3, 6
LENGTHS = [4, 6, 2]


def batch_with(**entries: Any) -> dict[str, Any]:
    return support.make_batch(LENGTHS) | entries


def kinds(schema: Schema) -> dict[str, str]:
    return {path: entry.kind for path, entry in schema.fields.items()}


def split(batch: Any, **options: Any) -> list[Any]:
    """One micro-batch per row, longest first: rows 1, 0, 2."""
    return [micro.batch for micro in iter_micro_batches(batch, PadMinConfig(max_rows=1, launch_cost=0, **options))]


# --- Names that everybody knows. ---


def test_names_of_transformers() -> None:
    names = ["input_ids", "token_type_ids", "mm_token_type_ids", "special_tokens_mask", "position_ids"]
    batch = batch_with(
        **{name: torch.ones(B, L, dtype=torch.int64) for name in names}, inputs_embeds=torch.ones(B, L, L)
    )
    schema = infer_schema(batch, pad_token_id=9)
    assert kinds(schema) == dict.fromkeys(batch, "position")
    assert (schema.rows, schema.widths, schema.mask, schema.labels) == (B, (L,), "attention_mask", "labels")
    assert {name: entry.fill for name, entry in schema.fields.items()} == {
        "input_ids": 9,
        "attention_mask": 0,
        "labels": -100,
        "token_type_ids": 0,
        "mm_token_type_ids": 0,
        "special_tokens_mask": 1,
        "position_ids": "continue",
        "inputs_embeds": 0,
    }
    assert schema.can_widen
    assert not infer_schema(batch).can_widen  # input_ids have no filler


@pytest.mark.parametrize("planes", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_three_dimensional_position_ids_are_cut_along_the_last_axis(rows: int, planes: int) -> None:
    """Also where as many planes as rows make the first axis look like rows."""
    batch = support.make_batch([4, 6, 2][:rows], left=[2, 0, 4][:rows])
    positions = torch.arange(planes * rows * L).view(planes, rows, L)
    for rolled, row in zip(
        split(batch | {"position_ids": positions}), sorted(range(rows), key=[1, 0, 2].index), strict=True
    ):
        length, start = LENGTHS[row], L - LENGTHS[row]
        assert rolled["position_ids"].shape == (planes, 1, length)
        assert torch.equal(rolled["position_ids"][:, 0], positions[:, row, start:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("heads", [None, 1, 2])
def test_a_square_attention_mask_beside_the_padding_mask_is_rolled_on_both_axes(dtype: torch.dtype, heads: int) -> None:
    base = support.make_batch([4, 6, 2], left=[2, 0, 3])
    padding = base.pop("attention_mask")
    allowed = padding[:, None, :].bool() & torch.ones(L, L).tril().bool()
    square = torch.where(allowed, 0, torch.finfo(dtype).min).to(dtype) if dtype.is_floating_point else allowed.to(dtype)
    square = square if heads is None else square[:, None].repeat(1, heads, 1, 1)
    alone = {0: (2, 6), 1: (0, 6), 2: (3, 5)}
    batch = base | {"padding": padding, "attention_mask": square}
    for rolled, row in zip(split(batch, mask_key="padding"), [1, 0, 2], strict=True):
        start, end = alone[row]
        assert torch.equal(rolled["attention_mask"][0], square[row, ..., start:end, start:end])
        assert rolled["attention_mask"].dtype == dtype
    widened = compact(batch, PadMinConfig(mask_key="padding", pad_to_multiple_of=8, pad_token_id=0)).batch
    filler = torch.finfo(dtype).min if dtype.is_floating_point else 0
    assert widened["attention_mask"].shape[-2:] == (8, 8)
    assert (widened["attention_mask"][..., 6:] == filler).all()
    assert (widened["attention_mask"][..., 6:, :] == filler).all()


def test_a_square_attention_mask_needs_a_padding_mask_beside_it() -> None:
    batch = batch_with(attention_mask=torch.ones(B, 1, L, L))
    with pytest.raises(SchemaError, match=r"'attention_mask' has shape \(3, 1, 6, 6\), expected \(rows, width\)"):
        infer_schema(batch)


def test_a_second_mask_must_lie_within_the_first() -> None:
    """Two sequences per row, of one width by coincidence: rolling both by one mask would lose tokens."""
    chosen, rejected = support.make_batch([4, 6, 2]), support.make_batch([6, 3, 2])
    batch = {"chosen": chosen, "rejected": rejected}
    with pytest.raises(SchemaError, match=r"mask_key='attention_mask' names several entries: chosen.*, rejected"):
        infer_schema(batch)
    keys = {"mask_key": "chosen.attention_mask", "labels_key": "chosen.labels"}
    declared = {"rejected.labels": "position"}
    told = r"'rejected.attention_mask' is set on 2 slots that are padding by 'chosen.attention_mask' \(first in row 0\)"
    with pytest.raises(BatchError, match=told + r".*declare batch_schema=\{'rejected': 'row'\}") as caught:
        compact(batch, PadMinConfig(**keys, batch_schema=declared))
    assert "to 0" not in str(caught.value), "that would destroy the other sequence"
    whole = compact(batch, PadMinConfig(**keys, batch_schema={"rejected": "row"})).batch["rejected"]
    assert all(torch.equal(whole[name], rejected[name]) for name in rejected)
    holes = batch_with(
        padding=batch_with()["attention_mask"], attention_mask=support.make_batch([4, 5, 1], width=6)["attention_mask"]
    )
    assert compact(holes, PadMinConfig(mask_key="padding")).lengths.tolist() == LENGTHS


# --- The mask. ---


def test_without_a_mask_nothing_is_guessed() -> None:
    batch = batch_with()
    del batch["attention_mask"]
    with pytest.raises(
        SchemaError, match=r"mask_key='attention_mask': .* \(it has input_ids, labels\)\. Padding is never"
    ):
        infer_schema(batch)
    with pytest.raises(SchemaError, match="mask_key='mask': the batch has no such entry"):
        infer_schema(batch_with(), mask_key="mask")
    with pytest.raises(SchemaError, match="no such entry"):
        infer_schema(batch_with(attention_mask=None))


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ([[1, 1], [1, 0]], "list, expected a tensor"),
        (np.ones((B, L)), "ndarray, expected a tensor"),
        (torch.ones(B), r"\(3,\), expected \(rows, width\)"),
        (torch.ones(B, L, 1), r"\(3, 6, 1\), expected \(rows, width\)"),
        (torch.ones(0, L), "the batch is empty"),
        (torch.ones(B, 0), "the batch is empty"),
    ],
)
def test_a_mask_of_another_form_is_refused(mask: Any, found: str) -> None:
    with pytest.raises(SchemaError, match=found):
        infer_schema(batch_with(attention_mask=mask))


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("attention_mask", "static"),
        ("attention_mask", "row"),
        ("attention_mask", {"kind": "position", "axis": "decoder"}),
        ("loss_mask", "static"),
        ("loss_mask", "row"),
    ],
)
def test_masks_cannot_be_declared_as_something_else(key: str, kind: Any) -> None:
    batch = batch_with(loss_mask=support.make_batch(LENGTHS)["attention_mask"])
    with pytest.raises(SchemaError, match=f"'{key}'"):
        compact(batch, PadMinConfig(loss_mask_key="loss_mask", batch_schema={key: kind}))


# --- Entries that nobody knows. ---


def test_an_unknown_tensor_as_wide_as_the_batch_must_be_declared() -> None:
    for unknown in (
        torch.ones(B, L),
        torch.ones(B, 2, L),
        torch.ones(B, 2, 2, L),
        np.ones((B, L)),
        torch.ones(B, L - 1),
    ):
        shape = str(tuple(unknown.shape)).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(
            SchemaError, match=rf"'advantages' has shape {shape}.*batch_schema={{'advantages': 'position'}}"
        ):
            infer_schema(batch_with(advantages=unknown))
        static = infer_schema(batch_with(advantages=unknown), static_keys=["advantages"])
        assert static.fields["advantages"] == Field("static")
        assert (
            infer_schema(batch_with(advantages=unknown), {"advantages": Field("row")}).fields["advantages"].kind
            == "row"
        )
    values = torch.arange(B * L).view(B, L)
    declared = split(batch_with(advantages=values), batch_schema={"advantages": "position"})
    assert [entry["advantages"].tolist() for entry in declared] == [
        [values[row, :n].tolist()] for row, n in ((1, 6), (0, 4), (2, 2))
    ]


def test_an_unknown_tensor_of_rows_needs_no_declaration() -> None:
    batch = batch_with(
        score=torch.arange(3.0), features=torch.arange(12).view(3, 4), array=np.arange(3), image=torch.ones(3, 2, 4, 4)
    )
    assert {kinds(infer_schema(batch))[name] for name in ("score", "features", "array", "image")} == {"row"}
    assert [part["features"].tolist() for part in split(batch)] == [
        [batch["features"][row].tolist()] for row in (1, 0, 2)
    ]


@pytest.mark.parametrize("unknown", [torch.ones(4), torch.ones(2, 3), torch.ones(1), np.ones((4, 6)), torch.ones(0)])
def test_another_number_of_rows_must_be_declared(unknown: Any) -> None:
    with pytest.raises(
        SchemaError, match=r"'extra' has shape .* but the batch has 3 rows\. Declare .*static_keys=\['extra'\]"
    ):
        infer_schema(batch_with(extra=unknown))
    assert infer_schema(batch_with(extra=unknown), static_keys=["extra"]).fields["extra"] == Field("static")


def test_what_cannot_have_rows_is_shared() -> None:
    shared = {
        "task": "abc",
        "flag": True,
        "none": None,
        "n": 3,
        "scalar": torch.tensor(1),
        "zero": np.array(2),
        "set": {1, 2, 3},
    }
    batch = batch_with(**shared)
    schema = infer_schema(batch)
    assert all(kinds(schema).get(name, "static") == "static" for name in shared)
    for part in split(batch):
        assert all(part[name] is value for name, value in shared.items())


def test_lists_are_rows_if_there_are_as_many() -> None:
    pieces = [torch.tensor([1.0] * n) for n in (50, 7, 9)]
    batch = {
        "seqs": pieces,
        "names": ["a", "b", "c"],
        "two": ["x", "y"],
        "empty": [],
        "dicts": [{"a": 1}, {}, {"b": []}],
    }
    batch |= batch_with()  # the first tensor found has 50 rows
    schema = infer_schema(batch)
    assert schema.rows == 3
    assert {name: kinds(schema)[name] for name in ("seqs", "names", "two", "empty", "dicts")} == {
        **dict.fromkeys(("seqs", "names", "dicts"), "row"),
        **dict.fromkeys(("two", "empty"), "static"),
    }
    first = split(batch)[0]
    assert first["names"] == ["b"]
    assert first["seqs"][0] is pieces[1]
    assert first["two"] is batch["two"]
    with pytest.raises(SchemaError, match="'two' has 2 entries but the batch has 3 rows"):
        infer_schema(batch, {"two": Field("row")})


def test_lists_of_tensors_with_rows_must_be_declared() -> None:
    """One entry per row, or a container of entries with rows each? Both have been seen."""
    views = [torch.arange(3) * k for k in range(1, 4)]
    nested = [{"image": torch.ones(3, 2)}, {"image": torch.ones(3, 2)}]
    for ambiguous in (views, tuple(views), views[:2], nested, [*nested, nested[0]]):
        with pytest.raises(SchemaError, match=r"'views' is a (list|tuple) of \d entries with tensors of 3 rows"):
            infer_schema(batch_with(views=ambiguous))
    assert split(batch_with(views=views), batch_schema={"views": "row"})[0]["views"] == [views[1]]
    container = split(batch_with(views=views), batch_schema={f"views.{k}": "row" for k in range(3)})[0]["views"]
    assert [view.tolist() for view in container] == [[1], [2], [3]]
    assert split(batch_with(views=views), static_keys=["views"])[0]["views"] is views
    # In a list of one entry per row not all items have as many rows as the batch, by chance aside.
    assert infer_schema(batch_with(views=[torch.ones(3), torch.ones(2), torch.ones(5)])).fields["views"].kind == "row"


def test_other_objects_that_may_have_rows_must_be_declared() -> None:
    class Holder:
        def __init__(self) -> None:
            self.values = torch.ones(3)

    for thing in (deque([1, 2, 3]), range(3), Holder()):
        with pytest.raises(SchemaError, match=rf"'thing' is a {type(thing).__name__}, which may have rows"):
            infer_schema(batch_with(thing=thing))
        assert split(batch_with(thing=thing), static_keys=["thing"])[0]["thing"] is thing


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "token_type_ids"])
def test_known_names_need_tensors_of_the_batchs_shape(name: str) -> None:
    with pytest.raises(SchemaError, match=f"'{name}' is list, expected a tensor"):
        infer_schema(batch_with(**{name: [[1] * L] * B}))
    for shape in ((B, L + 1), (B + 1, L), (1, L), (L,), ()):
        with pytest.raises(SchemaError, match=f"'{name}' has shape"):
            infer_schema(batch_with(**{name: torch.ones(shape, dtype=torch.int64)}))
    assert split(batch_with(**{name: None}))[0][name] is None


def test_tensors_without_a_dense_layout_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(n) for n in LENGTHS], layout=torch.jagged)
    for tensor in (torch.ones(B, L).to_sparse(), nested, torch.ones(B, 2).to_sparse()):
        for name in ("extra", "input_ids", "attention_mask", "decoder_input_ids"):
            with pytest.raises(SchemaError, match=f"'{name}' is a sparse or nested tensor: make it dense"):
                infer_schema(batch_with(**{name: tensor}))
        assert split(batch_with(extra=tensor), static_keys=["extra"])[0]["extra"] is tensor


# --- Evidence from an earlier batch. ---


def batch_of_width(width: int, **entries: Any) -> dict[str, Any]:
    return support.make_batch([2, 3], width=width) | entries


def test_an_entry_that_once_had_another_size_than_the_batch_does_not_follow_it() -> None:
    features = torch.ones(2, 16)
    with pytest.raises(SchemaError, match=r"'features' has shape \(2, 16\), one of whose dimensions"):
        infer_schema(batch_of_width(16, features=features))
    earlier = infer_schema(batch_of_width(20, features=features))
    later = infer_schema(batch_of_width(16, features=features), previous=earlier)
    assert later.fields["features"].kind == "row"
    assert infer_schema(batch_of_width(16, features=features), previous=later).fields["features"].kind == "row"
    # The image sizes of this batch happen to be its width.
    images = infer_schema(batch_of_width(20, images=torch.ones(2, 3, 30, 18)))
    assert (
        infer_schema(batch_of_width(24, images=torch.ones(2, 3, 24, 26)), previous=images).fields["images"].kind
        == "row"
    )
    with pytest.raises(SchemaError, match="'features'"):  # another kind of entry under the same name
        infer_schema(batch_of_width(16, features=torch.ones(2, 16, 16)), previous=earlier)


def test_a_batcher_remembers() -> None:
    batcher = MicroBatcher(PadMinConfig())
    with pytest.raises(SchemaError, match="'features'"):
        batcher.prepare(batch_of_width(16, features=torch.ones(2, 16)))
    for width in (20, 16, 18, 16):
        batcher.prepare(batch_of_width(width, features=torch.ones(2, 16)))
    with pytest.raises(SchemaError, match="'features'"):
        MicroBatcher(PadMinConfig()).prepare(batch_of_width(16, features=torch.ones(2, 16)))


def test_lists_remember_too() -> None:
    """A list of one tensor per row stays one when the last batch has a single row with a single image."""
    batcher = MicroBatcher(PadMinConfig())
    last = support.make_batch([3]) | {"images": [torch.ones(1, 2)]}
    with pytest.raises(SchemaError, match="'images'"):
        batcher.prepare(last)
    batcher.prepare(batch_with(images=[torch.ones(n, 2) for n in (1, 4, 2)]))
    assert batcher.prepare(last).schema.fields["images"].kind == "row"


# --- Two widths. ---


def seq2seq(**entries: Any) -> dict[str, Any]:
    """Encoder width 6, decoder width 4: target lengths 2, 4, 3."""
    labels = torch.full((B, 4), -100)
    for row, length in enumerate((2, 4, 3)):
        labels[row, :length] = torch.arange(length) + 1
    return batch_with(labels=labels) | entries


def test_a_decoder_mask_or_decoder_ids_make_a_second_axis() -> None:
    mask = (seq2seq()["labels"] != -100).long()
    for extra in ({"decoder_attention_mask": mask}, {"decoder_input_ids": mask}, {"target_mask": mask}):
        schema = infer_schema(
            seq2seq(**extra), decoder_mask_key="target_mask" if "target_mask" in extra else "decoder_attention_mask"
        )
        assert schema.widths == (6, 4)
        assert schema.labels_axis == schema.fields[next(iter(extra))].axis == "decoder"
        assert schema.fields["input_ids"].axis == "input"


def test_labels_alone_make_a_second_axis_only_where_the_model_or_the_user_says_so() -> None:
    with pytest.raises(
        SchemaError, match=r"'labels' has shape \(3, 4\).*expected width 6.*Field\('position', axis='decoder'\)"
    ):
        infer_schema(seq2seq())
    for schema in (
        infer_schema(seq2seq(), encoder_decoder=True),
        infer_schema(seq2seq(), {"labels": Field("position", axis="decoder")}),
    ):
        assert (schema.widths, schema.labels_axis, schema.decoder_mask) == ((6, 4), "decoder", None)
    parts = split(seq2seq(), batch_schema={"labels": Field("position", axis="decoder")})
    assert [(part["input_ids"].shape[1], part["labels"].tolist()) for part in parts] == [
        (6, [[1, 2, 3, 4]]),
        (4, [[1, 2]]),
        (2, [[1, 2, 3]]),
    ]


def test_widths_that_coincide_do_not_decide() -> None:
    batch = batch_with(labels=seq2seq()["labels"].repeat(1, 2)[:, :6])
    assert infer_schema(batch).widths == (6,)
    schema = infer_schema(batch, encoder_decoder=True)
    assert (schema.widths, schema.labels_axis) == ((6, 6), "decoder")
    table = MicroBatcher(PadMinConfig(), encoder_decoder=True).read(seq2seq(labels=torch.full((B, 6), 5)))[1]
    assert table.length.tolist() == [[4, 6], [6, 6], [2, 6]]
    assert table.loss_tokens.tolist() == [6, 6, 6]  # not shifted


def test_contradictory_or_unbounded_decoder_entries_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"different widths: \{'decoder_input_ids': 5, 'labels': 4\}"):
        infer_schema(seq2seq(decoder_input_ids=torch.ones(B, 5)))
    per_row = seq2seq(decoder_input_ids=torch.ones(B, 5), labels=torch.tensor([0, 1, 1]))
    with pytest.raises(SchemaError, match="'decoder_input_ids' runs along a decoder axis, but neither a decoder mask"):
        infer_schema(per_row)
    assert infer_schema(per_row | {"decoder_attention_mask": torch.ones(B, 5)}).widths == (6, 5)
    with pytest.raises(SchemaError, match="'decoder_attention_mask'"):
        infer_schema(seq2seq(decoder_attention_mask=torch.ones(B, 1, 4, 4)))
    declared = {"targets": Field("position", axis="decoder")}
    no_labels = {key: value for key, value in batch_with().items() if key != "labels"}
    with pytest.raises(SchemaError, match="'targets' runs along a decoder axis, but neither a decoder mask nor labels"):
        infer_schema(no_labels | {"targets": np.ones((B, 4))}, declared)
    with pytest.raises(SchemaError, match="'targets' runs along the decoder axis, but no entry says how wide that is"):
        infer_schema(no_labels | {"targets": torch.ones(B)}, declared)
    assert infer_schema(batch_with(), encoder_decoder=True).labels_axis == "decoder"
    assert infer_schema(no_labels, encoder_decoder=True).widths == (6,)


# --- Labels and loss masks. ---


@pytest.mark.parametrize("labels", [torch.tensor([0, 2, 1]), torch.tensor([0.5, 2.0, 1.0])])
def test_one_label_per_row(labels: Tensor) -> None:
    schema = infer_schema(batch_with(labels=labels))
    assert schema.fields["labels"] == Field("row")
    assert [part["labels"].tolist() for part in split(batch_with(labels=labels))] == [
        [labels[row].item()] for row in (1, 0, 2)
    ]


def test_scores_per_class_must_be_declared_even_if_as_many_as_columns() -> None:
    scores = torch.rand(B, L)
    with pytest.raises(
        SchemaError, match=r"labels_key='labels': .* floating point of shape \(3, 6\)\. Declare .*'row'"
    ):
        infer_schema(batch_with(labels=scores))
    for classes in (4, L):
        parts = split(batch_with(labels=scores[:, :classes]), batch_schema={"labels": "row"})
        assert [part["labels"].shape for part in parts] == [(1, classes)] * 3
    per_token = batch_with(labels=scores * batch_with()["attention_mask"])
    assert split(per_token, batch_schema={"labels": "position"}, ignore_index=0)[1]["labels"].shape == (1, 4)
    with pytest.raises(SchemaError, match=r"'labels' has shape \(3, 6, 2\)"):
        infer_schema(batch_with(labels=torch.ones(B, L, 2, dtype=torch.int64)))


def test_labels_that_are_declared_as_something_else_are_not_counted() -> None:
    for labels in (["cat", "dog", "cat"], None, torch.ones(7)):
        batch = batch_with(labels=labels)
        options = (
            {} if labels is None else {"batch_schema": {"labels": "row" if isinstance(labels, list) else "static"}}
        )
        assert len(split(batch, loss_reduction="row-mean", **options)) == 3
        with pytest.raises(
            BatchError, match="loss_reduction='token-mean' counts loss tokens, but the batch has no labels"
        ):
            split(batch, **options)
    with pytest.raises(SchemaError, match="labels_key='labels': 'labels' is list, expected a tensor"):
        infer_schema(batch_with(labels=["cat", "dog", "cat"]))


def test_a_loss_mask_is_an_entry_like_labels() -> None:
    batch = batch_with(completion=support.make_batch(LENGTHS)["attention_mask"])
    with pytest.raises(SchemaError, match=r"'completion' .*if it selects loss tokens, loss_mask_key='completion'"):
        infer_schema(batch)
    assert infer_schema(batch, loss_mask_key="completion").loss_mask == "completion"
    with pytest.raises(SchemaError, match="loss_mask_key='missing': the batch has no such entry"):
        infer_schema(batch, loss_mask_key="missing")
    with pytest.raises(SchemaError, match="loss_mask_key='completion': 'completion' is list, expected a tensor"):
        infer_schema(batch_with(completion=[1, 2, 3]), loss_mask_key="completion")
    target_mask = torch.ones(B, 4)
    schema = infer_schema(seq2seq(target_mask=target_mask), loss_mask_key="target_mask", encoder_decoder=True)
    assert schema.fields["target_mask"].axis == "decoder"


# --- Declarations. ---


def test_tuple_batches() -> None:
    base = support.make_batch(LENGTHS)
    batch = (base["input_ids"], base["attention_mask"], base["labels"], ["a", "b", "c"])
    options = {"mask_key": "1", "labels_key": "2", "batch_schema": {"0": "position"}}
    with pytest.raises(SchemaError, match="'0' has shape"):
        split(batch, mask_key="1", labels_key="2")
    first = split(batch, **options)[1]
    assert isinstance(first, tuple)
    assert torch.equal(first[0], base["input_ids"][:1, :4])
    assert torch.equal(first[2], base["labels"][:1, :4])
    assert first[3] == ["a"]


def test_keys_by_whole_path_or_last_part() -> None:
    assert find_path("a.b", ["a.b", "b"], "x") == "a.b"
    assert find_path("b", ["a.b", "b"], "x") == "b"
    assert find_path("b", ["a.b", "a.c"], "x") == "a.b"
    assert find_path("d", ["a.b", "a.c"], "x") is None
    with pytest.raises(SchemaError, match=r"mask_key='b' names several entries: a\.b, c\.b\. Give the whole"):
        find_path("b", ["a.b", "c.b"], "mask_key")
    nested = {"inputs": batch_with(extra=torch.ones(B, L)), "weights": torch.ones(5)}
    for key in ("extra", "inputs.extra"):
        schema = infer_schema(nested, {key: Field("position", fill=7)}, static_keys=["weights"])
        assert schema.fields["inputs.extra"].fill == 7
        assert schema.mask == "inputs.attention_mask"
    twice = {"a": {"extra": torch.ones(B, L)}, "b": {"extra": torch.ones(B, L)}} | batch_with()
    with pytest.raises(SchemaError, match=r"batch_schema key='extra' names several entries: a\.extra, b\."):
        infer_schema(twice, {"extra": Field("position")})


def test_an_inner_node_declares_what_lies_below_it() -> None:
    @dataclass
    class Settings:
        class_weights: Tensor
        temperatures: list[float]

    settings = {"loss": Settings(torch.ones(B), [0.1, 0.2, 0.3])}
    undeclared = split(batch_with(settings=settings))[0]["settings"]["loss"]
    assert len(undeclared.class_weights) == 1  # as many weights as rows, so they were taken for rows
    shared = split(batch_with(settings=settings), static_keys=["settings"])[0]["settings"]["loss"]
    assert shared.class_weights is settings["loss"].class_weights
    assert shared.temperatures is settings["loss"].temperatures


def test_declared_entries_may_be_absent() -> None:
    config = PadMinConfig(
        batch_schema={"pixels": Field("unit", counts="n"), "advantages": "position"}, static_keys=["x"]
    )
    assert len(compact(batch_with(), config).lengths) == 3


@pytest.mark.parametrize(
    ("value", "declared", "found"),
    [
        (torch.ones(B, L + 1), Field("position"), "expected width 6 in dimension 1"),
        (torch.ones(B), Field("position"), "expected width 6 in dimension 1"),
        (torch.ones(L, B), Field("position"), "expected 3 rows in dimension 0"),
        (torch.ones(B, L, 5), Field("position", position_dims=(1, 2)), "expected width 6 in dimension 2"),
        (torch.ones(4), Field("row"), "expected 3 rows in dimension 0"),
        (torch.ones(B), Field("row", row_dim=1), "expected 3 rows in dimension 1"),
        (torch.tensor(1), Field("row"), "expected 3 rows in dimension 0"),
        (5, Field("row"), "is int, expected a tensor"),
        (["a", "b", "c"], Field("position"), "is list, expected a tensor"),
        (["a", "b", "c"], Field("row", row_dim=1), "is list, expected a tensor"),
        (np.array([["a"] * L] * B), Field("position"), "an entry of kind 'position' holds numbers"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(value: Any, declared: Field, found: str) -> None:
    with pytest.raises(SchemaError, match=f"'extra' .*{found}"):
        infer_schema(batch_with(extra=value), {"extra": declared})


def test_rows_in_another_dimension() -> None:
    for extra in (torch.arange(2 * B).view(2, B), np.arange(2 * B).reshape(2, B)):
        parts = split(batch_with(extra=extra), batch_schema={"extra": Field("row", row_dim=1)})
        assert [part["extra"].tolist() for part in parts] == [extra[:, [row]].tolist() for row in (1, 0, 2)]
    time_first = torch.arange(L * B).view(L, B)
    parts = split(
        batch_with(extra=time_first), batch_schema={"extra": Field("position", row_dim=1, position_dims=(0,))}
    )
    assert [part["extra"].tolist() for part in parts] == [
        time_first[:n, [row]].tolist() for row, n in ((1, 6), (0, 4), (2, 2))
    ]


def test_the_schema_of_one_batch_serves_as_declaration_for_others() -> None:
    first = batch_with(advantages=torch.ones(B, L), maybe=None)
    schema = infer_schema(first, {"advantages": Field("position")})
    batcher = MicroBatcher(PadMinConfig(token_budget=9, launch_cost=0), schema)
    other = support.make_batch([9, 3, 5, 2]) | {"advantages": torch.ones(4, 9), "maybe": torch.ones(4)}
    shapes = [tuple(micro.batch["advantages"].shape) for micro in batcher.prepare(other)]
    assert sum(rows for rows, _ in shapes) == 4
    assert shapes[0] == (1, 9)
    assert sum(len(micro.batch["maybe"]) for micro in batcher.prepare(other)) == 4
    with pytest.raises(SchemaError, match="'advantages' has shape"):
        batcher.prepare(other | {"advantages": torch.ones(4, 5)})


# --- Units. ---

GRID = torch.tensor([[1, 2, 2], [1, 4, 4]])
NUM_IMAGES = {
    "image_grid_thw": Field("unit", counts="num_images"),
    "pixel_values": Field("unit", counts="image_grid_thw"),
}


def test_patches_follow_their_rows() -> None:
    """Two samples with one image each, of 4 and 16 patches: 20 patch rows in all."""
    pixels = torch.arange(20.0).view(20, 1)
    base = support.make_batch([2, 5])
    counted = base | {"num_images": torch.tensor([1, 1]), "image_grid_thw": GRID, "pixel_values": pixels}
    per_row = base | {"image_grid_thw": GRID, "pixel_values": pixels}
    grids = {"pixel_values": Field("unit", counts="image_grid_thw"), "image_grid_thw": Field("row")}
    for batch, schema in ((counted, NUM_IMAGES), (per_row, grids)):
        second, first = split(batch, batch_schema=schema)
        assert second["pixel_values"].flatten().tolist() == list(range(4, 20))
        assert second["image_grid_thw"].tolist() == [[1, 4, 4]]
        assert first["pixel_values"].flatten().tolist() == [0, 1, 2, 3]
        assert first["image_grid_thw"].tolist() == [[1, 2, 2]]
    with pytest.raises(SchemaError, match="images belong to rows in some number"):
        infer_schema(counted)


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_rows_without_images(kind: str) -> None:
    """Three samples with 2, 0 and 1 images; the middle one is text only."""
    grids = torch.tensor([[1, 2, 2], [1, 1, 2], [1, 3, 1]])
    counts: Any = [2, 0, 1] if kind == "list" else np.array([2, 0, 1]) if kind == "array" else torch.tensor([2, 0, 1])
    patches: Any = torch.arange(9)
    patches = [f"patch {k}" for k in range(9)] if kind == "list" else patches.numpy() if kind == "array" else patches
    batch = batch_with(num_images=counts, image_grid_thw=grids, pixel_values=patches)
    parts = split(batch, batch_schema=NUM_IMAGES)
    expected = {1: (0, range(0)), 0: (2, range(6)), 2: (1, range(6, 9))}
    for part, (row, (images, units)) in zip(parts, expected.items(), strict=True):
        assert len(part["image_grid_thw"]) == images, row
        assert type(part["pixel_values"]) is type(patches)
        assert list(part["pixel_values"]) == [patches[k] for k in units]
    whole = compact(batch, PadMinConfig(batch_schema=NUM_IMAGES)).batch
    assert list(whole["pixel_values"]) == list(patches)


def test_a_batch_without_any_image() -> None:
    for pixels, grids in ((None, None), (torch.ones(0, 5), torch.ones(0, 3, dtype=torch.int64))):
        batch = batch_with(num_images=torch.zeros(B, dtype=torch.int64), image_grid_thw=grids, pixel_values=pixels)
        for part in split(batch, batch_schema=NUM_IMAGES):
            assert part["pixel_values"] is None or len(part["pixel_values"]) == 0


def test_images_in_order_of_reordered_rows() -> None:
    batch = support.make_batch([2, 5, 3, 5]) | {"n": torch.tensor([1, 2, 0, 3]), "images": torch.arange(6)}
    config = PadMinConfig(token_budget=10, launch_cost=0, batch_schema={"images": Field("unit", counts="n")})
    for micro in iter_micro_batches(batch, config):
        own = {0: [0], 1: [1, 2], 2: [], 3: [3, 4, 5]}
        assert micro.batch["images"].tolist() == [image for row in micro.rows for image in own[row]]


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        (torch.tensor([2, 0, 2]), r"'images' has 3 units, but 'n' counts \[2, 0, 2\]"),
        (torch.tensor([4, 0, -1]), "none may be negative"),
        (torch.tensor([2.0, 0.0, 1.0]), "'n' counts the units of 'images': expected integers"),
        (["2", "0", "1"], "'n' counts the units of 'images', but it holds no numbers"),
    ],
)
def test_counts_that_do_not_fit_are_refused_before_the_first_micro_batch(counts: Any, found: str) -> None:
    with pytest.raises(BatchError, match=found):
        iter_micro_batches(
            batch_with(n=counts, images=torch.ones(3, 2)),
            PadMinConfig(batch_schema={"images": Field("unit", counts="n")}),
        )


def test_counting_entries_that_cannot_be_are_refused() -> None:
    batch = batch_with(n=torch.tensor([1, 1, 1]), images=torch.ones(3, 2), more=torch.ones(3, 2))
    for schema, found in (
        ({"images": Field("unit", counts="absent")}, "counts='absent': the batch has no such entry"),
        ({"images": Field("unit", counts="input_ids")}, "counts='input_ids', which is no entry of integers per row"),
        ({"images": Field("unit", counts="images")}, "counts='images', which is no entry"),
        ({"images": Field("unit", counts="more"), "more": Field("unit", counts="images")}, "which is no entry"),
    ):
        with pytest.raises(SchemaError, match=f"'(images|more)' is declared with .*{found}"):
            infer_schema(batch, schema)
    with pytest.raises(SchemaError, match="'images' has shape"):
        infer_schema(batch | {"images": torch.tensor(3)}, {"images": Field("unit", counts="n")})
    with pytest.raises(SchemaError, match="'images' is int, expected a tensor"):
        infer_schema(batch | {"images": 3}, {"images": Field("unit", counts="n")})


def test_as_many_rows_as_columns_decides_nothing() -> None:
    """A vector of positions and one of rows look alike; a batch of another width has shown which it is."""
    square = support.make_batch([3, 2, 1])
    with pytest.raises(SchemaError, match=r"'cache_position' has shape \(3,\)"):
        infer_schema(square | {"cache_position": torch.arange(3)})
    wide = support.make_batch([5, 2, 1]) | {"sample_weight": torch.ones(3)}
    seen = infer_schema(wide)
    again = infer_schema(square | {"sample_weight": torch.ones(3)}, previous=seen)
    assert again.fields["sample_weight"].kind == "row"


def test_unshifted_ids_beside_the_mask_must_be_declared() -> None:
    with pytest.raises(SchemaError, match=r"'tokens' has shape \(3, 6\)"):
        infer_schema(support.make_batch([5, 2, 1]) | {"tokens": torch.ones(3, 6, dtype=torch.int64)})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_masks_of_odd_types_are_named(dtype: torch.dtype) -> None:
    with pytest.raises(SchemaError, match=f"'attention_mask' is {dtype}"):
        infer_schema({"attention_mask": torch.ones(2, 3).to(dtype)})
