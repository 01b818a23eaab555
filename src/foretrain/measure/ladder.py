"""The attribution ladder: every rung is one change on top of the one below."""

from __future__ import annotations

from typing import Any

from foretrain.config import Config
from foretrain.engine.moments import Moments
from foretrain.engine.precision import choose_device
from foretrain.errors import InputError
from foretrain.measure.plan import PLAIN_SETTINGS, Arm

LOOK_AHEAD = 0.3
AVERAGE = 0.99
HALF = 0.5
"""Share of the blocks that growth begins with, and of the run after which it goes on with all."""
SHORTER = 0.6
"""Length of the rungs from the better optimizer on: they reach in it what AdamW reaches in the whole run."""


def rungs(config: Config, blocks: int = 0) -> tuple[Arm, ...]:
    """Return the ladder from the slowest way to run `config` to everything on. Rungs that this device does not have are
    left out.

    blocks: those of the model; growth is a rung where there are at least two, and enough steps to judge it.
    """
    if config.optimizer.type != "adamw":
        raise InputError(
            f"--ladder starts from AdamW, but optimizer.type = {config.optimizer.type}; add --set optimizer.type=adamw"
        )
    eager: dict[str, Any] = {"engine.compile": False, "engine.cuda_graph": False, "engine.fused_loss": False}
    base = PLAIN_SETTINGS | {"evaluation.ema_decay": 0.0}
    muon = base | {"optimizer.type": "muon", "optimizer.muon_scale": "match_rms_adamw"}
    steps = round(SHORTER * config.max_steps)
    grows = blocks > 1 and not config.growth.stages and Moments((HALF,), steps).fits()
    grown = muon | ({"growth.layers": int(HALF * blocks), "growth.at": HALF} if grows else {})
    ahead = grown | {"predictor.beta": config.predictor.beta or LOOK_AHEAD}
    leaps = ahead | {"hybrid.mode": "leap"}
    averaged = leaps | {"evaluation.ema_decay": config.evaluation.ema_decay or AVERAGE}
    growth = (Arm("... and growth", "half of the blocks at first", grown, "", "", "growth.layers", SHORTER),)
    ladder = []
    if choose_device(config.device).type == "cuda":
        fp32 = base | eager | {"precision.type": "fp32", "precision.tf32": False}
        bf16 = base | eager | {"precision.type": "bf16"}
        ladder = [
            Arm("fp32 eager", "PyTorch as it comes", fp32, "", "plain", "precision.type", once=True),
            Arm("bf16 eager", "half the bits", bf16, "", "plain", "precision.type", once=True),
        ]
    return (
        *ladder,
        Arm("AdamW, fast engine", "compiled and fused: the plain loop", base, "", "plain", "engine"),
        Arm("Muon", "a better optimizer", muon, "", "", "optimizer.type", SHORTER),
        *(growth if grows else ()),
        Arm("... and look-ahead", "gradients at the predicted point", ahead, "", "", "predictor.beta", SHORTER),
        Arm("... and leaps", "moves ahead, audited", leaps, "", "... and look-ahead", "hybrid.mode", SHORTER),
        Arm(
            "... and averaging",
            "at averaged weights",
            averaged,
            "",
            "... and look-ahead",
            "evaluation.ema_decay",
            SHORTER,
        ),
    )
