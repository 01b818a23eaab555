"""The public names are frozen: adding or removing one is a decision, made here too."""

from __future__ import annotations

import subprocess
import sys

import pytest

import foretrain

PUBLIC = {
    "AdapterRegistry",
    "Bus",
    "CheckpointError",
    "CheckpointStore",
    "Completion",
    "Config",
    "ConfigError",
    "DataError",
    "DivergenceError",
    "Followed",
    "Forecast",
    "ForetrainError",
    "GPT2",
    "GPT2Shape",
    "HybridTrainer",
    "InputError",
    "Loader",
    "LoraSettings",
    "MappedSamples",
    "Muon",
    "Predictor",
    "Sampling",
    "Situation",
    "StepResult",
    "StreamToken",
    "TextGenerator",
    "TokenWindows",
    "cross_entropy",
    "evaluate",
    "finetune",
    "load",
    "load_weights",
    "logistic",
    "supervised",
    "train",
    "wrap",
}


def test_the_public_names_are_these() -> None:
    assert set(foretrain.__all__) == PUBLIC
    assert len(foretrain.__all__) == len(PUBLIC)
    assert set(dir(foretrain)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_can_be_used(name: str) -> None:
    assert getattr(foretrain, name).__name__ == name


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = foretrain.Trainer


def test_errors_have_the_exit_codes_the_command_line_promises() -> None:
    assert foretrain.ForetrainError.exit_code == 1
    assert foretrain.DivergenceError.exit_code == 1
    for error in (foretrain.InputError, foretrain.ConfigError, foretrain.DataError, foretrain.CheckpointError):
        assert issubclass(error, foretrain.ForetrainError)
        assert error.exit_code == 2


def test_import_does_not_load_torch() -> None:
    code = "import sys, foretrain; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
