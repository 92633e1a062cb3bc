"""A plain PyTorch training script: a small GPT-2, sequences of changing length. Knows nothing of streampool.

The model is that of transformers, or one of its shape in PyTorch alone where that is not installed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from torch import nn
from torch.nn import functional

LAYERS, HEADS, WIDTH, WORDS, LONGEST = 6, 8, 512, 8192, 1024


class Block(nn.Module):
    """Causal attention and a feed-forward part, each after a norm (Radford et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.forward_part = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.inputs(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outputs(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.forward_part(self.between(x))


class Gpt(nn.Module):
    """What GPT2LMHeadModel is to this script."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.norm(self.blocks(x)) @ self.words.weight.T
        return functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def make() -> tuple[nn.Module, str]:
    """Give the model, which maps tokens to a loss, and whose it is."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return Gpt(), "PyTorch alone"

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=WORDS))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss

    return Loss(), "transformers"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    torch.manual_seed(0)
    lengths = random.Random(0)
    model, whose = make()
    model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times = []
    for _ in range(options.steps):
        tokens = torch.randint(0, WORDS, (options.batch, lengths.randrange(128, 769, 64)))
        wait()
        begin = time.perf_counter()
        loss = model(tokens.to(options.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wait()
        times.append((time.perf_counter() - begin) / tokens.shape[1])
    warm = times[options.steps // 3 :]
    print(
        json.dumps(
            {
                "script": "gpt",
                "step_ms": 1e3 * 512 * statistics.median(warm),  # of 512 tokens
                "peak_reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
                "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
                "loss": round(loss.item(), 3),
                "model": whose,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
