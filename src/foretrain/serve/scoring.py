"""How good are the answers? Classes are told apart by likelihood, generated text is compared with what was wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretrain.data.examples import LENGTH_STEP, Example, encode_prompts
from foretrain.data.tokenizers import Tokenizer
from foretrain.errors import InputError

Logits = Callable[[Tensor], Tensor]
"""[rows, length] token numbers to [rows, length, vocabulary]; a model in evaluation mode is one."""


class ClassScorer:
    """Log-likelihoods of a fixed set of answers, each with its end of text, so that a class may begin another.

    One forward pass over a prompt and one class also tells how every other class goes on where it leaves the first.
    A log-likelihood only falls as a class gets longer, so what is known of it is a bound, and the best class is found
    for certain when the highest bound is complete: after a few passes, not one for each class.
    """

    def __init__(self, answers: Sequence[str], tokenizer: Tokenizer, context: int) -> None:
        if not answers or len(set(answers)) < len(answers):
            raise InputError(f"{len(answers)} classes with {len(set(answers))} different answers; name each one once")
        self.answers = tuple(answers)
        self.tokenizer = tokenizer
        self.context = context
        encoded = [[*map(int, tokens), tokenizer.end_of_text] for tokens in tokenizer.encode_batch(answers)]
        self._lengths = torch.tensor([len(tokens) for tokens in encoded])
        self._longest = int(self._lengths.max())
        if self._longest > context:
            raise InputError(f"a class has {self._longest - 1} tokens and does not fit the context of {context}")
        self._tokens = torch.full((len(encoded), self._longest), tokenizer.end_of_text)
        for row, tokens in zip(self._tokens, encoded, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        self._parting = self._parting_places()

    def _parting_places(self) -> Tensor:
        """Return [passed, class]: the place of the last token of each class that a pass over another one tells
        about."""
        same = self._tokens[:, None] == self._tokens[None]
        shared = same.long().cumprod(dim=2).sum(dim=2)
        return torch.minimum(shared, self._lengths[None] - 1)

    @torch.no_grad()
    def scores(
        self, logits: Logits, prompts: Sequence[str], batch_size: int = 32, device: str | torch.device = "cpu"
    ) -> Tensor:
        """Return all log-likelihoods [prompts, classes]: a pass for every prompt and class at the worst."""
        return self._search(logits, prompts, batch_size, device, everything=True)

    @torch.no_grad()
    def predict(
        self, logits: Logits, prompts: Sequence[str], batch_size: int = 32, device: str | torch.device = "cpu"
    ) -> list[str]:
        """Return the most likely class of each prompt."""
        bounds = self._search(logits, prompts, batch_size, device, everything=False)
        return [self.answers[place] for place in bounds.argmax(dim=1).tolist()]

    def accuracy(
        self, logits: Logits, examples: Sequence[Example], batch_size: int = 32, device: str | torch.device = "cpu"
    ) -> float:
        """Return the share of examples whose answer is the most likely class."""
        predicted = self.predict(logits, [example.prompt for example in examples], batch_size, device)
        return exact_match(predicted, [example.answer for example in examples])

    def _search(
        self, logits: Logits, prompts: Sequence[str], batch_size: int, device: str | torch.device, everything: bool
    ) -> Tensor:
        room = self.context - self._longest + 1  # the end itself is no input
        encoded = [[*map(int, tokens[-room:])] for tokens in encode_prompts(prompts, self.tokenizer)]
        order = sorted(range(len(encoded)), key=lambda place: len(encoded[place]))  # little padding in a batch
        bounds = torch.empty(len(encoded), len(self.answers))
        for first in range(0, len(order), batch_size):
            places = order[first : first + batch_size]
            bounds[places] = self._search_batch(logits, [encoded[place] for place in places], device, everything)
        return bounds

    def _search_batch(
        self, logits: Logits, prompts: list[list[int]], device: str | torch.device, everything: bool
    ) -> Tensor:
        bounds = torch.zeros(len(prompts), len(self.answers))
        known = torch.zeros(len(prompts), len(self.answers), dtype=torch.long)
        rows = torch.arange(len(prompts))
        while len(rows):
            unfinished = (known[rows] < self._lengths).long()
            passed = (unfinished if everything else bounds[rows]).argmax(dim=1)
            told = self._pass(logits, [prompts[row] for row in rows.tolist()], passed, device)
            reach = self._parting[passed] + 1
            deeper = reach > known[rows]
            bounds[rows] = torch.where(deeper, told, bounds[rows])
            known[rows] = torch.where(deeper, reach, known[rows])
            complete = known == self._lengths
            done = complete.all(dim=1) if everything else complete.gather(1, bounds.argmax(1, keepdim=True))[:, 0]
            rows = (~done).nonzero()[:, 0]
        return bounds

    def _pass(self, logits: Logits, prompts: list[list[int]], passed: Tensor, device: str | torch.device) -> Tensor:
        """Return [prompts, classes]: the log-likelihood of each class up to where it parts from the one passed over."""
        starts = torch.tensor([len(prompt) for prompt in prompts])
        length = min(self.context, -(-(int(starts.max()) + self._longest - 1) // LENGTH_STEP) * LENGTH_STEP)
        tokens = torch.full((len(prompts), length), self.tokenizer.end_of_text)
        for row, prompt, answer in zip(tokens, prompts, self._tokens[passed], strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
            row[len(prompt) : len(prompt) + self._longest - 1] = answer[:-1]
        output = logits(tokens.to(device))
        rows = torch.arange(len(prompts), device=output.device)[:, None]
        places = (starts[:, None] - 1 + torch.arange(self._longest)).to(output.device)
        log_likelihoods = output[rows, places].float().log_softmax(dim=-1)  # [prompts, longest, vocabulary]
        path = log_likelihoods.gather(2, self._tokens[passed].to(output.device)[..., None])[..., 0]
        before = torch.nn.functional.pad(path.cumsum(dim=1), (1, 0))
        parting = self._parting[passed].to(output.device)
        leaving = self._tokens.to(output.device).expand(len(prompts), -1, -1).gather(2, parting[..., None])[..., 0]
        return (before.gather(1, parting) + log_likelihoods[rows, parting, leaving]).cpu()


def exact_match(predicted: Sequence[str], answers: Sequence[str], final_answer: str | None = None) -> float:
    """Return the share of predictions that are the answer, apart from white space around them.

    `final_answer`: a marker, such as "####"; then only what follows it on its line counts, numbers without the commas
    between their digits. A prediction without the marker is wrong.
    """
    if len(predicted) != len(answers) or not answers:
        raise InputError(f"{len(predicted)} predictions for {len(answers)} answers; there must be one for each")
    if final_answer is None:
        return sum(p.strip() == a.strip() for p, a in zip(predicted, answers, strict=True)) / len(answers)
    wanted = [_final(answer, final_answer) for answer in answers]
    if None in wanted:
        raise InputError(
            f"answer {wanted.index(None) + 1} has no {final_answer!r}; name the marker that all of them have"
        )
    right = sum(_final(text, final_answer) == want for text, want in zip(predicted, wanted, strict=True))
    return right / len(answers)


def _final(text: str, marker: str) -> str | None:
    _, found, rest = text.partition(marker)
    if not found:
        return None
    line = rest.strip(" \t").partition("\n")[0].strip()
    return line.replace(",", "") if line.replace(",", "").lstrip("-+$").replace(".", "", 1).isdigit() else line
