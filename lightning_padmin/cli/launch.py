"""`padmin launch`: `accelerate launch` for a configuration file with a section `padmin_config`.

Accelerate refuses keys that it does not know, so its launcher gets a copy of the file without them, and the processes
that it starts get the options as `PADMIN_*` variables.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_padmin.config import (
    CONFIG_FILE,
    LAUNCHED,
    PREFIX,
    SECTION,
    as_variables,
    checked_section,
    config_file_of_options,
    load_yaml,
    nested_section,
    resolve,
)
from lightning_padmin.errors import ConfigError

_RUN = "lightning_padmin.run"


def launch(arguments: Sequence[str]) -> None:
    """Runs Accelerate's launcher, and returns when what it launched has ended.

    Args:
        arguments: those of `accelerate launch`.

    Raises:
        ConfigError: the section has an unknown key or a wrong value, stands in two places, or cannot be passed on.
    """
    accelerate = _accelerate()
    options = accelerate.launch_command_parser().parse_args(list(arguments))
    file = config_file_of_options(options, Path.cwd())
    with tempfile.TemporaryDirectory(prefix="padmin-") as directory:
        if file is not None:
            _use_file(options, file, Path(directory))
        else:
            os.environ[LAUNCHED] = json.dumps({"file": None, "section": SECTION, "options": []})
        resolve()  # what is wrong is told here, once, and not by every process
        insert_run(options)
        accelerate.launch_command(options)


def _accelerate() -> Any:
    try:
        return importlib.import_module("accelerate.commands.launch")
    except ImportError as error:
        raise ConfigError(f"padmin launch needs Accelerate: pip install accelerate ({error})") from error


def _use_file(options: Any, file: Path, directory: Path) -> None:
    """Exports what the file says of this library, and gives the launcher a copy that says nothing of it."""
    whole = load_yaml(file)
    section, name = take_section(whole, file)
    if section and CONFIG_FILE in os.environ:
        raise ConfigError(f"{name} in {file}, and {CONFIG_FILE}={os.environ[CONFIG_FILE]!r}: leave one of them out")
    if section and whole.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError(
            f"{file}: SageMaker does not pass environment variables on. Use `accelerate launch` with the options in "
            "dynamo_config: {padmin: ...}"
        )
    variables = {key: text for key, text in as_variables(section).items() if key not in os.environ}
    names = [key.removeprefix(PREFIX).lower() for key in variables]
    os.environ |= variables
    os.environ[LAUNCHED] = json.dumps({"file": str(file), "section": name, "options": names})
    if name == SECTION:
        options.config_file = str(directory / "accelerate.yaml")
        text = importlib.import_module("yaml").safe_dump(whole, sort_keys=False)
        Path(options.config_file).write_text(text, encoding="utf-8")


def take_section(whole: dict[str, Any], file: Path) -> tuple[dict[str, Any], str]:
    """Takes `padmin_config` out of a file's contents, or reads `dynamo_config: {padmin: ...}`.

    Returns:
        The options, and the name of the place.

    Raises:
        ConfigError: unknown key, wrong value, or both places have options.
    """
    nested = nested_section(whole, file)
    if SECTION not in whole:
        return checked_section(nested, f"dynamo_config.padmin in {file}"), "dynamo_config.padmin"
    section = whole.pop(SECTION)
    if nested is not None:
        raise ConfigError(f"{file}: has {SECTION} and dynamo_config.padmin; leave one of them out")
    if not section:
        raise ConfigError(f"{file}: {SECTION} is empty; write {{enabled: true}} or leave it out")
    return checked_section(section, f"{SECTION} in {file}"), SECTION


def insert_run(options: Any) -> None:
    """Puts `-m lightning_padmin.run` in front of the script, where Python runs it and it does not stand there."""
    starts_otherwise = options.no_python or options.tpu
    if starts_otherwise or (options.module and options.training_script == _RUN):
        return
    script = ["-m", options.training_script] if options.module else [options.training_script]
    options.training_script_args = [*script, *options.training_script_args]
    options.module, options.training_script = True, _RUN
