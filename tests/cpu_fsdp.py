"""FSDP1 of Lightning and Fabric on CPUs and in float64, which they do not offer."""

from __future__ import annotations

from typing import TypeVar

import torch
from lightning.fabric.plugins import FSDPPrecision
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

Precision = TypeVar("Precision", bound=FSDPPrecision)


def wrapped(module: nn.Module, unit: type[nn.Module]) -> FullyShardedDataParallel:
    """As their strategies wrap a module, which give an index of a device; a CPU has none."""
    policy = ModuleWrapPolicy({unit})
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), auto_wrap_policy=policy, use_orig_params=True
    )


def float64(kind: type[Precision]) -> Precision:
    """FSDP knows no "64-true", and its "32-true" casts the model."""
    plugin = kind("32-true")
    plugin._desired_input_dtype = torch.float64
    return plugin
