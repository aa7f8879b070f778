"""`PadMinConfig`: every option in one frozen, keyword-only dataclass, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch

from lightning_padmin.batch import BatchSpec, Field, LossSpec, parse_field
from lightning_padmin.errors import ConfigError
from lightning_padmin.planning import PlanSpec

T = TypeVar("T")
RowWeight: TypeAlias = Callable[[Any], torch.Tensor]
LossReduction: TypeAlias = Literal["token-mean", "row-mean", "sequence-mean", "sum"]
LogReduction: TypeAlias = Literal["mean", "row-mean", "sum", "max", "min", "last"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "loss_reduction": ("token-mean", "row-mean", "sum"),
    "normalize": ("rank", "global"),
    "method": ("optimal", "greedy"),
    "mode": ("auto", "split", "joint", "replay"),
    "layout": ("pad", "pack", "auto"),
    "check": ("audit", "first-batch", "off"),
}
_ALIASES = {"sequence-mean": "row-mean"}
_LOG_REDUCTIONS = ("mean", "row-mean", "sum", "max", "min", "last")
# name -> (smallest value, may be None)
_INTEGERS: dict[str, tuple[int | None, bool]] = {
    "token_budget": (1, True),
    "pad_to_multiple_of": (1, False),
    "max_rows": (1, True),
    "shape_buckets": (1, True),
    "launch_cost": (0, False),
    "audit_every": (0, False),
    "cost_multiple_of": (1, True),
    "attention_width": (1, True),
    "label_shift": (0, True),
    "ignore_index": (None, False),
    "pad_token_id": (0, True),
}
_CALL_MASK = re.compile(r"(?:~|lengths:)?[^\W\d]\w*(?:\.\w+)*")
_SHORT = ("label_shift",)  # far below 2^31
_STRINGS: dict[str, bool] = {
    "mask_key": False,
    "labels_key": True,
    "decoder_mask_key": False,
    "loss_mask_key": True,
    "log_prefix": False,
}


def _option(default: Any, help: str) -> Any:
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def refuses_unknown_options(cls: type[T]) -> type[T]:
    """Class decorator: an unknown keyword raises ConfigError with its name, its value and the nearest known name."""
    original = cls.__init__
    known = [name for name in inspect.signature(original).parameters if name != "self"]

    @functools.wraps(original)  # signature(), help() and command-line parsers keep seeing the typed options
    def __init__(self: T, *args: Any, **options: Any) -> None:
        for name, value in options.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
                raise ConfigError(f"{cls.__name__} has no option {name!r} (got {value!r}); {hint}")
        original(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    return cls


@refuses_unknown_options
@dataclass(frozen=True, kw_only=True)
class PadMinConfig:
    """What to remove and how the loss is reduced. Every option is explained in its `help` metadata.

    Raises:
        ConfigError: unknown option, wrong type, or value out of range; the message names option, value and fix.

    Example:
        >>> PadMinConfig(token_budget=8192).token_budget
        8192
        >>> PadMinConfig(token_buget=8192)
        Traceback (most recent call last):
        lightning_padmin.errors.ConfigError: PadMinConfig has no option 'token_buget' (got 8192); did you mean ...
    """

    enabled: bool = _option(True, "False: nothing is installed and nothing changes.")
    token_budget: int | None = _option(
        16_384,
        "Most slots (rows x longest row, after rounding) that one micro-batch may have. None: the slots of the batch "
        "as it came (at its rounded width, see pad_to_multiple_of), so never more memory than without this library.",
    )
    mode: Literal["auto", "split", "joint", "replay"] = _option(
        "auto",
        "split: forward and backward pass per micro-batch, for losses that separate over rows. joint: the model call "
        "is chunked inside and the loss sees one batch, for every loss; activations of the whole batch are kept. "
        "replay: joint with the activations of one chunk, at the price of a second forward pass. auto: split where it "
        "is exact, else what the adapter names.",
    )
    layout: Literal["pad", "pack", "auto"] = _option(
        "pad",
        "pad: micro-batches are rectangles. pack: rows behind each other in one long row, positions restarting; only "
        "after documents were measured not to leak into each other in your model, otherwise refused. auto: pack where "
        "that is proven and a fused kernel for variable lengths is active, else pad.",
    )
    check: Literal["audit", "first-batch", "off"] | bool = _option(
        "audit",
        "audit: gradients of a few rows are compared, split and as they came, before the first step, on every batch "
        "that shows something new (see verification.facets), and now and then (see audit_every); training that would "
        "change is refused. first-batch: until a first batch has told. off (or False, which YAML makes of a bare off): "
        "not at all.",
    )
    audit_every: int = _option(
        500, "check='audit': steps between two audits after those of steps 1, 3, 10, 30 and 100. 0: none after them."
    )
    loss_reduction: LossReduction | RowWeight = _option(
        "token-mean",
        "How training_step reduces its loss over a batch: token-mean, row-mean (alias sequence-mean), sum, or a "
        "function batch -> tensor (rows,) of row weights u, for a loss that is sum(u * row loss) / sum(u).",
    )
    normalize: Literal["rank", "global"] = _option(
        "rank",
        "rank: the mean is taken on each rank and ranks are averaged, as without this library. global: one mean over "
        "the batches of all ranks (another algorithm; on purpose only).",
    )
    label_shift: int | None = _option(
        None,
        "1 where the loss compares logits[:, :-1] with labels[:, 1:] (causal models of transformers), 0 where labels "
        "line up with logits (pre-shifted labels, encoders). None: 1, and 0 for labels on the decoder axis.",
    )
    ignore_index: int = _option(-100, "Label of a slot that carries no loss.")
    pad_token_id: int | None = _option(
        None, "Filler for slots beyond the batch's own width; without it rounding stops at that width."
    )
    mask_key: str = _option("attention_mask", "Entry (rows, width) that is nonzero on real tokens.")
    labels_key: str | None = _option(
        "labels",
        "Entry with the labels, (rows, width) or (rows,). None: not labels say what carries loss, but loss_mask_key.",
    )
    decoder_mask_key: str = _option("decoder_attention_mask", "Mask of the decoder side of encoder-decoder batches.")
    loss_mask_key: str | None = _option(None, "Entry (rows, width) that is nonzero, or a weight, where loss is taken.")
    batch_schema: Mapping[str, Field | str | Mapping[str, Any]] = _option(
        {}, "What an entry is, by its key or dotted path: a Field, 'row', 'position', 'column', 'static', or a mapping."
    )
    static_keys: Sequence[str] = _option((), "Entries shared by all rows, passed on unchanged.")
    pad_to_multiple_of: int = _option(1, "Micro-batch widths are rounded up to a multiple of this.")
    shape_buckets: int | None = _option(
        None,
        "Most shapes (rows x width) that micro-batches have in a whole run, for compilers and graphs that pay for each "
        "new one. They are chosen on the first batch. Beyond them, and told once: rows longer than all (from 8 shapes "
        "on, of more than 4 times the first batch's longest), and batches that rows without loss leave no choice. "
        "Needs pad_token_id, and mode split.",
    )
    max_rows: int | None = _option(None, "Most rows in one micro-batch.")
    cost_multiple_of: int | None = _option(
        None,
        "To what the model pads inside, which the plan counts as cost (not as slots): chunk_size of chunked scans "
        "(Mamba2 and its hybrids). None: what the model's configuration says, where an adapter sees the model.",
    )
    attention_width: int | None = _option(
        None,
        "Width at which attention takes as long as all the rest of a row: the cost of a micro-batch is then rows x "
        "(width + width^2 / this). None: not counted. padmin diagnose --model measures it.",
    )
    launch_cost: int | Literal["measured"] = _option(
        128,
        "What one more micro-batch costs, in slots. measured: 128 until it is known from the times of the first "
        "micro-batches (mode split; plans then depend on the machine, gradients do not).",
    )
    method: Literal["optimal", "greedy"] = _option("optimal", "optimal, or greedy (fill and cut) to compare with.")
    log_prefix: str = _option("padmin/", "Put before the name of every metric of this library.")
    log_reduce: Mapping[str, LogReduction] = _option(
        {},
        "How a logged value merges over micro-batches when not as the loss does, by name: {'accuracy': 'row-mean'} for "
        "a mean over rows, {'rows': 'sum'} for a count.",
    )
    call_masks: Mapping[str, str] = _option(
        {},
        "What is padding in a module's calls, where calls run in chunks, by the name of the submodule or a pattern "
        "such as 'encoders.*': the argument that is nonzero on real tokens ({'encoder': 'mask'}), with ~ one nonzero "
        "on padding ('~mask'), 'lengths:n_frames' for one that holds lengths, 'off' for calls that run as they came. "
        "Known without it: attention_mask, key_padding_mask (src_, tgt_, memory_), lengths and the like.",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"enabled={self.enabled!r}: expected True or False")
        for name, (smallest, optional) in _INTEGERS.items():
            if name == "launch_cost" and isinstance(self.launch_cost, str) and self.launch_cost == "measured":
                continue
            self._set(name, _checked_integer(name, getattr(self, name), smallest, optional))
        for name, optional in _STRINGS.items():
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and optional)):
                raise ConfigError(f"{name}={value!r}: expected a string" + (" or None" if optional else ""))
        if isinstance(self.check, bool):
            self._set("check", "audit" if self.check else "off")
        if isinstance(self.loss_reduction, str):
            self._set("loss_reduction", _ALIASES.get(self.loss_reduction, self.loss_reduction))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            known = isinstance(value, str) and value in choices
            if not known and not (name == "loss_reduction" and callable(value)):
                also = " or a function" if name == "loss_reduction" else ""
                raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}{also}")
        self._refuse_combinations()
        self._copy_collections()

    def _refuse_combinations(self) -> None:
        for name, off in (("shape_buckets", None), ("launch_cost", PadMinConfig.launch_cost)):
            value = getattr(self, name)
            if value == off or (name == "launch_cost" and value != "measured"):
                continue
            if self.mode in ("joint", "replay"):
                raise ConfigError(f"{name}={value!r} needs mode='split' or 'auto', not mode={self.mode!r}")
            if self.method != "optimal":
                raise ConfigError(f"{name}={value!r} needs method='optimal', not method={self.method!r}")
            if self.layout != "pad":
                raise ConfigError(f"{name}={value!r} needs layout='pad', not layout={self.layout!r}")
        for name in ("pad_to_multiple_of", "attention_width", "method") if self.layout == "pack" else ():
            if getattr(self, name) != getattr(PadMinConfig, name):
                raise ConfigError(
                    f"layout='pack' has no padding to be planned, so {name}={getattr(self, name)!r} has no meaning: "
                    "leave it out"
                )

    def _copy_collections(self) -> None:
        """Checks what holds keys, and keeps copies that the caller's later changes do not reach."""
        if not isinstance(self.batch_schema, Mapping):
            raise ConfigError(f"batch_schema={self.batch_schema!r}: expected a mapping from entry to Field")
        self._set("batch_schema", {key: parse_field(key, value) for key, value in self.batch_schema.items()})
        listed = isinstance(self.static_keys, Iterable) and getattr(self.static_keys, "ndim", 1) == 1
        if not listed or isinstance(self.static_keys, str):
            raise ConfigError(f"static_keys={self.static_keys!r}: expected a list of keys")
        self._set("static_keys", tuple(self.static_keys))
        for key in self.static_keys:
            if not isinstance(key, str) or key in self.batch_schema:
                what = "is in batch_schema too" if isinstance(key, str) else "is no string"
                raise ConfigError(f"static_keys={self.static_keys!r}: {key!r} {what}")
        if not isinstance(self.log_reduce, Mapping):
            raise ConfigError(f"log_reduce={self.log_reduce!r}: expected a mapping such as {{'rows': 'sum'}}")
        for key, value in self.log_reduce.items():
            if not isinstance(key, str) or not isinstance(value, str) or value not in _LOG_REDUCTIONS:
                raise ConfigError(f"log_reduce[{key!r}]={value!r}: expected one of {', '.join(_LOG_REDUCTIONS)}")
        self._set("log_reduce", dict(self.log_reduce))
        if not isinstance(self.call_masks, Mapping):
            raise ConfigError(f"call_masks={self.call_masks!r}: expected a mapping such as {{'encoder': 'mask'}}")
        for name, mask in self.call_masks.items():
            if not isinstance(name, str) or not isinstance(mask, str) or not _CALL_MASK.fullmatch(mask):
                raise ConfigError(
                    f"call_masks[{name!r}]={mask!r}: expected, by the name of a submodule, the name of an argument of "
                    "its forward: 'mask' (nonzero on real tokens), '~mask' (on padding), 'lengths:n_frames'; or 'off'"
                )
        self._set("call_masks", dict(self.call_masks))

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Of a pickle that may be of an earlier version, without options that have no value of the class."""
        self.__dict__.update({"call_masks": {}} | dict(state))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def without_loss(self) -> PadMinConfig:
        """These options where the loss is nobody's concern, since it sees whole batches: every row counts the same."""
        return dataclasses.replace(self, loss_reduction="row-mean", normalize="rank")

    @property
    def fields(self) -> Mapping[str, Field]:
        """`batch_schema` with every value parsed."""
        return cast("Mapping[str, Field]", self.batch_schema)

    @property
    def batch(self) -> BatchSpec:
        """What is said of a batch's entries."""
        return BatchSpec(
            mask_key=self.mask_key,
            labels_key=self.labels_key,
            decoder_mask_key=self.decoder_mask_key,
            loss_mask_key=self.loss_mask_key,
            fields=self.fields,
            static_keys=tuple(self.static_keys),
            ignore_index=self.ignore_index,
            pad_token_id=self.pad_token_id,
        )

    @property
    def loss(self) -> LossSpec:
        """What is said of the loss."""
        return LossSpec(reduction=self.loss_reduction, shift=self.label_shift, ignore_index=self.ignore_index)

    @property
    def plan(self) -> PlanSpec:
        """What plans keep to; a launch cost that is to be measured is not known yet."""
        launch_cost = self.launch_cost if isinstance(self.launch_cost, int) else PadMinConfig.launch_cost
        assert isinstance(launch_cost, int)
        return PlanSpec(
            token_budget=self.token_budget,
            pad_to_multiple_of=self.pad_to_multiple_of,
            max_rows=self.max_rows,
            launch_cost=launch_cost,
            method=self.method,
            cost_multiple_of=self.cost_multiple_of or 1,
            attention_width=self.attention_width,
        )


def as_config(config: object) -> PadMinConfig:
    """The configuration, or the default one for None.

    Raises:
        ConfigError: it is something else.
    """
    if config is None:
        return PadMinConfig()
    if not isinstance(config, PadMinConfig):
        raise ConfigError(f"config={config!r}: expected a PadMinConfig, as in PadMinConfig(token_budget=8192)")
    return config


def option_names() -> tuple[str, ...]:
    """Names of all options, in the order of their definition."""
    return tuple(field.name for field in dataclasses.fields(PadMinConfig))


def _checked_integer(name: str, value: object, smallest: int | None, optional: bool) -> int | None:
    if value is None and optional:
        return None
    kind = "an integer" + ("" if smallest is None else f" of at least {smallest}") + (" or None" if optional else "")
    # Integral: integers of numpy too.
    if isinstance(value, bool) or not isinstance(value, Integral) or (smallest is not None and value < smallest):
        raise ConfigError(f"{name}={value!r}: expected {kind}")
    if not -(2**63) <= int(value) < 2**63 or (name in _SHORT and int(value) >= 2**31):
        raise ConfigError(f"{name}={value!r}: too large, expected {kind}")
    return int(value)
