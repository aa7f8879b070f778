"""Where the configuration comes from when the code does not say: environment variables, or an Accelerate file.

Explicit argument, then `PADMIN_*`, then the file, then off. Variables and file are merged option by option, so that one
variable can change one option of a file. Whoever gives any option without `enabled` has switched the library on.

Nothing but torch and numpy is imported until a file has to be looked for.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_padmin.config.accelerate_file import CONFIG_FILE, launcher_file, load_yaml, nested_section
from lightning_padmin.config.options import PadMinConfig, as_config, option_names
from lightning_padmin.errors import ConfigError

PREFIX = "PADMIN_"
SECTION = "padmin_config"
# What `padmin launch` tells its children: the file it took options from, and the names of these options.
LAUNCHED = "PADMIN_LAUNCHED"
# ... and what the examples and tests of this project read.
_RESERVED = (CONFIG_FILE, LAUNCHED, "PADMIN_CACHE", "PADMIN_RESULTS")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_NOTHING = ("none", "null")
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

    Integers, `none`, true or false (or 1, 0) for `enabled`, commas between `static_keys`, JSON for `batch_schema`,
    `log_reduce` and `call_masks`; everything else as it is.

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
    if name in ("batch_schema", "log_reduce", "call_masks"):
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
        return "audit" if value else "off"
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


def is_main_process() -> bool:
    """Whether a launcher, if there was one, made this process the first."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) in ("0", "-1")
