"""What is said to one `prepare` holds for that batch alone, and nothing is changed from outside."""

from __future__ import annotations

import pytest
from support import make_batch

from lightning_padmin import MicroBatcher, PadMinConfig

LENGTHS = (8, 7, 6, 5, 4, 3)
CONFIG = PadMinConfig(token_budget=16, launch_cost=0)


def sizes(batcher: MicroBatcher, **wishes: int) -> list[int]:
    return [len(micro.rows) for micro in batcher.prepare(make_batch(LENGTHS), **wishes)]


def test_a_budget_of_one_batch() -> None:
    batcher = MicroBatcher(CONFIG)
    usual = sizes(batcher)
    assert sizes(batcher, token_budget=8) == [1] * 6
    assert sizes(batcher) == usual == sizes(MicroBatcher(CONFIG))


def test_a_least_number_for_one_batch() -> None:
    batcher = MicroBatcher(PadMinConfig(launch_cost=10**6))
    assert sizes(batcher) == [6]
    assert len(sizes(batcher, min_micro_batches=4)) == 4
    assert sizes(batcher, min_micro_batches=99) == [1] * 6
    assert sizes(batcher) == [6]


def test_a_whole_batch_is_rolled_and_trimmed_and_not_split() -> None:
    batch = make_batch(LENGTHS, width=12)
    batcher = MicroBatcher(PadMinConfig(token_budget=8, launch_cost=0, max_rows=1))
    (micro,) = batcher.prepare_made(lambda: batch, is_whole=True)
    assert micro.batch["input_ids"].shape == (6, 8)
    assert len(batcher.prepare(batch)) == 6


def test_other_names_for_one_batch() -> None:
    batch = make_batch(LENGTHS)
    renamed = {"ids": batch["input_ids"], "seen": batch["attention_mask"], "labels": batch["labels"]}
    config = PadMinConfig(token_budget=16, launch_cost=0, mask_key="seen", batch_schema={"ids": "position"})
    batcher = MicroBatcher(CONFIG)
    found = batcher.prepare_made(lambda: renamed, names=config.batch)
    assert found.schema.mask == "seen"
    assert batcher.prepare(batch).schema.mask == "attention_mask"


def test_a_batcher_cannot_be_given_other_options() -> None:
    with pytest.raises(AttributeError):
        MicroBatcher(CONFIG).config = PadMinConfig()  # type: ignore[misc]
