"""mode="joint": losses that couple rows, inside of a Trainer, against the same Trainer without the callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import support
import torch
from architectures import zoo
from joint_cases import Anneals
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import BUDGET, LENGTHS, Module, fit, make_batch, padmin, ragged_batches, relative, token_losses
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from whole_batches import EXACT, SIZES, OwnLoss, llama, mixtral, worst

from lightning_padmin import PaddedForward
from lightning_padmin.errors import GradientCheckError, PadMinWarning
from lightning_padmin.forward import proxy as model_proxy

Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Models of transformers cast to float32 by name; in here that name means float64, so that bounds are tight."""
    with zoo.quiet(), zoo.default_dtype(torch.float64), zoo.upcasts_to(torch.float64):
        yield


class Coupled(Module):
    """A model of transformers, and a loss of the logits of the whole batch."""

    def __init__(self, loss: Loss, make: Callable[[], nn.Module] = llama) -> None:
        super().__init__()
        self.model, self.function = make(), loss

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        outputs = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return self.function(outputs.logits, batch["labels"])


def softmax_over_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.logsumexp(token_losses(logits, labels).sum(1) / 10, 0)


def top_quantile(logits: Tensor, labels: Tensor) -> Tensor:
    losses = token_losses(logits, labels)[labels[:, 1:] != -100]
    return losses[losses >= losses.detach().quantile(0.8)].mean()


def in_batch_negatives(logits: Tensor, labels: Tensor) -> Tensor:
    summary = (logits[:, :-1] * (labels[:, 1:] != -100).unsqueeze(-1)).sum(1)
    return nn.functional.cross_entropy(summary @ summary.T.detach().roll(1, 0) / 50, torch.arange(len(logits)))


@pytest.mark.parametrize("loss", [softmax_over_rows, top_quantile, in_batch_negatives])
def test_coupled_losses_are_exact_in_joint_mode_and_far_off_split(loss: Loss) -> None:
    batches = ragged_batches(4)
    stock, joint, split, callback = Coupled(loss), Coupled(loss), Coupled(loss), padmin(mode="joint")
    fit(stock, batches, accumulate_grad_batches=2)
    fit(joint, batches, callback, accumulate_grad_batches=2)
    fit(split, batches, padmin(check="off"), accumulate_grad_batches=2)
    assert worst(joint, stock) <= EXACT
    assert worst(split, stock) > 1e-2
    torch.testing.assert_close(joint.losses, stock.losses, rtol=1e-12, atol=0)
    assert joint.shapes == stock.shapes == [(10, 24)] * 4
    assert callback.stats.micro_batches == 20
    assert callback.stats.slots < 0.6 * callback.stats.slots_before
    assert (callback.stats.batches, callback.stats.rows) == (4, 40)
    assert callback.stats.loss_tokens == 4 * (sum(LENGTHS) - len(LENGTHS))


def test_the_balance_loss_of_experts() -> None:
    """Taken by the model itself, of labels: exact jointly, refused split, and far off where that is forced."""
    batches = ragged_batches(2)
    stock, joint = OwnLoss(mixtral), OwnLoss(mixtral)
    fit(stock, batches)
    fit(joint, batches, padmin(mode="joint"))
    assert worst(joint, stock) <= EXACT
    with pytest.raises(MisconfigurationException, match=r"balance loss.*mode='joint'"):
        fit(OwnLoss(mixtral), batches, padmin(mode="split"))
    split = OwnLoss(mixtral)
    split.model.config.router_aux_loss_coef, kept = 0.0, 1.0  # the guard reads this, the model its own copy
    assert split.model.router_aux_loss_coef == kept
    with pytest.raises(GradientCheckError, match="couples rows"):
        fit(split, batches, padmin(mode="split"))
    fit(split, batches, padmin(check="off"))
    assert worst(split, stock) > 1e-2


def test_left_padding_is_rolled_inside() -> None:
    """Against the same rows padded on the right."""
    right = [make_batch(LENGTHS, seed=3)]
    left = [make_batch(LENGTHS, seed=3, left=[24 - n for n in LENGTHS], width=24)]
    a, b = OwnLoss(llama), OwnLoss(llama)
    fit(a, right)
    fit(b, left, padmin(mode="joint"))
    assert worst(b, a) <= EXACT


def test_positional_inputs_and_two_calls_in_one_step() -> None:
    class Twice(Coupled):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            first = self.model(batch["input_ids"], batch["attention_mask"]).logits
            with torch.no_grad():
                again = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            assert torch.equal(first, again)
            return self.function(first, batch["labels"])

    stock, joint, callback = Twice(top_quantile), Twice(top_quantile), padmin(mode="joint")
    fit(stock, ragged_batches(2))
    fit(joint, ragged_batches(2), callback)
    assert worst(joint, stock) <= EXACT
    assert (callback.stats.batches, callback.stats.rows, callback.stats.micro_batches) == (2, 20, 20)
    assert callback.stats.slots_before == 2 * 2 * 240


def test_two_models_in_one_module() -> None:
    class Pair(Coupled):
        def __init__(self) -> None:
            super().__init__(top_quantile)
            self.other = nn.ModuleDict({"encoder": LlamaModel(LlamaConfig(**SIZES)).double()})

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
            hidden = self.other["encoder"](**inputs).last_hidden_state
            return super().loss(batch) + hidden[batch["attention_mask"].bool()].std()

    torch.manual_seed(0)
    stock = Pair()
    joint, callback = Pair(), padmin(mode="joint")
    joint.load_state_dict(stock.state_dict())
    fit(stock, ragged_batches(2))
    fit(joint, ragged_batches(2), callback)
    assert worst(joint, stock) <= EXACT
    assert callback.stats.micro_batches == 20


def test_validation_runs_the_model_as_it_is() -> None:
    calls: list[tuple[int, ...]] = []

    class Validates(Coupled):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            embedding = self.model.get_input_embeddings()
            handle = embedding.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0].shape))
            self.loss(batch)
            handle.remove()

    module = Validates(top_quantile)
    trainer = support.quiet_trainer(padmin(mode="joint"))
    trainer.fit(module, support.loader(ragged_batches(1)), support.loader(ragged_batches(1)))
    assert set(calls) == {(10, 24)}
    assert "forward" not in vars(module.model)


def test_an_error_in_the_step_leaves_the_model_as_it_was() -> None:
    class Fails(Coupled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.loss(batch)
            raise RuntimeError("no such thing")

    module = Fails(top_quantile)
    with pytest.raises(RuntimeError, match="no such thing"):
        fit(module, ragged_batches(1), padmin(mode="joint"))
    assert "forward" not in vars(module.model)


def test_generation_inside_of_a_step_is_left_alone() -> None:
    class Generates(Coupled):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            with torch.no_grad():
                inputs = {key: batch[key][:, :4] for key in ("input_ids", "attention_mask")}
                inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
                tokens = self.model.generate(**inputs, max_new_tokens=3, do_sample=False)
            assert tokens.shape == (len(batch["input_ids"]), 7)
            return super().loss(batch)

    stock, joint = Generates(top_quantile), Generates(top_quantile)
    for module in (stock, joint):
        module.model.generation_config.pad_token_id = 0
    fit(stock, ragged_batches(1))
    fit(joint, ragged_batches(1), padmin(mode="joint"))
    assert worst(joint, stock) <= EXACT


def listwise(logits: Tensor, labels: Tensor) -> Tensor:
    """Groups of five rows, as rankings and group-relative advantages have them: no part of a batch will do."""
    scores = token_losses(logits, labels).sum(1).view(-1, 5)
    return nn.functional.cross_entropy(scores, torch.tensor([4, 0]))


def test_a_loss_that_needs_its_whole_batch_is_checked_on_it() -> None:
    stock, joint = Coupled(listwise), Coupled(listwise)
    fit(stock, ragged_batches(2))
    fit(joint, ragged_batches(2), padmin(mode="joint"))
    assert worst(joint, stock) <= EXACT


@pytest.mark.parametrize("how", ["attribute", "in place"])
def test_compiled_models(how: str) -> None:
    class Compiled(Coupled):
        def __init__(self) -> None:
            super().__init__(top_quantile)
            if how == "attribute":
                self.model = torch.compile(self.model, backend="eager")
            else:
                self.model.compile(backend="eager")

    stock, joint = Compiled(), Compiled()
    fit(stock, ragged_batches(1))
    fit(joint, ragged_batches(1), padmin(mode="joint"))
    assert worst(joint, stock) <= EXACT


# What is refused


def test_a_model_that_is_none_of_transformers() -> None:
    with pytest.raises(MisconfigurationException, match=r"lightning_padmin\.PaddedForward in training_step"):
        fit(Module(), ragged_batches(1), padmin(mode="joint"))


def test_a_call_without_a_mask() -> None:
    class Unmasked(Coupled):
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            return self.function(self.model(input_ids=batch["input_ids"]).logits, batch["labels"])

    stock, joint = Unmasked(top_quantile), Unmasked(top_quantile)
    fit(stock, ragged_batches(2))
    with pytest.warns(PadMinWarning, match="had nothing to run in chunks"):
        fit(joint, ragged_batches(2), padmin(mode="joint"))
    assert worst(joint, stock) == 0


def test_a_loss_of_padding_slots_is_found_by_the_check() -> None:
    """Padding slots of the outputs hold zeros, so a loss that reads them is another one."""
    module = Coupled(lambda logits, labels: logits.square().mean())
    with pytest.raises(GradientCheckError, match=r"the loss.* depends on outputs where rows have padding"):
        fit(module, [make_batch(LENGTHS)], padmin(mode="joint"))
    assert module.gradients == []
    assert BUDGET == 24


class Mixes(nn.Module):
    """Embeddings that see all columns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.inner(ids)
        return embedded + embedded.mean(1, keepdim=True)


def test_a_model_that_reads_padding_behind_rows_of_one_length() -> None:
    """Of a batch that is padded to a fixed width: what is trimmed is not what rolling changes."""

    def mixing() -> nn.Module:
        model = llama()
        model.set_input_embeddings(Mixes(model.get_input_embeddings()))
        return model

    batch = make_batch([6] * 4, width=24)
    with pytest.raises(GradientCheckError, match=r"joint gradients of 4 rows differ.*reads padding"):
        fit(Coupled(softmax_over_rows, mixing), [batch], padmin(mode="joint"))
    stock, forced = Coupled(softmax_over_rows, mixing), Coupled(softmax_over_rows, mixing)
    fit(stock, [batch])
    fit(forced, [batch], padmin(mode="joint", check="off"))
    assert worst(forced, stock) > 0.05


class Saves(Coupled):
    """Counts the slots of what layers keep for the backward pass."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.kept: list[int] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.kept.append(0)

        def pack(saved: Tensor) -> Tensor:
            self.kept[-1] += saved.numel() if saved.ndim > 2 else 0
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            return super().loss(batch)


def test_replay_is_exact_and_keeps_no_activations() -> None:
    """With the dropout of joint mode."""
    batches = ragged_batches(3)
    stock, joint, replay = Saves(in_batch_negatives), Saves(in_batch_negatives), Saves(in_batch_negatives)
    callback = padmin(mode="replay")
    fit(stock, batches)
    fit(joint, batches, padmin(mode="joint", check="off"))
    fit(replay, batches, callback)
    assert worst(replay, stock) <= EXACT
    torch.testing.assert_close(replay.losses, stock.losses, rtol=1e-12, atol=0)
    assert callback.stats.micro_batches == 15
    assert replay.kept[-1] < 0.2 * joint.kept[-1] < 0.2 * stock.kept[-1]

    class Dropped(Coupled):
        def __init__(self, loss: Loss) -> None:
            super().__init__(loss)
            for layer in self.model.model.layers:
                layer.self_attn.attention_dropout = 0.3

        def on_before_backward(self, loss: Tensor) -> None:
            torch.rand(3)  # the second pass of a chunk finds the numbers of its first one

    joint, replay, plain = Dropped(softmax_over_rows), Dropped(softmax_over_rows), Coupled(softmax_over_rows)
    for module, mode in ((joint, "joint"), (replay, "replay"), (plain, "joint")):
        torch.manual_seed(3)
        fit(module, batches, padmin(mode=mode))
    assert worst(replay, joint) == 0
    assert worst(plain, joint) > 1e-3


@pytest.mark.parametrize("reentrant", [True, False])
def test_replay_of_models_that_checkpoint(reentrant: bool) -> None:
    plain, replay = Coupled(softmax_over_rows), Coupled(softmax_over_rows)
    replay.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fit(plain, ragged_batches(2))
    fit(replay, ragged_batches(2), padmin(mode="replay"))
    assert worst(replay, plain) <= EXACT


def test_what_would_hear_of_a_second_pass_runs_as_it_came() -> None:
    plain, replay, heard = Coupled(softmax_over_rows), Coupled(softmax_over_rows), list[int]()
    replay.model.model.layers[0].register_forward_hook(lambda module, inputs, output: heard.append(len(output)))
    fit(plain, ragged_batches(1))
    with pytest.warns(PadMinWarning, match=r"'layers.0' inside of it has a forward hook"):
        fit(replay, ragged_batches(1), padmin(mode="replay", check="off"))
    assert worst(replay, plain) <= EXACT
    assert heard == [10]


class Clamps(Coupled):
    """A hook that is not linear, which fires once per batch where there is one backward pass."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__(softmax_over_rows)
        if reentrant is not None:
            self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for p in self.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@pytest.mark.parametrize("reentrant", [None, False])
def test_hooks_on_gradients_fire_once_per_batch(reentrant: bool | None) -> None:
    plain, joint = Clamps(reentrant), Clamps(reentrant)
    fit(plain, ragged_batches(3))
    fit(joint, ragged_batches(3), padmin(mode="joint"))
    for found, wanted in zip(joint.gradients, plain.gradients, strict=True):
        assert relative(found, wanted) <= EXACT
        assert float(wanted.abs().max()) == 0.01


def test_hooks_that_re_entrant_checkpoints_fire_for_each_chunk() -> None:
    with pytest.raises(MisconfigurationException, match=r"has a hook.*use_reentrant=False"):
        fit(Clamps(reentrant=True), ragged_batches(1), padmin(mode="joint"))


def test_one_stand_in_per_model_and_fit_says_things_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PaddedForward] = []
    original = model_proxy.PaddedForward

    def make(*args: Any, **options: Any) -> PaddedForward:
        made.append(original(*args, **options))
        return made[-1]

    monkeypatch.setattr(model_proxy, "PaddedForward", make)
    batches = ragged_batches(4)
    with pytest.warns(PadMinWarning, match="exceed token_budget=10") as told:
        fit(Coupled(in_batch_negatives), batches, padmin(mode="joint", token_budget=10))
    assert sum("exceed" in str(each.message) for each in told) == 1
    assert len(made) == 1
    assert made[0].micro_batches is None  # no batch lives on in it
    with pytest.warns(PadMinWarning, match="exceed"):
        fit(Coupled(in_batch_negatives), batches, padmin(mode="joint", token_budget=10, check="off"))
    assert len(made) == 2


@pytest.mark.parametrize(("how", "named"), [("buffer", "factor"), ("number", "count"), ("anew", "")])
def test_what_each_call_of_a_model_advances(how: str, named: str) -> None:
    def module(loss: Loss = softmax_over_rows) -> Coupled:
        made = Coupled(loss)
        made.model.model.norm = Anneals(made.model.model.norm, how)
        return made

    batches = ragged_batches(3)
    if not named:
        stock, ours = module(), module()
        fit(stock, batches)
        fit(ours, batches, padmin(mode="joint"))
        assert all(relative(a, b) < 1e-9 for a, b in zip(ours.gradients, stock.gradients, strict=True))
        return
    with pytest.raises(GradientCheckError, match=rf"each call of a model writes into .*{named}.* in chunks"):
        fit(module(), batches, padmin(mode="joint"))
