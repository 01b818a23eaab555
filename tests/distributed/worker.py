"""What a rank does in a test: the command line of foretrain, with something that happens to one rank at a step.

FAULTS: JSON of [attempt, rank, step, signal]: the rank sends itself the signal before that step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from foretrain.cli.app import main
from foretrain.trainer import HybridTrainer

PLAIN = HybridTrainer.step
HERE = [int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ["RANK"])]
FAULTS = [fault for fault in json.loads(os.environ.get("FAULTS", "[]")) if fault[:2] == HERE]


def step(self: HybridTrainer, batch: Any) -> Any:
    for fault in FAULTS:
        if self.global_step == fault[2]:
            FAULTS.remove(fault)
            os.kill(os.getpid(), getattr(signal, fault[3]))
            break
    return PLAIN(self, batch)


if __name__ == "__main__":
    HybridTrainer.step = step  # type: ignore[method-assign]
    main(sys.argv[1:])
