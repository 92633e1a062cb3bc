"""The fault matrix: what is planted, in which memory, in blocks of which size, and where no test can be, why.

One table. `tests/test_fault_matrix.py` plants each cell by simulated work, `tests/gpu/test_fault_matrix_gpu.py` by
kernels of a GPU; `docs/faults/matrix.md` shows it.

    python tests/fault_matrix.py    # writes that page
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "faults" / "matrix.md"

KIB, MIB = 1024, 1 << 20
KINDS = ("device", "pinned", "managed")


@dataclass(frozen=True)
class Size:
    """A block's size and alignment in bytes; `edge`: the block is the first or last one of its slab."""

    name: str
    bytes: int
    alignment: int = 256
    edge: bool = False


SIZES = (
    Size("1", 1),
    Size("255", 255),
    Size("256", 256),
    Size("257", 257),
    Size("1013", 1013),
    Size("4096", 4096),
    Size("4097", 4097),
    Size("slab edge", 4096, edge=True),
    Size("3 MiB", 3 * MIB),
    Size("4 KiB-aligned", 4096, alignment=4096),
)

# Each row: what is planted. Rows of leaks are not damage, and are found the same way.
ROWS = {
    "overrun": "two bytes behind the end are written; at a slab's edge its last two",
    "underrun": "two bytes before the start are written; at a slab's edge its first two",
    "write_after_free": "bytes in the middle are written after the free and a check",
    "double_free": "the block is freed twice",
    "foreign_free": "the address of memory of so many bytes that is no pool's is freed",
    "interior_free": "an address inside the block, or in its slack, is freed",
    "wrong_pool_free": "the block is freed to another pool of the same kind",
    "trampled_record": "the block's record in host memory is overwritten, and the block freed",
    "size_mismatch": "the free names another size",
    "illegal_access": "a byte outside the block's pages is written",
    "illegal_access after free": "a byte of the block is written after its pages were revoked",
    "race": "two streams write the block, and nothing orders them",
    "lost": "a raw block is not freed",
    "growing": "blocks of one line are kept, more in each epoch",
    "held": "a buffer is kept",
}


@dataclass(frozen=True)
class Cell:
    """One planted fault. `not_simulated`, `not_on_gpu`: why there is no test; empty: there is one."""

    row: str
    kind: str
    size: Size
    not_simulated: str = ""
    not_on_gpu: str = ""

    def __str__(self) -> str:
        return f"{self.row}-{self.kind}-{self.size.name}"


_DEVICE_ONLY = "page guards are for device memory: only virtual memory can have gaps"
_NO_SLAB = "a block with page guards lies in no slab"
_SAME_RECORD = "records are host memory, whatever the block's: the code is the one that simulated work tests"
_NOT_ORDERED = "on a GPU the order of work that kernels make is not known"
_NO_PLACE = "growth is of a line, not of a place in a slab"
_NO_RECORD = "what is overwritten is the record, which lies in no slab"
_TOO_SMALL = "a site counts as growing from 1 MiB on: a million blocks of this size"


def _cell(row: str, kind: str, size: Size) -> Cell:
    nowhere = on_gpu = ""
    if row.startswith("illegal_access"):
        nowhere = _DEVICE_ONLY if kind != "device" else _NO_SLAB if size.edge else ""
    if row == "growing" and size.bytes == 1:
        nowhere = _TOO_SMALL
    if row == "growing" and size.edge:
        nowhere = _NO_PLACE
    if row == "trampled_record" and size.edge:
        nowhere = _NO_RECORD
    if row == "trampled_record":
        on_gpu = _SAME_RECORD
    if row == "race":
        on_gpu = _NOT_ORDERED
    return Cell(row, kind, size, not_simulated=nowhere, not_on_gpu=nowhere or on_gpu)


CELLS = tuple(_cell(row, kind, size) for row in ROWS for kind in KINDS for size in SIZES)
SIMULATED = [cell for cell in CELLS if not cell.not_simulated]
ON_GPU = [cell for cell in CELLS if not cell.not_on_gpu]


def page() -> str:
    """Give the documentation's page of the matrix."""
    reasons: dict[str, int] = {}

    def mark(cell: Cell) -> str:
        if not cell.not_on_gpu:
            return "●"
        number = reasons.setdefault(cell.not_on_gpu, len(reasons) + 1)
        return f"{'·' if cell.not_simulated else '○'} ({number})"

    lines = [
        "# The fault matrix",
        "",
        "Every kind of finding, planted in blocks of every kind of memory and of sizes where bounds lie. Each must be",
        "reported once, as the right kind, with the right first and last byte and the right stacks.",
        "",
        "● planted by simulated work in each run of the tests, and by a kernel where there is a GPU; ○ by simulated",
        "work only; · not at all.",
        "",
        f"{len(SIMULATED)} cells of {len(CELLS)} by simulated work, {len(ON_GPU)} on a GPU. Written by",
        "`python tests/fault_matrix.py`.",
    ]
    for row, what in ROWS.items():
        lines += ["", f"**{row}**: {what}", "", f"| memory | {' | '.join(size.name for size in SIZES)} |"]
        lines.append("|---" * (len(SIZES) + 1) + "|")
        for kind in KINDS:
            of_kind = [cell for cell in CELLS if (cell.row, cell.kind) == (row, kind)]
            lines.append(f"| {kind} | {' | '.join(map(mark, of_kind))} |")
    lines.append("")
    lines += [f"({number}) {reason}.  " for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
