"""Process groups that are destroyed and made anew in one process, at the same address and port."""

from __future__ import annotations

from pathlib import Path

from processes import finish, start

WORKER = Path(__file__).with_name("remade_worker.py")


def test_a_group_made_anew_at_the_same_port() -> None:
    """Nothing keeps the first one's store: its server would tell the second group where ranks of the first one were."""
    for code, text in finish(start(WORKER), timeout=90):
        assert code == 0, text[-3000:]
        for k in range(2):
            assert f"round {k}: heard None" in text
            assert f"round {k}: the store is gone" in text


def test_control_somebody_who_holds_the_store() -> None:
    assert all("the store is kept" in text for _, text in finish(start(WORKER, "holds"), timeout=90))
