"""Figures of the whole stack, of one GPU and of additions to Muon are what raw files of benchmarks/results say."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from foretrain.measure.stats import paired_interval

ROOT = Path(__file__).parent.parent


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text("utf-8").split())


def raw(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def in_words(ratios: list[float], digits: int = 3) -> str:
    found = paired_interval([math.log(ratio) for ratio in ratios])
    assert found.low is not None
    assert found.high is not None
    mean, low, high = (f"{math.exp(end):.{digits}f}" for end in (found.mean, found.low, found.high))
    return f"{mean}x [{low}, {high}]"


def stack() -> dict[str, dict[int, dict[str, Any]]]:
    """Timed runs by arm and seed; AdamW's longer one apart."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in raw("2026-11-19-stack-lm124m-cuda")["runs"]:
        arm = run["arm"] + (", longer" if run["steps"] == 770 else "")
        found.setdefault(arm, {})[run["seed"]] = run
    return found


def sooner(arm: str) -> list[float]:
    """Seconds of AdamW to the final loss of an arm, over that arm's, seed by seed, from the raw runs alone."""
    runs = stack()
    adamw, longer = runs["adamw"], runs["adamw, longer"][1]
    slope = (adamw[1]["loss"] - longer["loss"]) / math.log(longer["steps"] / adamw[1]["steps"])
    ratios = []
    for seed, mine in sorted(runs[arm].items()):
        plain = adamw[seed]
        steps = steps_of_adamw(plain, mine, slope)
        ratios.append(steps * plain["seconds"] / plain["steps"] / mine["seconds"])
    return ratios


def steps_of_adamw(plain: dict[str, Any], mine: dict[str, Any], slope: float) -> float:
    """How many steps AdamW needs to the loss of another run of its seed. slope: by log(steps)."""
    return float(plain["steps"] * math.exp((plain["loss"] - mine["loss"]) / slope))


def test_how_far_adamw_is_extrapolated() -> None:
    runs = stack()
    adamw, longer = runs["adamw"], runs["adamw, longer"][1]
    slope = (adamw[1]["loss"] - longer["loss"]) / math.log(longer["steps"] / adamw[1]["steps"])
    beyond = {
        arm: sorted(round(100 * (steps_of_adamw(adamw[seed], runs[arm][seed], slope) / 770 - 1)) for seed in (1, 2, 3))
        for arm in ("Muon", "Muon and growth")
    }
    muon, grown = beyond["Muon"], beyond["Muon and growth"]
    told = f"extrapolated by {muon[0]} to {muon[2]} %, with growth by up to {grown[2]} %"
    assert told in page("docs/results.md"), told
    assert f"whose steps are extrapolated by up to {max(*muon, *grown)} %" in page("README.md")


@pytest.mark.parametrize("arm", ["Muon", "Muon and growth"])
def test_the_whole_stack_over_adamw(arm: str) -> None:
    ratios = sooner(arm)
    (row,) = (row for row in raw("2026-11-19-stack-lm124m-cuda")["rows"] if row["arm"] == arm)
    assert ratios == pytest.approx(row["sooner"], rel=1e-9)
    assert len(ratios) == 3
    assert f"**{in_words(ratios)}**" in page("docs/results.md")
    assert in_words(ratios, digits=2) in page("README.md")
    assert f"{statistics.geometric_mean(ratios):.1f}x" in next(
        line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if "language model to pre-train" in line
    )


def test_growth_and_prediction_beside_muon_alone() -> None:
    runs, text = stack(), page("docs/results.md")
    grown = [one / other for one, other in zip(sooner("Muon and growth"), sooner("Muon"), strict=True)]
    assert f"| Muon without | {in_words(grown)} |" in text
    watched, plain = runs["Muon, prediction as by default"], runs["Muon"]
    speed = [plain[seed]["seconds"] / watched[seed]["seconds"] for seed in (1, 2, 3)]
    assert f"| the same Muon without | {in_words(speed)} (no move was made) |" in text
    assert min(speed) >= 0.99


def test_both_sides_were_tuned_with_as_many_runs() -> None:
    runs = [run for run in raw("2026-11-19-stack-lm124m-cuda")["runs"] if run["arm"].startswith("tuning")]
    for side in ("adamw", "muon"):
        own = [run for run in runs if run["arm"] == f"tuning {side}"]
        assert len(own) == 6
        best = min(own, key=lambda run: run["held_out_loss"])
        (row,) = (row for row in raw("2026-11-19-stack-lm124m-cuda")["rows"] if row["arm"] == "Muon")
        chosen = row["settings" if side == "muon" else "adamw"]
        assert {name: best["settings"].get(name) for name in chosen} == chosen


LADDER = ("plain loop, fp32 eager", "plain loop, bf16 eager", "plain loop, bf16 compiled", "foretrain")
LARGE, SMALL = "ladder, batch 16", "ladder of 30M, batch 64"


def rung(case: str, below: str, above: str) -> list[float]:
    found = raw("2026-11-19-throughput-ladder-cuda")["results"][case]
    return [one / other for one, other in zip(found[below]["seconds"], found[above]["seconds"], strict=True)]


def sooner_at_30_million() -> list[float]:
    (row,) = (row for row in raw("2026-11-19-stack-lm30m-cuda")["rows"] if row["arm"] == "Muon")
    return list(row["sooner"])


def test_the_ladder() -> None:
    text, whole = page("docs/results.md"), page("README.md")
    names = ("bf16 eager", "bf16 and `torch.compile`", "foretrain's engine, AdamW")
    for name, below, above in zip(names, LADDER, LADDER[1:], strict=False):
        cells = []
        for case in (LARGE, SMALL):
            together = statistics.geometric_mean(rung(case, LADDER[0], above))
            cells += [in_words(rung(case, below, above)), f"{together:.1f}x"]
        assert f"| {name} | {' | '.join(cells)} |" in text
    engine = {case: statistics.geometric_mean(rung(case, LADDER[0], LADDER[3])) for case in (LARGE, SMALL)}
    products = [engine[LARGE] * statistics.geometric_mean(sooner(arm)) for arm in ("Muon", "Muon and growth")]
    at_30 = engine[SMALL] * statistics.geometric_mean(sooner_at_30_million())
    muon = f"{in_words(sooner('Muon'))} | **{products[0]:.1f}x**"
    assert f"| Muon, rows evened out | {muon} | {in_words(sooner_at_30_million())} | **{at_30:.1f}x** |" in text
    assert f"| **{products[1]:.1f}x** | does not pay there |" in text
    assert (
        f"{engine[LARGE]:.1f}x over PyTorch's fp32 as it comes this is {products[0]:.1f}x and {products[1]:.1f}x"
        in whole
    )
    tf32 = statistics.geometric_mean(rung(LARGE, LADDER[0], "plain loop, tf32 eager"))
    told = [product / tf32 for product in products]
    assert f"rung is {tf32:.2f}x faster, and the products are {told[0]:.1f}x and {told[1]:.1f}x" in text


def test_the_stack_over_pytorchs_compiled_loop() -> None:
    text, whole = page("docs/results.md"), page("README.md")
    ours = {case: statistics.geometric_mean(rung(case, LADDER[2], LADDER[3])) for case in (LARGE, SMALL)}
    small = statistics.geometric_mean(sooner_at_30_million())
    large = [statistics.geometric_mean(sooner(arm)) * ours[LARGE] for arm in ("Muon", "Muon and growth")]
    told = f"there it is {small:.3f}x, and the engine's {ours[SMALL]:.3f}x over `torch.compile` of a plain loop makes"
    assert f"{told} {small * ours[SMALL]:.1f}x of it ({large[0]:.1f}x at 124M, with growth {large[1]:.1f}x)" in text
    same = in_words(sooner_at_30_million(), 2)
    assert f"{same} in the same engine, some {small * ours[SMALL]:.1f}x over PyTorch's compiled" in whole
    rounds = raw("2026-11-19-throughput-ladder-cuda")["results"][SMALL][LADDER[2]]["seconds"]
    lower = [
        paired_interval([math.log(one) for one in some]).low
        for some in (sooner_at_30_million(), rung(SMALL, LADDER[2], LADDER[3]))
    ]
    told = f"four rounds differ by up to {100 * (max(rounds) / min(rounds) - 1):.0f} %"
    assert f"{told}; the lower ends of both intervals make {math.exp(sum(lower)):.1f}x" in text


def test_the_stack_at_30_million_parameters() -> None:
    found, text = raw("2026-11-19-stack-lm30m-cuda"), page("docs/results.md")
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for run in found["runs"]:
        arm = run["arm"] + (", longer" if run["steps"] == 2880 else "")
        runs.setdefault(arm, {})[run["seed"]] = run
    adamw, longer = runs["adamw"], runs["adamw, longer"][1]
    slope = (adamw[1]["loss"] - longer["loss"]) / math.log(longer["steps"] / adamw[1]["steps"])
    ratios, beyond = [], list[int]()
    for seed, mine in sorted(runs["Muon"].items()):
        plain = adamw[seed]
        steps = steps_of_adamw(plain, mine, slope)
        beyond.append(round(100 * (steps / plain["steps"] - 1)))
        assert steps < longer["steps"], "nothing is extrapolated"
        ratios.append(steps * plain["seconds"] / plain["steps"] / mine["seconds"])
    assert ratios == pytest.approx(sooner_at_30_million(), rel=1e-9)
    assert f"**{in_words(ratios)}**" in text
    assert f"{min(beyond)} to {max(beyond)} % above the shorter one" in text
    assert f"1,200 steps of Muon against {adamw[1]['steps']:,} and {longer['steps']:,} of AdamW" in text
    watched = runs["Muon, prediction as by default"]
    assert {f"{run['seconds']:.1f} s" for run in watched.values()} == {"12.2 s"}
    assert all(run["kept"] == 0 for run in watched.values()), "no move was made"
    speed = [runs["Muon"][seed]["seconds"] / watched[seed]["seconds"] for seed in (1, 2, 3)]
    assert f"| {in_words(speed)} (no move was made) |" in text
    assert min(speed) >= 0.99
    for side in ("adamw", "muon"):
        own = [run for run in found["runs"] if run["arm"] == f"tuning {side}"]
        best = min(own, key=lambda run: run["held_out_loss"])["settings"]
        assert len(own) == 7
        made = {json.dumps(run["settings"]) for run in runs["adamw" if side == "adamw" else "Muon"].values()}
        assert made == {json.dumps(best)}


def test_half_the_batch_at_first_on_a_gpu() -> None:
    models, text = raw("2026-11-19-stack-parts-lm30m-timed-cuda")["models"], page("docs/results.md")
    runs = {(one["part"], one["seed"]): one for one in models["lm30m"]["runs"]}
    apart = [runs["half the batch at first", seed]["test"] - runs["plain", seed]["test"] for seed in (1, 2)]
    found = paired_interval(apart)
    times = runs["half the batch at first", 2]["seconds"] / runs["plain", 2]["seconds"]
    told = (
        f"ended {-found.mean:.4f} lower [{found.low:+.4f}, {found.high:+.4f}] (two seeds) for {times:.2f}x the seconds"
    )
    assert told in text
    stack_runs = raw("2026-11-19-stack-lm30m-cuda")["runs"]
    ends = {one["steps"]: one["loss"] for one in stack_runs if one["arm"] == "adamw" and one["seed"] == 1}
    drop = ends[2160] - ends[2880]
    assert f"a third more steps lower it by {drop:.3f}. AdamW" in text
    assert drop / math.log(4 / 3) * math.log(times) > -found.mean
    plain, half = (one["test"] for one in models["lm30m-adamw"]["runs"])
    assert f"AdamW itself ended {half - plain:.4f} higher with half the batch at first" in text


def test_where_a_step_goes() -> None:
    models, text = raw("2026-11-19-profile-step-cuda")["models"], page("docs/results.md")
    found = models["124M, batch 64"]["results"]["default"]
    kinds = found["kinds"]
    assert f"where {found['milliseconds']:.1f} ms go ({found['tokens_per_second']:,} tokens/s" in text
    rows = {"matrix products": "matrix products", "attention (cuDNN)": "attention", "GELU": "GELU", "norms": "norms"}
    rows |= {"loss": "loss", "AdamW and clipping": "optimizer and clipping"}
    rows |= {"joining gradients of q, k and v, and other fused kernels": "other fused kernels"}
    for name, kind in rows.items():
        assert f"| {name} | {kinds[kind]:.1f} |" in text
    assert f"| all else | {kinds['other'] + kinds['copies']:.1f} |" in text
    assert f"fall under load | {found['milliseconds'] - sum(kinds.values()):.1f} |" in text
    step = {
        (model, beta): models[model]["results"][arm]["milliseconds"]
        for model in ("124M, batch 16", "30M, batch 64")
        for arm, beta in (("optimizer.type=muon", 0.95), ("optimizer.type=muon,optimizer.row_beta2=0", 0))
    }
    ms = [step[model, beta] for model in ("124M, batch 16", "30M, batch 64") for beta in (0.95, 0)]
    assert f"takes {ms[0]:.1f} ms a step at batch 16, without {ms[1]:.1f}; at 30M {ms[2]:.2f} and {ms[3]:.2f}" in text


def test_fsdp2_on_one_gpu() -> None:
    found = raw("2026-11-19-ranks-speed-cuda")
    seconds, text = found["seconds"], page("docs/cluster.md")
    step = {name: 1000 * statistics.median(values) / 20 for name, values in seconds.items()}
    ratios = [one / other for one, other in zip(seconds["one process"], seconds["FSDP2, off"], strict=True)]
    assert f"| foretrain, one process | {step['one process']:.1f} |" in text
    told = f"{statistics.median(ratios):.3f} of that throughput (rounds: {min(ratios):.3f} to {max(ratios):.3f})"
    assert f"| foretrain on FSDP2 | {step['FSDP2, off']:.1f} | {told} |" in text
    rounds = [one / other - 1 for one, other in zip(seconds["FSDP2, watching"], seconds["FSDP2, off"], strict=True)]
    assert f"(rounds: {100 * min(rounds):.1f} to {100 * max(rounds):.1f} %)" in text
    for name, row in (("idle", "... with idle prediction"), ("watching", "... watching every window")):
        longer = found["ratios"][f"{name} over off, both FSDP2"] - 1
        assert f"| {row} | {step[f'FSDP2, {name}']:.1f} | {longer:.1%} longer".replace("%", " %") in text
    longer = found["ratios"]["foretrain over a plain loop, both FSDP2"] - 1
    assert f"| {step['FSDP2, plain loop']:.1f} | foretrain's step is {longer:.0%} longer |".replace("%", " %") in text


def test_fine_tuning_beside_trl_on_a_gpu() -> None:
    found, text = raw("2026-11-19-hf-finetune-shape-cuda"), page("docs/finetune.md")
    theirs = found["arms"]["theirs"]
    names = {"ours, hybrid off": '`hybrid.mode = "off"`', "ours, as finetune does": "as `finetune` does"}
    for arm, name in names.items():
        own = found["arms"][arm]
        mean = statistics.fmean(abs(a - b) for a, b in zip(own["losses"], theirs["losses"], strict=True))
        ratios = own["ratio_to_theirs"]
        row = (
            f"| foretrain, {name} | {statistics.median(own['seconds_per_step']):.3f} | {own['median_ratio']:.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}) | {mean:.4f} ({own['largest_difference_of_losses']:.3f}) |"
        )
        assert row in text
    ratios = found["arms"]["ours, as finetune does"]["ratio_to_theirs"]
    told = f"random weights [{statistics.median(ratios):.2f} of them](docs/finetune.md) on an H200"
    assert f"{told} ({min(ratios):.2f} to {max(ratios):.2f}, four rounds)" in page("README.md")


def test_additions_to_muon() -> None:
    found, text = raw("2026-11-19-stack-parts-cpu"), page("docs/results.md")
    large = {row["part"]: row["from plain"][0] for row in raw("2026-11-19-stack-parts-lm30m-cuda")["rows"]}
    tuning = {
        json.dumps(run["settings"], sort_keys=True): run["loss"]
        for run in raw("2026-11-19-stack-lm30m-tuning-cuda")["runs"]
    }
    plain = {"predictor.beta": 0.0, "optimizer.type": "muon", "optimizer.learning_rate": 0.006}
    with_rows = plain | {"optimizer.row_beta2": 0.95}
    ends = [tuning[json.dumps(settings, sort_keys=True)] for settings in (plain, with_rows)]
    large["NorMuon's rows"] = ends[1] - ends[0]
    assert len(found["rows"]) == 14
    for row in found["rows"]:
        apart, (low, high) = row["from plain"], row["interval"]
        assert len(apart) == (8 if row["part"] in ("NorMuon's rows", "the last tenth averaged") else 3)
        other = f"{large[row['part']]:+.4f}" if row["part"] in large else ""
        told = (
            f"| {row['part']} | {statistics.fmean(apart):+.4f} [{low:+.4f}, {high:+.4f}] | {row['time']:.2f}x | {other}"
        )
        assert told.rstrip() in text
    plain_ends = {run["seed"]: run["test"] for run in found["runs"] if run["part"] == "plain"}
    longer = [plain_ends[run["seed"]] - run["test"] for run in found["longer"]["runs"]]
    told = f"15 % longer end {statistics.fmean(longer):.3f} lower ({min(longer):.3f} to {max(longer):.3f} by seed)"
    assert told in text
    slope = statistics.fmean(longer) / math.log(found["longer"]["steps"] / 800)
    worth = {
        row["part"]: math.exp(-statistics.fmean(row["from plain"]) / slope) / row["time"]
        for row in found["rows"]
        if row["part"] in ("NorMuon's rows", "half the batch at first")
    }
    rows, batch = worth["NorMuon's rows"], worth["half the batch at first"]
    assert f"NorMuon's rows {rows:.2f}x in time, half the batch at first {batch:.2f}x" in text


def test_what_rows_change_at_124_million_parameters() -> None:
    runs = raw("2026-11-19-stack-lm124m-cuda")["runs"]
    tried = {json.dumps(run["settings"], sort_keys=True): run["loss"] for run in runs if run["arm"] == "tuning muon"}
    plain = {"predictor.beta": 0.0, "optimizer.type": "muon", "optimizer.learning_rate": 0.004}
    ends = [tried[json.dumps(plain | more, sort_keys=True)] for more in ({}, {"optimizer.row_beta2": 0.95})]
    equal = stack()
    apart = [
        abs(equal["Muon"][seed]["loss"] - equal["Muon, prediction as by default"][seed]["loss"]) for seed in (1, 2, 3)
    ]
    told = (
        f"made the loss {ends[0] - ends[1]:.3f} lower, while equal runs differ by {min(apart):.3f} to {max(apart):.3f}"
    )
    assert told in page("docs/results.md")
