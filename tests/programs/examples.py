"""Arguments, tiny models and ragged data for the example programs of transformers, by the name of the program."""

from __future__ import annotations

import itertools
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from programs import sentences

Words = Callable[[], str]
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_TRAINING = {
    "do_train": True,
    "do_eval": True,
    "use_cpu": True,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "optim": "sgd",  # AdamW makes steps of what is zero but for rounding
    "learning_rate": 0.5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 3,
}
REWARDS = "src/train.py"  # of LLaMA-Factory
EXAMPLES: dict[str, Callable[[Path], dict[str, Any]]] = {}


def example(path: str) -> Callable[..., Any]:
    def add(make: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
        EXAMPLES[path + (":" + make.__name__ if path in EXAMPLES else "")] = make
        return make

    return add


def command(name: str, folder: Path) -> list[str]:
    """What stands behind the program's path."""
    words = []
    make = rewards if name == REWARDS else EXAMPLES[name]
    for key, value in (_TRAINING | {"output_dir": str(folder / "out")} | make(folder)).items():
        words += [f"--{key}", str(value)]
    return words


def encoder(folder: Path, kind: str = "BertModel", **options: Any) -> str:
    """Saved in a folder, with a tokenizer, without dropout."""
    architecture = getattr(transformers, kind)
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    known = {"vocab_size": sentences.VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.2, **_SIZES}
    config = architecture.config_class(**(known | dropouts | options))
    return saved(folder, architecture, config)


def saved(folder: Path, architecture: Any, config: Any) -> str:
    torch.manual_seed(0)
    architecture(config).save_pretrained(folder / "model")
    words = sentences.tokenizer()
    words.mask_token = f"w{sentences.VOCABULARY - 1}"
    words.save_pretrained(folder / "model")
    return str(folder / "model")


def decoder(folder: Path, kind: str = "LlamaForCausalLM", **options: Any) -> str:
    architecture = getattr(transformers, kind)
    config = architecture.config_class(vocab_size=sentences.VOCABULARY, **(_SIZES | options))
    return saved(folder, architecture, config)


def xlnet(folder: Path) -> str:
    """With its own tokenizer, which puts padding to the left and the first token behind all others."""
    sizes = {"d_model": 16, "d_inner": 24, "n_layer": 2, "n_head": 2, "start_n_top": 2, "end_n_top": 2}
    architecture = transformers.XLNetForQuestionAnswering
    config = architecture.config_class(
        vocab_size=sentences.VOCABULARY, dropout=0.0, summary_last_dropout=0.0, initializer_range=0.2, **sizes
    )
    path = saved(folder, architecture, config)
    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    pieces = special + [f"\u2581w{k}" for k in range(4, 4 + sentences.VOCABULARY - len(special))]
    words = transformers.XLNetTokenizerFast(vocab=[(piece, -1.0) for piece in pieces])
    words.save_pretrained(path)
    return path


def t5(folder: Path) -> str:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    words = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0}
    architecture = transformers.T5ForConditionalGeneration
    config = architecture.config_class(vocab_size=sentences.VOCABULARY, dropout_rate=0.0, **sizes, **words)
    return saved(folder, architecture, config)


def bart(folder: Path) -> str:
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, **dict.fromkeys(names, 2)}
    words = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    architecture = transformers.BartForConditionalGeneration
    config = architecture.config_class(
        vocab_size=sentences.VOCABULARY, max_position_embeddings=64, dropout=0.0, init_std=0.2, **sizes, **words
    )
    return saved(folder, architecture, config)


def written(folder: Path, rows: Callable[[sentences.Sentences], Any], under: str | None = None) -> dict[str, str]:
    """Files for training and validation, and their arguments."""
    files = {}
    for seed, (name, count) in enumerate({"train": 48, "validation": 16}.items()):
        draw = sentences.Sentences(seed)
        made = [rows(draw) for _ in range(count)]
        file = folder / f"{name}.json"
        file.write_text(json.dumps({under: made}) if under else "\n".join(map(json.dumps, made)))
        files[f"{name}_file"] = str(file)
    return files


@example("text-classification/run_glue.py")
def pairs(folder: Path) -> dict[str, Any]:
    rows = written(folder, lambda draw: {"sentence1": draw(), "sentence2": draw(), "label": draw.kind()})
    return {"model_name_or_path": encoder(folder), "max_seq_length": 64, **rows}


@example("text-classification/run_classification.py")
def kinds(folder: Path) -> dict[str, Any]:
    rows = written(folder, lambda draw: {"text": draw(), "label": f"kind {draw.kind()}"})
    columns = {"text_column_names": "text", "label_column_name": "label", "shuffle_train_dataset": True}
    return {"model_name_or_path": encoder(folder), "max_seq_length": 64, **columns, **rows}


_NUMBERS = itertools.count()


def _asked(draw: sentences.Sentences) -> Any:
    words = draw().split()
    place = (len(words) - 1) // 2  # never the last
    answers = {"text": [words[place]], "answer_start": [len(" ".join([*words[:place], ""]))]}
    return {"id": f"{next(_NUMBERS)}", "question": draw(), "context": " ".join(words), "answers": answers}


@example("question-answering/run_qa.py")
def spans(folder: Path) -> dict[str, Any]:
    sizes = {"max_seq_length": 56, "doc_stride": 8, "pad_to_max_length": False}
    return {"model_name_or_path": encoder(folder), **sizes, **written(folder, _asked, under="data")}


@example("question-answering/run_qa_beam_search.py")
def spans_of_beams(folder: Path) -> dict[str, Any]:
    sizes = {"max_seq_length": 56, "doc_stride": 8, "n_best_size": 4}
    return {"model_name_or_path": xlnet(folder), **sizes, **written(folder, _asked, under="data")}


@example("question-answering/run_seq2seq_qa.py")
def written_answers(folder: Path) -> dict[str, Any]:
    columns = {"question_column": "question", "context_column": "context", "answer_column": "answers"}
    files = written(folder, _asked, under="data")
    sizes = {"max_seq_length": 56, "max_answer_length": 8, "predict_with_generate": True, "num_beams": 1}
    return {"model_name_or_path": t5(folder), **columns, **sizes, **files}


@example("multiple-choice/run_swag.py")
def choices(folder: Path) -> dict[str, Any]:
    def row(draw: sentences.Sentences) -> Any:
        endings = {f"ending{k}": draw() for k in range(4)}
        return {"sent1": draw(), "sent2": draw(), **endings, "label": draw.kind(4)}

    return {"model_name_or_path": encoder(folder), "max_seq_length": 64, **written(folder, row)}


@example("token-classification/run_ner.py")
def entities(folder: Path) -> dict[str, Any]:
    def row(draw: sentences.Sentences) -> Any:
        words = draw().split()
        return {"tokens": words, "ner_tags": [("O", "B-PER", "B-LOC")[draw.kind()] for _ in words]}

    return {"model_name_or_path": encoder(folder), "max_seq_length": 64, **written(folder, row)}


@example("language-modeling/run_mlm.py")
def masked(folder: Path) -> dict[str, Any]:
    rows = written(folder, lambda draw: {"text": draw()})
    return {"model_name_or_path": encoder(folder), "max_seq_length": 64, "line_by_line": True, **rows}


@example("language-modeling/run_clm.py")
def causal(folder: Path) -> dict[str, Any]:
    return {"model_name_or_path": decoder(folder), "block_size": 32, **written(folder, lambda draw: {"text": draw()})}


@example("language-modeling/run_plm.py")
def permuted(folder: Path) -> dict[str, Any]:
    rows = written(folder, lambda draw: {"text": draw()})
    return {"model_name_or_path": xlnet(folder), "max_seq_length": 64, "line_by_line": True, **rows}


@example("language-modeling/run_fim.py")
def filled(folder: Path) -> dict[str, Any]:
    return {"model_name_or_path": decoder(folder), "block_size": 32, **written(folder, lambda draw: {"text": draw()})}


@example("summarization/run_summarization.py")
def summaries(folder: Path) -> dict[str, Any]:
    rows = written(folder, lambda draw: {"text": draw(), "summary": draw()})
    sizes = {"max_source_length": 64, "max_target_length": 40, "predict_with_generate": True, "num_beams": 1}
    return {"model_name_or_path": t5(folder), "source_prefix": "w4 ", **sizes, **rows}


@example("translation/run_translation.py")
def translations(folder: Path) -> dict[str, Any]:
    rows = written(folder, lambda draw: {"translation": {"en": draw(), "de": draw()}})
    sizes = {"max_source_length": 64, "max_target_length": 40, "predict_with_generate": True, "num_beams": 1}
    return {"model_name_or_path": bart(folder), "source_lang": "en", "target_lang": "de", **sizes, **rows}


def recorded(folder: Path, column: str, row: Callable[[sentences.Sentences], Any]) -> dict[str, Any]:
    """A folder as a data set, whose sounds are of different lengths."""
    data = folder / "sounds"
    data.mkdir()
    dice = torch.Generator().manual_seed(5)

    def sound(draw: sentences.Sentences) -> Any:
        path = data / f"{next(_NUMBERS)}.wav"
        length = 400 + 40 * len(draw().split())
        samples = (3000 * torch.randn(length, generator=dice)).to(torch.int16)
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 1000, length, "NONE", ""))
            file.writeframes(samples.numpy().tobytes())
        return {"audio": str(path), column: row(draw)}

    written(data, sound)
    (data / "README.md").write_text(_HEAD.format(name=column, kind=_KINDS if column == "label" else "string"))
    return {"dataset_name": str(data), "train_split_name": "train", "eval_split_name": "validation"}


_HEAD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: train.json
  - split: validation
    path: validation.json
dataset_info:
  features:
  - name: audio
    dtype:
      audio:
        sampling_rate: 1000
  - name: {name}
    dtype: {kind}
---
"""
_KINDS = "{class_label: {names: {'0': low, '1': middle, '2': high}}}"


def listener(folder: Path, kind: str, **options: Any) -> str:
    """A wav2vec 2.0, given masks where its norm is a layer's. By name: a program takes a folder for a checkpoint."""
    architecture = getattr(transformers, kind)
    dropouts = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    known = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    known |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
    known |= {**_SIZES, **dict.fromkeys(dropouts, 0.0), "layerdrop": 0.0, "mask_time_prob": 0.0, "vocab_size": 20}
    torch.manual_seed(0)
    path = folder / "hub" / "models--tiny--listener"
    architecture(architecture.config_class(**(known | options))).save_pretrained(path / "snapshots" / "0")
    masks = options.get("feat_extract_norm") == "layer"
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=1000, return_attention_mask=masks)
    extractor.save_pretrained(path / "snapshots" / "0")
    (path / "refs").mkdir()
    (path / "refs" / "main").write_text("0")
    return "tiny/listener"


@example("audio-classification/run_audio_classification.py")
def sounds(folder: Path) -> dict[str, Any]:
    data = recorded(folder, "label", lambda draw: draw.kind())
    columns = {"audio_column_name": "audio", "label_column_name": "label", "remove_unused_columns": False}
    path = listener(folder, "Wav2Vec2Model", feat_extract_norm="layer")
    return {"model_name_or_path": path, "max_length_seconds": 10, "attention_mask": True, **columns, **data}


@example("speech-recognition/run_speech_recognition_ctc.py")
def dictation(folder: Path) -> dict[str, Any]:
    data = recorded(folder, "text", lambda draw: draw()[:6])
    path = listener(folder, "Wav2Vec2Model", feat_extract_norm="layer")
    return {"model_name_or_path": path, "text_column_name": "text", "layerdrop": 0.0, "mask_time_prob": 0.0, **data}


@example("speech-recognition/run_speech_recognition_seq2seq.py")
def whispered(folder: Path) -> dict[str, Any]:
    data = recorded(folder, "text", lambda draw: draw())
    columns = {
        "text_column_name": "text",
        "predict_with_generate": True,
        "generation_max_length": 8,
        "freeze_feature_encoder": False,
    }
    return {"model_name_or_path": whisper(folder), **columns, **data}


def whisper(folder: Path) -> str:
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, **dict.fromkeys(names, 2)}
    words = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    lengths = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64}
    architecture = transformers.WhisperForConditionalGeneration
    config = architecture.config_class(vocab_size=sentences.VOCABULARY, **sizes, **words, **lengths)
    path = saved(folder, architecture, config)
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=1000, hop_length=50, chunk_length=2, n_fft=100
    )
    transformers.WhisperProcessor(extractor, sentences.tokenizer()).save_pretrained(path)
    return path


def painted(folder: Path) -> dict[str, Any]:
    """Folders of images, by kind."""
    from PIL import Image

    for split, count in (("train", 48), ("validation", 16)):
        for k in range(count):
            into = folder / "images" / split / f"kind{k % 3}"
            into.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (k * 5, 255 - k, 80 * (k % 3))).save(into / f"{k}.png")
    return {"dataset_name": str(folder / "images"), "remove_unused_columns": False}


def viewer(folder: Path, kind: str, **options: Any) -> str:
    architecture = getattr(transformers, kind)
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    known = {**_SIZES, **dropouts, "image_size": 16, "patch_size": 4, "initializer_range": 0.2}
    torch.manual_seed(0)
    architecture(architecture.config_class(**(known | options))).save_pretrained(folder / "model")
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    processor.save_pretrained(folder / "model")
    return str(folder / "model")


@example("image-classification/run_image_classification.py")
def images(folder: Path) -> dict[str, Any]:
    path = viewer(folder, "ViTModel")
    return {"model_name_or_path": path, **painted(folder)}


@example("image-pretraining/run_mim.py")
def images_in_part(folder: Path) -> dict[str, Any]:
    path = viewer(folder, "ViTForMaskedImageModeling", encoder_stride=4)
    sizes = {"image_size": 16, "patch_size": 4, "encoder_stride": 4, "mask_patch_size": 4}
    return {"model_name_or_path": path, **sizes, **painted(folder)}


@example("image-pretraining/run_mae.py")
def images_from_patches(folder: Path) -> dict[str, Any]:
    sizes = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    path = viewer(folder, "ViTMAEForPreTraining", decoder_intermediate_size=24, **sizes)
    return {"model_name_or_path": path, "base_learning_rate": 1.0, **painted(folder)}


@example("contrastive-image-text/run_clip.py")
def captions(folder: Path) -> dict[str, Any]:
    painted(folder)
    files = sorted(map(str, (folder / "images" / "train").rglob("*.png")))
    rows = written(folder, lambda draw: {"image": files[draw.kind(48)], "caption": draw()})
    vision, text = ({**_SIZES, "initializer_range": 0.2, "attention_dropout": 0.0} for _ in range(2))
    vision |= {"image_size": 16, "patch_size": 4, "projection_dim": 16}
    ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    text |= {"vocab_size": sentences.VOCABULARY, "max_position_embeddings": 64, "projection_dim": 16, **ends}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    path = saved(folder, transformers.CLIPModel, config)
    transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16).save_pretrained(path)
    columns = {"image_column": "image", "caption_column": "caption", "remove_unused_columns": False}
    return {"model_name_or_path": path, "max_seq_length": 48, **columns, **rows}


def rewards(folder: Path) -> dict[str, Any]:
    """The reward stage of LLaMA-Factory: chosen rows of a batch come before the rejected ones."""
    draw = sentences.Sentences()
    made = [{"instruction": draw(), "chosen": draw(), "rejected": draw()} for _ in range(48)]
    (folder / "pairs.json").write_text(json.dumps(made))
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    named = {"pairs": {"file_name": "pairs.json", "ranking": True, "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(named))
    path = decoder(folder, initializer_range=0.2, max_position_embeddings=256)
    words = sentences.tokenizer()
    words.eos_token = "[SEP]"
    words.save_pretrained(path)
    return {
        "model_name_or_path": path,
        "stage": "rm",
        "finetuning_type": "full",
        "dataset": "pairs",
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": 128,
        "do_eval": False,
    }
