"""Rows with images: GRPO and RLOO with the mixin against without, for each way in which TRL hands images on."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("PIL")

import trl_cases as cases
import trl_vision as vision

from lightning_padmin import PadMinWarning
from lightning_padmin.errors import BatchError
from lightning_padmin.integrations.trl import (
    hooks as trl_stock,
)
from lightning_padmin.integrations.trl import (
    images as trl_images,
)
from lightning_padmin.integrations.trl import (
    passes as trl_passes,
)
from lightning_padmin.integrations.trl import (
    window as trl_window,
)

pytestmark = pytest.mark.skipif(cases.RELEASE < (1, 16), reason="refused, which is tested elsewhere")

WORKER = Path(__file__).parents[1] / "distributed" / "trl_images_worker.py"
MODES = ("split", "joint", "replay")
SPLIT_FIRST = ["split", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("joint", "replay"))]
FIRST = ("qwen2_vl", "gemma3", "idefics3")  # patches, token types, images padded by row
OPTIONS = {"max_steps": 2, "beta": 0.2, "num_iterations": 2, "loss_type": "dapo"}
# One optimizer step, whose rows are all generated for it.
ONE = {"max_steps": 1, "loss_type": "grpo"}


def slow_but(family: str, mode: str) -> Any:
    fast = family in FIRST and mode == "split"
    return pytest.param(family, mode, marks=[] if fast else [pytest.mark.slow])


class LeavesOutNoImages:
    """Stock hands on images of which there are none, and models fail on them; also where it scores some at a time."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        if options.get("num_images") is not None and not any(options["num_images"]):
            options = {name: value for name, value in options.items() if name not in trl_images.NAMES}
        return super()._get_per_token_logps_and_entropies(*args, **(options | {"batch_size": None}))


def both(
    mode: str, options: dict[str, Any], family: str = "qwen2_vl", *inner: type, budget: int = 96, **given: Any
) -> tuple[cases.Record, cases.Record]:
    """The run with the mixin, and the one without."""
    stock, ours = cases.trainers(cases.GRPOTrainer, *inner)
    make = vision.FAMILIES[family].model
    padmin = cases.padmin(mode, token_budget=budget)
    found = cases.train(ours, options, padmin, make, **vision.given(family, **given))
    return found, cases.train(stock, options, None, make, **vision.given(family, **given))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), [slow_but(family, mode) for family in vision.FAMILIES for mode in MODES])
def test_gradients_and_metrics(family: str, mode: str) -> None:
    found, wanted = both(mode, OPTIONS, family, counts=(1, 2))
    cases.same(found, wanted)
    assert found.largest <= 96
    stats = found.trainer.padding_stats
    assert stats.slots < 0.95 * stats.slots_before
    sees = [
        any(part in name for part in ("visual", "vision")) * torch.ones(parameter.numel())
        for name, parameter in wanted.trainer.model.named_parameters()
    ]
    assert (wanted.gradients[0] * torch.cat(sees)).any()


MIXED = OPTIONS | {"per_device_train_batch_size": 8, "loss_type": "grpo"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), [slow_but(family, mode) for family in vision.FAMILIES for mode in MODES])
def test_rows_without_images_and_with_several(family: str, mode: str) -> None:
    # With as many images as rows stock mixes up what Idefics has, see below.
    counts = (3, 0, 1, 2) if family == "idefics3" else (2, 0, 1)
    cases.same(*both(mode, MIXED, family, LeavesOutNoImages, budget=128, counts=counts))


@pytest.mark.slow
@pytest.mark.parametrize("mode", SPLIT_FIRST)
def test_whole_micro_batches_without_images(mode: str) -> None:
    options = {"per_device_train_batch_size": 2, "num_generations": 2, "gradient_accumulation_steps": 4, "max_steps": 2}
    cases.same(*both(mode, options, "qwen2_vl", LeavesOutNoImages, counts=(1, 0)))


@pytest.mark.parametrize("mode", SPLIT_FIRST)
def test_windows_and_rows_that_lose_all_tokens(mode: str) -> None:
    options = OPTIONS | {
        "steps_per_generation": 6,
        "gradient_accumulation_steps": 4,
        "mask_truncated_completions": True,
    }
    cases.same(*both(mode, options, counts=(1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", SPLIT_FIRST)
def test_rloo(mode: str) -> None:
    options = {"beta": 0.2, "num_iterations": 2, "max_steps": 2}
    runs = [
        cases.train(kind, options, padmin, vision.qwen2_vl, **vision.given(counts=(2, 1)))
        for kind, padmin in ((cases.OURS_RLOO, cases.padmin(mode)), (cases.STOCK_RLOO, None))
    ]
    cases.same(*runs)


@pytest.mark.slow
def test_evaluation() -> None:
    options = ONE | {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    runs = [
        cases.train(kind, options, padmin, vision.qwen2_vl, eval_dataset=vision.prompts((1, 2), 8), **vision.given())
        for kind, padmin in ((cases.OURS, cases.padmin()), (cases.STOCK, None))
    ]
    cases.same(*runs)
    assert any("eval_loss" in logs for logs in runs[0].logs)


# What must fail.


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_negative_control_images_of_the_next_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(batches: Any) -> Any:
        return {name: items[1:] + items[:1] for name, items in trl_images.pooled_by_row(batches).items()}

    monkeypatch.setattr(trl_window, "pooled_by_row", shifted)
    found, wanted = both("split", ONE, family, sides=(24,))
    assert cases.gradient_difference(found, wanted) > 0.05


def test_negative_control_every_chunk_weighs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_passes.Passes, "_split", cases.equally(trl_passes.Passes._split))
    assert cases.gradient_difference(*both("split", ONE | {"loss_type": "dapo"}, counts=(1, 2))) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("gemma3", "token_type_ids"), ("qwen2_vl", "mm_token_type_ids")])
def test_negative_control_token_types_of_other_columns(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column off, as where they are not rolled."""

    original = trl_images.joined

    def unrolled(batch: Any) -> Any:
        changed = dict(original(batch))
        changed[name] = changed[name].roll(1, dims=1)
        return changed

    monkeypatch.setattr("lightning_padmin.integrations.trl.logprobs.joined", unrolled)
    try:
        with warnings.catch_warnings():  # of what the first window shows, which is not looked at here
            warnings.simplefilter("ignore", PadMinWarning)
            difference = cases.gradient_difference(*both("split", ONE, family))
    except (IndexError, RuntimeError, ValueError):  # M-RoPE counts the tokens of each image
        return
    assert difference > 1e-3


# Each row as it is alone.


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in FIRST else [pytest.mark.slow]) for f in vision.FAMILIES]
)
def test_log_probs_are_those_of_each_row_alone(family: str) -> None:
    """Unpadded, with its own images: a truth that is not stock's."""
    trainer = cases.build(
        cases.OURS, ONE, cases.padmin(), vision.FAMILIES[family].model, **vision.given(family, counts=(1, 2, 1))
    )
    trainer.model.train()
    inputs = trainer._prepare_inputs(trainer_rows(trainer))
    entries = trainer._buffered_inputs
    assert inputs is entries[0]
    for entry in entries:
        images = trl_images.by_row(entry)
        tokens = trl_stock.tokens_of(entry)
        completion = entry["completion_ids"].shape[1]
        given = {name: entry[name] for name in (*trl_images.NAMES, *trl_stock.POSITIONS) if name in entry}
        ids, mask = tokens.pop("input_ids"), tokens.pop("attention_mask")
        with torch.no_grad():
            found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, completion, **given)[0]
            for row in range(len(ids)):
                real = mask[row].bool()
                length = int(entry["completion_mask"][row].sum())
                own = trl_images.joined({name: items[row : row + 1] for name, items in images.items()})
                own |= {name: values[row : row + 1, real] for name, values in tokens.items()}
                alone = ids[row : row + 1, real]
                wanted = trainer._padmin._stock_scores(trainer.model, alone, torch.ones_like(alone), length, **own)[0]
                torch.testing.assert_close(found[row, :length], wanted[0], rtol=1e-4, atol=2e-5)


def trainer_rows(trainer: Any) -> Any:
    return next(iter(trainer.get_train_dataloader()))


@pytest.mark.slow
def test_positions_of_patches_do_not_depend_on_the_side_of_the_padding() -> None:
    model = vision.qwen2_vl().model
    row = [vision.BEGIN, *[vision.IMAGE] * 6, vision.END, 5, 6, 7]
    grid = torch.tensor([[1, 4, 6]])

    def positions(left: int, right: int) -> torch.Tensor:
        ids = torch.tensor([[0] * left + row + [0] * right])
        mask = (ids != 0).long()
        kinds = (ids == vision.IMAGE).int()
        found, _ = model.get_rope_index(ids, kinds, image_grid_thw=grid, attention_mask=mask)
        return found[:, :, left : left + len(row)]

    assert torch.equal(positions(5, 0), positions(0, 3))
    assert int(positions(5, 0).max()) > 3


# What text alone may bring.


class TypedTokens:
    """Kinds of tokens without images, and a model that reads them: log-probs are multiplied by what they say."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mask = trl_stock.tokens_of(output)["attention_mask"]
        source = torch.Generator().manual_seed(len(mask))
        output["token_type_ids"] = torch.randint(1, 4, mask.shape, generator=source) * mask
        return output

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, keep: int, token_type_ids: Any = None, **options: Any
    ) -> Any:
        log_probs, *rest = super()._get_per_token_logps_and_entropies(model, ids, mask, keep, **options)
        if token_type_ids is not None:
            assert torch.equal(token_type_ids > 0, mask > 0)
            log_probs = log_probs * (0.5 + 0.1 * token_type_ids[:, -keep:]) + 0.01 * token_type_ids.sum(1, keepdim=True)
        return log_probs, *rest


@pytest.mark.slow
@pytest.mark.parametrize("mode", SPLIT_FIRST)
def test_token_types_of_text(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trl_stock._EXPECTED, trl_stock.LOG_PROBS, ["self", "model"])
    stock, ours = cases.trainers(cases.GRPOTrainer, TypedTokens)
    options = {"loss_type": "dapo", "max_steps": 2}
    wanted = cases.train(stock, options, None)
    cases.same(cases.train(ours, options, cases.padmin(mode)), wanted)
    assert cases.gradient_difference(wanted, cases.stock(options)) > 0.05


# Cutting.


@pytest.mark.slow
def test_each_kind_of_unit_goes_with_its_row() -> None:
    def units(**inputs: Any) -> Any:
        rows = trl_images.by_row(inputs)
        again = trl_images.joined(rows)
        assert all(torch.equal(torch.as_tensor(again[name]), torch.as_tensor(inputs[name])) for name in inputs)
        return {name: [len(item) for item in items] for name, items in rows.items() if name not in trl_images.COUNTS}

    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 4]])
    images, counts = torch.randn(3, 4), [2, 0, 1]
    found = units(pixel_values=torch.randn(28, 5), image_grid_thw=grid, num_images=counts)
    assert found == {"pixel_values": [12, 0, 16], "image_grid_thw": counts}
    assert units(pixel_values=images, num_images=counts, image_sizes=images) == dict.fromkeys(
        ("pixel_values", "image_sizes"), counts
    )
    assert units(pixel_values=images, image_position_ids=images, num_images=counts)["image_position_ids"] == counts
    tiles = units(pixel_values=torch.randn(7, 4), num_images=counts, num_tiles=[3, 0, 4])
    assert tiles == {"pixel_values": [3, 0, 4]}
    padded = torch.ones(3, 2, 1, 4, 4)
    assert units(pixel_values=padded, pixel_attention_mask=padded[:, :, 0], num_images=[1, 1, 2]) == {
        "pixel_values": [1, 1, 1],
        "pixel_attention_mask": [1, 1, 1],
    }


@pytest.mark.slow
def test_without_images_nothing_is_handed_on() -> None:
    assert trl_images.by_row({"num_images": None, "pixel_values": None}) == {}
    rows = trl_images.by_row({"pixel_values": torch.randn(2, 4), "num_images": [2, 0]})
    chunk = {name: items[1:] for name, items in rows.items()} | {"input_ids": torch.ones(1, 3)}
    assert trl_images.joined(chunk).keys() == {"input_ids"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"pixel_values": torch.ones(3, 4)}, "pixel_values: without 'num_images' and 'pixel_values' nobody knows"),
        (
            {"pixel_values": torch.ones(9, 4), "image_grid_thw": torch.ones(2, 3, dtype=torch.long), "num_images": [2]},
            r"'pixel_values' has 9 slices, but the batch's counts give its rows \[2\]",
        ),
        ({"pixel_values": torch.ones(4, 4), "num_images": [1, 2]}, r"'pixel_values' has 4 slices"),
        (
            {"pixel_values": torch.ones(2, 4), "spatial_shapes": torch.ones(2, 2), "num_images": [1, 1]},
            "'spatial_shapes' are those of tiles: without 'num_tiles' nobody knows",
        ),
    ],
)
def test_counts_that_do_not_fit(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        trl_images.by_row(inputs)


class WithVideos:
    """Of a trainer of one's own."""

    def _get_per_token_logps_and_entropies(self, *args: Any, pixel_values_videos: Any = None, **options: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(*args, pixel_values_videos=torch.ones(4, 2), **options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_what_is_not_known_is_refused(mode: str) -> None:
    _, ours = cases.trainers(outer=(WithVideos,))
    with pytest.raises(
        BatchError, match="'pixel_values_videos' is handed to the log-prob function, and how it belongs"
    ):
        cases.train(ours, ONE, cases.padmin(mode))


@pytest.mark.slow
def test_rows_whose_pixels_and_masks_stock_has_mixed_up() -> None:
    """Padded to two images each, where there are as many images as rows: stock takes them for images in a line."""
    pixels = torch.zeros(2, 2, 1, 4, 4)
    pixels[0] = 1.0  # the first row has two images, the second none
    right = {"pixel_values": pixels, "pixel_attention_mask": pixels[:, :, 0], "num_images": [2, 0]}
    assert [len(item) for item in trl_images.by_row(right)["pixel_values"]] == [1, 1]
    wrong = right | {"pixel_attention_mask": pixels[:, :, 0].flip(0), "num_images": [0, 2]}
    with pytest.raises(BatchError, match=r"not of the same rows: TRL \(1\.16\) mixes them up"):
        trl_images.by_row(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("mode", SPLIT_FIRST)
def test_what_stock_mixes_up_is_refused(mode: str) -> None:
    """Stock itself fails on it, or trains on the images of other rows."""
    _, ours = cases.trainers(cases.GRPOTrainer, LeavesOutNoImages)
    with pytest.raises(BatchError, match="not of the same rows"):
        cases.train(ours, MIXED, cases.padmin(mode), vision.idefics3, **vision.given("idefics3", counts=(2, 0, 1)))


@pytest.mark.slow
def test_a_chunk_with_images_runs_last() -> None:
    chunks = [SimpleNamespace(rows=np.array(rows)) for rows in ([0, 3], [1], [2], [4])]
    assert trl_images.in_order(chunks, None) == [0, 1, 2, 3]
    assert trl_images.in_order(chunks, [0, 0, 0, 0, 0]) == [0, 1, 2, 3]
    assert trl_images.in_order(chunks, [0, 1, 0, 1, 0]) == [0, 2, 3, 1]
    assert trl_images.in_order(chunks, [1, 1, 1, 1, 1]) == [0, 1, 2, 3]


# More than one process.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> processes.Ranks:
    return processes.results(WORKER, tmp_path_factory.mktemp("trl") / "result.out", timeout=240, fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("unused", [False, True])
def test_two_processes(ranks: processes.Ranks, unused: bool, mode: str) -> None:
    """Chunks without images do not reach the vision tower, and gradients are reduced all the same."""
    for rank in ranks:
        found, wanted = rank[unused, mode], rank[unused, "stock"]
        assert cases.gradient_difference(found, wanted) <= 1e-5
    worst, metric = cases.metric_difference(ranks[0][unused, mode], ranks[0][unused, "stock"])
    assert worst <= 1e-5, metric
    assert all(rank["chunks without images"] for rank in ranks)


@pytest.mark.slow
def test_sharded_models_that_see_run_as_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_stock, "distributed_type", lambda trainer: "FSDP")
    with pytest.warns(PadMinWarning, match="under FSDP a model with a vision tower runs as without PadMinMixin"):
        trainer = cases.build(cases.OURS, ONE, cases.padmin(), vision.qwen2_vl, **vision.given())
    found = cases.run(trainer)
    wanted = cases.train(cases.STOCK, ONE, None, vision.qwen2_vl, **vision.given())
    assert torch.equal(found.parameters, wanted.parameters)
    assert found.trainer.padding_stats.batches == 0
