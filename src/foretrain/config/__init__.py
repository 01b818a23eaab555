"""Settings: one schema, read from a TOML file, overrides and presets, with other names for the same things."""

from foretrain.config.completing import with_beta2, with_warmup
from foretrain.config.listing import KNOWN, settings
from foretrain.config.loading import from_mapping, load, parse_override
from foretrain.config.schema import (
    Config,
    CorrectionConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from foretrain.config.writing import changed, given, to_mapping, to_toml

__all__ = [
    "KNOWN",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "changed",
    "from_mapping",
    "given",
    "load",
    "parse_override",
    "settings",
    "to_mapping",
    "to_toml",
    "with_beta2",
    "with_warmup",
]
