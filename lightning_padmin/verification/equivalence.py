"""`verify_equivalence`: the claim of this library, measured on your model, your loss and your batch.

Nothing is trained: dropout is off, and gradients, buffers and random state are put back as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_padmin.architectures import inspect_model, without_user_hooks, words_of
from lightning_padmin.batch import find_path, iter_leaves
from lightning_padmin.config import PadMinConfig, as_config
from lightning_padmin.errors import BatchError, ConfigError, PadMinError
from lightning_padmin.microbatching import MicroBatcher, MicroBatches, compact
from lightning_padmin.runtime import untouched, without_dropout
from lightning_padmin.verification.compare import TOLERANCES, relative_difference

LossFunction = Callable[[Any], Tensor]
Verdict = Literal["exact", "differs", "note"]
# Models that take sines of positions in float32 move a row by this much when padding moves it, in float64 too.
_PADDING_NOISE = 1e-6


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what was compared with what.
        difference: max |difference| / max |reference|.
        tolerance: up to which it counts as none.
        verdict: `"exact"`, `"differs"` (training would change), or `"note"` (worth knowing; training is as it was).
        words: the finding as a sentence.
        worst: for gradients, the parameters that differ most, as (name, difference).
    """

    name: str
    difference: float
    tolerance: float
    verdict: Verdict
    words: str
    worst: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Report:
    """The outcome of `verify_equivalence`.

    Attributes:
        checks: comparisons, in the order in which they were made.
        findings: what is known of the architecture.
        micro_batches: how the batch was split: (rows, width) of each.
        waste_before, waste: padding of the batch as it came, and of the micro-batches.
    """

    checks: tuple[Check, ...]
    findings: tuple[str, ...] = ()
    micro_batches: tuple[tuple[int, int], ...] = ()
    waste_before: float = 0.0
    waste: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether nothing that is trained would change."""
        return all(check.verdict != "differs" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"is_exact": self.is_exact}

    def __str__(self) -> str:
        lines = [f"{check.verdict.upper():8} {check.name}: {check.words}" for check in self.checks]
        for check in self.checks:
            if check.verdict == "differs" and check.worst:
                lines.append("         worst parameters: " + ", ".join(f"{n} {d:.1e}" for n, d in check.worst))
        lines += [f"         {finding}" for finding in self.findings]
        split = ", ".join(f"{rows} x {width}" for rows, width in self.micro_batches)
        lines.append(f"Split into {split}; padding {self.waste_before:.0%} -> {self.waste:.0%}.")
        lines.append("Exact: training does not change." if self.is_exact else "NOT exact: training would change.")
        return "\n".join(lines)


def verify_equivalence(
    loss_fn: LossFunction,
    batch: Any,
    config: PadMinConfig | None = None,
    *,
    module: nn.Module,
    forward: Callable[[Any], Tensor] | None = None,
    packed: Callable[[Tensor, Tensor], Tensor] | None = None,
    tolerance: float | None = None,
    as_it_came: bool = False,
) -> Report:
    """Compares training with and without splitting on one batch.

    Args:
        loss_fn: the loss of a batch, as `training_step` takes it: called with the whole batch and with micro-batches.
        batch: a batch with rows of different lengths; it is only read.
        config: the options to be verified.
        module: the module whose parameters are trained.
        forward: logits (rows, width, ...) of a batch; with it, every row is also compared with itself alone.
        packed: logits (1, n, ...) of one row of `input_ids` (1, n) with `position_ids` (1, n) that restart at each
            document; with it and `forward`, two documents in one row are compared with each alone.
        as_it_came: whether the gradient of the batch with the padding that it has is compared, too.
        tolerance: largest relative difference that counts as none; default by dtype, 1e-9 in float64, 1e-3 in
            float32, 0.1 in half precision.

    Returns:
        The report; nothing is raised for a difference.

    Raises:
        PadMinError: the batch cannot be planned, or is no test: it makes a single micro-batch.

    Checks, all with dropout off:
        1. each row alone, unpadded, against its rolled, trimmed and regrouped logits (needs `forward`);
        2. the gradient of the un-split batch, rolled and trimmed, against the weighted sum over micro-batches;
        3. what the batch as it came makes of each row (needs `forward`): its padding itself may be wrong;
        4. whether packing two documents into one row leaks from the first into the second (needs `packed`). A note:
           rows are packed on request only (`layout="pack"`), after a finer test of the same kind;
        5. the gradient of the batch as it came against the weighted sum over micro-batches (with `as_it_came`).

    If the gradients differ, the other ways to reduce a loss are tried, and the one that matches is named.
    """
    config = as_config(config)
    if config.layout == "pack" or config.shape_buckets is not None or config.launch_cost == "measured":
        raise ConfigError(
            f"layout={config.layout!r}, shape_buckets={config.shape_buckets!r}, launch_cost={config.launch_cost!r}: "
            "one batch is verified as it is padded by default; packs are proven where they are used"
        )
    dtype = next((p.dtype for p in module.parameters() if p.requires_grad), torch.float32)
    limit = TOLERANCES.get(dtype, 1e-3) if tolerance is None else tolerance
    with untouched(module), without_user_hooks(module), without_dropout(module):
        batches = _prepare(batch, config)
        checks = []
        if forward is not None:
            alone = _rows_alone(forward, batch, config, batches)
            checks.append(_regrouped(forward, batches, alone, limit))
            checks.append(_as_it_came(forward, batch, batches, alone, limit, checks[0].verdict == "exact"))
            if packed is not None:
                checks.append(_packed(packed, batch, config, batches, alone, limit))
        whole = _gradients(module, lambda: loss_fn(compact(batch, config).batch))
        split = _gradients(module, lambda: _weighted(loss_fn, batches))
        gradients = _compare_gradients(split, whole, limit)
        if gradients.verdict == "differs":
            gradients = _named_cause(gradients, _matching(module, loss_fn, batch, config, whole, limit))
        checks.append(gradients)
        if as_it_came:
            came = _gradients(module, lambda: loss_fn(batch))
            checks.append(_against_stock(_compare_gradients(split, came, limit), gradients.verdict == "exact"))
    findings = tuple(map(words_of, inspect_model(module)))
    stats = batches.stats
    shapes = tuple((len(slots), sum(slots.widths)) for slots in batches.slot_maps)
    return Report(tuple(checks), findings, shapes, stats.waste_before, stats.waste)


def _prepare(batch: Any, config: PadMinConfig) -> MicroBatches:
    batches = MicroBatcher(config).prepare(batch)
    if len(batches) == 1 and len(batches.table) > 1:
        half = replace(config, token_budget=max(1, int(batches.plan.slots) // 2), launch_cost=0)
        batches = MicroBatcher(half).prepare(batch)
    if len(batches) == 1:
        raise BatchError("the batch makes a single micro-batch, so there is nothing to compare: give at least two rows")
    return batches


def _rows_alone(
    forward: Callable[[Any], Tensor], batch: Any, config: PadMinConfig, batches: MicroBatches
) -> list[Tensor]:
    """Logits (length, ...) of every row by itself, without any padding."""
    single = MicroBatcher(replace(config, max_rows=1, pad_to_multiple_of=1, launch_cost=0)).prepare(batch)
    alone: dict[int, Tensor] = {}
    with torch.no_grad():
        # Shortest first: embeddings that grow with the longest row seen so far would hide that behind a long one.
        for micro in reversed(single):
            row = int(micro.rows[0])
            alone[row] = forward(micro.batch)[0, : int(batches.table.length[row, -1])].detach()
    return [alone[row] for row in range(len(batches.table))]


def _regrouped(forward: Callable[[Any], Tensor], batches: MicroBatches, alone: list[Tensor], limit: float) -> Check:
    worst = 0.0
    with torch.no_grad():
        for micro in batches:
            logits = forward(micro.batch)
            for i, row in enumerate(micro.rows):
                worst = max(worst, _relative(logits[i, : len(alone[row])], alone[row]))
    if worst <= limit:
        words = f"every row gives the logits that it gives alone (largest relative difference {worst:.1e})"
    else:
        words = (
            f"rows give other logits in a micro-batch than alone (relative difference {worst:.1e}): what this model "
            "makes of a row depends on the rows beside it"
        )
    return Check("rows regrouped against rows alone", worst, limit, "exact" if worst <= limit else "differs", words)


def _as_it_came(
    forward: Callable[[Any], Tensor],
    batch: Any,
    batches: MicroBatches,
    alone: list[Tensor],
    limit: float,
    rolled_is_exact: bool,
) -> Check:
    worst, table = 0.0, batches.table
    with torch.no_grad():
        logits = forward(batch)
        for row, own in enumerate(alone):
            start = int(table.start[row, -1])
            worst = max(worst, _relative(logits[row, start : start + len(own)], own))
    limit = max(limit, _PADDING_NOISE)
    if worst <= limit:
        words = f"padding as the batch has it changes no row ({worst:.1e})"
        return Check("the batch as it came against rows alone", worst, limit, "exact", words)
    words = f"padding as the batch has it changes rows by {worst:.1e}, with or without splitting"
    if rolled_is_exact:
        words += "; rolled to the right it does not, so rows are trained as they are alone, other than before"
    return Check("the batch as it came against rows alone", worst, limit, "note", words)


def _packed(
    packed: Callable[[Tensor, Tensor], Tensor],
    batch: Any,
    config: PadMinConfig,
    batches: MicroBatches,
    alone: list[Tensor],
    limit: float,
) -> Check:
    lengths = batches.table.length[:, 0]
    first, second = (int(row) for row in lengths.argsort()[-2:])
    small = dict(iter_leaves(compact(batch, config).batch))
    ids = small[find_path("input_ids", tuple(small), "input_ids") or "input_ids"]
    documents = [ids[row, : int(lengths[row])] for row in (first, second)]
    positions = torch.cat([torch.arange(len(document), device=ids.device) for document in documents])[None]

    def after(tokens: Tensor) -> Tensor:
        return packed(torch.cat([tokens, documents[1]])[None], positions)[0, len(tokens) :]

    with torch.no_grad():
        logits, other = after(documents[0]), after(documents[0].flip(0))
    # The same shapes, so what another first document changes is a leak however small it is.
    change, apart = _relative(other, logits), _relative(logits, alone[second])
    name, limit = "two documents packed into one row", max(limit, _PADDING_NOISE)
    if change <= 16 * torch.finfo(logits.dtype).eps and apart <= limit:
        words = f"with restarting positions the second is as it is alone ({apart:.1e})"
        return Check(name, apart, limit, "exact", words)
    leak = max(change, apart)
    words = f"the first leaks into the second, which changes by {leak:.1e}: do not pack rows of this model"
    return Check(name, leak, limit, "note", words)


def _weighted(loss_fn: LossFunction, batches: MicroBatches) -> Iterator[Tensor]:
    for micro, weight in batches:
        yield loss_fn(micro) * weight


def _gradients(module: nn.Module, losses: Callable[[], Tensor | Iterator[Tensor]]) -> dict[str, Tensor]:
    """Gradient of each trained parameter, by name; those that were there are kept out of it."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for _, p in named:
        p.grad = None
    with torch.enable_grad():
        result = losses()
        for loss in [result] if isinstance(result, Tensor) else result:
            torch.autograd.backward(loss)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in named}


def _compare_gradients(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], limit: float) -> Check:
    name = "gradients of the split batch against the whole batch"
    # One scale for all parameters: some have gradients that are zero but for rounding (key biases, say).
    scale = max(float(gradient.abs().max()) for gradient in wanted.values()) or 1.0
    differences = {key: float((found[key] - wanted[key]).abs().max()) / scale for key in wanted}
    worst = tuple(sorted(differences.items(), key=lambda item: -item[1])[:3])
    value = max(differences.values())
    if value <= limit and not any(math.isnan(each) for each in differences.values()):
        return Check(name, value, limit, "exact", f"the same (largest relative difference {value:.1e})", worst)
    return Check(name, value, limit, "differs", f"differ by {value:.1e} of the largest gradient", worst)


def _against_stock(check: Check, cut_is_exact: bool) -> Check:
    words = check.words
    if check.verdict == "differs" and cut_is_exact:
        words += (
            "; whole and split they agree once padding is cut, so it is padding that does this: the loss or the model "
            "reads it, or the model counts positions by column"
        )
    return replace(check, name="gradients of the split batch against the batch as it came", words=words)


def _matching(
    module: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    config: PadMinConfig,
    whole: Mapping[str, Tensor],
    limit: float,
) -> str | None:
    """The loss_reduction under which the split gradients are those of the whole batch, if there is one."""
    names: tuple[Literal["token-mean", "row-mean", "sum"], ...] = ("token-mean", "row-mean", "sum")
    for other in names:
        if other == config.loss_reduction:
            continue
        try:
            batches = _prepare(batch, replace(config, loss_reduction=other))
        except PadMinError:  # no labels to count
            continue
        found = _gradients(module, lambda batches=batches: _weighted(loss_fn, batches))  # type: ignore[misc]
        if _compare_gradients(found, whole, limit).verdict == "exact":
            return other
    return None


def _named_cause(check: Check, matching: str | None) -> Check:
    if matching is not None:
        cause = f"the loss is a {matching}: set loss_reduction={matching!r}"
    else:
        cause = "the loss or the model couples rows, and no loss_reduction would match: do not split this loss"
    return replace(check, words=f"{check.words}; {cause}")


def _relative(found: Tensor, wanted: Tensor) -> float:
    return relative_difference(found, wanted, nothing=torch.finfo(wanted.dtype).tiny)
