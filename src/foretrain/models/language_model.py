"""What fine-tuning, generation and evaluation need of a language model, whatever its architecture is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn


class ModelShape(Protocol):
    """The numbers of a model that everybody asks for."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def padded_vocab_size(self) -> int: ...
    @property
    def window(self) -> int:
        """Return the tokens of a window that a text is cut into to be scored."""


class LanguageModel(nn.Module):
    """`model(tokens)` gives logits; `model(tokens, targets)` gives the mean loss over targets that are not -100."""

    shape: Any
    """A ModelShape."""

    @abstractmethod
    def make_cache(self, batch: int, length: int, padding: Sequence[int] | None = None) -> Any:
        """Make room for `length` tokens in each of `batch` rows, for `decode`. padding: empty columns at the left of
        each row."""

    @abstractmethod
    def decode(self, tokens: Tensor, cache: Any) -> Tensor:
        """Read `tokens` [batch, new] after those in `cache`; the logits [batch, vocabulary] of what comes next."""

    @property
    def output_layer(self) -> nn.Module | None:
        """Return the layer that makes logits, where it is a module of its own; adapters leave it alone."""
        return None

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss of a batch of (tokens, targets)."""
        return cast("Tensor", self(*batch))
