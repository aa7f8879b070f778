"""What checkpoints of the frameworks hold: the ledgers of audits, and weights. Nothing in them is run.

Lightning     one file, or a folder of shards with `meta.pt`
Fabric        one file whose keys are the user's
transformers  a folder with `trainer_state.json` and weights
Accelerate    a folder with `custom_checkpoint_N.pkl` and weights
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_padmin.architectures import UsageError
from lightning_padmin.diagnose.lines import read_blocks
from lightning_padmin.diagnose.problems import refuse_special
from lightning_padmin.errors import PadMinError
from lightning_padmin.printing import first_line, listed
from lightning_padmin.verification import Ledger

Weights = Mapping[str, Tensor]
_STATE = "trainer_state.json"
_MOST_TEXT = 512 * 2**20  # characters of a JSON document
_DEEPEST, _MOST_NODES = 6, 100_000
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")


def ledgers_of(path: Path) -> list[Ledger]:
    """The ledgers of a checkpoint, in the order of the trainings that wrote them.

    Raises:
        UsageError: it cannot be read, or it has none.
        PadMinError: what it has is malformed.
    """
    states = [state for document in _documents(path) for state in _states(document)]
    if not states:
        raise UsageError(
            f"{path}: has no record of audits: it was written by an earlier version, without lightning-padmin, or with "
            "a check other than 'audit'"
        )
    ledgers = [Ledger() for _ in states]
    for ledger, state in zip(ledgers, states, strict=True):
        try:
            ledger.load_state_dict(state)
        except PadMinError as error:
            raise UsageError(f"{path}: {error}") from None
    return ledgers


def load_weights(path: Path, module: nn.Module) -> None:
    """Loads the weights of a checkpoint into a module; all of them must fit.

    Raises:
        UsageError: it has none, or they are those of another module; names which.
    """
    own = module.state_dict()
    found = max((_fitted(each, own) for each in _weights(path)), key=lambda each: len(each.keys() & own), default={})
    if not found.keys() & own.keys():
        raise UsageError(f"{path}: has no weights of a {type(module).__name__}; it needs {listed(own, 4)}")
    if unknown := [name for name in found if name not in own]:
        raise UsageError(f"{path}: has weights that {type(module).__name__} does not have: {listed(unknown, 4)}")
    try:
        module.load_state_dict(found, strict=False)
    except RuntimeError as error:  # of other shapes
        words = " ".join(str(error).split())
        raise UsageError(f"{path}: weights do not fit {type(module).__name__} ({words})") from None
    own = module.state_dict()
    places = {own[name].data_ptr() for name in found}
    missing = [name for name, value in own.items() if name not in found and value.data_ptr() not in places]  # not tied
    if missing:
        raise UsageError(f"{path}: has no weights for {listed(missing, 4)} of {type(module).__name__}")


def _fitted(weights: Weights, own: Mapping[str, Any]) -> Weights:
    """Without a name in front of all, which a wrapper has put there."""
    first = {name.partition(".")[0] for name in weights}
    if len(first) != 1 or weights.keys() & own.keys():
        return weights
    return {name.partition(".")[2]: value for name, value in weights.items()}


# Files.


def _documents(path: Path) -> Iterator[Any]:
    """What may have a ledger in it."""
    if not path.is_dir():
        yield _json(path) if path.suffix == ".json" else _unpickled(path)
        return
    if (path / _STATE).is_file():
        yield _json(path / _STATE)
        return
    names = sorted(name for name in os.listdir(path) if name.startswith("custom_checkpoint_") and name.endswith(".pkl"))
    names = ["meta.pt"] if (path / "meta.pt").exists() else names
    if not names:
        raise UsageError(
            f"{path}: is no checkpoint: expected a file of Lightning or Fabric, a folder with {_STATE} of "
            "transformers, one with custom_checkpoint_0.pkl of Accelerate, or padmin/proof.jsonl"
        )
    for name in names:
        yield _unpickled(path / name)


def _json(path: Path) -> Any:
    text, size = [], 0
    for block in read_blocks(path):
        text.append(block)
        size += len(block)
        if size > _MOST_TEXT:
            raise UsageError(f"{path}: is longer than {_MOST_TEXT // 2**20} MB, and no state of a Trainer")
    try:
        return json.loads("".join(text))
    except RecursionError:
        raise UsageError(f"{path}: has too many levels") from None
    except ValueError as error:
        raise UsageError(f"{path}: is not JSON ({first_line(error)})") from None


def _unpickled(path: Path) -> Any:
    """Tensors and plain values alone; whatever else was pickled is refused, and not made."""
    refuse_special(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be opened ({error.strerror or first_line(error)})") from None
    except Exception as error:  # of many kinds: a damaged file, another format, objects that are not plain
        why = first_line(error).partition(". ")[0]
        raise UsageError(
            f"{path}: cannot be read as a checkpoint of tensors and plain values ({why}). What else it may hold is not "
            "unpickled; padmin/proof.jsonl next to the log tells the same of audits"
        ) from None


# What is in them.


def _states(document: Any) -> Iterator[Mapping[str, Any]]:
    for each in _mappings(document):
        found = each.get("audits")
        if isinstance(found, list | tuple) and all(isinstance(one, Mapping) and "record" in one for one in found):
            yield from found


def _mappings(document: Any) -> Iterator[Mapping[Any, Any]]:
    """Dictionaries of a document, not too deep in it, the outer ones first."""
    level = [document]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                yield each
                values: Any = each.values()
            else:
                values = each
            inner += [value for value in values if isinstance(value, Mapping | list | tuple)]
            if len(inner) > _MOST_NODES:
                break
        level = inner[:_MOST_NODES]


def _weights(path: Path) -> Iterator[Weights]:
    if not path.is_dir():
        if path.suffix == ".json":
            raise UsageError(f"{path}: has no weights; give the folder of the checkpoint")
        for each in islice(_mappings(_tensors(path)), _MOST_NODES):
            found = {name: value for name, value in each.items() if isinstance(value, Tensor)}
            if found and all(isinstance(name, str) for name in found):
                yield found
        return
    if (path / "meta.pt").exists():
        raise UsageError(f"{path}: its weights are in shards; consolidate them into one file first")
    whole: dict[str, Tensor] = {}
    for name in _weight_files(path):
        whole |= {key: value for key, value in _tensors(path / name).items() if isinstance(value, Tensor)}
    yield whole


def _weight_files(folder: Path) -> list[str]:
    for name in _INDEXES:
        if (folder / name).is_file():
            index = _json(folder / name)
            files = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
                raise UsageError(f"{folder / name}: has no weight_map from weights to files")
            found = sorted(set(files.values()))
            if outside := [each for each in found if os.path.basename(each) != each]:
                raise UsageError(f"{folder / name}: names files outside of its folder: {listed(outside, 4)}")
            return found
    known = [name for name in _WHOLE if (folder / name).is_file()]
    if not known:
        raise UsageError(f"{folder}: has no weights: expected one of {listed([*_WHOLE, *_INDEXES])}")
    return known[:1]


def _tensors(path: Path) -> Any:
    if path.suffix != ".safetensors":
        return _unpickled(path)
    refuse_special(path)
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise UsageError(f"{path} needs safetensors to be read: pip install safetensors") from error
    try:
        return load_file(path)
    except Exception as error:
        raise UsageError(f"{path}: cannot be read ({first_line(error)})") from None


__all__ = ["ledgers_of", "load_weights"]
