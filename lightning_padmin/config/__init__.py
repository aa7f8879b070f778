"""What the user said, and where it was said.

One dataclass holds every option, checked when it is made; the other files find its values in variables, Accelerate
files and command lines. Nothing here acts on an option.

    options          `PadMinConfig`
    arguments        the same for `HfArgumentParser`
    environment      explicit argument, then `PADMIN_*`, then a file
    accelerate_file  the file that `accelerate launch` was given
    report           what a bug report should say
    wording          messages that speak of variables where options are set so
"""

from lightning_padmin.config.accelerate_file import (
    CONFIG_FILE,
    config_file_of,
    config_file_of_options,
    launch_arguments,
    launcher_file,
    load_yaml,
    nested_section,
)
from lightning_padmin.config.arguments import PadMinArguments
from lightning_padmin.config.environment import (
    BY_ITS_CLASS,
    LAUNCHED,
    NOT_ASKED_FOR,
    PREFIX,
    SECTION,
    Resolved,
    as_variables,
    checked_section,
    is_main_process,
    make_config,
    parse_option,
    read_section,
    read_variables,
    resolve,
    resolve_for_class,
    say_once,
)
from lightning_padmin.config.options import (
    LogReduction,
    LossReduction,
    PadMinConfig,
    RowWeight,
    as_config,
    option_names,
    refuses_unknown_options,
)
from lightning_padmin.config.report import describe
from lightning_padmin.config.wording import in_variables

__all__ = [
    "BY_ITS_CLASS",
    "CONFIG_FILE",
    "LAUNCHED",
    "NOT_ASKED_FOR",
    "PREFIX",
    "SECTION",
    "LogReduction",
    "LossReduction",
    "PadMinArguments",
    "PadMinConfig",
    "Resolved",
    "RowWeight",
    "as_config",
    "as_variables",
    "checked_section",
    "config_file_of",
    "config_file_of_options",
    "describe",
    "in_variables",
    "is_main_process",
    "launch_arguments",
    "launcher_file",
    "load_yaml",
    "make_config",
    "nested_section",
    "option_names",
    "parse_option",
    "read_section",
    "read_variables",
    "refuses_unknown_options",
    "resolve",
    "resolve_for_class",
    "say_once",
]
