"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from foretrain.cli.terminal import flag

Model = Annotated[
    Path,
    Parameter(
        help="Run folder of `train` or `finetune` (not finished: its newest checkpoint is taken), one checkpoint, or a "
        "causal language model in Hugging Face's format."
    ),
]
RunOut = Annotated[Path | None, Parameter(help="Run folder. Unset: a new one in `runs/`.")]
Resume = Annotated[bool, flag("Go on from the newest intact checkpoint in `--out`.")]
ReplaceRun = Annotated[bool, flag("Replace an earlier run in `--out`.")]
TargetFolder = Annotated[Path, Parameter(help="Where to write.")]
Overwrite = Annotated[bool, flag("Replace files of the same names in FOLDER.")]
Tokenizer = Annotated[str, Parameter(help="Path of a tokenizer.json. Unset: the one beside the weights.")]
Vocabulary = Annotated[str, Parameter(help="Folder with GPT-2's vocabulary files, for weights without a tokenizer.")]
AnyBase = Annotated[bool, flag("Use the adapter on other weights than those it was trained on, too.", "--any-base")]
