"""`python -m lightning_padmin.run SCRIPT ...`: runs a script whose Trainers of transformers or TRL remove padding.

For scripts that do not know this library. Where it is switched on (see `config.environment`), every Trainer that the
script makes gets the mixin that goes with it, subclasses of the script's own included; one that has a mixin already
is left alone. Switched off, the script runs as it would without. `-m MODULE ...` runs a module. A script that ends
without a Trainer, though this was switched on, is told so on stderr.

`padmin launch` puts this in front of the script; with `accelerate launch` write `-m lightning_padmin.run SCRIPT ...`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_padmin.config import PadMinConfig, Resolved, in_variables, is_main_process, resolve, say_once
from lightning_padmin.errors import ConfigError, PadMinError, speak

_TRAINER = "transformers.trainer"
_USAGE = "usage: python -m lightning_padmin.run SCRIPT [ARGUMENT ...], or -m MODULE [ARGUMENT ...]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a script or module as the main program.

    Args:
        arguments: script and its arguments; default: the command line's.

    Raises:
        SystemExit: with a message, for a configuration that cannot be resolved, or no script.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_module = words[:1] == ["-m"]
    if is_module:
        words = words[1:]
    if not words:
        raise SystemExit(_USAGE)
    try:
        resolved = resolve()
    except PadMinError as error:
        raise SystemExit(f"padmin: {error}") from None
    say_once(resolved, is_main_process())
    if not is_module and not Path(words[0]).exists():
        raise SystemExit(f"padmin: there is no script {words[0]!r}. {_USAGE}")
    # Switched off too, where there are several ranks: it may be on elsewhere, and they compare what they are told.
    if resolved.config.enabled or os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        patch_trainers(resolved.config)
    if resolved.config.enabled:
        speak(in_variables)
    sys.argv = words
    try:
        if is_module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(words[0]).resolve().parent)  # where Python would look for the script's modules
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        if left.code in (None, 0):
            _tell_if_unused(resolved, words)
        raise  # an error is news enough
    _tell_if_unused(resolved, words)


def _tell_if_unused(resolved: Resolved, words: Sequence[str]) -> None:
    """Says, on the main process, that nothing in the script could use what was switched on."""
    if _is_used() or not resolved.config.enabled or not is_main_process() or {"-h", "--help"} & set(words):
        return
    print(
        f"padmin: switched on ({resolved.source}), but {words[0]} has made no Trainer of transformers or TRL in this "
        "process, so no padding was removed. A command that starts another process to train (trl sft) needs this in "
        "front of what trains: python -m lightning_padmin.run -m trl.scripts.sft ...; a loop of your own needs "
        "PadMin(accelerator).micro_batches(batch, model)",
        file=sys.stderr,
        flush=True,
    )


def _is_used() -> bool:
    """Whether a Trainer was made, or the script itself has one of the adapters."""
    return any(name.startswith("lightning_padmin.integrations.") for name in sys.modules)


def patch_trainers(config: PadMinConfig) -> None:
    """Has every Trainer of transformers that is made from now on remove padding.

    Importing transformers takes seconds, and loops without a Trainer do without it, so that its Trainer is patched
    when it is imported.
    """
    if _TRAINER in sys.modules:
        _patch(sys.modules[_TRAINER], config)
    else:
        sys.meta_path.insert(0, _AfterImport(config))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads one module like everybody else, and patches it."""

    def __init__(self, config: PadMinConfig) -> None:
        self._config = config
        self._loader: Any = None
        self._is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _TRAINER or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _patch(module, self._config)


def _patch(module: ModuleType, config: PadMinConfig) -> None:
    """Calling a Trainer class makes an object of a subclass with the mixin.

    In `__new__`, since everything else would miss classes that were imported or subclassed before.
    """
    made: dict[type, type] = {}
    before = module.Trainer.__new__

    def make(cls: type, *args: Any, **options: Any) -> Any:
        if cls not in made:
            made[cls] = with_mixin(cls, config)
        return object.__new__(made[cls]) if before is object.__new__ else before(made[cls], *args, **options)

    module.Trainer.__new__ = staticmethod(make)


def with_mixin(cls: type, config: PadMinConfig) -> type:
    """A subclass of a Trainer with the mixin that goes with it, configured; the class itself if it has one.

    Raises:
        ConfigError: it is a trainer of TRL, and the adapter for those cannot be imported.
    """
    if any(base.__module__.startswith("lightning_padmin.") for base in cls.__mro__):
        return cls
    try:
        mixin = _mixin_for(cls)
    except ConfigError:
        if config.enabled:
            raise
        return cls

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        mixin.__init__(self, *args, **({"padmin": config} | options))

    names = {"__init__": __init__, "__module__": __name__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (mixin, cls), names)


def _mixin_for(cls: type) -> Any:
    is_of_trl = any(base.__module__.split(".")[0] == "trl" for base in cls.__mro__)
    name, attribute = ("trl", "PadMinMixin") if is_of_trl else ("transformers", "PadMinTrainerMixin")
    try:
        return getattr(importlib.import_module(f"lightning_padmin.integrations.{name}"), attribute)
    except ImportError as error:
        raise ConfigError(f"{cls.__name__}: {error}. Or switch off with PADMIN_ENABLED=false") from error


if __name__ == "__main__":
    main()
