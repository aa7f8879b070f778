"""Micro-batches through DeepSpeed engines: two real gloo processes for each ZeRO stage, uneven work.

The helper's own tests run on stand-ins for the engines of both interfaces, and need no DeepSpeed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import processes
import pytest
import support
import torch
from processes import Ranks

from lightning_padmin.errors import ConfigError
from lightning_padmin.integrations.common.deepspeed import (
    accumulation_boundary,
    before_boundary,
    drop_gradients,
    find_engine,
    find_prepared,
)

WORKER = Path(__file__).with_name("deepspeed_worker.py")
STAGES = (0, 1, 2, 3)
EXACT = 1e-5  # float32
# Not imported here: it would stay loaded for all other tests.
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: its engine is not tested"
)


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ranks]:
    """Results of all scenarios of a stage, from one pair of processes each."""
    done: dict[int, Ranks] = {}

    def run(stage: int) -> Ranks:
        if stage not in done:
            output = tmp_path_factory.mktemp(f"stage{stage}") / "result.out"
            done[stage] = [rank[stage] for rank in processes.results(WORKER, output, stage, fresh=True)]
        return done[stage]

    return run


def moved(result: dict[str, Any]) -> float:
    """Difference of the trained parameters, as a part of how far plain training moved them."""
    plain = result["plain"]
    return float((result["split"]["end"] - plain["end"]).abs().max() / (plain["end"] - plain["start"]).abs().max())


def gradients(result: dict[str, Any]) -> list[float]:
    pairs = zip(result["split"]["gradients"], result["plain"]["gradients"], strict=True)
    return [support.relative(split, plain) for split, plain in pairs]


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("scenario", "window"), [("window1", 1), ("window2", 2), ("clipped", 1)])
def test_gradients_and_parameters_are_the_stock_ones(
    ranks_of: Callable[[int], Ranks], stage: int, scenario: str, window: int
) -> None:
    for rank in ranks_of(stage):
        result = rank[scenario]
        assert len(gradients(result)) == 4 // window
        assert max(gradients(result)) <= EXACT
        assert moved(result) <= EXACT
        assert result["split"]["steps"] == result["plain"]["steps"]
        assert result["split"]["steps"][:2] == (4 // window, 4)
        # Rank 1 would need one micro-batch for each of its batches.
        assert result["split"]["counts"] == [5] * 4


OTHER_MODES = [
    (1, "overlapped"),
    *((stage, f"offloaded{window}") for stage in (2, 3) for window in (1, 2)),
    *((stage, "unmanaged") for stage in STAGES),
]


@needs_deepspeed
@pytest.mark.parametrize(("stage", "scenario"), OTHER_MODES)
def test_parameters_in_other_modes(ranks_of: Callable[[int], Ranks], stage: int, scenario: str) -> None:
    for rank in ranks_of(stage):
        if scenario not in rank:
            pytest.skip("this deepspeed knows no managed_gradient_accumulation")
        assert moved(rank[scenario]) <= EXACT
        assert rank[scenario]["split"]["steps"][:2] == rank[scenario]["plain"]["steps"][:2]


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2])
def test_an_engine_that_is_not_told_trains_something_else(ranks_of: Callable[[int], Ranks], stage: int) -> None:
    for rank in ranks_of(stage):
        assert min(gradients(rank["without_boundary"])) > 0.5
        assert moved(rank["without_boundary"]) > 0.5


@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 1])  # from stage 2 on the other rank would wait for the one that failed
@pytest.mark.parametrize("window", [1, 2])
def test_an_error_of_the_users_leaves_the_boundary_as_it_was(
    ranks_of: Callable[[int], Ranks], stage: int, window: int
) -> None:
    first, second = (rank[f"raising{window}"] for rank in ranks_of(stage))
    assert first["inside"] == [False] * 4 + [window == 1]
    assert second["inside"] == [False, False]
    for result in (first, second):
        assert result["error"] == "the user's own"
        assert result["after"] == result["before"]


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_is_found(ranks_of: Callable[[int], Ranks], stage: int) -> None:
    for rank in ranks_of(stage):
        assert rank["found"]["same"] == [True] * 4
        assert rank["found"]["none"] is None
        assert "DeepSpeedStrategy holds no DeepSpeedEngine" in rank["found"]["early"]


class OlderZero:
    """As before 0.19: the boundary is an attribute of the optimizer."""

    is_gradient_accumulation_boundary: Any = True
    cpu_offload = False


class NewerZero:
    cpu_offload = False

    def __init__(self) -> None:
        self.noted = True

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.noted

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.noted = bool(is_boundary)


class DeepSpeedEngine:
    """Counts and notes what a real one does."""

    def __init__(self, optimizer: Any, window: int = 1) -> None:
        self.optimizer, self.window, self.micro_steps = optimizer, window, 0
        self._is_gradient_accumulation_boundary: bool | None = None

    def backward(self, loss: Any) -> None: ...

    def step(self) -> None:
        self.micro_steps += 1

    def gradient_accumulation_steps(self) -> int:
        return self.window

    def is_gradient_accumulation_boundary(self) -> bool:
        counted = (self.micro_steps + 1) % self.window == 0
        return counted if self._is_gradient_accumulation_boundary is None else self._is_gradient_accumulation_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: Any) -> None:
        self._is_gradient_accumulation_boundary = is_boundary
        if isinstance(self.optimizer, NewerZero):
            self.optimizer.set_gradient_accumulation_boundary(is_boundary)
        else:
            self.optimizer.is_gradient_accumulation_boundary = is_boundary


def noted(engine: DeepSpeedEngine) -> tuple[Any, Any]:
    optimizer = engine.optimizer
    mirrored = optimizer.noted if isinstance(optimizer, NewerZero) else optimizer.is_gradient_accumulation_boundary
    return engine._is_gradient_accumulation_boundary, mirrored


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that a DeepSpeed of some version is loaded."""

    def load(version: str, engine: type = DeepSpeedEngine) -> None:
        module: Any = ModuleType("deepspeed")
        module.__version__, module.DeepSpeedEngine = version, engine
        monkeypatch.setitem(sys.modules, "deepspeed", module)

    return load


@pytest.mark.parametrize("make", [OlderZero, NewerZero])
@pytest.mark.parametrize("override", [None, True, False])
@pytest.mark.parametrize("mirrored", [True, False])
def test_what_was_noted_is_put_back(make: Any, override: bool | None, mirrored: bool) -> None:
    engine = DeepSpeedEngine(make(), window=2)
    for step in range(4):
        engine._is_gradient_accumulation_boundary = override
        if make is NewerZero:
            engine.optimizer.noted = mirrored
        else:
            engine.optimizer.is_gradient_accumulation_boundary = mirrored
        ends = override if override is not None else step % 2 == 1
        for is_last in (False, False, True):
            with accumulation_boundary(engine, is_last=is_last):
                assert noted(engine) == (is_last and ends,) * 2
            assert noted(engine) == (override, mirrored)
        with pytest.raises(KeyboardInterrupt), accumulation_boundary(engine, is_last=False):
            raise KeyboardInterrupt
        assert noted(engine) == (override, mirrored)
        engine.step()


def test_an_optimizer_without_a_copy_gets_none() -> None:
    engine: Any = DeepSpeedEngine(torch.optim.SGD([torch.zeros(1)]))
    engine.set_gradient_accumulation_boundary = lambda value: vars(engine).update(
        _is_gradient_accumulation_boundary=value
    )
    with accumulation_boundary(engine, is_last=False):
        assert not engine.is_gradient_accumulation_boundary()
    assert engine.is_gradient_accumulation_boundary()
    assert not hasattr(engine.optimizer, "is_gradient_accumulation_boundary")


def test_no_sync_is_refused() -> None:
    engine: Any = DeepSpeedEngine(NewerZero())
    engine.inside_no_sync_ctxt = True
    with pytest.raises(ConfigError, match="leave out engine"), accumulation_boundary(engine, is_last=True):
        pass
    assert noted(engine) == (None, True)


def test_an_unmanaged_engine_is_left_alone() -> None:
    class Unmanaged(DeepSpeedEngine):
        def managed_gradient_accumulation(self) -> bool:
            return False

        def set_gradient_accumulation_boundary(self, is_boundary: Any) -> None:
            raise AssertionError("a real one refuses this")

    with accumulation_boundary(Unmanaged(NewerZero()), is_last=False):
        pass


def test_no_engine_where_there_is_no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    assert find_engine(torch.nn.Linear(1, 1)) is None
    assert find_engine(SimpleNamespace(model=DeepSpeedEngine(NewerZero()))) is None


@pytest.mark.parametrize("name", ["model", "_deepspeed_engine", "_forward_module", "engine", "_orig_mod"])
def test_engines_inside_of_wrappers(release: Callable[..., None], name: str) -> None:
    release("0.19.8")
    engine = DeepSpeedEngine(NewerZero())
    assert find_engine(SimpleNamespace(**{name: engine})) is engine
    assert find_engine(engine) is engine
    assert find_engine(SimpleNamespace(**{name: torch.nn.Linear(1, 1)})) is None


def test_a_strategy_of_deepspeed_without_an_engine(release: Callable[..., None]) -> None:
    class SomeDeepSpeedStrategy:
        model = None

    release("0.19.8", int)  # an engine of another class
    with pytest.raises(ConfigError, match=r"deepspeed 0\.19\.8: SomeDeepSpeedStrategy holds no DeepSpeedEngine"):
        find_engine(SomeDeepSpeedStrategy())


def test_another_interface_is_refused(release: Callable[..., None]) -> None:
    class Changed(DeepSpeedEngine):
        set_gradient_accumulation_boundary = None  # type: ignore[assignment]

        def is_gradient_accumulation_boundary(self, micro_step: int = 0) -> bool:  # more is no harm
            return True

    engine = Changed(NewerZero())
    del engine.micro_steps
    release("0.42.0")
    with pytest.raises(
        ConfigError, match=r"deepspeed 0\.42\.0: .*0\.19\.8\): set_.*\(self, is_boundary\); micro_steps"
    ):
        find_engine(engine)


def test_modes_that_take_every_pass_for_a_batch(release: Callable[..., None]) -> None:
    class PipelineEngine(DeepSpeedEngine):
        pass

    release("0.19.8")
    with pytest.raises(ConfigError, match="pipeline parallelism"):
        find_engine(PipelineEngine(NewerZero()))
    engine: Any = DeepSpeedEngine(NewerZero())
    engine.zenflow = True
    with pytest.raises(ConfigError, match="leave zenflow out"):
        find_engine(engine)
    engine.zenflow, engine.is_deepcompile_enabled = False, lambda: True
    with pytest.raises(ConfigError, match="set deepcompile to false"):
        find_engine(engine)


@pytest.mark.parametrize("window", [1, 2])
def test_older_offloading_is_refused(release: Callable[..., None], window: int) -> None:
    optimizer = OlderZero()
    engine = DeepSpeedEngine(optimizer, window)
    release("0.18.9+cu1")
    assert find_engine(engine) is engine
    optimizer.cpu_offload = True
    with pytest.raises(ConfigError, match=r"deepspeed 0\.18\.9\+cu1: .*use deepspeed>=0\.19\.0, ZeRO-3"):
        find_engine(engine)
    release("0.19.0")
    assert find_engine(engine) is engine


def test_accelerate_is_told_before_the_last_pass() -> None:
    class State:
        sync_gradients = True

        def _set_sync_gradients(self, value: bool) -> None:
            self.sync_gradients = value

    accelerator = SimpleNamespace(gradient_state=State())
    for before in (True, False):
        accelerator.gradient_state.sync_gradients = before
        with before_boundary(accelerator):
            assert not accelerator.gradient_state.sync_gradients
        assert accelerator.gradient_state.sync_gradients is before


def test_an_accelerate_that_tells_nothing_is_refused(release: Callable[..., None]) -> None:
    release("0.19.8")
    engine = DeepSpeedEngine(NewerZero())
    older = SimpleNamespace(backward=lambda loss, **options: None)
    newer = SimpleNamespace(backward=lambda loss, sync_gradients=True, **options: None)
    assert find_prepared(SimpleNamespace(deepspeed_engine_wrapped=newer), engine) is engine
    with pytest.raises(ConfigError, match="does not tell backward passes"):
        find_prepared(SimpleNamespace(deepspeed_engine_wrapped=older), engine)
    with pytest.raises(ConfigError, match="expected the engine that accelerator"):
        find_prepared(SimpleNamespace(deepspeed_engine_wrapped=newer), torch.nn.Linear(1, 1))


def test_gradients_are_dropped_wherever_an_engine_keeps_them(release: Callable[..., None]) -> None:
    emptied: list[str] = []
    engine: Any = DeepSpeedEngine(NewerZero())
    release("0.19.8")
    engine.zero_grad = lambda: emptied.append("engine")
    engine.optimizer.zero_grad = lambda: emptied.append("optimizer")
    engine.optimizer.averaged_gradients = {0: [torch.ones(1)]}
    drop_gradients(engine)
    assert emptied == ["engine", "optimizer"]
    assert engine.optimizer.averaged_gradients == {}
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1)).sum().backward()
    drop_gradients(model)
    assert model.weight.grad is None
