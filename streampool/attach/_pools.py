"""One pool a device for each library, made when it is first needed: a device that nobody uses gets no context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streampool import _fork, config, device
from streampool.pool import Pool

__all__ = ["Pools"]


class Pools:
    """The pools that serve one library."""

    def __init__(self, library: str, pool: Pool | None, options: dict[str, Any]) -> None:
        if pool is not None and not isinstance(pool, Pool):
            raise TypeError(f"pool must be a streampool.Pool, not {type(pool).__name__}")
        if pool is not None and pool.kind != "device":
            raise ValueError(f"pool must be one of device memory, not of {pool.kind} memory")
        self.library = library
        self.given = pool
        self.family = device.default_family() if pool is None else pool.driver.name.partition(":")[0]
        self._mode = options.pop("mode", None)
        self._options = options
        self.resolved()  # what is wrong is said now
        self.find_objects: Callable[[Mapping[int, int]], dict[int, object]] | None = None  # where they can be found
        self._lock = _fork.lock()
        self._made: dict[tuple[int, str], Pool] = {}
        if pool is not None:
            self._take(pool, pool.driver.ordinal, "device")

    def resolved(self, **defaults: Any) -> dict[str, str]:
        """Give all options of these pools as text: `defaults` where neither `install` nor the environment says more."""
        environment = config.from_environment() or ""
        stated = {item.partition("=")[0] for item in environment.split(":")}
        missing = {name: value for name, value in defaults.items() if name not in stated}
        return config.resolve(self._mode, {**missing, **self._options}, pool=self.library)

    def on(self, ordinal: int, kind: str = "device") -> Pool:
        """Give the pool on a device, which is made where there is none."""
        found = self._made.get((ordinal, kind))
        if found is not None:
            return found
        with self._lock:
            found = self._made.get((ordinal, kind))
            if found is None:
                made = Pool(f"{self.family}:{ordinal}", kind=kind, mode=self._mode, name=self.library, **self._options)
                found = self._made.get((ordinal, kind))
                if found is not None:  # a signal's handler, on this thread, needed one meanwhile
                    made.close()
                else:
                    found = self._take(made, ordinal, kind)
        return found

    def add(self, pool: Pool) -> None:
        """Take in a pool that was made elsewhere."""
        self._take(pool, pool.driver.ordinal, pool.kind)

    def _take(self, pool: Pool, ordinal: int, kind: str) -> Pool:
        findings = pool._findings
        if findings is not None and pool is not self.given:
            findings.find_objects = self.find_objects
        self._made[ordinal, kind] = pool
        return pool

    def made(self) -> list[Pool]:
        """Give the pools there are."""
        return list(self._made.values())

    def peak(self) -> int:
        """Give the bytes that they held out at most, added up."""
        return sum(pool.stats().in_use_peak for pool in self.made())
