"""Messages where options are set as environment variables: every keyword of Python becomes its variable."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator

import pytest

from lightning_padmin import errors
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.config.environment import read_variables
from lightning_padmin.config.wording import in_variables
from lightning_padmin.errors import BatchError, ConfigError, PadMinWarning, PeerError

MESSAGES = {
    "The loss reads padding. Use PadMinConfig(enabled=False)": "The loss reads padding. Use PADMIN_ENABLED=false",
    "leave it out, or enabled=False": "leave it out, or PADMIN_ENABLED=false",
    "Set mode='joint' or mode=\"auto\"": "Set PADMIN_MODE=joint or PADMIN_MODE=auto",
    "declare batch_schema={'x': 'row'} if": 'declare PADMIN_BATCH_SCHEMA=\'{"x": "row"}\' if',
    "batch_schema={'a.b': Field('position', fill=0)}": (
        'PADMIN_BATCH_SCHEMA=\'{"a.b": {"kind": "position", "fill": 0}}\''
    ),
    "static_keys=['x', 'y'] if shared": "PADMIN_STATIC_KEYS=x,y if shared",
    "log_reduce={'rows': 'sum'}": 'PADMIN_LOG_REDUCE=\'{"rows": "sum"}\'',
    "padmin=PadMinConfig(mode='joint', token_budget=100)": "PADMIN_MODE=joint PADMIN_TOKEN_BUDGET=100",
    "label_shift=0, loss_mask_key=None": "PADMIN_LABEL_SHIFT=0, PADMIN_LOSS_MASK_KEY=none",
    "set pad_token_id": "set pad_token_id (options are variables here: PADMIN_PAD_TOKEN_ID)",
}
AS_THEY_ARE = (
    "packing=True leaves no padding to remove",
    "self.mode=3, args.max_rows=4",
    "give loss_reduction=function of the batch",
    "check the mode of the model",
    "batch_schema={1: ",
    "'attention_mask' is all zero in row 3",
)


@pytest.fixture
def spoken() -> Iterator[None]:
    errors.speak(in_variables)
    yield
    errors.speak(None)


@pytest.mark.parametrize("text", MESSAGES)
def test_keywords_become_variables(text: str) -> None:
    assert in_variables(text) == MESSAGES[text]
    assert in_variables(MESSAGES[text]) == MESSAGES[text]


@pytest.mark.parametrize("text", AS_THEY_ARE)
def test_everything_else_stays(text: str) -> None:
    assert in_variables(text) == text


def test_the_variables_are_ones_that_are_understood() -> None:
    for text in MESSAGES.values():
        given = [word for word in shlex.split(text) if re.match(r"PADMIN_\w+=", word)]
        pairs = (word.rstrip(",").split("=", 1) for word in given)
        read_variables(dict(pairs))


@pytest.mark.usefixtures("spoken")
@pytest.mark.parametrize("kind", [ConfigError, BatchError, PeerError, ArchitectureError])
def test_all_errors_and_warnings_speak_so(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^use PADMIN_ENABLED=false$"):
        raise kind("use PadMinConfig(enabled=False)")
    with pytest.warns(PadMinWarning, match=r"^PADMIN_MODE=joint$"):
        warnings.warn("mode='joint'", PadMinWarning, stacklevel=1)


def test_elsewhere_they_speak_python() -> None:
    assert str(ConfigError("use enabled=False")) == "use enabled=False"
