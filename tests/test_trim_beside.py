"""Trimming beside threads that allocate and free: a piece that goes to the driver may come back at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from scene import MIB, scene


@pytest.mark.parametrize(
    ("kind", "options"),
    [("pinned", {}), ("managed", {}), ("device", {"segments": "malloc"}), ("device", {"segments": "driver"})],
)
def test_trimming_beside_other_threads_hands_nothing_out_twice(kind: str, options: dict[str, Any]) -> None:
    """Found by a tester: a buffer closed once raised DoubleFreeError after another thread's trim."""
    with scene(seed=None) as sc:
        pool = sc.pool(kind=kind, **options)
        problems: list[BaseException] = []
        stop = threading.Event()

        def work(seed: int) -> None:
            stream = sc.device.create_stream()
            try:
                for i in range(150):
                    block = pool.allocate((2 + (i * seed) % 5) * MIB, stream=stream)
                    block.close(stream)
            except BaseException as error:
                problems.append(error)

        def trim() -> None:
            while not stop.is_set():
                pool.trim()

        trimmer = threading.Thread(target=trim)
        workers = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3)]
        for thread in (trimmer, *workers):
            thread.start()
        for thread in workers:
            thread.join(60)
        stop.set()
        trimmer.join(60)
        assert problems == []
        sc.device.sync()
        pool.trim()
        assert pool.audit() == ""
        assert pool.stats().live_blocks == 0
