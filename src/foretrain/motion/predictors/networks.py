"""The networks of `mlp` and `rssm`. All members of an ensemble are one module: the first axis of every weight is the
member, and one pass serves them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrain.motion.predictors.base import Array
from foretrain.motion.records import DIRECTIONS, HORIZONS_IN_WINDOWS, LAST_WINDOW

STATE = 64
"""Numbers of the training state."""
NARROW = 64
"""Width on both sides of the latent. Chosen: without it the latent's matrices cost more than all others together."""
HEAD = 32
"""Width of the head of `rssm`. Chosen: it runs once per group of weights and horizon, so it has to be small."""
UNIFORM = 0.01
"""Share of the uniform distribution in every categorical, as in DreamerV3: no class ever becomes impossible."""
_SIZE = len(DIRECTIONS)
_PAIRS = np.triu_indices(_SIZE, 1)
_GROUP_FEATURES = _SIZE + len(_PAIRS[0]) + _SIZE
_HORIZON_FEATURES = torch.tensor([[math.log2(h) / 3, h / 8] for h in HORIZONS_IN_WINDOWS], device="cpu")


class Dense(nn.Module):
    """A linear layer of every member: [members, rows, inputs] or [rows, inputs] to [members, rows, outputs]."""

    def __init__(self, members: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(members, inputs, outputs, device="cpu", dtype=torch.float32))
        self.bias = nn.Parameter(self.weight.new_zeros(members, 1, outputs)) if bias else None

    def forward(self, rows: Tensor) -> Tensor:
        if rows.dim() == 2:
            rows = rows.expand(len(self.weight), *rows.shape)
        if self.bias is None:
            return torch.bmm(rows, self.weight)
        return torch.baddbmm(self.bias, rows, self.weight)


class Head(nn.Module):
    """From a context, groups of weights and horizons to corrections. Its last layer starts at zero, and so do they."""

    def __init__(self, members: int, context: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.context = Dense(members, context, hidden[0], bias=True)
        self.groups = Dense(members, _GROUP_FEATURES, hidden[0])
        self.horizons = Dense(members, _HORIZON_FEATURES.shape[1], hidden[0])
        self.hidden = nn.ModuleList(Dense(members, *sizes, bias=True) for sizes in pairwise(hidden))
        self.last = Dense(members, hidden[-1], _SIZE)

    def forward(self, context: Tensor, groups: Tensor, places: Sequence[int]) -> Tensor:
        """[members, samples, G, R] from [members or none, samples or 1, inputs], [samples or 1, G, features] and one
        place in HORIZONS_IN_WINDOWS per sample."""
        common = self.context(context) + self.horizons(_HORIZON_FEATURES[list(places)])
        each = self.groups(groups.flatten(0, 1)).unflatten(1, groups.shape[:2])
        rows = functional.silu(each + common[:, :, None])
        samples = rows.shape[1:3]
        rows = rows.flatten(1, 2)
        for layer in self.hidden:
            rows = functional.silu(layer(rows))
        found: Tensor = torch.unflatten(self.last(rows), 1, samples)
        return found


@dataclass(frozen=True, slots=True)
class Seen:
    """Windows as the members of a WorldModel saw them."""

    path: Tensor
    """[members, windows + 1, deterministic] the recurrent state before the first window and after each."""
    posterior: Tensor
    prior: Tensor
    """[members, windows, variables, classes] of each window."""
    latents: Tensor
    """[members, windows, narrow] of the posterior."""
    imagined: Tensor
    """[members, windows, narrow] what follows on each window, from a sample of its prior."""

    def nats(self, posterior: Tensor, prior: Tensor) -> Tensor:
        """[members] Kullback-Leibler divergence per window."""
        return (posterior * (posterior / prior).log()).sum((1, 2, 3)) / posterior.shape[1]


class WorldModel(nn.Module):
    """A recurrent state-space model of the run, one window at a time.

    posterior    z ~ q(. | h, state)         what a window was, as `variables` categoricals of `classes` each
    recurrence   h' = GRU(h, z)
    prior        z' ~ p(. | h')              what the next window will be
    heads        from (h', z'): coefficients and losses to come; from (h, z): the state again
    """

    def __init__(self, members: int, deterministic: int, variables: int, classes: int) -> None:
        super().__init__()
        self.variables, self.classes, self.deterministic = variables, classes, deterministic
        self.embed = Dense(members, STATE, NARROW, bias=True)
        self.posterior_embed = Dense(members, NARROW, NARROW)
        self.posterior_in = Dense(members, deterministic, NARROW)
        self.posterior_out = Dense(members, NARROW, variables * classes)
        self.prior_in = Dense(members, deterministic, NARROW)
        self.prior_out = Dense(members, NARROW, variables * classes)
        self.latent = Dense(members, variables * classes, NARROW)
        self.gru = Dense(members, NARROW + deterministic, 3 * deterministic, bias=True)
        self.context = Dense(members, deterministic, NARROW, bias=True)
        self.decoder = Dense(members, NARROW, STATE, bias=True)
        self.losses = Dense(members, NARROW, 2 * len(HORIZONS_IN_WINDOWS))
        self.head = Head(members, NARROW, (HEAD,))

    def categorical(self, logits: Tensor) -> Tensor:
        """[members, rows, variables, classes]"""
        soft = torch.unflatten(logits, -1, (self.variables, self.classes)).softmax(-1)
        return (1 - UNIFORM) * soft + UNIFORM / self.classes

    def sample(self, probabilities: Tensor, generator: torch.Generator) -> Tensor:
        """[..., variables x classes] a one-hot sample of each; its gradient goes to the probabilities."""
        uniform = torch.rand((*probabilities.shape[:-1], 1), generator=generator, device="cpu", dtype=torch.float32)
        chosen = (probabilities.detach().cumsum(-1) < uniform).sum(-1).clamp_(max=self.classes - 1)
        hot = functional.one_hot(chosen, self.classes).to(probabilities.dtype)
        return (hot + probabilities - probabilities.detach()).flatten(-2)

    def step(self, latent: Tensor, recurrent: Tensor) -> Tensor:
        """The gated recurrent unit. It starts inclined to keep what it has."""
        reset, update, new = self.gru(torch.cat([latent, recurrent], -1)).chunk(3, -1)
        return torch.lerp(recurrent, torch.tanh(torch.sigmoid(reset) * new), torch.sigmoid(update - 1))

    def forward(self, states: Tensor, start: Tensor, generator: torch.Generator) -> Seen:
        """`states` [windows, 64]; `start` [members, deterministic] before them."""
        embedded = self.posterior_embed(functional.silu(self.embed(states)))
        path, posteriors, latents = [start[:, None]], [], []
        for window in range(len(states)):
            hidden = functional.silu(self.posterior_in(path[-1]) + embedded[:, window : window + 1])
            posteriors.append(self.categorical(self.posterior_out(hidden)))
            latents.append(self.latent(self.sample(posteriors[-1], generator)))
            path.append(self.step(latents[-1], path[-1]))
        whole = torch.cat(path, 1)
        prior = self.categorical(self.prior_out(functional.silu(self.prior_in(whole))))
        imagined = functional.silu(self.context(whole[:, 1:]) + self.latent(self.sample(prior[:, 1:], generator)))
        return Seen(whole, torch.cat(posteriors, 1), prior[:, :-1], torch.cat(latents, 1), imagined)

    def rebuilt(self, seen: Seen) -> Tensor:
        """[members, windows, 64] the states again."""
        found: Tensor = self.decoder(functional.silu(self.context(seen.path[:, :-1]) + seen.latents))
        return found

    def loss_path(self, context: Tensor) -> Tensor:
        """[members, samples, 2, horizons] shifts of the expected loss, and logarithms of its width."""
        return torch.unflatten(self.losses(context), -1, (2, len(HORIZONS_IN_WINDOWS)))


def group_features(gram: Array, coefficients: Array) -> Tensor:
    """[G, features] relative lengths and cosines of the directions, and the coefficients of the linear fit."""
    known = np.sqrt(np.maximum(np.einsum("gii->gi", gram), 1e-60))
    unit = 1.0 / known
    lengths = np.log(known * unit[:, LAST_WINDOW, None]).clip(-3.0, 3.0)
    cosines = gram[:, _PAIRS[0], _PAIRS[1]] * unit[:, _PAIRS[0]] * unit[:, _PAIRS[1]]
    return single(np.concatenate([lengths, cosines.clip(-1.0, 1.0), coefficients.clip(-2.0, 2.0)], -1))


def units(gram: Array) -> Array:
    """[G, R] what a coefficient of 1 means in lengths of the last window: long directions count less."""
    squares = np.einsum("gii->gi", gram)
    ratio = squares[:, LAST_WINDOW, None] / np.maximum(squares, 1e-300)
    return np.asarray(np.sqrt(ratio.clip(0.0, 4.0)))


def single(array: Array) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))


def draw_weights(network: nn.Module, generator: torch.Generator, but: Sequence[nn.Module]) -> None:
    """First weights of all layers: normal with variance 1 / inputs. Those in `but` stay at zero."""
    for layer in network.modules():
        if isinstance(layer, Dense) and layer not in but:
            draws = torch.randn(layer.weight.shape, generator=generator, device="cpu", dtype=torch.float32)
            layer.weight.data.copy_(draws / layer.weight.shape[1] ** 0.5)
