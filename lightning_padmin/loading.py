"""Models that the command line names, random batches for them, and the loss of a causal language model."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LossFunction = Callable[[Any], Tensor]


class UsageError(Exception):
    """Something the user gave cannot be used; the message names it and the fix."""


def load_model(name: str) -> tuple[nn.Module, LossFunction | None]:
    """A model by its name, and the loss if the user's function gave one.

    Args:
        name: folder or hub id of a causal language model, or `module:function` that returns a module, or a pair
            (module, function batch -> loss).

    Raises:
        UsageError: it cannot be loaded.
    """
    if ":" in name and not Path(name).exists():
        return _from_function(name)
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(f"{name!r} needs transformers to be loaded: pip install transformers") from error
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{name!r} is no folder or hub id of a causal language model ({reason})") from error
    return model, None


def _from_function(name: str) -> tuple[nn.Module, LossFunction | None]:
    path, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(path), attribute)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name!r}: {error}; expected module:function, importable from here") from error
    finally:
        sys.path.pop(0)
    module, loss_fn = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss_fn is None or callable(loss_fn)):
        raise UsageError(
            f"{name!r} returned {type(made).__name__}: expected a module or (module, function batch -> loss)"
        )
    return module, loss_fn


def vocabulary_of(module: nn.Module) -> int:
    """Number of token ids; positions may have an embedding of another size."""
    known = getattr(module, "get_input_embeddings", lambda: None)()
    children = [known, *module.modules()]
    return next((child.num_embeddings for child in children if isinstance(child, nn.Embedding)), 100)


def random_batch(lengths: list[int], vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Left-padded rows of random tokens, (B, L) int64; the first token of each row carries no loss."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, -100)
    for row, length in enumerate(lengths):
        tokens = torch.randint(1, vocabulary, (length,), generator=generator)
        ids[row, -length:], mask[row, -length:] = tokens, 1
        if length > 1:
            labels[row, 1 - length :] = tokens[1:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def logits_of(module: nn.Module, batch: Any) -> Tensor:
    """(B, L, V), of a model that is called as those of transformers are."""
    device = next(module.parameters()).device
    inputs = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}
    logits: Tensor = module(**inputs, use_cache=False).logits
    return logits


def takes_positions(module: nn.Module) -> bool:
    """Whether its forward has position ids."""
    return "position_ids" in inspect.signature(module.forward).parameters


def packed_logits(module: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits (B, L, V) of rows that hold several documents, whose positions restart at each."""
    # Without a cache and a mask transformers builds a block-diagonal mask from restarting positions.
    logits: Tensor = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the next tokens, the mean over labels (B, L) that are not -100."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device), ignore_index=-100)
