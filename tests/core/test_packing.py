"""Packs: what goes where, that documents keep apart, and that a model which lets them leak is refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_padmin import Field, PaddedForward, PadMinConfig, iter_micro_batches
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.errors import BatchError, ConfigError, PadMinWarning, PlanError
from lightning_padmin.microbatching.batcher import MicroBatcher
from lightning_padmin.microbatching.packed_layout import PackStyle
from lightning_padmin.planning.planner import plan_packs
from lightning_padmin.verification.leak import Leak, PackGate, has_varlen_kernel, measure_leak, needs_rows

WORKED_EXAMPLE = [120, 90, 300, 40, 55, 30, 210, 65]


class Open(PackGate):
    """A gate that is open."""

    def __init__(self, **style: Any) -> None:
        super().__init__({}, PadMinConfig(layout="pack"))
        self.verdict, self.style, self._proven = True, PackStyle(**style), 2**60


def batch_of(lengths: Sequence[int], left: bool = True, seed: int = 0) -> dict[str, Tensor]:
    width = max(lengths) + 3
    column, n = torch.arange(width), torch.tensor(lengths)[:, None]
    mask = ((column >= width - n) if left else (column < n)).long()
    ids = torch.randint(3, 40, mask.shape, generator=torch.Generator().manual_seed(seed))
    labels = torch.where(mask == 1, ids, -100)
    first = mask.argmax(1, keepdim=True)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels.scatter(1, first, -100)}


def packs_of(batch: Any, budget: int, **options: Any) -> Any:
    config = PadMinConfig(layout="pack", token_budget=budget, **options)
    return MicroBatcher(config, gate=Open()).prepare(batch)


# --- Which rows go together. ---


def test_the_worked_example() -> None:
    """4,096 padded slots in rows of 512; whole documents in two packed rows of 512."""
    plan = plan_packs(WORKED_EXAMPLE, 512)
    batches = packs_of(batch_of([*WORKED_EXAMPLE], left=False), 512)
    assert [slots.offsets.tolist() for slots in batches.slot_maps] == [
        [0, 300, 510],
        [0, 120, 210, 275, 330, 370, 400],
    ]
    assert 8 * 512 == 4096
    assert plan.real_tokens / (2 * 512) == pytest.approx(0.889, abs=5e-4)
    assert (plan.slots, plan.waste, len(plan)) == (910, 0.0, 2)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 120),
    st.none() | st.integers(1, 6),
    st.booleans(),
)
def test_packs_keep_the_rules(rows: list[tuple[int, bool]], budget: int, max_rows: int | None, rule: bool) -> None:
    lengths, riders = np.array([row[0] for row in rows]), np.array([row[1] and rule for row in rows])
    with_riders = riders.any() and not riders.all()
    if with_riders:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PadMinWarning)
            plan = plan_packs(lengths, budget, max_rows=max_rows, riders=riders)
    else:
        plan = plan_packs(lengths, budget, max_rows=max_rows, riders=riders)
    assert sorted(itertools.chain(*(rows.tolist() for rows in plan.groups))) == list(range(len(rows)))
    assert plan.slots == lengths.sum()
    for group, tokens in zip(plan.groups, plan.slots_per_group, strict=True):
        assert tokens == lengths[group].sum()
        if with_riders:
            assert not riders[group].all()
            continue
        assert len(group) == 1 or (tokens <= budget and len(group) <= (max_rows or 99))
    if not with_riders and max_rows is None:
        fewest = np.ceil(lengths.sum() / max(budget, lengths.max()))
        assert len(plan) >= fewest
    assert plan.slots_per_group.tolist() == sorted(plan.slots_per_group.tolist(), reverse=True)


def test_no_more_packs_than_first_fit_decreasing_guarantees() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 400, 60)
        assert len(plan_packs(lengths, 512)) <= np.ceil(11 / 9 * np.ceil(lengths.sum() / 512)) + 1


def test_more_packs_are_halves() -> None:
    plan = plan_packs(WORKED_EXAMPLE, 1000)
    assert len(plan) == 1
    assert [int(n) for n in plan.at_least(2).slots_per_group] == [510, 400]
    assert len(plan.at_least(99)) == 8
    assert sum(plan.at_least(5).slots_per_group) == 910


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3, 2], 0), "token_budget=0"),
        (([3, 0], 4), "lengths"),
        (([(3, 2), (1, 1)], 4), "two lengths"),
        (([2**61, 2**61], 4), "not in 1"),
    ],
)
def test_what_cannot_be_planned(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_packs(*arguments)


def test_no_rows() -> None:
    assert len(plan_packs([], 5)) == 0


# --- What goes where. ---


@pytest.mark.parametrize("left", [True, False])
def test_a_pack_holds_every_token_once_and_restarts(left: bool) -> None:
    lengths = [7, 3, 9, 1, 5]
    batch = batch_of(lengths, left)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    batches = packs_of(batch, 12)
    for micro, slots in zip(batches, batches.slot_maps, strict=True):
        pack = micro.batch
        assert pack["attention_mask"] is None
        documents = [batch["input_ids"][row][batch["attention_mask"][row] == 1] for row in micro.rows]
        assert torch.equal(pack["input_ids"], torch.cat(documents)[None])
        assert torch.equal(pack["position_ids"], torch.cat([torch.arange(len(d)) for d in documents])[None])
        labels = [batch["labels"][row][batch["attention_mask"][row] == 1].clone() for row in micro.rows]
        for each in labels:
            each[0] = -100
        assert torch.equal(pack["labels"], torch.cat(labels)[None])
        assert slots.shape == tuple(pack["input_ids"].shape)
    assert all(torch.equal(batch[name], before[name]) for name in before)
    assert set(batch) == set(before)
    stats = batches.stats
    assert (stats.slots, stats.real_tokens, stats.waste) == (25, 25, 0.0)
    assert sum(weight for _, weight in batches) == pytest.approx(1)


def test_no_loss_crosses_a_border() -> None:
    """The first label of a document would be predicted from the document before it."""
    batch = batch_of([5, 3, 4], left=False)
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    batch["loss_mask"] = batch["attention_mask"].double() * 0.5
    config = PadMinConfig(
        layout="pack", token_budget=99, loss_mask_key="loss_mask", batch_schema={"loss_mask": "position"}
    )
    (micro,) = MicroBatcher(config, gate=Open()).prepare(batch)
    starts = micro.batch["position_ids"] == 0
    assert starts.sum() == 3
    assert torch.equal(micro.batch["labels"] == -100, starts)
    assert torch.equal(micro.batch["loss_mask"] == 0, starts)
    assert MicroBatcher(config, gate=Open()).prepare(batch).stats.loss_tokens == 9


def test_labels_that_line_up_with_logits_keep_their_first() -> None:
    batch = batch_of([4, 3], left=False)
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    config = PadMinConfig(layout="pack", label_shift=0, token_budget=99)
    (micro,) = MicroBatcher(config, gate=Open(shift=0)).prepare(batch)
    assert (micro.batch["labels"] != -100).all()


def test_outputs_come_back_in_the_layout_of_the_batch() -> None:
    batch = batch_of([7, 3, 9, 1, 5])
    batches = packs_of(batch, 12)
    outputs = [micro.batch["input_ids"][..., None].double() * torch.tensor([1.0, 10.0]) for micro in batches]
    restored = batches.restore(outputs)
    assert torch.equal(restored, batch["input_ids"][..., None].double() * torch.tensor([1.0, 10.0]))
    later = batches.restore([output[:, 2:] for output in outputs], first_column=2)
    for micro, slots in zip(batches, batches.slot_maps, strict=True):
        left_out = slots.slots - 2
        assert (later[micro.rows] != 0).any(-1).sum() == left_out
    with pytest.raises(BatchError, match="does not fit a pack"):
        batches.slot_maps[0].restore(torch.zeros(2, 5))
    with pytest.raises(BatchError, match="does not fit a pack"):
        batches.slot_maps[0].restore(torch.zeros(1, 99))


def test_borders_and_numbers_for_kernels() -> None:
    config = PadMinConfig(layout="pack", token_budget=99)
    (micro,) = MicroBatcher(config, gate=Open(borders=True, seq_idx=True)).prepare(batch_of([4, 3, 2]))
    assert micro.batch["cu_seq_lens_q"].tolist() == micro.batch["cu_seq_lens_k"].tolist() == [0, 4, 7, 9]
    assert micro.batch["cu_seq_lens_q"].dtype == torch.int32
    assert (micro.batch["max_length_q"], micro.batch["max_length_k"]) == (4, 4)
    assert micro.batch["seq_idx"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2]]


def test_other_entries() -> None:
    batch = batch_of([4, 3, 2], left=False)
    more = {"segments": batch["input_ids"] * 2, "names": ["a", "b", "c"], "table": torch.ones(7, 5)}
    config = PadMinConfig(
        layout="pack", token_budget=7, batch_schema={"segments": "position"}, static_keys=["table"], launch_cost=0
    )
    batches = MicroBatcher(config, gate=Open()).prepare({**batch, **more})
    for micro in batches:
        assert torch.equal(micro.batch["segments"], micro.batch["input_ids"] * 2)
        assert micro.batch["names"] == ["abc"[row] for row in micro.rows]
        assert micro.batch["table"] is more["table"]


@dataclass
class Rows:
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    extra: dict[str, int] = field(default_factory=dict)


def changed(**entries: Any) -> dict[str, Any]:
    return {**batch_of([4, 3, 2], left=False), **entries}


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (changed(score=torch.ones(3)), {}, "'score' has one value per row"),
        (
            changed(attention_mask=torch.tensor([[1, 0, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]])),
            {"labels_key": None, "loss_mask_key": "attention_mask", "static_keys": ["labels"]},
            "holes inside of 1 rows",
        ),
        (changed(position_ids=torch.arange(7).expand(3, 7) + 2), {}, "'position_ids' do not count every row from 0"),
        (
            changed(pixels=torch.ones(3, 2), count=[1, 1, 1]),
            {"batch_schema": {"pixels": Field("unit", counts="count")}},
            "'pixels' cannot be packed",
        ),
        (Rows(**batch_of([4, 3, 2])), {}, "no place for 'position_ids'"),
    ],
)
def test_batches_that_cannot_be_packed(batch: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        list(packs_of(batch, 99, **options))


def test_positions_that_restart_are_taken() -> None:
    batch = changed(position_ids=torch.arange(7).expand(3, 7).clone())
    (micro,) = packs_of(batch, 99)
    assert micro.batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]


def test_ranks_with_less_to_do_run_a_copy_of_one_document() -> None:
    def other_rank_has_three(values: Sequence[int]) -> np.ndarray:
        return np.array([list(values), [0, 3, *values[2:]]], np.int64)

    config = PadMinConfig(layout="pack", token_budget=99)
    batches = MicroBatcher(config, exchange=other_rank_has_three, gate=Open()).prepare(batch_of([5]))
    assert [tuple(micro.batch["input_ids"].shape) for micro in batches] == [(1, 5)] * 3
    assert [micro.weight for micro in batches] == [1.0, 0.0, 0.0]


# --- The gate. ---


class Mixer(nn.Module):
    """A toy model that counts tokens so far, within its document or across: what leaks is chosen."""

    def __init__(self, leaks: float = 0.0, reads: str = "position_ids") -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        self.leaks, self.reads = leaks, reads
        self.config = type("Config", (), {"_attn_implementation": "sdpa", "model_type": "mixer"})()

    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        documents = torch.zeros_like(input_ids)
        if self.reads == "seq_idx":
            documents = more["seq_idx"].long() if "seq_idx" in more else documents
        elif position_ids is not None:
            documents = (position_ids == 0).long().cumsum(-1)
        same = documents[:, :, None] == documents[:, None, :]
        see = torch.ones_like(same).tril() * (same + self.leaks * ~same)
        return type("Output", (), {"logits": self.head(torch.tanh(see.to(x) @ x))})()


def gate(model: nn.Module, layout: str = "pack", **options: Any) -> tuple[PackGate, list[str]]:
    said: list[str] = []
    return PackGate({"model": model}, PadMinConfig(layout=layout, **options), say=said.append), said


LENGTHS = np.array([9, 7, 5, 4])


def test_a_model_without_a_leak_passes_once_and_for_all() -> None:
    found, said = gate(Mixer())
    assert found.verdict is None
    assert found(LENGTHS)
    assert found.leaks["model"].is_none
    assert found(np.array([3]))
    (words,) = said
    assert "layout='pack': model (Mixer, attention 'sdpa'): 8 documents of a pack are as they are alone" in words


@pytest.mark.parametrize("leaks", [1.0, 1e-2, 1e-4])
def test_leaks_are_refused_however_small(leaks: float) -> None:
    """In float32 the last one is far below what rows in two layouts differ by."""
    with pytest.raises(ArchitectureError, match=r"'pack': model .*documents of a pack change each other") as error:
        gate(Mixer(leaks))[0](LENGTHS)
    assert "Use layout='pad'" in str(error.value)


def test_one_document_does_not_tell() -> None:
    found, said = gate(Mixer(1.0))
    assert not found(np.array([7]))
    assert found.verdict is None
    assert not said


def test_two_rows_of_a_pack_each_are_tried_together() -> None:
    with pytest.raises(ArchitectureError):
        gate(Mixer(1.0), token_budget=5)[0](np.array([5, 4]))


class LeaksFarOut(Mixer):
    """As it should be up to 24 tokens of a pack; beyond, documents are seen through."""

    def forward(self, input_ids: Tensor, **more: Any) -> Any:
        self.leaks = float(input_ids.shape[1] > 24)
        return super().forward(input_ids, **more)


def test_longer_packs_are_proven_anew() -> None:
    found, said = gate(LeaksFarOut(), token_budget=64)
    assert found(np.array([4, 3, 3]))
    assert found(np.array([5, 3, 3, 2, 4]))  # 17 tokens; 20 are proven
    with pytest.raises(ArchitectureError, match="documents of a pack change each other"):
        found(np.array([9, 7, 5, 6]))
    assert len(said) == 1


def test_there_are_few_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = gate(Mixer(), token_budget=256)
    proofs: list[int] = []
    prove = found._prove
    monkeypatch.setattr(found, "_prove", lambda documents: proofs.append(sum(documents)) or prove(documents))
    for tokens in range(8, 256, 4):
        found(np.array([tokens // 2, tokens // 2]))
    assert proofs == sorted(proofs)
    assert len(proofs) <= 6
    assert proofs[-1] <= 256


def test_nothing_is_decided_where_adapters_may_be_off() -> None:
    waiting = PackGate({"model": Mixer()}, PadMinConfig(layout="pack"), wants_gradients=True)
    with torch.no_grad():
        assert not waiting(LENGTHS)
    assert waiting.verdict is None
    assert waiting(LENGTHS)
    with torch.no_grad():
        assert waiting(LENGTHS)


def test_a_frozen_model_is_compared_by_its_outputs() -> None:
    """Though its embeddings give a graph, as with checkpointing and adapters behind it."""

    class Frozen(Mixer):
        def forward(self, *args: Any, **more: Any) -> Any:
            made = super().forward(*args, **more)
            made.logits = made.logits.requires_grad_() if made.logits.is_leaf else made.logits
            return made

    model = Frozen().requires_grad_(False)
    assert gate(model)[0](LENGTHS)
    with pytest.raises(ArchitectureError):
        gate(Frozen(1e-3).requires_grad_(False))[0](LENGTHS)


def test_in_half_precision_a_model_that_counts_columns_does_not_pass() -> None:
    class Counts(Mixer):
        def forward(self, input_ids: Tensor, **more: Any) -> Any:
            made = super().forward(input_ids, **more)
            column = torch.arange(input_ids.shape[1])[:, None] / 100
            made.logits = made.logits * (1 + column).to(made.logits)
            return made

    assert gate(Mixer().bfloat16())[0](LENGTHS)
    with pytest.raises(ArchitectureError, match="are not what they are alone"):
        gate(Counts().bfloat16())[0](LENGTHS)


def test_small_leaks_show_in_half_precision_too() -> None:
    assert gate(Mixer().bfloat16())[0](LENGTHS)
    with pytest.raises(ArchitectureError, match="change each other"):
        gate(Mixer(0.02).bfloat16())[0](LENGTHS)


def test_a_batch_that_cannot_be_packed_is_padded_with_auto() -> None:
    mask = torch.tensor([[1, 0, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]])
    config = PadMinConfig(layout="auto", labels_key=None, loss_mask_key="attention_mask", static_keys=["labels"])
    batcher = MicroBatcher(config, gate=Open())
    with pytest.warns(PadMinWarning, match=r"a batch is padded, not packed: .*holes inside of 1 rows"):
        (micro,) = batcher.prepare(changed(attention_mask=mask))
    assert torch.equal(micro.batch["attention_mask"], mask[:, :4])
    (micro,) = batcher.prepare(changed())
    assert micro.batch["attention_mask"] is None


def test_auto_pads_without_a_kernel_and_says_so() -> None:
    found, said = gate(Mixer(), "auto")
    assert not found(LENGTHS)
    assert said == [
        "layout='pad': packing is faster only with a fused kernel for variable lengths, and model (Mixer, attention "
        "'sdpa') has none"
    ]
    assert not has_varlen_kernel(Mixer())


def test_auto_with_a_kernel_packs_only_what_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_padmin.verification.leak.has_varlen_kernel", lambda model: True)
    found, said = gate(Mixer(), "auto")
    assert found(LENGTHS)
    assert found.style.borders
    assert "layout='pack'" in said[0]
    found, said = gate(Mixer(1.0), "auto")
    assert not found(LENGTHS)
    assert "layout='pad': model (Mixer, attention 'sdpa'): documents of a pack change each other" in said[0]


def test_auto_pads_from_then_on_where_another_attention_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_padmin.verification.leak.has_varlen_kernel", lambda model: True)
    model = Mixer()
    found, said = gate(model, "auto")
    assert found(LENGTHS)
    model.leaks, model.config._attn_implementation = 1.0, "other"
    assert not found(LENGTHS)
    assert found.verdict is False
    assert len(said) == 2
    assert "layout='pad'" in said[-1]
    assert "is 'other' since packs were proven" in said[-1]


def test_mixers_whose_kernels_read_the_numbers_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArchitectureError):
        gate(Mixer(reads="seq_idx"))[0](LENGTHS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    found, _ = gate(Mixer(reads="seq_idx"))
    assert found(LENGTHS)
    assert found.style.seq_idx


def test_a_model_that_fails_on_packs() -> None:
    class Fails(Mixer):
        def forward(self, *args: Any, **more: Any) -> Any:
            raise ValueError("seq_idx needs a kernel")

    with pytest.raises(ArchitectureError, match=r"failed on a pack .*seq_idx needs a kernel"):
        gate(Fails())[0](LENGTHS)


def test_the_model_is_left_as_it_was() -> None:
    model = Mixer().train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before, state = {name: p.detach().clone() for name, p in model.named_parameters()}, torch.get_rng_state()
    gate(model)[0](LENGTHS)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.head.weight.grad == 1).all()
    assert model.embedding.weight.grad is None
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_only_gradients_may_leak() -> None:
    """Outputs are right, and the backward pass is not."""

    class Crossed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient * (1 + x.mean())

    class Bent(Mixer):
        def forward(self, *args: Any, **more: Any) -> Any:
            made = super().forward(*args, **more)
            made.logits = Crossed.apply(made.logits)
            return made

    leak = measure_leak(Bent(), [9, 7, 5], PackStyle())
    assert leak.outputs == 0
    assert leak.gradients > leak.limits[1]
    assert not leak.is_none


def test_words() -> None:
    nan = float("nan")
    assert "failed on a pack (no)" in str(Leak(nan, nan, nan, nan, (0.0,) * 4, (1, 2), "no"))
    assert "are not what they are alone: outputs differ by 0.5" in str(
        Leak(0, 0, 0.5, 0.1, (1e-6, 1e-6, 1e-3, 1e-3), (1, 2))
    )
    assert not Leak(nan, 0, 0, 0, (1.0,) * 4, (1, 2)).is_none


# --- PaddedForward. ---


class Logits(Mixer):
    """Returns the tensor alone."""

    def forward(self, *args: Any, **more: Any) -> Any:
        return super().forward(*args, **more).logits


@pytest.mark.parametrize("mode", ["joint", "replay"])
def test_padded_forward_packs_its_chunks(mode: Any) -> None:
    model, batch = Logits().double(), batch_of([9, 7, 5, 4])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def gradients(layout: Any) -> tuple[list[Tensor], list[tuple[int, int]]]:
        model.zero_grad()
        config = PadMinConfig(layout=layout, token_budget=14, launch_cost=0)
        forward = PaddedForward(model, config, mode, outputs={"": "position"})
        (forward(**inputs) ** 2).sum().backward()
        forward.backward_pending()
        assert forward.micro_batches is not None
        return [p.grad.clone() for p in model.parameters()], [slots.shape for slots in forward.micro_batches.slot_maps]

    (packed, packs), (padded, rectangles) = gradients("pack"), gradients("pad")
    assert packs == [(1, 14), (1, 11)] != rectangles
    assert max(float((a - b).abs().max()) for a, b in zip(packed, padded, strict=True)) < 1e-12


def test_functions_are_not_packed() -> None:
    model = Mixer()
    with pytest.raises(ConfigError, match="no model is known"):
        PaddedForward(lambda **inputs: model(**inputs), PadMinConfig(layout="pack"))


# --- Options. ---


def test_without_a_model_nothing_is_packed() -> None:
    batch = batch_of([4, 3])
    with pytest.raises(ConfigError, match="use PaddedForward"):
        iter_micro_batches(batch, PadMinConfig(layout="pack"))
    assert all("position_ids" not in micro for micro, _ in iter_micro_batches(batch, PadMinConfig(layout="auto")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "packed"}, "layout='packed'"),
        ({"layout": "pack", "pad_to_multiple_of": 8}, "layout='pack' has no padding"),
        ({"layout": "pack", "shape_buckets": 4}, "shape_buckets=4 needs layout='pad'"),
        ({"layout": "pack", "method": "greedy"}, "method='greedy' has no meaning"),
        ({"layout": "pack", "attention_width": 512}, "attention_width=512 has no meaning"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PadMinConfig(**options)


@pytest.mark.parametrize("reduction", ["row-mean", lambda batch: batch["attention_mask"].sum(1)])
def test_means_over_rows_have_no_rows(reduction: Any) -> None:
    assert "a pack is one row of many documents" in str(needs_rows(PadMinConfig(loss_reduction=reduction)))


def test_logged_means_over_rows_have_no_rows() -> None:
    assert "log_reduce['acc']='row-mean'" in str(needs_rows(PadMinConfig(log_reduce={"acc": "row-mean", "n": "sum"})))
    assert needs_rows(PadMinConfig(log_reduce={"n": "sum"})) is None
