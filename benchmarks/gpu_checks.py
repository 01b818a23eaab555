"""What only a CUDA GPU can show, asserted: kernels, graphs, resume, precision, and that no step waits for the device.

python benchmarks/gpu_checks.py --out result.json
python benchmarks/gpu_checks.py --only graph_equals_eager resume_is_exact
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from foretrain import environment
from foretrain.config import from_mapping
from foretrain.data.loader import held_out_batches
from foretrain.engine.graphs import GraphedStep
from foretrain.hybrid.linearised.leaps import LinearisedLeaps
from foretrain.hybrid.moves.linearised import LinearisedKind
from foretrain.models import kernels
from foretrain.models.loss import linear_cross_entropy
from foretrain.trainer import HybridTrainer
from gpu_memory_checks import MEMORY_CHECKS
from gpu_muon_checks import MUON_CHECKS
from gpu_trainer import TOKENS, losses, trainer
from low_noise_problems import Settings, burgers


def kernel_equals_torch() -> str:
    worst = 0.0
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        for rows, vocab, columns in ((300, 50257, 50304), (17, 65, 65), (64, 5000, 5120)):
            logits = (3 * torch.randn(rows, columns, device="cuda")).to(dtype)
            targets = torch.randint(vocab, (rows,), device="cuda")
            targets[::5] = -100
            one, other = logits.clone(), logits.clone()
            by_kernel = kernels.softmax_gradient_(one, targets, vocab, -100, 2.0, True)
            by_torch = kernels._by_torch(other, targets, vocab, -100, 2.0, True)
            difference = max(float((by_kernel - by_torch).abs().max()), float((one - other).float().abs().max()))
            assert difference < tolerance, (dtype, rows, difference)
            assert torch.equal(one[::5], torch.zeros_like(one[::5]))
            worst = max(worst, difference)
    return f"largest difference {worst:.1e}"


def fused_loss_equals_plain() -> str:
    hidden = torch.randn(500, 64, device="cuda", requires_grad=True)
    weight = torch.randn(50304, 64, device="cuda", requires_grad=True)
    targets = torch.randint(50257, (500,), device="cuda")
    fused = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 50257, 128), (hidden, weight))
    plain = torch.autograd.grad(F.cross_entropy((hidden @ weight.T)[:, :50257], targets), (hidden, weight))
    difference = max(float((a - b).abs().max()) for a, b in zip(fused, plain, strict=True))
    assert difference < 1e-6, difference
    return f"largest gradient difference {difference:.1e}"


def graph_equals_eager() -> str:
    worst = 0.0
    for optimizer in ("adamw", "adam", "sgd", "muon"):
        common = {
            "optimizer.type": optimizer,
            "engine.compile": False,
            "precision.type": "fp32",
            "accumulation_steps": 2,
        }
        eager = losses(20, **common, **{"engine.cuda_graph": False})
        graph = losses(20, **common, **{"engine.cuda_graph": True})
        worst = max(worst, *(abs(a - b) for a, b in zip(eager, graph, strict=True)))
        assert worst < 1e-4, (optimizer, worst)
        assert eager[-1] < eager[0], optimizer
    return f"largest loss difference over 20 steps {worst:.1e}"


def recorded_gradient_equals_eager() -> str:
    """Chains take the gradient alone: as a graph it must be the eager one, also beside recorded whole steps."""
    made, loader = trainer(**{"engine.compile": False, "engine.cuda_graph": True, "precision.type": "fp32"})
    batches = iter(loader)
    worst = 0.0
    for step in range(12):
        batch = made.engine.to_device(next(batches))
        if step > 5:
            graph = (made.engine.gradient(batch), *(p.grad.clone() for p in made.engine.full_step.parameters))
            eager = (made.engine.full_step.gradient(batch), *(p.grad for p in made.engine.full_step.parameters))
            worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(graph, eager, strict=True)))
        made.step(batch)
    assert made.engine.execution._gradient is not None
    assert worst < 1e-5, worst
    return f"largest difference of loss and gradients {worst:.1e}"


def recorded_loss_equals_eager() -> str:
    """Probes and evaluations are recorded beside whole steps, in the same memory: neither may disturb the other."""
    made, loader = trainer(**{"engine.compile": False, "engine.cuda_graph": True, "precision.type": "fp32"})
    other, _ = trainer(**{"engine.compile": False, "engine.cuda_graph": True, "precision.type": "fp32"})
    batches = iter(loader)
    worst = 0.0
    for step in range(14):
        batch = made.engine.to_device(next(batches))
        one, two = made.step(batch), other.step(batch)
        assert abs(one.loss - two.loss) < 1e-5, (step, one.loss, two.loss)
        rows = (batch[0][:5], batch[1][:5])
        for part in (batch, rows, (batch[0][:3], batch[1][:3])):
            graph = float(made.engine.forward.forward_loss([part]))
            with torch.no_grad():
                eager = float(made.engine.full_step.loss(part))
            worst = max(worst, abs(graph - eager))
    assert made.engine.execution._loss is not None
    assert worst < 1e-5, worst
    return f"largest difference of the loss {worst:.1e}"


def precisions_learn() -> str:
    ends = {}
    for precision in ("fp32", "bf16", "fp16"):
        values = losses(40, **{"precision.type": precision})
        assert values[-1] < values[0] - 0.5, (precision, values[0], values[-1])
        ends[precision] = values[-1]
    assert max(ends.values()) - min(ends.values()) < 0.1, ends
    return ", ".join(f"{name} {value:.4f}" for name, value in ends.items())


def no_step_waits() -> str:
    """torch raises on every synchronising call while the mode is "error". Watched steps wait once per window."""
    plain = ({"engine.cuda_graph": False}, {"engine.cuda_graph": True}, {"precision.type": "fp16"})
    for settings in (*({"hybrid.mode": "off", **each} for each in plain), {"hybrid.window_steps": 30}):
        for optimizer in ("adamw", "muon"):
            made, loader = trainer(**{"optimizer.type": optimizer, "evaluation.ema_decay": 0.9, **settings})
            batches = iter(loader)
            for _ in range(8):
                made.step(next(batches))
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(20):
                    made.step(next(batches))
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return "20 steps each: adamw and muon, with and without graph, fp16, with averaging, and inside a watched window"


def idle_equals_plain() -> str:
    """Watching changes nothing: the same weights as the plain loop, bit for bit, with and without graphs."""
    for graph in (False, True):
        weights = []
        for mode in ("off", "leap"):
            settings = {"hybrid.mode": mode, "hybrid.warmup_steps": 20, "audit.time_budget": 0.0, "max_steps": 120}
            made, loader = trainer(**settings, **{"engine.cuda_graph": graph, "engine.deterministic": True})
            for _, batch in zip(range(120), loader, strict=False):
                made.step(batch)
            weights.append(torch.nn.utils.parameters_to_vector(made.model.parameters()).detach())
        assert torch.equal(*weights), f"graph {graph}: they differ by {float((weights[0] - weights[1]).abs().max())}"
    return "120 steps with prediction idle end with the plain loop's bits, eager and as a graph"


def moves_work() -> str:
    """All four phases on the GPU: leaps and rollouts with audits, and quasi-Newton leaps on an exact loss."""
    told = []
    for mode in ("leap", "rollout"):
        settings = {"hybrid.mode": mode, "hybrid.warmup_steps": 50, "max_steps": 600, "schedule.type": "constant"}
        settings |= {"hybrid.confidence_threshold": 0.0, "audit.time_budget": 0.2, "optimizer.learning_rate": 1e-4}
        made, loader = trainer(**settings)
        phases = set()
        for batch in loader:
            phases.add(made.step(batch).phase)
            if made.global_step >= 600 and not made.judging:
                break
        assert phases == {"warmup", "full", "predict", "correct"}, phases
        told.append(f"{mode}: {made.summary()['moves']}")
    config = {"device": "cuda", "max_steps": 300, "optimizer.type": "adam", "optimizer.weight_decay": 0.0}
    config |= {"schedule.type": "constant", "optimizer.learning_rate": 1e-3, "precision.type": "fp32"}
    torch.manual_seed(0)
    inputs = torch.randn(200, 5, device="cuda")
    targets = torch.sin(inputs.sum(1, keepdim=True))
    final = {}
    for mode in ("off", "leap"):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        made = HybridTrainer(
            model, None, lambda m, b: F.mse_loss(m(b[0]), b[1]), from_mapping({**config, "hybrid.mode": mode})
        )
        while made.global_step < 300 or made.judging:
            made.step((inputs, targets))
        final[mode] = made.engine.probe((inputs, targets))
    assert final["leap"] < 0.5 * final["off"], final
    return f"{'; '.join(told)}; exact loss after 300 steps {final['leap']:.2e} against {final['off']:.2e} without leaps"


def own_rates_are_followed() -> str:
    """A scheduler of one's own acts on every step, recorded or not; a rate that is a tensor is never waited for."""
    settings = {"hybrid.mode": "off", "engine.compile": False, "health.interval": 0, "precision.type": "fp32"}
    for rate, recorded in ((0.1, False), (torch.tensor(0.1, device="cuda"), True)):
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        made = HybridTrainer(
            model,
            optimizer,
            lambda model, batch: model.weight.sum() + batch.sum() * 0,
            from_mapping(settings),
            scheduler=scheduler,
        )
        batch, told, used = torch.ones(4, device="cuda"), [], []
        for step in range(12):
            made.checkup.health.rate_factor = 0.5 if step % 3 == 0 else 1.0
            before = model.weight.detach().clone()
            told.append(made.step(batch))
            used.append(before - model.weight.detach())
        expected = [0.1 * 0.9**step * (0.5 if step % 3 == 0 else 1.0) for step in range(12)]
        for wanted, result, moved in zip(expected, told, used, strict=True):
            assert abs(float(moved.mean()) - wanted) < 1e-4 * wanted + 1e-6, (rate, wanted, float(moved.mean()))
            assert abs(result.learning_rate - wanted) < 1e-6, (rate, wanted, result.learning_rate)
        assert made.engine.execution.records is recorded, rate
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            made.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "numbers and tensors, with recovery's factor, over 12 steps"


def resume_is_exact() -> str:
    """With deterministic operations: 40 steps at once equal 20 steps, a new process state, and 20 more."""
    settings = {
        "model.dropout": 0.1,
        "engine.compile": False,
        "engine.deterministic": True,
        "engine.cuda_graph": True,
        "evaluation.ema_decay": 0.9,
    }
    checked = []
    for optimizer in ("adamw", "muon"):
        with tempfile.TemporaryDirectory() as folder:
            ends = []
            for stop in (None, 20):
                made, loader = trainer(**settings, **{"optimizer.type": optimizer, "checkpoint.interval": 20})
                assert isinstance(made.engine.execution.step_for(next(iter(loader))), GraphedStep)
                held_out = held_out_batches(TOKENS[:20_000], 64, 8, 4)
                if stop is None:
                    made.fit(loader, held_out, out=f"{folder}/straight", progress=False)
                else:
                    source = Path(folder) / "straight" / "checkpoints"
                    target = Path(folder) / "resumed" / "checkpoints"
                    target.mkdir(parents=True)
                    (source / "step-00000020").rename(target / "step-00000020")
                    made.fit(loader, held_out, out=f"{folder}/resumed", resume=True, progress=False)
                ends.append({name: value.clone() for name, value in made.model.state_dict().items()})
            differences = [float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0]]
            checked.append(f"{optimizer}: largest weight difference {max(differences):.1e}")
            assert max(differences) == 0.0, checked
    return "; ".join(checked)


def _physics(recorded: bool = True) -> tuple[HybridTrainer, Any]:
    """A trainer of Burgers' equation, and its batch."""
    problem = burgers(Settings("cuda", 64, 1024))
    torch.manual_seed(1)
    values = {
        "max_steps": 100_000,
        "device": "cuda",
        "optimizer.type": "adam",
        "optimizer.weight_decay": 0.0,
        "optimizer.learning_rate": 3e-3,
        "schedule.type": "constant",
        "engine.cuda_graph": "auto" if recorded else False,
    }
    return HybridTrainer(problem.build(), config=from_mapping(values), **problem.handed_in), problem.batch(0)


def _leaps(trained: HybridTrainer) -> LinearisedLeaps:
    assert trained.policy is not None
    return next(kind for kind in trained.policy.kinds if isinstance(kind, LinearisedKind)).leaps


def recorded_leaps_equal_eager() -> str:
    """Residuals are left in fp32 without TF32, and leaps from graphs lower the loss as those without do."""
    runs = {recorded: _physics(recorded) for recorded in (True, False)}
    for trained, batch in runs.values():
        assert trained.engine.precision.name == "fp32"
        assert not torch.backends.cuda.matmul.allow_tf32
        for _ in range(20):
            trained.step(batch)
    found = {
        recorded: [float(trained.step(batch).loss) for _ in range(5)] for recorded, (trained, batch) in runs.items()
    }
    assert _leaps(runs[True][0]).lookout.recorded
    assert not _leaps(runs[False][0]).lookout.recorded
    worst = max(abs(one / other - 1) for one, other in zip(*found.values(), strict=True))
    assert worst < 0.05, found
    return f"losses after 10 to 15 leaps differ by {worst:.1e} at the most"


def leaps_resume_exactly() -> str:
    """In the middle of a chain whose leaps are replayed."""
    trained, batch = _physics()
    for _ in range(22):
        trained.step(batch)
    assert _leaps(trained).lookout.recorded
    state = trained.state_dict()
    state = torch.utils._pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, state)
    other, _ = _physics()
    other.load_state_dict(state)
    ends = []
    for one in (trained, other):
        for _ in range(10):
            one.step(batch)
        ends.append([p.detach().clone() for p in one.model.parameters()])
    worst = max(float((one - two).abs().max()) for one, two in zip(*ends, strict=True))
    assert worst == 0.0, f"weights differ by {worst}"
    return "10 leaps after it give the same bits"


CHECKS = (
    kernel_equals_torch,
    fused_loss_equals_plain,
    graph_equals_eager,
    recorded_gradient_equals_eager,
    recorded_loss_equals_eager,
    precisions_learn,
    no_step_waits,
    idle_equals_plain,
    moves_work,
    own_rates_are_followed,
    resume_is_exact,
    recorded_leaps_equal_eager,
    leaps_resume_exactly,
    *MUON_CHECKS,
    *MEMORY_CHECKS,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[check.__name__ for check in CHECKS], metavar="CHECK")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU")
    record: dict[str, Any] = {
        "date": f"{datetime.now().astimezone():%Y-%m-%d}",
        "command": " ".join(["python benchmarks/gpu_checks.py", *sys.argv[1:]]),
    }
    record["environment"] = environment.describe("cuda")
    failed = 0
    for check in CHECKS:
        if options.only and check.__name__ not in options.only:
            continue
        torch._dynamo.reset()
        torch.manual_seed(1)
        started = time.perf_counter()
        try:
            record[check.__name__] = check()
        except Exception as error:  # noqa: BLE001 - every check is reported
            failed += 1
            record[check.__name__] = f"FAILED: {type(error).__name__}: {error}"
        taken = time.perf_counter() - started
        print(f"{check.__name__:32} {record[check.__name__]} ({taken:.0f} s)", flush=True)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
