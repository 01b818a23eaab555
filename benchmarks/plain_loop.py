"""The reference: a GPT and a training loop as most people write them, in nanoGPT's loop shape. Nothing of foretrain."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Size:
    layers: int
    heads: int
    width: int
    context: int
    vocab: int


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.ln1, self.ln2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.fc, self.out = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(c, dim=2)
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocab, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scaled = name.endswith(("proj.weight", "out.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * size.layers) if scaled else 0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(h)))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))


def plain_loop(
    size: Size, batch: int, device: str, *, dtype: torch.dtype, compiled: bool, tf32: bool, data: np.ndarray
) -> Callable[[int], None]:
    """A function that trains `n` steps. Random windows, fused AdamW, clipping at 1, cosine-like rate set every step."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.manual_seed(1)
    model = PlainGPT(size).to(device)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if compiled else model
    generator = torch.Generator().manual_seed(1)
    done = 0

    def get_batch() -> tuple[Tensor, Tensor]:
        places = torch.randint(len(data) - size.context - 1, (batch,), generator=generator)
        x = torch.stack([torch.from_numpy(data[i : i + size.context].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + size.context].astype(np.int64)) for i in places])
        if device == "cuda":
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x, y

    x, y = get_batch()

    def train(steps: int) -> None:
        nonlocal x, y, done
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32  # other arms share the process
        for _ in range(steps):
            done += 1
            rate = 6e-4 * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done / 10_000)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast(device, dtype=dtype) if dtype != torch.float32 else nullcontext():
                loss = run(x, y)
            x, y = get_batch()  # while the GPU is busy
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if done % 10 == 0:
                float(loss.detach())  # a loop logs its loss now and then

    return train
