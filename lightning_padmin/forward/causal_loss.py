"""The loss that a causal model of transformers makes of its logits, taken of a batch that was run in chunks."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_padmin.batch import RowTable
from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import BatchError
from lightning_padmin.forward.outputs import like
from lightning_padmin.runtime import unwrap

_IGNORED = -100  # what the causal loss of transformers ignores unless it is told otherwise
_OWN_LOSS = "ForCausalLMLoss"
# All that a forward function may do with labels and loss, as `ast.unparse` writes it, for its loss to be that of
# `_CausalLoss`. Anything else (a penalty of logits, other logits, other targets) is not known to be equal.
_LOSS_CALL = re.compile(
    r"loss = self\.loss_function\((?:logits=)?(?P<logits>\w+), (?:labels=)?labels, (?:vocab_size=)?"
    r"(?:self(?:\.\w+)+|logits\.shape\[-1\])(?:, pad_token_id=self\.config\.pad_token_id)?(?P<options>, \*\*kwargs)?\)"
)
_BALANCE_CALL = re.compile(
    r"aux_loss = load_balancing_loss_func\(outputs\.router_logits, self\.num_experts, self\.num_experts_per_tok, "
    r"attention_mask\)"
)
_BALANCE_TERM = re.compile(r"loss \+= self\.(?P<coefficient>\w+(?:\.\w+)*) \* aux_loss\.to\(loss\.device\)")
_RETURNS = re.compile(r"return \w+\(loss=loss, (?:aux_loss=aux_loss, )?logits=(?P<logits>\w+)(?:, \w+=[\w.]+)*\)")
_HARMLESS = re.compile(
    r"(?:aux_)?loss = None|labels = labels\.to\(\w+\.device\)|use_cache = False|if labels is not None:|"
    r"if output_router_logits:|if not return_dict:|output = \(\w+,\) \+ \w+\[\d:\]|"
    r"return \(loss,\) \+ output if loss is not None else output"
)


@dataclass(frozen=True, eq=False)
class CausalLoss:
    """The loss that a causal model of transformers makes of logits and labels, taken of the whole batch.

    Attributes:
        model: the model itself, without wrappers.
        labels: the caller's; only read.
        options: keyword arguments of the loss function.
        coefficient: of the balance loss of experts, where the model adds one.
    """

    model: Any
    labels: Tensor
    options: Mapping[str, Any]
    coefficient: Any

    @staticmethod
    def of(model: Any, config: PadMinConfig, inputs: dict[str, Any]) -> CausalLoss:
        """The loss for labels among the inputs; takes what only the loss function reads out of these."""
        inner = unwrap(model, through=_may_look_into)
        if config.labels_key != "labels" or not _takes_causal_loss(inner):
            raise _labels_refused(str(config.labels_key))
        coefficient, passes_options = _read_loss(inner)  # first: a model with another loss shifts nothing
        _refuse_options(config, inputs)
        names = ("num_items_in_batch", "ignore_index")
        options = {name: inputs.pop(name) for name in names if inputs.get(name) is not None}
        if options and not passes_options:
            raise BatchError(
                f"{next(iter(options))!r} is among the inputs, but {type(inner).__name__} does not pass it on to its "
                "loss: leave it out"
            )
        return CausalLoss(inner, inputs["labels"], options, coefficient)

    def add(self, outputs: Any, table: RowTable) -> Any:
        """The outputs with their loss, which comes first as in the model's own."""
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if logits is None or logits.shape[:2] != self.labels.shape:
            found = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
            raise BatchError(
                f"'labels' of shape {tuple(self.labels.shape)} are among the inputs, but the outputs are "
                f"{type(outputs).__name__} with {found}: return_dict=False, logits_to_keep and "
                "outputs={'logits': 'drop'} go without labels"
            )
        labels = _without_lost(self.labels, table, self.options.get("ignore_index", _IGNORED))
        loss = self.model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **self.options)
        balance = outputs.get("aux_loss")
        if balance is not None and self.coefficient is not None:
            loss = loss + self.coefficient * balance.to(loss.device)
        return like(outputs, {"loss": loss, **outputs})


def _labels_refused(key: str, why: str = "") -> BatchError:
    return BatchError(
        f"{key!r} is among the inputs, so the model would take its loss chunk by chunk{why}: leave it out and take the "
        f"loss of the outputs{' (model.loss_function for causal models of transformers)' if not why else ''}"
    )


def _takes_causal_loss(model: Any) -> bool:
    """Whether it is a model of transformers with the library's loss of causal models, and not with one of its own."""
    if not isinstance(model, nn.Module) or getattr(model, "loss_type", "") not in ("ForCausalLM", None):
        return False
    function = getattr(model, "loss_function", None)  # where there is no loss type, the library falls back to this one
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", None)
    return str(module).split(".")[0] == "transformers" and name == _OWN_LOSS


def _refuse_options(config: PadMinConfig, inputs: Mapping[str, Any]) -> None:
    """Raises for what says that the loss is another one than the model's own would be."""
    ignored = inputs.get("ignore_index")
    ignored = _IGNORED if ignored is None else ignored
    if config.ignore_index != ignored:
        raise BatchError(
            f"ignore_index={config.ignore_index} is configured, but the model's own loss of 'labels' ignores "
            f"{ignored}: set ignore_index={ignored}, or leave 'labels' out and take the loss of the outputs"
        )
    if config.label_shift not in (None, 1):
        raise BatchError(
            f"label_shift={config.label_shift} is configured, but the model's own loss shifts 'labels' by 1: set "
            "label_shift=1, or leave 'labels' out and take the loss of the outputs"
        )
    for key in ("shift_labels", config.loss_mask_key):
        if key is not None and inputs.get(key) is not None:
            raise BatchError(
                f"{key!r} is among the inputs next to 'labels', and their loss is not taken here: leave {key!r} out "
                f"(the model shifts 'labels' itself, and {config.ignore_index} marks those without loss), or leave "
                "'labels' out and take the loss of the outputs"
            )


def _read_loss(model: Any) -> tuple[Any, bool]:
    """Coefficient of the balance loss (None: there is none), and whether options reach the loss function.

    Raises:
        BatchError: the forward function makes its loss in a way that is not known to be equal; names the statement.
    """
    name = type(model).__name__
    forward = inspect.unwrap(model.forward)
    tree = _forward_tree(getattr(forward, "__func__", forward))  # not the method: the cache would keep its model alive
    if tree is None:
        raise _labels_refused("labels", f" ({name}.forward has no source to read its loss from)")
    found: dict[str, re.Match[str]] = {}
    for text in _loss_statements(tree, model):
        for pattern in (_LOSS_CALL, _BALANCE_CALL, _BALANCE_TERM, _RETURNS):
            match = pattern.fullmatch(text)
            if match and pattern.pattern not in found:
                found[pattern.pattern] = match
                break
        else:
            if not _HARMLESS.fullmatch(text):
                raise _labels_refused(
                    "labels", f" ({text!r} in {name}.forward is not known to be taken of the outputs)"
                )
    call, returned = found.get(_LOSS_CALL.pattern), found.get(_RETURNS.pattern)
    term, balance = found.get(_BALANCE_TERM.pattern), found.get(_BALANCE_CALL.pattern)
    if call is None or returned is None or call["logits"] != returned["logits"] or (term and not balance):
        raise _labels_refused("labels", f" ({name}.forward does not return the logits that it takes its loss of)")
    return attrgetter(term["coefficient"])(model) if term else None, call["options"] is not None


@functools.lru_cache(maxsize=64)
def _forward_tree(function: Any) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _loss_statements(tree: ast.FunctionDef, model: Any) -> Iterator[str]:
    """The statements that have to do with labels or a loss, as text; of an `if` its head, then those inside of it.

    Those are all that use one of the names, all that depend on whether there are labels, and all that use the logits
    after the loss has been taken of them.
    """
    names = {"labels", "loss", "aux_loss"}

    def walk(body: Sequence[ast.stmt], labelled: bool) -> Iterator[str]:
        for statement in body:
            if not isinstance(statement, ast.If):  # loops and the like are known only if they have none of the names
                text = ast.unparse(statement)
                if labelled or _names(statement) & names:
                    yield text
                if call := _LOSS_CALL.fullmatch(text):
                    names.add(call["logits"])
            elif _is_off(statement.test, model):
                yield from walk(statement.orelse, labelled)
            else:
                if labelled or _names(statement) & names:
                    yield f"if {ast.unparse(statement.test)}:"
                for block in (statement.body, statement.orelse):
                    yield from walk(block, labelled or "labels" in _names(statement.test))

    return walk(tree.body, False)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_off(test: ast.expr, model: Any) -> bool:
    """Whether a test such as `self.coefficient > 0` fails for this model."""
    match = re.fullmatch(r"self\.(\w+(?:\.\w+)*) > 0(?:\.0)?", ast.unparse(test))
    return match is not None and not attrgetter(match[1])(model) > 0


def _without_lost(labels: Tensor, table: RowTable, ignore_index: int) -> Tensor:
    """Labels of first real tokens behind padding carry no loss: what would predict them is a slot of zeros."""
    start = table.start[:, 0]
    rows = np.flatnonzero(start)
    if not len(rows):
        return labels
    labels = labels.clone()
    labels[torch.as_tensor(rows, device=labels.device), torch.as_tensor(start[rows], device=labels.device)] = (
        ignore_index
    )
    return labels


def _may_look_into(wrapper: Any) -> bool:
    """DistributedDataParallel, FSDP and torch.compile; other wrappers may have a loss of their own.

    DataParallel would give a loss for each of its replicas.
    """
    return type(wrapper).__module__.startswith("torch.") and not isinstance(wrapper, nn.DataParallel)
