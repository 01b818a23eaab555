"""What users hand in, as people write it: a criterion as loss, a class or a name as optimizer, NumPy batches. What
cannot be trained is refused in one sentence."""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from foretrain.config import Config, OptimizerConfig, given
from foretrain.engine.syncing import replicas_of
from foretrain.errors import ConfigError, InputError
from foretrain.persist.parts import is_spread

Measure = Callable[..., Any]
"""A loss or a metric: of (model, batch), or of (output, target)."""
OptimizerLike = Optimizer | type[Optimizer] | Callable[..., Optimizer] | str | None
NAMES: tuple[str, ...] = get_args(OptimizerConfig.model_fields["type"].annotation)
_OUTPUTS = frozenset({"output", "outputs", "out", "prediction", "predictions", "pred", "preds", "logits", "y_pred"})
_TARGETS = frozenset(["target", "targets", "tgt", "label", "labels", "truth", "y", "y_true"])
_MODELS = frozenset({"model", "module", "net", "network"})
_OF_CHANCES: tuple[Any, ...] = (F.binary_cross_entropy_with_logits, F.binary_cross_entropy)
"""Criteria whose targets are numbers from 0 to 1."""
_TORCHS = ("torch.nn.functional", "torch.nn.modules.loss")


# --- loss functions and metrics --------------------------------------------------------------------------------------


class Supervised:
    """A loss function of (model, batch) made of a criterion of (output, target)."""

    def __init__(self, criterion: Callable[[Any, Any], Tensor]) -> None:
        self.criterion = criterion
        self._of_chances = criterion in _OF_CHANCES or isinstance(criterion, (nn.BCEWithLogitsLoss, nn.BCELoss))

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = pair(batch)
        output = model(inputs)
        if self._of_chances and isinstance(targets, Tensor) and not targets.is_floating_point():
            targets = targets.to(output.dtype)  # yes and no, or 1 and 0, which torch does not take as chances
        return self.criterion(output, targets)


def supervised(criterion: Callable[[Any, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """Loss function for batches of (inputs, targets): `supervised(torch.nn.functional.cross_entropy)`."""
    return Supervised(criterion)


def pair(batch: Any) -> tuple[Any, Any]:
    """The inputs and targets of a batch."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise InputError(
        f"a loss or metric of (output, target) needs batches of (inputs, targets), not {described(batch)}; "
        "write a function of (model, batch) instead"
    )


def is_criterion(function: Measure) -> bool:
    """Whether it is to be called with (output, target) and not with (model, batch).

    It is if it is one of torch's own losses, or if its first argument is called as outputs are (output, pred, logits),
    or its second as targets are (target, label, y), unless the first one is called model, module, net or network.
    """
    if getattr(function, "__module__", "") in _TORCHS:
        return True
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return False
    names = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(names) < 2 or names[0] in _MODELS:
        return False
    return names[0] in _OUTPUTS or names[1] in _TARGETS


def as_loss(function: Measure, device: torch.device) -> Callable[[nn.Module, Any], Tensor]:
    """A loss function of (model, batch)."""
    if not callable(function):
        raise ConfigError(
            f"loss_fn = {function!r} cannot be called; give a function of (model, batch), or a criterion such as "
            "torch.nn.MSELoss()"
        )
    if inspect.isclass(function):
        raise ConfigError(f"loss_fn is the class {function.__name__}; give an object of it: {function.__name__}()")
    if not is_criterion(function):
        return function
    if isinstance(function, nn.Module):
        function.to(device)  # weights of classes
    return supervised(function)


def check_metrics(metrics: Mapping[str, Measure]) -> None:
    named = isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics)
    if not named or not all(callable(function) for function in metrics.values()):
        raise InputError(
            "metrics is a dict of names and functions of (model, batch) or (output, target), such as {'accuracy': f}"
        )


def one_number(loss: Any) -> Tensor:
    """A loss with one element, whatever its shape, is a loss."""
    if not isinstance(loss, Tensor):
        raise InputError(f"the loss function gave {described(loss)}; it must give a tensor with the mean loss")
    if loss.ndim == 0:
        return loss
    if loss.numel() == 1:
        return loss.reshape(())
    raise InputError(
        f"the loss function gave {described(loss)}, and one number is needed: give its mean (reduction='mean')"
    )


def explain_first_failure(error: Exception) -> InputError:
    """The very first loss could not be computed: perhaps because of how it was called."""
    return InputError(
        f"the loss of the first batch failed ({type(error).__name__}: {error}). The loss function is called with "
        "(model, batch); for one of (output, target) and batches of (inputs, targets) write supervised(loss_function)"
    )


def described(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"


# --- batches ---------------------------------------------------------------------------------------------------------


def as_tensors(batch: Any, dtype: torch.dtype) -> Any:
    """NumPy arrays become tensors: those of real numbers in the model's format, whole numbers as int64."""
    if isinstance(batch, np.ndarray):
        return _tensor(batch, dtype)
    if isinstance(batch, dict):
        return {key: as_tensors(value, dtype) for key, value in batch.items()} if _has_arrays(batch) else batch
    if isinstance(batch, (tuple, list)) and _has_arrays(batch):
        parts = [as_tensors(value, dtype) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _has_arrays(batch: Any) -> bool:
    if isinstance(batch, dict):
        return any(_has_arrays(value) for value in batch.values())
    if isinstance(batch, (tuple, list)):
        return any(_has_arrays(value) for value in batch)
    return isinstance(batch, np.ndarray)


def _tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Any:
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind not in "iufbc":
        return array
    own = array if array.flags.writeable and array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(own)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def float_type(model: nn.Module) -> torch.dtype:
    """The format of a model's weights."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


# --- models ----------------------------------------------------------------------------------------------------------


def ready_to_train(model: nn.Module) -> nn.Module:
    """Checks that there is something to train, and sets a model to train that was wholly set to evaluate.

    What its user set to evaluate by itself, such as a frozen batch normalisation, stays so.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {described(model)}; give a torch.nn.Module")
    parameters = list(model.named_parameters())
    lazy = next((name for name, p in parameters if is_lazy(p)), None)
    if lazy is not None:
        raise ConfigError(
            f"{lazy} of {type(model).__name__} has no shape yet, as in LazyLinear; call the model once on a batch "
            "before the optimizer and HybridTrainer are made"
        )
    if not any(p.requires_grad for _, p in parameters):
        frozen = "all its parameters are frozen" if parameters else "it has no parameters"
        raise ConfigError(f"{type(model).__name__} cannot be trained: {frozen}; set requires_grad_(True) on some")
    overlapping = next((name for name, p in parameters if p.requires_grad and _overlaps(p)), None)
    if overlapping is not None:
        raise ConfigError(
            f"{overlapping} of {type(model).__name__} was made with expand(), so several of its numbers are one, which "
            "no optimizer can update; make it of .expand(...).clone(), or freeze it"
        )
    if not any(module.training for module in model.modules()):
        model.train()
    return model


def _overlaps(parameter: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True))


def check_processes(config: Config, model: nn.Module, loss_fn: Any = None) -> None:
    """Replicas that know nothing of each other would each move by itself, and go apart."""
    distributed = torch.distributed
    met = distributed.is_available() and distributed.is_initialized()
    world = distributed.get_world_size() if met else int(os.environ.get("WORLD_SIZE") or 1)
    if world == 1 or config.hybrid.mode == "off":
        return
    if not met:
        raise ConfigError(
            f"this is one of {world} processes, and they have not met: call torch.distributed.init_process_group(), "
            "and wrap the model in DistributedDataParallel or fully_shard, or start one process"
        )
    wrapped = replicas_of(model, loss_fn) is not None
    if isinstance(model, nn.Module) and not wrapped and not any(is_spread(p) for p in model.parameters()):
        raise ConfigError(
            f"this is one of {world} processes, and {type(model).__name__} is neither in DistributedDataParallel nor "
            "sharded by fully_shard, so that each would train a model of its own: wrap it before HybridTrainer is made"
        )


# --- optimizers ------------------------------------------------------------------------------------------------------


def with_named_optimizer(optimizer: OptimizerLike, config: Config) -> tuple[OptimizerLike, Config]:
    """A name means the configuration's own optimizer of that type."""
    if not isinstance(optimizer, str):
        return optimizer, config
    name = optimizer.lower()
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; give an object or a class of torch.optim for others"
        raise ConfigError(f"optimizer = {optimizer!r}: the names are {', '.join(map(repr, NAMES))}{hint}")
    if "optimizer.type" in given(config) and config.optimizer.type != name:
        raise ConfigError(f"optimizer = {optimizer!r} and optimizer.type = {config.optimizer.type!r}: keep one of them")
    section = OptimizerConfig.model_validate({**config.optimizer.model_dump(exclude_unset=True), "type": name})
    return None, config.model_copy(update={"optimizer": section})


def built_optimizer(optimizer: OptimizerLike, model: nn.Module, config: Config) -> Optimizer:
    """The user's own optimizer: an object as it is; a class or a function is called with what is to be trained."""
    if config.optimizer.learning_rate == "auto":
        raise ConfigError(
            "optimizer.learning_rate = 'auto' is for optimizers named in the Config, and one is handed in; name it "
            f"({', '.join(NAMES)}), or set a number"
        )
    if isinstance(optimizer, Optimizer):
        _tell_unused(config)
    elif callable(optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad], **_arguments(config))
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is {described(optimizer)}; give an object or a class of torch.optim, or one of the names "
            f"{', '.join(NAMES)}"
        )
    _check_optimizer(optimizer, model)
    return optimizer


def _arguments(config: Config) -> dict[str, Any]:
    """What of the configuration a class is made with: the rate and the decay, where they are set."""
    names = given(config)
    arguments: dict[str, Any] = {}
    if "optimizer.learning_rate" in names and config.optimizer.learning_rate is not None:
        arguments["lr"] = config.optimizer.learning_rate
    if "optimizer.weight_decay" in names:
        arguments["weight_decay"] = config.optimizer.decay
    return arguments


def _tell_unused(config: Config) -> None:
    """Settings that were made for nothing."""
    fields = OptimizerConfig.model_fields
    unused = [
        name
        for name in sorted(config.optimizer.model_fields_set - {"gradient_clip_norm"})
        if getattr(config.optimizer, name) != fields[name].default
    ]
    if unused:
        names = ", ".join(f"optimizer.{name}" for name in unused)
        warnings.warn(
            f"{names} of the Config: no effect on an optimizer that is handed in; set it there, or hand in none",
            stacklevel=5,
        )


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{kind} computes the loss several times per step, by a closure, which HybridTrainer does not; use "
            "torch.optim.Adam: on full batches quasi-Newton leaps then do the same work"
        )
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for key, name in trained.items() if key not in held]
    if len(missing) == len(trained):
        raise ConfigError(
            f"the {kind} holds none of the parameters of {type(model).__name__}, so nothing would be trained; make it "
            "from model.parameters() of this very model, after the last change to it"
        )
    own = {id(p) for p in model.parameters()}
    if foreign := [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]:
        warnings.warn(
            f"{len(foreign)} parameters in the {kind} are none of {type(model).__name__}'s: they are trained, but "
            "neither saved nor taken back with a move; make them a part of the model",
            stacklevel=5,
        )
    if missing:
        warnings.warn(
            f"{len(missing)} of {len(trained)} parameters that require gradients are not in the {kind} and will not "
            f"change, {missing[0]} among them; freeze them with requires_grad_(False), or add them",
            stacklevel=5,
        )
