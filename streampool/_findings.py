"""What is found in the pools of a watched program, kept when the pools are gone."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streampool import _core, _referrers
from streampool.leaks import Epochs

if TYPE_CHECKING:
    from streampool.sim import Access, Race

__all__ = ["PoolFindings", "Session"]


@dataclass(slots=True)
class PoolFindings:
    """What a report needs of one pool, kept when the pool is gone. Facts are as the core gives them."""

    name: str
    kind: str
    device: str
    mode: str
    ended: str = "alive"  # or "closed", "collected": when the blocks below were live
    faults: list[dict[str, Any]] = field(default_factory=list)
    live_blocks: list[dict[str, Any]] = field(default_factory=list)
    not_checked: list[dict[str, Any]] = field(default_factory=list)
    debug_totals: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # what could not be found out, and why
    # Of a pool that serves a library: gives those of its objects that own some blocks, by the block's number; is given
    # these numbers by address.
    find_objects: Callable[[Mapping[int, int]], dict[int, object]] | None = None
    epochs: Epochs = field(default_factory=Epochs)  # what tells a growing call site from a full one
    chains: dict[int, tuple[str, ...]] = field(default_factory=dict)  # who holds some of the live blocks
    ended_at: float | None = None  # seconds of the device's clock
    pools: int = 1  # more: so many of native code, of one name, that left nothing to tell

    @classmethod
    def of(cls, pool: _core.Pool) -> PoolFindings:
        """Say which pool it is."""
        mode = pool.options.get("mode", "")
        return cls(name=pool.name, kind=pool.kind, device=pool.driver.name, mode=mode, options=pool.options)

    @classmethod
    def of_ended(cls, facts: dict[str, Any]) -> PoolFindings:
        """Say what is known of pools that native code destroyed, as `_core.take_ended_c_pools` gives it."""
        found = cls(
            name=facts["name"],
            kind=facts["kind"],
            device=facts["device"],
            mode=facts["options"].get("mode", ""),
            options=facts["options"],
        )
        found.end(facts)
        return found

    def end(self, facts: dict[str, Any]) -> None:
        """Take what a pool left that native code destroyed."""
        if self.ended == "alive":
            self.ended, self.ended_at, self.live_blocks = "closed", facts["ended_at"], facts["live_blocks"]
        self.faults += facts["faults"]
        self.debug_totals, self.stats, self.pools = facts["debug_totals"], facts["stats"], facts["pools"]
        if more := facts["not_kept"]:
            why = "too many pools of native code left some, and what these left was not kept"
            self.problems.append(f"faults and live blocks of {more} destroyed pools: {why}")

    def observe(self, pool: _core.Pool) -> None:
        """End an epoch: note what each call site of a tracked pool holds now."""
        if self.ended == "alive" and self.options.get("track") == "true":
            self.epochs.observe(_core.Pool.live_blocks(pool))

    def gather(self, pool: _core.Pool, ended: str, *, timeout: float) -> list[dict[str, Any]]:
        """Ask `pool` for everything a report needs; what fails is noted, and the rest is asked all the same.

        The first call says how the pool ended and what was live then; later ones add faults and counters. Gives the
        faults that this call found.
        """
        if self.ended == "alive":
            closed = pool.is_closed  # by native code of the program, which says nothing of it here
            self.ended = "closed" if closed else ended
            self.live_blocks = self._ask("live blocks", lambda: _core.Pool.live_blocks(pool)) or []
            self.ended_at = self._ask("clock", lambda: pool.driver.now())
            if ended != "collected":  # that may be in any thread, in the middle of a collection
                self.chains = self._ask("holders", lambda: self._chains(pool)) or {}
            if not closed:
                checked = self._ask("last check", lambda: _core.Pool.check(pool, timeout))
                self.not_checked = (checked or {}).get("not_checked", [])
        found: list[dict[str, Any]] = self._ask("faults", lambda: _core.Pool.take_faults(pool)) or []
        self.faults += found
        self.count(pool)
        return found

    def _chains(self, pool: _core.Pool) -> dict[int, tuple[str, ...]]:
        wanted = _referrers.some_serials(self.live_blocks)
        find = self.find_objects
        if find is None:
            return _referrers.chains(pool, wanted)
        serials = {
            int(block["address"]): int(block["serial"]) for block in self.live_blocks if block["serial"] in wanted
        }
        return _referrers.chains(pool, wanted, lambda: find(serials))

    def count(self, pool: _core.Pool) -> None:
        """Take the pool's counters."""
        self.debug_totals = self._ask("totals", lambda: _core.Pool.debug_totals(pool)) or self.debug_totals
        self.stats = self._ask("counters", lambda: _core.Pool.stats(pool)) or self.stats

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self.problems.append(f"{what}: {type(error).__name__}: {error}")
            return None


class Session:
    """The pools of one watched program."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._findings: list[PoolFindings] = []
        self._alive: weakref.WeakSet[_core.Pool] = weakref.WeakSet()
        self._native: dict[int, PoolFindings] = {}  # of pools that native code made, by their number
        self._races: list[Race] = []

    def watch(self, pool: _core.Pool) -> PoolFindings:
        """Take a new pool in. The pool keeps its findings itself: weak references go before finalizers run."""
        findings = PoolFindings.of(pool)
        self._findings.append(findings)
        self._alive.add(pool)
        return findings

    def _look_at_native(self) -> list[tuple[_core.Pool, PoolFindings]]:
        """Give the pools that native code made and that still are. None is held for longer than that."""
        known = dict(_core.c_pools())
        for number in self._native.keys() - known.keys():  # destroyed: only counts are kept of it
            del self._native[number]
        alive = []
        for number, pool in known.items():
            if pool is not None:
                alive.append((pool, self._native.setdefault(number, PoolFindings.of(pool))))
        return alive

    def _end_native(self) -> list[PoolFindings]:
        """Give the findings of all pools that native code made."""
        counted = []
        for facts in _core.take_ended_c_pools():
            if facts["number"] == 0:
                counted.append(PoolFindings.of_ended(facts))
            elif (findings := self._native.get(facts["number"])) is not None:
                findings.end(facts)
            else:
                self._native[facts["number"]] = PoolFindings.of_ended(facts)
        return [*(self._native[number] for number in sorted(self._native)), *counted]

    def note_races(self, races: Sequence[Race]) -> None:
        """Keep races that the simulated device found, whoever asked for them."""
        self._races += races

    def observe(self) -> None:
        """End an epoch in every pool that is alive."""
        from streampool import session

        session.look()
        for pool in list(self._alive):
            findings = getattr(pool, "_findings", None)
            if findings is not None:
                findings.observe(pool)
        for pool, findings in self._look_at_native():
            findings.observe(pool)

    def finish(self) -> list[PoolFindings]:
        """Ask every pool that is still alive, and give the findings of all: Python's, then native code's."""
        from streampool import session

        session.look()
        for pool in list(self._alive):
            findings = getattr(pool, "_findings", None)
            if findings is not None:
                findings.gather(pool, "at exit", timeout=10.0)
        alive = self._look_at_native()
        for number, told in _core.take_told_c_faults():
            if (native := self._native.get(number)) is not None:
                native.faults += told
        for pool, findings in alive:
            findings.gather(pool, "at exit", timeout=10.0)
        self._findings += self._end_native()
        self._native.clear()
        if (sim := sys.modules.get("streampool.sim")) is not None:
            sim.races()  # those that nobody asked for yet
        for race in self._races:
            self._file(race)
        self._races.clear()
        return list(self._findings)

    def _file(self, race: Race) -> None:
        """Put a race with the pool whose live block it is in, else with the newest pool of its device."""
        of_device = [findings for findings in self._findings if findings.device == race.device]
        for findings in of_device:
            for block in findings.live_blocks:
                if block["address"] <= race.address < block["address"] + max(1, block["size"]):
                    findings.faults.append(_race_facts(race, block))
                    return
        if of_device:
            of_device[-1].faults.append(_race_facts(race, None))


def _race_facts(race: Race, block: dict[str, Any] | None) -> dict[str, Any]:
    """Give a race as the core gives other faults."""

    def side(access: Access) -> str:
        return f"{'write' if access.write else 'read'} by {access.label or 'work'} on {access.stream_name}"

    return {
        "kind": "race",
        "block": block,
        "address": race.address,
        "last": race.address + race.size - 1,
        "at": race.second.stack_id,
        "other_at": race.first.stack_id,
        "note": f"{side(race.second)} is not ordered with the {side(race.first)} that was queued before it",
        "count": race.count,
    }
