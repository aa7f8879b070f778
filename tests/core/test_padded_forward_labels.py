"""Labels among the inputs of a chunked call: the model's own loss, of the whole batch, against the stock model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import support
import torch
import transformers
from architectures import zoo
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import BatchError, PadMinWarning
from lightning_padmin.forward.padded_forward import PaddedForward

LENGTHS = [5, 9, 3, 12, 11, 4, 7, 2]
CONFIG = PadMinConfig(token_budget=24, launch_cost=2)
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
DENSE: dict[str, dict[str, Any]] = {"Llama": {}, "GPT-2": {}, "Gemma2": {}, "Falcon": {}, "LFM2": {}, "Bamba": {}}
EXPERTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "gpt-oss", "Qwen3-Next"), ROUTED),
    "JetMoe": {"output_router_logits": True, "aux_loss_coef": 1.0},
}
MODELS = DENSE | EXPERTS


def build(name: str, **options: Any) -> Any:
    return zoo.BY_NAME[name].build(**MODELS.get(name, {}), **options)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """The loss functions of transformers cast to float32 by name; in here that name means float64."""
    with zoo.quiet(), zoo.default_dtype(torch.float64), zoo.upcasts_to(torch.float64):
        yield


def right(**options: Any) -> dict[str, Tensor]:
    return support.make_batch(LENGTHS, **options)


def stock(model: Any, batch: dict[str, Any], **inputs: Any) -> tuple[Tensor, Tensor]:
    """Loss of the model's own forward pass over the whole batch, and its gradient."""
    return taken(model, model(**batch, **inputs, use_cache=False).loss)


def taken(model: Any, loss: Tensor, forward: PaddedForward | None = None) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss.backward()
    if forward is not None:
        forward.backward_pending()
    return loss.detach(), support.flat_gradient(model)


def mean_over_chunks(model: Any, batch: dict[str, Tensor], forward: PaddedForward) -> Tensor:
    """What a model that is given its labels chunk by chunk would have as a loss."""
    assert forward.micro_batches is not None
    parts = []
    for slots in forward.micro_batches.slot_maps:
        rows, width = torch.as_tensor(slots.rows), slots.widths[0]
        part = {key: value[rows, :width] for key, value in batch.items()}
        parts.append(model(**part, use_cache=False).loss * len(rows) / len(LENGTHS))
    return torch.stack(parts).sum()


def difference(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """The larger of those of losses and gradients."""
    return max(support.relative(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("mode", ["joint", "replay"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_stock_model(name: str, mode: Any) -> None:
    model, batch = build(name), right()
    forward = PaddedForward(model, CONFIG, mode)
    with float64():
        outputs = forward(**batch)
        found = taken(model, outputs.loss, forward)
        wanted, split = stock(model, batch), taken(model, mean_over_chunks(model, batch, forward))
    assert forward.micro_batches is not None
    assert len(forward.micro_batches) > 2
    assert next(iter(outputs)) == "loss"
    assert type(outputs) is type(model(**batch))
    assert difference(found, wanted) <= 1e-10
    assert difference(split, wanted) > 1e-2, "chunk by chunk would pass too, so this model tests nothing"


@pytest.mark.parametrize("name", EXPERTS)
def test_the_balance_loss_is_that_of_the_batch(name: str) -> None:
    """The mean over chunks would be another number with other gradients."""
    model, batch = build(name), right()
    forward = PaddedForward(model, CONFIG)
    with float64():
        outputs, expected = forward(**batch), model(**batch)
        assert forward.micro_batches is not None
        chunks = torch.stack([model(**micro.batch).aux_loss for micro in forward.micro_batches])
        found, wanted = taken(model, outputs.aux_loss), taken(model, expected.aux_loss)
        split = taken(model, chunks.mean())
        without = forward(**batch, output_router_logits=False).loss.detach()
    assert difference(found, wanted) <= 1e-10
    assert difference(split, wanted) > 1e-2
    assert float(outputs.loss.detach() - without) == pytest.approx(float(wanted[0]), rel=1e-10), "a coefficient of 1"


def test_router_logits_may_be_asked_for_in_the_call() -> None:
    model, batch = zoo.BY_NAME["Mixtral"].build(router_aux_loss_coef=1.0), right()
    forward = PaddedForward(model, CONFIG)
    with float64():
        found = taken(model, forward(**batch, output_router_logits=True).loss)
        wanted, without = stock(model, batch, output_router_logits=True), stock(model, batch)
    assert difference(found, wanted) <= 1e-10
    assert difference(without, wanted) > 1e-2


@pytest.mark.parametrize("mode", ["joint", "replay"])
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Qwen3Moe", "LFM2", "Bamba"])
def test_left_padded_as_right_padded(name: str, mode: Any) -> None:
    """Also where a first real token has a label, which a slot of zeros must not predict."""
    model, config = build(name), CONFIG
    left = support.make_batch(LENGTHS, prompt=0, left=[max(LENGTHS) - length for length in LENGTHS])
    labels = left["labels"].clone()
    forward = PaddedForward(model, config, mode)
    with float64():
        wanted = stock(model, right(prompt=0))
        with pytest.warns(PadMinWarning, match="7 left-padded rows of a batch have a label on their first real token"):
            outputs = forward(**left)
        naive = model.loss_function(logits=outputs.logits, labels=labels, vocab_size=zoo.VOCABULARY).detach()
        found = taken(model, outputs.loss, forward)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PadMinWarning)
            again = forward(**left).loss.detach()
    assert difference(found, wanted) <= 1e-10
    assert support.relative(again, wanted[0]) <= 1e-10
    assert support.relative(naive, found[0]) > 1e-3, "targets of zeros would not be seen"
    assert torch.equal(left["labels"], labels)


def test_two_sided_padding_and_holes_in_the_mask() -> None:
    model = build("Mixtral")
    wide = [2, 0, 1, 0, 1, 0, 5, 0]
    both, only_right = support.make_batch(LENGTHS, left=wide), right()
    for batch, starts in ((both, wide), (only_right, [0] * len(LENGTHS))):
        batch["attention_mask"][3, starts[3] + 4] = 0
    with float64():
        found = taken(model, PaddedForward(model, CONFIG)(**both).loss)
        wanted = stock(model, only_right)
    assert difference(found, wanted) <= 1e-10


@pytest.mark.parametrize("divisor", [50, torch.tensor(50)])
def test_num_items_in_batch(divisor: Any) -> None:
    model, batch = build("Qwen3Moe"), right()
    with float64():
        found = taken(model, PaddedForward(model, CONFIG)(**batch, num_items_in_batch=divisor).loss)
        wanted, mean = stock(model, batch, num_items_in_batch=divisor), stock(model, batch)
    assert difference(found, wanted) <= 1e-10
    assert difference(mean, wanted) > 1e-3


def test_ignore_index() -> None:
    model, batch = build("Llama"), right()
    batch["labels"][batch["labels"] == -100] = 7  # as many real targets of 7 carry no loss
    batch["labels"][batch["attention_mask"] == 0] = 7
    config = PadMinConfig(token_budget=24, launch_cost=2, ignore_index=7)
    with float64():
        found = taken(model, PaddedForward(model, config)(**batch, ignore_index=7).loss)
        wanted = stock(model, batch, ignore_index=7)
    assert difference(found, wanted) <= 1e-10


@pytest.mark.parametrize("mode", ["joint", "replay"])
def test_as_transformers_runs_it(mode: Any) -> None:
    """A float64 model whose loss is taken in float32."""
    model, batch = build("Mixtral"), right()
    del model.forward  # the table's, which casts to float64
    forward = PaddedForward(model, CONFIG, mode)
    outputs = forward(**batch)
    assert outputs.logits.dtype == torch.float64
    assert outputs.loss.dtype == torch.float32
    assert difference(taken(model, outputs.loss, forward), stock(model, batch)) <= 1e-6


@pytest.fixture
def alone() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["joint", "replay"])
def test_under_ddp(mode: Any) -> None:
    model, batch = build("Qwen3Moe"), right()
    ddp = nn.parallel.DistributedDataParallel(model)
    forward = PaddedForward(ddp, CONFIG, mode, no_sync=ddp.no_sync)
    with float64():
        found, wanted = taken(ddp, forward(**batch).loss, forward), stock(model, batch)
    assert difference(found, wanted) <= 1e-10


def test_compiled() -> None:
    model, batch = llama(), right()
    wanted = stock(model, batch)
    with zoo.quiet():
        found = taken(model, PaddedForward(torch.compile(model, backend="eager"), CONFIG)(**batch).loss)
    assert difference(found, wanted) <= 1e-5


def test_without_gradients_and_without_labels() -> None:
    model, batch = build("Llama"), right()
    forward = PaddedForward(model, CONFIG, "replay")
    with torch.no_grad(), float64():
        loss = forward(**batch).loss
        assert not loss.requires_grad
        assert support.relative(loss, model(**batch).loss) <= 1e-10
        batch["labels"] = None  # type: ignore[assignment]
        assert "loss" not in forward(**batch)


class Penalised(transformers.LlamaForCausalLM):
    """A loss with a term of its own, as a subclass would add it."""

    def forward(self, *args: Any, labels: Any = None, **inputs: Any) -> Any:
        outputs = super().forward(*args, labels=labels, **inputs)
        if labels is not None:
            outputs.loss = outputs.loss + outputs.logits.square().mean()
        return outputs


class Scaled(transformers.LlamaForCausalLM):
    """A loss that looks like the library's, but for its logits."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, attention_mask).last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        logits = logits / 2
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Other(transformers.LlamaForCausalLM):
    """Returns other logits than those that its loss is taken of."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, attention_mask).last_hidden_state)
        scaled = logits / 2
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=scaled)


class Wrapper(nn.Module):
    """Not one of torch's: it may do anything with the loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


def llama(kind: Any = transformers.LlamaForCausalLM) -> Any:
    return kind(transformers.LlamaConfig(**zoo.BY_NAME["Llama"].options))


@pytest.mark.parametrize("kind", [Penalised, Scaled, Other])
def test_a_loss_that_is_not_known_is_refused(kind: Any) -> None:
    model, batch = llama(kind), right()
    why = {
        Penalised: r"'outputs = super\(\)\.forward\(.*' in Penalised.forward",
        Scaled: "'logits = logits / 2' in Scaled.forward",
        Other: "Other.forward does not return the logits",
    }
    with pytest.raises(BatchError, match=f"'labels' is among the inputs.*{why[kind]}.*leave it out"):
        PaddedForward(model, CONFIG)(**batch)
    labels = batch.pop("labels")
    assert PaddedForward(model, CONFIG)(**batch).logits.shape[:2] == labels.shape


def test_a_penalty_of_logits_on_padding_is_refused() -> None:
    """Bamba's takes its mean over padding too; its default coefficient is 0 and then all is well (above)."""
    model = build("Bamba", z_loss_coefficient=0.1)
    with pytest.raises(BatchError, match=r"'if self.z_loss_coefficient > 0:' in BambaForCausalLM.forward"):
        PaddedForward(model, CONFIG)(**right())


def test_another_loss_is_refused() -> None:
    message = "'labels' is among the inputs.*leave it out and take the loss of the outputs"
    own_function = llama()
    own_function.loss_function = lambda logits, labels, vocab_size: logits.mean()
    patched = llama()
    patched.forward = lambda **inputs: patched(**inputs)
    models = [own_function, patched, Wrapper(llama()), nn.DataParallel(llama()), llama().forward]
    models += [zoo.BY_NAME[name].build() for name in ("Llama, classes", "Bert")]
    for model in models:
        with pytest.raises(BatchError, match=message):
            PaddedForward(model, CONFIG)(**right())
    batch = right()
    batch["targets"] = batch.pop("labels")
    with pytest.raises(BatchError, match="'targets' is among the inputs"):
        PaddedForward(llama(), PadMinConfig(labels_key="targets"))(**batch)


@pytest.mark.parametrize(
    ("options", "inputs", "message"),
    [
        ({}, {"shift_labels": right()["labels"]}, "'shift_labels' is among the inputs next to 'labels'"),
        ({"loss_mask_key": "m"}, {"m": right()["attention_mask"]}, "'m' is among the inputs next to 'labels'"),
        ({"ignore_index": 0}, {}, "ignore_index=0 is configured, .* ignores -100"),
        ({}, {"ignore_index": 0}, "ignore_index=-100 is configured, .* ignores 0"),
        ({"label_shift": 0}, {}, "label_shift=0 is configured"),
        ({}, {"return_dict": False}, "return_dict=False"),
    ],
)
def test_what_the_loss_cannot_honour_is_refused(options: Any, inputs: Any, message: str) -> None:
    config = PadMinConfig(token_budget=24, launch_cost=2, **options)
    forward = PaddedForward(llama(), config, "replay")
    for _ in range(2):  # nothing is left pending
        with pytest.raises(BatchError, match=message):
            forward(**right(), **inputs)


def test_malformed_labels_are_refused() -> None:
    batch = right()
    batch["labels"][0, -1] = 3
    with pytest.raises(BatchError, match="'labels' is set on 1 padding slots"):
        PaddedForward(llama(), CONFIG)(**batch)
    with pytest.raises(BatchError, match=r"outputs=\{'logits': 'drop'\} go without labels"):
        PaddedForward(llama(), CONFIG, outputs={"logits": "drop"})(**right())
    with pytest.raises(BatchError, match=r"'labels' of shape \(8,\)"):
        PaddedForward(llama(), CONFIG)(**{**right(), "labels": torch.ones(8, dtype=torch.int64)})
