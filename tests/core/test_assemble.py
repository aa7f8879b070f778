"""Outputs of chunks, put together: by name, by declaration, by shapes that can be read in one way only."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn

from lightning_padmin import MicroBatcher, PadMinConfig
from lightning_padmin.errors import BatchError
from lightning_padmin.forward.outputs import Assembler, like, map_tensors, proofs_of, tensors

LENGTHS = [5, 9, 3, 12, 11, 4]
Pair = namedtuple("Pair", "first second")


class Chunks:
    """A batch cut into chunks of different rows and widths."""

    def __init__(self, lengths: list[int] | None = None, budget: int = 24) -> None:
        self.batch = support.make_batch(lengths or LENGTHS)
        self.micro = MicroBatcher(PadMinConfig(token_budget=budget, launch_cost=2)).prepare(self.batch)
        self.real = self.batch["attention_mask"].bool()

    def join(self, make: Any, model: Any = None, proofs: Any = None, **declared: Any) -> Any:
        """Outputs that `make` makes of each chunk."""
        assembler = Assembler(self.micro, declared, self.batch, model, {} if proofs is None else proofs)
        return assembler.join([make(each.batch) for each in self.micro])

    @property
    def ids(self) -> Tensor:
        return self.batch["input_ids"] * self.real

    @property
    def sums(self) -> Tensor:
        return self.ids.sum(1)


def ids(batch: dict[str, Tensor]) -> Tensor:
    return batch["input_ids"] * batch["attention_mask"]


def sums(batch: dict[str, Tensor]) -> Tensor:
    return ids(batch).sum(1)


def test_known_by_name() -> None:
    chunks = Chunks()
    assert len(chunks.micro) > 1
    found = chunks.join(
        lambda batch: {
            "logits": ids(batch)[..., None].expand(-1, -1, 5),
            "pooler_output": sums(batch)[:, None].expand(-1, 2),
            "router_logits": ids(batch).flatten()[:, None].expand(-1, 3),
            "start_logits": ids(batch),
            "hidden_states": (ids(batch)[..., None], -ids(batch)[..., None]),
            "past_key_values": object(),
            "nothing": None,
        }
    )
    assert list(found) == ["logits", "pooler_output", "router_logits", "start_logits", "hidden_states", "nothing"]
    assert torch.equal(found["logits"], chunks.ids[..., None].expand(-1, -1, 5))
    assert torch.equal(found["pooler_output"], chunks.sums[:, None].expand(-1, 2))
    assert torch.equal(found["router_logits"], chunks.ids.flatten()[:, None].expand(-1, 3))
    assert torch.equal(found["start_logits"], chunks.ids)
    assert torch.equal(found["hidden_states"][1], -chunks.ids[..., None])
    assert found["nothing"] is None


def test_known_by_shapes() -> None:
    chunks = Chunks()
    found = chunks.join(lambda batch: {"a": ids(batch), "b": sums(batch), "c": [sums(batch)[:, None]] * 2})
    assert torch.equal(found["a"], chunks.ids)
    assert torch.equal(found["b"], chunks.sums)
    assert torch.equal(found["c"][1], chunks.sums[:, None])


@pytest.mark.parametrize("kind", [tuple, list])
def test_sequences_keep_their_type(kind: type) -> None:
    chunks = Chunks()
    found = chunks.join(lambda batch: kind([ids(batch), sums(batch)]))
    assert type(found) is kind
    assert torch.equal(found[1], chunks.sums)
    named = chunks.join(lambda batch: Pair(ids(batch), sums(batch)))
    assert type(named) is Pair
    assert torch.equal(named.second, chunks.sums)


def test_declared() -> None:
    chunks = Chunks([6, 6, 6, 6], budget=6)  # one row each: shapes prove nothing
    with pytest.raises(BatchError, match=r"output 'x' has shapes .* say what it is"):
        chunks.join(lambda batch: {"x": sums(batch)})
    assert torch.equal(chunks.join(lambda batch: {"x": sums(batch)}, x="row")["x"], chunks.sums)
    assert torch.equal(chunks.join(lambda batch: {"x": ids(batch)}, x="position")["x"], chunks.ids)
    shifted = chunks.join(lambda batch: {"x": ids(batch)[:, 1:]}, x="position")["x"]  # the last column may be missing
    assert torch.equal(shifted, nn.functional.pad(chunks.ids[:, 1:], (0, 1)))
    assert torch.equal(chunks.join(lambda batch: {"x": ids(batch).flatten()}, x="flat")["x"], chunks.ids.flatten())
    assert chunks.join(lambda batch: {"x": torch.ones(3)}, x="drop")["x"] is None
    for kind in ("row", "position", "flat"):
        with pytest.raises(BatchError, match=f"output 'x' is '{kind}' by declaration, but has shapes"):
            chunks.join(lambda batch: {"x": torch.ones(3)}, x=kind)
    with pytest.raises(BatchError, match="output 'logits' is 'position' by its name, but has shapes"):
        chunks.join(lambda batch: {"logits": ids(batch)[:, 1:, None]})


def test_what_was_proven_holds_for_later_calls() -> None:
    proofs: Any = {}
    Chunks().join(lambda batch: {"x": sums(batch), "y": ids(batch)}, proofs=proofs)
    chunks = Chunks([6, 6, 6, 6], budget=6)
    found = chunks.join(lambda batch: {"x": sums(batch), "y": ids(batch)}, proofs=proofs)
    assert torch.equal(found["x"], chunks.sums)
    assert torch.equal(found["y"], chunks.ids)
    with pytest.raises(BatchError, match="say what it is"):
        chunks.join(lambda batch: {"x": sums(batch)[:, None]}, proofs=proofs)  # another number of dimensions
    with pytest.raises(BatchError, match="say what it is"):
        Chunks().join(
            lambda batch: {"x": sums(batch), "y": sums(batch)[:, None]}, proofs={(".x", 1): ("flat", "input")}
        )


def test_logits_of_two_dimensions() -> None:
    chunks = Chunks()
    assert torch.equal(chunks.join(lambda batch: {"logits": ids(batch)})["logits"], chunks.ids), "one value per token"
    classes = chunks.join(lambda batch: {"logits": sums(batch)[:, None].expand(-1, 2)})
    assert torch.equal(classes["logits"], chunks.sums[:, None].expand(-1, 2))
    model = SimpleNamespace(config=SimpleNamespace(model_type="known"))
    with pytest.raises(BatchError, match="output 'logits' is 'row' by its name"):
        chunks.join(lambda batch: {"logits": ids(batch)}, model=model)


def test_numbers_that_differ_between_chunks() -> None:
    chunks = Chunks()
    for make in (
        lambda batch: {"x": [0] * len(ids(batch))},
        lambda batch: {"x": {f"row {k}": 0 for k in range(len(ids(batch)))}},
    ):
        with pytest.raises(BatchError, match="output 'x' has other entries in each chunk"):
            chunks.join(make)
        assert chunks.join(make, x="drop")["x"] is None
    with pytest.raises(BatchError, match="output 'x' is int, which cannot be put together"):
        chunks.join(lambda batch: {"x": len(ids(batch))})
    assert chunks.join(lambda batch: {"x": len(ids(batch))}, x="drop")["x"] is None
    assert chunks.join(lambda batch: {"x": "same"})["x"] == "same"


def test_the_balance_loss_is_taken_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts(nn.Module):
        num_experts, num_experts_per_tok = 3, 2

    def balance(logits: Tensor, experts: int, top_k: int, mask: Tensor) -> Tensor:
        return logits.double().square().mean() + experts + 10 * top_k + 100 * mask.sum()

    monkeypatch.setitem(globals(), "load_balancing_loss_func", balance)
    chunks = Chunks()

    def outputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"aux_loss": torch.tensor(0.0), "router_logits": ids(batch).flatten()[:, None]}

    found = chunks.join(outputs, model=nn.Sequential(nn.Linear(1, 1), Experts()))["aux_loss"]
    assert found == balance(chunks.ids.flatten()[:, None], 3, 2, chunks.batch["attention_mask"])
    for model in (None, nn.Linear(1, 1)):
        with pytest.raises(BatchError, match="'aux_loss' of each chunk"):
            chunks.join(outputs, model=model)
    with pytest.raises(BatchError, match="'aux_loss' of each chunk"):
        chunks.join(lambda batch: {"aux_loss": torch.tensor(0.0)}, model=Experts())


def test_proofs_belong_to_models() -> None:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert proofs_of(one) is proofs_of(one)
    assert proofs_of(one) is not proofs_of(other)
    proofs_of(one)["x", 1] = ("row", "input")
    assert proofs_of(other) == proofs_of(len) == {}


def test_structures() -> None:
    one, two = torch.ones(1), torch.ones(2)
    node = {"a": [one, Pair(two, "text")], "past_key_values": two, "b": None}
    assert [each.shape[0] for each in tensors(node)] == [1, 2]
    mapped = map_tensors(node, lambda tensor: tensor * 2)
    assert mapped == {"a": [2 * one, Pair(mapped["a"][1].first, "text")], "b": None}
    assert mapped["a"][1].first.tolist() == [2, 2]

    from transformers.modeling_outputs import CausalLMOutput

    made = like(CausalLMOutput(logits=one), {"logits": two})
    assert type(made) is CausalLMOutput
    assert made.logits is two
    assert like({"x": 1}, {"y": 2}) == {"y": 2}
