"""Calls that select columns, outputs whose sizes agree by chance, and inputs that are written to between two passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import support
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_padmin import PadMinConfig
from lightning_padmin.batch.fields import Field
from lightning_padmin.errors import BatchError
from lightning_padmin.forward.kept_logits import KeptLogits
from lightning_padmin.forward.outputs import Assembler
from lightning_padmin.forward.padded_forward import PaddedForward

LENGTHS = [5, 9, 3, 12, 11, 4, 7, 2]
WIDTH = 14
LEFT = [WIDTH - length for length in LENGTHS]
SIZES: dict[str, int] = {
    "vocab_size": support.VOCABULARY,
    **dict.fromkeys(("hidden_size", "intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=64, pad_token_id=0)).double()


def gemma() -> Any:
    torch.manual_seed(0)
    return GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8, max_position_embeddings=64, pad_token_id=0)).double()


class Older(nn.Module):
    """Takes the argument under its older name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, num_logits_to_keep: int = 0) -> Any:
        return {"logits": self.inner(input_ids, attention_mask).logits[:, -num_logits_to_keep:]}


class Adapter(nn.Module):
    """As adapters of PEFT: all arguments are passed on to a model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def get_base_model(self) -> Any:
        return self.inner

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return self.inner(*args, **inputs)


def left_padded() -> dict[str, Tensor]:
    batch = support.make_batch(LENGTHS, left=LEFT, width=WIDTH)
    del batch["labels"]
    return batch


def gradient(model: Any, loss: Tensor, forward: PaddedForward | None = None) -> Tensor:
    model.zero_grad()
    loss.backward()
    if forward is not None:
        forward.backward_pending()
    return support.flat_gradient(model)


def last_of_rows_alone(model: Any, batch: dict[str, Tensor], k: int) -> Tensor:
    """(B, k, V) of each row run alone, zeros where the row is shorter."""
    rows = []
    for row, length in enumerate(LENGTHS):
        own = batch["input_ids"][row : row + 1, WIDTH - length :]
        logits = model(input_ids=own, attention_mask=torch.ones_like(own))
        logits = (logits["logits"] if isinstance(logits, dict) else logits.logits)[:, -k:]
        rows.append(nn.functional.pad(logits, (0, 0, k - logits.shape[1], 0)))
    return torch.cat(rows)


def taken(logits: Tensor) -> Tensor:
    """A loss of all columns that are no padding; the targets differ, so that columns cannot be mixed up."""
    targets = torch.arange(logits.shape[0] * logits.shape[1]).view(logits.shape[:2]) % support.VOCABULARY
    real = (logits != 0).any(-1)
    return cross_entropy(logits[real], targets[real])


@pytest.mark.parametrize("mode", ["joint", "replay"])
@pytest.mark.parametrize("budget", [14 * 8, 24, 12])
@pytest.mark.parametrize(("make", "k"), [(llama, 1), (llama, 4), (llama, 12), (gemma, 3), (Adapter, 2), (Older, 4)])
def test_the_last_columns_are_those_of_the_batch(make: Callable[[], Any], k: int, budget: int, mode: Any) -> None:
    model, batch = make(), left_padded()
    alone = last_of_rows_alone(model, batch, k)
    expected = gradient(model, taken(alone))
    forward = PaddedForward(model, PadMinConfig(token_budget=budget, launch_cost=2), mode)
    name = "num_logits_to_keep" if make is Older else "logits_to_keep"
    logits = forward(**batch, **{name: k})["logits"]
    assert logits.shape == alone.shape
    torch.testing.assert_close(logits.detach(), alone.detach(), rtol=1e-9, atol=1e-10)
    assert support.relative(gradient(model, taken(logits), forward), expected) < 1e-7  # Gemma has constants in float32
    other = last_of_rows_alone(model, batch, k).roll(1, 0 if k == 1 else 1)
    assert support.relative(gradient(model, taken(other)), expected) > 0.05, "other columns would pass too"


def test_rounded_widths_and_rows_without_padding() -> None:
    model, batch = llama(), left_padded()
    alone = last_of_rows_alone(model, batch, 3)
    config = PadMinConfig(token_budget=32, launch_cost=2, pad_to_multiple_of=8, pad_token_id=0)
    torch.testing.assert_close(PaddedForward(model, config)(**batch, logits_to_keep=3).logits, alone)
    full = {name: value[3:4, 2:] for name, value in batch.items()}
    torch.testing.assert_close(PaddedForward(model, config)(**full, logits_to_keep=99).logits, model(**full).logits)


def test_packs_keep_the_last_columns_too() -> None:
    model, batch = llama(), left_padded()
    forward = PaddedForward(model, PadMinConfig(token_budget=24, launch_cost=2, layout="pack"))
    logits = forward(**batch, logits_to_keep=3).logits
    assert forward.micro_batches is not None
    assert forward.micro_batches.plan.is_packed
    torch.testing.assert_close(logits, last_of_rows_alone(model, batch, 3), rtol=1e-9, atol=1e-10)


def test_the_chunk_is_asked_for_few_columns() -> None:
    """Logits are the largest thing there is: a chunk makes no more of them than its shortest row needs."""
    model, asked = llama(), []
    model.register_forward_pre_hook(lambda _, __, inputs: asked.append(inputs["logits_to_keep"]), with_kwargs=True)
    forward = PaddedForward(model, PadMinConfig(token_budget=24, launch_cost=2))
    forward(**left_padded(), logits_to_keep=2)
    assert forward.micro_batches is not None
    wanted = [s.widths[0] - int(s.length.min()) + 2 for s in forward.micro_batches.slot_maps]
    assert asked == wanted
    assert max(wanted) < 14


def test_without_the_map_the_loss_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault put back: the chunk's last columns, as they come."""
    model, batch = llama(), left_padded()
    monkeypatch.setattr(KeptLogits, "restore", lambda self, batches, parts: batches.restore(parts)[:, -self.count :])
    forward = PaddedForward(model, PadMinConfig(token_budget=24, launch_cost=2))
    found = forward(**batch, logits_to_keep=1).logits.detach()
    assert float((found - last_of_rows_alone(model, batch, 1).detach()).abs().max()) > 0.05


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            torch.tensor([1, 3]),
            r"logits_to_keep is a tensor of shape \(2,\): columns of the batch are others",
        ),
        (torch.tensor(3), r"logits_to_keep is a tensor of shape \(\)"),
        (-3, "logits_to_keep is -3"),
        (True, "logits_to_keep is True"),
        (np.int64(3), r"logits_to_keep is np.int64\(3\)"),
        (slice(-2, None), r"logits_to_keep is slice\(-2, None"),
        (range(8, 10), r"logits_to_keep is range\(8, 10\)"),
    ],
)
def test_other_selections_are_refused(value: Any, said: str) -> None:
    for mode in ("joint", "replay"):
        forward = PaddedForward(llama(), PadMinConfig(token_budget=24), mode)  # type: ignore[arg-type]
        for _ in range(2):  # nothing is left pending
            with pytest.raises(BatchError, match=said):
                forward(**left_padded(), logits_to_keep=value)


def test_last_columns_that_are_padding_are_refused_with_the_fix() -> None:
    model = llama()
    batch = support.make_batch(LENGTHS)
    labels = batch.pop("labels")
    forward = PaddedForward(model, PadMinConfig(token_budget=24))
    with pytest.raises(BatchError, match=r"7 rows have padding there \(first row 0\).* take \[:, -2:\] of the logits"):
        forward(**batch, logits_to_keep=2)
    fixed, stock = forward(**batch).logits[:, -2:], model(**batch).logits[:, -2:]
    real = batch["attention_mask"][:, -2:].bool()
    torch.testing.assert_close(fixed[real], stock[real])
    with pytest.raises(BatchError, match="next to labels, whose loss needs all logits"):
        forward(**batch, labels=labels, logits_to_keep=2)
    assert forward(**batch, labels=labels, logits_to_keep=0).loss > 0


def test_a_row_without_real_tokens_has_no_last_columns() -> None:
    model, batch = llama(), left_padded()
    batch["attention_mask"][2] = 0
    found = PaddedForward(model, PadMinConfig(token_budget=24, launch_cost=2))(**batch, logits_to_keep=3).logits
    assert not found[2].any()
    kept = [row for row in range(8) if row != 2]
    torch.testing.assert_close(found[kept], last_of_rows_alone(model, batch, 3)[kept], rtol=1e-9, atol=1e-10)


def test_models_that_may_ignore_it_are_refused() -> None:
    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
            return self.inner(input_ids, attention_mask)

    class Bare(Older):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int = 0) -> Any:
            return self.inner(input_ids, attention_mask, logits_to_keep=logits_to_keep).logits

    class Ignores(Older):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int = 0) -> Any:
            return self.inner(input_ids, attention_mask)

    config = PadMinConfig(token_budget=24, launch_cost=2)
    for model, said in (
        (Swallows(), "Swallows does not say that it takes this"),
        (Bare(), "the outputs are Tensor without 'logits'"),
        (Ignores(), "of a chunk gave logits of shape"),
    ):
        with pytest.raises(BatchError, match=said):
            PaddedForward(model, config)(**left_padded(), logits_to_keep=2)


@pytest.mark.parametrize(
    "more",
    [
        {"cache_position": torch.arange(WIDTH)},
        {"position_ids": torch.arange(WIDTH)},
        {"position_ids": torch.arange(WIDTH)[None]},
    ],
)
def test_columns_that_are_numbered_without_rows_are_refused(more: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=next(iter(more))):
        PaddedForward(llama(), PadMinConfig(token_budget=24))(**left_padded(), **more)
    square = {name: value[:, -8:] for name, value in left_padded().items()}
    with pytest.raises(ValueError, match=next(iter(more))):
        PaddedForward(llama(), PadMinConfig(token_budget=24))(**square, **{k: v[..., :8] for k, v in more.items()})


# --- Outputs whose sizes agree by chance. ---


def right(rows: list[int], width: int) -> dict[str, Tensor]:
    batch = support.make_batch([LENGTHS[row] for row in rows], width=width)
    del batch["labels"]
    return batch


def returns(**make: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def function(input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        return {name: each(input_ids) for name, each in make.items()}

    return function


# name: (what it returns, rows of the batch, width, budget): a batch where sizes agree
CHANCE: dict[str, tuple[Callable[[Tensor], Any], list[int], int, int]] = {
    "attention, one chunk, trimmed": (lambda x: torch.ones(len(x), 3, x.shape[1], x.shape[1]), [0, 1, 2], 14, 99),
    "attention with heads first": (lambda x: torch.ones(3, len(x), x.shape[1], x.shape[1]), [0, 1, 2], 14, 99),
    "attention, several widths": (lambda x: torch.ones(len(x), 3, x.shape[1], x.shape[1]), list(range(8)), 14, 24),
    "scores of pairs": (lambda x: torch.ones(len(x), x.shape[1], x.shape[1]), list(range(8)), 14, 24),
    "values of next tokens": (lambda x: torch.ones(len(x), x.shape[1] - 1), [0, 1, 2], 14, 99),
    "a feature as wide as the batch": (lambda x: torch.ones(len(x), 9), [0, 1, 2], 14, 99),
    "a second dimension as wide": (lambda x: torch.ones(len(x), 2, 9), [0, 1, 2], 14, 99),
    "layers before rows": (lambda x: torch.ones(2, len(x), 5), [3, 4, 3, 4], 14, 24),
    "a total in each chunk": (lambda x: x.sum().double()[None], [3, 4, 5], 14, 12),
    "sequence first": (lambda x: torch.ones(x.shape[1], len(x), 5), list(range(8)), 14, 24),
    "one scalar": (lambda x: x.sum().double(), [0, 1], 14, 99),
    "a list with a tensor for each row": (lambda x: [torch.ones(4) for _ in x], list(range(7)), 14, 24),
    "strided positions": (lambda x: torch.ones(len(x), x.shape[1] // 2), list(range(8)), 14, 24),
}


@pytest.mark.parametrize("kind", CHANCE)
def test_sizes_that_agree_by_chance_are_refused_by_name(kind: str) -> None:
    make, rows, width, budget = CHANCE[kind]
    config = PadMinConfig(token_budget=budget, launch_cost=1000 if budget == 99 else 2)
    for mode in ("joint", "replay"):
        forward = PaddedForward(returns(odd=make), config, mode)  # type: ignore[arg-type]
        with pytest.raises(BatchError, match="output 'odd' has"):
            forward(**right(rows, width))
        forward.backward_pending()  # nothing was kept
    declared = PaddedForward(returns(odd=make), config, outputs={"odd": "drop"})
    assert declared(**right(rows, width))["odd"] is None


# name of an output -> what a model may return under it that is something else
NAMED: dict[str, Callable[[Tensor], Any]] = {
    "logits": lambda x: torch.ones(len(x), x.shape[1] - 1, 5),
    "last_hidden_state": lambda x: torch.ones(len(x), x.shape[1] // 2, 5),
    "hidden_states": lambda x: (torch.ones(x.shape[1], len(x), 5),),
    "pooler_output": lambda x: torch.ones(x.shape),
    "start_logits": lambda x: torch.ones(len(x), 4),
    "router_logits": lambda x: torch.ones(len(x) * 2, 4),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_does_not_make_it_so(name: str) -> None:
    forward = PaddedForward(returns(**{name: NAMED[name]}), PadMinConfig(token_budget=24, launch_cost=0))
    with pytest.raises(BatchError, match=f"output '{name}' is '(position|row|flat)' by its name, but has shapes"):
        forward(**right(list(range(8)), 14))


def test_logits_of_two_dimensions_may_be_one_per_token() -> None:
    per_token = returns(logits=lambda x: x.double())
    with pytest.raises(BatchError, match="output 'logits' has shapes"):
        PaddedForward(per_token, PadMinConfig(token_budget=99))(**right([0, 1, 2], 14))
    outputs = PaddedForward(per_token, PadMinConfig(token_budget=99), outputs={"logits": "position"})
    batch = right([0, 1, 2], 14)
    assert torch.equal(outputs(**batch)["logits"], batch["input_ids"].double())


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("row", lambda x: torch.ones(x.shape)),
        ("flat", lambda x: torch.ones(x.shape)),
        ("position", lambda x: torch.ones(len(x), 4)),
    ],
)
def test_a_declaration_that_does_not_hold_is_refused(kind: Any, make: Any) -> None:
    forward = PaddedForward(returns(odd=make), PadMinConfig(token_budget=24, launch_cost=0), outputs={"odd": kind})
    with pytest.raises(BatchError, match=f"output 'odd' is '{kind}' by declaration, but has shapes"):
        forward(**right(list(range(8)), 14))


def test_what_shapes_prove_stays_accepted() -> None:
    """Rows and positions of chunks that differ, per-row features in one chunk, values of next tokens if declared."""
    batch = right(list(range(8)), 14)
    many = returns(
        pooled=lambda x: x.double().sum(1, keepdim=True) * torch.ones(6),
        reward=lambda x: x.double().sum(1),
        tokens=lambda x: x.double()[..., None] * torch.ones(3),
        shorter=lambda x: x.double()[:, :-1],
        inner=lambda x: {"a": (x.double().sum(1), x.double())},
        number=lambda x: 3,
    )
    ids = batch["input_ids"].double()
    for budget in (24, 40):
        forward = PaddedForward(many, PadMinConfig(token_budget=budget, launch_cost=2), outputs={"shorter": "position"})
        found = forward(**batch)
        assert torch.equal(found["reward"], ids.sum(1))
        assert torch.equal(found["pooled"], ids.sum(1, keepdim=True) * torch.ones(6))
        assert torch.equal(found["tokens"], ids[..., None] * torch.ones(3))
        followed = batch["attention_mask"].roll(-1, 1).bool()  # the last token of a row has no next one
        assert torch.equal(found["shorter"] * followed, ids * followed)
        assert torch.equal(found["inner"]["a"][0], ids.sum(1))
        assert torch.equal(found["inner"]["a"][1], ids)
        assert found["number"] == 3


def test_what_was_proven_once_is_known_where_chunks_prove_nothing() -> None:
    class Model(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return {"tokens": input_ids.double(), "total": input_ids.double().sum(1)}

    model, one, several = Model(), right([0, 1, 2], 14), right(list(range(7)), 14)
    config = PadMinConfig(token_budget=40, launch_cost=2)  # chunks of several numbers of rows
    with pytest.raises(BatchError, match="output 'tokens'"):
        PaddedForward(model, PadMinConfig(token_budget=999))(**one)
    PaddedForward(model, config)(**several)
    found = PaddedForward(model, PadMinConfig(token_budget=999))(**one)
    assert torch.equal(found["tokens"], one["input_ids"].double())
    alone = right([3, 4, 5], 14)
    assert torch.equal(
        PaddedForward(model, PadMinConfig(token_budget=12))(**alone)["total"], alone["input_ids"].sum(1).double()
    )
    with pytest.raises(BatchError, match="output 'tokens'"):
        PaddedForward(Model(), PadMinConfig(token_budget=999))(**one)


def test_without_the_checks_they_would_come_back_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Assembler, "_may_be_columns", lambda self, shapes: False)
    make, rows, width, budget = CHANCE["values of next tokens"]
    found = PaddedForward(returns(odd=make), PadMinConfig(token_budget=budget))(**right(rows, width))["odd"]
    assert found.shape != make(right(rows, width)["input_ids"]).shape


# --- Inputs that are written to between two passes. ---


class Reads(nn.Module):
    """Reads ids, a table that all rows share, a list of tensors, an array, and embeddings that may be trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.e, self.out = nn.Embedding(support.VOCABULARY, 6).double(), nn.Linear(6, 5).double()

    def forward(
        self,
        attention_mask: Tensor,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        shared: Tensor | None = None,
        images: list[Tensor] | None = None,
        array: Any = None,
    ) -> Any:
        x = self.e(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * (1 if shared is None else shared)
        if images is not None:
            x = x + torch.stack(images)[:, None]
        if array is not None:
            x = x * torch.as_tensor(array)[:, None, None]
        return {"logits": self.out(torch.tanh(x)) * attention_mask[..., None]}


def written(kind: str) -> tuple[dict[str, Any], dict[str, Any], Callable[[dict[str, Any]], None]]:
    """Inputs, options, and what happens to the inputs between the passes."""
    batch: dict[str, Any] = right([0, 1, 2], 9)
    share = {"static_keys": ["shared"]}
    match kind:
        case "ids":
            return batch, {}, lambda b: b["input_ids"].fill_(7)
        case "ids, unseen by the version":
            return batch, {}, lambda b: b["input_ids"].data.fill_(7)
        case "ids, through an array":
            return batch, {}, lambda b: b["input_ids"].numpy().fill(7)
        case "mask":
            return batch, {}, lambda b: b["attention_mask"].zero_()
        case "shared":
            return batch | {"shared": torch.rand(6).double()}, share, lambda b: b["shared"].data.mul_(3)
        case "images":
            images = [torch.rand(6).double() for _ in range(3)]
            return batch | {"images": images}, {"batch_schema": {"images": "row"}}, lambda b: b["images"][0].fill_(9)
        case "array":
            return (
                batch | {"array": np.ones(3)},
                {"batch_schema": {"array": Field("row")}},
                lambda b: b["array"].fill(9),
            )
        case _:
            del batch["input_ids"]
            return (
                batch | {"inputs_embeds": torch.rand(3, 9, 6).double()},
                {},
                lambda b: b["inputs_embeds"].data.zero_(),
            )


KINDS = [
    "ids",
    "ids, unseen by the version",
    "ids, through an array",
    "mask",
    "shared",
    "images",
    "array",
    "embeddings",
]


def replayed(kind: str, budget: int, write: bool) -> Tensor:
    model, (batch, options, spoil) = Reads(), written(kind)
    torch.manual_seed(4)
    for value in batch.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.copy_(torch.rand_like(value))
    launch_cost = 1000 if budget == 999 else 0  # one chunk, or one for each row
    forward = PaddedForward(model, PadMinConfig(token_budget=budget, launch_cost=launch_cost, **options), "replay")
    for image in batch.get("images", []):
        image.copy_(torch.arange(6.0) / 6)
    loss = (forward(**batch)["logits"] ** 2).sum()
    if write:
        spoil(batch)
    loss.backward()
    forward.backward_pending()
    return support.flat_gradient(model)


@pytest.mark.parametrize("budget", [999, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_reads_what_the_first_pass_read(kind: str, budget: int) -> None:
    assert support.relative(replayed(kind, budget, True), replayed(kind, budget, False)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_without_copies_the_gradient_would_be_another(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = replayed(kind, 999, False)
    monkeypatch.setattr("lightning_padmin.forward.padded_forward._copy_of", lambda batch: batch)
    assert support.relative(replayed(kind, 999, True), expected) > 0.05


def test_embeddings_keep_their_graph_in_replay() -> None:
    batch = right([0, 1, 2], 9)
    ids = batch.pop("input_ids")
    gradients = []
    for mode in ("joint", "replay"):
        model, source = Reads(), nn.Embedding(support.VOCABULARY, 6).double()
        torch.manual_seed(6)
        nn.init.normal_(source.weight)
        forward = PaddedForward(model, PadMinConfig(token_budget=999), mode)  # type: ignore[arg-type]
        (forward(**batch, inputs_embeds=source(ids))["logits"] ** 2).sum().backward()
        forward.backward_pending()
        assert source.weight.grad is not None
        gradients.append(source.weight.grad)
    assert float(gradients[0].abs().max()) > 0
    torch.testing.assert_close(*gradients)


def test_the_first_pass_may_write_to_its_inputs() -> None:
    class Writes(Reads):
        def forward(self, attention_mask: Tensor, input_ids: Tensor) -> Any:  # type: ignore[override]
            input_ids.add_(1)
            return super().forward(attention_mask, input_ids % support.VOCABULARY)

    gradients = []
    for mode in ("joint", "replay"):
        model = Writes()
        forward = PaddedForward(model, PadMinConfig(token_budget=9, launch_cost=0), mode)  # type: ignore[arg-type]
        (forward(**right([0, 1, 2], 9))["logits"] ** 2).sum().backward()
        forward.backward_pending()
        gradients.append(support.flat_gradient(model))
    assert support.relative(*gradients) < 1e-12
