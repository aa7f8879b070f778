"""What the command says, on worked examples, on GSM8K's lengths, and where there is nothing to gain."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lightning_padmin import PadMinConfig
from lightning_padmin.diagnose.report import choose_budgets, make_report
from lightning_padmin.diagnose.sampling import Setup
from lightning_padmin.diagnose.spread import length_stats
from lightning_padmin.diagnose.text import histogram, render
from lightning_padmin.diagnose.verdict import judge, paste_lines

MIXED = [120, 90, 300, 40, 55, 30, 210, 65]
TOKENIZER = Path.home() / ".cache" / "lightning-padmin" / "smollm2-135m-instruct"


def _waste(report, name):
    return report.remedy(name).waste.value


def test_worked_example_of_a_fixed_context(diagnose, data, tmp_path):
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, MIXED)))
    arguments = (tmp_path / "lengths.txt", "--batching", "fixed", "--max-length", 512)
    found = data(*arguments)
    assert found["lengths"]["tokens"] == 910
    remedies = {each["name"]: each for each in found["remedies"]}
    assert remedies["today"]["slots"] == 4096
    assert 1 - remedies["today"]["waste"]["value"] == pytest.approx(0.222, abs=5e-4)
    assert remedies["packed"]["slots"] == 1024
    assert 1 - remedies["packed"]["waste"]["value"] == pytest.approx(0.889, abs=5e-4)
    assert remedies["today"]["slots"] / remedies["packed"]["slots"] == 4
    _, out, _ = diagnose(*arguments)
    assert "today               4,096  77.8%" in out
    assert "packed (the limit)  1,024  11.1%" in out


def test_batch_with_one_long_row(lengths):
    report = make_report(lengths([500, 800, 2000]), Setup(batch_size=3))
    assert _waste(report, "today") == pytest.approx(0.45)
    assert judge(report).kind == "plan"
    assert "Padding costs you: 45% of all slots" in render(report)


def test_full_batch_is_told_that_padding_is_not_the_problem(lengths):
    report = make_report(lengths([1700, 1710, 1720]), Setup(batch_size=3))
    assert 1 - _waste(report, "today") == pytest.approx(0.994, abs=5e-4)
    verdict = judge(report)
    assert verdict.kind == "full"
    assert verdict.lines == ()
    assert verdict.sentences[0] == (
        "Padding is not your bottleneck: your batches are 99% full; look at batch size instead."
    )
    assert "PadMin" not in render(report)


@pytest.mark.parametrize(("batching", "kind"), [("sorted", "full"), ("random", "plan")])
def test_sorted_data_has_no_padding_problem(batching, kind, diagnose, gsm8k_file):
    code, out, _ = diagnose(gsm8k_file, "--batching", batching, "--batch-size", 16)
    assert code == 0
    assert ("Padding is not your bottleneck: your batches are 99.7% full" in out) == (kind == "full")
    assert ("PadMinCallback(" in out) == (kind == "plan")


def test_sorted_file_in_its_order_has_no_padding_problem(data, tmp_path):
    rows = np.sort(np.random.default_rng(0).integers(50, 2000, 4000))
    np.save(tmp_path / "sorted.npy", rows)
    assert data(tmp_path / "sorted.npy", "--batching", "file")["verdict"]["kind"] == "full"
    assert data(tmp_path / "sorted.npy")["verdict"]["kind"] == "plan"


# Real tokens over slots with 4 rows in a batch, a budget of 16,384 slots and a launch cost of 128.
GSM8K = {32: (0.51, 0.72, 0.74, 0.56, 0.94), 128: (0.44, 0.72, 0.74, 0.76, 0.96), 512: (0.38, 0.72, 0.74, 0.91, 0.98)}


@pytest.mark.parametrize("rows", GSM8K)
def test_table_of_gsm8k(rows, data, gsm8k_file):
    found = data(
        *(gsm8k_file, "--batching", "generation", "--batch-size", 4, "--accumulate", rows // 4),
        *("--budgets", 16384, "--steps", 1000),
    )
    remedies = {each["name"]: each["waste"] for each in found["remedies"]}
    for name, used in zip(("today", "trim", "roll + trim", "greedy", "budgeted"), GSM8K[rows], strict=True):
        # Half a unit of the table's last digit, and three standard errors.
        assert 1 - remedies[name]["value"] == pytest.approx(used, abs=0.005 + 3 * remedies[name]["error"]), name
    assert found["recommended"] == 16384


def test_table_of_gsm8k_is_not_that_of_other_batches(data, gsm8k_file):
    found = data(gsm8k_file, "--batching", "generation", "--batch-size", 8, "--accumulate", 4)
    trim = next(each["waste"] for each in found["remedies"] if each["name"] == "trim")
    assert abs(1 - trim["value"] - 0.72) > 0.05


@pytest.mark.skipif(
    "GSM8K_TRAIN_JSONL" not in os.environ or not TOKENIZER.is_dir(), reason="the text and its tokenizer are not here"
)
def test_tokens_of_gsm8k(gsm8k_file):
    from lightning_padmin.diagnose.fields import Columns
    from lightning_padmin.diagnose.reading import Source, read_lengths

    columns = Columns(prompt="question", completion="answer", has_tokenizer=True, chat=True)
    text = Source(name=os.environ["GSM8K_TRAIN_JSONL"], tokenizer=str(TOKENIZER), columns=columns)
    wanted = read_lengths(Source(name=str(gsm8k_file))).table
    assert (read_lengths(text).table == wanted).all()


def test_length_statistics():
    stats = length_stats(np.arange(1, 1001))
    assert (stats.rows, stats.tokens, stats.mean, stats.longest) == (1000, 500_500, 500.5, 1000)
    assert (stats.p10, stats.median, stats.p90, stats.p99) == (100, 500, 900, 990)
    assert sum(stats.counts) == 1000
    assert stats.edges[0] == 0


@pytest.mark.parametrize(
    "rows", [[7], [7] * 50, [1, 2], [1] * 99 + [10**6], list(range(1, 2000)), [999, 1000, 1001], [1, 10**6] * 5]
)
def test_every_row_is_in_one_bin(rows):
    stats = length_stats(np.array(rows))
    assert sum(stats.counts) == len(rows)
    assert len(stats.edges) == len(stats.counts) <= 13
    for low, high, count in zip(stats.edges, [*stats.edges[1:], np.inf], stats.counts, strict=True):
        assert count == sum(low <= row < high for row in rows)
    assert len({len(line.partition("|")[0]) for line in histogram(stats)}) == 1


def test_outliers_are_in_the_last_bar():
    lines = histogram(length_stats(np.array([1] * 999 + [5000])))
    assert lines[-1].strip().startswith("1 and more |###")


def test_sweep_covers_the_usual_budgets_where_rows_are_many(lengths):
    rows = np.random.default_rng(0).integers(500, 2000, 8000)
    report = make_report(lengths(rows), Setup(batch_size=64, accumulate=4, steps=8, launch_cost=10_000))
    budgets = [line.budget for line in report.sweep]
    assert {8192, 16_384, 32_768, 65_536} <= set(budgets)
    assert budgets == sorted(budgets)
    passes = [line.outcome.passes for line in report.sweep]
    assert passes == sorted(passes, reverse=True)
    assert report.sweep[0].binding == "budget"
    assert [line.outcome.time.value for line in report.sweep] == sorted(
        (line.outcome.time.value for line in report.sweep), reverse=True
    )


def test_budgets_follow_the_rows():
    assert choose_budgets(longest=569, loose=2910, peak=2448) == (1024, 2048, 2448, 4096)
    assert choose_budgets(longest=100_000, loose=400_000, peak=200_000) == (
        8192, 16_384, 32_768, 65_536, 131_072, 200_000, 262_144, 524_288,
    )  # fmt: skip
    assert choose_budgets(longest=7, loose=7, peak=7) == (7, 8)


def test_larger_budgets_change_nothing_beyond_the_loose_one(lengths):
    rows = np.random.default_rng(0).integers(10, 400, 512)
    setup = Setup(batch_size=8, accumulate=8)
    report = make_report(lengths(rows), setup)
    at, above, below = (
        make_report(lengths(rows), Setup(**{**vars(setup), "budgets": (budget,)})).line.outcome
        for budget in (report.loose_budget, 100 * report.loose_budget, report.loose_budget // 4)
    )
    assert (at.slots, at.passes) == (above.slots, above.passes)
    assert at.passes != below.passes


def test_budget_needs_no_more_memory_than_today_where_possible(lengths):
    rows = np.random.default_rng(0).integers(10, 400, 5120)
    report = make_report(lengths(rows), Setup(batch_size=4, accumulate=16, launch_cost=4000))
    assert report.line.budget <= report.peak_slots
    assert min(line.outcome.time.value for line in report.sweep) < report.line.outcome.time.value
    forced = make_report(lengths(rows), Setup(batch_size=4, accumulate=16, budgets=(100_000,)))
    assert any("may need more memory" in sentence for sentence in judge(forced).sentences)
    assert not any("may need more memory" in sentence for sentence in judge(report).sentences)


def test_rows_over_the_budget_are_counted(lengths):
    rows = [100] * 97 + [5000, 6000, 7000]
    report = make_report(lengths(rows), Setup(batch_size=10, budgets=(4096,)))
    assert report.line.over == 3
    assert (
        "Warning: 3 of 100 rows are longer than the budget of 4,096; each runs alone, the longest with 7,000 slots."
        in judge(report).sentences
    )
    wide = make_report(lengths(rows), Setup(batch_size=10, budgets=(8192,)))
    assert not any("longer than the budget" in sentence for sentence in judge(wide).sentences)


def test_small_gain_is_not_worth_a_change(lengths):
    rows = np.random.default_rng(0).integers(100, 150, 800)
    dear = make_report(lengths(rows), Setup(batch_size=8, launch_cost=20_000))
    assert judge(dear).kind == "small"
    assert judge(dear).lines == ()
    assert "not worth a change" in judge(dear).sentences[0]
    cheap = make_report(lengths(rows), Setup(batch_size=8, launch_cost=1))
    assert judge(cheap).kind == "plan"


def test_trimming_that_is_enough_is_named(lengths):
    rows = np.random.default_rng(0).integers(100, 104, 800)
    report = make_report(lengths(rows), Setup(batch_size=8, batching="fixed", max_length=512))
    verdict = judge(report)
    assert verdict.kind == "trim"
    assert 'padding="longest" is enough' in verdict.sentences[0]


def test_single_rows_are_full_and_ask_for_larger_batches(lengths):
    report = make_report(lengths([100] * 64), Setup(batch_size=1, accumulate=16))
    verdict = judge(report)
    assert verdict.kind == "full"
    assert "Starting passes is about 56% of the predicted time, with 1.0 rows in a pass" in verdict.sentences[1]
    large = judge(make_report(lengths([100] * 64), Setup(batch_size=64)))
    assert len(large.sentences) == 1


def test_waiting_ranks_are_told(lengths):
    rows = np.random.default_rng(0).integers(10, 2000, 4000)
    many = make_report(lengths(rows), Setup(batch_size=2, world_size=8, steps=40))
    assert many.remedy("today").idle > 0.1
    assert any(sentence.startswith("Ranks wait for the slowest") for sentence in judge(many).sentences)
    one = make_report(lengths(rows), Setup(batch_size=2))
    assert one.remedy("today").idle == pytest.approx(0)
    assert not any(sentence.startswith("Ranks wait") for sentence in judge(one).sentences)


def test_lines_to_paste_hold_valid_options(lengths):
    report = make_report(
        lengths([10, 500] * 64), Setup(batch_size=4, accumulate=8, budgets=(2048,), max_rows=16, launch_cost=64)
    )
    lines = dict(paste_lines(report))
    options = "token_budget=2_048, launch_cost=64, max_rows=16"
    whole = "  # with batch_size=32 and no accumulation"
    assert lines["Lightning"].endswith(f"\ntrainer = Trainer(callbacks=[PadMinCallback({options})]){whole}")
    assert lines["TRL"].endswith(f"\ntrainer = MyTrainer(..., padmin=PadMinConfig({options}))")
    assert lines["Accelerate"].endswith(f"\npad = PadMin(accelerator, PadMinConfig({options})){whole}")
    assert eval(f"PadMinConfig({options})", {"PadMinConfig": PadMinConfig}) == PadMinConfig(
        token_budget=2048, launch_cost=64, max_rows=16
    )
    plain = dict(paste_lines(make_report(lengths([10, 500] * 4), Setup(budgets=(2048,)))))
    assert plain["Lightning"].endswith("\ntrainer = Trainer(callbacks=[PadMinCallback(token_budget=2_048)])")


@pytest.mark.parametrize(("batching", "trainer"), [("generation", "GRPOTrainer"), ("random", "SFTTrainer")])
def test_lines_to_paste_run(batching, trainer, lengths):
    pytest.importorskip("trl")
    pytest.importorskip("lightning")
    report = make_report(lengths([[10, 500], [20, 30]] * 8), Setup(batch_size=4, batching=batching))
    made = {"Trainer": dict, "accelerator": None, "GRPOTrainer": dict, "SFTTrainer": dict}
    del made[{"GRPOTrainer": "SFTTrainer", "SFTTrainer": "GRPOTrainer"}[trainer]]
    for name, code in paste_lines(report):
        *imports, last = code.splitlines()
        exec("\n".join(imports), made)
        assert last in render(report)
        if name == "Lightning":
            exec(last, made)
            assert made["trainer"]["callbacks"][0].config.token_budget == report.recommended


def test_what_was_not_measured_is_said(diagnose, gsm8k_file):
    _, out, _ = diagnose(gsm8k_file)
    assert "From lengths only: memory and time were not measured." in out


def test_fewer_rows_than_a_step_are_told(lengths):
    short = judge(make_report(lengths([10, 500, 20]), Setup(batch_size=8)))
    assert "There are fewer rows than a step has: one of 3 rows was looked at." in short.sentences
    enough = judge(make_report(lengths([10, 500, 20]), Setup(batch_size=3)))
    assert not any("fewer rows" in sentence for sentence in enough.sentences)


def test_error_shrinks_with_the_sample(data, gsm8k_file):
    errors = [
        data(gsm8k_file, "--batch-size", 8, "--steps", steps)["remedies"][0]["waste"]["error"] for steps in (20, 900)
    ]
    assert errors[1] < errors[0] / 3


def test_json_is_plain_and_has_the_verdict(diagnose, gsm8k_file):
    _, out, _ = diagnose(gsm8k_file, "--json", "--batching", "generation")
    found = json.loads(out)["data"]
    assert found["verdict"]["kind"] == "plan"
    assert found["setup"]["batching"] == "generation"
    assert len(found["parts"]) == 2
    assert {each["budget"] for each in found["sweep"]} >= {found["recommended"]}


def test_picture(diagnose, gsm8k_file, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, err = diagnose(gsm8k_file, "--plot", tmp_path / "waste.png", "--accumulate", 4)
    assert (code, err) == (0, "")
    picture = (tmp_path / "waste.png").read_bytes()
    assert picture[:4] == b"\x89PNG"
    assert len(picture) > 20_000
