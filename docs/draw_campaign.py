"""Draw the arms of campaign results with their intervals: python docs/draw_campaign.py OUT.svg RESULT.json [...]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from foretrain.show.pages.charts import standalone
from foretrain.show.pages.row_charts import Ratio, ratios


def rows(path: Path) -> list[Ratio]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    optimizer = {"adamw": "AdamW", "muon": "Muon"}[result["config"]["optimizer"]["type"]]
    ladder = {rung["rung"] for rung in result["analysis"]["ladder"]}
    found = []
    for arm in result["analysis"]["arms"]:
        speedup = arm["speedup"]
        if speedup is not None and arm["n"] >= 3 and arm["arm"] not in ladder:
            name = f"{optimizer}: {arm['label']}"
            found.append(Ratio(name, speedup["mean"], speedup["low"], speedup["high"]))
    return found


def main() -> None:
    picture, *files = (Path(argument) for argument in sys.argv[1:])
    found = [row for file in files for row in rows(file)]
    label = "Speed-up to equal loss over the equally tuned plain loop, 95 % intervals"
    picture.write_text(standalone(ratios(found, "speed-up to equal loss (factor, log scale)", label=label)), "utf-8")


if __name__ == "__main__":
    main()
