"""What else GRPO can be told, with the mixin against without."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("trl")

import transformers
import trl_cases as cases

from lightning_padmin import PadMinWarning
from lightning_padmin.architectures.findings import ArchitectureError
from lightning_padmin.errors import ConfigError

# Where the loss is what varies; the other modes call it with the same arguments.
SPLIT_AND_REPLAY = ["split", pytest.param("replay", marks=pytest.mark.slow)]
ALL = ["split", pytest.param("joint", marks=pytest.mark.slow), pytest.param("replay", marks=pytest.mark.slow)]
OLD_POLICY = {"num_iterations": 2, "beta": 0.2}


def both(
    options: dict[str, Any], mode: str, *inner: type, outer: tuple[type, ...] = (), make: Any = cases.qwen2
) -> Any:
    """The run with the mixin after its comparison with the one without."""
    stock, ours = cases.trainers(cases.GRPOTrainer, *inner, outer=outer)
    found = cases.train(ours, options, cases.padmin(mode), make)
    cases.same(found, cases.train(stock, options, None, make))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        OLD_POLICY | {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        pytest.param(
            OLD_POLICY | {"importance_sampling_level": "sequence", "loss_type": "luspo"},
            marks=pytest.mark.skipif(cases.RELEASE < (1, 16), reason="reads padding, see test_trl_modes.py"),
        ),
        OLD_POLICY | {"delta": 1.5},
        OLD_POLICY | {"off_policy_mask_threshold": 0.05},
        OLD_POLICY | {"use_bias_correction_kl": True},
        OLD_POLICY | {"entropy_coef": 0.1, "loss_type": "bnpo"},
        {"entropy_coef": 0.1, "loss_type": "dapo"},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 2.0, "entropy_coef_delta": 0.05},
        {"scale_rewards": "batch", "loss_type": "dr_grpo"},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items() if key not in OLD_POLICY),
)
@pytest.mark.parametrize("mode", SPLIT_AND_REPLAY)
def test_options_of_the_loss(options: dict[str, Any], mode: str) -> None:
    cases.same(cases.train(cases.OURS, options, cases.padmin(mode)), cases.stock(options))


@pytest.mark.parametrize("mode", ["auto", "joint"])
def test_quantile_of_entropies(mode: str) -> None:
    """It couples rows: replay, unless joint is asked for."""
    options = {"top_entropy_quantile": 0.5, "entropy_coef": 0.05}
    if mode == "auto":
        with pytest.warns(PadMinWarning, match=r"mode='replay': top_entropy_quantile=0\.5 takes a quantile"):
            trainer = cases.build(cases.OURS, options, cases.padmin(mode))
    else:
        trainer = cases.build(cases.OURS, options, cases.padmin(mode))
    cases.same(cases.run(trainer), cases.stock(options))


@pytest.mark.slow
def test_quantile_of_entropies_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match=r"mode='split': top_entropy_quantile=0\.5 .* Set mode='replay'"):
        cases.build(cases.OURS, {"top_entropy_quantile": 0.5}, cases.padmin("split"))


class OftenLong:
    """So many completions without an end that whole micro-batches have nothing else."""

    long_share = 0.7


class AlwaysLong:
    long_share = 1.0


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_rows_that_lose_all_tokens(mode: str, loss: str) -> None:
    options = OLD_POLICY | {
        "mask_truncated_completions": True,
        "loss_type": loss,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "gradient_accumulation_steps": 4,
    }
    seen: list[bool] = []
    both(options, mode, outer=(OftenLong, watching(lambda inputs: seen.append(not inputs["completion_mask"].any()))))
    assert any(seen)
    assert not all(seen)


def watching(look: Any) -> type:
    class Watching:
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            look(inputs)
            return super().compute_loss(model, inputs, *args, **options)

    return Watching


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL)
def test_batches_without_any_completion_token(mode: str) -> None:
    options = {"mask_truncated_completions": True, "max_steps": 2, "loss_type": "grpo"}
    stock, ours = cases.trainers(cases.GRPOTrainer, outer=(AlwaysLong,))
    found, wanted = cases.train(ours, options, cases.padmin(mode)), cases.train(stock, options, None)
    assert not any(gradient.any() for gradient in found.gradients + wanted.gradients)
    assert cases.metric_difference(found, wanted)[0] <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mode", SPLIT_AND_REPLAY)
@pytest.mark.parametrize(
    ("per_generation", "accumulate", "iterations"), [(2, 4, 1), (6, 4, 1), (6, 4, 2), (8, 2, 1), (8, 4, 2), (2, 2, 2)]
)
def test_generations_and_accumulation_windows_that_do_not_meet(
    per_generation: int, accumulate: int, iterations: int, mode: str
) -> None:
    options = {
        "steps_per_generation": per_generation,
        "gradient_accumulation_steps": accumulate,
        "num_iterations": iterations,
        "loss_type": "dapo",
        "max_steps": 4,
    }
    cases.same(cases.train(cases.OURS, options, cases.padmin(mode)), cases.stock(options))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("per_generation", [2, 4])
def test_the_short_window_at_the_end_of_an_epoch(mode: str, per_generation: int) -> None:
    options = {
        "gradient_accumulation_steps": 4,
        "steps_per_generation": per_generation,
        "max_steps": -1,
        "num_train_epochs": 2,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_target": 2.0,
    }
    stock, ours = cases.trainers()
    data = cases.prompts(7 * per_generation // 2)
    found = cases.train(ours, options, cases.padmin(mode), train_dataset=data)
    wanted = cases.train(stock, options, None, train_dataset=data)
    cases.same(found, wanted)
    if per_generation == 2:
        assert (len(found.gradients), found.trainer.padding_stats.batches) == (4, 4 + 2 + 4 + 2)


class ToolMask:
    """Tokens of tools in the middle of completions, which the model did not write."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        source = torch.Generator().manual_seed(len(output["completion_ids"]))
        mask = torch.rand(output["completion_ids"].shape, generator=source) > 0.4
        output["tool_mask"] = mask.long()
        return output


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dapo"])
def test_tool_masks(mode: str, loss: str) -> None:
    both(OLD_POLICY | {"loss_type": loss}, mode, ToolMask)


class PreparedAgain:
    """Changes what is prepared, step by step, so that the steps to come are not known yet."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        factor = 1.0 + self._step
        return prepared | {"advantages": prepared["advantages"] * factor}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inner", "outer"])
@pytest.mark.parametrize("mode", ALL)
def test_inputs_are_prepared_once_per_step(where: str, mode: str) -> None:
    layers: dict[str, Any] = {"outer": (PreparedAgain,)} if where == "outer" else {}
    tells = pytest.warns(PadMinWarning, match="your class has its own _prepare_inputs")
    with nullcontext() if mode == "joint" else tells:
        both({"loss_type": "grpo"}, mode, *(() if layers else (PreparedAgain,)), **layers)


class SamplingLogProbs:
    """What an inference engine adds: its own log-probs, some of them unknown, and the ratios to them."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        source = torch.Generator().manual_seed(len(output["completion_ids"]))
        old = output.get("old_per_token_logps")
        if old is None:
            old = torch.full(output["completion_ids"].shape, -3.0)
        mask = output["completion_mask"]
        sampling = old + 0.2 * torch.randn(old.shape, generator=source)
        sampling[torch.rand(old.shape, generator=source) < 0.1] = float("nan")
        difference = torch.nan_to_num((old - sampling) * mask, nan=0.0)
        if self.vllm_importance_sampling_mode == "sequence_mask":
            difference = difference.sum(-1, keepdim=True)
        output["importance_sampling_ratio"] = difference.exp().clamp(max=3.0)
        output["sampling_per_token_logps"] = sampling
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.use_vllm = True
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.use_vllm = False


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("correction", ["sequence_mask", "token_truncate"])
@pytest.mark.parametrize("loss", ["dapo", "vespo"] if cases.RELEASE >= (1, 0) else ["dapo"])
def test_importance_ratios_of_an_inference_engine(mode: str, correction: str, loss: str) -> None:
    options = OLD_POLICY | {
        "vllm_importance_sampling_mode": correction,
        "off_policy_mask_threshold": 0.05,
        "loss_type": loss,
    }
    both(options, mode, SamplingLogProbs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradient_checkpointing(mode: str, reentrant: bool | None) -> None:
    options: dict[str, Any] = {"gradient_checkpointing": reentrant is not None}
    if reentrant is not None:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    cases.same(cases.train(cases.OURS, options, cases.padmin(mode)), cases.stock(options))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL)
def test_bf16_is_as_far_from_float32_as_without(mode: str) -> None:
    exact = cases.stock({"max_steps": 1})
    options = {"max_steps": 1, "bf16": True}
    without = cases.gradient_difference(cases.stock(options), exact)
    distance = cases.gradient_difference(cases.train(cases.OURS, options, cases.padmin(mode)), exact)
    assert 1e-4 < without < 0.05
    assert distance <= 2 * without


@pytest.mark.parametrize("mode", ALL)
def test_lora(mode: str) -> None:
    peft = pytest.importorskip("peft")
    random.seed(0)
    results = []
    for kind, padmin in zip(cases.trainers(), (None, cases.padmin(mode)), strict=True):
        adapter = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        results.append(cases.train(kind, OLD_POLICY, padmin, peft_config=adapter))
    cases.same(results[1], results[0], bound=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL)
def test_evaluation(mode: str) -> None:
    options = OLD_POLICY | {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    stock, ours = cases.trainers()
    found, wanted = (
        cases.train(kind, options, padmin, eval_dataset=cases.prompts(8))
        for kind, padmin in ((ours, cases.padmin(mode)), (stock, None))
    )
    cases.same(found, wanted)
    assert sum("eval_loss" in logs for logs in found.logs) == 3
    assert not any("eval_loss" in logs and "padmin/slots" in logs for logs in found.logs)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": cases.VOCABULARY}
    tokens = {"pad_token_id": cases.PAD, "eos_token_id": cases.EOS, "bos_token_id": None}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return cases.scaled(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens, **dropout)), 8.0)


def recurrent_gemma() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {"num_key_value_heads": 2, "lru_width": 32, "attention_window_size": 8}
    tokens = {"pad_token_id": cases.PAD, "eos_token_id": cases.EOS, "bos_token_id": None}
    kinds = {"block_types": ["recurrent", "attention"], "vocab_size": cases.VOCABULARY}
    return cases.scaled(
        transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**sizes, **own, **tokens, **kinds))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words"),
    [(gpt2, "numbers positions by column"), (recurrent_gemma, "lets padding into its state")],
    ids=["GPT-2", "RecurrentGemma"],
)
def test_what_left_padding_makes_wrong_is_corrected_and_told(make: Any, words: str) -> None:
    """It shifts GPT-2's positions and runs through the recurrence, so the reference is each row alone, unpadded."""
    options = {"max_steps": 1, "gradient_checkpointing": False}
    with pytest.warns(PadMinWarning, match=words):
        trainer = cases.build(cases.OURS, options, cases.padmin(), make)
    completion = 12
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(3, cases.VOCABULARY, (4, 10 + completion), generator=source)
    prompt, answer = (3, 10, 6, 1), (12, 2, 7, 5)
    mask = torch.zeros_like(ids)
    for row, (p, a) in enumerate(zip(prompt, answer, strict=True)):
        mask[row, 10 - p : 10 + a] = 1
    with torch.no_grad():
        ours = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, completion, compute_entropy=True)
        stock = trainer._padmin._stock_scores
        padded = stock(trainer.model, ids, mask, completion)[0]
        for row, (p, a) in enumerate(zip(prompt, answer, strict=True)):
            alone = ids[row : row + 1, 10 - p : 10 + a]
            wanted = stock(trainer.model, alone, torch.ones_like(alone), a, compute_entropy=True)
            for found, expected in zip(ours[:2], wanted[:2], strict=True):
                torch.testing.assert_close(found[row, :a], expected[0], rtol=1e-4, atol=1e-5)
                assert not found[row, a:].any()
    assert float(((padded - ours[0]) * mask[:, 10:]).abs().max()) > 0.05


def scaled_by_length(limit: int) -> nn.Module:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    return cases.qwen2(max_position_embeddings=limit, rope_parameters=rope)


@pytest.mark.slow
def test_positions_that_depend_on_the_longest_row() -> None:
    """Exact up to the length from which they do; refused beyond."""
    options = {"max_steps": 1}
    within, beyond = (lambda: scaled_by_length(64)), (lambda: scaled_by_length(16))
    cases.same(
        cases.train(cases.OURS, options, cases.padmin(), within), cases.train(cases.STOCK, options, None, within)
    )
    with pytest.raises(ArchitectureError, match="rotary embedding depends on the longest row"):
        cases.train(cases.OURS, options, cases.padmin(), beyond)


def experts() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=cases.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        pad_token_id=cases.PAD,
        eos_token_id=cases.EOS,
    )
    return cases.scaled(transformers.Qwen3MoeForCausalLM(config))


@pytest.mark.slow
@pytest.mark.skipif(cases.RELEASE < (1, 4), reason="takes no balance loss")
def test_balance_loss_of_experts() -> None:
    options = {"max_steps": 2, "gradient_checkpointing": False}
    wanted = cases.train(cases.STOCK, options, None, experts)
    assert max(logs.get("aux_loss", 0.0) for logs in wanted.logs) > 0.5
    with pytest.warns(PadMinWarning, match="mode='joint': the balance loss of experts"):
        trainer = cases.build(cases.OURS, options, cases.padmin(), experts)
    found = cases.run(trainer)
    cases.same(found, wanted)
    assert trainer.padding_stats.slots < trainer.padding_stats.slots_before
    for mode in ("split", "replay"):
        with pytest.raises(ConfigError, match=f"mode='{mode}': the balance loss .* Set mode='joint'"):
            cases.build(cases.OURS, options, cases.padmin(mode), experts)
