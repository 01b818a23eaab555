"""Fine-tuning a Hugging Face model here and by PEFT with TRL's SFTTrainer (or transformers' Trainer): the same rows
in the same order, the same first adapter, the same AdamW. Loss by loss, and seconds per step as a ratio of interleaved
runs.

python benchmarks/hf_finetune.py --base FOLDER --data banking77.jsonl --device cpu --steps 8 --batch 4 --length 64
python benchmarks/hf_finetune.py --base FOLDER --data banking77.jsonl --device cuda --steps 200 --batch 16 --length 128
python benchmarks/hf_finetune.py --shape smollm2-135m --data banking77.jsonl --device cuda ...    # without its files

--shape makes a folder with random weights of that shape and a tokenizer trained on the data: times and differences of
losses need no more. Every round runs each arm from the beginning, in turns; its first steps, in which memory is found
and kernels are chosen, are not timed. On a CPU both compute in fp32, on a GPU in bf16 (weights as the files have them).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import config as configuration
from foretrain import environment
from foretrain.config import Config
from foretrain.data.loader import Loader
from foretrain.models import lora
from foretrain.models.adapter_files import save_adapter
from foretrain.models.loss import IGNORED
from foretrain.recipes import finetune as tuning
from foretrain.trainer import HybridTrainer

NOT_TIMED = 2
"""Steps at the beginning of each run."""
RATE, RANK, ALPHA = 1e-3, 8, 16
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}


def random_base(shape: str, data: Path) -> Path:
    """Return a folder with a Llama of this shape in bf16, its weights random, and a tokenizer of the data."""
    import tokenizers
    import transformers

    folder = Path(tempfile.mkdtemp()) / shape
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES[shape], bos_token_id=0, eos_token_id=0))
    model.to(torch.bfloat16).save_pretrained(folder)
    bytes_of = tokenizers.ByteLevelBPETokenizer()
    bytes_of.train(str(data), vocab_size=SHAPES[shape]["vocab_size"], special_tokens=["<|end|>"], show_progress=False)
    inner = tokenizers.Tokenizer.from_str(bytes_of.to_str())
    end = "<|end|>"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=end, eos_token=end, pad_token=end
    ).save_pretrained(folder)
    return folder


def config_for(options: argparse.Namespace, mode: str) -> Config:
    """Return what both sides have: AdamW with the defaults of transformers, no decay, a constant rate."""
    return configuration.from_mapping(
        {
            "preset": "finetune",
            "device": options.device,
            "model.weights": str(options.base),
            "data.path": str(options.data),
            "data.max_length": options.length,
            "data.prefetch": 0,
            "batch_size": options.batch,
            "max_steps": options.steps,
            "hybrid.mode": mode,
            "hybrid.probe_examples": 16,
            "optimizer.type": "adamw",
            "optimizer.learning_rate": RATE,
            "optimizer.weight_decay": 0.0,
            "optimizer.beta2": 0.999,
            "optimizer.gradient_clip_norm": 1.0,
            "schedule.type": "constant",
            "lora.rank": RANK,
            "lora.alpha": ALPHA,
            "engine.compile": options.compile,
            "seed": 0,
        }
    )


class Rows:
    """The same batches for everybody. A row that is full is left out: transformers would need one more token for it."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = config_for(options, "off")
        base = tuning.base_of(config)
        config = tuning.with_templates(config, chat=base.chat)
        data = tuning.prepare(config, base)
        lora.attach(base.model, tuning.settings_of(config), 0)
        self.first = Path(tempfile.mkdtemp()) / "adapter"
        save_adapter(base.model, self.first, str(base.folder))
        self.length = data.train.length
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tokens, targets in Loader(data.train, options.batch, 0, 0):
            if bool((targets[:, -1] == IGNORED).all()):
                self.batches.append((tokens, targets))
            if len(self.batches) == options.steps:
                break
        probe = tuning.prepare(configuration.changed(config, {"hybrid.mode": "leap"}), base)
        self.probe = tuning.probe_batches(probe, config)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ours(options: argparse.Namespace, rows: Rows, mode: str) -> dict[str, Any]:
    """Train with a HybridTrainer. mode: "off" is the plain engine, "leap" what `foretrain finetune` does."""
    config = config_for(options, mode)
    model = tuning.base_of(config).model
    lora.attach(model, tuning.settings_of(config), 0)
    trainer = HybridTrainer(model, config=config, probe=rows.probe if mode != "off" else [])
    losses: list[torch.Tensor] = []
    started = 0.0
    for number, batch in enumerate(rows.batches):
        if number == NOT_TIMED:
            wait(options.device)
            started = time.perf_counter()
        losses.append(torch.as_tensor(trainer.step(batch).loss).detach().clone())
    wait(options.device)
    return told(started, losses, options)


def theirs(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Train with PEFT and a trainer of Hugging Face."""
    import peft
    import transformers

    dtype = torch.float32 if options.device == "cpu" else "auto"
    inner = transformers.AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype)
    model = peft.PeftModel.from_pretrained(inner, str(rows.first), is_trainable=True)
    losses: list[torch.Tensor] = []
    times: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == NOT_TIMED:
                wait(options.device)
                times.append(time.perf_counter())

    parent, settings = _trainer(options)

    class Watched(parent):  # type: ignore[misc, valid-type]
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            found = super().compute_loss(*given, **named)
            losses.append((found[0] if isinstance(found, tuple) else found).detach().clone())
            return found

        def get_train_dataloader(self) -> Any:
            return list(_batches(rows, options.device))

    arguments = settings(
        output_dir=tempfile.mkdtemp(),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused" if options.device == "cuda" else "adamw_torch",
        bf16=options.device == "cuda",
        use_cpu=options.device == "cpu",
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=0,
    )
    more = {"processing_class": transformers.AutoTokenizer.from_pretrained(options.base)}
    trainer = Watched(model=model, args=arguments, train_dataset=_dataset(rows), callbacks=[Clock()], **more)
    trainer.train()
    wait(options.device)
    return told(times[0], losses, options)


def _trainer(options: argparse.Namespace) -> tuple[Any, Any]:
    if options.trainer == "trl":
        from functools import partial

        from trl import SFTConfig, SFTTrainer

        return SFTTrainer, partial(SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None)
    from transformers import Trainer, TrainingArguments

    return Trainer, TrainingArguments


def _dataset(rows: Rows) -> Any:
    from datasets import Dataset

    tokens = [row.tolist() for batch, _ in rows.batches for row in batch]
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens})


def _batches(rows: Rows, device: str) -> Iterator[dict[str, Any]]:
    """Labels stand one place further to the right than our targets."""
    for tokens, targets in rows.batches:
        labels = torch.nn.functional.pad(targets, (1, 0), value=IGNORED)[:, :-1]
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
        yield {name: value.to(device) for name, value in batch.items()}


def told(started: float, losses: list[torch.Tensor], options: argparse.Namespace) -> dict[str, Any]:
    seconds = (time.perf_counter() - started) / (options.steps - NOT_TIMED)
    return {"seconds_per_step": seconds, "losses": [float(loss) for loss in losses]}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    rows = Rows(options)
    arms: dict[str, Any] = {
        "theirs": lambda: theirs(options, rows),
        "ours, hybrid off": lambda: ours(options, rows, "off"),
        "ours, as finetune does": lambda: ours(options, rows, "leap"),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for turn in range(options.rounds):
        for name in list(arms) if turn % 2 == 0 else list(reversed(arms)):
            runs[name].append(arms[name]())
            print(f"round {turn + 1}: {name}: {runs[name][-1]['seconds_per_step']:.3f} s per step", flush=True)
    wanted = runs["theirs"][0]["losses"]
    found: dict[str, Any] = {"rows": [options.batch, rows.length], "arms": {}}
    for name, several in runs.items():
        seconds = [run["seconds_per_step"] for run in several]
        ratios = [one / run["seconds_per_step"] for one, run in zip(seconds, runs["theirs"], strict=True)]
        apart = max(abs(one - other) for one, other in zip(several[0]["losses"], wanted, strict=True))
        found["arms"][name] = {
            "seconds_per_step": seconds,
            "ratio_to_theirs": ratios,
            "median_ratio": statistics.median(ratios),
            "losses": several[0]["losses"],
            "largest_difference_of_losses": apart,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    base = parser.add_mutually_exclusive_group(required=True)
    base.add_argument("--base", type=Path)
    base.add_argument("--shape", choices=SHAPES, help="random weights instead of a base's own")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--trainer", choices=["trl", "transformers"], default="trl")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.shape:
        options.base = random_base(options.shape, options.data)
    found = compare(options)
    print(f"\n{'arm':26} {'s per step':>10} {'ratio':>7} {'largest difference of losses':>30}")
    for name, arm in found["arms"].items():
        middle = statistics.median(arm["seconds_per_step"])
        apart = arm["largest_difference_of_losses"]
        print(f"{name:26} {middle:10.3f} {arm['median_ratio']:7.3f} {apart:30.2e}")
    if options.out:
        from importlib.metadata import version

        from peft import __version__ as peft_version
        from transformers import __version__ as transformers_version

        versions = {"transformers": transformers_version, "peft": peft_version, "trl": version("trl")}
        settings = {name: value for name, value in vars(options).items() if name not in ("base", "data", "out")}
        facts = {
            "date": f"{datetime.now().astimezone():%Y-%m-%d}",
            "command": " ".join(["benchmarks/hf_finetune.py", *_shown(sys.argv[1:])]),
            "base": options.base.name + (", random weights" if options.shape else ""),
            "data": options.data.name,
            "versions": versions,
            "environment": environment.describe(options.device),
        }
        options.out.write_text(json.dumps(facts | settings | found, indent=1) + "\n", encoding="utf-8")


def _shown(arguments: list[str]) -> list[str]:
    """Return the command without the folders of this machine."""
    return [Path(text).name if "/" in text else text for text in arguments]


if __name__ == "__main__":
    main()
