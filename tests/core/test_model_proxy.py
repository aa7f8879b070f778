"""Models inside of a step that is not changed: which are found, what a call becomes, and what is put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.forward.proxy import Calls, Forwards, chunked, transformers_models
from lightning_padmin.stats import PaddingStats

CONFIG = PadMinConfig(token_budget=24, launch_cost=2)
LENGTHS = [5, 9, 3, 12, 11, 4]


class Model(nn.Module):
    """Looks like a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(model_type="tiny", is_encoder_decoder=False)
        self.inner = support.TinyLM().double()
        self.seen: list[tuple[tuple[int, ...], set[str]]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        self.seen.append((tuple(input_ids.shape), {name for name, value in options.items() if value is not None}))
        return {"logits": self.inner(input_ids)}


def batch() -> dict[str, Tensor]:
    made = support.make_batch(LENGTHS)
    del made["labels"]
    return made


def test_models_of_transformers() -> None:
    model = Model()
    assert transformers_models(model) == {}, "only what lies inside"
    assert transformers_models(nn.ModuleDict({"a": model, "b": nn.Linear(1, 1)})) == {"a": model}
    outer, inner = Model(), Model()
    outer.add_module("part", inner)
    other = Model()
    found = transformers_models(nn.ModuleDict({"a": outer, "ab": other}))
    assert list(found) == ["a", "ab"], "the outermost ones"
    without_mask, without_type = Model(), Model()
    without_mask.forward = lambda input_ids: None  # type: ignore[method-assign]
    without_type.config = SimpleNamespace(model_type=None)
    assert transformers_models(nn.ModuleList([without_mask, without_type, nn.Linear(1, 1)])) == {}


def test_a_call_is_chunked_and_gives_what_the_model_gives() -> None:
    model, inputs = Model(), batch()
    expected = model(**inputs)["logits"]
    model.seen.clear()
    with chunked({"": model}, CONFIG) as calls:
        found = model(inputs["input_ids"], inputs["attention_mask"])["logits"]  # by place, too
        first = len(model.seen)
        assert first > 1
        model(**inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-12, atol=1e-12)
    assert len(model.seen) == 2 * first
    assert [stats.rows for stats in calls] == [len(LENGTHS)] * 2
    assert calls.total.rows == len(LENGTHS)
    assert calls.total.batches == 1
    assert calls.total.micro_batches == 2 * calls[0].micro_batches == len(model.seen)
    assert "forward" not in vars(model)
    model.seen.clear()
    model(**inputs)
    assert [shape for shape, _ in model.seen] == [(6, 12)]


@pytest.mark.parametrize(
    "changed", [{"use_cache": True}, {"past_key_values": ()}, {"attention_mask": None}, {"past_key_values": object()}]
)
def test_calls_that_stay_whole(changed: dict[str, Any]) -> None:
    model, inputs = Model(), batch()
    with chunked({"": model}, CONFIG) as calls:
        model(**inputs | changed)
    assert [shape for shape, _ in model.seen] == [(6, 12)]
    assert (list(calls), calls.total.rows) == ([], 0)


def test_other_names_of_the_mask() -> None:
    model, inputs = Model(), batch()
    config = PadMinConfig(token_budget=24, launch_cost=2, mask_key="real")
    with chunked({"": model}, config) as calls:
        model(**inputs)
        model(input_ids=inputs["input_ids"], real=inputs["attention_mask"])
    assert len(calls) == 2


def test_the_count_of_items_goes_only_where_labels_go() -> None:
    model, inputs = Model(), batch()
    with chunked({"": model}, CONFIG):
        model(**inputs, num_items_in_batch=4)
    assert len(model.seen) > 1
    assert not any("num_items_in_batch" in names for _, names in model.seen)


def test_what_stands_in_is_kept() -> None:
    model, inputs, kept = Model(), batch(), {}
    for _ in range(2):
        with chunked({"": model}, CONFIG, kept=kept):
            model(**inputs)
    (forward,) = kept.values()
    assert list(kept) == [(id(model), "attention_mask")]
    assert forward.micro_batches is None, "a batch does not live until the next call"
    typed: Forwards = kept
    assert typed is kept


def test_somebody_elses_stand_in_comes_back_also_after_an_error() -> None:
    model, inputs = Model(), batch()
    original = model.forward

    def own(*args: Any, **options: Any) -> Any:
        return original(*args, **options)

    model.forward = own  # type: ignore[method-assign]
    with pytest.raises(KeyError), chunked({"": model}, CONFIG):  # noqa: PT012
        assert model.forward is not own
        raise KeyError
    assert model.forward is own
    with chunked({"": model}, CONFIG) as calls:
        model(**inputs)
    assert len(calls) == 1


def test_a_failing_model_is_chunked_again() -> None:
    model, inputs = Model(), batch()
    with chunked({"": model}, CONFIG) as calls:
        model.inner.head.weight.requires_grad_(False)
        head, model.inner.head = model.inner.head, None  # type: ignore[assignment]
        with pytest.raises(TypeError):
            model(**inputs)
        model.inner.head = head
        model.seen.clear()
        model(**inputs)
    assert len(calls) == 1
    assert len(model.seen) > 1


def test_totals() -> None:
    assert Calls().total == PaddingStats()
    one = PaddingStats(batches=1, rows=3, micro_batches=2)
    assert Calls([one, one, one]).total == PaddingStats(batches=1, rows=3, micro_batches=6)
