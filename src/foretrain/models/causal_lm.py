"""Any causal language model of transformers as a model of ours: loss, logits and generation; its modules stay theirs.

transformers itself is imported where a model is opened (`causal_files`), and for its cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foretrain.errors import ConfigError, InputError
from foretrain.models.causal_shape import CausalShape
from foretrain.models.gpt2 import FUSED_LOSS_ELSEWHERE, FUSED_LOSS_FROM_BYTES
from foretrain.models.language_model import LanguageModel
from foretrain.models.loss import IGNORED, linear_cross_entropy, logits_bytes
from foretrain.models.recomputing import of_transformers, recomputed_blocks

PREFIX = "inner."
"""What stands before the names that transformers gives to modules and weights."""


def _draws(block: nn.Module) -> bool:
    """Return whether a block draws random numbers while training: its own dropout, or that of an adapter in it."""
    rates = (rate for module in block.modules() for name, rate in vars(module).items() if "drop" in name or name == "p")
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _recompute(block: nn.Module, function: Any, *given: Any) -> Any:
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=_draws(block))


class GrowingCache:
    """The keys and values that a model of transformers has made so far, and which columns of each row are empty."""

    def __init__(self, inner: Any, batch: int, length: int, padding: list[int], device: torch.device) -> None:
        self.inner = inner
        """A `DynamicCache` of transformers."""
        self.batch = batch
        self.length = length
        self.used = 0
        self._padding = torch.tensor(padding, device=device)[:, None] if any(padding) else None

    def advance(self, rows: int, count: int) -> tuple[Tensor | None, Tensor | None]:
        """Make the next columns of all rows the current ones; return (which columns count, positions), None where
        no row has an empty column."""
        end = self.used + count
        if rows != self.batch or end > self.length:
            raise InputError(
                f"the cache is for {self.batch} rows of {self.length} tokens; {rows} rows of {end} were given: make "
                "one for each batch, and a longer one for more tokens"
            )
        start, self.used = self.used, end
        if self._padding is None:
            return None, None
        columns = torch.arange(end, device=self._padding.device)
        return (columns >= self._padding).long(), (columns[start:] - self._padding).clamp_(min=0)


class CausalLM(LanguageModel):
    """A `transformers` model with the loss, the logits and the cache that training and generation ask for."""

    shape: CausalShape

    def __init__(
        self,
        inner: Any,
        shape: CausalShape,
        *,
        file_format: torch.dtype = torch.float32,
        activation_checkpointing: bool | float = False,
        fused_loss: bool | str = "auto",
        loss_rows: int | str = "auto",
        narrow_residual: bool = True,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.shape = shape
        self.file_format = file_format
        """The number format of the files that it came from; a merged model is written in it, too."""
        self.fused_loss = fused_loss
        self.loss_rows = None if isinstance(loss_rows, str) else loss_rows
        self.narrow_residual = narrow_residual
        self._takes = frozenset(inspect.signature(inner.forward).parameters)
        self._plain_head = self._has_plain_head()
        inner.get_input_embeddings().register_forward_hook(self._narrowed)
        self.activation_checkpointing = activation_checkpointing

    # --- training ------------------------------------------------------------------------------------------------

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.shape[1] > self.shape.context:
            raise ConfigError(
                f"a sequence of {tokens.shape[1]} tokens does not fit the model's context of {self.shape.context}; "
                "shorten it (data.max_length)"
            )
        if targets is not None and (head := self._head_to_fuse(tokens)) is not None:
            hidden = self._hidden(tokens)
            return linear_cross_entropy(hidden.flatten(0, 1), head.weight, targets.flatten(), slice_rows=self.loss_rows)
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)

    def _hidden(self, tokens: Tensor) -> Tensor:
        return cast("Tensor", self.inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state)

    def _head_to_fuse(self, tokens: Tensor) -> nn.Linear | None:
        """Return the output layer where its product and the loss are computed together, slice by slice."""
        head = self.inner.get_output_embeddings()
        if not self._plain_head or type(head) is not nn.Linear:  # an adapter on it, or logits that are worked on
            return None
        if self.fused_loss == "auto":
            limit = FUSED_LOSS_FROM_BYTES.get(tokens.device.type, FUSED_LOSS_ELSEWHERE)
            return head if logits_bytes(tokens[..., None], head.out_features) > limit else None
        return head if self.fused_loss else None

    @torch.no_grad()
    def _has_plain_head(self) -> bool:
        """Return whether logits are nothing but the output layer's product. Some models scale or cap them: it is tried
        on two tokens."""
        inner: Any = self.inner
        head = inner.get_output_embeddings()
        if type(head) is not nn.Linear or getattr(head, "bias", None) is not None or inner.base_model is inner:
            return False
        training = inner.training
        inner.eval()
        try:
            tokens = torch.arange(2, device=head.weight.device)[None]
            hidden = getattr(inner.base_model(input_ids=tokens, use_cache=False), "last_hidden_state", None)
            told = inner(input_ids=tokens, use_cache=False).logits
        finally:
            inner.train(training)
        return hidden is not None and hidden.shape[-1] == head.in_features and torch.equal(head(hidden), told)

    def _narrowed(self, module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
        """Keep the sum that runs through the blocks in autocast's format, as `precision.narrow_residual` says."""
        kind = embedded.device.type
        if self.narrow_residual and torch.is_autocast_enabled(kind):
            return embedded.to(torch.get_autocast_dtype(kind))
        return embedded

    # --- recomputed blocks ---------------------------------------------------------------------------------------

    @property
    def activation_checkpointing(self) -> bool | float:
        """Return the share of the blocks that is recomputed in the backward pass; may be changed between two steps."""
        return self._activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, share: bool | float) -> None:
        self._activation_checkpointing = share
        blocks = [module for module in self.inner.modules() if of_transformers(module)]
        if share and not blocks:
            raise ConfigError(
                f"engine.activation_checkpointing = {share}: transformers has no way to recompute the blocks of a "
                f"model of type {self.inner.config.model_type}; leave it at false"
            )
        self._recomputed = [blocks[number] for number in recomputed_blocks(len(blocks), float(share))]
        for block in blocks:
            block.gradient_checkpointing = block in self._recomputed
            block._gradient_checkpointing_func = partial(_recompute, block)

    @property
    def draws_again(self) -> bool:
        """A recomputed block repeats its dropout: its random state is read and set, which no recorded graph can do."""
        return any(map(_draws, self._recomputed))

    # --- generation ----------------------------------------------------------------------------------------------

    @property
    def output_layer(self) -> nn.Module | None:
        return cast("nn.Module | None", self.inner.get_output_embeddings())

    def make_cache(self, batch: int, length: int, padding: Sequence[int] | None = None) -> GrowingCache:
        """Make a cache for `length` tokens in each of `batch` rows; it takes memory as it fills."""
        from transformers import DynamicCache

        empty = list(padding or [])
        if not 0 < length <= self.shape.context + max(empty, default=0):
            raise InputError(
                f"a cache of {length} tokens does not fit the model's context of {self.shape.context}; shorten it"
            )
        device = next(self.parameters()).device
        return GrowingCache(DynamicCache(config=self.inner.config), batch, length, empty, device)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, cache: GrowingCache) -> Tensor:
        """Read `tokens` [batch, new] after those in `cache`; the logits [batch, vocabulary] of what comes next."""
        mask, positions = cache.advance(*tokens.shape)
        wanted = {"position_ids": positions, "logits_to_keep": 1}
        more = {name: value for name, value in wanted.items() if name in self._takes}
        output = self.inner(input_ids=tokens, attention_mask=mask, past_key_values=cache.inner, use_cache=True, **more)
        return cast("Tensor", output.logits[:, -1])
