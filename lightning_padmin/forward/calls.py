"""Which modules inside of a user's have calls that can run in chunks, and what says in such a call what is padding.

    models of transformers   `attention_mask`; inside of each its backbone, for calls that the model itself cannot take
                             (those with labels, whose loss would be that of a chunk)
    any other module         an argument of its `forward` that is a mask of known polarity by its name, or holds
                             lengths, or was declared (`call_masks`)

A module inside of another is used where the outer one's call ran as it came.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from lightning_padmin.config import PadMinConfig
from lightning_padmin.errors import ConfigError
from lightning_padmin.printing import listed
from lightning_padmin.runtime import takes

MaskKind = Literal["mask", "padding", "lengths"]
# Names whose meaning does not depend on who wrote the module. A plain `mask` is one thing here and the other there.
_KNOWN: dict[str, MaskKind] = {
    "attention_mask": "mask",
    "src_key_padding_mask": "padding",
    "tgt_key_padding_mask": "padding",
    "key_padding_mask": "padding",
    **dict.fromkeys(("lengths", "lens", "seq_lengths", "seq_lens", "seq_len", "sequence_lengths"), "lengths"),
    **dict.fromkeys(("input_lengths", "input_lens", "src_lengths", "src_lens", "x_lengths", "x_lens"), "lengths"),
    **dict.fromkeys(("text_lengths", "text_lens", "token_lengths"), "lengths"),
    "memory_key_padding_mask": "padding",  # of the other sequence: only where the own one has none
}
_OFF = "off"


@dataclass(frozen=True)
class CallMask:
    """An argument that says what is padding.

    Attributes:
        argument: its name in `forward`, or the path of an entry inside of it: `"batch.mask"`.
        kind: `"mask"` is nonzero on real tokens, `"padding"` on padding, `"lengths"` holds one length per row.
    """

    argument: str
    kind: MaskKind


@dataclass(frozen=True, eq=False)
class CallSite:
    """A module whose calls may run in chunks.

    Attributes:
        name: in the user's module, for messages.
        module: the module.
        masks: what may say what is padding, the first that is given counts; empty for models of transformers.
        has_inside: whether other sites lie inside, which are used where this one's call runs as it came.
    """

    name: str
    module: nn.Module
    masks: tuple[CallMask, ...] = ()
    has_inside: bool = False

    @property
    def is_model(self) -> bool:
        """Whether it is a model of transformers, or looks like one."""
        return not self.masks


def transformers_models(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules inside of `module` that are models of transformers, or look like one, by name."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(outer + ".") for outer in found)
        if name and not inside and _is_model(child):
            found[name] = child
    return found


def call_sites(
    module: nn.Module, config: PadMinConfig | None = None, *, with_itself: bool = False
) -> dict[str, CallSite]:
    """Submodules whose calls can run in chunks, by name, outer ones before those inside of them; see `chunked`.

    Args:
        module: of the user.
        config: its `call_masks` say what names do not.
        with_itself: whether the module itself may be one, under the name `""`.

    Raises:
        ConfigError: `call_masks` names a submodule or an argument that is not there.
    """
    declared = {} if config is None else config.call_masks
    used: set[str] = set()
    found: dict[str, CallSite] = {}
    models: list[str] = []
    for name, child in module.named_modules():
        if (not name and not with_itself) or "_orig_mod" in name.split(".")[:-1]:  # inside of what is compiled as one
            continue
        patterns = [pattern for pattern in declared if fnmatchcase(name, pattern)]
        used.update(patterns)
        if patterns:
            mask = _declared(patterns[-1], declared[patterns[-1]], name, child)
            if mask is not None:
                found[name] = CallSite(name, child, (mask,))
        elif any(_is_below(name, outer) for outer in models):
            if _is_backbone(child):
                found[name] = CallSite(name, child)
        elif _is_model(child):
            models.append(name)
            found[name] = CallSite(name, child)
        elif masks := _known(child):
            found[name] = CallSite(name, child, masks)
    for pattern in declared:
        if pattern not in used:
            names = [name for name, _ in module.named_modules() if name]
            raise ConfigError(
                f"call_masks[{pattern!r}]: no submodule has that name; give one of {listed(names)}, or a pattern"
            )
    return {
        name: replace(site, has_inside=any(other != name and _is_below(other, name) for other in found))
        for name, site in found.items()
    }


def _is_below(name: str, outer: str) -> bool:
    return not outer or name.startswith(outer + ".")


def _is_model(module: nn.Module) -> bool:
    has_config = isinstance(getattr(getattr(module, "config", None), "model_type", None), str)
    return has_config and takes(module, "attention_mask", by_name=True)


def _is_backbone(module: nn.Module) -> bool:
    """Whether a module inside of a model is a model by itself, which takes masks as users give them."""
    return isinstance(getattr(module, "base_model", None), nn.Module) and _is_model(module)


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # nothing is known of it
        return {}


def _known(module: nn.Module) -> tuple[CallMask, ...]:
    if isinstance(module, torch.jit.ScriptModule | nn.modules.loss._Loss):
        return ()
    own = _parameters(module)
    return tuple(CallMask(name, kind) for name, kind in _KNOWN.items() if name in own)


def _declared(pattern: str, value: str, name: str, module: nn.Module) -> CallMask | None:
    """What is declared; None: its calls run as they came."""
    if value == _OFF:
        return None
    kind: MaskKind = "padding" if value.startswith("~") else "lengths" if value.startswith("lengths:") else "mask"
    argument = value.removeprefix("~").removeprefix("lengths:")
    own = _parameters(module)
    named = [each for each, parameter in own.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    if argument.split(".")[0] not in own or argument in set(own) - set(named):
        raise ConfigError(
            f"call_masks[{pattern!r}]={value!r}: {type(module).__name__}.forward of {name!r} has no argument "
            f"{argument!r}; give one of {listed(named)}"
        )
    return CallMask(argument, kind)


def modules_of(sites: Mapping[str, nn.Module | CallSite]) -> Iterator[nn.Module]:
    """The modules themselves."""
    return (each.module if isinstance(each, CallSite) else each for each in sites.values())


__all__ = ["CallMask", "CallSite", "MaskKind", "call_sites", "modules_of", "transformers_models"]
