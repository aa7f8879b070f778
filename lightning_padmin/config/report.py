"""`padmin env`: versions, devices and where the configuration comes from, for bug reports."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from typing import Any

from lightning_padmin.config.environment import resolve
from lightning_padmin.config.options import PadMinConfig, option_names
from lightning_padmin.errors import ConfigError

_PACKAGES = ("torch", "numpy", "lightning", "transformers", "accelerate", "trl", "deepspeed", "peft", "kernels")


def describe() -> tuple[str, bool]:
    """What a bug report should say, and whether the configuration can be resolved."""
    try:
        resolved, error = resolve(), ""
    except ConfigError as caught:
        resolved, error = None, str(caught)
    lines = [*_versions(), *_devices(), ""]
    lines.append(str(resolved) if resolved is not None else f"padmin: cannot be resolved: {error}")
    if resolved is not None and resolved.config.enabled:
        lines += [f"  {name}: {getattr(resolved.config, name)!r}" for name in _told(resolved.config)]
    return "\n".join(lines), resolved is not None


def _told(config: PadMinConfig) -> list[str]:
    """Options that are not their defaults, and the budget."""
    default = PadMinConfig()
    return [n for n in option_names() if n == "token_budget" or getattr(config, n) != getattr(default, n)]


def _versions() -> list[str]:
    lines = [f"python: {platform.python_version()} on {platform.platform()}"]
    for package in ("lightning-padmin", *_PACKAGES):
        try:
            lines.append(f"{package}: {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package}: not installed")
    return lines


def _devices() -> list[str]:
    torch: Any = importlib.import_module("torch")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    lines = [f"CPU cores: {os.cpu_count()}, threads of torch: {torch.get_num_threads()}"]
    if accelerator is None:
        return [*lines, "devices: no accelerator"]
    count = torch.accelerator.device_count()
    names = [torch.cuda.get_device_name(k) for k in range(count)] if accelerator.type == "cuda" else []
    return [*lines, f"devices: {count} x {accelerator.type}" + (f" ({', '.join(names)})" if names else "")]
