"""The programs of docs/libraries run: by lookalikes on the simulated device, with the real libraries on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from attach_scene import python, watched

PAGES = sorted((Path(__file__).parent.parent / "docs" / "libraries").glob("*.md"))
NEEDS_A_GPU = "<!-- needs a GPU -->"
ON_SIM = 'sp.Device("sim")'


def program_of(page: Path) -> str:
    """The first program of a page; README's is a fragment."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0]


PROGRAMS = [page for page in PAGES if page.name != "README.md"]


@pytest.mark.parametrize("page", [p for p in PROGRAMS if NEEDS_A_GPU not in p.read_text()], ids=lambda page: page.stem)
def test_the_program_of_a_page_runs_on_the_simulated_device(page: Path, tmp_path: Path) -> None:
    ended = watched(tmp_path, program_of(page), "--libraries", "none")
    assert ended.code == 0, ended.err
    assert ended.out
    assert ended.report["coverage"]["blocks_allocated"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("page", [p for p in PROGRAMS if ON_SIM not in p.read_text()], ids=lambda page: page.stem)
def test_the_program_of_a_page_runs_on_a_gpu(page: Path, record_property: Callable[[str, object], None]) -> None:
    record_property("device", "cuda:0")
    ended = python(program_of(page), lookalikes=False)
    assert ended.code == 0, ended.err
    assert ended.out


def test_the_table_of_libraries_and_their_pages_are_the_same() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", (PAGES[0].parent / "README.md").read_text()))
    assert listed == {page.name for page in PROGRAMS}
