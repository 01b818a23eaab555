"""Run folders, comparisons and results of benchmarks: makers of inputs for the fuzzer."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import fuzz_mutations as spoil
from fuzz_files import generate_options
from fuzz_maker import Input, Maker, tiny_settings
from fuzz_mutations import Random


def run_folder(make: Maker, *kinds: str) -> str:
    """A run with something wrong in it: any file, or the state of a checkpoint, forged so that its checksums fit."""
    name = make.rng.choice(kinds)
    make.take(name)
    if "tuned" in name:
        make.take("base", "examples.jsonl")
        for path in (Path(name) / "config.toml",):  # it names the good base by its whole path
            path.write_text(path.read_text().replace(str(make.good / "base"), str(Path("base").resolve())))
    else:
        make.take("text.txt")
    if make.chance(0.5):
        forge_checkpoint(make.rng, Path(name))
    else:
        spoil.spoil_folder(make.rng, Path(name))
    return name


def forge_checkpoint(rng: Random, run: Path) -> None:
    """Another state under checksums that fit it."""
    newest = sorted(run.glob("checkpoints/step-*"))[-1]
    folder = newest if rng.random() < 0.8 else rng.choice(sorted(run.glob("checkpoints/*step-*")))
    path = rng.choice(sorted(folder.glob("*.safetensors"))) if rng.random() < 0.35 else folder / "state.json"
    content = path.read_bytes()
    if path.suffix == ".json":
        tree = json.loads(content)
        part = rng.choice(
            [tree, tree["state"], tree["state"], *(item for item in tree["state"].values() if isinstance(item, dict))]
        )
        spoil.spoil_tree(rng, part)
        path.write_bytes(spoil.json_text(rng, tree))
    else:
        path.write_bytes(spoil.spoil_tensors(rng, content))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][path.name] = {
        "size": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def report(make: Maker) -> Input:
    runs = [run_folder(make, "run", "killed", "tuned")]
    if make.chance(0.15):
        make.take("half-tuned")
        runs.append("half-tuned")
    out = ["--out", "page.html"] if make.chance(0.4) or len(runs) > 1 else []
    return Input(["report", *runs, *out, *make.json()], writes=("page.html", f"{runs[0]}/report.html"))


def forecast(make: Maker) -> Input:
    run = run_folder(make, "run", "killed", "tuned")
    return Input(["forecast", run, *forecast_options(make), *make.json()])


def forecast_options(make: Maker) -> list[str]:
    shares = make.rng.choice(["0.5", "0.01", "0.99", "1", "-1", "nan", "x"])
    chosen = [["--at", shares], ["--total-steps", make.rng.choice(["100", "0", "1", str(2**70)])]]
    chosen += [["--schedule", make.rng.choice(["wsd", "cosine", "linear", "constant", "x"])], ["--decay-share", shares]]
    return [word for words in chosen if make.chance(0.4) for word in words]


def forecast_log(make: Maker) -> Input:
    """A log as other tools write it, with something wrong in it."""
    rng, path = make.rng, Path("log")
    rows = [(step, 2 + 3 / step, 1e-3) for step in range(1, 60)]
    if make.chance(0.5):
        names = rng.choice([("step", "val_loss", "lr"), ("iter", "eval/loss", "learning_rate"), ("a", "b", "c")])
        content = "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows).encode()
        path.write_bytes(spoil.spoil_lines(rng, content))
    else:
        text = "step,val_loss,lr\n" + "\n".join(",".join(map(str, row)) for row in rows)
        path.write_bytes(spoil.spoil_bytes(rng, text.encode()))
    if make.chance(0.2):
        path = path.rename("events.out.tfevents.1")
    return Input(["forecast", str(path), *forecast_options(make), *make.json()])


def watch(make: Maker) -> Input:
    run = make.name(run_folder(make, "run", "killed", "tuned"), "none", "text.txt")
    port = make.rng.choice(["0", "0", "0", "0", "0", "0", "0", "0", "0", "-1", "70000", "x", "1e3", str(2**70)])
    return Input(["watch", run, "--port", port, *make.json()], serves=True)


def resume(make: Maker) -> Input:
    run = run_folder(make, "killed", "killed", "run")
    settings = tiny_settings(max_steps=make.rng.choice([16, 17, 2])) if make.chance(0.1) else []
    return Input(
        ["train", "--resume", "--out", run, *settings, *make.options(quiet=(True,)), *make.json()],
        writes=(run, "cache"),
    )


def resume_tuned(make: Maker) -> Input:
    run = run_folder(make, "half-tuned", "half-tuned", "tuned")
    return Input(
        ["finetune", "--resume", "--out", run, *make.options(quiet=(True,)), *make.json()], writes=(run, "cache")
    )


def export(make: Maker) -> Input:
    run = run_folder(make, "run", "killed", "tuned")
    source = make.rng.choice([run, run, *(str(path) for path in sorted(Path(run).glob("checkpoints/*step-*")))])
    return Input(["export", source, "out", *make.json()], writes=("out", ".tmp-out"))


def adapters_export(make: Maker) -> Input:
    return Input(
        ["adapters", "export", run_folder(make, "tuned", "half-tuned", "run"), "out", *make.json()], writes=("out",)
    )


def merge_run(make: Maker) -> Input:
    return Input(["adapters", "merge", run_folder(make, "tuned"), "out", *make.json()], writes=("out", ".tmp-out"))


def generate_run(make: Maker) -> Input:
    run = run_folder(make, "run", "killed", "tuned", "half-tuned")
    options = make.options(field=("label=x", "x", "="), raw=(True,), no_adapter=(True,))
    return Input(["generate", run, "--prompt", "1: the sky?", *options, *generate_options(make)])


def evaluate_run(make: Maker) -> Input:
    run = run_folder(make, "run", "killed", "tuned", "half-tuned")
    data = "examples.jsonl" if "tuned" in run else "text.txt"
    return Input(["evaluate", run, "--data", data, "--answers", "2", "--batches", "2", *make.json()])


def comparison(make: Maker) -> Input:
    """A comparison that goes on where it stopped; no further run is begun."""
    make.take("comparison", "compare.toml", "text.txt")
    spoil.spoil_folder(make.rng, Path("comparison"), "*.json", "runs/*.json")
    arguments = ["compare", "compare.toml", "--out", "comparison", "--seeds", "1", "--rates", "1", "--minutes", "0"]
    return Input([*arguments, *make.options(quiet=(True,)), *make.json()], writes=("comparison", "cache"))


def bench_compare(make: Maker) -> Input:
    folder = _results(make)
    files = sorted(str(path) for path in folder.iterdir())
    sides = [make.name(*files), make.name(*files)] if make.chance(0.85) else [make.name("results"), make.name(*files)]
    return Input(["bench", "compare", *sides, *make.options(delta=(0.02, 0, 1, 0.5)), *make.json()])


def bench_history(make: Maker) -> Input:
    folder = _results(make)
    sides = [make.name("results")] if make.chance(0.8) else [str(path) for path in sorted(folder.iterdir())]
    return Input(["bench", "history", *sides, *make.json()])


def _results(make: Maker) -> Path:
    """Files of one format, some of them spoilt."""
    folder = Path("results")
    folder.mkdir()
    kinds = ["own", "plain", "pytest", "criterion"]
    for kind in [make.rng.choice(kinds)] if make.chance(0.9) else kinds:
        for path in sorted((make.good / "results").glob(f"{kind}-*")):
            shutil.copy(path, folder)
    for _ in range(make.rng.choice([1, 2, 4])):
        files = spoil.files_in(folder)
        if files:
            spoil.spoil_file(make.rng, make.rng.choice(files))
    return folder


def bench_run(make: Maker) -> Input:
    """Always with something that refuses it: measuring takes minutes."""
    refused = make.rng.choice(
        [
            ["--processes", "0"],
            ["--threads", "-1"],
            ["--device", "x"],
            ["--only", "none-of-them"],
            ["--against", "none"],
            ["--out", "/proc/x"],
            ["--quiet", "--verbose"],
            ["--processes", "x"],
        ]
    )
    options = make.options(
        only=("forecast*", "", ",", "["),
        processes=(1, 0),
        device=("cpu", "cuda"),
        threads=(1,),
        against=("text", "/"),
        out=("out/x.json",),
    )
    return Input(["bench", "run", *options, *refused, *make.json()], writes=("out",))
