"""What is said once, and at whose line."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lightning_padmin import LengthBucketBatchSampler
from lightning_padmin.errors import PadMinWarning
from lightning_padmin.runtime import Notices, warn


def lines_of(act: Callable[[], object]) -> list[tuple[str, str]]:
    """Words and source line of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    assert all(each.category is PadMinWarning for each in caught)
    with_source = []
    for each in caught:
        with open(each.filename) as file:
            with_source.append((str(each.message), file.readlines()[each.lineno - 1].strip()))
    return with_source


def test_once_whatever_the_numbers() -> None:
    notices = Notices("PadMin")

    def act() -> None:
        notices("3 rows of 4 are over budget")
        notices("17 rows of 20 are over budget")
        notices("no row has a label")
        Notices()("3 rows of 4 are over budget")

    said = [words for words, _ in lines_of(act)]
    assert said == ["PadMin: 3 rows of 4 are over budget", "PadMin: no row has a label", "3 rows of 4 are over budget"]


def test_a_key_tells_apart_what_words_do_not() -> None:
    said: list[str] = []
    notices = Notices("x", how=said.append)
    for layer in (0, 1, 1):
        notices(f"layer {layer}", key=f"layer {layer}")
    assert said == ["x: layer 0", "x: layer 1"]


@pytest.mark.parametrize("is_main", [False, lambda: False])
def test_another_process_says_nothing(is_main: bool | Callable[[], bool]) -> None:
    said: list[str] = []
    Notices(is_main=is_main, how=said.append)("words")
    assert said == []
    Notices(is_main=lambda: True, how=said.append)("words")
    assert said == ["words"]


def test_printed(capsys: pytest.CaptureFixture[str]) -> None:
    notices = Notices("PadMin", how="print")
    notices("words")
    notices("words")
    assert capsys.readouterr().out == "PadMin: words\n"


def test_the_line_is_the_callers() -> None:
    def act() -> None:
        warn("a")  # line of the user, directly
        Notices()("b")  # line of the user, through an object

    assert [line.partition("# ")[2] for _, line in lines_of(act)] == [
        "line of the user, directly",
        "line of the user, through an object",
    ]


def function_of(module: str, source: str, **names: object) -> Callable[..., None]:
    """The function `f` of a module of that name."""
    space = {"__name__": module, **names}
    exec(compile(source, f"<{module}>", "exec"), space)
    return space["f"]


DEEP = "def f(call, left=5):\n    f(call, left - 1) if left else call()"


@pytest.mark.parametrize(
    "framework", ["lightning.pytorch.loops.x", "transformers.trainer", "torch.nn.modules.module", "contextlib"]
)
def test_the_line_is_the_users_through_a_framework(framework: str) -> None:
    """User -> framework -> this package -> framework -> this package, several calls each."""
    tell = function_of("lightning_padmin.x", "def f():\n    say('words')", say=Notices())
    around, inside = function_of(framework, DEEP), function_of("lightning_padmin.forward.y", DEEP)
    call = partial(inside, partial(around, tell))

    def act() -> None:
        around(call)  # here

    assert lines_of(act) == [("words", "around(call)  # here")]


def test_a_module_of_the_user_between_is_the_users() -> None:
    def step() -> None:
        warn("words")  # in a step that a framework calls

    step_through = function_of("lightning.pytorch.x", DEEP)
    ((_, line),) = lines_of(lambda: step_through(step))
    assert line.endswith("# in a step that a framework calls")


def test_where_no_line_is_the_users_it_is_the_first_outside() -> None:
    """A thread may have nothing else on its stack."""
    tell = function_of("lightning_padmin.x", "def f(say):\n    say('words')")
    thread = threading.Thread(target=tell, args=(warn,))

    def run() -> None:
        thread.start()
        thread.join()

    with pytest.warns(PadMinWarning) as caught:
        run()
    assert [Path(each.filename).name for each in caught] == ["threading.py"]


def test_a_sampler_speaks_at_the_line_that_makes_it() -> None:
    def act() -> None:
        LengthBucketBatchSampler([9, 3], token_budget=4)  # here
        type("Own", (LengthBucketBatchSampler,), {})([9, 3], token_budget=4)  # and here

    assert [line.partition("# ")[2] for _, line in lines_of(act)] == ["here", "and here"]
