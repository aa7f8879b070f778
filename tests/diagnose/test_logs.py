"""Metrics logs: durations, and padding merged by counts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

# Steps of very different size: the mean of the ratios would be 0.7.
COUNTS = [
    {"step": 1, "padmin/real_tokens": 900, "padmin/slots": 1000, "padmin/waste": 0.1, "padmin/waste_before": 0.1},
    {"step": 2, "padmin/real_tokens": 10, "padmin/slots": 20, "padmin/waste": 0.5, "padmin/waste_before": 0.9},
]
SECONDS = [1.0, 2.0, 3.0, 4.0, 10.0]


@pytest.fixture
def log(diagnose):
    def run(path, *arguments):
        code, out, err = diagnose("--log", path, *arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)["log"]

    return run


def _write(path, rows):
    if path.suffix == ".csv":
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    elif path.name == "trainer_state.json":
        path.write_text(json.dumps({"global_step": 9, "log_history": rows}, indent=2))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["metrics.csv", "trainer_state.json", "log.jsonl", "log.json"])
def test_step_times_of_every_kind_of_log(name, log, tmp_path):
    rows = [{"step": index, "step_time": value} for index, value in enumerate(SECONDS)]
    found = log(_write(tmp_path / name, [*rows, {"step": 9, "eval_loss": 1.5}]))
    assert found["entries"] == 6
    times = found["times"]
    assert (times["column"], times["count"], times["mean"], times["median"]) == ("step_time", 5, 4.0, 3.0)
    assert times["p90"] == pytest.approx(7.6)
    assert times["spread"] == pytest.approx(np.std(SECONDS, ddof=1) / 4)


@pytest.mark.parametrize("column", ["train/step_time", "perf/step_seconds", "step_time_step"])
def test_well_known_names(column, log, tmp_path):
    found = log(_write(tmp_path / "log.jsonl", [{column: 2.0}]))
    assert found["times"]["column"] == column
    assert log(_write(tmp_path / "log.jsonl", [{"other_time": 2.0}]))["times"] is None
    assert log(tmp_path / "log.jsonl", "--time-column", "other_time")["times"]["mean"] == 2.0


@pytest.mark.parametrize("suffix", ["", "_step"])
@pytest.mark.parametrize("prefix", ["", "train/"])
def test_padding_is_merged_by_counts(prefix, suffix, log, tmp_path):
    rows = [{k if k == "step" else f"{prefix}{k}{suffix}": v for k, v in row.items()} for row in COUNTS]
    found = log(_write(tmp_path / "metrics.csv", [*rows, {"step": 3, "loss": 1}]))
    assert found["after"]["waste"] == pytest.approx(1 - 910 / 1020)
    assert found["before"]["waste"] == pytest.approx(1 - 910 / (1000 + 100))
    assert found["after"]["waste"] != pytest.approx(0.3)
    assert found["ratios"] == []
    assert found["after"]["entries"] == 2


def test_ratios_without_counts_are_not_averaged(diagnose, log, tmp_path):
    path = _write(tmp_path / "log.jsonl", [{"padding_ratio": 0.1}, {"padding_ratio": 0.9}])
    found = log(path)
    assert found["ratios"] == [["padding_ratio", 0.1, 0.9]]
    assert found["before"] is found["after"] is None
    _, out, _ = diagnose("--log", path)
    assert "padding_ratio: 10.0% to 90.0%; counts were not logged, so it cannot be merged over steps." in out
    assert "50" not in out


def test_completions_of_trl(diagnose, log, tmp_path):
    rows = [
        {"completions/mean_length": 100.0, "completions/max_length": 400.0},
        {"completions/mean_length": 50.0, "completions/max_length": 100.0},
    ]
    path = _write(tmp_path / "trainer_state.json", rows)
    assert log(path)["completions"]["waste"] == pytest.approx(1 - 150 / 500)
    _, out, _ = diagnose("--log", path)
    assert "Padding costs you: 70% of completions." in out


def test_verdicts(diagnose, tmp_path):
    def said(rows):
        return diagnose("--log", _write(tmp_path / "log.jsonl", rows))[1]

    full = [{"padmin/real_tokens": 990, "padmin/waste_before": 0.01, "step_time": 1.0}] * 6
    assert "Padding is not your bottleneck: batches are 99% full; look at batch size instead." in said(full)
    assert "Steps take nearly equal time." in said(full)
    assert "Step times are uneven: 90% is" in said([{"step_time": s} for s in (1.0, 1.0, 1.0, 1.0, 9.0, 9.0)])
    assert "Padding was not logged, so nothing is said of it" in said([{"step_time": 1.0}])
    assert "1 step times are too few" in said([{"step_time": 1.0}])
    assert "No column is a step time" in said([{"loss": 1.0}])
    assert "lightning-padmin ran 1.08 times fewer slots" in said(COUNTS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", ": is empty, it has no log entries"),
        ("step,step_time\n", ": is empty, it has no log entries"),
        ('{"step_time": 1}\n{"step_t', ", line 2: is not JSON: '{\"step_t'"),
        ("[1, 2]", ": is no log; expected log_history, or a list of entries"),
        ('{"log_history": 3}', ": is no log; expected log_history, or a list of entries"),
        ('{"step_time": 1}\n3\n', ", line 2: is 3; a log has one object per line"),
        ('{"step_time": "fast"}\n', "step_time is 'fast', expected a number"),
        ('{"step_time": NaN}\n', "step_time is nan, expected a number"),
        ('{"step_time": true}\n', "step_time is True, expected a number"),
        ('{"step_time": 0}\n', "step_time is 0, which is no duration; name another --time-column"),
        ("step,step_time\n1\n", ", line 2: has another number of fields than the header"),
        ('step,step_time\n1,"2\n', ": is not CSV (unexpected end of data)"),
        (
            '{"padmin/real_tokens": 9, "padmin/slots": 5}\n',
            "padmin/real_tokens 9 and padmin/slots 5 do not go together",
        ),
        (
            '{"padmin/real_tokens": 0, "padmin/slots": 5}\n',
            "padmin/real_tokens 0 and padmin/slots 5 do not go together",
        ),
    ],
)
def test_bad_logs(content, said, diagnose, tmp_path):
    (tmp_path / "log").write_text(content)
    code, out, err = diagnose("--log", tmp_path / "log")
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_column_that_is_not_there(diagnose, tmp_path):
    path = _write(tmp_path / "log.jsonl", [{"loss": math.pi}])
    code, _, err = diagnose("--log", path, "--time-column", "time")
    assert code == 2
    assert "has no such column, it has loss" in err
