"""PadMinCallback under DDP: two real gloo processes, uneven work, against the same Trainers without the callback."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import processes
import pytest
import support
import torch
from processes import Ranks

from lightning_padmin import plan_micro_batches

WORKER = Path(__file__).with_name("ddp_worker.py")
SCENARIOS = [
    "uneven",
    "equal_weights",
    "logged",
    "flushed",
    "out_of_rows",
    "no_loss_on_one_rank",
    "global_mean",
    "one_rank_malformed",
    "checked",
    "audited",
    "out_of_memory",
    "joint",
    "packed",
    "manual",
    "reductions",
    "synchronised_logging",
    "variants",
    "padded_forward",
]
FIVE, ONE, BUDGET = [24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2], 24


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    output = tmp_path_factory.mktemp("ddp") / "result.out"
    return processes.results(WORKER, output, *SCENARIOS)


def worst(result: dict[str, Any]) -> float:
    pairs = zip(result["split"]["gradients"], result["plain"]["gradients"], strict=True)
    return max(support.relative(a, b) for a, b in pairs)


def test_natural_counts_are_five_and_one() -> None:
    assert [len(plan_micro_batches(lengths, BUDGET, launch_cost=4)) for lengths in (FIVE, ONE)] == [5, 1]


def test_uneven_counts_accumulation_clipping(ranks: Ranks) -> None:
    for rank in ranks:
        result = rank["uneven"]
        assert len(result["plain"]["gradients"]) == 3
        assert worst(result) <= 1e-12
        assert support.relative(result["split"]["parameters"], result["plain"]["parameters"]) <= 1e-12
        torch.testing.assert_close(result["split"]["losses"], result["plain"]["losses"], rtol=1e-12, atol=0)
        assert len(result["split"]["shapes"]) == 5 * len(result["plain"]["shapes"])
        assert result["stats"]["micro_batches"] == 25
    assert torch.equal(ranks[0]["uneven"]["split"]["parameters"], ranks[1]["uneven"]["split"]["parameters"])


def test_negative_control_equal_weights(ranks: Ranks) -> None:
    assert worst(ranks[0]["equal_weights"]) > 0.1


def test_logged_values_on_both_ranks_equal_a_hand_count(ranks: Ranks) -> None:
    # Rank 0, first batch: lengths 24 | 20 | 12 12 | 6 6 6 6 | 3 2, slots 24 + 20 + 24 + 24 + 6 = 98.
    # Rank 1 must come to five with four rows 5 4 3 2: four single rows, 14 slots, and a dummy of the shortest, 2.
    real, before = sum(FIVE) + sum(ONE), 10 * 24 + 4 * 5
    slots = 98 + 14 + 2
    expected = {
        "real_tokens": real,
        "loss_tokens": real - 14,  # one prompt token in each of 10 + 4 rows
        "slots": slots,
        "waste": 1 - real / slots,
        "waste_before": 1 - real / before,
        "micro_batches": 10,
        "longest_row": 24,
        "dummies": 1,
        "over_budget_rows": 0,
        # Before the counts were aligned rank 1 planned one micro-batch of 4 x 5 slots, rank 0 waits for nobody.
        "idle": (98 - 20) / (98 - 20 + slots),
    }
    for rank in ranks:
        found = rank["logged"]["callback_metrics"]
        for name, value in expected.items():
            assert found[f"padmin/{name}"] == pytest.approx(value, rel=1e-6), name
    header, *rows = ranks[0]["logged"]["csv"].splitlines()
    columns = header.split(",")
    written = [dict(zip(columns, row.split(","), strict=True)) for row in rows]
    written = [row for row in written if row["padmin/slots"]]
    assert [row["step"] for row in written] == ["0", "1"]
    for row in written:
        for name, value in expected.items():
            assert float(row[f"padmin/{name}"]) == pytest.approx(value, rel=1e-9), name


def test_metrics_are_merged_at_the_end_too(ranks: Ranks) -> None:
    assert ranks[0]["flushed"] == ranks[1]["flushed"]
    assert ranks[0]["flushed"]["padmin/slots"] == 2 * (98 + 14 + 2)
    assert ranks[0]["flushed"]["padmin/micro_batches"] == 20
    assert ranks[0]["flushed"]["padmin/audits"] >= 1  # the same on both, as all of them


def test_dummies_keep_ranks_in_step_and_out_of_everything_else(ranks: Ranks) -> None:
    for index, rank in enumerate(ranks):
        result = rank["out_of_rows"]
        assert worst(result) <= 1e-12
        assert len(result["split"]["shapes"]) == 8
        assert result["stats"]["dummies"] == (0, 4)[index]
        assert result["rows"][0] == result["rows"][1]
        for merged, original in result["firsts"]:
            assert torch.equal(merged, original)


def test_a_rank_without_loss_tokens_contributes_zero(ranks: Ranks) -> None:
    by_hand = ranks[0]["no_loss_on_one_rank"]["own"] / 2
    for rank in ranks:
        assert support.relative(rank["no_loss_on_one_rank"]["gradient"], by_hand) <= 1e-12
    assert [len(rank["no_loss_on_one_rank"]["told"]) for rank in ranks] == [0, 1]


def test_global_mean(ranks: Ranks) -> None:
    for rank in ranks:
        result = rank["global_mean"]
        assert support.relative(result["gradient"], result["by_hand"]) <= 1e-12
        assert support.relative(result["per_rank"], result["by_hand"]) > 0.1


def test_all_ranks_raise_when_one_batch_is_malformed(ranks: Ranks) -> None:
    first, second = (rank["one_rank_malformed"] for rank in ranks)
    assert first["message"].startswith("PeerError: rank 1 refused its batch (BatchError)")
    assert second["message"].startswith("BatchError: 'attention_mask' is all zero")
    for result in (first, second):
        assert result["forwards"] == 0
        assert worst(result["again"]) <= 1e-12


@pytest.mark.parametrize("case", ["first", "backward", "last", "only", "a single row"])
def test_all_ranks_hear_of_a_rank_that_runs_out_of_memory(ranks: Ranks, case: str) -> None:
    first, second = (rank["out_of_memory"][case] for rank in ranks)
    wanted = {
        "first": r"out of memory on rank 0 in micro-batch 1 of \d: 2 x 24 = 48 slots\. Set token_budget=24 \(",
        "backward": r"out of memory on rank 0 in micro-batch 1 of \d: 2 x 24 = 48 slots\. Set token_budget=24 \(",
        "last": r"out of memory on rank 1 in micro-batch \d of 2: 1 x \d = \d slots\. One row alone does not fit",
        "only": r"out of memory on rank 1 in micro-batch 1 of 1: 2 x 6 = 12 slots\. Set token_budget=6 \(",
        "a single row": r"out of memory on rank 1 in micro-batch 1 of \d: 1 x 7 = 7 slots\. .*fewer than 7 tokens",
    }[case]
    for rank in (first, second):
        assert re.match("OutOfMemoryError: " + wanted, rank[0])
    assert first[1] is second[1] is True  # parameters as before, no gradients


def test_the_budget_that_is_named_fits(ranks: Ranks) -> None:
    assert [rank["out_of_memory"]["with the budget it names"] for rank in ranks] == [("", 2)] * 2


def test_another_error_of_one_rank(ranks: Ranks) -> None:
    first, second = (rank["out_of_memory"]["another error"][0] for rank in ranks)
    assert first == "KeyError: 'no memory is needed for this'"
    assert second == "PeerError: rank 0 raised an error in training; its message stands in that rank's log"


@pytest.mark.parametrize("case", ["both", "one_tells", "sum", "static_graph"])
def test_the_check_raises_on_both_ranks_with_one_message(ranks: Ranks, case: str) -> None:
    first, second = (rank["checked"][case] for rank in ranks)
    how = "row-mean" if case in ("both", "one_tells") else "sum"
    assert first[0] == second[0]
    assert first[0].startswith("GradientCheckError: first-batch check (rank ")
    assert f"set loss_reduction='{how}'" in first[0]
    assert "(rank 1)" in first[0] or case != "one_tells"
    assert (first[1], second[1]) == (True, True), "parameters have changed"


def test_the_check_passes_right_declarations_on_two_ranks(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["checked"]["right"] == [("", 2)] * 3
        assert rank["checked"]["gathers"] == ("", 2)
        # A rank with one row in each batch cannot be checked, and is not waited for.
        assert rank["checked"]["one_row_on_one_rank"] == ("", 2)


def test_joint_mode_with_a_loss_that_couples_rows(ranks: Ranks) -> None:
    """In float32, since the model casts to it."""
    for mode in ("joint", "replay", "auto"):
        for rank, chunks in zip(ranks, (20, 4), strict=True):
            result = rank["joint"][mode]
            assert worst(result) <= 1e-5
            assert support.relative(result["split"]["parameters"], result["plain"]["parameters"]) <= 1e-5
            assert result["stats"]["micro_batches"] == chunks
            assert result["logged"]["padmin/micro_batches"] == 24
        assert torch.equal(*(rank["joint"][mode]["split"]["parameters"] for rank in ranks))
    assert [rank["joint"]["auto"]["logged"]["padmin/mode"] for rank in ranks] == [2, 1]


@pytest.mark.parametrize("case", ["uneven", "late"])
def test_packed_rows(ranks: Ranks, case: str) -> None:
    """In float32, since the model casts to it."""
    for rank in ranks:
        result = rank["packed"][case]
        assert worst(result) <= 1e-5
        assert support.relative(result["split"]["parameters"], result["plain"]["parameters"]) <= 1e-5
    stats = [rank["packed"][case]["stats"] for rank in ranks]
    assert stats[0]["micro_batches"] == stats[1]["micro_batches"] > 4
    assert stats[0]["dummies"] == 0 < stats[1]["dummies"]
    # A rank that knows nothing of the model yet keeps all from packing their first batch.
    assert (stats[0]["slots"] == stats[0]["real_tokens"]) is (case == "uneven")
    assert torch.equal(*(rank["packed"][case]["split"]["parameters"] for rank in ranks))


def test_a_mask_with_holes_on_one_rank_ends_both_in_joint_mode(ranks: Ranks) -> None:
    first, second = (rank["packed"]["holes"] for rank in ranks)
    assert re.match(r"BatchError: layout='pack': 'attention_mask' has holes inside of 1 rows", first)
    assert second.startswith("PeerError")


def test_a_model_that_leaks_is_refused_on_both_ranks(ranks: Ranks) -> None:
    for rank in ranks:
        assert re.match(r"ArchitectureError: layout='pack': model \(OPTForCausalLM", rank["packed"]["leaks"])


def test_manual_optimization(ranks: Ranks) -> None:
    for rank, count in zip(ranks, (20, 20), strict=True):
        result = rank["manual"]
        assert len(result["plain"]["gradients"]) == 2
        assert worst(result) <= 1e-12
        assert result["stats"]["micro_batches"] == count
    assert torch.equal(*(rank["manual"]["split"]["parameters"] for rank in ranks))


def test_ranks_probe_equally_many_rows(ranks: Ranks) -> None:
    """One rank could run four rows within the budget, the other two; the step gathers them."""
    first, second = (rank["checked"]["contrasts"][0] for rank in ranks)
    assert first == second
    assert "couples rows" in first


def test_what_is_new_on_one_rank_is_looked_at_on_both(ranks: Ranks) -> None:
    for rank in ranks:
        parameters, steps, audits = rank["audited"]["right"]["audit"]
        assert torch.equal(parameters, rank["audited"]["right"]["off"][0])  # to the bit
        assert steps == 6
        # Step 1, what its passes have shown besides, 3, and 5 for a class that rank 1 alone has.
        assert audits == [0, 1, 2, 3, 3, 4]
    first, second = (rank["audited"]["class"] for rank in ranks)
    assert first[1] == second[1] == 4  # neither has taken the step
    for words, _, _ in (first, second):
        assert "audit of step 5" in words
    assert "'classes' is 1" in second[0]


def test_a_term_that_is_new_on_one_rank_ends_both_a_step_later(ranks: Ranks) -> None:
    for rank in ranks:
        words, steps, _ = rank["audited"]["term"]
        assert "audit of step 6" in words  # known behind the passes of step 5, which was taken
        assert steps == 5


def test_an_error_in_the_checked_step_stops_both_ranks(ranks: Ranks) -> None:
    first, second = (rank["checked"]["fails"][0] for rank in ranks)
    assert first.startswith("PeerError: rank 1 refused its batch")
    assert second.startswith("RuntimeError: no such thing")


def test_gradients_are_reduced_once_per_batch(ranks: Ranks) -> None:
    for rank in ranks:
        plain, split = rank["reductions"]
        assert plain == split > 0


def test_synchronised_logging_neither_hangs_nor_changes(ranks: Ranks) -> None:
    for rank in ranks:
        plain, split = rank["synchronised_logging"]
        assert split == pytest.approx(plain, rel=1e-6)
        assert plain["rows"] == 14


@pytest.mark.parametrize("mode", ["joint", "replay"])
def test_padded_forward_with_uneven_chunks(ranks: Ranks, mode: str) -> None:
    assert [rank["padded_forward"]["chunks"] for rank in ranks] == [5, 1]
    for rank in ranks:
        result = rank["padded_forward"]
        assert support.relative(result["found"][mode], result["expected"]) <= 1e-12


@pytest.mark.parametrize("variant", ["find_unused", "static_graph", "bucket_view"])
def test_variants_of_ddp(ranks: Ranks, variant: str) -> None:
    for rank in ranks:
        assert worst(rank["variants"][variant]) <= 1e-12
        assert len(rank["variants"][variant]["split"]["shapes"]) == 10


@pytest.mark.slow
def test_both_processes_end_when_one_runs_out_of_batches(tmp_path: Path) -> None:
    (code_0, text_0), _ = processes.finish(
        processes.start(WORKER, tmp_path / "result.out", "one_rank_ends_early", fresh=True), timeout=50
    )
    assert code_0 != 0
    assert "Connection closed by peer" in text_0  # as without the callback
    assert "not all ranks came to the end" not in text_0


def test_both_processes_end_when_one_raises_in_a_micro_batch(tmp_path: Path) -> None:
    (code_0, _), (code_1, text_1) = processes.finish(
        processes.start(WORKER, tmp_path / "result.out", "one_rank_fails"), timeout=150
    )
    assert code_0 != 0
    assert code_1 != 0
    assert "rank 1 fails in its second micro-batch" in text_1
