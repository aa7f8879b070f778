"""mode="joint" of PadMinTrainerMixin against the stock Trainer: gradients, logged values, parameters, in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import joint_cases as cases
import pytest
import torch
from torch import Tensor, nn

from lightning_padmin import PadMinConfig
from lightning_padmin.errors import ConfigError, GradientCheckError, PadMinWarning

EXACT = 1e-12


def check(step: type | None, make: Any = cases.llama, padmin: PadMinConfig = cases.JOINT, **options: Any) -> Any:
    """Stock's gradients, parameters and logs, from fewer slots; nothing of it stays in the trainer."""
    stock, ours = (cases.train(step, make, each, **options) for each in (None, padmin))
    assert cases.apart(ours, stock) <= EXACT
    assert float((ours.parameters - stock.parameters).abs().max()) <= EXACT
    assert cases.logs_apart(ours, stock) <= EXACT
    stats = ours.trainer.padding_stats
    assert stats.waste <= stats.waste_before / 2
    assert stats.micro_batches > stats.batches > 0
    assert {"training_step", "compute_loss", "log"}.isdisjoint(vars(ours.trainer))
    return ours


def test_steps_run_as_stock_on_whole_batches() -> None:
    """A window's divisor, and a step with a coupled loss and two passes, in front of the mixin."""
    check(None, gradient_accumulation_steps=2)
    check(cases.Adversarial)


def test_what_reads_padding_is_refused_by_name() -> None:
    """The loss of this model is a softmax over all columns, those of padding too."""
    kind, collator = cases.QUESTIONS
    with pytest.raises(GradientCheckError, match=r"with models in chunks differ from the stock ones.*mode='split'"):
        cases.train(None, lambda: cases.bert(kind), cases.JOINT, collator)


@pytest.mark.parametrize(("how", "named"), [("buffer", "factor"), ("number", "count"), ("anew", "")])
def test_what_each_call_of_a_model_advances(how: str, named: str) -> None:
    def make() -> nn.Module:
        model = cases.llama()
        model.model.norm = cases.Anneals(model.model.norm, how)
        return model

    if not named:
        check(None, make)
        return
    with pytest.raises(GradientCheckError, match=rf"each call of a model writes into .*{named}.* in chunks"):
        cases.train(None, make, cases.JOINT)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("step", cases.OWN)
def test_steps_that_need_their_whole_batch(step: type, behind: bool) -> None:
    check(step, behind=behind)


@pytest.mark.slow
@pytest.mark.parametrize("step", [cases.Weighted, cases.Flooding])
def test_split_is_another_training(step: type) -> None:
    """The control."""
    split = PadMinConfig(token_budget=64, launch_cost=4, pad_token_id=0, check="off", batch_schema={"kind": "row"})
    assert cases.apart(cases.train(step, padmin=split), cases.train(step)) > 1e-3


# Programs as the examples of libraries have them, without a declaration of any entry.


@pytest.mark.slow
def test_multiple_choice() -> None:
    kind, collator = cases.CHOICES
    check(None, lambda: cases.bert(kind), collator=collator)


@pytest.mark.slow
def test_pairs_of_answers() -> None:
    check(cases.Pairwise, cases.WithValues, collator=cases.pairs)


@pytest.mark.slow
def test_questions_whose_padding_is_left_out() -> None:
    kind, collator = cases.QUESTIONS
    check(cases.Masked, lambda: cases.bert(kind), collator=collator)


@pytest.mark.slow
@pytest.mark.parametrize("make", [cases.t5, cases.bart])
def test_encoder_decoder(make: Any) -> None:
    """The encoder runs in chunks; the decoder, which gets no mask, as it came."""
    check(None, make, collator=cases.targets)


@pytest.mark.slow
def test_adapters_and_checkpoints() -> None:
    peft = pytest.importorskip("peft")

    def lora() -> Any:
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(cases.llama(), config).double()

    def prompts() -> Any:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return peft.get_peft_model(cases.llama(), config).double()

    check(cases.Contrastive, lora)
    check(None, prompts)
    for reenters in (False, True):
        kind = {"use_reentrant": reenters}
        check(cases.Contrastive, gradient_checkpointing=True, gradient_checkpointing_kwargs=kind)


@pytest.mark.slow
def test_a_mean_of_its_own_and_a_window() -> None:
    """Smoothed labels, which split refuses where a model does not know num_items_in_batch."""
    check(None, label_smoothing_factor=0.1, gradient_accumulation_steps=2)
    kind, collator = cases.KINDS
    check(None, lambda: cases.bert(kind, num_labels=3), collator=collator, label_smoothing_factor=0.1)


@pytest.mark.slow
def test_a_loss_that_reads_padding_by_a_little_or_later_is_refused() -> None:
    class Little(cases.Own):
        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            return self.token_loss(outputs, inputs) + 3e-6 * outputs.hidden_states[-1].square().mean()

    class More(cases.Own):  # by what a limit for all models would let through
        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            return self.token_loss(outputs, inputs) + 1e-5 * outputs.hidden_states[-1].square().mean()

    class Logs(cases.Own):
        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            self.log({"norm": float(outputs.hidden_states[-1].detach().norm())})
            return self.token_loss(outputs, inputs)

    class Keeps(cases.Own):
        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            self.norm = float(outputs.hidden_states[-1].detach().norm())
            return self.token_loss(outputs, inputs)

    class Late(cases.Own):
        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            loss = self.token_loss(outputs, inputs)
            return loss + 0.1 * outputs.hidden_states[-1].mean() if self.state.global_step > 2 else loss

    for step, told in (
        (Little, "the loss of the step depends on outputs where rows have padding"),
        (More, r"differ from the stock ones: relative difference 3.*e-05 \(limit 2e-05\)"),
        (Logs, "'norm' of the step depends"),
        (Keeps, r"'Kind\.norm' of the step depends"),
        (Late, r"audit of step 4 \(the first with .*differ from the stock ones"),
    ):
        with pytest.raises(GradientCheckError, match=told):
            cases.train(step, padmin=cases.JOINT)


@pytest.mark.slow
def test_what_cannot_run_in_chunks_is_named() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(cases.VOCABULARY, 4)

        def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
            return {"loss": self.inner(input_ids).square().mean()}

    class Unmasked(cases.Own):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
            return model(input_ids=inputs["input_ids"]).logits.square().mean()

    class Hooked(cases.Own):
        """Reads what the last call of a layer has left."""

        def prepare(self) -> None:
            self.model.model.layers[0].register_forward_hook(lambda _, __, output: setattr(self, "left", output))

        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            return (self.left * inputs["attention_mask"][..., None]).square().mean()

    with pytest.raises(ConfigError, match=r"none in Apart says what is padding: .*call_masks="):
        cases.train(None, Apart, cases.JOINT)
    with pytest.warns(PadMinWarning, match="nothing to run in chunks: .*model.model .LlamaModel. was called"):
        found = cases.train(Unmasked, padmin=cases.JOINT)
    assert cases.apart(found, cases.train(Unmasked)) == 0
    with pytest.raises(GradientCheckError, match="the step fails with models in chunks, and not without"):
        cases.train(Hooked, padmin=cases.JOINT)
    for options, told in (
        ({"torch_compile": True}, "torch_compile=True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    ):
        with pytest.raises(ConfigError, match=told):
            cases.train(None, padmin=cases.JOINT, **options)
    with pytest.raises(ConfigError, match="layout='pack'"):
        cases.train(None, padmin=replace(cases.JOINT, layout="pack"))


@pytest.mark.slow
def test_dropout_draws_for_each_row_and_a_random_loss_is_told_of() -> None:
    class Shaken(cases.Own):
        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            noise = torch.rand((), dtype=torch.float64) + 0.5  # the same in both ways
            return self.token_loss(outputs, inputs) * noise

    class Unsteady(cases.Own):
        def loss_of(self, outputs: Any, inputs: Any) -> Tensor:
            return self.token_loss(outputs, inputs) * random.SystemRandom().uniform(0.5, 1.5)

    check(Shaken)
    with pytest.warns(PadMinWarning, match="another function at each call"):
        cases.train(Unsteady, padmin=cases.JOINT)
