"""Fine-tune a causal language model by the command line, merge its adapter, and read both by transformers and PEFT.

python benchmarks/smollm2_readback.py --base FOLDER --data banking77.jsonl --steps 100 --examples 20

`foretrain finetune` finds the learning rate by itself. Then the same questions are answered greedily, in fp32, four
times: by foretrain from the run, by foretrain from the merged folder, by transformers from the merged folder, and by
PEFT from the base's folder and the adapter's. The table says for how many questions all four gave the same tokens, and
how far apart the logits of the last three are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from foretrain import environment

NEW_TOKENS = 16
"""Of an answer at the most; labels of banking77 have up to 12."""


def foretrain(*words: str) -> str:
    """Run the command line as a user does and return what it printed."""
    done = subprocess.run([sys.executable, "-m", "foretrain", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"foretrain {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def divide(data: Path, held_out: int, folder: Path) -> tuple[Path, list[str]]:
    """Write all examples but a few, spread over the file; return the file and the questions of those few."""
    lines = data.read_text(encoding="utf-8").splitlines()
    chosen = {number * len(lines) // held_out for number in range(held_out)}
    rest = folder / "train.jsonl"
    rest.write_text("\n".join(line for number, line in enumerate(lines) if number not in chosen) + "\n", "utf-8")
    return rest, [json.loads(lines[number])["text"] for number in sorted(chosen)]


def tune(options: argparse.Namespace, data: Path, run: Path) -> dict[str, Any]:
    """Fine-tune with a learning rate that the run finds; return its summary."""
    settings = {
        "optimizer.learning_rate": '"auto"',
        "max_steps": options.steps,
        "batch_size": options.batch,
        "data.max_length": options.length,
        "evaluation.answers": options.answers,
        "evaluation.batches": options.evaluated,
        "device": f'"{options.device}"',
    }
    told = [f"--set={name}={value}" for name, value in settings.items()]
    foretrain("finetune", "--base", str(options.base), "--data", str(data), "--out", str(run), "--quiet", *told)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return summary


def asked(model: Path, questions: list[str], *more: str) -> list[dict[str, Any]]:
    """Return what `foretrain generate` answers: the prompts as the model saw them, and the tokens of the answers."""
    prompts = [f"--prompt={question}" for question in questions]
    limits = ["--temperature", "0", "--max-tokens", str(NEW_TOKENS), "--device", "cpu", "--json"]
    told: list[dict[str, Any]] = json.loads(foretrain("generate", str(model), *prompts, *limits, *more))
    return told


class Reader:
    """A model that another library opened, in fp32."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer

    @torch.no_grad()
    def answer(self, prompt: str) -> list[int]:
        """Return the new tokens of a greedy answer."""
        tokens = self.tokenizer(prompt, return_tensors="pt")
        made = self.model.generate(**tokens, do_sample=False, max_new_tokens=NEW_TOKENS)
        new: list[int] = made[0, tokens["input_ids"].shape[1] :].tolist()
        return new

    @torch.no_grad()
    def logits(self, prompt: str) -> torch.Tensor:
        """Return the logits of every place of a prompt."""
        logits: torch.Tensor = self.model(**self.tokenizer(prompt, return_tensors="pt")).logits
        return logits


def readers(base: Path, adapter: Path, merged: Path) -> dict[str, Reader]:
    """Open the merged folder by transformers, and base and adapter by PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opened = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return {
        "transformers, merged folder": Reader(
            AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), AutoTokenizer.from_pretrained(merged)
        ),
        "PEFT, base and adapter": Reader(
            PeftModel.from_pretrained(opened, adapter), AutoTokenizer.from_pretrained(adapter)
        ),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tune, merge, ask everybody; return what was found."""
    data, questions = divide(options.data, options.examples, folder)
    run, merged = folder / "run", folder / "merged"
    began = time.monotonic()
    summary = tune(options, data, run)
    seconds = time.monotonic() - began
    foretrain("adapters", "merge", str(run), str(merged))
    own = asked(run, questions)
    prompts = [one["prompt"] for one in own]
    answers = {
        "foretrain, run": [one["tokens"] for one in own],
        "foretrain, merged folder": [one["tokens"] for one in asked(merged, prompts, "--raw")],
    }
    others = readers(options.base, run / "adapter", merged)
    for name, reader in others.items():
        answers[name] = [reader.answer(prompt) for prompt in prompts]
    pairs = [[reader.logits(prompt) for reader in others.values()] for prompt in prompts]
    tokenizer = next(iter(others.values())).tokenizer
    rows = [
        {
            "prompt": prompt,
            "answers": {
                name: tokenizer.decode(given[number], skip_special_tokens=True) for name, given in answers.items()
            },
            "same_tokens": len({tuple(given[number]) for given in answers.values()}) == 1,
            "largest_difference_of_logits": float((pairs[number][0] - pairs[number][1]).abs().max()),
        }
        for number, prompt in enumerate(prompts)
    ]
    return {
        "learning_rate": summary.get("learning_rate"),
        "best_val_loss": summary.get("best_val_loss"),
        "final_val_loss": summary.get("final_val_loss"),
        "accuracy": summary.get("accuracy"),
        "seconds": round(seconds, 1),
        "same_tokens": sum(row["same_tokens"] for row in rows),
        "questions": len(rows),
        "largest_difference_of_logits": max(row["largest_difference_of_logits"] for row in rows),
        "rows": rows,
    }


def main() -> None:
    """Read the options, measure, print a table and write every number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder in Hugging Face's format")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with text and label")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--examples", type=int, default=20, help="questions that are held back and asked at the end")
    parser.add_argument("--answers", type=int, default=64, help="held-out examples whose answers are checked")
    parser.add_argument("--evaluated", type=int, default=8, help="held-out batches per evaluation")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(options, Path(name))
    found["environment"] = environment.describe(options.device)
    shown = {key: getattr(options, key) for key in ("steps", "batch", "length", "examples", "answers", "device")}
    found["options"] = shown | {"base": options.base.name, "data": options.data.name}
    for row in found["rows"]:
        print("same " if row["same_tokens"] else "OTHER", row["prompt"].splitlines()[0][:60], "->", row["answers"])
    print(f"{found['same_tokens']} of {found['questions']} answers are the same four times")
    print(f"largest difference of logits: {found['largest_difference_of_logits']:.2e}")
    here = Path(__file__).parent / "results"
    out = options.out or here / f"{datetime.now().astimezone():%Y-%m-%d}-smollm2-readback.json"
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
