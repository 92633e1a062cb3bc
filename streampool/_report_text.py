"""The text of a report: what a person reads in one minute on 100 columns, the same in a terminal and in a pipe.

Order of a fault: kind; one sentence; byte map; block facts; allocated at; freed at; neighbours; window; what to do
next; SUMMARY; dedup token. Then leaks, coverage, suppressions and the SUMMARY of all.
"""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from streampool._bytemap import byte_map, reads_as
from streampool.faults import BlockFacts, BlockState, Fault, FaultKind, Frame, byte_count
from streampool.leaks import Leak, LeakClass, LeakPolicy
from streampool.report import Coverage, NotChecked, Report
from streampool.suppressions import suggest

__all__ = ["render"]

_LABEL = 16  # columns of the labels at the left
_FRAMES = 8  # shown of a stack
_LEAKS = 20  # shown of the leaks
_FAULTS = 20  # shown of the groups of faults
_CANDIDATES = 10  # shown of the blocks that an illegal access may have been meant for
_PLACES = 3  # shown of what was not checked
_MIN_WIDTH = 40

_NOT_SEEN = (
    "reads outside a block or after its free; writes that jump over the guards into another live block; writes into a "
    "freed block before it is filled"
)

_NEXT = {
    FaultKind.OVERRUN: "look at index and length in kernels and copies that got this block; {narrow}",
    FaultKind.UNDERRUN: "look for a negative index or offset in work that got this block, or an overrun of the one "
    "below; {narrow}",
    FaultKind.WRITE_AFTER_FREE: "look for work that was queued with this pointer after the free, or on a stream that "
    "the free did not know (buf.record_stream); {narrow}",
    FaultKind.DOUBLE_FREE: "compare the two stacks: who owns the block? The second free changed nothing",
    FaultKind.FOREIGN_FREE: "the address never was this process's pool memory, or its block is long gone: follow it "
    "back to its allocation",
    FaultKind.INTERIOR_FREE: "free the pointer that allocate gave; the free changed nothing",
    FaultKind.WRONG_POOL_FREE: "free it with the pool named in the block facts; the free changed nothing",
    FaultKind.TRAMPLED_RECORD: "something wrote into host memory that is not its own: run under a host memory checker",
    FaultKind.SIZE_MISMATCH: "compare the size that the caller keeps with the one it asked for; the free changed "
    "nothing",
    FaultKind.ILLEGAL_ACCESS: "look at the work that was queued last on the stream of the first candidates: an index "
    "or length beyond the block, or a pointer used after its free; the device gives no address, and its memory is gone",
    FaultKind.RACE: "order the two uses: same stream, an event and a wait, or record_stream before the free",
}
_NARROW = "pool.check() between suspect steps narrows the window"


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
    groups = report.grouped_faults
    for number, group in enumerate(groups[:_FAULTS], 1):
        _fault(page, group, number, len(groups), _command(report))
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
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for line in page.lines:
        console.print(line, soft_wrap=True)
    return buffer.getvalue().rstrip("\n")


def _command(report: Report) -> str:
    return " ".join(report.processes[0].command) if report.processes else ""


# -- faults -----------------------------------------------------------------------------------------------------------
def _fault(page: _Page, group: Sequence[Fault], number: int, of: int, command: str) -> None:
    fault = group[0]
    page.rule(f"FAULT {number} of {of}: {fault.kind}", "bold red")
    page.prose(fault.sentence, "bold")
    where = f"in pool '{fault.pool}' on {fault.device}" if fault.pool else ""
    if len(group) > 1:
        numbers = ", ".join(f"#{f.block.serial}" for f in group[1:6] if f.block is not None)
        more = f"; also {numbers}{', …' if len(group) > 6 else ''}" if numbers else ""
        where += f"{', ' if where else ''}{len(group)} times from the same lines (shown: the first{more})"
    if where:
        page.prose(where)
    if fault.note:
        page.prose(f"note: {fault.note}")
    _bytes(page, fault)
    if fault.at:
        _stack(page, "called at", fault.at)
    if fault.block is not None:
        _block(page, fault.block)
    _neighbour(page, "below", fault.block, fault.below)
    _neighbour(page, "above", fault.block, fault.above)
    _window(page, fault)
    _candidates(page, fault)
    page.field("next", _NEXT[fault.kind].format(narrow=_NARROW) + f" (docs/faults/{fault.kind}.md)")
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
    facts = [f"#{block.serial}, {byte_count(block.size)} at {block.address:#x}, {_state(block)}, stream {block.stream}"]
    if block.tag:
        facts.append(f"tag '{block.tag}'")
    if block.raw:
        facts.append("allocated raw")
    if block.reserved != block.size:
        facts.append(f"its slot {block.begin:#x} to {block.begin + block.reserved:#x}")
    page.field("block", ", ".join(facts))
    _stack(page, "allocated at", block.allocated_at, _when(block.allocated_thread, block.allocated_time))
    if block.was_freed:
        _stack(page, "freed at", block.freed_at, _when(block.freed_thread, block.freed_time))


def _state(block: BlockFacts) -> str:
    return "freed, in quarantine" if block.state is BlockState.QUARANTINED else str(block.state)


def _when(thread: int, time: float) -> str:
    parts = ([f"thread {thread}"] if thread else []) + ([f"at {time:.3f} s"] if time else [])
    return ", ".join(parts)


def _stack(page: _Page, label: str, frames: Sequence[Frame], when: str = "") -> None:
    lines = [str(frame) for frame in frames[:_FRAMES]]
    if len(frames) > _FRAMES:
        lines.append(f"… {len(frames) - _FRAMES} more frames")
    page.field(label, lines or ["no stack was kept (option stack_depth)"], "cyan" if lines else "dim")
    if when:
        page.field("", [f"by {when}" if when.startswith("thread") else when], "dim")


def _neighbour(page: _Page, side: str, block: BlockFacts | None, other: BlockFacts | None) -> None:
    if other is None:
        return
    where = f", allocated at {other.allocated_at[0]}" if other.allocated_at else ""
    gap = ""
    if block is not None:
        distance = block.address - other.end if side == "below" else other.address - block.end
        gap = f", {byte_count(distance)} away" if distance >= 0 else ""
    page.field(side, f"#{other.serial}, {byte_count(other.size)}, {_state(other)}{gap}{where}")


def _window(page: _Page, fault: Fault) -> None:
    if fault.kind.at_the_call:
        return
    if fault.last_good_check:
        span = f"whole at check {fault.last_good_check} ({fault.last_good_time:.3f} s)"
        length = f": written within these {fault.time - fault.last_good_time:.3f} s"
    else:
        since = "" if fault.block is None else f" ({fault.block.allocated_time:.3f} s)"
        span, length = f"never checked before; allocated{since}", ""
    page.field("window", f"{span}; bad at check {fault.found_by_check} ({fault.time:.3f} s){length}")
    if fault.scopes:
        page.field("scopes", "open in the window: " + ", ".join(fault.scopes))


def _candidates(page: _Page, fault: Fault) -> None:
    for number, candidate in enumerate(fault.candidates[:_CANDIDATES]):
        block = candidate.block
        where = f", allocated at {block.allocated_at[0]}" if block.allocated_at else ""
        text = (
            f"#{block.serial}, {byte_count(block.size)} at {block.address:#x}, {_state(block)}: {candidate.why}{where}"
        )
        page.field("candidates" if number == 0 else "", text)
    if (more := len(fault.candidates) - _CANDIDATES) > 0:
        page.field("", f"and {more:,} more; the JSON report has all")


# -- leaks ------------------------------------------------------------------------------------------------------------
def _leaks(page: _Page, report: Report) -> None:
    shown = [leak for leak in report.leaks if not leak.suppressed_by]
    for leak in shown[:_LEAKS]:
        counted = report.leak_policy.counts(leak.leak_class)
        title = "LEAK" if counted else "NOTE"
        style = "bold red" if counted else "bold"
        page.line(f"{title}: {leak.leak_class}: {leak.sentence}", style)
        _leak(page, leak, counted)
        page.line()
    if omitted := shown[_LEAKS:]:
        more = byte_count(sum(leak.bytes for leak in omitted))
        page.line(f"Omitting {len(omitted)} more ({more}); the JSON report has all.")
        page.line()


def _leak(page: _Page, leak: Leak, counted: bool) -> None:
    _stack(page, "allocated at", leak.allocated_at)
    facts = [f"#{serial}" for serial in leak.serials]
    more = f" and {leak.blocks - len(facts):,} more" if leak.blocks > len(facts) else ""
    blocks = f"{', '.join(facts)}{more}"
    if leak.pool:
        blocks += f", in pool '{leak.pool}' on {leak.device}"
    if leak.tags:
        blocks += f", tagged {', '.join(repr(tag) for tag in leak.tags)}"
    page.field("blocks", blocks)
    if leak.growth:
        page.field("growth", " → ".join(f"{size:,}" for size in leak.growth[-6:]) + " live bytes, epoch by epoch")
    if counted:
        page.field("suppress with", [suggest(leak.leak_class, leak.allocated_at, leak.tag)])


# -- the end ----------------------------------------------------------------------------------------------------------
def _end(page: _Page, report: Report) -> None:
    page.rule(f"streampool {report.version}".rstrip(), "bold red" if report.counts else "bold green")
    command = _command(report)
    if command:
        page.field("command", [command])
    for pool in report.pools[:_LEAKS]:
        reserved = pool.stats.get("reserved_peak")
        peak = f", peak {byte_count(int(reserved))} reserved" if reserved else ""
        ended = f", {pool.ended}" if pool.ended and pool.ended != "alive" else ""
        page.field("pool", f"{pool.title}{peak}{ended}")
    if len(report.pools) > _LEAKS:
        page.field("", f"and {len(report.pools) - _LEAKS} more pools")
    _coverage(page, report.coverage)
    _suppressions(page, report)
    page.line(f"SUMMARY: streampool: {_total(report)}", "bold red" if report.counts else "bold green")


def _coverage(page: _Page, coverage: Coverage) -> None:
    page.field(
        "covered",
        f"{_plural(coverage.pools, 'pool')}; {_plural(coverage.blocks_allocated, 'block')} allocated, "
        f"{coverage.blocks_freed:,} freed; {_plural(coverage.blocks_checked, 'block verification')} "
        f"in {_plural(coverage.checks, 'check')}",
    )
    for number, gap in enumerate(coverage.not_checked):
        page.field("not checked" if number == 0 else "", _gap(gap))
    page.field("never seen", _NOT_SEEN)


def _gap(gap: NotChecked) -> str:
    blocks = f" ({_plural(gap.blocks, 'block')}, {byte_count(gap.bytes)})" if gap.blocks else ""
    places = f"; allocated at {', '.join(gap.places[:_PLACES])}" if gap.places else ""
    pool = f"pool '{gap.pool}': " if gap.pool else ""
    return f"{pool}{gap.what}{blocks}: {gap.why}{places}"


def _suppressions(page: _Page, report: Report) -> None:
    used = [f"{rule.rule} ({rule.used})" for rule in report.suppressions if rule.used]
    unused = [rule.rule for rule in report.suppressions if not rule.used]
    if used:
        page.field("suppressed", ", ".join(used))
    if unused:
        page.field("unused rules", ", ".join(unused))


def _total(report: Report) -> str:
    kinds = Counter(fault.kind for fault in report.faults)
    parts = []
    if kinds:
        by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        parts.append(f"{_plural(len(report.faults), 'fault')} ({by_kind})")
    if report.coverage.faults_dropped:
        parts.append(f"{report.coverage.faults_dropped:,} more faults not kept")
    counted = report.counted_leaks
    if len(counted):
        classes = [f"{sum(leak.blocks for leak in counted.of(c)):,} {c}" for c in LeakClass if len(counted.of(c))]
        parts.append(f"{byte_count(counted.bytes)} leaked ({', '.join(classes)})")
    held = report.leaks.held
    if len(held) and not report.leak_policy.counts(LeakClass.HELD):
        parts.append(f"{byte_count(held.bytes)} still held, not counted")
    suppressed = len(report.suppressed_faults) + sum(bool(leak.suppressed_by) for leak in report.leaks)
    if suppressed:
        parts.append(f"{suppressed} suppressed")
    if not report.counts:
        clean = "no faults" if report.leak_policy is LeakPolicy.OFF else "no faults, no leaks that count"
        parts.insert(0, clean)
    if report.exit_code is not None:
        parts.append(f"exit code {report.exit_code}")
    return "; ".join(parts)


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word if count == 1 else word + 's'}"
