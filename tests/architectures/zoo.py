"""Architectures of transformers as tiny random models: 2 layers, hidden size 16 or 32, a vocabulary of 23.

What each entry says about stock left padding (`stock`) is a fact about transformers that the tests measure: "exact" if
a left-padded batch, passed with its mask alone, gives each row the logits it has alone, "wrong" if it does not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import nn

Kind = Literal["causal", "masked-lm", "classification", "seq2seq"]

VOCABULARY, CLASSES, PAD = 23, 3, 0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of the table.

    Attributes:
        name: as in the table; unique.
        group: family.
        config: name of the configuration class.
        model: name of the model class.
        options: of the configuration.
        kind: what is trained, which decides over labels and their shift.
        stock: what stock left padding gives.
        dtype: float32 where a model has no float64 path.
        bound: largest difference allowed, of logits (relative to the largest) and of gradients.
        multiple: pad_to_multiple_of, for models that train on such widths only (rows alone are then padded right).
        forward: passed to each call.
        note: for the table.
        slow: marked slow.
    """

    name: str
    group: str
    config: str
    model: str
    options: Mapping[str, Any]
    kind: Kind = "causal"
    stock: Literal["exact", "wrong"] = "exact"
    dtype: torch.dtype = torch.float64
    bound: float = 1e-10
    multiple: int = 1
    forward: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    slow: bool = False

    @property
    def label_shift(self) -> int:
        return int(self.kind == "causal")

    def build(self, **options: Any) -> nn.Module:
        """A model in training mode without dropout, every parameter moved off its special values (zeros, ones)."""
        with quiet(), default_dtype(self.dtype), upcasts_to(self.dtype):
            config = getattr(transformers, self.config)(**copy.deepcopy({**self.options, **options}))
            for name, value in list(vars(config).items()):
                if ("drop" in name or "jitter" in name) and isinstance(value, float):
                    setattr(config, name, 0.0)
            torch.manual_seed(0)
            # The grouped kernels for experts have no float64 on a CPU.
            model = getattr(transformers, self.model)._from_config(config, experts_implementation="eager")
        model = model.to(self.dtype).train()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.2 if parameter.ndim > 1 else 0.1
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((scale * noise).to(parameter.dtype))
        for child in model.modules():
            if isinstance(child, nn.Dropout):
                child.p = 0.0
        return self._in_one_precision(model)

    def _in_one_precision(self, model: nn.Module) -> nn.Module:
        forward = model.forward

        @functools.wraps(forward)
        def lifted(*args: Any, **inputs: Any) -> Any:
            with quiet(), default_dtype(self.dtype), upcasts_to(self.dtype):
                return forward(*args, **inputs)

        model.forward = lifted
        return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No remarks of transformers about missing kernels."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Buffers too are made in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def upcasts_to(dtype: torch.dtype) -> Iterator[None]:
    """Models upcast norms, softmax and scans to float32 by that name; in here the name means `dtype`.

    Without it every float64 model is a float32 one in places, and an error below 1e-7 could not be told from rounding.
    """
    before = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = dtype
    torch.Tensor.float = functools.partialmethod(torch.Tensor.to, dtype)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = before  # type: ignore[method-assign]


_FUSED = "fused training kernels mask left padding too late"
_BIAS = "a bias in the convolution window"
_IDS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_DENSE = {**_IDS, **_SIZES, **_HEADS, "intermediate_size": 32, "max_position_embeddings": 64}
_GPT = {**_IDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
_WINDOW = {"sliding_window": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2}
_HYBRID2 = {**_MAMBA, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_ENCODER = {**_IDS, **_SIZES, "num_attention_heads": 4, "intermediate_size": 32, "max_position_embeddings": 64}
_SCAN1 = {**_IDS, **_SIZES, "state_size": 4, "expand": 2, "conv_kernel": 4, "time_step_rank": 4}
_SCAN2 = {**_IDS, **_SIZES, "num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4}


def _causal(
    group: str, prefix: str, base: Mapping[str, Any] = _DENSE, *, name: str = "", config: str = "", **rest: Any
) -> Architecture:
    own = {key: rest.pop(key) for key in list(rest) if key not in Architecture.__dataclass_fields__}
    return Architecture(
        name=name or prefix,
        group=group,
        config=config or f"{prefix}Config",
        model=rest.pop("model", f"{prefix}ForCausalLM"),
        options={**base, **own},
        **rest,
    )


_DENSE_MODELS = [
    _causal("dense", "Llama"),
    _causal("dense", "Mistral", **_WINDOW),
    _causal("dense", "Qwen2"),
    _causal("dense", "Qwen3", head_dim=4),
    _causal("dense", "Phi"),
    _causal("dense", "Phi3"),
    _causal("dense", "Olmo2"),
    _causal("dense", "GPTNeoX", name="GPT-NeoX", rotary_pct=0.5),
    _causal("dense", "Falcon", {**_IDS, **_SIZES, "num_attention_heads": 4}),
    _causal("dense", "Gemma", head_dim=4),
    _causal("dense", "StableLm", name="StableLM", partial_rotary_factor=0.5),
    _causal("dense", "Cohere"),
    _causal("dense", "Granite"),
    _causal("dense", "SmolLM3", no_rope_layer_interval=2),
    _causal("dense", "Glm", head_dim=4),
    _causal("dense", "Glm4", head_dim=4),
    _causal("dense", "Nemotron"),
    _causal("dense", "Helium", head_dim=4),
    _causal("dense", "Exaone4", **_WINDOW),
    _causal("dense", "SeedOss", head_dim=4),
    _causal("dense", "Apertus"),
    _causal("dense", "Arcee"),
    _causal("dense", "Ernie4_5", name="Ernie 4.5", head_dim=4),
    _causal("dense", "HunYuanDenseV1", name="HunYuan", head_dim=4, stock="wrong", note="norm after rotation"),
    _causal("dense", "GPTJ", {**_GPT, "rotary_dim": 2}, name="GPT-J"),
    _causal("dense", "CodeGen", {**_GPT, "rotary_dim": 2}),
]
_SLIDING = [
    _causal(
        "sliding window",
        "Qwen3",
        name="Qwen3, sliding",
        head_dim=4,
        use_sliding_window=True,
        max_window_layers=1,
        **_WINDOW,
    ),
    _causal("sliding window", "Gemma2", head_dim=4, query_pre_attn_scalar=4, **_WINDOW),
    _causal(
        "sliding window",
        "Gemma3",
        config="Gemma3TextConfig",
        head_dim=4,
        query_pre_attn_scalar=4,
        layer_types=["sliding_attention", "full_attention"],
        **_WINDOW,
    ),
    _causal("sliding window", "Olmo3", layer_types=["sliding_attention", "full_attention"], **_WINDOW),
    _causal("sliding window", "Cohere2", layer_types=["sliding_attention", "full_attention"], **_WINDOW),
    _causal("sliding window", "Starcoder2", **_WINDOW),
    _causal(
        "sliding window",
        "Ministral3",
        head_dim=4,
        stock="wrong",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            "max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        note="query scale from column numbers",
    ),
    _causal(
        "sliding window",
        "Llama4",
        config="Llama4TextConfig",
        stock="wrong",
        head_dim=4,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=32,
        attention_chunk_size=4,
        floor_scale=4,
        no_rope_layers=[1, 0],
        note="attention temperature from column numbers",
    ),
]
_POSITIONS = [
    _causal("ALiBi", "Bloom", {**_IDS, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    _causal("ALiBi", "Mpt", {**_IDS, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, name="MPT"),
    _causal("ALiBi", "Falcon", {**_IDS, **_SIZES, "num_attention_heads": 4, "alibi": True}, name="Falcon, ALiBi"),
    _causal(
        "absolute positions",
        "GPT2",
        _GPT,
        name="GPT-2",
        model="GPT2LMHeadModel",
        stock="wrong",
        note="positions by column",
    ),
    _causal(
        "absolute positions",
        "GPTNeo",
        {**_IDS, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
        name="GPT-Neo",
        stock="wrong",
        note="positions by column",
    ),
    _causal("absolute positions", "GPTBigCode", _GPT, stock="wrong", note="positions by column"),
    _causal(
        "absolute positions",
        "XGLM",
        {**_IDS, "d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4},
        stock="wrong",
        note="positions by column",
    ),
    _causal("absolute positions", "BioGpt", name="BioGPT", stock="wrong", note="positions by column"),
    _causal("absolute positions", "OPT", {**_DENSE, "ffn_dim": 32, "word_embed_proj_dim": 16}),
]
_MOE = [
    _causal("experts", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    _causal("experts", "Qwen2Moe", **_EXPERTS, num_experts=4, shared_expert_intermediate_size=16),
    _causal("experts", "Qwen3Moe", **_EXPERTS, head_dim=4, num_experts=4),
    _causal("experts", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _causal("experts", "JetMoe", {**_DENSE, "kv_channels": 8}, num_local_experts=4, num_experts_per_tok=2),
    _causal("experts", "GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    _causal(
        "experts",
        "DeepseekV3",
        name="DeepSeek-V3",
        num_key_value_heads=4,
        **_EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    ),
    _causal("experts", "GptOss", name="gpt-oss", head_dim=4, num_local_experts=4, num_experts_per_tok=2, **_WINDOW),
    _causal("experts", "Glm4Moe", **_EXPERTS, head_dim=4, n_routed_experts=4, first_k_dense_replace=1),
    _causal("experts", "Phimoe", name="PhiMoE", num_local_experts=4, num_experts_per_tok=2),
    _causal("experts", "MiniMaxM2", name="MiniMax-M2", head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    _causal("experts", "FlexOlmo", num_experts=4, num_experts_per_tok=2),
    _causal(
        "experts",
        "DeepseekV32",
        name="DeepSeek-V3.2",
        num_key_value_heads=4,
        **_EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        index_n_heads=32,  # fewer tie at zero, and the widths of a batch break ties
        index_head_dim=8,
        index_topk=4,
    ),
    _causal(
        "experts", "Dots1", **_EXPERTS, head_dim=4, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1
    ),
]
_RECURRENT = [
    _causal("state space", "Mamba", _SCAN1, note=_FUSED),
    _causal("state space", "Mamba", {**_SCAN1, "use_bias": True}, name="Mamba, use_bias", stock="wrong", note=_BIAS),
    _causal("state space", "FalconMamba", _SCAN1, note=_FUSED),
    _causal(
        "state space",
        "FalconMamba",
        {**_SCAN1, "use_bias": True},
        name="FalconMamba, use_bias",
        stock="wrong",
        note=_BIAS,
    ),
    _causal("state space", "Mamba2", _SCAN2, note=_FUSED),
    _causal("state space", "Mamba2", {**_SCAN2, "use_bias": True}, name="Mamba2, use_bias", stock="wrong", note=_BIAS),
    _causal(
        "recurrent",
        "RecurrentGemma",
        num_key_value_heads=2,
        lru_width=16,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
        stock="wrong",
        note="mask ignored by the recurrence",
    ),
    _causal(
        "recurrent",
        "Rwkv",
        {**_IDS, **_SIZES, "attention_hidden_size": 16, "intermediate_size": 32, "context_length": 64},
        name="RWKV",
        stock="wrong",
        forward={"use_cache": False},
        note="mask ignored; its default cache breaks backward",
    ),
    _causal(
        "recurrent",
        "xLSTM",
        {**_IDS, "hidden_size": 32, "num_blocks": 2, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 4}
        | {"mode": "train", "autocast_kernel_dtype": "float32"}
        | {"ffn_round_up_to_multiple_of": 8},
        stock="wrong",
        multiple=4,
        forward={"use_cache": False},
        note="mask ignored; trains on multiples of chunk_size, without its default cache",
    ),
]
_HYBRIDS = [
    _causal(
        "hybrid",
        "Jamba",
        **_MAMBA,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        use_mamba_kernels=False,
    ),
    _causal("hybrid", "Bamba", **_HYBRID2, attn_layer_indices=[1], note=_FUSED),
    _causal(
        "hybrid",
        "Bamba",
        name="Bamba, proj_bias",
        **_HYBRID2,
        attn_layer_indices=[1],
        mamba_proj_bias=True,
        stock="wrong",
        note=_BIAS,
    ),
    _causal("hybrid", "FalconH1", name="Falcon-H1", **_HYBRID2, head_dim=4, mamba_d_ssm=32, note=_FUSED),
    _causal(
        "hybrid",
        "GraniteMoeHybrid",
        **_HYBRID2,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        note=_FUSED,
    ),
    _causal(
        "hybrid",
        "NemotronH",
        name="Nemotron-H",
        layers_block_type=["mamba", "attention", "mlp"],
        head_dim=4,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=4,
        use_mamba_kernels=False,
        note=_FUSED,
    ),
    _causal(
        "hybrid",
        "Zamba2",
        num_key_value_heads=4,
        mamba_d_state=8,
        mamba_ngroups=2,
        n_mamba_heads=4,
        chunk_size=4,
        num_mem_blocks=1,
        adapter_rank=4,
        use_mamba_kernels=False,
        layers_block_type=["mamba", "hybrid"],
        note=_FUSED,
    ),
    _causal(
        "hybrid",
        "Qwen3Next",
        name="Qwen3-Next",
        head_dim=4,
        **_LINEAR,
        **_EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=16,
    ),
    _causal("hybrid", "Qwen3_5", config="Qwen3_5TextConfig", name="Qwen3.5", head_dim=8, **_LINEAR),
    _causal(
        "hybrid",
        "Qwen3_5Moe",
        config="Qwen3_5MoeTextConfig",
        name="Qwen3.5-MoE",
        head_dim=8,
        **_LINEAR,
        **_EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=16,
    ),
    _causal(
        "hybrid",
        "Lfm2Moe",
        name="LFM2-MoE",
        layer_types=["conv", "full_attention"],
        **_EXPERTS,
        num_experts=4,
        num_dense_layers=1,
    ),
    _causal(
        "hybrid",
        "Jamba",
        name="Jamba, proj_bias",
        **_MAMBA,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        use_mamba_kernels=False,
        mamba_proj_bias=True,
        stock="wrong",
        note=_BIAS,
    ),
    _causal("hybrid", "OlmoHybrid", name="Olmo-Hybrid", **_LINEAR),
    _causal("hybrid", "Lfm2", name="LFM2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    _causal(
        "hybrid",
        "Lfm2",
        name="LFM2, conv_bias",
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
        stock="wrong",
        note=_BIAS,
    ),
    _causal(
        "hybrid",
        "MiniMax",
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=4,
        head_dim=4,
    ),
    _causal(
        "hybrid",
        "KimiLinear",
        name="Kimi-Linear",
        num_key_value_heads=4,
        **_EXPERTS,
        num_local_experts=4,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        linear_head_dim=8,
        linear_num_heads=2,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
    ),
]


def _encoder(prefix: str, name: str = "", **rest: Any) -> Architecture:
    return _causal("encoder", prefix, _ENCODER, name=name, kind="masked-lm", model=f"{prefix}ForMaskedLM", **rest)


def _classifier(prefix: str, base: Mapping[str, Any], name: str, **rest: Any) -> Architecture:
    model, options = f"{prefix}ForSequenceClassification", {**base, "num_labels": CLASSES}
    return _causal("classification", prefix, options, name=name, kind="classification", model=model, **rest)


_ENCODERS = [
    _encoder("Bert", stock="wrong", note="positions by column"),
    _encoder("Roberta"),
    _encoder("ModernBert", local_attention=4, layer_types=["full_attention", "sliding_attention"], cls_token_id=1),
    _encoder(
        "DebertaV2",
        name="DeBERTa-v2",
        stock="wrong",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        share_att_key=True,
        note="positions by column",
    ),
    _encoder("XLMRoberta", name="XLM-Roberta"),
    _encoder("Albert", stock="wrong", embedding_size=8, note="positions by column"),
    _encoder("Electra", stock="wrong", embedding_size=16, note="positions by column"),
    _encoder(
        "DistilBert",
        name="DistilBERT",
        stock="wrong",
        dim=16,
        n_layers=2,
        n_heads=4,
        hidden_dim=32,
        note="positions by column",
    ),
]
_CLASSIFIERS = [
    _classifier("Llama", _DENSE, "Llama, classes"),
    _classifier(
        "GPT2",
        _GPT,
        "GPT-2, classes",
        stock="wrong",
        note="positions by column",
    ),
    _classifier("Bert", _ENCODER, "Bert, classes", stock="wrong", note="reads the first column"),
    _classifier("Roberta", _ENCODER, "Roberta, classes", stock="wrong", note="reads the first column"),
]
_T5 = {**_IDS, "decoder_start_token_id": 1, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
_BART = {
    **_IDS,
    "decoder_start_token_id": 1,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}


def _seq2seq(prefix: str, base: Mapping[str, Any], name: str, **rest: Any) -> Architecture:
    rest.setdefault("model", f"{prefix}ForConditionalGeneration")
    return _causal("encoder-decoder", prefix, base, name=name, kind="seq2seq", **rest)


_SEQ2SEQ = [
    _seq2seq("T5", _T5, "T5"),
    _seq2seq("MT5", _T5, "mT5", feed_forward_proj="gated-gelu"),
    _seq2seq("Bart", _BART, "BART", stock="wrong", note="positions by column"),
    _seq2seq("MBart", _BART, "mBART", stock="wrong", note="positions by column"),
    _seq2seq("Pegasus", _BART, "Pegasus", stock="wrong", note="positions by column"),
    _seq2seq("M2M100", _BART, "M2M-100"),
    _seq2seq("Marian", _BART, "Marian", model="MarianMTModel", stock="wrong", note="positions by column"),
    _seq2seq(
        "SwitchTransformers",
        _T5,
        "Switch",
        stock="wrong",
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_decoder_layers=2,
        expert_capacity=4,
        note="padding takes places in an expert's capacity",
    ),
]

TABLE: tuple[Architecture, ...] = (
    *_DENSE_MODELS,
    *_SLIDING,
    *_POSITIONS,
    *_MOE,
    *_RECURRENT,
    *_HYBRIDS,
    *_ENCODERS,
    *_CLASSIFIERS,
    *_SEQ2SEQ,
)
BY_NAME = {architecture.name: architecture for architecture in TABLE}
assert len(BY_NAME) == len(TABLE)
