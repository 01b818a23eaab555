"""Sparse gradients, as of `nn.Embedding(sparse=True)`: known by the layers that make them, before the first step."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from foretrain.errors import ConfigError


def check_sparse(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot use the gradients it would get."""
    layers = {name: m for name, m in model.named_modules() if getattr(m, "sparse", False) is True}
    sparse = {id(p): name for name, m in layers.items() for p in m.parameters(recurse=False) if p.requires_grad}
    kind = type(optimizer).__name__
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if isinstance(optimizer, SparseAdam) and any(id(p) in _dense(model) for p in held):
        raise ConfigError(
            "SparseAdam takes sparse gradients only, and other parameters are in it, too; use SGD or Adagrad for all, "
            "or sparse=False in the embedding"
        )
    if not any(id(p) in sparse for p in held):
        return
    groups = optimizer.param_groups
    fused = any(group.get("fused") for group in groups)
    momentum = isinstance(optimizer, SGD) and any(group["momentum"] for group in groups)
    usable = isinstance(optimizer, (SGD, Adagrad, SparseAdam)) and not fused and not momentum
    if not usable and type(optimizer).__module__.startswith(("torch.optim", "foretrain.")):
        options = " with fused=True" if fused else " with momentum" if momentum else ""
        raise ConfigError(
            f"{next(iter(sparse.values()))} of {type(model).__name__} gives sparse gradients (sparse=True), which "
            f"{kind}{options} cannot use; hand in torch.optim.SparseAdam, Adagrad or SGD without momentum, or set "
            "sparse=False"
        )


def _dense(model: nn.Module) -> set[int]:
    """Parameters of layers of torch's that are known to give dense gradients."""
    layers = [
        module
        for module in model.modules()
        if type(module).__module__.startswith("torch.nn.modules")
        and not isinstance(module, (nn.ParameterList, nn.ParameterDict))
        and not getattr(module, "sparse", False)
    ]
    return {id(p) for layer in layers for p in layer.parameters(recurse=False)}
