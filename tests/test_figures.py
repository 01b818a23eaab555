"""The figures of the README are what the raw files of benchmarks/results say."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def readme() -> str:
    return " ".join((ROOT / "README.md").read_text("utf-8").split())


def raw(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


NEW = ("allen_cahn", "inverse_heat", "picture")
"""Problems that were chosen before leaps ran on them, and are reported apart."""


def low_noise_runs(new: bool = False) -> dict[str, list[dict[str, float]]]:
    """Seconds of every arm to Adam's final loss, for each seed of each problem."""
    problems: dict[str, list[dict[str, float]]] = {}
    for row in raw("2026-11-18-low-noise-cpu")["results"]:
        if (row["problem"] in NEW) != new:
            continue
        seconds = {arm: values["seconds"] or float("inf") for arm, values in row["arms"].items()}
        problems.setdefault(row["problem"], []).append(seconds)
    return problems


PEERS = ("adam, tuned cosine", "soap", "muon", "l-bfgs 10", "l-bfgs 100", "broyden")


def how_much_sooner(runs: list[dict[str, float]], *arms: str) -> list[float]:
    return [min(run[arm] for arm in arms) / run["hybrid"] for run in runs]


def test_low_noise_problems(readme: str) -> None:
    problems = low_noise_runs()
    over_adam = {name: how_much_sooner(runs, "adam, tuned cosine") for name, runs in problems.items()}
    medians = sorted(statistics.median(ratios) for ratios in over_adam.values())
    lowest = min(ratio for ratios in over_adam.values() for ratio in ratios)
    assert len(problems) == 9
    assert f"{medians[0]:.1f}x to {medians[-1]:.1f}x sooner" in readme
    assert f"the slowest single run {lowest:.1f}x" in readme
    middle = statistics.median(medians)
    assert f"**{medians[0]:.0f} to {medians[-1]:.0f} times sooner (median {middle:.1f})**" in readme
    new = low_noise_runs(new=True).values()
    over_adam_new = sorted(statistics.median(how_much_sooner(runs, "adam, tuned cosine")) for runs in new)
    over_peers = sorted(statistics.median(how_much_sooner(runs, *PEERS)) for runs in new)
    assert f"{over_adam_new[0]:.1f}x to {over_adam_new[-1]:.1f}x over Adam, {over_peers[0]:.1f}x to" in readme
    assert f"{over_peers[-1]:.1f}x over the best peer" in readme
    slower = {name for name, runs in problems.items() if statistics.median(how_much_sooner(runs, *PEERS)) < 1}
    assert slower == {"cancer_logistic"}
    assert "is faster on one of them: logistic regression" in readme


def test_the_table_of_low_noise_problems() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for runs in (*low_noise_runs().values(), *low_noise_runs(new=True).values()):
        ratios = how_much_sooner(runs, "adam, tuned cosine")
        assert f"{statistics.median(ratios):.1f}x" in page
        against = how_much_sooner(runs, *PEERS)
        assert f"{statistics.median(against):.1f}x" in page
        assert f"({min(ratios):.1f}x) 3/3" in page


def test_linearised_leaps_on_a_gpu(readme: str) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = raw("2026-11-18-low-noise-cuda")["results"]
    to_lowest = []
    for problem in ("burgers", "helmholtz", "poisson_fresh"):
        found = [row for row in rows if row["problem"] == problem]
        best = [row["hybrid and the best peer"] for row in found]
        sooner = [one["times_sooner"] for one in best]
        assert f"{statistics.median(sooner):.1f}x" in page
        pairs = zip(found, best, strict=True)
        lowest = [row["equal_seconds"] / one["seconds_to_peer_loss"] for row, one in pairs]
        assert f"**{statistics.median(lowest):.1f}x** ({min(lowest):.1f}x)" in page
        to_lowest.append(statistics.median(lowest))
    assert f"{min(to_lowest):.1f}x to {max(to_lowest):.1f}x sooner than the best of tuned Adam, SOAP and Muon" in readme


def no_help_row(problem: str, plain: str) -> str:
    """As in the table: seconds of the plain arm, then medians and highest ratios of the default settings to it."""
    rows = [row for row in raw("2026-11-18-no-help-cpu")["results"] if row["problem"] == problem]
    assert len(rows) == 3
    figures = [f"{statistics.median(row['arms'][plain]['seconds'] for row in rows):.0f} s"]
    for what in ("seconds", "loss", "loss in equal seconds"):
        ratios = [row["ratios"][plain][what] for row in rows]
        figures.append(f"{statistics.median(ratios):.3g} ({max(ratios):.3g})")
    return f"| {' | '.join(figures)} |"


def test_where_linearised_leaps_do_not_help() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for problem in ("million", "noisy", "integral", "norms", "classes"):
        for plain in ("off", "no rows"):
            assert no_help_row(problem, plain) in page


def test_settings_of_muon_and_adamw_and_growth() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    runs = raw("2026-11-18-muon-stack-cuda")["runs"]
    table = page[page.index("**Muon's and AdamW's settings") : page.index("The default run (`foretrain train`")]
    for run in runs:
        assert f"{run['loss']:.3f}" in table, run["arm"]
    small = page[
        page.index("The default run (`foretrain train`") : page.index("**This is no comparison of tuned runs**")
    ]
    for run in raw("2026-11-18-muon-stack-cpu")["runs"]:
        assert f"{run['held_out_loss']:.3f}" in small, run["settings"]


STUDENT = 4.303
"""The 97.5 % quantile of Student's distribution for three seeds."""


def slope(shorter: dict[str, Any], longer: dict[str, Any]) -> float:
    """How far the loss falls when the steps grow by a factor of e."""
    return (shorter["loss"] - longer["loss"]) / math.log(longer["max_steps"] / shorter["max_steps"])


def sooner(mine: dict[str, Any], plain: dict[str, Any], fall: float) -> float:
    """The seconds that the plain run would take to the loss of another, over the seconds of that."""
    equal: float = plain["seconds"] * math.exp((plain["loss"] - mine["loss"]) / fall)
    return equal / mine["seconds"]


def stack_runs(task: str, arm: str, rate: float, steps: int) -> dict[int, dict[str, Any]]:
    """Runs of the file on growth, by seed."""
    return {
        run["seed"]: run
        for run in raw("2026-11-18-growth-and-stack-cuda")["runs"]
        if (run["task"], run["arm"], run["max_steps"]) == (task, arm, steps)
        and math.isclose(run["learning_rate"], rate, rel_tol=1e-6)
    }


GROWN = "grown at 50 %"
ROWS = {
    "| growth, GPT-2 124M,": (("lm124m", GROWN, 4e-3, 350), ("lm124m", "muon", 4e-3, 290, 350)),
    "| growth, bytes, 12 layers, 2 tokens": (("bytes-2", GROWN, 6e-3, 1160), ("bytes-2", "plain", 6e-3, 928, 1160)),
    "| growth, 5 tokens per parameter": (("bytes-5", GROWN, 6e-3, 1640), ("bytes-5", "plain", 6e-3, 1312, 1640)),
    "| growth, 20 tokens per parameter": (("bytes-20", GROWN, 6e-3, 2900), ("bytes-20", "plain", 6e-3, 2320, 2900)),
    "| six layers all the way": (("bytes-5", "six layers", 6e-3, 1640), ("bytes-5", "plain", 6e-3, 1312, 1640)),
    "| Muon, 124M, 350 steps": (("lm124m", "muon", 4e-3, 350), ("lm124m", "adamw", 7e-4, 700, 850)),
    "| Muon and growth, 124M,": (("lm124m", GROWN, 4e-3, 350), ("lm124m", "adamw", 7e-4, 700, 850)),
}


def of_row(name: str) -> list[float]:
    """The speed-up of each seed of a row."""
    mine, (task, arm, rate, shorter, longer) = ROWS[name]
    plain = stack_runs(task, arm, rate, longer)
    fall = slope(stack_runs(task, arm, rate, shorter)[1], plain[1])
    return [sooner(run, plain[seed], fall) for seed, run in sorted(stack_runs(*mine).items())]


@pytest.mark.parametrize("name", ROWS)
def test_how_much_sooner_with_growth(name: str) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(name))
    logs = [math.log(ratio) for ratio in of_row(name)]
    assert len(logs) == 3
    mean, half = statistics.fmean(logs), STUDENT * statistics.stdev(logs) / math.sqrt(3)
    low, middle, high = (math.exp(value) for value in (mean - half, mean, mean + half))
    assert row.endswith(f"| {middle:.3f}x [{low:.3f}, {high:.3f}] |")
    if "124M" in row:
        tokens = 350 * 16 * 1024 / 124.4e6
        assert f"{tokens:.2f} tokens per parameter" in row


def test_the_verdict_on_growth() -> None:
    """The page of growth, and rows of two seeds."""
    verdict = " ".join((ROOT / "docs" / "growth.md").read_text("utf-8").split())
    means = {name: math.exp(statistics.fmean(map(math.log, of_row(name)))) for name in ROWS}
    first, two, five, twenty, six = (means[name] for name in list(ROWS)[:5])
    assert f"loss **{first:.2f}x [1.22, 1.27] sooner**, in runs of only 0.05 tokens per parameter" in verdict
    assert f"{two:.2f}x at 2 tokens per parameter, {five:.2f}x at 5, {twenty:.2f}x [0.98, 1.46] at 20" in verdict
    assert f"{six:.2f}x at 5 tokens per parameter" in verdict
    runs = {(run["arm"], run["seed"], run["max_steps"]): run for run in raw("2026-11-18-muon-stack-cuda")["runs"]}
    plain = {1: runs["+ beta2, rest x2", 1, 1200], 2: runs["all", 2, 1200]}
    fall = slope(runs["all", 1, 1020], plain[1])
    small = [sooner(runs["all, growth .5", seed, 1200], plain[seed], fall) for seed in (1, 2)]
    assert f"it is worth {small[0]:.2f}x and {small[1]:.2f}x (two seeds" in verdict
    page = " ".join((ROOT / "docs" / "results.md").read_text("utf-8").split())
    late = sooner(runs["all, growth .65", 1, 1200], plain[1], fall)
    assert f"growth was worth {small[0]:.2f}x and {small[1]:.2f}x here, at 65 % {late:.2f}x" in page
    told = []
    for task, shorter, longer in (("bytes-5", 1312, 1640), ("bytes-20", 2320, 2900)):
        whole = stack_runs(task, "plain", 6e-3, longer)[1]
        fall = slope(stack_runs(task, "plain", 6e-3, shorter)[1], whole)
        told += [sooner(stack_runs(task, f"grown at {at} %", 6e-3, longer)[1], whole, fall) for at in (65, 50)]
    assert f"was worth {told[0]:.2f}x at 5 tokens per parameter and {told[2]:.2f}x at 20" in page
    assert f"where 50 % was {told[1]:.2f}x and {told[3]:.2f}x" in page


def test_growth_over_the_adamw_of_november() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    runs = raw("2026-11-15-campaign-lm124m-adamw")["runs"]
    known = {(run["arm"], run["learning_rate"], run["seed"], run["max_steps"]): run for run in runs}
    fall = slope(stack_runs("lm124m", "adamw", 7e-4, 700)[1], stack_runs("lm124m", "adamw", 7e-4, 850)[1])
    found = {
        arm: [
            sooner(stack_runs("lm124m", arm, 4e-3, 350)[seed], known["plain", 0.001, seed, 700], fall)
            for seed in (1, 2)
        ]
        for arm in ("muon", GROWN)
    }
    muon, grown = ([f"{ratio:.2f}x" for ratio in found[arm]] for arm in ("muon", GROWN))
    assert f"| {', '.join(muon)}; **{', '.join(grown)}** |" in page


def test_the_plan_for_a_time_was_checked_by_training() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    found = raw("2026-11-19-plan-time-cpu")
    lowest = min(row["losses"][0] for row in found["rows"])
    for row in found["rows"]:
        shape = f"{row['layers']} | {row['width']} | {row['batch']} | {row['steps']:,} | {row['losses'][0]:.4f}"
        assert f"| {row['name']} | {shape} |" in page
    planned, default = (next(r["losses"][0] for r in found["rows"] if r["name"] == n) for n in ("planned", "default"))
    assert f"The planned one ended {100 * (planned / lowest - 1):.1f} % above the lowest" in page
    assert f"the default model ended {100 * (default / lowest - 1):.1f} % above it" in page


def test_what_transformers_and_peft_read_back() -> None:
    page = " ".join((ROOT / "docs" / "finetune.md").read_text(encoding="utf-8").split())
    found = raw("2026-11-19-smollm2-readback")
    assert len(found["rows"]) == found["questions"]
    assert all(len(row["answers"]) == 4 and len(set(row["answers"].values())) == 1 for row in found["rows"])
    assert f"**{found['same_tokens']} of {found['questions']}** answers token for token" in page
    assert f"held-out loss {found['final_val_loss']:.3f} at the end" in page
    assert f"{found['accuracy']:.1%}".replace("%", " %") + f" of {found['options']['answers']} held-out" in page
    assert f"are up to {found['largest_difference_of_logits']:.2f} from" in page
    assert (len(found["learning_rate"]["tried"]), found["learning_rate"]["cost"]) == (3, 0.25)


def test_muon_on_124_million_parameters() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    muon = [
        run
        for run in raw("2026-11-15-campaign-lm124m-muon")["runs"]
        if (run["arm"], run["learning_rate"], run["max_steps"]) == ("plain", 0.002, 350)
    ]
    adamw = raw("2026-11-15-campaign-lm124m-adamw")["runs"]
    ratios = []
    for seed in (1, 2):
        mine = next(run for run in muon if run["seed"] == seed)
        theirs = {
            run["max_steps"]: run
            for run in adamw
            if (run["arm"], run["learning_rate"], run["seed"]) == ("plain", 0.001, seed)
        }
        assert theirs[525]["loss"] > mine["loss"], "AdamW needs more than half as many steps again"
        ratios.append(theirs[700]["seconds"] / mine["seconds"])
    assert "**Muon is worth {:.2f}x and {:.2f}x in time**".format(*reversed(ratios)) in page


def test_the_rate_that_finds_itself(readme: str) -> None:
    runs = raw("2026-11-15-finetune-banking77-auto-cpu")["results"]
    auto = {run["seed"]: run for run in runs if run["arm"] == "auto"}
    best = {run["seed"]: run for run in runs if run["arm"] == "plain" and run["rate"] == 0.01}
    assert all(auto[seed]["loss"] == best[seed]["loss"] for seed in best)
    cost = sum(run["seconds"] for run in auto.values()) / sum(run["seconds"] for run in best.values())
    assert f"for {cost:.1f} runs" in readme


def test_the_rate_that_finds_itself_at_124_million_parameters(readme: str) -> None:
    runs = raw("2026-11-15-finetune-124m-cuda")["parts"][0]["results"]
    auto = [run for run in runs if run["arm"] == "auto"]
    best = [run for run in runs if run["arm"] == "plain" and run["rate"] == 0.003]
    losses = [statistics.mean(run["loss"] for run in some) for some in (auto, best)]
    cost = sum(run["seconds"] for run in auto) / sum(run["seconds"] for run in best)
    assert "[{:.3f} against {:.3f}]".format(*losses) in readme
    assert f"(docs/results.md#fine-tuning) for {cost:.1f}." in readme


def test_leaps_do_not_pay_on_language_models(readme: str) -> None:
    arms = [
        arm
        for name in ("campaign-lm30m-adamw", "campaign-lm30m-muon-1200")
        for arm in raw(f"2026-11-15-{name}")["analysis"]["arms"]
        if arm["arm"].startswith("leaps, ")
    ]
    ratios = [arm["speedup"]["mean"] for arm in arms]
    assert len(ratios) == 5
    assert f"leaps, when forced, {min(ratios):.2f}x to {max(ratios):.2f}x" in readme


def test_what_idle_prediction_costs(readme: str) -> None:
    idle = raw("2026-11-15-idle-overhead-cuda-124m")["results"][0]["idle_percent"]
    assert f"{idle:.1f} % of a step at 124M" in readme
    costs = []
    for name in ("lm30m-adamw", "lm30m-muon", "lm30m-muon-1200", "lm124m-adamw", "lm124m-muon", "images-muon-cuda"):
        arms = {arm["arm"]: arm["seconds_mean"] for arm in raw(f"2026-11-15-campaign-{name}")["analysis"]["arms"]}
        costs.append(100 * (arms["hybrid"] / arms["plain"] - 1))
    assert f"{min(costs):.1f} % to {max(costs):.1f} % of runs of 2 to 14 s" in readme


def test_what_a_step_costs_beside_a_loop_of_ones_own(readme: str) -> None:
    rows = raw("2026-11-19-own-loop-cpu")["rows"]
    tried = [row["more_ms"] for row in rows if row["arm"] in ("trainer.step", "fit")]
    off = [row["more_ms"] for row in rows if row["arm"].endswith("off")]
    assert f"takes {min(tried):.2f} to {max(tried):.2f} ms more on a CPU" in readme
    assert f"({min(off):.2f} to {max(off):.2f} ms with prediction off)" in readme
    own, fitted = (next(row["ms_per_step"] for row in rows if row["arm"] == arm) for arm in (rows[0]["arm"], "fit"))
    assert f"{100 * (fitted / own - 1):.0f} % for a network of steps of {own:.2f} ms" in readme


def test_speed_on_a_gpu(readme: str) -> None:
    arms = raw("2026-11-19-throughput-large-cuda")["results"]["batch 64"]
    speeds = {name: values["tokens_per_second"] for name, values in arms.items()}
    ours = next(speed for name, speed in speeds.items() if name.startswith("foretrain"))
    plain = speeds["plain loop, bf16 compiled"]
    assert f"{ours:,.0f} against {plain:,.0f} tokens/s" in readme
    assert f"{ours / plain:.2f}x" in readme


def test_kills(readme: str) -> None:
    counts = [
        mode
        for part in raw("2026-11-15-crash-matrix")["counts"].values()
        for name, mode in part.items()
        if name != "control"
    ]
    kills, passes = (sum(mode[key] for mode in counts) for key in ("points", "PASS"))
    assert kills == passes
    assert f"{kills} interruptions" in readme


def test_faults(readme: str) -> None:
    found = raw("2026-11-16-thousand-faults")
    counts = found["all"]
    assert counts["failures"] == 0
    assert f"{counts['items']:,} drawn faults" in readme
    assert f"over {len(found['configurations'])} configurations" in readme
    assert f"{counts['same bits']} runs ended with the same bits, {counts['as promised']} as promised" in readme


def test_what_attack_finds() -> None:
    pages = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    fuzzed, mutants, faults = (raw(f"2026-11-16-{name}") for name in ("fuzz", "mutants", "thousand-faults"))
    codes = {code: sum(row["codes"].get(code, 0) for row in fuzzed["rows"]) for code in "210"}
    assert fuzzed["findings"] == 0
    assert f"{fuzzed['inputs']:,} inputs over {len(fuzzed['rows'])} pairs" in pages
    assert f"exit code 2 {codes['2']:,} times, 0 {codes['0']:,} times, 1 {codes['1']:,} times" in pages
    assert f"the slowest took {fuzzed['slowest_cpu_seconds']:.1f} s" in pages
    noticed = mutants["counts"]["killed"] + mutants["counts"]["timeout"]
    assert f"**{noticed} of {len(mutants['rows'])} are noticed**" in pages
    assert f"{faults['all']['items']:,} items, seed {faults['seed']}, {faults['all']['processes']:,} processes" in pages
    for name, one in faults["faults"].items():
        assert f"| {name} | {one['items']} | {one['same bits']} | {one['as promised']} | {one['failures']} |" in pages
    for arm in raw("2026-11-16-long-run-cpu")["arms"].values():
        verdict = arm["verdict"]
        assert f"| {verdict['memory_mb_per_1000_steps']} MB |" in pages
        assert f"| {verdict['log_bytes_per_step']:.0f} bytes |" in pages


LANGUAGE_FAMILIES = ("track_1_short", "track_2_medium", "track_3_optimization", "multipowerlaw")


def test_forecasts_of_public_runs(readme: str) -> None:
    found = raw("2026-11-19-forecast-runs-longer-falls")
    rows = [json.loads(row) for row in found["errors: method, family, cut, runs, median %, 90th percentile %"]]

    def errors(method: str) -> str:
        """At 25, 50 and 75 %, the mean over families of their medians."""
        at = [
            statistics.mean(
                median for name, family, cut, _, median, _ in rows if (name, cut) == (method, share) and family in known
            )
            for share in (0.25, 0.5, 0.75)
        ]
        return "{:.1f}, {:.1f} and {:.1f} %".format(*at)

    known = LANGUAGE_FAMILIES
    assert f"language models: {errors('cold')} error at 25, 50 and 75 % of the run" in readme
    assert f"{errors('sibling')} with one finished run beside it" in readme


def test_constants_of_forecasts_that_never_saw_the_family(readme: str) -> None:
    page = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
    found = raw("2026-11-19-forecast-constants-longer-falls")["families"]
    means = []
    for cut in ("25%", "50%", "75%"):
        cells = [found[family]["errors"]["without it"][cut] for family in (*LANGUAGE_FAMILIES, "deepobs", "taskset")]
        means.append(statistics.fmean(median for median, _ in cells[:4]))
        row = " | ".join(f"{median:.2f} ({far:.1f})" for median, far in cells)
        assert f"| **chosen without the family** | {cut[:2]} % | {row} | {means[-1]:.2f} |" in page
    text = "{:.1f}, {:.1f} and {:.1f} %".format(*means)
    assert f"of a kind of run that its constants never saw rather {text}" in readme
    assert text in " ".join(page.split())


def test_intervals_of_ten_finished_runs() -> None:
    page = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
    found = raw("2026-11-19-forecast-runs-longer-falls")
    rows = found["own: intervals from ten finished runs, family, cut, runs, inside %, median width %"]
    cells = {tuple(json.loads(row)[:3]): json.loads(row)[4:] for row in rows}
    families = ("track_1_short", "track_2_medium", "track_3_optimization", "deepobs", "taskset")
    for setting, cuts in (("its kind", (0.25, 0.5, 0.75)), ("other families", (0.5, 0.75))):
        for cut in cuts:
            known = [cells.get((setting, family, cut)) for family in families]
            text = " | ".join("-" if cell is None else f"{cell[0]:.0f} ({cell[1]:.1f})" for cell in known)
            mean = statistics.fmean(cell[0] for cell in known if cell is not None)
            assert f"| of {setting} | {cut:.0%}".replace("%", " %") + f" | {text} | {mean:.0f} |" in page
    silent, asked = found["no forecast: family, [silent, asked for]"]["deepobs"]
    assert f"DeepOBS ({silent} of {asked}" in page


def test_how_much_longer_falls_of_the_rate_are_worth() -> None:
    page = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
    found = raw("2026-11-19-forecast-constants-longer-falls")
    told = {"factor and drop": "errors at 25, 50 and 75 %", "the drop alone, no factor": "errors there"}
    for name, key in told.items():
        for place, seen in enumerate((25, 50, 75)):
            errors = [found["longer falls"][family][key][place] for family in LANGUAGE_FAMILIES]
            text = " | ".join(f"{one:.2f}" for one in (*errors, statistics.fmean(errors)))
            assert f"| {name} | {seen} % | {text} |" in page
    factors = [family["chosen without it"]["_LONGER"] for family in found["families"].values()]
    assert f"without a family: {min(factors)} to {max(factors)}, in use 1." in " ".join(page.split())


def test_annealed_copies(readme: str) -> None:
    page = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
    found = raw("2026-11-19-forecast-copies-longer-falls-cpu")
    tables = list(found["tables"].values())
    for place, row in enumerate(tables[0]):
        cells = [f"{table[place]['median_error']:.1f} ({table[place]['worse_than_without']})" for table in tables]
        assert f"| {100 * row['seen']:.0f} % | {row['copies']} | {' | '.join(cells)} |" in page
    text = " ".join(page.split())
    cold = [table[0]["median_error"] for table in tables]
    assert f"runs of a minute {min(cold):.0f} to {max(cold):.0f} % at 25 %" in readme
    without, one = ([table[place]["median_error"] for table in tables] for place in (0, 1))
    assert "{:.1f}, {:.1f} and {:.1f} % with one copy, {:.1f} % on other texts".format(*one) in text
    assert "(without any copy {:.1f}, {:.1f}, {:.1f} and {:.1f} %)".format(*without) in text
    lines = found["median error at 25 % of a line through two copies"].values()
    assert "is off by {:.1f}, {:.1f}, {:.1f} and {:.1f} %".format(*lines) in text
    far = [pair["ends_apart"] for pair in found["runs that look alike until 25 %"] if pair["ends_apart"] > 10]
    assert len(far) == 6
    assert f"six end {min(far):.0f} to {max(far):.0f} % apart" in text


def test_a_finished_run_beside_own_runs(readme: str) -> None:
    page = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
    found = raw("2026-11-19-forecast-copies-longer-falls-cpu")["with one finished run of any file beside it"]

    def errors(way: str, kind: str, seen: float) -> list[float | None]:
        medians = []
        for rows in found[way].values():
            known = [row["median_error"] for row in rows if (row["finished"], row["seen"]) == (kind, seen)]
            medians.append(known[0] if known else None)
        return medians

    for kind in ("another seed", "another rate"):
        for seen in (0.25, 0.5, 0.75):
            pairs = zip(errors("scatter does not count", kind, seen), errors("now", kind, seen), strict=True)
            cells = ["-" if now is None else f"{before:.1f} → {now:.1f}" for before, now in pairs]
            assert f"| {kind} | {100 * seen:.0f} % | {' | '.join(cells)} |" in page
    beside = [one for one in errors("now", "another seed", 0.25) if one is not None]
    assert f"{min(beside):.1f} to {max(beside):.1f} % beside a finished one of another seed" in readme


def test_forecasts_of_twelve_own_runs() -> None:
    page = " ".join((ROOT / "docs" / "forecast.md").read_text(encoding="utf-8").split())
    found = raw("2026-11-19-forecast-own-scatter-cpu")
    told = found["summary"]
    assert "off by {:+.1f}, {:+.1f} and {:+.1f} %".format(*told["first_run_errors_percent"]) in page
    assert told["first_run_held"] == [True, False, False], "two of its three intervals missed"
    assert "off by {:.1f}, {:.1f} and {:.1f} %".format(*told["later_runs_median_error_percent"].values()) in page
    assert f"of their {told['later_runs_intervals']} intervals {told['later_runs_held']} held" in page
    assert told["first_calibrated"] == 11
    for one in found["seed-3 afterwards"]:
        assert (
            f"│ seed-3 │ {one['seen_steps']} of 400 │ {one['loss']:.2f} [{one['low']:.2f}, {one['high']:.2f}] │" in page
        )
    for one in found["runs"][2]["checks"]:
        end = f"{one['loss']:.2f} [{one['low']:.2f}, {one['high']:.2f}], {one['error_percent']:+.2f} %"
        assert f"step {one['step']}: {end}, held" in page
    for (one,) in found["a public run, cut off"].values():
        assert f"│ 9,584 of 24,000 │ {one['loss']:.2f} [{one['low']:.2f}, {one['high']:.2f}] │" in page


def test_rates_that_are_found(readme: str) -> None:
    above = {}
    for task, found in raw("2026-11-18-auto-rate-cpu")["tasks"].items():
        runs = [run for run in found["runs"] if run["seed"] == 1]
        best = min(run["test"] for run in runs if run["rate"] != "auto")
        (auto,) = [run for run in runs if run["rate"] == "auto"]
        above[task] = 100 * (auto["test"] / best - 1)
        assert auto["backward_passes"] <= 1.155 * auto["steps"]
    muon = [above[task] for task in above if task.startswith(("bytes", "other")) and task.endswith("muon")]
    assert f"{-min(muon):.1f} % below to {max(muon):.1f} % above (Muon)" in readme
    assert f"a classifier {above['digits']:.1f} % above" in readme
    passes = raw("2026-11-19-auto-rate-passes-cpu")["tasks"]
    gaps = sorted(passes["diabetes"]["verdict"]["gap_percent"])
    assert f"it ends **{gaps[0]:.0f} to {gaps[-1]:.0f} % above**" in readme
    kept = sorted(with_best_weights(passes["diabetes"]))
    assert f"with its best weights {-kept[0]:.1f} % below to {kept[-1]:.1f} % above" in readme


def test_rates_that_are_found_for_adamw_with_its_longer_warmup(readme: str) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    titles = {
        "bytes-adamw": "GPT of bytes, 2 x 64, tiny Shakespeare, AdamW",
        "bytes-wiki-adamw": "the same on Wikipedia, AdamW",
    }
    titles["other-adamw"] = "**other size, text, batch**: 2 x 96, 6 x 48 bytes of TinyStories, AdamW"
    tasks, gaps = raw("2026-11-20-auto-rate-warmup-cpu")["tasks"], []
    for name, title in titles.items():
        found = tasks[name]["verdict"]
        gaps += found["gap_percent"]
        rates = ", ".join(short(rate) for rate in found["auto_rates"])
        row = f"| {title} | {short(found['best_rate'])}, {found['best_test']:.4f} | {rates}; {found['auto_test']:.4f} |"
        told = ", ".join(f"{gap:+.1f}" for gap in found["gap_percent"])
        assert f"{row} **{told} %** | {found['cost_in_runs']:.2f} |" in page
        assert max(one["backward_passes"] / one["steps"] for one in tasks[name]["runs"]) <= 1.15
    for name, title in (("words-adamw", "GPT of 8,192 words, 2 x 64, AdamW"), ("words-muon", "the same, Muon")):
        found = tasks[name]["verdict"]
        best, auto = (f"{found[key]:.4f}" for key in ("best_test", "auto_test"))
        rates = short(found["best_rate"]), short(found["auto_rates"][0])
        row = f"| {title}, the best of three | {rates[0]}, {best} | {rates[1]}, {auto} |"
        assert row in page
        assert f"{found['gap_percent'][0]:+.1f} %" in page.split(row)[1].split("\n")[0]
    assert f"{-min(gaps):.1f} % below to {max(gaps):.1f} % above (AdamW)" in readme
    verdict = " ".join((ROOT / "docs" / "learning-rate.md").read_text(encoding="utf-8").split())
    mean = statistics.fmean(gaps)
    assert (
        f"{-min(gaps):.1f} % below to {max(gaps):.1f} % above (a CPU, three tasks, two seeds, mean {mean:.1f} %"
        in verdict
    )


def short(rate: float) -> str:
    return f"{rate:.1e}".replace("e-0", "e-").replace(".0e", "e")


def test_rates_that_are_found_on_a_gpu(readme: str) -> None:
    found, page = raw("2026-11-19-auto-rate-cuda"), " ".join((ROOT / "docs" / "results.md").read_text("utf-8").split())
    tasks, warm = found["tasks"], found["warmups"]

    def gaps(task: str, best: float) -> list[float]:
        autos = [run["test"] for run in tasks[task]["runs"] if run["rate"] == "auto"]
        return [100 * (auto / best - 1) for auto in autos]

    muon = tasks["lm30m-wiki-muon"]["verdict"]
    told = " and ".join(f"{gap:.1f}" for gap in muon["gap_percent"])
    assert f"GPT 30M with Muon on an H200 {told} % above" in readme
    assert f"the best of seven ({muon['best_test']:.4f} mean of two seeds)" in page
    adamw = tasks["lm30m-wiki-adamw"]["verdict"]
    assert f"AdamW {' and '.join(f'{gap:.1f}' for gap in adamw['gap_percent'])} % against 1e-3" in page
    at = {(run["task"], run["rate"], run["warmup"]): run["test"] for run in warm}
    long = at["lm30m-wiki-adamw", 0.002, "0.1"]
    told = " and ".join(f"{gap:.1f}" for gap in gaps("lm30m-wiki-adamw", long))
    assert f"{long:.4f} (one seed), and `auto` was {told} % above that" in page
    swept = [run["test"] for run in tasks["lm124m-wiki-adamw"]["runs"] if run["rate"] != "auto"]
    (short_warmup,) = gaps("lm124m-wiki-adamw", min(swept))
    (long_warmup,) = gaps("lm124m-wiki-adamw", at["lm124m-wiki-adamw", 0.0005, "0.1"])
    assert f"AdamW {short_warmup:+.1f} % against 5e-4, the best of six, and {long_warmup:+.1f} % against" in page
    assert len(swept) == 6
    of_muon = 100 * (at["lm124m-wiki-muon", "auto", ""] / at["lm124m-wiki-muon", 0.004, ""] - 1)
    assert f"Muon {of_muon:+.1f} % against 4e-3, the better of two" in page
    assert f"**{of_muon:.1f} to {long_warmup:.1f} % above**" in readme


def test_how_long_the_warmup_should_be() -> None:
    page = " ".join((ROOT / "docs" / "results.md").read_text("utf-8").split())
    titles = {
        "bytes-adamw": "GPT of bytes, tiny Shakespeare, AdamW",
        "bytes-wiki-adamw": "the same on Wikipedia, AdamW",
    }
    titles |= {"words-adamw": "GPT of 8,192 words, AdamW", "words-muon": "the same, Muon, one rate"}
    titles |= {"bytes-muon": "GPT of bytes, tiny Shakespeare, Muon", "digits": "digits, convolutions, AdamW"}
    titles["cancer"] = "breast cancer, AdamW (overfits)"
    runs = raw("2026-11-20-warmup-cpu")["runs"]

    def means(task: str, share: float) -> dict[float, float]:
        own = [run for run in runs if (run["task"], run["warmup"]) == (task, share)]
        return {
            rate: statistics.fmean(run["test"] for run in own if run["rate"] == rate)
            for rate in {r["rate"] for r in own}
        }

    for task, title in titles.items():
        cells = []
        for share in (0.025, 0.05, 0.1, 0.2):
            found = means(task, share)
            best = min(found, key=lambda rate: found[rate], default=None)
            cells.append("" if best is None else f"{found[best]:.4f} ({short(best)})")
        assert " ".join(f"| {title} | {' | '.join(cells)} |".split()) in page
    for task, words in (("bytes-adamw", "at 8e-3 bytes end at"), ("bytes-wiki-adamw", "on Wikipedia at")):
        ends = [f"{means(task, share)[0.008]:.4f}" for share in (0.025, 0.05, 0.1, 0.2)]
        assert f"{words} {', '.join(ends[:3])} and {ends[3]}" in page
    found = raw("2026-11-19-auto-rate-cuda")
    at = {(run["task"], run["rate"], run["warmup"]): run["test"] for run in found["warmups"]}
    swept = {run["rate"]: run["test"] for run in found["tasks"]["lm30m-wiki-adamw"]["runs"] if run["seed"] == 1}
    assert f"{swept[0.001]:.4f} at 1e-3 and {swept[0.002]:.4f} at 2e-3" in page
    ten = [at["lm30m-wiki-adamw", rate, "0.1"] for rate in (0.001, 0.002)]
    assert f"10 %: {ten[0]:.4f} and {ten[1]:.4f}; 20 %: {at['lm30m-wiki-adamw', 0.002, '0.2']:.4f} at 2e-3" in page


def with_best_weights(task: dict[str, Any]) -> list[float]:
    """How far `auto` with its best weights is above the end of the best of seven rates, in percent, by seed."""
    best = task["verdict"]["best_rate"]
    ends = {run["seed"]: run["test"] for run in task["runs"] if run["rate"] == best}
    return [100 * (run["best"]["test"] / ends[run["seed"]] - 1) for run in task["runs"] if run["rate"] == "auto"]


def test_rates_of_runs_that_pass_over_their_data_often() -> None:
    page = (ROOT / "docs" / "learning-rate.md").read_text(encoding="utf-8")
    for task in raw("2026-11-19-auto-rate-passes-cpu")["tasks"].values():
        auto = [run for run in task["runs"] if run["rate"] == "auto"]
        assert len(auto) == 3
        at = ", ".join(f"{run['best']['step'] / run['steps'] * run['passes']:.0f}" for run in auto)
        cells = [
            f"{', '.join(f'{gap:+.1f}' for gap in gaps)} %"
            for gaps in (task["verdict"]["gap_percent"], with_best_weights(task))
        ]
        assert f"| {auto[0]['passes']:.0f} | {at} | {' | '.join(cells)} |" in page


def test_sweeps_of_public_runs(readme: str) -> None:
    found = raw("2026-11-18-sweeps-taskset-more-cpu")["100 configurations"]["foretrain"]
    without = found["without_audits"]
    price = f"{100 * without['cost']:.0f} runs ({100 * found['cost']:.0f} with its audit)"
    within = min(found["within_1_percent"], without["within_1_percent"])
    assert (
        f"100 configurations for the price of {price}, within 1 % of the best in {math.floor(100 * within)} %" in readme
    )
    assert f"of {found['sweeps']} sweeps on TaskSet" in readme


def test_rates_that_copies_and_whole_runs_want() -> None:
    page = (ROOT / "docs" / "learning-rate.md").read_text(encoding="utf-8")
    for task in raw("2026-11-19-auto-rate-copies-cpu")["tasks"].values():
        seeds = task["verdict"]["best_rates"].values()
        assert len(seeds) == 2
        moments = ("copy at step 40", "copy at step 80", "whole run")
        cells = [", ".join(seed[moment] for seed in seeds) for moment in moments]
        assert f"| {' | '.join(cells)} |" in page


def test_forecasts_rank_the_runs_of_a_sweep() -> None:
    page = " ".join((ROOT / "docs" / "sweep.md").read_text(encoding="utf-8").split())
    found = raw("2026-11-19-sweeps-own-forecast-cpu")
    for pool in found["rankings"].values():
        at = " / ".join(f"{moment['forecast']['spearman']:.2f}" for moment in pool.values())
        assert f"forecast {at}" in page
    row = found["24 configurations"]["foretrain by forecast"]
    cells = (row["cost"], row["times_cheaper"], row["mean_regret"], row["within_1_percent"])
    assert "| ... ranked by forecast | {:.1%} | {:.1f} | {:.2%} | {:.0%} |".format(*cells) in page.replace(" %", "%")


def test_targets_that_were_met(readme: str) -> None:
    found = raw("2026-11-18-targets-cpu") | {"until_loss": raw("2026-11-19-targets-cpu")["until_loss"]}
    assert all(len(found[what]) == 10 for what in ("until_loss", "max_time"))
    assert all(abs(run["off_percent"]) <= 2 for what in ("until_loss", "max_time") for run in found[what])
    assert "ten of ten small runs each ended within 2 % of that" in readme
    page, runs = " ".join((ROOT / "docs" / "targets.md").read_text("utf-8").split()), found["until_loss"]
    longer = [run["steps"] / run["shortest_plain"] for run in runs]
    assert f"of the loss (worst {max(abs(run['off_percent']) for run in runs):.1f} %)" in page
    told = f"took {statistics.median(longer):.2f} times the steps (median; {min(longer):.2f} to {max(longer):.2f})"
    assert told in page
    shortest = sum(run["shortest_plain"] == min(map(int, run["plain_runs"])) for run in runs)
    assert f"does ({('no', 'one', 'two', 'three', 'four')[shortest]} of ten)" in page


def test_pruners_inside_optuna() -> None:
    page = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")
    document = raw("2026-11-19-optuna-pruners-cpu")
    names = {"foretrain": "foretrain", "median": "Optuna median", "hyperband": "Optuna hyperband"}
    for pruner, name in (names | {"successive halving": "Optuna successive halving"}).items():
        cells = []
        for task in ("constant rate", "rate falls to 0"):
            rows = [row for row in document["rows"] if (row["task"], row["pruner"]) == (task, pruner)]
            shares = ", ".join(f"{row['steps'] / (document['trials'] * 200):.0%}".removesuffix("%") for row in rows)
            cells += [f"{shares} %", str(sum(row["same_best"] for row in rows))]
        assert f"| {name} | {' | '.join(cells)} |" in page


@pytest.mark.parametrize(("kind", "name"), [("DDP", "ranks-faults"), ("FSDP2", "ranks-faults-fsdp2")])
def test_the_table_of_faults_of_several_processes(kind: str, name: str) -> None:
    """Every fault that was tried is on the page, in the words of its row."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    rows = raw(f"2026-11-19-{name}")["checks"]
    assert len(rows) == 24
    for row in rows:
        seen = row["seen"] if len(row["seen"]) <= 100 else f"{row['seen'][:100].rstrip()} ..."
        assert f"| {kind} | {row['name']} | {'yes' if row['well'] else '**no**'} | {seen} |" in page
    assert page.count(f"\n| {kind} | ") == len(rows)


def test_what_kept_code_saves() -> None:
    runs = raw("2026-11-19-compile-cache-cpu")["runs"]
    seconds = {
        kind: statistics.median(float(run["told"][0].split()[2]) for run in runs[kind]) for kind in ("cold", "warm")
    }
    said = f"{seconds['cold']:.0f} s the first time, {seconds['warm']:.1f} s from then on"
    for page in (ROOT / "docs" / "troubleshooting.md", ROOT / "CHANGELOG.md"):
        assert said in " ".join(page.read_text(encoding="utf-8").split()), page.name
