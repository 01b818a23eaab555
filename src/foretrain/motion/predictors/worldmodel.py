"""The recurrent state-space model itself: one step forward for all members, and the gradients of one member in time.

posterior    z ~ q(. | h, state)         what a window was, as `variables` categoricals of `classes` each
recurrence   h' = GRU(h, z)
prior        z' ~ p(. | h')              what the next window will be
heads        from (h', z'): coefficients and losses to come; from (h, z): the state again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.motion.predictors.networks import HeadPass, Matrices, Single, head_shapes, sigmoid, silu, silu_slope
from foretrain.motion.records import HORIZONS_IN_WINDOWS

STATE = 64
NARROW = 64
"""Width on both sides of the latent, which would otherwise cost the most by far."""
HEAD = 32
UNIFORM = np.float32(0.01)
"""Share of the uniform distribution in every categorical: no class ever becomes impossible."""
FREE_NATS = 1.0
"""Divergence per window that costs nothing."""
DIVERGENCE_WEIGHT = 0.1
BALANCE = np.float32(0.8)
"""How much of the divergence moves the prior to the posterior rather than the other way round."""
LOSS_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    deterministic: int
    variables: int
    classes: int

    def matrices(self) -> dict[str, tuple[int, int]]:
        latent, deterministic = self.variables * self.classes, self.deterministic
        return {
            "embed": (STATE, NARROW),
            "embed_bias": (1, NARROW),
            "latent": (latent, NARROW),
            "gru": (NARROW + deterministic, 3 * deterministic),
            "gru_bias": (1, 3 * deterministic),
            "prior_in": (deterministic, NARROW),
            "prior_out": (NARROW, latent),
            "posterior_in": (deterministic, NARROW),
            "posterior_embed": (NARROW, NARROW),
            "posterior_out": (NARROW, latent),
            "context": (deterministic, NARROW),
            "context_bias": (1, NARROW),
            "decoder": (NARROW, STATE),
            "decoder_bias": (1, STATE),
            "loss_last": (NARROW, 2 * len(HORIZONS_IN_WINDOWS)),
            **head_shapes(NARROW, (HEAD,)),
        }

    def probabilities(self, logits: Single) -> Single:
        """[rows, variables, classes] before the uniform share."""
        shaped = logits.reshape(-1, self.variables, self.classes)
        powers = np.exp(shaped - shaped.max(-1, keepdims=True))
        return np.asarray(powers / powers.sum(-1, keepdims=True))

    def mixed(self, probabilities: Single) -> Single:
        return np.asarray((1 - UNIFORM) * probabilities + UNIFORM / np.float32(self.classes))

    def draw(self, mixed: Single, uniform: Single) -> NDArray[np.int64]:
        """[rows, variables] rows of the latent matrix: classes by inverting the cumulative distribution."""
        chosen = (mixed.cumsum(-1) < uniform[..., None]).sum(-1)
        return np.asarray(np.minimum(chosen, self.classes - 1) + np.arange(self.variables) * self.classes)


@dataclass(frozen=True, slots=True)
class Step:
    """Where all members are after a window."""

    recurrent: Single
    """[members, deterministic]"""
    context: Single
    """[members, 1, narrow] of the imagined next window."""
    losses: Single
    """[members, 2, horizons] corrections of the expected loss and of the logarithm of its width."""


def advance(shape: Shape, weights: Matrices, state: Single, recurrent: Single, uniform: Single) -> Step:
    """Take in a state, step on, and imagine the next window. `uniform`: [2, members, variables] draws."""
    members = np.arange(len(recurrent))[:, None]
    latent = weights["latent"]
    before = recurrent[:, None]
    embedded = silu(state @ weights["embed"] + weights["embed_bias"][:, 0])[:, None] @ weights["posterior_embed"]
    logits = silu(before @ weights["posterior_in"] + embedded) @ weights["posterior_out"]
    rows = shape.draw(shape.mixed(shape.probabilities(logits)), uniform[0])
    joined = np.concatenate([latent[members, rows].sum(1), recurrent], -1)[:, None]
    after, _ = _gru((joined @ weights["gru"] + weights["gru_bias"])[:, 0], recurrent)
    now = after[:, None]
    logits = silu(now @ weights["prior_in"]) @ weights["prior_out"]
    rows = shape.draw(shape.mixed(shape.probabilities(logits)), uniform[1])
    imagined = latent[members, rows].sum(1, keepdims=True)
    context = silu(now @ weights["context"] + weights["context_bias"] + imagined)
    return Step(after, context, (context @ weights["loss_last"]).reshape(len(after), 2, -1))


def _gru(given: Single, recurrent: Single) -> tuple[Single, tuple[Single, Single, Single]]:
    """A gated recurrent unit with one matrix; it starts inclined to keep what it has."""
    size = recurrent.shape[-1]
    reset, update = sigmoid(given[..., :size]), sigmoid(given[..., size : 2 * size] - 1)
    new = np.tanh(reset * given[..., 2 * size :])
    return recurrent + update * (new - recurrent), (reset, update, new)


@dataclass(frozen=True, slots=True)
class Target:
    """Motions to learn from, each at a place within the segment."""

    places: list[int]
    indices: list[int]
    """Of HORIZONS_IN_WINDOWS."""
    groups: Single
    """[samples, G, features]"""
    gram: Single
    dots: Single
    surprises: Single
    """[samples] the loss that followed, in deviations from the expected one."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of a training step."""

    total: float
    nats: float
    """What the posterior knew that the prior did not, per window."""
    reconstruction: float


class Segment:
    """Some windows of one member's past, forward and backward through time."""

    def __init__(self, shape: Shape, weights: Matrices, states: Single, start: Single, uniform: Single) -> None:
        """`states` [T, 64]; `start` [deterministic] before them; `uniform` [2 T, variables] draws."""
        self.shape, self.weights, self.states = shape, weights, states
        count = len(states)
        self.embed_in = states @ weights["embed"] + weights["embed_bias"]
        self.embedded = silu(self.embed_in)
        given = self.embedded @ weights["posterior_embed"]
        latent = weights["latent"]
        self.path = np.empty((count + 1, shape.deterministic), dtype=np.float32)
        self.path[0] = start
        self.posterior_in = np.empty((count, NARROW), dtype=np.float32)
        self.posterior = np.empty((count, shape.variables, shape.classes), dtype=np.float32)
        self.joined = np.empty((count, NARROW + shape.deterministic), dtype=np.float32)
        self.gates: list[tuple[Single, Single, Single]] = []
        self.raw: list[Single] = []
        rows = np.empty((2 * count, shape.variables), dtype=np.int64)
        for t in range(count):
            self.posterior_in[t] = self.path[t] @ weights["posterior_in"] + given[t]
            logits = silu(self.posterior_in[t]) @ weights["posterior_out"]
            self.posterior[t] = shape.probabilities(logits)[0]
            rows[t] = shape.draw(shape.mixed(self.posterior[t]), uniform[t])
            self.joined[t, :NARROW] = latent[rows[t]].sum(0)
            self.joined[t, NARROW:] = self.path[t]
            units_in = self.joined[t] @ weights["gru"] + weights["gru_bias"][0]
            self.path[t + 1], gates = _gru(units_in, self.path[t])
            self.gates.append(gates)
            self.raw.append(units_in[2 * shape.deterministic :])
        self.prior_in = self.path @ weights["prior_in"]
        self.prior = shape.probabilities(silu(self.prior_in) @ weights["prior_out"])
        rows[count:] = shape.draw(shape.mixed(self.prior[1:]), uniform[count:])
        self.hot = np.zeros((2 * count, shape.variables * shape.classes), dtype=np.float32)
        self.hot[np.arange(2 * count)[:, None], rows] = 1
        # One pass for both uses: what was seen (to be rebuilt), and what is imagined (to forecast from).
        self.places = np.concatenate([self.path[:-1], self.path[1:]])
        self.context_in = self.places @ weights["context"] + weights["context_bias"] + latent[rows].sum(1)
        self.context = silu(self.context_in)

    def backward(self, target: Target | None, gradients: Matrices) -> Result:
        """Write the gradient of every matrix of the total of all losses."""
        shape, weights, count = self.shape, self.weights, len(self.states)
        context_error = np.zeros_like(self.context)
        reconstruction = self._rebuild(context_error, gradients)
        forecast = self._forecast(target, context_error, gradients)
        # The context, and through it latents and path.
        inner = context_error * silu_slope(self.context_in)
        np.matmul(self.places.T, inner, out=gradients["context"])
        gradients["context_bias"][0] = inner.sum(0)
        place_error = inner @ weights["context"].T
        path_error = np.zeros_like(self.path)
        path_error[:-1] += place_error[:count]
        path_error[1:] += place_error[count:]
        latent_error = (inner @ weights["latent"].T).reshape(-1, shape.variables, shape.classes)
        nats, to_posterior, to_prior = self._divergence()
        to_posterior += latent_error[:count]
        # Samples pass their gradient on to the probabilities they were drawn from (straight through).
        to_prior[1:] += latent_error[count:]
        logits_error = self._through_softmax(self.prior, to_prior)
        np.matmul(silu(self.prior_in).T, logits_error, out=gradients["prior_out"])
        hidden = (logits_error @ weights["prior_out"].T) * silu_slope(self.prior_in)
        np.matmul(self.path.T, hidden, out=gradients["prior_in"])
        path_error += hidden @ weights["prior_in"].T
        through_time = self._through_time(path_error, to_posterior, gradients)
        np.matmul(self.hot.T, inner, out=gradients["latent"])
        gradients["latent"] += self.hot[:count].T @ through_time
        total = reconstruction + forecast + DIVERGENCE_WEIGHT * max(nats, FREE_NATS)
        return Result(total, nats, reconstruction)

    def _through_time(self, path_error: Single, posterior_error: Single, gradients: Matrices) -> Single:
        """Backwards from window to window; returns the error of what the latents gave to the recurrence."""
        weights, count, size = self.weights, len(self.states), self.shape.deterministic
        unit_errors = np.empty((count, 3 * size), dtype=np.float32)
        latent_errors = np.empty((count, NARROW), dtype=np.float32)
        logit_errors = np.empty((count, self.hot.shape[1]), dtype=np.float32)
        hidden_errors = np.empty((count, NARROW), dtype=np.float32)
        slopes = silu_slope(self.posterior_in)
        for t in range(count - 1, -1, -1):
            error, (reset, update, new), raw = path_error[t + 1], self.gates[t], self.raw[t]
            inside = error * update * (1 - new * new)
            unit = unit_errors[t]
            unit[:size] = inside * raw * reset * (1 - reset)
            unit[size : 2 * size] = error * (new - self.path[t]) * update * (1 - update)
            unit[2 * size :] = inside * reset
            joined = weights["gru"] @ unit
            latent_errors[t] = joined[:NARROW]
            whole = posterior_error[t] + (weights["latent"] @ latent_errors[t]).reshape(posterior_error[t].shape)
            logit_errors[t] = self._through_softmax(self.posterior[t], whole)[0]
            hidden_errors[t] = (weights["posterior_out"] @ logit_errors[t]) * slopes[t]
            path_error[t] += error * (1 - update) + joined[NARROW:] + weights["posterior_in"] @ hidden_errors[t]
        np.matmul(self.joined.T, unit_errors, out=gradients["gru"])
        gradients["gru_bias"][0] = unit_errors.sum(0)
        np.matmul(silu(self.posterior_in).T, logit_errors, out=gradients["posterior_out"])
        np.matmul(self.path[:-1].T, hidden_errors, out=gradients["posterior_in"])
        np.matmul(self.embedded.T, hidden_errors, out=gradients["posterior_embed"])
        inner = (hidden_errors @ weights["posterior_embed"].T) * silu_slope(self.embed_in)
        np.matmul(self.states.T, inner, out=gradients["embed"])
        gradients["embed_bias"][0] = inner.sum(0)
        return latent_errors

    def _rebuild(self, context_error: Single, gradients: Matrices) -> float:
        """Smooth absolute error of the states rebuilt from what was seen."""
        count = len(self.states)
        seen = self.context[:count]
        off = seen @ self.weights["decoder"] + self.weights["decoder_bias"] - self.states
        near = off.clip(-1, 1)
        error = near / np.float32(off.size)
        np.matmul(seen.T, error, out=gradients["decoder"])
        gradients["decoder_bias"][0] = error.sum(0)
        context_error[:count] += error @ self.weights["decoder"].T
        return float((near * (off - np.float32(0.5) * near)).mean())

    def _forecast(self, target: Target | None, context_error: Single, gradients: Matrices) -> float:
        """Relative error of the coefficients, and negative log-likelihood of the losses."""
        if target is None:
            for name, gradient in gradients.items():
                if name.startswith(("head", "loss")):
                    gradient[...] = 0
            return 0.0
        imagined = context_error[len(self.states) :]
        context = self.context[len(self.states) :][target.places]
        head = HeadPass(self.weights, context, target.groups, target.indices)
        along, error = quadratic_error(target.gram, target.dots, head.result)
        given = head.backward(error, gradients)
        samples = np.arange(len(target.places))
        losses = (context @ self.weights["loss_last"]).reshape(len(samples), 2, -1)[samples, :, target.indices]
        width = losses[:, 1].clip(-1, 1)
        sharp = np.exp(-width)
        off = (target.surprises - losses[:, 0]) * sharp
        likelihood = float((np.float32(0.5) * off * off + width).mean())
        loss_error = np.zeros((len(samples), 2, len(HORIZONS_IN_WINDOWS)), dtype=np.float32)
        share = np.float32(LOSS_WEIGHT / len(samples))
        loss_error[samples, 0, target.indices] = -share * off * sharp
        loss_error[samples, 1, target.indices] = share * (1 - off * off) * (np.abs(losses[:, 1]) < 1)
        flat = loss_error.reshape(len(samples), -1)
        np.matmul(context.T, flat, out=gradients["loss_last"])
        np.add.at(imagined, target.places, given + flat @ self.weights["loss_last"].T)
        return along + LOSS_WEIGHT * likelihood

    def _divergence(self) -> tuple[float, Single, Single]:
        """Kullback-Leibler divergence per window, with its gradients for the posterior and for the prior."""
        posterior, prior = self.shape.mixed(self.posterior), self.shape.mixed(self.prior)
        ratio = np.log(posterior / prior[:-1])
        nats = float((posterior * ratio).sum()) / len(posterior)
        share = np.float32(DIVERGENCE_WEIGHT / len(posterior) if nats > FREE_NATS else 0.0)
        to_prior = np.zeros_like(prior)
        to_prior[:-1] = -share * BALANCE * posterior / prior[:-1]
        to_posterior: Single = share * (1 - BALANCE) * (ratio + 1)
        return nats, to_posterior, to_prior

    def _through_softmax(self, probabilities: Single, error: Single) -> Single:
        """[rows, latent] gradient of the logits from that of the mixed probabilities."""
        weighted = probabilities * error
        flat = weighted - probabilities * weighted.sum(-1, keepdims=True)
        return np.asarray((1 - UNIFORM) * flat).reshape(-1, self.hot.shape[1])


def quadratic_error(gram: Single, dots: Single, correction: Single) -> tuple[float, Single]:
    """Mean change of the relative squared error by corrections [samples, G, R] in `units`, and its gradient."""
    bent = (gram @ correction[..., None])[..., 0]
    share = np.float32(1.0 / (correction.shape[0] * correction.shape[1]))
    return float(((bent - 2 * dots) * correction).sum() * share), 2 * share * (bent - dots)


def joined(targets: Sequence[tuple[Single, Single, Single]]) -> tuple[Single, Single, Single]:
    """Groups, gram and dots of several samples, stacked."""
    groups, gram, dots = zip(*targets, strict=True)
    return np.stack(groups), np.stack(gram), np.stack(dots)
