"""Models that the command line names, random batches for them, and the loss of a causal language model."""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import UsageError as UsageError  # was here
from lightning_padmin.printing import first_line, guard_logs
from lightning_padmin.runtime import takes

LossFunction = Callable[[Any], Tensor]


def load_model(name: str, trust_remote_code: bool = False) -> tuple[nn.Module, LossFunction | None]:
    """A model by its name, and the loss if the user's function gave one.

    Args:
        name: folder or hub id of a causal language model, or `module:function` that returns a module, or a pair
            (module, function batch -> loss).
        trust_remote_code: whether Python code that lies beside the model may run. Nobody is asked.

    Raises:
        UsageError: it cannot be loaded.
    """
    if ":" in name and not os.path.exists(name):
        return _from_function(name)
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(f"{name!r} needs transformers to be loaded: pip install transformers") from error
    refuse_special_files(name)
    guard_logs("transformers", "huggingface_hub")
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of many kinds: a damaged or pickled file, an unknown kind of model, the network
        raise UsageError(
            f"{name!r} is no folder or hub id of a causal language model ({why_not_loaded(error, trust_remote_code)})"
        ) from error
    return model, None


def why_not_loaded(error: Exception, trust_remote_code: bool) -> str:
    """What transformers says, in one line; with the option where it wants to run code."""
    if "trust_remote_code" in str(error) and not trust_remote_code:
        return "it comes with Python code of its own, which is not run; read it, then give --trust-remote-code"
    return first_line(error)


def refuse_special_files(folder: str) -> None:
    """Raises UsageError for a folder with a pipe, socket or device, which reading would wait for."""
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError):  # no folder: a hub id, or nothing
        return
    for name in names:
        path = os.path.join(folder, name)
        mode = os.stat(path).st_mode if os.path.exists(path) else stat.S_IFREG  # a link to nowhere cannot be opened
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UsageError(f"{path!r} is no regular file: take it out of the folder")


def load_step(name: str) -> tuple[nn.Module, LossFunction, Any, PadMinConfig | None]:
    """What a training step is made of.

    Args:
        name: `module:function`, which returns (module, function batch -> loss, batch), and options if it likes.

    Raises:
        UsageError: it cannot be called, or returns something else.
    """
    made = _made_by(name)
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        raise UsageError(
            f"{name!r} returned {type(made).__name__}: expected (module, function batch -> loss, batch), and a "
            "PadMinConfig as the fourth if you like"
        )
    module, loss_fn, batch, config = (*made, None)[:4]
    if not isinstance(module, nn.Module) or not callable(loss_fn) or not isinstance(config, PadMinConfig | None):
        kinds = ", ".join(type(each).__name__ for each in made)
        raise UsageError(f"{name!r} returned ({kinds}): expected a module, a function, a batch, and a PadMinConfig")
    return module, loss_fn, batch, config


def _from_function(name: str) -> tuple[nn.Module, LossFunction | None]:
    made = _made_by(name)
    module, loss_fn = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss_fn is None or callable(loss_fn)):
        raise UsageError(
            f"{name!r} returned {type(made).__name__}: expected a module or (module, function batch -> loss)"
        )
    return module, loss_fn


def _made_by(name: str) -> Any:
    path, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made: Any = getattr(importlib.import_module(path), attribute)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name!r}: {first_line(error)}; expected module:function, importable from here") from error
    except (Exception, SystemExit) as error:  # of the user's own code
        raise UsageError(f"{name!r} raised {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path.pop(0)
    return made


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
    """(B, L, V), of a model that is called as those of transformers are.

    Raises:
        UsageError: it returns something else.
    """
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    inputs = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}
    options = {"use_cache": False} if takes(module, "use_cache") else {}
    return _logits(module, module(**inputs, **options))


def _logits(module: nn.Module, outputs: Any) -> Tensor:
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        found = f"{type(outputs).__name__} without logits" if logits is None else f"logits {_kind(logits)}"
        raise UsageError(
            f"{type(module).__name__} returns {found}: expected outputs with .logits (rows, width, vocabulary); for "
            "another model give a function that returns the pair (module, function batch -> loss)"
        )
    return logits


def _kind(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def takes_positions(module: nn.Module) -> bool:
    """Whether its forward has position ids."""
    return takes(module, "position_ids", by_name=True)


def packed_logits(module: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits (B, L, V) of rows that hold several documents, whose positions restart at each."""
    # Without a cache and a mask transformers builds a block-diagonal mask from restarting positions.
    options = {"use_cache": False} if takes(module, "use_cache") else {}
    return _logits(module, module(input_ids=ids, position_ids=positions, **options))


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the next tokens, the mean over labels (B, L) that are not -100."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device), ignore_index=-100)
