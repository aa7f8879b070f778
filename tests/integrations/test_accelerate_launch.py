"""Real `accelerate launch` and `padmin launch` in subprocesses: scripts switched on and off from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

LOOP = """
import sys
import torch
from accelerate import Accelerator
from torch import nn
from lightning_padmin import PadMinConfig
from lightning_padmin.integrations.accelerate import PadMin

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(23, 12), nn.GRU(12, 12, batch_first=True), nn.Linear(12, 23)
    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.rnn(self.embedding(input_ids))[0])
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

def collate(rows):
    pad = nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True)
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])

output, explicit = sys.argv[1], sys.argv[2:]
accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(1)
model = Model().double()
start, passes = flat(model), []
model.register_forward_pre_hook(lambda *_: passes.append(1))
lengths = [24, 3, 20, 2, 12, 5, 6, 12, 6, 4] * 5
rows = [torch.randint(1, 23, (length,)) for length in lengths]
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(rows, 5, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
config = {"on": PadMinConfig(token_budget=30, launch_cost=4), "off": PadMinConfig(enabled=False)}
pad = PadMin(accelerator, config[explicit[0]]) if explicit else PadMin(accelerator)
for _ in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            for micro, weight in pad.micro_batches(batch, model):
                accelerator.backward(model(**micro) * weight)
            optimizer.step()
            optimizer.zero_grad()
if accelerator.is_main_process:
    found = {"world": accelerator.num_processes, "start": start, "passes": len(passes)}
    torch.save(found | {"parameters": flat(model)}, output)
accelerator.wait_for_everyone()  # a process that leaves early can abort the other's threads
accelerator.end_training()
"""

TRAINER = """
import os, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True)
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])

class Mine(Trainer):
    pass

torch.manual_seed(1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2, pad_token_id=0))
start, passes = flat(model), []
model.register_forward_pre_hook(lambda *_: passes.append(1))
rows = [torch.randint(1, 40, (length,)) for length in [30, 3, 20, 4, 12, 5, 6, 12] * 4]
arguments = TrainingArguments(sys.argv[1] + ".d", per_device_train_batch_size=4, gradient_accumulation_steps=2,
                              num_train_epochs=2, learning_rate=0.01, optim="sgd", report_to=[], save_strategy="no",
                              use_cpu=True, ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
                              disable_tqdm=True, remove_unused_columns=False)
trainer = Mine(model=model, args=arguments, train_dataset=rows, data_collator=collate)
trainer.train()
if trainer.is_world_process_zero():
    found = {"world": arguments.world_size, "start": start, "passes": len(passes), "name": type(trainer).__name__}
    torch.save(found | {"parameters": flat(model)}, sys.argv[1])
trainer.accelerator.wait_for_everyone()  # a process that leaves early can abort the other's threads
trainer.accelerator.end_training()
"""

GRPO = """
import os, sys
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{k}": k for k in range(3, 40)}
plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                    padding_side="left")

def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])

torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                     num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
                                     bos_token_id=None))
with torch.no_grad():
    model.lm_head.weight[1] *= 8  # completions end at all kinds of lengths
start, shapes = flat(model), []
model.register_forward_pre_hook(
    lambda _, args, kwargs: shapes.append(kwargs["input_ids"].numel()) if torch.is_grad_enabled() else None,
    with_kwargs=True,
)
texts = [" ".join(f"w{3 + (i + j) % 37}" for j in range(2 + i % 13)) for i in range(16)]
prompts = Dataset.from_dict({"prompt": texts})
arguments = GRPOConfig(sys.argv[1] + ".d", per_device_train_batch_size=4, gradient_accumulation_steps=2,
                       num_generations=4, max_completion_length=24, max_steps=3, learning_rate=1e-2, optim="sgd",
                       report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, seed=3, beta=0.0,
                       ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None)
reward = lambda completions, **_: [float(sum(map(ord, text)) % 7) - 3 for text in completions]
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=arguments, train_dataset=prompts,
                      processing_class=tokenizer)
trainer.train()
if trainer.is_world_process_zero():
    found = {"world": arguments.world_size, "start": start, "passes": sum(shapes)}
    torch.save(found | {"parameters": flat(model)}, sys.argv[1])
trainer.accelerator.wait_for_everyone()  # a process that leaves early can abort the other's threads
trainer.accelerator.end_training()
"""

RLOO = GRPO.replace("GRPO", "RLOO")
SCRIPTS = {"loop": LOOP, "trainer": TRAINER, "grpo": GRPO, "rloo": RLOO}
LAUNCHERS = {
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch"],
    "padmin": [sys.executable, "-m", "lightning_padmin.cli", "launch"],
    "accelerate with run": [sys.executable, "-m", "accelerate.commands.launch"],
}
ON = {"enabled": True, "token_budget": 30, "launch_cost": 4}
OFF = {"enabled": False}
Result = dict[str, Any]


def run(
    folder: Path,
    script: str = "loop",
    launcher: str = "accelerate",
    world: int = 1,
    nested: Result | None = None,
    top: Result | None = None,
    variables: dict[str, str] | None = None,
    arguments: Sequence[str] = (),
    fails: bool = False,
) -> Result:
    """What a script saved, the lines that this library printed, and everything printed."""
    file, output, config = folder / f"{script}.py", folder / "found.pt", folder / "accelerate.yaml"
    file.write_text(SCRIPTS[script])
    lines = ["compute_environment: LOCAL_MACHINE", "mixed_precision: 'no'", f"num_processes: {world}"]
    lines += [f"distributed_type: {'MULTI_GPU' if world > 1 else 'NO'!r}", f"use_cpu: {str(world == 1).lower()}"]
    lines += ["num_machines: 1", "main_process_port: 0"]
    lines += [f"dynamo_config: {{padmin: {flow(nested)}}}"] if nested is not None else []
    lines += [f"padmin_config: {flow(top)}"] if top is not None else []
    config.write_text("\n".join(lines) + "\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PADMIN_", "ACCELERATE_"))}
    settings = {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "HF_HOME": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
    }
    front = ["-m", "lightning_padmin.run"] if launcher == "accelerate with run" else []
    done = subprocess.run(
        [*LAUNCHERS[launcher], "--config_file", str(config), *front, str(file), str(output), *arguments],
        env=clean | settings | (variables or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert (done.returncode != 0) is fails, printed[-6000:]
    found: Result = {} if fails else torch.load(output, weights_only=False)
    if not fails:
        assert found["world"] == world
    return found | {"said": [s for s in done.stdout.splitlines() if s.startswith("padmin: ")], "printed": printed}


def flow(options: Result) -> str:
    """One line of YAML."""
    return "{" + ", ".join(f"{name}: {str(value).lower()}" for name, value in options.items()) + "}"


Plain = Callable[[str, int], Result]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """A script that nothing switches on."""
    done: dict[tuple[str, int], Result] = {}

    def get(script: str, world: int) -> Result:
        if (script, world) not in done:
            done[script, world] = run(tmp_path_factory.mktemp(f"{script}{world}"), script, world=world)
        return done[script, world]

    return get


def moved(found: Result, reference: Result) -> float:
    """Difference of parameters, by how far these went."""
    assert torch.equal(found["start"], reference["start"])
    displacement = (reference["parameters"] - reference["start"]).abs().max()
    assert displacement > 1e-4
    return float((found["parameters"] - reference["parameters"]).abs().max() / displacement)


def assert_on(found: Result, reference: Result, bound: float = 1e-12) -> None:
    assert moved(found, reference) <= bound
    assert found["passes"] > reference["passes"]


def assert_off(found: Result, reference: Result) -> None:
    assert torch.equal(found["parameters"], reference["parameters"])
    assert found["passes"] == reference["passes"]


WORLDS = [1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_loop_is_off_unless_something_switches_it_on(plain: Plain, world: int) -> None:
    found = plain("loop", world)
    (line,) = found["said"]
    assert line.startswith("padmin: off (no explicit argument, no PADMIN_* variable; no padmin section in ")
    assert found["passes"] == {1: 20, 2: 10}[world]


@pytest.mark.parametrize("world", WORLDS)
def test_the_file_of_an_unmodified_accelerate_launch(plain: Plain, tmp_path: Path, world: int) -> None:
    on = run(tmp_path, world=world, nested=ON)
    assert_on(on, plain("loop", world))
    assert on["said"] == [f"padmin: on, token_budget=30 (dynamo_config.padmin in {tmp_path}/accelerate.yaml)"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_false_in_the_file(plain: Plain, tmp_path: Path, world: int) -> None:
    off = run(tmp_path, world=world, nested=OFF)
    assert_off(off, plain("loop", world))
    assert off["said"] == [f"padmin: off (dynamo_config.padmin in {tmp_path}/accelerate.yaml)"]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_variables_go_over_the_file(plain: Plain, tmp_path: Path, world: int) -> None:
    variables = {"PADMIN_ENABLED": "true", "PADMIN_TOKEN_BUDGET": "30", "PADMIN_LAUNCH_COST": "4"}
    on = run(tmp_path, world=world, nested=OFF, variables=variables)
    assert_on(on, plain("loop", world))
    names = "PADMIN_ENABLED, PADMIN_LAUNCH_COST, PADMIN_TOKEN_BUDGET"
    assert on["said"] == [f"padmin: on, token_budget=30 (environment variable {names})"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_false_in_a_variable_wins(plain: Plain, tmp_path: Path, world: int) -> None:
    off = run(tmp_path, world=world, nested=ON, variables={"PADMIN_ENABLED": "false"})
    assert_off(off, plain("loop", world))
    assert off["said"][0].startswith("padmin: off (environment variable PADMIN_ENABLED")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("word", ["on", "off"])
def test_an_explicit_argument_goes_over_both(plain: Plain, tmp_path: Path, world: int, word: str) -> None:
    against = {"on": "false", "off": "true"}[word]
    nested = {"on": OFF, "off": ON}[word]
    found = run(tmp_path, world=world, nested=nested, variables={"PADMIN_ENABLED": against}, arguments=[word])
    (assert_on if word == "on" else assert_off)(found, plain("loop", world))
    assert [line.split("(")[1] for line in found["said"]] == ["explicit argument)"]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_padmin_launch_takes_a_section_of_its_own(plain: Plain, tmp_path: Path, world: int) -> None:
    on = run(tmp_path, world=world, launcher="padmin", top=ON)
    assert_on(on, plain("loop", world))
    assert on["said"] == [f"padmin: on, token_budget=30 (padmin_config in {tmp_path}/accelerate.yaml)"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_padmin_launch_off(plain: Plain, tmp_path: Path, world: int) -> None:
    off = run(tmp_path, world=world, launcher="padmin", top=OFF)
    assert_off(off, plain("loop", world))
    assert off["said"] == [f"padmin: off (padmin_config in {tmp_path}/accelerate.yaml)"]


@pytest.mark.slow
def test_a_variable_of_the_shell_goes_over_padmin_launch(plain: Plain, tmp_path: Path) -> None:
    off = run(tmp_path, launcher="padmin", top=ON, variables={"PADMIN_ENABLED": "false"})
    assert_off(off, plain("loop", 1))
    assert off["said"][0].startswith("padmin: off (environment variable PADMIN_ENABLED, then padmin_config in ")


@pytest.mark.slow
def test_padmin_launch_without_a_section_is_accelerate_launch(plain: Plain, tmp_path: Path) -> None:
    assert_off(run(tmp_path, launcher="padmin"), plain("loop", 1))


@pytest.mark.parametrize("launcher", [pytest.param("accelerate", marks=pytest.mark.slow), "padmin"])
def test_a_typo_in_the_file_fails_at_the_start_and_is_named(tmp_path: Path, launcher: str) -> None:
    where = "nested" if launcher == "accelerate" else "top"
    found = run(tmp_path, launcher=launcher, fails=True, **{where: {"token_buget": 30}})  # type: ignore[arg-type]
    assert f"{tmp_path}/accelerate.yaml: PadMinConfig has no option 'token_buget'" in found["printed"]
    assert "token_budget" in found["printed"]
    assert not (tmp_path / "found.pt").exists()


def test_accelerate_itself_refuses_a_section_at_the_top(tmp_path: Path) -> None:
    found = run(tmp_path, top=ON, fails=True)
    assert "unknown keys (['padmin_config'])" in found["printed"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_an_unedited_trainer_script(plain: Plain, tmp_path: Path, world: int) -> None:
    on = run(tmp_path, "trainer", world=world, launcher="padmin", top=ON)
    assert_on(on, plain("trainer", world), bound=1e-5)
    assert on["name"] == "Mine"
    assert on["said"] == [f"padmin: on, token_budget=30 (padmin_config in {tmp_path}/accelerate.yaml)"]


@pytest.mark.slow
def test_an_unedited_trainer_script_with_an_unmodified_accelerate_launch(plain: Plain, tmp_path: Path) -> None:
    on = run(tmp_path, "trainer", launcher="accelerate with run", nested=ON)
    assert_on(on, plain("trainer", 1), bound=1e-5)
    assert on["said"] == [f"padmin: on, token_budget=30 (dynamo_config.padmin in {tmp_path}/accelerate.yaml)"]


@pytest.mark.slow
def test_an_unedited_trainer_script_off(plain: Plain, tmp_path: Path) -> None:
    assert_off(run(tmp_path, "trainer", launcher="padmin", top=OFF), plain("trainer", 1))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("script", ["grpo", "rloo"])
def test_an_unedited_script_of_trl(plain: Plain, tmp_path: Path, script: str, world: int) -> None:
    pytest.importorskip("trl")
    on = run(tmp_path, script, world=world, launcher="padmin", top=ON | {"token_budget": 64})
    reference = plain(script, world)
    assert moved(on, reference) <= 1e-5
    assert on["passes"] < reference["passes"]  # slots, here


EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, tmp_path: Path) -> tuple[list[str], Result]:
    """Its lines about steps, and the parameters."""
    command = [*LAUNCHERS["accelerate"], "--config_file", str(EXAMPLES / "accelerate" / f"{name}.yaml")]
    command += [str(EXAMPLES / "accelerate_loop.py"), "--batches", "4", "--save", str(tmp_path / name)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    return lines, torch.load(tmp_path / name)


@pytest.mark.slow
def test_the_example_is_the_same_on_and_off(tmp_path: Path) -> None:
    (on, found), (off, reference) = example("padmin_on", tmp_path), example("padmin_off", tmp_path)
    assert [line.split(" padmin/")[0] for line in on] == [line.strip() for line in off]
    assert len(on) == 2
    assert all("padmin/waste 0.0" in line for line in on)
    for name, value in reference.items():
        assert torch.allclose(found[name], value, atol=1e-5)
