"""Where the configuration comes from when the code does not say: environment variables, or an Accelerate file.

Explicit argument, then `PADMIN_*`, then the file, then off. Variables and file are merged option by option, so that one
variable can change one option of a file. Whoever gives any option without `enabled` has switched the library on.

`describe` is for bug reports. Nothing but torch and numpy is imported until a file has to be looked for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_padmin.config import PadMinConfig, as_config, option_names
from lightning_padmin.errors import ConfigError

PREFIX = "PADMIN_"
SECTION = "padmin_config"
CONFIG_FILE = "PADMIN_CONFIG_FILE"
# What `padmin launch` tells its children: the file it took options from, and the names of these options.
LAUNCHED = "PADMIN_LAUNCHED"
# ... and what the examples and tests of this project read.
_RESERVED = (CONFIG_FILE, LAUNCHED, "PADMIN_CACHE", "PADMIN_RESULTS")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_NOTHING = ("none", "null")
_PACKAGES = ("torch", "numpy", "lightning", "transformers", "accelerate", "trl", "deepspeed", "peft", "kernels")
_LAUNCHERS = ("accelerate-launch", "accelerate.commands.launch")
_COMMANDS = ("accelerate", "accelerate.commands.accelerate_cli", "accelerate_cli.py")
_LONGEST_YAML, _MOST_NODES, _LONGEST_SCALAR = 2**18, 10_000, 4096  # an Accelerate file has some hundred of each
_said: set[str] = set()


@dataclass(frozen=True)
class Resolved:
    """A configuration, and where it was found.

    Attributes:
        config: the options; `enabled=False` where nothing was found.
        source: in words, for people.
    """

    config: PadMinConfig
    source: str

    def __str__(self) -> str:
        if not self.config.enabled:
            return f"padmin: off ({self.source})"
        return f"padmin: on, token_budget={self.config.token_budget} ({self.source})"


NOT_ASKED_FOR = Resolved(PadMinConfig(enabled=False), "no explicit argument, no PADMIN_* variable")
# ... and for a class that removes padding, whose name stands in the user's code.
BY_ITS_CLASS = Resolved(PadMinConfig(), "the class that asks for it; no explicit argument, no PADMIN_* variable")


def resolve_for_class(config: PadMinConfig | None) -> PadMinConfig:
    """The configuration of an object whose class is made to remove padding: on, unless something switches it off.

    Where it is found elsewhere than in the code, its source is printed once.

    Raises:
        ConfigError: as `resolve`.
    """
    resolved = resolve(config, otherwise=BY_ITS_CLASS)
    if config is None and not resolved.source.startswith(BY_ITS_CLASS.source):
        say_once(resolved, is_main_process())
    return resolved.config


def resolve(
    config: PadMinConfig | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    otherwise: Resolved = NOT_ASKED_FOR,
) -> Resolved:
    """The configuration that holds here.

    Args:
        config: what the code says; wins over everything else.
        environment: default: `os.environ`.
        arguments: options of a command line, each of which wins over its variable.
        otherwise: what holds where nothing is said; for classes whose use in the code says that it is wanted.

    Raises:
        ConfigError: an unknown `PADMIN_*` name or a value that cannot be read, an unknown key of the file; the message
            names variable or file, key, and the nearest known name.
    """
    if config is not None:
        return Resolved(as_config(config), "explicit argument")
    environment = os.environ if environment is None else environment
    variables = read_variables(environment)
    launched = _launched(environment)
    file = _find_file(environment, look_for_launcher=launched is None)
    section = {} if file is None else read_section(file)
    given = dict(arguments or {})
    if not variables and not section and not given:
        looked_at = "" if file is None else f"; no padmin section in {file}"
        return Resolved(otherwise.config, otherwise.source + looked_at)
    sources = [f"argument {', '.join(f'padmin_{name}' for name in given)}"] if given else []
    sources += _variable_sources({name: value for name, value in variables.items() if name not in given}, launched)
    if set(section) - set(variables) - set(given):
        sources.append(f"dynamo_config.padmin in {file}")
    return Resolved(make_config({**section, **variables, **given}, ", ".join(sources)), ", then ".join(sources))


def say_once(resolved: Resolved, is_main_process: bool) -> None:
    """Prints a source on the main process, unless this process has printed the very same before."""
    words = str(resolved)
    if is_main_process and words not in _said:
        print(words, flush=True)
    _said.add(words)


def make_config(options: Mapping[str, Any], source: str) -> PadMinConfig:
    """A PadMinConfig from what a file or the environment says.

    Raises:
        ConfigError: as PadMinConfig does, with `source` in front.
    """
    try:
        return PadMinConfig(**options)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{source}: {error}") from None


def read_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that `PADMIN_*` variables set, parsed.

    Integers, `none`, true or false (or 1, 0) for `enabled`, commas between `static_keys`, JSON for `batch_schema` and
    `log_reduce`; everything else as it is.

    Raises:
        ConfigError: unknown name, or a value that is none of its kind.
    """
    options: dict[str, Any] = {}
    known = {PREFIX + name.upper(): name for name in option_names()}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in _RESERVED:
            continue
        if variable not in known:
            near = difflib.get_close_matches(variable, [*known, CONFIG_FILE], n=1, cutoff=0)
            raise ConfigError(
                f"{variable}={environment[variable]!r}: there is no such variable; the nearest is {near[0]}"
            )
        options[known[variable]] = parse_option(known[variable], environment[variable], variable)
    return options


def parse_option(name: str, text: str, variable: str) -> Any:
    """The value of one option from its text.

    Raises:
        ConfigError: it is none of its kind; told with the name of the variable.
    """
    text = text.strip()
    if name == "enabled":
        if text.lower() not in _BOOLEANS:
            raise ConfigError(f"{variable}={text!r}: expected true or false")
        return _BOOLEANS[text.lower()]
    if name in ("batch_schema", "log_reduce"):
        value = _parse_json(variable, text)
    elif name == "static_keys":
        value = [key.strip() for key in text.split(",") if key.strip()]
    elif text.lower() in _NOTHING:
        value = None
    else:
        value = _integer_or_text(text)
    if isinstance(value, int) and isinstance(getattr(PadMinConfig(), name), str):
        value = text  # the name of an entry: "1" of a tuple batch
    make_config({name: value}, variable)
    return value


def _parse_json(variable: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of too many digits
        shown = text if len(text) < 200 else f"{text[:200]}..."
        raise ConfigError(f'{variable}={shown!r}: expected JSON such as {{"rows": "sum"}} ({error})') from None


def _integer_or_text(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def as_variables(options: Mapping[str, Any]) -> dict[str, str]:
    """The inverse of `read_variables`, for the children of a launcher."""
    return {PREFIX + name.upper(): _as_text(name, value) for name, value in options.items()}


def _as_text(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool) and name == "enabled":
        return str(value).lower()
    if isinstance(value, bool):  # check: YAML makes a boolean of a bare off
        return "first-batch" if value else "off"
    if isinstance(value, Mapping):
        return json.dumps(value)
    return value if isinstance(value, str) else ",".join(value) if isinstance(value, Sequence) else str(value)


def _launched(environment: Mapping[str, str]) -> Mapping[str, Any] | None:
    text = environment.get(LAUNCHED)
    if text is None:
        return None
    launched = _parse_json(LAUNCHED, text)
    if not isinstance(launched, dict) or not {"file", "section", "options"} <= set(launched):
        raise ConfigError(f"{LAUNCHED}={text!r}: padmin launch sets this; unset it")
    return launched


def _variable_sources(variables: Mapping[str, Any], launched: Mapping[str, Any] | None) -> list[str]:
    """What was set by hand, then what `padmin launch` set."""
    from_file = set(launched["options"]) if launched is not None else set()
    by_hand = [PREFIX + name.upper() for name in variables if name not in from_file]
    sources = [f"environment variable {', '.join(by_hand)}"] if by_hand else []
    if launched is not None and from_file & set(variables):
        sources.append(f"{launched['section']} in {launched['file']}")
    return sources


def _find_file(environment: Mapping[str, str], look_for_launcher: bool) -> Path | None:
    if CONFIG_FILE in environment:
        file = Path(environment[CONFIG_FILE])
        if not file.is_file():
            raise ConfigError(f"{CONFIG_FILE}={str(file)!r}: there is no such file")
        return file
    return launcher_file() if look_for_launcher else None


def read_section(file: Path) -> dict[str, Any]:
    """Options in `dynamo_config: {padmin: ...}` of an Accelerate file, checked; empty where there are none.

    Accelerate refuses unknown keys at the top and keeps those inside of `dynamo_config`; that is tolerance of the
    versions that were tried, 1.4 to 1.15, and no promise.

    Raises:
        ConfigError: the file cannot be read, or the section has an unknown key or a wrong value.
    """
    whole = load_yaml(file)
    return checked_section(nested_section(whole, file), f"dynamo_config.padmin in {file}")


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


def checked_section(section: Any, source: str) -> dict[str, Any]:
    """The options of a section; None is an empty one.

    Raises:
        ConfigError: it is no mapping, or not one of a PadMinConfig; says `source`.
    """
    if section is None:
        return {}
    if not isinstance(section, Mapping) or not all(isinstance(key, str) for key in section):
        raise ConfigError(f"{source}: {section!r}: expected options of PadMinConfig, such as {{enabled: true}}")
    make_config(section, source)
    return dict(section)


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


def is_main_process() -> bool:
    """Whether a launcher, if there was one, made this process the first."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) in ("0", "-1")
