"""The text of a report: what a person reads in one minute on 100 columns, the same in a terminal and in a pipe.

Order of a fault: kind; one sentence; byte map; block facts; allocated at; freed at; neighbours; window; what to do
next; SUMMARY; dedup token. Then leaks, coverage, suppressions and the SUMMARY of all.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from streampool import _report_words as words
from streampool._bytemap import byte_map, reads_as
from streampool.faults import BlockFacts, Fault, Frame, byte_count
from streampool.leaks import Leak
from streampool.report import Coverage, Report
from streampool.suppressions import suggest

__all__ = ["render"]

_LABEL = 16  # columns of the labels at the left
_FRAMES = 8  # shown of a stack
_LEAKS = 20  # shown of the leaks
_FAULTS = 20  # shown of the groups of faults
_CANDIDATES = 10  # shown of the blocks that an illegal access may have been meant for
_MIN_WIDTH = 40


class _Page:
    """Lines for a rich console, wrapped here and not by the console: stacks and maps stay whole, in a pipe too."""

    def __init__(self, width: int) -> None:
        self.width = max(width, _MIN_WIDTH)
        self.lines: list[Text] = []

    def line(self, text: str = "", style: str = "") -> None:
        self.lines.append(Text(text, style=style))

    def rule(self, title: str, style: str) -> None:
        self.line(f"=== {title} ".ljust(self.width, "="), style)

    def prose(self, text: str, style: str = "", indent: int = 0) -> None:
        pad = " " * indent
        for line in textwrap.wrap(
            text, self.width, initial_indent=pad, subsequent_indent=pad, break_long_words=False, break_on_hyphens=False
        ):
            self.line(line, style)

    def field(self, label: str, text: str | Iterable[str], style: str = "") -> None:
        """Put a label at the left, and text beside it: a sentence is wrapped, lines are kept whole."""
        room = max(self.width - _LABEL, _MIN_WIDTH // 2)
        if isinstance(text, str):
            text = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(text):
            left = Text(f"  {label if number == 0 else '':<{_LABEL - 2}}", style="dim")
            self.lines.append(left + Text(line, style=style))


def render(report: Report, *, color: bool = False, width: int = 100) -> str:
    """Give the text of `report`, without the last line end."""
    page = _Page(width)
    if opening := words.opening(report.coverage):
        page.prose(f"COVERAGE: {opening}", "bold")
        page.line()
    groups = report.grouped_faults
    for number, group in enumerate(groups[:_FAULTS], 1):
        _fault(page, group, number, len(groups))
    if len(groups) > _FAULTS:
        page.prose(f"Omitting {len(groups) - _FAULTS} more kinds of faults; the JSON report has all.")
        page.line()
    _leaks(page, report)
    _end(page, report)
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=page.width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for line in page.lines:
        console.print(line, soft_wrap=True)
    return buffer.getvalue().rstrip("\n")


# -- faults -----------------------------------------------------------------------------------------------------------
def _fault(page: _Page, group: Sequence[Fault], number: int, of: int) -> None:
    fault = group[0]
    page.rule(f"FAULT {number} of {of}: {fault.kind}", "bold red")
    page.prose(fault.sentence, "bold")
    if where := words.where(group):
        page.prose(where)
    if fault.note:
        page.prose(f"note: {fault.note}")
    _bytes(page, fault)
    if fault.at:
        _stack(page, "called at", fault.at)
    if fault.other_at:
        _stack(page, "other use at", fault.other_at)
    if fault.block is not None:
        _block(page, fault.block)
    for side, other in (("below", fault.below), ("above", fault.above)):
        if other is not None:
            page.field(side, words.neighbour(side, fault.block, other))
    if window := words.window(fault):
        page.field("window", window)
    if fault.scopes:
        page.field("scopes", "open in the window: " + ", ".join(fault.scopes))
    _candidates(page, fault)
    page.field("next", words.next_for_fault(fault))
    page.field("suppress with", [suggest(fault.kind, fault.stack, fault.tag)])
    page.line(f"SUMMARY: streampool: {fault.summary}", "bold")
    page.line(f"DEDUP_TOKEN: {fault.dedup_token}", "dim")
    page.line()


def _bytes(page: _Page, fault: Fault) -> None:
    rows = byte_map(fault)
    if not rows:
        return
    looks = reads_as(fault)
    page.field("bytes", [". untouched, hex written" + (f"; reads as {looks}" if looks else "")], "dim")
    page.field("", rows, "yellow")


def _block(page: _Page, block: BlockFacts) -> None:
    page.field("block", words.block_facts(block))
    _stack(page, "allocated at", block.allocated_at, words.when(block.allocated_thread, block.allocated_time))
    if block.was_freed:
        _stack(page, "freed at", block.freed_at, words.when(block.freed_thread, block.freed_time))


def _stack(page: _Page, label: str, frames: Sequence[Frame], when: str = "") -> None:
    lines = [str(frame) for frame in frames[:_FRAMES]]
    if len(frames) > _FRAMES:
        lines.append(f"… {len(frames) - _FRAMES} more frames")
    page.field(label, lines or ["no stack was kept (option stack_depth)"], "cyan" if lines else "dim")
    if when:
        page.field("", [when], "dim")


def _candidates(page: _Page, fault: Fault) -> None:
    for number, candidate in enumerate(fault.candidates[:_CANDIDATES]):
        page.field("candidates" if number == 0 else "", words.candidate(candidate))
    if (more := len(fault.candidates) - _CANDIDATES) > 0:
        page.field("", f"and {more:,} more; the JSON report has all")


# -- leaks ------------------------------------------------------------------------------------------------------------
def _leaks(page: _Page, report: Report) -> None:
    shown = [leak for leak in report.leaks if not leak.suppressed_by]
    for leak in shown[:_LEAKS]:
        counted = report.leak_policy.counts(leak.leak_class)
        page.line(words.leak_title(leak, report.leak_policy), "bold red" if counted else "bold")
        _leak(page, leak, counted)
        page.line()
    if omitted := shown[_LEAKS:]:
        more = byte_count(sum(leak.bytes for leak in omitted))
        page.line(f"Omitting {len(omitted)} more ({more}); the JSON report has all.")
        page.line()


def _leak(page: _Page, leak: Leak, counted: bool) -> None:
    _stack(page, "allocated at", leak.allocated_at)
    page.field("blocks", words.leak_blocks(leak))
    if leak.growth:
        page.field("growth", " → ".join(f"{size:,}" for size in leak.growth[-6:]) + " live bytes, epoch by epoch")
    if leak.ages:
        page.field("age", words.ages(leak))
    if leak.held_by:
        page.field("held by", leak.held_by)
    page.field("next", words.next_for_leak(leak))
    if counted:
        page.field("suppress with", [suggest(leak.leak_class, leak.allocated_at, leak.tag)])


# -- the end ----------------------------------------------------------------------------------------------------------
def _end(page: _Page, report: Report) -> None:
    page.rule(f"streampool {report.version}".rstrip(), "bold red" if report.counts else "bold green")
    if report.processes and (command := " ".join(report.processes[0].command)):
        page.field("command", [command])
    for pool in report.pools[:_LEAKS]:
        page.field("pool", words.pool_line(pool))
    if len(report.pools) > _LEAKS:
        page.field("", f"and {len(report.pools) - _LEAKS} more pools")
    _coverage(page, report.coverage)
    used, unused = words.rules(report)
    if used:
        page.field("suppressed", used)
    if unused:
        page.field("unused rules", unused)
    page.line(f"SUMMARY: streampool: {words.total(report)}", "bold red" if report.counts else "bold green")


def _coverage(page: _Page, coverage: Coverage) -> None:
    page.field("covered", words.covered(coverage))
    for number, gap in enumerate(coverage.not_checked):
        page.field("not checked" if number == 0 else "", words.gap(gap))
    for number, note in enumerate(words.limits(coverage)):
        page.field("limits" if number == 0 else "", note)
    page.field("never seen", words.NOT_SEEN)
