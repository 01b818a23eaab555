"""Examples to fine-tune on, made of what every Python has: lines of its library, and the words they begin with.

python examples/which_keyword.py which_keyword.jsonl
foretrain finetune --base runs/demo --data which_keyword.jsonl --out runs/tuned
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from pathlib import Path

KEYWORDS = ("assert", "class", "def", "for", "from", "if", "import", "raise", "return", "while", "with")
EACH = 300


def lines() -> dict[str, set[str]]:
    """What follows each word, every line once."""
    found: dict[str, set[str]] = {keyword: set() for keyword in KEYWORDS}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            keyword, _, rest = line.strip().partition(" ")
            if keyword in found and 3 <= len(rest) <= 60 and rest.isascii():
                found[keyword].add(rest)
    return found


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("which_keyword.jsonl")
    chooser = random.Random(1)  # noqa: S311 - a choice that repeats, not a secret
    records = []
    for keyword, rest in lines().items():
        chosen = chooser.sample(sorted(rest), min(EACH, len(rest)))
        records += [{"text": f"... {line}", "label": keyword} for line in chosen]
    chooser.shuffle(records)
    target.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f"{target}: {len(records)} examples of {len(KEYWORDS)} keywords")


if __name__ == "__main__":
    main()
