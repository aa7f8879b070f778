"""What findings mean for a caller: which of them refuse, which are only told, and the limits that stay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import nn

from lightning_padmin.architectures.findings import (
    Finding,
    batch_statistics,
    inspect_model,
    is_encoder_decoder,
    row_limit,
    scan_chunk,
)
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ArchitectureError

Tolerable: TypeAlias = Literal["batch-norm", "balance-loss"]


@dataclass(frozen=True)
class Findings:
    """What is known about a model, for one way of running it.

    Attributes:
        refused: findings for which it cannot be run so; what only long rows suffer from is in `row_limit` instead.
        told: findings that the user should know of.
        row_limit: the longest row that may be regrouped; None where there is no limit.
        scan_chunk: positions per chunk of a chunked scan, None where there is none.
        is_encoder_decoder: whether some configuration inside of the model says so.
    """

    refused: tuple[Finding, ...] = ()
    told: tuple[Finding, ...] = ()
    row_limit: int | None = None
    scan_chunk: int | None = None
    is_encoder_decoder: bool = False

    @property
    def corrects(self) -> bool:
        """Whether rolling rows mends what stock left padding does to this model, so that results differ."""
        return any(each.severity == "correct" for each in self.told)

    def refuse(self) -> None:
        """Raises ArchitectureError for the first of what is refused."""
        for finding in self.refused:
            raise ArchitectureError(words_of(finding))

    def options(self, config: PadMinConfig) -> PadMinConfig:
        """The options, with `cost_multiple_of` as the model has it where it is left open."""
        return config if config.cost_multiple_of is not None else replace(config, cost_multiple_of=self.scan_chunk)


def screen(model: object, *, tolerate: Collection[Tolerable] = (), width: int | None = None) -> Findings:
    """What speaks against regrouping rows of a model, nothing having been run.

    Args:
        model: a module; anything else is a function, of which nothing is known.
        tolerate: what this way of running it allows: `"batch-norm"`, whose modules may still be frozen (see
            `refuse_batch_statistics`); `"balance-loss"`, which may be taken of all rows together.
        width: what widths are rounded to; a model that needs multiples of another number is refused then. Default:
            that is only told.
    """
    if not isinstance(model, nn.Module):
        return Findings()
    findings, chunk = inspect_model(model), scan_chunk(model)

    def is_refused(finding: Finding) -> bool:
        if finding.rule == "chunked-width":
            return width is not None and bool(width % (chunk or 1))
        return finding.severity == "refuse" and finding.rule not in tolerate and finding.exact_up_to is None

    refused = tuple(filter(is_refused, findings))
    told = tuple(each for each in findings if each.severity != "refuse" and each not in refused)
    return Findings(refused, told, row_limit(findings), chunk, is_encoder_decoder(model))


def words_of(finding: Finding) -> str:
    """`<where>: <reason>`."""
    return f"{finding.where}: {finding.reason}"


def refuse_batch_statistics(model: object) -> None:
    """Raises ArchitectureError for what `batch_statistics` finds; to be called before every batch."""
    wrong = batch_statistics(model) if isinstance(model, nn.Module) else None
    if wrong is not None:
        raise ArchitectureError(wrong)
