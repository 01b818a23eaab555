"""How the next token is chosen from the logits: pure functions, and one object that applies them to a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretrain.errors import InputError

LOWEST_TEMPERATURE = 1e-5
"""Below it a float32 cannot hold the quotients; nobody can tell it from greedy."""
FIRST_LOOK = 512
"""Top-p sorts only so many logits on a CPU, and all of them only where these do not hold enough probability."""


@dataclass(frozen=True)
class Sampling:
    """How one text is continued, and when it ends."""

    max_tokens: int = 100
    temperature: float = 1.0
    """0: always the most probable token."""
    top_k: int = 0
    """Only the k most probable tokens; of equal ones those with the lower numbers. 0: all."""
    top_p: float = 1.0
    """Only the smallest set of most probable tokens that holds this much probability (after temperature and top_k)."""
    repetition_penalty: float = 1.0
    """It divides positive logits of tokens that occurred in the prompt or since, and multiplies negative ones."""
    seed: int | None = None
    """One seed gives one text, whatever else is in the batch. None: another text every time."""
    stop_tokens: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    """The text ends before the first of these; it is not part of the result."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            raise InputError(f"stop_strings = {self.stop_strings!r} is one string; write ({self.stop_strings!r},)")
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        greedy_or_warm = self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < math.inf
        limits = {
            "max_tokens": (self.max_tokens >= 1, "1 or more"),
            "temperature": (greedy_or_warm, f"0 (greedy) or {LOWEST_TEMPERATURE} and more"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0; 1 changes nothing"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "None or from 0 to 2**63 - 1"),
            "stop_tokens": (all(token >= 0 for token in self.stop_tokens), "token numbers, 0 or more"),
            "stop_strings": (all(self.stop_strings), "strings of at least one character"),
        }
        for name, (is_possible, wanted) in limits.items():
            if not is_possible:
                raise InputError(f"{name} = {getattr(self, name)!r} is impossible; it must be {wanted}")


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """`seen` [batch, vocabulary] is true for tokens that occurred; how often makes no difference."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """The largest becomes 0, so that no quotient overflows."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but exactly the `k` largest become -inf."""
    if not 0 < k < logits.shape[-1]:
        return logits
    return _keep_largest(logits, logits.topk(k).values[..., -1:], k)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """All become -inf but the smallest set of largest ones whose probability reaches `p`; at least one stays."""
    if p >= 1:
        return logits
    largest = logits.amax(-1, keepdim=True)
    goal = p * (logits - largest).exp().sum(-1, keepdim=True, dtype=torch.float64)
    vocabulary = logits.shape[-1]
    look = FIRST_LOOK if logits.device.type == "cpu" else vocabulary
    while True:
        look = min(look, vocabulary)
        ordered = logits.sort(descending=True).values if look == vocabulary else logits.topk(look).values
        weights = (ordered - largest).exp()
        before = weights.cumsum(-1, dtype=torch.float64) - weights
        size = (before < goal).sum(-1, keepdim=True).clamp_(min=1)
        if look == vocabulary or int(size.max()) < look:
            return _keep_largest(logits, ordered.gather(-1, size - 1), size)
        look = vocabulary


def _keep_largest(logits: Tensor, threshold: Tensor, count: Tensor | int) -> Tensor:
    """The `count` largest, the last of which equals `threshold`; of equal ones those with the lower numbers."""
    above, tied = logits > threshold, logits == threshold
    room = count - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (tied & (tied.cumsum(-1) <= room))), -torch.inf)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row from softmax(logits), by `uniforms` [batch] in [0, 1) through the inverse of the sums."""
    sums = logits.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
    goal = (1 - uniforms)[:, None] * sums[:, -1:]  # in (0, total]: never before the first, never a token of no weight
    return torch.searchsorted(sums, goal)[:, 0].clamp_(max=logits.shape[-1] - 1)  # NaN would point behind the end


def next_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor, seen: Tensor | None) -> Tensor:
    """Return the chosen token of each row: penalty, temperature, top-k, top-p, in this order."""
    if seen is not None and sampling.repetition_penalty != 1:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    if sampling.temperature != 1:
        logits = apply_temperature(logits, sampling.temperature)
    return draw(keep_top_p(keep_top_k(logits, sampling.top_k), sampling.top_p), uniforms)


class Chooser:
    """The next token of every row of a batch, each by its own settings and its own random numbers."""

    def __init__(
        self,
        samplings: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        steps: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._step = 0
        self._uniforms = torch.zeros(steps, len(samplings), dtype=torch.float64)
        for row, sampling in enumerate(samplings):
            if sampling.temperature != 0:
                generator = torch.Generator()
                generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
                self._uniforms[:, row] = torch.rand(steps, dtype=torch.float64, generator=generator)
        self._uniforms = self._uniforms.to(device)
        self._seen: Tensor | None = None
        if any(sampling.repetition_penalty != 1 for sampling in samplings):
            seen = torch.zeros(len(samplings), vocab_size, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                seen[row, torch.tensor(prompt, dtype=torch.long)] = True
            self._seen = seen.to(device)
        alike: dict[tuple[float, ...], list[int]] = {}
        for row, it in enumerate(samplings):
            alike.setdefault((it.temperature, it.top_k, it.top_p, it.repetition_penalty), []).append(row)
        self._groups = [(samplings[rows[0]], torch.tensor(rows, device=device)) for rows in alike.values()]

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [batch] and their log-probabilities [batch] under the model's own distribution.

        That is the log-softmax of the logits as they are, before penalty, temperature, top-k and top-p.
        """
        logits = logits.float()
        uniforms, seen = self._uniforms[self._step], self._seen
        self._step += 1
        if len(self._groups) == 1:
            chosen = next_tokens(logits, self._groups[0][0], uniforms, seen)
        else:
            chosen = torch.empty(len(logits), dtype=torch.long, device=logits.device)
            for sampling, rows in self._groups:
                seen_here = None if seen is None else seen[rows]
                chosen[rows] = next_tokens(logits[rows], sampling, uniforms[rows], seen_here)
        if seen is not None:
            seen.scatter_(1, chosen[:, None], True)
        return chosen, logits.gather(-1, chosen[:, None])[:, 0] - logits.logsumexp(-1)
