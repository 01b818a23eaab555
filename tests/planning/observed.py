"""What passes really keep and allocate, for comparison with what is planned."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretrain.models.gpt2 import GPT2, GPT2Shape


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, for as long as they exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}

    def ignore(self, tensors: Any) -> None:
        for tensor in tensors:
            self._seen[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._seen:
            return
        self._seen[place] = storage.nbytes()
        self.now += self._seen[place]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, place)

    def _gone(self, place: int) -> None:
        self.now -= self._seen.pop(place)


def model_and_batch(shape: GPT2Shape, rows: int, **options: Any) -> tuple[GPT2, Tensor, Tensor]:
    model = GPT2(shape, 0, **options).train()
    tokens = torch.zeros(rows, shape.context, dtype=torch.long)
    return model, tokens, tokens.clone()


def autocast(precision: str, model: GPT2) -> Any:
    """As in a full step."""
    cache = not model.recomputed
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache) if precision == "bf16" else nullcontext()


@contextmanager
def norms_as_on_cuda() -> Iterator[None]:
    """CUDA's autocast runs norms in fp32; the CPU's does not."""
    forward = nn.LayerNorm.forward

    def widened(self: nn.LayerNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)

    nn.LayerNorm.forward = widened  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.LayerNorm.forward = forward  # type: ignore[method-assign]


def saved_bytes(model: GPT2, tokens: Tensor, targets: Tensor, precision: str) -> int:
    """All that autograd keeps between the two passes, shared storages once, without the model and the batch."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), tokens, targets)}
    found: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # no storage is freed and its place used again while we count
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(precision, model):
        loss = model(tokens, targets)
    assert loss.requires_grad
    return sum(found.values())


def step_peak(model: GPT2, tokens: Tensor, targets: Tensor, precision: str, with_gradients: bool = False) -> int:
    """Most bytes that exist at once in a forward and backward pass, with gradients, without the weights."""
    live = Live()
    live.ignore((*model.parameters(), tokens, targets))
    with live:
        if with_gradients:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        with autocast(precision, model):
            loss = model(tokens, targets)
        loss.backward()
    peak = live.peak
    for p in model.parameters():
        p.grad = None
    return peak


def compiled_bytes(model: GPT2, tokens: Tensor, targets: Tensor, precision: str) -> int:
    """What the min-cut partition of torch.compile keeps between the two passes, without parameters and inputs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with autocast(precision, model):
        torch.compile(lambda: model(tokens, targets), backend=backend, dynamic=False)()
    outputs = next(node for node in graphs[0].graph.nodes if node.op == "output").args[0]
    return sum(_base_bytes(node) for node in {_base(node) for node in outputs[1:] if node is not None})


_VIEWS = ("view", "alias", "t.", "permute", "transpose", "expand", "slice", "unsqueeze", "squeeze", "split", "reshape")


def _base(node: Any) -> Any:
    """The node whose memory it shares."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], torch.fx.Node):
        target = str(node.target).removeprefix("aten.")
        part = "getitem" in target and "split" in str(node.args[0].target)
        if not (part or target.startswith(_VIEWS)):
            break
        node = node.args[0]
    return node


def _base_bytes(node: Any) -> int:
    value = node.meta.get("val") if node.op != "placeholder" else None
    return int(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0
