"""Steps as a loader makes them, and what each way to run them costs, against counts made by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_padmin.diagnose.packing import packed_rows
from lightning_padmin.diagnose.problems import DiagnoseError
from lightning_padmin.diagnose.remedies import LIMITS, packed, planned, real_tokens, rolled, today, trimmed
from lightning_padmin.diagnose.sampling import Ratio, Sample, Setup, cut_to, draw_steps, ratio
from lightning_padmin.planning.planner import plan_micro_batches

MIXED = [120, 90, 300, 40, 55, 30, 210, 65]


@pytest.fixture
def pairs():
    """(3 steps, 2 ranks, 2 batches, 4 rows, 2) prompts and completions."""
    rng = np.random.default_rng(1)
    return Sample(
        rng.integers(1, 100, (3, 2, 2, 4, 2)),
        Setup(batch_size=4, accumulate=2, world_size=2, batching="generation"),
        True,
    )


def test_fixed_width(lengths):
    sample = draw_steps(lengths(MIXED), Setup(batch_size=8, batching="fixed", max_length=512))
    assert real_tokens(sample).tolist() == [[910]]
    assert today(sample).slots.tolist() == [[4096]]
    assert trimmed(sample).slots.tolist() == [[2400]]
    assert packed(sample, 1024).slots.tolist() == [[1024]]
    assert packed(sample, 1024).passes.tolist() == [[1]]
    assert packed(sample, 512).passes.tolist() == [[2]]


@pytest.mark.parametrize(("rows", "slots"), [([500, 800, 2000], 6000), ([1700, 1710, 1720], 5160)])
def test_padded_to_the_longest(rows, slots, lengths):
    sample = draw_steps(lengths(rows), Setup(batch_size=3))
    assert today(sample).slots.tolist() == trimmed(sample).slots.tolist() == rolled(sample).slots.tolist() == [[slots]]
    assert packed(sample, 4096).slots.tolist() == [[sum(rows)]]


def test_generation_pads_each_side_over_the_whole_step(pairs):
    found, cut, moved = today(pairs), trimmed(pairs), rolled(pairs)
    for step, rank in np.ndindex(3, 2):
        batches = pairs.lengths[step, rank]
        widest = batches[..., 0].max() + batches[..., 1].max()
        assert found.slots[step, rank] == widest * 8
        assert cut.slots[step, rank] == sum(4 * (b[:, 0].max() + b[:, 1].max()) for b in batches)
        assert moved.slots[step, rank] == sum(4 * b.sum(axis=1).max() for b in batches)
    assert (found.slots > cut.slots).any()
    assert (cut.slots > moved.slots).any()
    assert (found.passes == 2).all()
    assert found.largest == max(
        4 * (each[..., 0].max() + each[..., 1].max()) for step in pairs.lengths for each in step
    )


def test_widths_are_rounded_up(lengths):
    sample = draw_steps(lengths([10, 17]), Setup(batch_size=2, pad_to_multiple_of=8))
    assert today(sample).slots.tolist() == [[48]]
    assert planned(sample, 24).slots.tolist() == [[16 + 24]]


def test_plan_is_the_planners_on_the_rows_of_a_rank(lengths):
    rows = np.random.default_rng(0).integers(1, 300, 64)
    sample = draw_steps(lengths(rows), Setup(batch_size=8, accumulate=4, launch_cost=50, max_rows=9))
    for method in ("optimal", "greedy"):
        found = planned(sample, 800, method)
        for step in range(2):
            own = sample.lengths[step].ravel()
            plan = plan_micro_batches(own, 800, launch_cost=50, max_rows=9, method=method)
            assert found.slots[step, 0] == plan.slots
            assert found.passes[step, 0] == len(plan)
            assert found.largest <= 800
        assert found.limits.sum() == found.passes.sum()


def test_ranks_run_equally_many_micro_batches():
    rows = np.array([[[[100, 100, 100, 100]], [[100, 60, 30, 10]]]])[..., None]
    sample = Sample(rows, Setup(batch_size=4, world_size=2, launch_cost=1), True)
    found = planned(sample, 1000)
    assert found.passes.tolist() == [[4, 4]]  # alone, the first rank would run one
    assert found.slots.tolist() == [[400, 200]]
    assert found.per_step(1).tolist() == [404]
    alone = planned(Sample(rows[:, :1], Setup(batch_size=4, launch_cost=1), True), 1000)
    assert alone.passes.tolist() == [[1]]


def test_rank_with_nothing_left_to_cut_runs_copies():
    rows = np.array([[[[500, 20]], [[100, 10]]]])[..., None]
    sample = Sample(rows, Setup(batch_size=2, world_size=2, launch_cost=0), True)
    assert planned(sample, 1000).slots.tolist() == [[520, 110]]
    one = Sample(np.array([[[[500, 20]], [[7, 7]]]])[..., None], Setup(batch_size=2, world_size=2, launch_cost=0), True)
    assert planned(one, 1000).slots.tolist() == [[520, 14]]
    single = Sample(np.array([[[[50]], [[7]]]])[..., None], Setup(batch_size=1, world_size=2), True)
    assert planned(single, 1000).slots.tolist() == [[50, 7]]


@pytest.mark.parametrize(
    ("budget", "max_rows", "launch_cost", "limits"),
    [
        (40, None, 1000, {"budget": 1, "end of the step": 1}),  # 4 rows of 10, then 2
        (1000, 3, 1000, {"max rows": 1, "end of the step": 1}),
        (1000, None, 1000, {"end of the step": 1}),
    ],
)
def test_what_ends_a_micro_batch(budget, max_rows, launch_cost, limits, lengths):
    setup = Setup(batch_size=6, max_rows=max_rows, launch_cost=launch_cost)
    found = planned(draw_steps(lengths([10] * 6), setup), budget)
    assert dict(zip(LIMITS, found.limits.tolist(), strict=True)) == {name: limits.get(name, 0) for name in LIMITS}


def test_cheaper_cut_ends_a_micro_batch(lengths):
    sample = draw_steps(lengths([1000, 10]), Setup(batch_size=2, launch_cost=5))
    assert planned(sample, 10_000).limits[LIMITS.index("launch cost")] == 1
    dear = draw_steps(lengths([1000, 10]), Setup(batch_size=2, launch_cost=5000))
    assert planned(dear, 10_000).limits[LIMITS.index("launch cost")] == 0


def _fewest(rows, context):
    """The least number of bins, by trying all assignments."""
    for bins in itertools.count(1):
        for choice in itertools.product(range(bins), repeat=len(rows)):
            loads = np.bincount(choice, weights=rows, minlength=bins)
            if (loads <= context).all():
                return bins
    return None


def test_packing_is_near_the_fewest_rows():
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = rng.integers(1, 60, 6).tolist()
        found, least = packed_rows(rows, 64), _fewest(rows, 64)
        assert least <= found <= 11 / 9 * least + 1
    assert packed_rows(MIXED, 512) == 2
    assert packed_rows(MIXED, 300) == 4
    assert packed_rows([1000, 24], 512) == 2  # cut into 512 + 488; the rest of it takes 24
    assert packed_rows([64] * 5, 64) == 5


def test_ratio_is_of_sums_and_its_error_is_the_scatter_of_resampling():
    rng = np.random.default_rng(0)
    below = rng.integers(50, 200, 400).astype(float)
    above = below * rng.uniform(0.4, 0.6, 400)
    found = ratio(above, below)
    assert found.value == pytest.approx(above.sum() / below.sum())
    assert found.value != pytest.approx((above / below).mean(), rel=1e-4)
    picks = rng.integers(0, 400, (4000, 400))
    scatter = (above[picks].sum(axis=1) / below[picks].sum(axis=1)).std()
    assert found.error == pytest.approx(scatter, rel=0.05)
    assert ratio(above[:1], below[:1]) == Ratio(above[0] / below[0], None)


@pytest.mark.parametrize("batching", ["random", "generation"])
def test_steps_are_drawn_without_replacement(batching, lengths):
    rows = list(range(1, 101))
    setup = Setup(batch_size=3, accumulate=4, world_size=2, batching=batching)
    sample = draw_steps(lengths(rows), setup)
    assert sample.lengths.shape == (4, 2, 4, 3, 1)
    assert len(set(sample.lengths.ravel().tolist())) == 96
    assert sample.is_whole
    again, other = draw_steps(lengths(rows), setup), draw_steps(lengths(rows), Setup(**{**vars(setup), "seed": 1}))
    assert (again.lengths == sample.lengths).all()
    assert (other.lengths != sample.lengths).any()
    few = draw_steps(lengths(rows), Setup(**{**vars(setup), "steps": 2}))
    assert (len(few.lengths), few.is_whole) == (2, False)


def test_sorted_batches_hold_neighbours(lengths):
    rows = np.random.default_rng(0).permutation(60) + 1
    sample = draw_steps(lengths(rows), Setup(batch_size=5, accumulate=2, batching="sorted"))
    batches = sample.lengths.reshape(-1, 5)
    assert (batches.max(axis=1) - batches.min(axis=1) == 4).all()
    shuffled = draw_steps(lengths(rows), Setup(batch_size=5, accumulate=2)).lengths.reshape(-1, 5)
    assert (shuffled.max(axis=1) - shuffled.min(axis=1) > 4).any()


def test_order_of_the_file_is_kept_and_ranks_take_turns(lengths):
    sample = draw_steps(lengths(range(1, 17)), Setup(batch_size=2, accumulate=2, world_size=2, batching="file"))
    assert sample.lengths[0, :, :, :, 0].tolist() == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert sample.lengths[1, 0, 0, :, 0].tolist() == [9, 10]


@pytest.mark.parametrize(
    ("rows", "shape"), [(3, (1, 1, 1, 3)), (9, (1, 1, 2, 4)), (17, (1, 2, 2, 4)), (32, (2, 2, 2, 4))]
)
def test_step_shrinks_to_the_rows_there_are(rows, shape, lengths):
    sample = draw_steps(lengths([7] * rows), Setup(batch_size=4, accumulate=2, world_size=2))
    assert sample.lengths.shape == (*shape, 1)


def test_rows_are_cut_from_their_end(lengths):
    found, longer = cut_to(lengths([[30, 20], [60, 5], [10, 10]]), 40)
    assert found.table.tolist() == [[30, 10], [40, 0], [10, 10]]
    assert longer == 2
    same, none = cut_to(lengths([[30, 20]]), 50)
    assert (same.table.tolist(), none) == ([[30, 20]], 0)


def test_setup_refuses_what_is_out_of_range():
    with pytest.raises(DiagnoseError, match=r"--accumulate 0: expected an integer of at least 1"):
        Setup(accumulate=0)
    with pytest.raises(DiagnoseError, match=r"--batching shuffled: is unknown, use one of random, sorted"):
        Setup(batching="shuffled")
