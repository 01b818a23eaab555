"""The attribution ladder: every rung is one change on top of the one below."""

from __future__ import annotations

from typing import Any

from foretrain.config import Config
from foretrain.engine.precision import choose_device
from foretrain.errors import InputError
from foretrain.measure.plan import PLAIN_SETTINGS, Arm

MUON_RATE = 0.01
LOOK_AHEAD = 0.4
AVERAGE = 0.99


def rungs(config: Config) -> tuple[Arm, ...]:
    """From the slowest way to run `config` to everything on. Rungs that this device does not have are left out."""
    if config.optimizer.type != "adamw":
        raise InputError(f"--ladder starts from AdamW; the configuration has optimizer.type = {config.optimizer.type}")
    eager: dict[str, Any] = {"engine.compile": False, "engine.cuda_graph": False, "engine.fused_loss": False}
    base = PLAIN_SETTINGS | {"evaluation.ema_decay": 0.0}
    muon = base | {
        "optimizer.type": "muon",
        "optimizer.learning_rate": MUON_RATE,
        "optimizer.rest_learning_rate": config.optimizer.learning_rate,
    }
    ahead = muon | {"predictor.beta": config.predictor.beta or LOOK_AHEAD}
    leaps = ahead | {"hybrid.mode": "leap"}
    averaged = leaps | {"evaluation.ema_decay": config.evaluation.ema_decay or AVERAGE}
    ladder = []
    if choose_device(config.device).type == "cuda":
        fp32 = base | eager | {"precision.type": "fp32", "precision.tf32": False}
        ladder = [
            Arm("fp32 eager", "PyTorch as it comes", fp32, "", "plain", "fp32, eager", once=True),
            Arm(
                "bf16",
                "half the bits",
                base | eager | {"precision.type": "bf16"},
                "",
                "plain",
                "bf16, eager",
                once=True,
            ),
        ]
    ladder += [
        Arm("AdamW, fast engine", "compiled, fused, bf16 on a GPU: the plain loop", base, "", "plain", "the engine"),
        Arm("Muon", "a better optimizer", muon, rung="optimizer.type = muon"),
        Arm("look-ahead", "the gradient at the predicted point", ahead, rung="predictor.beta"),
        Arm("leaps", "moves ahead, audited", leaps, "", "look-ahead", "hybrid.mode = leap"),
        Arm("averaging", "evaluated at averaged weights", averaged, "", "look-ahead", "evaluation.ema_decay"),
    ]
    return tuple(ladder)
