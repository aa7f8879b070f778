"""One rank of test_lightning_shards.py: `python lightning_shards_worker.py RESULT_FILE KIND SCENARIO ...`.

Steps that need whole batches, in Lightning under FSDP with gloo, against stock: five chunks on rank 0, one on rank 1.
The rank comes from LOCAL_RANK, and KIND is "fsdp1" or "fsdp2".
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

import cpu_fsdp
import support
import test_lightning_auto as cases
import torch
from architectures import zoo
from joint_cases import local, whole
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_padmin import PadMinCallback
from lightning_padmin.errors import PadMinWarning

KIND, RANK = sys.argv[2], int(os.environ["LOCAL_RANK"])
# Natural counts under a budget of 24: five chunks on rank 0, one on rank 1.
FIVE, ONE = [24, 20, 12, 12, 6, 6, 6, 6, 3, 2], [4, 3, 5, 2]
COUNT = 5
GLOO: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=60)}


class CpuFSDP(FSDPStrategy):
    """Lightning gives FSDP an index of a device, and a CPU has none."""

    def _setup_model(self, module: nn.Module) -> nn.Module:
        return cpu_fsdp.wrapped(module, LlamaDecoderLayer)


class Sharded:
    """Put before a step: its model is sharded, and gradients and parameters are those of this rank."""

    def configure_model(self: Any) -> None:
        if KIND == "fsdp2" and not isinstance(next(self.model.parameters()), DTensor):
            mesh = self.device_mesh["data_parallel"]
            units = getattr(self, "units", None)
            layers = self.model.model.layers if units is None else [getattr(self.model, name) for name in units]
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            if hasattr(self, "table"):
                fully_shard(self.table, mesh=mesh)

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        values = [local(p.grad).flatten() for p in self.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(values).clone())

    def on_train_end(self: Any) -> None:
        self.final = torch.cat([local(p).detach().flatten().clone() for p in self.model.parameters()])


class Teacher(cases.Teacher):
    def of(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                mine.mul_(0.9).add_(whole(other), alpha=0.1)
            wanted = self.teacher(batch["input_ids"], batch["attention_mask"]).logits
        apart = ((outputs.logits - wanted) ** 2).mean(-1) * batch["attention_mask"]
        return super(cases.Teacher, self).of(outputs, batch) + apart.sum() / batch["attention_mask"].sum()


class Adversarial(cases.Adversarial):
    """With a table of its own, since sharded modules are called from outside alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = copy.deepcopy(self.model.get_input_embeddings())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with mock.patch.object(self.model, "get_input_embeddings", return_value=self.table):
            return super().loss(batch)


class Attends(nn.Module):
    """Attention that leaves padding out, and a mixture of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        query, key, value = self.inner(hidden).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2)).masked_fill(attention_mask[:, None] == 0, -1e9)
        return hidden + self.out(scores.softmax(-1) @ value).tanh()


class Own(nn.Module):
    """No model of transformers: an encoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.encoder = nn.Embedding(support.VOCABULARY, 16), Attends()
        self.head = nn.Linear(16, support.VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        hidden = self.encoder(self.embedding(input_ids), attention_mask=attention_mask)
        return SimpleNamespace(logits=self.head(hidden), hidden_states=[hidden])


class Encoder(cases.Contrastive):
    """Calls of the encoder run in chunks; those of all of it gather parameters."""

    units: tuple[str, ...] = ("head",)

    def __init__(self) -> None:
        super().__init__()
        self.model = Own().double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.of(self.model(batch["input_ids"], batch["attention_mask"]), batch)


class ShardedEncoder(Encoder):
    """The encoder gathers its parameters itself."""

    units = ("encoder", "head")


STEPS = {
    kind.__name__: kind
    for kind in (
        cases.Step,
        cases.ClassWeights,
        cases.Contrastive,
        cases.Flooding,
        cases.Queue,
        Teacher,
        Adversarial,
        cases.Adversaries,
        cases.WarmedUp,
        cases.SquaredInBackward,
        cases.ReadsPadding,
        Encoder,
        ShardedEncoder,
    )
}


def batches() -> list[dict[str, Tensor]]:
    own = (FIVE, ONE)[RANK]
    turns = [k % len(own) for k in range(COUNT)]
    return [support.make_batch(own[t:] + own[:t], seed=7 * k + RANK) for k, t in enumerate(turns)]


def fit(kind: type, *callbacks: Any, **options: Any) -> tuple[Any, support.Memory]:
    module, memory = type(kind.__name__, (Sharded, kind), {})(), support.Memory()
    strategy = CpuFSDP(**GLOO) if KIND == "fsdp1" else ModelParallelStrategy(2, 1, **GLOO)
    plugins: list[Any] = [LightningEnvironment()] + ([cpu_fsdp.float64(FSDPPrecision)] if KIND == "fsdp1" else [])
    own = {"strategy": strategy, "devices": 2, "plugins": plugins, "use_distributed_sampler": False}
    support.fit(module, batches(), *callbacks, logger=memory, log_every_n_steps=1, **(own | options))
    return module, memory


def compared(kind: type, padmin: dict[str, Any], **options: Any) -> dict[str, Any]:
    stock, wanted = fit(kind, **options)
    callback = PadMinCallback(**({"token_budget": 24, "launch_cost": 4} | padmin))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PadMinWarning)
        try:
            ours, found = fit(kind, callback, **options)
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    words = [str(each.message) for each in caught if issubclass(each.category, PadMinWarning)]
    both = zip(cases.values(found), cases.values(wanted), strict=True)
    modes = cases.modes(found)
    return {
        "gradients": cases.worst(ours, stock),
        "logs": max((abs(a[name] - b[name]) for a, b in both for name in a | b), default=0.0),
        "losses": support.relative(torch.stack(ours.losses), torch.stack(stock.losses)),
        "apart": float((ours.final - stock.final).abs().max()),
        "modes": modes,
        "way": modes[-1] if modes else "",
        "stats": callback.stats.state_dict(),
        "said": words,
        "audits": [each["step"] for ledger in callback._session.audits.state() for each in ledger["record"]],
    }


def outcome(name: str) -> dict[str, Any]:
    mode, _, step = name.partition(" ")
    options: dict[str, Any] = {"auto": {"token_budget": cases.SLOTS}, "bounded": {}}.get(mode, {"mode": mode})
    options |= {"check": "off"} if mode == "split" else {}
    with zoo.quiet(), zoo.default_dtype(torch.float64), zoo.upcasts_to(torch.float64):
        return compared(STEPS[step], options)


if __name__ == "__main__":
    import logging

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results = {name: outcome(name) for name in sys.argv[3:]}
    torch.save(results, Path(sys.argv[1]).with_suffix(f".rank{RANK}.pt"))
    torch.distributed.barrier()
    os._exit(0)
