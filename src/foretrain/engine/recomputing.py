"""`engine.activation_checkpointing` of any module: ours have a switch for it, of others the blocks of a list are made
to be computed again."""

from __future__ import annotations

from torch import nn

from foretrain.config import Config, given
from foretrain.engine.compile_cache import anything_compiled
from foretrain.engine.described import unwrapped
from foretrain.errors import ConfigError
from foretrain.models.recomputing import (
    Recomputed,
    check_block,
    recompute,
    recomputed_blocks,
)

_SETTING = "engine.activation_checkpointing"


class Recomputing:
    """Knows which blocks of a model are computed again in the backward pass. Of a module of somebody's own they are
    those of the `nn.ModuleList` that `growth.blocks` names, or of the only one that it has."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model = unwrapped(model)
        self.named = config.growth.blocks if "growth.blocks" in given(config) else ""
        self.ours = hasattr(self.model, "activation_checkpointing")
        self._share: bool | float = False
        self._checked = True
        if self.ours:
            return
        for block in [module for module in self.model.modules() if isinstance(module, Recomputed)]:
            recompute(block, wanted=False)  # of a trainer before this one
        if config.engine.activation_checkpointing:
            self.use(config.engine.activation_checkpointing)
            self._checked = False

    @property
    def share(self) -> bool | float:
        """Return the share of the blocks that is computed again."""
        return getattr(self.model, "activation_checkpointing") if self.ours else self._share  # noqa: B009

    @property
    def draws_again(self) -> bool:
        """Return whether random states are read and set in a step, which no recorded graph can do. What blocks of
        somebody's own draw is not known."""
        return bool(getattr(self.model, "draws_again", False)) if self.ours else bool(self._share)

    def use(self, share: bool | float) -> None:
        """Go on with another share of the blocks, between two steps."""
        if self.ours:
            setattr(self.model, "activation_checkpointing", share)  # noqa: B010
            return
        if share == self._share:
            return
        _, _, obstacle = _of_list(self.model, self.named)
        if obstacle:
            raise ConfigError(f"{_SETTING} = {_in_words(share)}: {obstacle}")
        self._share = share
        self.follow()

    def follow(self) -> None:
        """Other blocks may be shown than before: the share is one of those that are."""
        if self.ours or not self._wants_marks:
            return
        _, blocks, _ = _of_list(self.model, self.named)
        wanted = recomputed_blocks(len(blocks), float(self._share))
        for number, block in enumerate(blocks):
            recompute(block, number in wanted)

    @property
    def _wants_marks(self) -> bool:
        return bool(self._share) or any(isinstance(module, Recomputed) for module in self.model.modules())

    # --- that blocks are called at all, which only a step shows -------------------------------------------------------

    def check_calls(self) -> None:
        """Refuse a model that does not call its blocks as modules: nothing would be recomputed. To be asked between the
        first forward pass and the first update. What compiled code calls is not seen."""
        if self._checked or anything_compiled():
            return
        self._checked = True
        name, blocks, _ = _of_list(self.model, self.named)
        watched = [block for block in blocks if isinstance(block, Recomputed)]
        if watched and not any(block.used for block in watched):
            raise ConfigError(
                f"{_SETTING} = {_in_words(self._share)}: {type(self.model).__name__} calls no block of {name!r} as a "
                "module, block(x), so that none can be recomputed; call them so, name another list in growth.blocks, "
                "or set it to false"
            )


def can_recompute(model: nn.Module, config: Config) -> bool:
    """Return whether `engine.activation_checkpointing` has something to recompute."""
    named = config.growth.blocks if "growth.blocks" in given(config) else ""
    model = unwrapped(model)
    return hasattr(model, "activation_checkpointing") or not _of_list(model, named)[2]


def _in_words(share: bool | float) -> str:
    return "true" if share is True else f"{share:g}"


def _of_list(model: nn.Module, named: str) -> tuple[str, list[nn.Module], str]:
    """Return the name of the list of blocks, the blocks that it shows, and why they cannot be recomputed; empty where
    they can. named: the list's name, as far as somebody has told."""
    lists = {name: module for name, module in model.named_modules() if _is_of_blocks(module)}
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    kind, off = type(model).__name__, "leave it at false"
    if named and named not in lists:
        has = f"it has {', '.join(map(repr, lists))}" if lists else f"it has none; {off}"
        return "", [], f"growth.blocks = {named!r} names no nn.ModuleList of blocks in {kind}; {has}"
    if not outermost:
        return "", [], f"{kind} has no nn.ModuleList of blocks that could be recomputed; {off}"
    name = named or ("blocks" if "blocks" in lists else outermost[0])
    if not named and name != "blocks" and len(outermost) > 1:
        several = " and ".join(map(repr, outermost))
        return "", [], f"{kind} has several lists of blocks, {several}; name one of them in growth.blocks"
    blocks = list(lists[name])
    obstacles = (check_block(block, f"{name}.{number}") for number, block in enumerate(blocks))
    obstacle = next(filter(None, obstacles), "")
    return name, blocks, f"{obstacle}; {off}" if obstacle else ""


def _is_of_blocks(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or not len(module):
        return False
    return not any(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for block in module)
