"""Every reported kind of fault has its tests, or a reason why it has none."""

from __future__ import annotations

from reports.kinds import KINDS, OUTSIDE, collected


def test_every_kind_is_covered_or_listed() -> None:
    covered = set(collected())
    assert covered | set(OUTSIDE) == set(KINDS)
    assert not covered & set(OUTSIDE)
    assert len(KINDS) == 47
