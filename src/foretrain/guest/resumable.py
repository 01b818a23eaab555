"""A loader of a finite data set whose place is one number: a host that saves it resumes with the very next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from foretrain.data.loader import Loader, MappedSamples
from foretrain.errors import ConfigError


class ResumableLoader:
    """Batches of a data set whose place a host saves and puts back: batch k is the same in every run of this seed.

    It has `state_dict` and `load_state_dict`, for which Lightning looks.
    """

    def __init__(
        self, dataset: Any, batch_size: int, seed: int = 1, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise ConfigError(
                "ResumableLoader gives every process the same batches; use a DataLoader with a DistributedSampler"
            )
        self.loader = Loader(MappedSamples(dataset, collate), batch_size, seed, prefetch=0)
        self._length = max(1, len(dataset) // batch_size)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Yield what is left of the pass over the data."""
        left = self._length - self.loader.position % self._length
        yield from islice(self.loader, left)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.loader.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.loader.seek(state["position"])
