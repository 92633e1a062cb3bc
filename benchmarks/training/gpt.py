"""A plain PyTorch training script: a small GPT-2 of transformers, sequences of changing length. Knows nothing of us."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    lengths = random.Random(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_head=8, n_embd=512, vocab_size=8192)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times = []
    for _ in range(options.steps):
        tokens = torch.randint(0, 8192, (options.batch, lengths.randrange(128, 769, 64)))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        tokens = tokens.cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / tokens.shape[1])
    warm = times[options.steps // 3 :]
    print(
        json.dumps(
            {
                "script": "gpt",
                "step_ms": 1e3 * 512 * statistics.median(warm),  # of 512 tokens
                "peak_reserved": torch.cuda.max_memory_reserved(),
                "peak_allocated": torch.cuda.max_memory_allocated(),
                "loss": round(loss.item(), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
