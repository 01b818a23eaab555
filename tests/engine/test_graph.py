"""When a step is worth recording as a CUDA graph."""

from __future__ import annotations

import torch

from foretrain.engine.graph import _same_form, launch_bound


def test_small_steps_are_bound_by_launches_and_large_ones_are_not() -> None:
    small, large = torch.zeros(4, 64, dtype=torch.long), torch.zeros(64, 1024, dtype=torch.long)
    assert launch_bound(124_000_000, (small, small))
    assert not launch_bound(124_000_000, (large, large))
    assert launch_bound(1_000_000, {"x": large})


def test_only_batches_of_the_recorded_form_are_replayed() -> None:
    batch = (torch.zeros(2, 3), {"y": torch.zeros(2)})
    assert _same_form(batch, (torch.ones(2, 3), {"y": torch.ones(2)}))
    assert not _same_form(batch, (torch.ones(2, 4), {"y": torch.ones(2)}))
    assert not _same_form(batch, (torch.ones(2, 3).double(), {"y": torch.ones(2)}))
    assert not _same_form(batch, (torch.ones(2, 3),))
