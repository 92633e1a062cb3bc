"""A plain PyTorch training script: ResNet-18. Knows nothing of streampool; prints one line of JSON at its end."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions and a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.first(x)))
        return torch.relu(y + self.shortcut(x))


def resnet18(classes: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    torch.manual_seed(0)
    model = resnet18(1000).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(options.batch, 3, 224, 224)
    labels = torch.randint(0, 1000, (options.batch,))
    times = []
    for _ in range(options.steps):
        wait()
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images.to(options.device)), labels.to(options.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wait()
        times.append(time.perf_counter() - begin)
    warm = times[options.steps // 3 :]
    print(
        json.dumps(
            {
                "script": "resnet18",
                "step_ms": 1e3 * statistics.median(warm),
                "peak_reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
                "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
                "loss": round(loss.item(), 3),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
