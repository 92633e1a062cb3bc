"""Reports: faults, leaks and what was covered, as data, as JSON (report_schema.json), as text and as a page of HTML.

>>> report = Report.from_findings(session.finish())
>>> print(report.to_text())
>>> Path("report.json").write_text(report.to_json())

Made from plain facts as the core gives them, so a report needs neither a device nor the core once it is made. The text
is in _report_text.py, the page in _report_html.py, the sentences of both in _report_words.py, faults and leaks as plain
data in _report_json.py, what is wrong with a saved report in _report_check.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

from streampool._report_json import fault_from_dict, fault_to_dict, leak_from_dict, leak_to_dict
from streampool.faults import BlockFacts, Fault, Resolve
from streampool.leaks import Epochs, Leak, LeakPolicy, Leaks, find_leaks
from streampool.suppressions import Suppressions, suggest

__all__ = [
    "SCHEMA_ID",
    "Coverage",
    "DeviceCoverage",
    "LibraryCoverage",
    "NotChecked",
    "PoolFacts",
    "Process",
    "Report",
    "UsedRule",
    "schema",
]

SCHEMA_ID = "urn:streampool:report:1"
"""Changes with every change that a reader of older reports would not understand."""

_SOME_PLACES = 3  # shown of the blocks that were not checked


class Findings(Protocol):
    """What a report is made of, one a pool: see session.PoolFindings."""

    name: str
    kind: str
    device: str
    mode: str
    ended: str
    faults: list[dict[str, Any]]
    live_blocks: list[dict[str, Any]]
    not_checked: list[dict[str, Any]]
    debug_totals: dict[str, int]
    stats: dict[str, Any]
    options: dict[str, str]
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Process:
    """The process that a report is of."""

    pid: int
    command: tuple[str, ...]
    python: str = ""

    @classmethod
    def this(cls) -> Process:
        """Describe this process."""
        return cls(os.getpid(), tuple(sys.argv), ".".join(map(str, sys.version_info[:3])))


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One pool that was watched: its settings and counters at its end."""

    name: str
    device: str
    kind: str
    mode: str
    ended: str = ""
    options: dict[str, str] = field(default_factory=dict)
    stats: dict[str, int | float] = field(default_factory=dict)
    debug_totals: dict[str, int] = field(default_factory=dict)
    pools: int = 1  # of this name and these settings, that left nothing but their counts

    @property
    def title(self) -> str:
        """How texts name the pool."""
        return f"'{self.name}' ({self.kind} memory, {self.device}, {self.mode or 'no'} mode)"


@dataclass(frozen=True, slots=True)
class NotChecked:
    """Something that a report says nothing about, and why."""

    what: str
    why: str
    pool: str = ""
    blocks: int = 0
    bytes: int = 0
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LibraryCoverage:
    """How much of a library's device memory was watched. Sizes in bytes."""

    library: str
    served: bool = True
    version: str = ""
    watched_bytes: int = 0  # at most, from our pools
    other_bytes: int = 0  # by the library's own count
    why: str = ""  # of the other bytes, or of not being served
    notes: tuple[str, ...] = ()  # what does not work, or is not seen

    @property
    def part(self) -> float | None:
        """The part that was watched, from 0 to 1; None: it took no device memory that is known of."""
        total = self.watched_bytes + self.other_bytes
        return self.watched_bytes / total if total else None


@dataclass(frozen=True, slots=True)
class DeviceCoverage:
    """What the process held on a device at the end, and what of it was no pool's. Sizes in bytes."""

    device: str
    held_bytes: int
    outside_bytes: int
    is_ceiling: bool = False  # other processes may be in both


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the findings are drawn from. Counts are sums over all pools."""

    pools: int = 0
    blocks_allocated: int = 0
    blocks_freed: int = 0
    blocks_checked: int = 0  # summed over all checks: a block counts each time it was verified
    checks: int = 0
    faults_dropped: int = 0  # beyond max_faults: counted, not kept
    not_checked: tuple[NotChecked, ...] = ()
    libraries: tuple[LibraryCoverage, ...] = ()
    devices: tuple[DeviceCoverage, ...] = ()

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            self.pools + other.pools,
            self.blocks_allocated + other.blocks_allocated,
            self.blocks_freed + other.blocks_freed,
            self.blocks_checked + other.blocks_checked,
            self.checks + other.checks,
            self.faults_dropped + other.faults_dropped,
            tuple(dict.fromkeys((*self.not_checked, *other.not_checked))),
            _add_libraries(self.libraries, other.libraries),
            _add_devices(self.devices, other.devices),
        )


@dataclass(frozen=True, slots=True)
class UsedRule:
    """A suppression, and how many findings it took."""

    rule: str
    used: int


@dataclass(slots=True)
class Report:
    """Everything that one or more processes found."""

    version: str = ""
    created: str = ""  # ISO 8601, UTC
    leak_policy: LeakPolicy = LeakPolicy.DEFINITE
    processes: tuple[Process, ...] = ()
    pools: tuple[PoolFacts, ...] = ()
    faults: tuple[Fault, ...] = ()
    suppressed_faults: tuple[Fault, ...] = ()
    leaks: Leaks = field(default_factory=Leaks)
    coverage: Coverage = field(default_factory=Coverage)
    suppressions: tuple[UsedRule, ...] = ()
    exit_code: int | None = None

    @classmethod
    def from_findings(
        cls,
        findings: Iterable[Findings],
        *,
        leaks: LeakPolicy | str = LeakPolicy.DEFINITE,
        suppressions: Suppressions | Iterable[str] = (),
        resolve: Resolve | None = None,
        process: Process | None = None,
        libraries: Sequence[LibraryCoverage] = (),
        devices: Sequence[DeviceCoverage] = (),
    ) -> Report:
        """Make a report of the pools of this process.

        Parameters
        ----------
        findings
            One a pool, as `streampool.session` gathers them. An attribute ``epochs`` (`leaks.Epochs`), where there is
            one, tells which call sites grow; ``pools`` how many pools it is of.
        leaks
            Which leaks count: ``definite``, ``all`` or ``off``.
        suppressions
            Rules, or their lines.
        resolve
            From a stack's number to its frames; the core's own by default.
        process
            What to say of the process; this one by default.
        libraries, devices
            How much of other libraries' memory, and of the process's, was watched.
        """
        findings = list(findings)
        policy = LeakPolicy(leaks)
        rules = suppressions if isinstance(suppressions, Suppressions) else Suppressions.parse(suppressions)
        faults: list[Fault] = []
        all_leaks = Leaks()
        for found in findings:
            faults += (Fault.from_dict(facts, resolve, pool=found.name, device=found.device) for facts in found.faults)
            if policy is not LeakPolicy.OFF:
                epochs: Epochs | None = getattr(found, "epochs", None)
                all_leaks += find_leaks(
                    found.live_blocks,
                    epochs=epochs,
                    chains=getattr(found, "chains", None),
                    now=getattr(found, "ended_at", None),
                    resolve=resolve,
                    pool=found.name,
                    device=found.device,
                )
        whole = cls(
            version=_version(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            leak_policy=policy,
            processes=(process or Process.this(),),
            pools=tuple(_pool_facts(found) for found in findings),
            faults=tuple(faults),
            leaks=all_leaks,
            coverage=replace(_coverage(findings, resolve, policy), libraries=tuple(libraries), devices=tuple(devices)),
        )
        return whole.suppress(rules)

    def suppress(self, rules: Suppressions) -> Report:
        """Give the report with `rules` held against its findings, beside those that it was made with."""
        faults: list[Fault] = []
        suppressed = list(self.suppressed_faults)
        for fault in self.faults:
            rule = rules.find(fault.kind, fault.stacks, [fault.tag], count=fault.count)
            (faults if rule is None else suppressed).append(fault)
        used = {rule.rule: rule.used for rule in self.suppressions}
        leaks = Leaks(tuple(leak if leak.suppressed_by else _suppressed(leak, rules) for leak in self.leaks))
        for rule in rules.rules:
            used[str(rule)] = used.get(str(rule), 0) + rule.used
        return replace(
            self,
            faults=tuple(faults),
            suppressed_faults=tuple(suppressed),
            leaks=leaks,
            suppressions=tuple(UsedRule(*item) for item in used.items()),
        )

    @classmethod
    def merge(cls, reports: Sequence[Report]) -> Report:
        """Put the reports of several processes together; the settings are the first one's."""
        if not reports:
            return cls()
        used: dict[str, int] = {}
        for rule in (rule for report in reports for rule in report.suppressions):
            used[rule.rule] = used.get(rule.rule, 0) + rule.used
        leaks, coverage = Leaks(), Coverage()
        for report in reports:
            leaks += report.leaks
            coverage += report.coverage
        return replace(
            reports[0],
            processes=tuple(process for report in reports for process in report.processes),
            pools=tuple(pool for report in reports for pool in report.pools),
            faults=tuple(fault for report in reports for fault in report.faults),
            suppressed_faults=tuple(fault for report in reports for fault in report.suppressed_faults),
            leaks=leaks,
            coverage=coverage,
            suppressions=tuple(UsedRule(*item) for item in used.items()),
            exit_code=max((r.exit_code for r in reports if r.exit_code is not None), default=None),
        )

    @property
    def counted_leaks(self) -> Leaks:
        """Leaks that count under the policy and are not suppressed."""
        return self.leaks.counted(self.leak_policy)

    @property
    def counts(self) -> int:
        """How many findings count for the exit code: faults and counted leaks, without suppressed ones."""
        return sum(fault.count for fault in self.faults) + len(self.counted_leaks)

    @property
    def suppressed(self) -> int:
        """How many findings suppressions took."""
        faults = sum(fault.count for fault in self.suppressed_faults)
        return faults + sum(bool(leak.suppressed_by) for leak in self.leaks)

    @property
    def suggested_rules(self) -> dict[str, str]:
        """A ready suppression for each finding that counts, each once, with the first finding that it is for."""
        rules: dict[str, str] = {}
        for fault in self.faults:
            rules.setdefault(suggest(fault.kind, fault.stack, fault.tag), str(fault))
        for leak in self.counted_leaks:
            rules.setdefault(suggest(leak.leak_class, leak.allocated_at, leak.tag), str(leak))
        return rules

    @property
    def grouped_faults(self) -> list[list[Fault]]:
        """Equal faults together, in the order of the first of each."""
        groups: dict[object, list[Fault]] = {}
        for fault in self.faults:
            groups.setdefault((fault.dedup_token, fault.stack[:1]), []).append(fault)
        return list(groups.values())

    def to_text(self, *, color: bool = False, width: int = 100) -> str:
        """Give the text that a person reads in a minute.

        It does not depend on a terminal. Prose is wrapped at `width`; stacks and byte maps are not.
        """
        from streampool._report_text import render

        return render(self, color=color, width=width)

    def to_html(self) -> str:
        """Give a page of its own, without scripts and without anything from elsewhere."""
        from streampool._report_html import render

        return render(self)

    def to_json(self) -> str:
        """Give the JSON text, as report_schema.json describes it."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """Give plain data, ready for JSON, as report_schema.json describes it."""
        return {
            "schema": SCHEMA_ID,
            "tool": {"name": "streampool", "version": self.version},
            "created": self.created,
            "exit_code": self.exit_code,
            "leak_policy": str(self.leak_policy),
            "summary": {
                "counts": self.counts,
                "faults": sum(fault.count for fault in self.faults),
                "counted_leaks": len(self.counted_leaks),
                "leaked_bytes": self.counted_leaks.bytes,
                "suppressed": self.suppressed,
            },
            "processes": [{"pid": p.pid, "command": list(p.command), "python": p.python} for p in self.processes],
            "pools": [_plain(pool) for pool in self.pools],
            "faults": [fault_to_dict(fault) for fault in self.faults],
            "suppressed_faults": [fault_to_dict(fault) for fault in self.suppressed_faults],
            "leaks": [leak_to_dict(leak) for leak in self.leaks],
            "coverage": _plain(self.coverage),
            "suppressions": [{"rule": rule.rule, "used": rule.used} for rule in self.suppressions],
        }

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises
        ------
        ValueError
            It is not a report, or one of another version of the schema, or damaged: says where it is not as it should
            be. ``json.JSONDecodeError`` where it is no JSON at all.
        """
        from streampool._report_check import checked

        data = checked(text, SCHEMA_ID, schema())
        coverage = dict(data["coverage"])
        coverage["not_checked"] = tuple(
            NotChecked(**{**entry, "places": tuple(entry["places"])}) for entry in coverage["not_checked"]
        )
        coverage["libraries"] = tuple(
            LibraryCoverage(**{**entry, "notes": tuple(entry["notes"])}) for entry in coverage.get("libraries", ())
        )
        coverage["devices"] = tuple(DeviceCoverage(**entry) for entry in coverage.get("devices", ()))
        return cls(
            version=data["tool"]["version"],
            created=data["created"],
            leak_policy=LeakPolicy(data["leak_policy"]),
            processes=tuple(Process(p["pid"], tuple(p["command"]), p["python"]) for p in data["processes"]),
            pools=tuple(PoolFacts(**pool) for pool in data["pools"]),
            faults=tuple(fault_from_dict(fault) for fault in data["faults"]),
            suppressed_faults=tuple(fault_from_dict(fault) for fault in data["suppressed_faults"]),
            leaks=Leaks(tuple(leak_from_dict(leak) for leak in data["leaks"])),
            coverage=Coverage(**coverage),
            suppressions=tuple(UsedRule(rule["rule"], rule["used"]) for rule in data["suppressions"]),
            exit_code=data["exit_code"],
        )


def schema() -> dict[str, Any]:
    """Give the JSON Schema (2020-12) of reports."""
    loaded: dict[str, Any] = json.loads((Path(__file__).parent / "report_schema.json").read_text(encoding="utf-8"))
    return loaded


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("streampool")
    except PackageNotFoundError:
        return "unknown"


def _suppressed(leak: Leak, rules: Suppressions) -> Leak:
    rule = rules.find(leak.leak_class, [leak.allocated_at], leak.tags)
    return leak if rule is None else replace(leak, suppressed_by=str(rule))


def _add_libraries(some: Sequence[LibraryCoverage], more: Sequence[LibraryCoverage]) -> tuple[LibraryCoverage, ...]:
    """Put two processes' libraries together: one that was served in one of them and not in the other stays two."""
    found: dict[tuple[str, bool], LibraryCoverage] = {}
    for one in (*some, *more):
        known = found.get((one.library, one.served))
        found[one.library, one.served] = (
            one
            if known is None
            else replace(
                known,
                watched_bytes=known.watched_bytes + one.watched_bytes,
                other_bytes=known.other_bytes + one.other_bytes,
                why=known.why or one.why,
            )
        )
    return tuple(found.values())


def _add_devices(some: Sequence[DeviceCoverage], more: Sequence[DeviceCoverage]) -> tuple[DeviceCoverage, ...]:
    found: dict[str, DeviceCoverage] = {}
    for one in (*some, *more):
        known = found.get(one.device)
        # What counts all processes is not added up.
        found[one.device] = (
            one
            if known is None
            else DeviceCoverage(
                one.device,
                max(known.held_bytes, one.held_bytes) if one.is_ceiling else known.held_bytes + one.held_bytes,
                max(known.outside_bytes, one.outside_bytes)
                if one.is_ceiling
                else known.outside_bytes + one.outside_bytes,
                known.is_ceiling or one.is_ceiling,
            )
        )
    return tuple(found.values())


# -- what was covered -----------------------------------------------------------------------------------------------
def _pool_facts(found: Findings) -> PoolFacts:
    numbers = {name: value for name, value in found.stats.items() if isinstance(value, int | float)}
    options, totals = dict(found.options), dict(found.debug_totals)
    pools = getattr(found, "pools", 1)
    return PoolFacts(found.name, found.device, found.kind, found.mode, found.ended, options, numbers, totals, pools)


def _coverage(findings: Sequence[Findings], resolve: Resolve | None, policy: LeakPolicy) -> Coverage:
    def total(of: str, *names: str) -> int:
        return sum(int(next((getattr(f, of)[n] for n in names if n in getattr(f, of)), 0)) for f in findings)

    gaps: dict[NotChecked, None] = {}
    for found in findings:
        gaps |= dict.fromkeys(_gaps(found, resolve, policy))
    return Coverage(
        pools=sum(getattr(found, "pools", 1) for found in findings),
        blocks_allocated=total("stats", "allocations"),
        blocks_freed=total("stats", "frees", "deallocations"),
        blocks_checked=total("debug_totals", "blocks_checked"),
        checks=total("debug_totals", "checks"),
        faults_dropped=total("debug_totals", "faults_dropped"),
        not_checked=tuple(gaps),
    )


def _gaps(found: Findings, resolve: Resolve | None, policy: LeakPolicy) -> Iterable[NotChecked]:
    """Give what this pool's findings say nothing about: pending work, switched-off features, questions that failed."""
    pool = found.name
    if found.not_checked:
        blocks = [BlockFacts.from_dict(facts, resolve) for facts in found.not_checked]
        places = [block.allocated_at[0].place if block.allocated_at else f"block #{block.serial}" for block in blocks]
        yield NotChecked(
            "guards and fills of blocks with pending work",
            "their work was not done when the last check ended",
            pool,
            len(blocks),
            sum(block.size for block in blocks),
            tuple(dict.fromkeys(places))[:_SOME_PLACES],
        )
    for problem in found.problems:
        what, _, why = problem.partition(":")
        yield NotChecked(what, why.strip() or "it could not be asked for", pool)
    if failures := found.debug_totals.get("driver_failures", 0):
        yield NotChecked("some batches of checks", f"the driver failed {failures} times", pool)
    if dropped := found.debug_totals.get("faults_dropped", 0):
        yield NotChecked(f"{dropped:,} more faults", "more than max_faults: they were counted and not kept", pool)
    if not found.options:
        return
    if _is_off(found, "guard_bytes") and _is_off(found, "fill"):
        yield NotChecked("overruns, underruns, writes after free", f"guards and fill are off ({found.mode} mode)", pool)
    elif _is_off(found, "guard_bytes"):
        yield NotChecked("most overruns and underruns", "guard_bytes is 0: only rounding slack is watched", pool)
    elif _is_off(found, "fill"):
        yield NotChecked("writes after free", "fill is off", pool)
    if not _is_off(found, "fill") and not _is_off(found, "fill_edge_bytes"):
        edge = found.options["fill_edge_bytes"]
        yield NotChecked("the middle of freed blocks", f"fill_edge_bytes is {edge}: only the ends are filled", pool)
    if policy is LeakPolicy.OFF:
        yield NotChecked("leaks", "--leaks=off", pool)
    elif _is_off(found, "track"):
        yield NotChecked("leaks", f"blocks are not tracked ({found.mode} mode)", pool)


def _is_off(found: Findings, option: str) -> bool:
    return found.options.get(option, "") in ("", "0", "false", "none")


def _plain(record: PoolFacts | Coverage) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(record)))  # tuples become lists
    return plain
