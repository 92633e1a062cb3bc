"""The fault matrix, planted by kernels: the same table and the same expectations as by simulated work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_cells import PLANT
from fault_matrix import ON_GPU, Cell
from page_guard_cells import assert_one_sticky_error_and_the_planted_block, run

from gpu.gpu_scene import GpuScene

pytestmark = pytest.mark.gpu


class OnGpu:
    """A GPU that cells are planted on."""

    def __init__(self, gpu: GpuScene) -> None:
        self._gpu = gpu
        self.pool = gpu.pool
        self.stream = gpu.stream

    def poke(self, stream: Any, address: int, count: int) -> None:
        for at in range(address, address + count):
            self._gpu.kernels.write_byte(stream, at, 0)
        stream.sync()


@pytest.mark.parametrize("cell", [cell for cell in ON_GPU if cell.row in PLANT], ids=str)
def test_a_fault_planted_by_a_kernel_is_reported_once_with_its_kind_bytes_and_stacks(gpu: GpuScene, cell: Cell) -> None:
    PLANT[cell.row](OnGpu(gpu), cell)


@pytest.mark.parametrize("cell", [cell for cell in ON_GPU if cell.row.startswith("illegal_access")], ids=str)
def test_a_kernel_that_stops_the_device_leaves_one_sticky_error_and_the_planted_block_among_the_candidates(
    cell: Cell, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("device", "cuda:0")  # the work is done in a child
    what = "after_free" if cell.row.endswith("after free") else "past"
    records = tmp_path / "guards.jsonl"
    found = run("cuda:0", what, cell.size.bytes, records, alignment=cell.size.alignment)
    assert_one_sticky_error_and_the_planted_block(found, records)
