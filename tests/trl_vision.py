"""Tiny models that see, their processors built from nothing, and prompts with images for TRL's trainers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import transformers
import trl_cases as cases
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_utils import make_flat_list_of_images
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
BEGIN, END, IMAGE, VIDEO = range(cases.VOCABULARY, cases.VOCABULARY + len(SPECIAL))
VOCABULARY = cases.VOCABULARY + len(SPECIAL)
EDGES = {"pad_token_id": cases.PAD, "eos_token_id": cases.EOS, "bos_token_id": None}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": cases.PAD, "<eos>": cases.EOS, "<unk>": 2} | {f"w{k}": k for k in range(3, cases.VOCABULARY)}
    words |= {word: cases.VOCABULARY + k for k, word in enumerate(SPECIAL)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        additional_special_tokens=list(SPECIAL),
    )


class TakesNone:
    """TRL says None where a row has no images, and processors of transformers 5.24 fail on it."""

    def prepare_inputs_layout(self, images: Any = None, **given: Any) -> Any:
        images = None if images is None else [each or [] for each in images]
        return super().prepare_inputs_layout(images=images, **given)


class NextProcessor(TakesNone, transformers.LlavaNextProcessor):
    pass


class Processor(TakesNone, ProcessorMixin):
    """Text and images, as the processors of transformers take them."""

    return_mm_token_type_ids = True
    image_token, image_token_id = SPECIAL[2], IMAGE

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


class PatchProcessor(Processor):
    """As Qwen2-VL has them: images of any size, in patches."""

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        merged = self.image_processor.merge_size**2
        return self.image_token * (int(image_inputs["image_grid_thw"][image_idx].prod()) // merged)


def patch_processor() -> Processor:
    size = {"shortest_edge": 64, "longest_edge": 1024}
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    return PatchProcessor(images, tokenizer(), TEMPLATE)


def sizes() -> dict[str, Any]:
    """Of the text model."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    } | EDGES


def siglip(image_size: int) -> dict[str, Any]:
    """Of a vision tower."""
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    return {"hidden_size": 16, "intermediate_size": 24, "image_size": image_size, "patch_size": 4} | layers


def qwen2_vl() -> nn.Module:
    torch.manual_seed(0)
    text = sizes() | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]},
    }
    vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2}
    tokens = {"vision_start_token_id": BEGIN, "vision_end_token_id": END, "image_token_id": IMAGE}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, **tokens, video_token_id=VIDEO, tie_word_embeddings=False
    )
    return cases.scaled(transformers.Qwen2VLForConditionalGeneration(config), 2.0)


class SquareProcessor(Processor):
    """As Gemma 3 has them: images of one size, told by the name that Gemma models know."""

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        return self.image_token * 4

    def __call__(self, *args: Any, **options: Any) -> Any:
        outputs = super().__call__(*args, **options)
        outputs["token_type_ids"] = outputs.pop("mm_token_type_ids")
        return outputs

    @property
    def unused_input_names(self) -> list[str]:
        return ["num_crops"]


def square_processor() -> Processor:
    return SquareProcessor(Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), tokenizer(), TEMPLATE)


def gemma3() -> nn.Module:
    torch.manual_seed(0)
    text = sizes() | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3Config(
        text_config=text, vision_config=siglip(16), mm_tokens_per_image=4, image_token_id=IMAGE, **EDGES
    )
    model = cases.scaled(transformers.Gemma3ForConditionalGeneration(config), 2.0)
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)  # new, it is 0
    return model


def next_processor() -> Processor:
    """As LLaVA-NeXT has them: a small copy of the image and tiles of it."""
    size = {"shortest_edge": 16}
    images = LlavaNextImageProcessorPil(
        size=size, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]]
    )
    return NextProcessor(images, tokenizer(), 8, "full", TEMPLATE, image_token=SPECIAL[2])


def llava_next() -> nn.Module:
    torch.manual_seed(0)
    text = transformers.Qwen2Config(**sizes())
    config = transformers.LlavaNextConfig(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**(siglip(16) | {"patch_size": 8})),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return cases.scaled(transformers.LlavaNextForConditionalGeneration(config), 2.0)


class PaddedProcessor(Processor):
    """As Idefics 3 and SmolVLM have them: tiles of a row's images, rows padded to one number of tiles."""

    return_mm_token_type_ids = False

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **options, return_row_col_info=True)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        rows, columns = (list(chain(*image_inputs[name]))[image_idx] for name in ("rows", "cols"))
        return self.image_token * 4 * (rows * columns + 1)

    @property
    def unused_input_names(self) -> list[str]:
        return ["rows", "cols"]


def padded_processor() -> Processor:
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return PaddedProcessor(images, tokenizer(), TEMPLATE)


def idefics3() -> nn.Module:
    torch.manual_seed(0)
    text = transformers.Qwen2Config(**sizes())
    config = transformers.Idefics3Config(
        text_config=text,
        vision_config=siglip(16),
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=cases.PAD,
    )
    return cases.scaled(transformers.Idefics3ForConditionalGeneration(config), 2.0)


class Tiles(Qwen2VLImageProcessorPil):
    """One tile for each 8 columns of an image, and a small copy where there are several."""

    use_thumbnail = True

    def __call__(self, images: Any, **_: Any) -> dict[str, Any]:
        flat = make_flat_list_of_images([each or [] for each in images])
        columns = torch.tensor([image.width // 8 for image in flat])
        tiles = columns + (columns > 1)
        every = [self.tile(image, k) for image, count in zip(flat, tiles.tolist(), strict=True) for k in range(count)]
        outputs = {name: torch.stack([tile[name] for tile in every]) for name in every[0]}
        counts = {"image_rows": torch.ones_like(columns), "image_cols": columns, "num_patches": tiles}
        return outputs | counts

    def tile(self, image: Image.Image, number: int) -> dict[str, torch.Tensor]:
        source = torch.Generator().manual_seed(int(np.asarray(image).sum()) + number)
        return {"pixel_values": torch.randn(3, 16, 16, generator=source)}


class NaflexTiles(Tiles):
    """Tiles of some patches each, padded to one number of them."""

    def tile(self, image: Image.Image, number: int) -> dict[str, torch.Tensor]:
        source = torch.Generator().manual_seed(int(np.asarray(image).sum()) + number)
        height, width = 2, 2 + 2 * (number % 2)
        patches = torch.randn(8, 48, generator=source)
        mask = torch.arange(8) < height * width
        shape = torch.tensor([height, width])
        return {"pixel_values": patches * mask[:, None], "pixel_attention_mask": mask.long(), "spatial_shapes": shape}


class TileProcessor(Processor):
    """As InternVL and LFM2-VL have them: an image is some tiles, a tile some tokens."""

    return_mm_token_type_ids = False

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        counts = image_inputs["num_patches"].tolist()
        begin = sum(counts[:image_idx])
        shapes = image_inputs.get("spatial_shapes")
        tokens = 4 * counts[image_idx]
        if shapes is not None:
            tokens = int((shapes[begin : begin + counts[image_idx]] // 2).prod(-1).sum())
        return self.image_token * tokens

    @property
    def unused_input_names(self) -> list[str]:
        return ["image_rows", "image_cols", "num_patches"]


def tile_processor() -> Processor:
    return TileProcessor(Tiles(), tokenizer(), TEMPLATE)


def naflex_processor() -> Processor:
    return TileProcessor(NaflexTiles(), tokenizer(), TEMPLATE)


def internvl() -> nn.Module:
    torch.manual_seed(0)
    vision = {name: value for name, value in siglip(16).items() if name not in ("image_size", "patch_size")}
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**sizes()),
        vision_config=vision | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMAGE,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    return cases.scaled(transformers.InternVLForConditionalGeneration(config), 2.0)


def lfm2_vl() -> nn.Module:
    torch.manual_seed(0)
    text = transformers.Lfm2Config(
        **sizes(), layer_types=["conv", "full_attention"], conv_bias=False, block_auto_adjust_ff_dim=False
    )
    vision = {name: value for name, value in siglip(16).items() if name != "image_size"} | {"num_patches": 16}
    config = transformers.Lfm2VlConfig(
        text_config=text,
        vision_config=transformers.Siglip2VisionConfig(**vision),
        image_token_id=IMAGE,
        downsample_factor=2,
        projector_hidden_size=32,
        tie_word_embeddings=False,
    )
    return cases.scaled(transformers.Lfm2VlForConditionalGeneration(config), 2.0)


class PositionProcessor(Processor):
    """As Gemma 4 has them: patches of images, padded to one number of them, with their places."""

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        return self.image_token * int(image_inputs["num_soft_tokens_per_image"][image_idx])

    @property
    def unused_input_names(self) -> list[str]:
        return ["num_soft_tokens_per_image"]


def position_processor() -> Processor:
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3, do_resize=False)
    return PositionProcessor(images, tokenizer(), TEMPLATE)


def gemma4() -> nn.Module:
    torch.manual_seed(0)
    text = sizes() | {
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    text |= {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 3}
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE, video_token_id=VIDEO, **EDGES
    )
    return cases.scaled(transformers.Gemma4ForConditionalGeneration(config), 1.5)


@dataclass(frozen=True)
class Family:
    """A way in which images are handed on.

    Attributes:
        model: makes one.
        processor: makes one.
        sides: heights and widths that images may have.
    """

    model: Callable[[], nn.Module]
    processor: Callable[[], ProcessorMixin]
    sides: tuple[int, ...] = (8, 16, 24)


FAMILIES = {
    "qwen2_vl": Family(qwen2_vl, patch_processor),
    "gemma3": Family(gemma3, square_processor),
    "llava_next": Family(llava_next, next_processor),
    "idefics3": Family(idefics3, padded_processor),
    "internvl": Family(internvl, tile_processor),
    "lfm2_vl": Family(lfm2_vl, naflex_processor),
    "gemma4": Family(gemma4, position_processor, (12, 24)),
}


def picture(source: random.Random, sides: Sequence[int] = (8, 16, 24)) -> Image.Image:
    pixels = np.random.default_rng(source.randrange(2**31))
    return Image.fromarray(pixels.integers(0, 256, (source.choice(sides), source.choice(sides), 3), dtype=np.uint8))


def prompts(counts: Sequence[int] = (1,), count: int = 32, sides: Sequence[int] = (8, 16, 24)) -> Dataset:
    """Prompts of 2 to 14 words, with these numbers of images in turn."""
    source = random.Random(0)
    rows = []
    for index in range(count):
        words = " ".join(f"w{source.randrange(3, cases.VOCABULARY)}" for _ in range(source.randrange(2, 15)))
        images = [picture(source, sides) for _ in range(counts[index % len(counts)])]
        rows.append({"prompt": [{"role": "user", "content": words}], "images": images})
    return Dataset.from_list(rows)


def reward(completions: Sequence[Any], **_: Any) -> list[float]:
    return cases.reward([completion[0]["content"] for completion in completions])


def given(family: str = "qwen2_vl", counts: Sequence[int] = (1,), **options: Any) -> dict[str, Any]:
    """What a trainer gets besides its model and arguments."""
    kind = FAMILIES[family]
    return {
        "reward_funcs": reward,
        "train_dataset": prompts(counts, **({"sides": kind.sides} | options)),
        "processing_class": kind.processor(),
    }
