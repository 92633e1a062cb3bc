"""What a report says of faults, blocks, leaks and coverage, in sentences: the same in the text and on the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from streampool._sizes import format_size
from streampool.faults import BlockFacts, BlockState, Candidate, Fault, FaultKind, byte_count, page_of, stream_text
from streampool.leaks import AGES, Leak, LeakClass, LeakPolicy
from streampool.report import Coverage, DeviceCoverage, LibraryCoverage, NotChecked, PoolFacts, Report

__all__ = [
    "NOT_SEEN",
    "ages",
    "block_facts",
    "candidate",
    "covered",
    "gap",
    "group_size",
    "leak_blocks",
    "leak_title",
    "limits",
    "neighbour",
    "next_for_fault",
    "next_for_leak",
    "opening",
    "plural",
    "pool_end",
    "pool_line",
    "rules",
    "state",
    "total",
    "when",
    "where",
    "window",
]

_PLACES = 3  # shown of what was not checked
_SOME_NUMBERS = 5  # shown of the blocks of equal faults

NOT_SEEN = (
    "reads outside a block or after its free; writes that jump over the guards into another live block; writes into a "
    "freed block before it is filled"
)

_NARROW = "pool.check() between suspect steps narrows the window"
_NEXT = {
    FaultKind.OVERRUN: f"look at index and length in kernels and copies that got this block; {_NARROW}",
    FaultKind.UNDERRUN: "look for a negative index or offset in work that got this block, or an overrun of the one "
    f"below; {_NARROW}",
    FaultKind.WRITE_AFTER_FREE: "look for work that was queued with this pointer after the free, or on a stream that "
    f"the free did not know (buf.record_stream); {_NARROW}",
    FaultKind.DOUBLE_FREE: "compare the two stacks: who owns the block? The second free changed nothing",
    FaultKind.FOREIGN_FREE: "the address never was this process's pool memory, or its block is long gone: follow it "
    "back to its allocation",
    FaultKind.INTERIOR_FREE: "free the pointer that allocate gave; the free changed nothing",
    FaultKind.WRONG_POOL_FREE: "free it with the pool that the note names; the free changed nothing",
    FaultKind.TRAMPLED_RECORD: "something wrote into host memory that is not its own: run under a host memory checker",
    FaultKind.SIZE_MISMATCH: "compare the size that the caller keeps with the one it asked for; the free changed "
    "nothing",
    FaultKind.ILLEGAL_ACCESS: "look at the work that was queued last on the stream of the first candidates: an index "
    "or length beyond the block, or a pointer used after its free; the device gives no address, and its memory is gone",
    FaultKind.RACE: "order the two uses: same stream, an event and a wait, or record_stream before the free",
}
_NEXT_LEAK = {
    LeakClass.LOST: "free it on every way out of the function that allocates it, or let a Buffer own it",
    LeakClass.GROWING: "find what is appended to and never emptied: a list of results, a cache without a bound",
    LeakClass.HELD: "nothing, where the program means to hold it to its end",
}


def plural(count: int, word: str) -> str:
    """``'1 block'``, ``'2,000 blocks'``."""
    return f"{count:,} {word if count == 1 else word + 's'}"


# -- faults -----------------------------------------------------------------------------------------------------------
def group_size(group: Sequence[Fault]) -> int:
    """How many faults a group of equal ones stands for, with those that were only counted."""
    return sum(fault.count for fault in group)


def where(group: Sequence[Fault]) -> str:
    """In which pool, and how often from the same lines."""
    fault = group[0]
    text = f"in pool '{fault.pool}' on {fault.device}" if fault.pool else ""
    times = group_size(group)
    if times == 1:
        return text
    others = [f"#{f.block.serial}" for f in group[1:] if f.block is not None and f.block.serial]
    more = "; also " + ", ".join(others[:_SOME_NUMBERS]) if others else ""
    more += ", …" if len(others) > _SOME_NUMBERS else ""
    return f"{text}{', ' if text else ''}{times:,} times from the same lines (shown: the first{more})"


def block_facts(block: BlockFacts) -> str:
    """Give number, size, address, state, stream, and what else is particular."""
    facts = [
        f"#{block.serial}, {byte_count(block.size)} at {block.address:#x}, {state(block)}, "
        f"{stream_text(block.stream, block.capture)}"
    ]
    if block.tag:
        facts.append(f"tag '{block.tag}'")
    if block.raw:
        facts.append("allocated raw")
    if block.reserved != block.size:
        facts.append(f"its slot {block.begin:#x} to {block.begin + block.reserved:#x}")
    return ", ".join(facts)


def state(block: BlockFacts) -> str:
    """Where the block stood."""
    return "freed, in quarantine" if block.state is BlockState.QUARANTINED else str(block.state)


def when(thread: int, time: float) -> str:
    """Which thread, and when in seconds of the device's clock; empty where neither was kept."""
    parts = ([f"thread {thread}"] if thread else []) + ([f"at {time:.3f} s"] if time else [])
    text = ", ".join(parts)
    return f"by {text}" if text.startswith("thread") else text


def neighbour(side: str, block: BlockFacts | None, other: BlockFacts) -> str:
    """Describe the block at one side (``"below"``, ``"above"``), and how far away."""
    place = f", allocated at {other.allocated_at[0]}" if other.allocated_at else ""
    apart = ""
    if block is not None:
        distance = block.address - other.end if side == "below" else other.address - block.end
        apart = f", {byte_count(distance)} away" if distance >= 0 else ""
    return f"#{other.serial}, {byte_count(other.size)}, {state(other)}{apart}{place}"


def window(fault: Fault) -> str:
    """Between which checks the write lies; empty for misuse at the call."""
    if fault.kind.at_the_call:
        return ""
    if fault.last_good_check:
        span = f"whole at check {fault.last_good_check} ({fault.last_good_time:.3f} s)"
        length = f": written within these {fault.time - fault.last_good_time:.3f} s"
    else:
        since = "" if fault.block is None else f" ({fault.block.allocated_time:.3f} s)"
        span, length = f"never checked before; allocated{since}", ""
    return f"{span}; bad at check {fault.found_by_check} ({fault.time:.3f} s){length}"


def candidate(one: Candidate) -> str:
    """Describe a block that an illegal access may have been meant for."""
    block = one.block
    place = f", allocated at {block.allocated_at[0]}" if block.allocated_at else ""
    return f"#{block.serial}, {byte_count(block.size)} at {block.address:#x}, {state(block)}: {one.why}{place}"


def next_for_fault(fault: Fault) -> str:
    """Say what to do about it, and the page that explains it."""
    return f"{_NEXT[fault.kind]} ({fault.page})"


# -- leaks ------------------------------------------------------------------------------------------------------------
def leak_title(leak: Leak, policy: LeakPolicy) -> str:
    """``LEAK`` where it counts, else ``NOTE``, with its class and how much."""
    return f"{'LEAK' if policy.counts(leak.leak_class) else 'NOTE'}: {leak.leak_class}: {leak.sentence}"


def leak_blocks(leak: Leak) -> str:
    """Numbers of the oldest blocks, their pool and tags."""
    facts = [f"#{serial}" for serial in leak.serials]
    more = f" and {leak.blocks - len(facts):,} more" if leak.blocks > len(facts) else ""
    text = f"{', '.join(facts)}{more}"
    if leak.pool:
        text += f", in pool '{leak.pool}' on {leak.device}"
    if leak.tags:
        text += f", tagged {', '.join(repr(tag) for tag in leak.tags)}"
    return text


def ages(leak: Leak) -> str:
    """Live bytes by the age of their blocks: ``'4,096 bytes under 1 s, 12,288 bytes under 1 min'``."""
    words = [*(f"under {word}" for word in AGES.values()), f"{list(AGES.values())[-1]} and more"]
    return ", ".join(f"{byte_count(size)} {word}" for size, word in zip(leak.ages, words, strict=False) if size)


def next_for_leak(leak: Leak) -> str:
    """Say what to do about it, and the page that explains it."""
    return f"{_NEXT_LEAK[leak.leak_class]} ({page_of(leak.leak_class)})"


# -- the end ----------------------------------------------------------------------------------------------------------
def pool_line(pool: PoolFacts) -> str:
    """Describe a pool, its peak and its end."""
    reserved = pool.stats.get("reserved_peak")
    peak = f", peak {byte_count(int(reserved))} reserved" if reserved else ""
    end = pool_end(pool)
    return f"{pool.title}{peak}" + (f", {end}" if end and end != "alive" else "")


def pool_end(pool: PoolFacts) -> str:
    """Say how it ended, and of how many pools that is said."""
    return f"{pool.ended}, {pool.pools:,} such pools" if pool.pools > 1 else pool.ended


def covered(coverage: Coverage) -> str:
    """Say what the findings are drawn from."""
    return (
        f"{plural(coverage.pools, 'pool')}; {plural(coverage.blocks_allocated, 'block')} allocated, "
        f"{coverage.blocks_freed:,} freed; {plural(coverage.blocks_checked, 'block verification')} "
        f"in {plural(coverage.checks, 'check')}"
    )


def gap(one: NotChecked) -> str:
    """Something that was not looked at, and why."""
    blocks = f" ({plural(one.blocks, 'block')}, {byte_count(one.bytes)})" if one.blocks else ""
    places = f"; allocated at {', '.join(one.places[:_PLACES])}" if one.places else ""
    pool = f"pool '{one.pool}': " if one.pool else ""
    return f"{pool}{one.what}{blocks}: {one.why}{places}"


def rules(report: Report) -> tuple[str, str]:
    """Suppressions that took something, with how much, and those that took nothing."""
    used = ", ".join(f"{rule.rule} ({rule.used:,})" for rule in report.suppressions if rule.used)
    return used, ", ".join(rule.rule for rule in report.suppressions if not rule.used)


def total(report: Report) -> str:
    """Everything in one line."""
    kinds: Counter[str] = Counter()
    for fault in report.faults:
        kinds[fault.kind] += fault.count
    parts = []
    if kinds:
        by_kind = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        parts.append(f"{plural(kinds.total(), 'fault')} ({by_kind})")
    if report.coverage.faults_dropped:
        parts.append(f"{report.coverage.faults_dropped:,} more faults not kept")
    counted = report.counted_leaks
    if len(counted):
        classes = [f"{sum(leak.blocks for leak in counted.of(c)):,} {c}" for c in LeakClass if len(counted.of(c))]
        parts.append(f"{byte_count(counted.bytes)} leaked ({', '.join(classes)})")
    held = report.leaks.held
    if len(held) and not report.leak_policy.counts(LeakClass.HELD):
        parts.append(f"{byte_count(held.bytes)} still held, not counted")
    if suppressed := report.suppressed:
        parts.append(f"{suppressed:,} suppressed")
    if not report.counts:
        clean = "no faults" if report.leak_policy is LeakPolicy.OFF else "no faults, no leaks that count"
        parts.insert(0, clean)
    if report.exit_code is not None:
        parts.append(f"exit code {report.exit_code}")
    return "; ".join(parts)


def opening(coverage: Coverage) -> str:
    """Say first what the findings are drawn from: a clean report of a program that was not watched says nothing."""
    return "; ".join([*map(_library, coverage.libraries), *map(_outside, coverage.devices)])


def limits(coverage: Coverage) -> list[str]:
    """Say what of each library does not work, or is not seen."""
    return [f"{one.library}: {note}" for one in coverage.libraries for note in one.notes]


def _library(library: LibraryCoverage) -> str:
    why = f" ({library.why})" if library.why else ""
    if not library.served:
        return f"{library.library} NOT WATCHED{why}"
    if library.part is None:
        return f"{library.library} took no device memory{why}"
    # Rounded down: all is said only where it is all.
    return f"{library.library} {int(100 * library.part)} % of its bytes{why}"


def _outside(device: DeviceCoverage) -> str:
    at_most = "at most " if device.is_ceiling else ""
    whose = "its device memory" if not device.is_ceiling else "the device's memory in use, other processes' too,"
    return f"{at_most}{format_size(device.outside_bytes)} of {whose} outside on {device.device}"
