"""A loop of somebody else's: watched without a trace, leapt in, taken back, saved and resumed to the bit."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import foretrain
from foretrain.config import Config, from_mapping
from foretrain.engine.world import World
from foretrain.errors import CheckpointError, InputError, SaveError
from foretrain.events import Event, HealthFound, LossForecasted, Moved, Notice, OwnCodeFailed, Resumed
from foretrain.guest.engine import GuestEngine
from foretrain.guest.run import GuestRun
from foretrain.persist import checkpoint

QUICK = {"hybrid.warmup_steps": 15, "hybrid.full_steps": 10, "hybrid.window_steps": 5, "forecast.enabled": False}
TOLD = {"forecast.enabled": True, "evaluation.interval": 15}
STEPS = 60
DATA = torch.randn(512, 8, generator=torch.Generator().manual_seed(3))
HELD_OUT = torch.randn(64, 8, generator=torch.Generator().manual_seed(4))


class Wavy(nn.Module):
    """Dropout draws random numbers in every step, and the norm's buffers move."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))


def batch(step: int) -> Tensor:
    return DATA[(torch.arange(32) + 32 * step) % 512]


@dataclass
class Outcome:
    model: nn.Module
    run: GuestRun | None
    events: list[Event]

    @property
    def state(self) -> Tensor:
        return torch.cat([tensor.detach().double().flatten() for tensor in self.model.state_dict().values()])

    @property
    def moves(self) -> dict[str, int]:
        assert self.run is not None
        moves: dict[str, int] = self.run.summary()["moves"]
        return moves

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Loop:
    """A loop as people write it, with accumulation, clipping, and a scheduler if one is given."""

    def __init__(self, rate: float = 1e-4, schedule: Callable[[int], float] | None = None) -> None:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002 - what a host draws from must stay as it is
        self.model = Wavy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.scheduler: LRScheduler | None = None if schedule is None else LambdaLR(self.optimizer, schedule)
        self.step = 0

    def wrap(self, probe: Any, **options: Any) -> Outcome:
        events: list[Event] = []
        bus = foretrain.Bus()
        bus.subscribe(events.append)
        given = {"config": from_mapping({**QUICK, **options.pop("settings", {})}), "max_steps": STEPS, **options}
        loss = None if probe is None or callable(probe) else loss_fn
        return Outcome(
            self.model, foretrain.wrap(self.model, self.optimizer, probe=probe, loss_fn=loss, bus=bus, **given), events
        )

    def go(self, until: int, run: GuestRun | None, told: bool = True) -> None:
        while self.step < until:
            total = 0.0
            for half in batch(self.step).chunk(2):
                loss = loss_fn(self.model, half) / 2
                loss.backward()
                total += loss.detach()
                if run is not None:
                    assert run.between_steps() is None, "between two parts of a step"
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            if run is not None:
                run.between_steps(total if told else None)


def train(probe: Any = (), told: bool = True, rate: float = 1e-4, **options: Any) -> Outcome:
    """A whole loop. probe: () for none of foretrain at all."""
    loop = Loop(rate, options.pop("schedule", None))
    outcome = Outcome(loop.model, None, []) if probe == () else loop.wrap(probe, **options)
    loop.go(STEPS, outcome.run, told)
    if outcome.run is not None:
        outcome.run.close()
    return outcome


@pytest.fixture(scope="module")
def plain() -> Tensor:
    return train().state


class Rising:
    """A probe that always objects."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return float(self.calls)


@pytest.mark.parametrize("told", [True, False], ids=["loss told", "no loss"])
def test_watching_leaves_no_trace(plain: Tensor, told: bool) -> None:
    watched = train(None, told)
    assert torch.equal(watched.state, plain)
    assert watched.run is not None
    assert watched.run.engine.progress.global_step == STEPS
    assert watched.run.hybrid.observer.quality.summary()["5"]["made"] >= 5
    assert "only watched" in watched.run.summary()["audit"]["sentence"]
    idle = train([HELD_OUT], told, settings={"hybrid.mode": "off"})
    assert torch.equal(idle.state, plain)
    assert sum(idle.moves.values()) == 0


@pytest.mark.parametrize("told", [True, False], ids=["loss told", "no loss"])
def test_a_probe_that_always_objects_leaves_the_bits_of_no_probe(plain: Tensor, told: bool) -> None:
    outcome = train(Rising(), told)
    assert outcome.moves["refused"] >= 1
    assert outcome.moves["kept"] + outcome.moves["shrunk"] == 0
    assert torch.equal(outcome.state, plain)


@pytest.mark.parametrize("told", [True, False], ids=["loss told", "no loss"])
def test_leaps_lower_the_held_out_loss_where_the_rate_is_small(plain: Tensor, told: bool) -> None:
    outcome = train([HELD_OUT[:32], HELD_OUT[32:]], told)
    assert outcome.moves["kept"] >= 2
    assert not torch.equal(outcome.state, plain)
    kept = [moved for moved in outcome.of(Moved) if moved.verdict == "kept"]
    assert all(moved.loss < moved.anchor for moved in kept)
    without = train()
    with torch.no_grad():
        after, before = (float(loss_fn(one.model.eval(), HELD_OUT)) for one in (outcome, without))
    assert after < 0.9 * before
    assert outcome.run is not None
    assert outcome.run.engine.progress.global_step == STEPS, "leaps count no steps: those are the host's"


@pytest.fixture(scope="module")
def whole() -> Outcome:
    return train([HELD_OUT], settings=TOLD)


@pytest.mark.parametrize("half", [30, 37])
def test_half_and_half_is_the_whole(tmp_path: Path, half: int, whole: Outcome) -> None:
    loop = Loop()
    first = loop.wrap([HELD_OUT], settings=TOLD)
    assert first.run is not None
    loop.go(half, first.run)
    first.run.save(tmp_path / "at" / "foretrain")
    saved = (loop.model.state_dict(), loop.optimizer.state_dict(), torch.get_rng_state())
    other = Loop()
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    second = other.wrap([HELD_OUT], settings=TOLD)
    assert second.run is not None
    assert second.run.load(tmp_path / "at" / "foretrain")
    torch.set_rng_state(saved[2])
    other.step = half
    other.go(STEPS, second.run)
    assert torch.equal(second.state, whole.state)
    assert second.moves == whole.moves
    second.run.close()
    assert whole.run is not None
    assert second.run.summary()["loss_forecast"]["made"] == whole.run.summary()["loss_forecast"]["made"]


@pytest.mark.parametrize("directions", [True, False])
def test_back_to_an_earlier_state_in_one_process(directions: bool, tmp_path: Path) -> None:
    loop = Loop()
    outcome = loop.wrap([HELD_OUT], settings={"checkpoint.directions": directions, "evaluation.interval": 15})
    assert outcome.run is not None
    loop.go(30, outcome.run)
    outcome.run.save(tmp_path / "foretrain")
    saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict(), torch.get_rng_state()))

    def once_more() -> Tensor:
        assert outcome.run is not None
        assert outcome.run.load(tmp_path / "foretrain")  # before the weights, as Accelerate does
        loop.model.load_state_dict(saved[0])
        loop.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        torch.set_rng_state(saved[2])
        loop.step = 30
        loop.go(STEPS, outcome.run)
        return outcome.state

    loop.go(50, outcome.run)
    first = once_more()
    assert torch.equal(once_more(), first)
    whole = train([HELD_OUT], settings={"evaluation.interval": 15}) if directions else None
    assert whole is None or torch.equal(whole.state, first)
    assert [event.step for event in outcome.of(Resumed)] == [30, 30]


def test_what_is_saved_is_safetensors_and_json_whole_or_not_at_all(tmp_path: Path) -> None:
    loop = Loop()
    outcome = loop.wrap([HELD_OUT], settings={"evaluation.interval": 0})
    assert outcome.run is not None
    loop.go(20, outcome.run)
    folder = tmp_path / "foretrain"
    outcome.run.save(folder)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    loop.go(25, outcome.run)
    outcome.run.save(folder)  # in place of the first
    assert [path.name for path in tmp_path.iterdir()] == ["foretrain"]
    assert checkpoint.read(folder)["progress"]["global_step"] == 25
    folder.rename(tmp_path / ".old-foretrain")  # a kill between the two renames
    later = Loop().wrap([HELD_OUT])
    assert later.run is not None
    assert later.run.load(folder)
    assert later.run.engine.progress.global_step == 25
    (folder / "state.json").write_text("{}")
    damaged = Loop().wrap([HELD_OUT])
    assert damaged.run is not None
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        damaged.run.load(folder)
    anew = Loop().wrap([HELD_OUT])
    assert anew.run is not None
    assert not anew.run.load(tmp_path / "nowhere")
    assert [notice.message.partition(" is not there")[2] for notice in anew.of(Notice)] == [
        ": the run goes on, and is watched anew"
    ]


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    loop = Loop()
    outcome = loop.wrap(None)
    assert outcome.run is not None
    loop.go(5, outcome.run)
    outcome.run.save(tmp_path / "foretrain")
    model = nn.Linear(8, 1)
    other = foretrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), probe=None)
    with pytest.raises(CheckpointError, match="other trained weights"):
        other.load(tmp_path / "foretrain")


@pytest.mark.parametrize(
    ("schedule", "moves"),
    [(lambda step: 1 - 1e-7 * step, False), (lambda step: 1 + 1e-7 * step, False), (lambda step: 1.0, True)],
    ids=["decays", "warms up", "constant"],
)
def test_no_leap_is_made_while_the_rate_changes(schedule: Callable[[int], float], moves: bool) -> None:
    outcome = train([HELD_OUT], schedule=schedule)
    assert (sum(outcome.moves.values()) > 0) is moves
    assert outcome.run is not None
    assert (outcome.run.summary()["audit"]["sentence"].endswith("the learning rate was never steady")) is not moves


def test_a_schedule_that_is_not_shown_is_told_of_when_it_has_been_seen() -> None:
    loop = Loop(schedule=lambda step: 1 - step / STEPS)
    outcome = loop.wrap([HELD_OUT])
    loop.go(40, outcome.run)
    assert len([notice for notice in outcome.of(Notice) if "none will be tried" in notice.message]) == 1


def test_a_loader_may_be_the_probe_and_a_dear_one_is_told_of(plain: Tensor) -> None:
    loader = torch.utils.data.DataLoader(HELD_OUT.repeat(8, 1), batch_size=16, shuffle=True)
    idle = train(loader, settings={"hybrid.mode": "off"})
    assert torch.equal(idle.state, plain), "reading it draws none of the host's random numbers"
    dear = Loop().wrap(loader)
    assert dear.run is not None
    dear.run.open()
    assert ["one look at the probe costs about 11 steps" in notice.message for notice in dear.of(Notice)] == [True]


def test_an_optimizer_is_watched_once() -> None:
    loop = Loop()
    outcome = loop.wrap(None)
    assert outcome.run is not None
    with pytest.raises(InputError, match=r"this AdamW is watched already: close\(\) the run"):
        loop.wrap(None)
    outcome.run.close()
    loop.wrap(None)


def test_a_probe_that_gives_no_number_is_refused() -> None:
    loop = Loop()
    outcome = loop.wrap(lambda: None)
    with pytest.raises(InputError, match="the probe gave of type NoneType; it must give the mean loss"):
        loop.go(1, outcome.run)


def test_a_schedule_that_never_stands_still_is_told_before_the_first_step() -> None:
    for schedule, told in ((lambda step: 1 - step / STEPS, True), (lambda step: min(1.0, 4 - 4 * step / STEPS), False)):
        loop = Loop(schedule=schedule)
        outcome = loop.wrap([HELD_OUT], scheduler=loop.scheduler)
        assert outcome.run is not None
        outcome.run.open()
        notices = [notice.message for notice in outcome.of(Notice)]
        assert any("leaps wait while it warms up or decays: none will be tried" in text for text in notices) is told


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (lambda step: max(0.0, 1 - step / STEPS), True),  # at 0 beyond the end, where nobody trains any more
        (lambda step: min(step / 30, 1.0), False),
    ],
    ids=["decays", "warms up"],
)
def test_a_resumed_run_knows_what_its_schedule_will_do(
    schedule: Callable[[int], float], told: bool, tmp_path: Path
) -> None:
    loop = Loop(schedule=schedule)
    first = loop.wrap([HELD_OUT], scheduler=loop.scheduler)
    assert first.run is not None
    loop.go(20, first.run)
    first.run.save(tmp_path / "at")
    first.run.close()
    second = loop.wrap([HELD_OUT], scheduler=loop.scheduler)
    assert second.run is not None
    assert second.run.load(tmp_path / "at")
    second.run.open()
    assert any("none will be tried" in notice.message for notice in second.of(Notice)) is told


def test_a_loop_that_never_calls_between_steps_is_watched_and_told_once(plain: Tensor) -> None:
    loop = Loop()
    outcome = loop.wrap([HELD_OUT])
    loop.go(STEPS, None)
    assert outcome.run is not None
    outcome.run.close()
    assert torch.equal(outcome.state, plain)
    assert outcome.run.engine.progress.global_step == STEPS
    notices = [notice.message for notice in outcome.of(Notice) if "between_steps()" in notice.message]
    assert len(notices) == 1


class Failing:
    """A probe that fails after its first look."""

    calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise ZeroDivisionError("nothing is held out")
        return torch.tensor(1.0)


def test_a_probe_that_fails_costs_the_leaps_and_not_the_run(plain: Tensor) -> None:
    outcome = train(Failing(), settings={"evaluation.interval": 20})
    assert torch.equal(outcome.state, plain)
    assert "ZeroDivisionError: nothing is held out" in {event.error for event in outcome.of(OwnCodeFailed)}
    assert outcome.moves["kept"] == 0


def test_a_probe_that_fails_at_the_beginning_says_so_before_the_first_step() -> None:
    loop = Loop()
    before = loop.wrap(lambda: 1 / 0)
    start = [p.clone() for p in loop.model.parameters()]
    with pytest.raises(ZeroDivisionError):
        loop.go(1, before.run)
    assert all(torch.equal(p, first) for p, first in zip(loop.model.parameters(), start, strict=True))


def test_close_removes_the_hooks_and_what_is_frozen_in_mid_run_is_followed() -> None:
    loop = Loop()
    outcome = loop.wrap([HELD_OUT])
    with outcome.run as run:  # type: ignore[union-attr]
        loop.go(30, run)
        loop.model.net[0].weight.requires_grad_(False)
        kept = loop.model.net[0].weight.clone()
        loop.go(STEPS, run)
    assert torch.equal(kept, loop.model.net[0].weight)
    assert len(run.hybrid.observer.trajectory.parameters) == 5
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not loop.optimizer._optimizer_step_post_hooks
    loop.optimizer.step()
    assert run.engine.progress.global_step == STEPS
    run.close()
    with pytest.raises(InputError, match="this run is closed"):
        run.evaluated(1.0)


def test_the_host_waits_for_the_device_once_per_window(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, waits = Loop(), []
    outcome = loop.wrap(None, settings={"health.interval": 0, "log.interval": 1000})
    monkeypatch.setattr(World, "to_host", lambda _, tensor: waits.append(loop.step) or tensor.flatten().tolist())
    loop.go(50, outcome.run)
    assert 5 <= len(waits) <= 10, "windows of five steps"


def test_modes_of_the_model_stay_as_the_host_has_them() -> None:
    loop = Loop()
    loop.model.eval()
    outcome = loop.wrap([HELD_OUT])
    assert outcome.run is not None
    outcome.run.open()
    assert not any(module.training for module in loop.model.modules())
    loop.model.train()
    loop.model.net[1].eval()
    loop.go(30, outcome.run)
    assert [module.training for module in loop.model.net] == [True, False, True, True, True]


def test_the_numbers_of_a_scaled_loss_are_seen_without_the_scale() -> None:
    """A GradScaler leaves scale and overflow to a fused optimizer, and calls its step in any case."""
    loop = Loop()
    outcome = loop.wrap(None)
    assert outcome.run is not None
    engine: GuestEngine = outcome.run.engine
    loss_fn(loop.model, batch(0)).backward()
    norm = engine.look_at_gradients()
    optimizer: Any = loop.optimizer
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    made = engine.look_at_gradients()
    assert float(made.gradient_norm) == pytest.approx(float(norm.gradient_norm) / 8)
    assert (float(norm.skipped), float(made.skipped)) == (0.0, 1.0)
    assert made.gradient_norms.shape == (len(engine.full_step.parameters),)


def test_what_cannot_be_written_is_told_and_no_host_is_imported(tmp_path: Path) -> None:
    loop = Loop()
    outcome = loop.wrap(None)
    assert outcome.run is not None
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SaveError, match="cannot be written"):
        outcome.run.save(tmp_path / "file" / "foretrain")
    code = (
        "import sys, foretrain; foretrain.wrap; print({'transformers', 'lightning', 'accelerate'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


# --- what is told ----------------------------------------------------------------------------------------------------


def test_a_run_inside_another_loop_has_a_log_a_forecast_findings_and_a_page(tmp_path: Path) -> None:
    out = tmp_path / "run"
    watched = {**TOLD, "health.interval": 20, "hybrid.mode": "off"}
    outcome = train([HELD_OUT], rate=1e30, out=out, settings=watched)
    assert {finding.ailment for finding in outcome.of(HealthFound)} == {"NaN"}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["event"] == "Progress"]
    assert steps == [10, 20, 30, 40, 50, 60]
    assert [line["step"] for line in lines if line["event"] == "Evaluated"] == [0, 15, 30, 45, 60]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["reason"], summary["unit"], summary["tokens"]) == ("finished", "steps", STEPS)
    page = (out / "report.html").read_text()
    assert "Wavy" in page
    with pytest.raises(InputError, match="it already holds a run"):
        train([HELD_OUT], out=out)
    train(None, out=out, overwrite=True)
    assert "Evaluated" not in (out / "metrics.jsonl").read_text()


def test_held_out_losses_of_the_host_lead_to_forecasts(tmp_path: Path) -> None:
    loop = Loop()
    outcome = loop.wrap(None, settings={"forecast.enabled": True})
    assert outcome.run is not None
    for until in range(8, 33, 8):
        loop.go(until, outcome.run)
        outcome.run.evaluated(1.0 + 5.0 / until)
    assert outcome.of(LossForecasted)
    assert outcome.run.summary()["best_val_loss"] == pytest.approx(1.0 + 5.0 / 32)


def test_a_schedule_that_is_shown_is_known_ahead_and_never_stepped() -> None:
    loop = Loop(schedule=lambda step: 1 - step / STEPS)
    outcome = loop.wrap(None, scheduler=loop.scheduler, settings=TOLD)
    assert outcome.run is not None
    outcome.run.open()
    assert loop.scheduler is not None
    assert loop.scheduler.last_epoch == 0
    plan = outcome.run.voice.forecaster._planned_now()  # type: ignore[union-attr]
    assert plan.multipliers[0] == 1.0
    assert plan.multipliers[-1] == pytest.approx(0.0, abs=1e-6)
    loop.go(3, outcome.run)
    assert loop.scheduler.last_epoch == 3
    untold = Loop(schedule=lambda step: 1 - step / STEPS)
    other = untold.wrap(None, settings=TOLD)
    untold.go(3, other.run)
    assert len(other.run.voice.forecaster._planned_now().steps) == 0  # type: ignore[union-attr]


# --- what is refused -------------------------------------------------------------------------------------------------

MODEL = Wavy()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


class WithoutHooks(Optimizer):
    def __init__(self) -> None:
        self.param_groups = []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "gpt2"}, "model is of type str; give a torch.nn.Module"),
        ({"optimizer": "adamw"}, "optimizer is of type str; give the object of torch.optim that the loop steps"),
        ({"optimizer": WithoutHooks()}, "WithoutHooks is a wrapper without step hooks"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)}, "holds none of the parameters"),
        ({"probe": [HELD_OUT]}, "probe batches need loss_fn"),
        ({"probe": 3}, "probe is of type int; give a list of held-out batches"),
        ({"probe": [], "loss_fn": loss_fn}, "probe holds no batch"),
        ({"probe": HELD_OUT, "loss_fn": loss_fn}, r"probe is a tensor of shape \[64, 8\]; give a list"),
        ({"probe": lambda: 1.0, "loss_fn": loss_fn}, "loss_fn has no effect"),
        ({"max_steps": 0}, "max_steps = 0"),
        ({"config": Config(batch_size=4, growth={"layers": 2})}, "batch_size, growth.layers of the Config: no effect"),
        ({"config": from_mapping({"hybrid.mode": "rollout"})}, "hybrid.mode = 'rollout' of the Config needs steps"),
        ({"config": from_mapping({"guard.auto_tune": True})}, "guard.auto_tune of the Config: no effect"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        foretrain.wrap(**{"model": MODEL, "optimizer": SGD, "probe": None, **options})
