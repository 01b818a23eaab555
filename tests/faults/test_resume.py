"""`--resume`: what it goes on from, what it says, what it refuses; and nothing is touched when it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretrain import HybridTrainer, config
from foretrain.errors import CheckpointError
from foretrain.events import Event, Notice
from foretrain.persist import checkpoint
from foretrain.persist.folder import RunFolder
from foretrain.recipes import train as run


def contents(folder: Path) -> dict[str, bytes]:
    ignored = (".lock", "metrics.jsonl")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ignored
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what it goes on from --------------------------------------------------------------------------------------------


def test_it_goes_on_from_the_newest_and_ends_as_if_nothing_had_been(workshop: Any) -> None:
    code, printed = workshop.resume()
    assert code == 0
    assert "resumed from step 9 (killed/checkpoints/step-00000009)" in printed
    assert workshop.is_as_undisturbed()


def test_without_a_file_the_run_folders_own_configuration_is_used(workshop: Any) -> None:
    code, _ = workshop.foretrain("train", "--out", "killed", "--resume")
    assert code == 0
    assert workshop.is_as_undisturbed()


def test_an_empty_folder_starts_at_0_and_says_so(workshop: Any) -> None:
    code, printed = workshop.foretrain("train", "tiny.toml", "--out", "new", "--resume")
    assert code == 0
    assert "new/checkpoints holds no checkpoint yet: starting at step 0" in printed
    assert "resumed" not in printed
    assert workshop.is_as_undisturbed("new")


def test_checkpoints_that_are_gone_are_a_warning(workshop: Any) -> None:
    shutil.rmtree(workshop.checkpoints)
    code, printed = workshop.foretrain("train", "tiny.toml", "--out", "killed", "--resume", "--quiet")
    assert code == 0
    assert "warning: killed/checkpoints holds no checkpoint, though metrics.jsonl tells of an earlier run" in printed


def forge(workshop: Any, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state in every checkpoint, with checksums that are right."""
    for folder in workshop.checkpoints.glob("step-*"):
        content = json.loads((folder / "state.json").read_text())
        change(content["state"])
        (folder / "state.json").write_text(json.dumps(content))
        manifest = json.loads((folder / "manifest.json").read_text())
        size, digest = (folder / "state.json").stat().st_size, checkpoint.digest(folder / "state.json")
        manifest["files"]["state.json"] = {"size": size, "sha256": digest}
        (folder / "manifest.json").write_text(json.dumps(manifest))


def as_format_1(workshop: Any) -> None:
    """Checkpoints as an earlier version left them: other words for what steers the run, the same for its weights."""
    for name in ("state.json", "manifest.json"):
        for path in workshop.checkpoints.glob(f"*/{name}"):
            path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    forge(workshop, lambda state: [state.pop(name) for name in ("format", "hybrid", "meter", "precision")])


def test_a_checkpoint_of_an_earlier_format_is_refused_in_one_clear_sentence(workshop: Any) -> None:
    as_format_1(workshop)
    before = {path: path.read_bytes() for path in workshop.checkpoints.rglob("*.*")}
    code, printed = workshop.foretrain("train", "tiny.toml", "--out", "killed", "--resume", "--quiet")
    newest = max(workshop.checkpoints.glob("step-*")).name
    assert (code, printed.count("\n")) == (2, 1), printed
    assert printed == (
        f"error: killed/checkpoints/{newest}: saved by an earlier development version (format 1, this one reads format "
        "2); finish that run with the version that began it, or begin anew in another folder. Its weights alone can "
        "still be read: `foretrain export`, or load_weights\n"
    )
    assert {path: path.read_bytes() for path in workshop.checkpoints.rglob("*.*")} == before


def test_the_weights_of_an_earlier_format_can_still_be_used(workshop: Any) -> None:
    assert workshop.foretrain("export", "killed", "now")[0] == 0
    as_format_1(workshop)
    assert workshop.foretrain("export", "killed", "then")[0] == 0
    for name in ("model.safetensors", "config.json"):
        now, then = (next(workshop.checkpoints.parents[1].glob(f"{folder}/{name}")) for folder in ("now", "then"))
        assert now.read_bytes() == then.read_bytes()
    code, printed = workshop.foretrain("generate", "killed", "--prompt", "a", "--max-tokens", "1", "--device", "cpu")
    assert code == 0, printed


def test_a_step_that_is_not_said_is_no_raw_error(workshop: Any) -> None:
    forge(workshop, lambda state: state["progress"].pop("global_step"))
    code, printed = workshop.foretrain("generate", "killed", "--prompt", "a", "--max-tokens", "1", "--device", "cpu")
    assert (code, printed.count("\n")) == (2, 1), printed
    assert "it does not say at which step it was saved" in printed


def test_settings_that_a_checkpoint_does_not_name_are_said_to_be_unset(workshop: Any) -> None:
    forge(workshop, lambda state: state["meta"]["config"].pop("optimizer"))
    code, printed = workshop.foretrain("train", "tiny.toml", "--out", "killed", "--resume")
    assert code == 0
    assert 'optimizer.type unset -> "muon"' in printed
    assert workshop.is_as_undisturbed()


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("meta", "total_seconds", "long"),
        ("progress", "position", -3),
        ("progress", "global_step", "x"),
        ("", "loader", {"start": 3}),
        ("", "loader", {"start": 3, "random": {}}),
        ("", "loader", "x"),
    ],
)
def test_a_forged_state_is_refused_in_one_line(section: str, name: str, value: Any, workshop: Any) -> None:
    forge(workshop, lambda state: (state[section] if section else state).update({name: value}))
    code, printed = workshop.foretrain("train", "tiny.toml", "--out", "killed", "--resume", "--quiet")
    assert (code, printed.count("\n")) == (2, 1), printed
    assert "Traceback" not in printed


def test_no_folder_and_no_configuration_is_a_mistake(workshop: Any) -> None:
    code, printed = workshop.foretrain("train", "--out", "kiled", "--resume")
    assert code == 2
    assert printed == (
        "error: --out kiled: there is no run to go on with; check the folder, or name a CONFIG to start one\n"
    )
    assert not (workshop.folder / "kiled").exists()


def test_a_finished_run_is_left_as_it_is(workshop: Any) -> None:
    before = contents(workshop.folder / "undisturbed")
    code, printed = workshop.foretrain("train", "tiny.toml", "--out", "undisturbed", "--resume")
    assert code == 0
    assert "resumed from step 11" in printed
    assert "report   undisturbed/report.html" in printed
    after = contents(workshop.folder / "undisturbed")
    assert {name for name in before if before[name] != after[name]} <= {"summary.json", "report.html"}
    assert before.keys() == after.keys()


def test_a_kill_between_the_last_save_and_the_export_costs_nothing(workshop: Any) -> None:
    out = workshop.folder / "undisturbed"
    model = (out / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(out / "model")
    summary = json.loads((out / "summary.json").read_text())
    (out / "summary.json").unlink()
    assert workshop.foretrain("train", "--out", "undisturbed", "--resume")[0] == 0
    assert (out / "model" / "model.safetensors").read_bytes() == model
    again = json.loads((out / "summary.json").read_text())
    assert {name for name in summary if summary[name] != again[name]} <= {
        "seconds",
        "total_seconds",
        "tokens_per_second",
        "memory",
    }


def test_a_run_that_stopped_early_stays_stopped(workshop: Any) -> None:
    """Its learning rate is so large that no evaluation beats the first."""
    settings = ["optimizer.learning_rate=50", "evaluation.interval=2", "evaluation.early_stopping_patience=2"]
    changed = config.load("tiny.toml", settings).config
    summary = run.train(changed, "early", progress=False)
    assert summary["reason"] == "stopped early"
    assert summary["global_step"] < 11
    model = (workshop.folder / "early" / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(workshop.folder / "early" / "model")
    again = run.train(changed, "early", resume=True, progress=False)
    assert (again["reason"], again["global_step"]) == ("stopped early", summary["global_step"])
    assert (workshop.folder / "early" / "model" / "model.safetensors").read_bytes() == model


def test_the_log_shows_the_losses_of_the_undisturbed_run(workshop: Any) -> None:
    """Also in the interval that the kill fell into: losses are averages over two steps, and 9 is not even."""
    assert workshop.resume()[0] == 0

    def losses(out: str) -> dict[str, float]:
        log = lines(workshop.folder / out / "metrics.jsonl")
        kinds = ("Progress", "Evaluated")
        return {f"{entry['event']} {entry['step']}": entry["loss"] for entry in log if entry["event"] in kinds}

    assert losses("killed") == losses("undisturbed")
    summaries = [json.loads((workshop.folder / out / "summary.json").read_text()) for out in ("killed", "undisturbed")]
    differing = {name for name in summaries[0] if summaries[0][name] != summaries[1][name]}
    assert differing <= {"seconds", "total_seconds", "tokens_per_second", "memory"}


def test_a_torn_line_of_the_log_is_cut(workshop: Any) -> None:
    log = workshop.killed / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"event": "Progress", "step": 1')
    assert workshop.resume()[0] == 0
    assert log.read_text().startswith(whole + '{"event": ')
    assert [entry["event"] for entry in lines(log)].count("Resumed") == 1


# --- what it says ----------------------------------------------------------------------------------------------------


def test_it_says_what_changed(workshop: Any) -> None:
    code, printed = workshop.resume("--set", "optimizer.weight_decay=0.5", "--set", "max_steps=12")
    assert code == 0
    said = [line for line in printed.splitlines() if "this checkpoint was saved" in line]
    assert said == ["changed since this checkpoint was saved: max_steps 11 -> 12, optimizer.weight_decay 0.1 -> 0.5"]
    assert "max_steps = 12" in (workshop.killed / "config.toml").read_text()
    messages = [entry["message"] for entry in lines(workshop.killed / "metrics.jsonl") if entry["event"] == "Notice"]
    assert any("optimizer.weight_decay 0.1 -> 0.5" in message for message in messages)


def test_a_changed_setting_of_the_optimizer_takes_effect(workshop: Any) -> None:
    state_file = workshop.newest
    from foretrain.persist import checkpoint

    saved = checkpoint.read(state_file)
    changed = config.load("killed/config.toml", ["optimizer.weight_decay=0.5", "optimizer.beta1=0.8"]).config
    trainer = HybridTrainer(run.build_model(changed), config=changed)
    trainer.load_state_dict(saved)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.5, 0.5, 0.0]
    assert {group["betas"] for group in trainer.optimizer.param_groups} == {(0.8, 0.999)}, (
        "beta2 as the run wrote it down"
    )


def test_a_foreign_optimizers_own_values_come_back() -> None:
    """Some keep a part of their state among their settings."""
    saved = []
    for weight_decay in (0.3, 0.0):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=weight_decay)
        trainer = HybridTrainer(model, optimizer, lambda model, batch: model(batch).sum())
        if saved:
            trainer.load_state_dict(saved[0])
        trainer.step(torch.ones(1, 2))
        saved.append(trainer.state_dict())
    assert optimizer.param_groups[0]["weight_decay"] == 0.3


def test_another_torch_is_mentioned(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert "now 9.9.9: results may differ in the last bits" in workshop.resume()[1]


# --- what it refuses -------------------------------------------------------------------------------------------------

FOREIGN = {
    "another model": (["model.width=32"], "it belongs to another model"),
    "another depth": (["model.layers=2"], "it belongs to another model"),
    "another norm": (["model.normalization=rmsnorm"], "it belongs to another model"),
    "another context": (["model.context=8"], "it belongs to another model"),
    "another vocabulary": (["model.vocab_size=300"], "it belongs to another model"),
    "another optimizer": (["optimizer.type=sgd"], "it was saved with another optimizer"),
    "adamw": (["optimizer.type=adamw"], "it was saved with another optimizer"),
    "no average": (["evaluation.ema_decay=0.0"], "evaluation.ema_decay was switched on or off"),
    "other data": (["data.path=other.txt"], "it was trained on other data"),
    "another split": (["data.held_out=0.3"], "it was trained on other data"),
    "another tokenizer": (["data.tokenizer=char"], "it was trained on other data"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_would_be_another_run_is_refused_and_nothing_is_touched(case: str, workshop: Any) -> None:
    settings, words = FOREIGN[case]
    (workshop.folder / "other.txt").write_text("the cat sat on the mat " * 500)
    before = contents(workshop.killed)
    code, printed = workshop.resume("--quiet", *(part for name in settings for part in ("--set", name)))
    assert code == 2
    assert printed.count("\n") == 1
    assert printed.startswith("error: killed/checkpoints/step-00000009: ")
    assert words in printed
    assert "use the same" in printed
    assert contents(workshop.killed) == before
    assert workshop.foretrain("train", "--out", "killed", "--resume")[0] == 0  # its own configuration is still there
    assert workshop.is_as_undisturbed()


def test_a_checkpoint_that_no_run_has_saved_is_refused(workshop: Any) -> None:
    from foretrain import CheckpointStore

    CheckpointStore(workshop.checkpoints).save(10, {"weights": torch.ones(2)})
    code, printed = workshop.resume("--quiet")
    assert (code, printed.count("\n")) == (2, 1)
    assert "no run of `fit` has saved it" in printed
    code, printed = workshop.foretrain("export", "killed", "exported")
    assert (code, printed.count("\n")) == (2, 1)


@pytest.mark.parametrize("part", ["model", "optimizer", "average", "precision", "random", "progress"])
@pytest.mark.parametrize("value", [None, 5, {}, {"x": torch.ones(1)}], ids=["none", "number", "empty", "other"])
def test_a_state_with_a_foreign_part_is_refused(part: str, value: Any, workshop: Any) -> None:
    """The checksums are right, the content is not: somebody else made it."""
    from foretrain import CheckpointStore
    from foretrain.persist import checkpoint

    state = checkpoint.read(workshop.newest)
    CheckpointStore(workshop.checkpoints).save(10, state | {part: value})
    with pytest.raises(CheckpointError, match="step-00000010: "):
        run.train(config.load("tiny.toml").config, "killed", resume=True, progress=False)


# --- two runs, one folder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--resume", "--overwrite", ""])
def test_a_second_run_is_refused_and_takes_nothing_away(option: str, workshop: Any) -> None:
    before = contents(workshop.killed)
    with RunFolder(workshop.killed, resume=True):
        code, printed = workshop.foretrain("train", "tiny.toml", "--out", "killed", *([option] if option else []))
    assert code == 2
    assert printed == ("error: --out killed: another run is writing there; wait for it or choose another folder\n")
    assert contents(workshop.killed) == before


def test_overwriting_waits_until_the_new_run_can_begin(workshop: Any) -> None:
    before = contents(workshop.killed)
    code, printed = workshop.foretrain(
        "train", "tiny.toml", "--out", "killed", "--overwrite", "--set", "data.path=none.txt"
    )
    assert code == 2
    assert "none.txt does not exist" in printed
    assert contents(workshop.killed) == before
    assert workshop.foretrain("train", "tiny.toml", "--out", "killed", "--overwrite")[0] == 0
    assert workshop.is_as_undisturbed()


# --- a loader of one's own -------------------------------------------------------------------------------------------


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def loss(self, batch: Any) -> torch.Tensor:
        self.calls += self.training
        inputs, targets = batch
        return (self.body(inputs).squeeze(1) - targets).square().mean()


def fit(out: Path, steps: int, kind: str, resume: bool = False) -> tuple[Network, list[str]]:
    notices: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append(event.message)

    torch.manual_seed(3)
    model = Network()
    settings = {"max_steps": steps, "checkpoint.interval": 2, "schedule.type": "constant", "device": "cpu"}
    trainer = HybridTrainer(model, config=config.from_mapping(settings))
    trainer.bus.subscribe(listen)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(20, 3, generator=generator)
    samples = torch.utils.data.TensorDataset(inputs, inputs.sum(1))
    own = torch.Generator().manual_seed(7) if kind == "its own generator" else None
    loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=kind != "in order", generator=own)
    trainer.fit(loader, out=out, resume=resume, progress=False)
    return model, notices


@pytest.mark.parametrize("kind", ["in order", "shuffled", "its own generator"])
@pytest.mark.parametrize("stop", [3, 5, 7])
def test_any_loader_resumes_exactly(kind: str, stop: int, tmp_path: Path) -> None:
    straight, _ = fit(tmp_path / "straight", 12, kind)
    fit(tmp_path / "stopped", stop, kind)
    resumed, notices = fit(tmp_path / "stopped", 12, kind, resume=True)
    assert resumed.calls == straight.calls == 12
    for name, value in straight.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, resumed.state_dict()[name]), name
    assert any("has no seek()" in notice for notice in notices)


def test_a_run_that_is_past_its_new_end_says_so_and_is_left_alone(workshop: Any) -> None:
    before = contents(workshop.folder / "undisturbed")
    code, printed = workshop.foretrain("train", "--out", "undisturbed", "--resume", "--set", "max_steps=5")
    assert code == 2
    assert printed == (
        "error: max_steps = 5: nothing left to do: the run in undisturbed is at step 11; leave max_steps at 11, or "
        "choose at least 11\n"
    )
    assert contents(workshop.folder / "undisturbed") == before
