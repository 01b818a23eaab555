"""What of a model is trained now: the one place that knows, since users freeze and unfreeze in mid-run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from foretrain.errors import InputError

GroupNames = list[list[str | None]]
"""Names of the parameters in each group of an optimizer; None: a parameter that is not the model's."""
_NAMED = 3
"""Parameters that a sentence names."""


@dataclass(frozen=True, slots=True)
class Change:
    """What was frozen and unfrozen since somebody last looked."""

    frozen: list[str]
    unfrozen: list[str]

    def in_words(self) -> str:
        """2 parameters are frozen (a.weight, a.bias) and 1 is trained again or anew (b)."""
        parts = [(self.frozen, "frozen"), (self.unfrozen, "trained")]
        told = [
            f"{len(names)} {'parameters are' if len(names) > 1 else 'parameter is'} {what} ({_listed(names)})"
            for names, what in parts
            if names
        ]
        return " and ".join(told)


class TrainedWeights:
    """The parameters that require gradients, as of the last `look`.

    `parameters` stays the same list for as long as the run goes on: whoever holds it knows what is trained.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.ever: dict[str, nn.Parameter] = {}
        """Trained at any time in this run, in the model's order: all others are what they were when it began."""
        self._all: dict[str, nn.Parameter] = {}
        self._flags: list[bool] = []
        self._held = 0
        """Parameters of the optimizer."""
        self.look()

    @property
    def changed(self) -> bool:
        """Asked before every step, so it costs some microseconds. Parameters that were added show in the optimizer."""
        flags = [parameter.requires_grad for parameter in self._all.values()]
        return flags != self._flags or self._count() != self._held

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def look(self) -> Change:
        """Follow what was frozen, unfrozen or added since the last look."""
        present = dict(self.model.named_parameters())
        replaced = next((name for name, p in self._all.items() if present.get(name) is not p), None)
        if replaced is not None:
            raise InputError(
                f"{replaced} of {type(self.model).__name__} was replaced or removed while it was trained; change the "
                "weights in place, or make a new optimizer and a new HybridTrainer"
            )
        before = set(self.names)
        trained = {name: p for name, p in present.items() if p.requires_grad}
        if not trained:
            raise InputError(
                f"all parameters of {type(self.model).__name__} are frozen, so nothing can be trained any more; leave "
                "some with requires_grad_(True), or end the run with trainer.stop()"
            )
        self._all, self._flags, self._held = present, [p.requires_grad for p in present.values()], self._count()
        self.parameters[:] = trained.values()
        self.names[:] = trained
        self.ever = {name: p for name, p in present.items() if name in trained or name in self.ever}
        return Change([name for name in present if name in before - trained.keys()], _without(trained, before))

    def never(self) -> dict[str, nn.Parameter]:
        """What was not trained in this run, under all its names."""
        known = {id(p) for p in self.ever.values()}
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: p for name, p in every if id(p) not in known}

    def learned(self, names: Iterable[str]) -> None:
        """Another run has trained these."""
        self.ever = {name: p for name, p in self._all.items() if name in self.ever or name in set(names)}

    def without_optimizer(self) -> dict[str, nn.Parameter]:
        """Trained, but no optimizer changes them."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in zip(self.names, self.parameters, strict=True) if id(p) not in held}

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """wanted: what a user has frozen or unfrozen since the last look, the next step will see."""
        wanted = [name for name, p in self._all.items() if p.requires_grad]
        return {"now": list(self.names), "wanted": wanted, "groups": self.groups()}

    def groups(self) -> GroupNames:
        names = {id(p): name for name, p in self._all.items()}
        return [[names.get(id(p)) for p in group["params"]] for group in self.optimizer.param_groups]

    def put_back(self, saved: Mapping[str, Any], ever: Iterable[str]) -> bool:
        """Train what was trained then. ever: what had been trained by then. Whether that is something else than now.

        `want` follows when all else is there.
        """
        before = (list(self.names), list(self.ever), self._held)
        self.want(saved["now"])
        self.ever = {name: p for name, p in self._all.items() if name in set(ever)}
        self.look()
        return (self.names, list(self.ever), self._held) != before

    def want(self, names: Iterable[str]) -> None:
        """Freeze all but these."""
        wanted = set(names)
        for name, parameter in self._all.items():
            if parameter.requires_grad != (name in wanted):
                parameter.requires_grad_(name in wanted)

    def hold(self, names: GroupNames, groups: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer the parameters that were added to it before it was saved, in the same groups.

        names: as `groups` had them then; groups: as the optimizer had them. What does not fit is left for the optimizer
        to refuse.
        """
        present = self.groups()
        starts = [wanted[: len(now)] == now for now, wanted in zip(present, names, strict=False)]
        added = [name for place, group in enumerate(names) for name in _rest(group, present, place)]
        known = all(name in self._all for name in added) and not set(added) & {name for now in present for name in now}
        if len(present) > len(names) or not all(starts) or not known:
            return
        for place, (wanted, settings) in enumerate(zip(names, groups, strict=True)):
            new = [(name, self._all[name]) for name in _rest(wanted, present, place) if name is not None]
            if place < len(present):
                self.optimizer.param_groups[place]["params"] += [parameter for _, parameter in new]
            elif new:
                options = {key: _own(value, new[0][1]) for key, value in settings.items() if key != "params"}
                named = options.pop("param_names", None) is not None
                self.optimizer.add_param_group({**options, "params": new if named else [p for _, p in new]})


def arranged(saved: Mapping[str, Any], then: GroupNames, optimizer: Optimizer, now: GroupNames) -> Mapping[str, Any]:
    """A state of an optimizer as if the parameters that were added since had been there, unused.

    then, now: names of the parameters in its groups, when it was saved and at present.
    """
    if then == now:
        return saved
    current = optimizer.state_dict()["param_groups"]
    places = {name: place for names, group in zip(now, current, strict=True) for name, place in _paired(names, group)}
    numbers = [pair for names, group in zip(then, saved["param_groups"], strict=True) for pair in _paired(names, group)]
    if None in places or not {name for name, _ in numbers} <= places.keys():
        return saved
    state = {places[name]: saved["state"][number] for name, number in numbers if number in saved["state"]}
    kept = [{**old, "params": group["params"]} for old, group in zip(saved["param_groups"], current, strict=False)]
    return {**saved, "state": state, "param_groups": [*kept, *current[len(kept) :]]}


def _paired(names: Sequence[str | None], group: Mapping[str, Any]) -> list[tuple[str | None, int]]:
    return list(zip(names, group["params"], strict=True))


def _rest(wanted: Sequence[str | None], present: GroupNames, place: int) -> Sequence[str | None]:
    return wanted[len(present[place]) :] if place < len(present) else wanted


def _own(value: Any, parameter: Tensor) -> Any:
    """A rate that is a tensor belongs to one optimizer, and stays where its parameters are."""
    return value.detach().clone().to(parameter.device) if isinstance(value, Tensor) else value


def _without(names: Iterable[str], others: set[str]) -> list[str]:
    return [name for name in names if name not in others]


def _listed(names: Sequence[str]) -> str:
    others = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {others} more" if others > 0 else "")
