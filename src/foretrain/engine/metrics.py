"""Metrics: functions of the user's own that are measured on held-out batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from foretrain.engine.batch import map_tensors
from foretrain.engine.fence import Failure, Fence, OwnCodeError
from foretrain.engine.own import Measure, is_criterion, pair
from foretrain.errors import InputError, is_out_of_memory


def measured(
    metrics: Mapping[str, Measure], model: nn.Module, batch: Any, fence: Fence | None
) -> list[tuple[str, float | Failure]]:
    """Each metric's mean over one batch, or how it failed. Those of (output, target) share one forward pass; each gets
    copies, so that none can change what others see.

    Without a fence, before anything is trained, a failure raises InputError.
    """
    values: list[tuple[str, float | Failure]] = []
    output: list[Any] = []
    for name, function in metrics.items():
        criterion = is_criterion(function)

        def value(function: Measure = function, criterion: bool = criterion) -> float:
            model.eval()  # whatever the one before did
            inputs, target = _copied(pair(batch)) if criterion else (None, None)
            if criterion and not output:
                output.append(model(inputs))
            given = function(_copied(output[0]), target) if criterion else function(model, _copied(batch))
            return float(torch.as_tensor(given).detach().double().mean())

        try:
            values.append((name, value() if fence is None else fence.call(f"the metric {name!r}", value, again=True)))
        except OwnCodeError as error:
            values.append((name, error.failure))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"the metric {name!r} failed ({type(error).__name__}: {error}). It is called with "
                f"{'(output, target)' if criterion else '(model, batch)'}; name its arguments (output, target) or "
                "(model, batch), and let it return a number, or one for each row"
            ) from error
    return values


def _copied(batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor.clone())
