"""How the processes of a training lie, as far as it matters when and how they meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_padmin.distributed import Board, Exchange, board_alone, board_of_all, exchange_all, exchange_alone
from lightning_padmin.runtime import replaced

Kind: TypeAlias = Literal["single", "ddp", "sharded", "engine"]


@dataclass(frozen=True, eq=False)
class Topology:
    """One process's place among those that train together.

    Attributes:
        rank: of this process.
        world: how many there are.
        kind: who sees to gradients: nobody (`"single"`), DistributedDataParallel in the last backward pass (`"ddp"`),
            sharding in every pass (`"sharded"`), or an engine such as DeepSpeed's (`"engine"`).
        static_graph: DistributedDataParallel cannot be told to wait, so that every pass is collective.
        group: processes whose batches are not the same, for counts; default: all of them.
    """

    rank: int = 0
    world: int = 1
    kind: Kind = "single"
    static_graph: bool = False
    group: Any = None

    @property
    def exchange(self) -> Exchange:
        """The collective; of this process alone where the framework knows of no other."""
        return exchange_all if self.world > 1 else exchange_alone

    @property
    def exchange_of_counts(self) -> Exchange:
        """The same for what each batch is to be counted in once."""
        return self.exchange if self.world == 1 or self.group is None else partial(exchange_all, group=self.group)

    @property
    def has_passes_of_its_own(self) -> bool:
        """Whether ranks meet in the last pass of a batch only, so that before it they can tell each other of errors."""
        return self.kind == "ddp" and not self.static_graph

    def board(self, grows: bool) -> Board:
        """Where ranks note how the passes of a batch went; to be called on every rank.

        Args:
            grows: memory may run out in this batch, see `MicroBatches.grows`.
        """
        return board_of_all() if grows and self.has_passes_of_its_own else board_alone


def ddp_of(model: nn.Module) -> list[DistributedDataParallel]:
    """What reduces gradients inside of what a framework has made of a model."""
    return [child for child in model.modules() if isinstance(child, DistributedDataParallel)]


def has_static_graph(model: nn.Module) -> bool:
    """Whether DistributedDataParallel cannot be told to wait."""
    return any(child.static_graph for child in ddp_of(model))


@contextmanager
def un_reduced(model: nn.Module) -> Iterator[None]:
    """Passes inside are none of DistributedDataParallel's: no rank waits for another.

    Args:
        model: as it is wrapped.
    """
    with ExitStack() as stack:
        for wrapper in ddp_of(model):
            if getattr(wrapper, "mixed_precision", None) is None:
                # Past its forward: it would prepare to reduce, send buffers around, and count iterations.
                stack.enter_context(replaced(wrapper, forward=wrapper.module))
            else:
                stack.enter_context(replaced(wrapper, require_forward_param_sync=False))
                stack.enter_context(wrapper.no_sync())
        yield
