"""The configuration file of Accelerate: which one `accelerate launch` was given, and what it says about padding.

Nothing but the standard library is imported until a file has to be looked for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_padmin.errors import ConfigError

CONFIG_FILE = "PADMIN_CONFIG_FILE"
_LAUNCHERS = ("accelerate-launch", "accelerate.commands.launch")
_COMMANDS = ("accelerate", "accelerate.commands.accelerate_cli", "accelerate_cli.py")
_LONGEST_YAML, _MOST_NODES, _LONGEST_SCALAR = 2**18, 10_000, 4096  # an Accelerate file has some hundred of each


def nested_section(whole: Mapping[str, Any], file: Path) -> Any:
    """`dynamo_config: {padmin: ...}` of a file's contents, or None.

    Raises:
        ConfigError: something there is spelled nearly like it.
    """
    dynamo = whole.get("dynamo_config")
    if not isinstance(dynamo, Mapping):
        return None
    for key in dynamo:
        near = isinstance(key, str) and difflib.SequenceMatcher(None, key.lower(), "padmin").ratio() > 0.7
        if key != "padmin" and near:
            raise ConfigError(f"{file}: dynamo_config has a key {key!r}; did you mean 'padmin'?")
    if "padmin" in dynamo and dynamo["padmin"] is None:
        raise ConfigError(f"{file}: dynamo_config.padmin is empty; write {{enabled: true}} or leave it out")
    return dynamo.get("padmin")


def load_yaml(file: Path) -> dict[str, Any]:
    """A configuration file of Accelerate; JSON is YAML too.

    Raises:
        ConfigError: it cannot be read.
    """
    yaml = _needs("yaml", "pyyaml")
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file}: is a folder, pipe or device and no file; name the configuration file")
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(_LONGEST_YAML + 1)
        # An alias stands for a whole tree again: ten lines of ten aliases each would be ten thousand million entries.
        too_large = len(text) > _LONGEST_YAML or _expanded(yaml.compose(text, yaml.SafeLoader)) > _MOST_NODES
        whole = None if too_large else yaml.safe_load(text)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # also dates and numbers that are none
        raise ConfigError(f"{file}: cannot be read as YAML ({error})") from None
    if too_large:
        raise ConfigError(
            f"{file}: has more than {_LONGEST_YAML:,} characters, {_MOST_NODES:,} entries (aliases written out), or "
            f"{_LONGEST_SCALAR:,} characters in one; a configuration has less"
        )
    if not isinstance(whole, dict):
        raise ConfigError(f"{file}: expected a mapping, as `accelerate config` writes it")
    return whole


def _expanded(root: Any) -> float:
    """Number of entries below a node of YAML with its aliases written out; endless for one within itself."""
    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # until it is known; met again before that, it lies within itself
            value = getattr(node, "value", "")
            if isinstance(value, str) and len(value) > _LONGEST_SCALAR:
                return math.inf  # a number of that many digits could not even be shown
            below = value if isinstance(value, list) else []
            sizes[id(node)] = 1 + sum(sum(map(size, each)) if isinstance(each, tuple) else size(each) for each in below)
        return sizes[id(node)]

    return size(root)


def launcher_file() -> Path | None:
    """The file that the nearest ancestor which is `accelerate launch` reads; None where there is neither.

    Accelerate does not tell its children. Its command line does, read with its own parser.
    """
    if importlib.util.find_spec("psutil") is None or importlib.util.find_spec("accelerate") is None:
        return None
    psutil = _needs("psutil", "psutil")
    for ancestor in psutil.Process().parents():
        try:
            arguments, directory = launch_arguments(ancestor.cmdline()), ancestor.cwd()
        except psutil.Error:  # gone meanwhile, or another user's
            continue
        if arguments is not None:
            return config_file_of(arguments, Path(directory))
    return None


def launch_arguments(command: Sequence[str]) -> list[str] | None:
    """What follows `accelerate launch` in a command line, None for another program's."""
    words = list(command)
    if words and Path(words[0]).name.lower().startswith("python"):
        del words[0]
        while words and words[0].startswith("-") and words[0] != "-m":
            del words[: 2 if words[0] in ("-W", "-X") else 1]
        if words[:1] == ["-m"]:
            del words[0]
    if not words:
        return None
    program, rest = words[0].replace("\\", "/"), words[1:]
    name = program.rsplit("/", 1)[-1].removesuffix(".exe")
    if name in _LAUNCHERS or program.endswith("accelerate/commands/launch.py"):
        return rest
    return rest[1:] if name in _COMMANDS and rest[:1] == ["launch"] else None


def config_file_of(arguments: Sequence[str], directory: Path) -> Path | None:
    """The file that `accelerate launch arguments` reads when started in a directory, as its launcher decides."""
    launch = _needs("accelerate.commands.launch", "accelerate")
    try:
        options = launch.launch_command_parser().parse_args(list(arguments))
    except SystemExit:  # a launcher of another environment, with options that this one does not have
        raise ConfigError(
            f"the file that `accelerate launch {' '.join(arguments)}` reads is not known here: set {CONFIG_FILE}"
        ) from None
    return config_file_of_options(options, directory)


def config_file_of_options(options: Any, directory: Path) -> Path | None:
    """The same for arguments that its parser has taken apart. With `--cpu` the default file does not count."""
    if options.config_file is not None:
        return directory / str(options.config_file)
    default = Path(_needs("accelerate.commands.config.config_args", "accelerate").default_config_file)
    return default if default.is_file() and not options.cpu else None


def _needs(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"Accelerate files need {package}: pip install {package} ({error})") from error
