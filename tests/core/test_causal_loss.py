"""The loss that causal models of transformers make, taken of outputs put together; and what is not known to be it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import support
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_padmin import PadMinConfig
from lightning_padmin.batch.row_table import RowTable, measure
from lightning_padmin.batch.schema import infer_schema
from lightning_padmin.errors import BatchError
from lightning_padmin.forward.causal_loss import CausalLoss

CONFIG = PadMinConfig()
SIZES: dict[str, Any] = {
    "vocab_size": support.VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def table_of(batch: dict[str, Tensor]) -> RowTable:
    return measure(batch, infer_schema(batch))


def test_equal_to_the_models_own(llama: LlamaForCausalLM) -> None:
    batch = support.make_batch([5, 9, 3])
    for options in ({}, {"num_items_in_batch": 7}, {"ignore_index": -100}):
        stock = llama(**batch, **options)
        inputs = dict(batch) | options
        loss = CausalLoss.of(llama, CONFIG, inputs)
        assert set(inputs) == set(batch), "what only the loss reads is taken out"
        without = llama(**{name: value for name, value in batch.items() if name != "labels"})
        found = loss.add(without, table_of(batch))
        assert list(found)[:2] == ["loss", "logits"]
        torch.testing.assert_close(found.loss, stock.loss)
    assert llama(**batch, num_items_in_batch=7).loss != llama(**batch).loss, "the options make a difference"


def test_the_balance_loss_of_experts_comes_on_top() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2, router_aux_loss_coef=0.5)
    model, batch = MixtralForCausalLM(config), support.make_batch([5, 9, 3])
    loss = CausalLoss.of(model, CONFIG, dict(batch))
    assert loss.coefficient == 0.5
    outputs = model(**batch, output_router_logits=True)
    expected = outputs.loss
    outputs = type(outputs)(**{name: value for name, value in outputs.items() if name != "loss"})
    torch.testing.assert_close(loss.add(outputs, table_of(batch)).loss, expected)
    outputs["aux_loss"] = outputs["aux_loss"] + 2
    torch.testing.assert_close(loss.add(outputs, table_of(batch)).loss, expected + 1)


def test_targets_that_the_roll_has_taken(llama: LlamaForCausalLM) -> None:
    batch = support.make_batch([5, 7, 3], left=[2, 0, 3])
    batch["labels"][:, :] = torch.where(batch["attention_mask"] > 0, batch["input_ids"], -100)
    logits = torch.randn(3, 7, support.VOCABULARY)
    before = batch["labels"].clone()
    found = CausalLoss.of(llama, CONFIG, dict(batch)).add({"logits": logits}, table_of(batch))["loss"]
    assert torch.equal(batch["labels"], before), "labels are only read"
    kept = before.clone()
    kept[0, 2] = kept[2, 3] = -100
    torch.testing.assert_close(found, support.reduce_loss(support.token_losses(logits, kept), kept, "token-mean"))
    inputs = dict(batch) | {"ignore_index": 0, "labels": before.clamp(min=0)}
    loss = CausalLoss.of(llama, PadMinConfig(ignore_index=0), inputs)
    torch.testing.assert_close(loss.add({"logits": logits}, table_of(batch))["loss"], found)


@pytest.mark.parametrize(
    ("config", "inputs", "words"),
    [
        (PadMinConfig(labels_key="targets"), {}, "'targets' is among the inputs"),
        (PadMinConfig(ignore_index=0), {}, "ignore_index=0 is configured, but .* ignores -100"),
        (CONFIG, {"ignore_index": 0}, "ignore_index=-100 is configured, but .* ignores 0"),
        (PadMinConfig(label_shift=0), {}, "label_shift=0 is configured"),
        (CONFIG, {"shift_labels": 1}, "'shift_labels' is among the inputs next to 'labels'"),
        (PadMinConfig(loss_mask_key="weights"), {"weights": 1}, "'weights' is among the inputs next to 'labels'"),
    ],
)
def test_other_losses_are_refused(llama: LlamaForCausalLM, config: Any, inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        CausalLoss.of(llama, config, support.make_batch([3, 4]) | inputs)


def test_what_is_no_reason_to_refuse(llama: LlamaForCausalLM) -> None:
    batch = support.make_batch([3, 4])
    for config in (PadMinConfig(label_shift=1), PadMinConfig(loss_mask_key="weights")):
        assert CausalLoss.of(llama, config, batch | {"shift_labels": None}).options == {}


def test_outputs_without_the_logits_of_all_labels(llama: LlamaForCausalLM) -> None:
    batch = support.make_batch([3, 4])
    loss = CausalLoss.of(llama, CONFIG, dict(batch))
    for outputs, words in [
        ((torch.zeros(2, 4, 5),), "the outputs are tuple with no logits"),
        ({}, "dict with no logits"),
        ({"logits": torch.zeros(2, 1, 5)}, r"logits of shape \(2, 1, 5\)"),
    ]:
        with pytest.raises(BatchError, match=words):
            loss.add(outputs, table_of(batch))


Output = dict


class _Base(nn.Module):
    """With the loss function of transformers and forward functions that do more, or less, with it."""

    loss_type = "ForCausalLM"

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=5)
        vars(self).update(attributes)

    @property
    def loss_function(self) -> Any:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss


class Known(_Base):
    penalty = 0.0

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.head(input_ids)
        if self.penalty > 0:
            loss = logits.square().mean()
        loss = None
        if labels is not None:
            labels = labels.to(logits.device)
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        return Output(loss=loss, logits=logits)


class Penalised(_Base):
    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.head(input_ids)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
            loss = loss + logits.square().mean()
        return Output(loss=loss, logits=logits)


class OtherLogits(_Base):
    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.head(input_ids)
        capped = logits.tanh()
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return Output(loss=loss, logits=capped)


class LaterLogits(_Base):
    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.head(input_ids)
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        logits = logits.tanh()
        return Output(loss=loss, logits=logits)


class NoLoss(_Base):
    def forward(self, input_ids: Any) -> Any:
        return Output(logits=input_ids)


def test_forward_functions_are_read() -> None:
    inputs = support.make_batch([3, 4])
    assert CausalLoss.of(Known(), CONFIG, dict(inputs)).coefficient is None
    assert CausalLoss.of(Known(loss_type=None), CONFIG, dict(inputs)).options == {}
    with pytest.raises(BatchError, match="'num_items_in_batch' is among the inputs, but Known does not pass it on"):
        CausalLoss.of(Known(), CONFIG, inputs | {"num_items_in_batch": 3})
    for model, words in [
        (Known(penalty=1.0), "if self.penalty > 0:' in Known.forward is not known to be taken"),
        (Penalised(), r"loss = loss \+ logits.square"),
        (OtherLogits(), "does not return the logits that it takes its loss of"),
        (LaterLogits(), "logits = logits.tanh"),
        (NoLoss(), "does not return the logits that it takes its loss of"),
    ]:
        with pytest.raises(BatchError, match=words):
            CausalLoss.of(model, CONFIG, dict(inputs))


def test_models_with_losses_of_their_own(llama: LlamaForCausalLM) -> None:
    inputs = support.make_batch([3, 4])

    def own_loss(*arguments: Any) -> None: ...

    own = nn.Linear(1, 1)
    own.loss_function = own_loss
    for model in (own, nn.Linear(1, 1), Known(loss_type="ForMaskedLM"), len, nn.DataParallel(llama)):
        with pytest.raises(BatchError, match="so the model would take its loss chunk by chunk: leave it out"):
            CausalLoss.of(model, CONFIG, dict(inputs))
    no_source = Known()
    exec("def forward(self, input_ids, labels=None): return None", namespace := {})
    no_source.forward = namespace["forward"].__get__(no_source)
    with pytest.raises(BatchError, match=r"Known\.forward has no source to read its loss from"):
        CausalLoss.of(no_source, CONFIG, dict(inputs))


def test_wrappers_of_torch_are_looked_through(llama: LlamaForCausalLM) -> None:
    compiled, parallel, foreign = (type(name, (nn.Module,), {}) for name in ("Compiled", "Parallel", "Foreign"))
    compiled.__module__, parallel.__module__ = "torch._dynamo.eval_frame", "torch.nn.parallel"
    inner, outer, other = parallel(), compiled(), foreign()
    inner.module = other.module = llama
    outer._orig_mod = inner
    assert CausalLoss.of(outer, CONFIG, support.make_batch([3, 4])).model is llama
    with pytest.raises(BatchError, match="leave it out"):
        CausalLoss.of(other, CONFIG, support.make_batch([3, 4]))
