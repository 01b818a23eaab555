"""Settings: one schema, read from a TOML file, overrides and presets, with other names for the same things."""

from foretrain.config.loading import (
    KNOWN,
    Loaded,
    changed,
    from_mapping,
    given,
    load,
    parse_override,
    to_mapping,
    to_toml,
)
from foretrain.config.schema import (
    Config,
    CorrectionConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    settings,
)

__all__ = [
    "KNOWN",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "Loaded",
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
]
