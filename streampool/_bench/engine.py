"""Measures what a kind plans: starts processes, asks them in turns, and makes rows of their answers.

In turns: each repetition asks every peer once, the baseline first and the others from another one on each time, so that
what the machine does meanwhile meets them all. Before the first repetition each is asked for nothing: for more and more
operations until it is known how many fit into the time of one measurement, and once for so many.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from streampool._bench.kinds import Group, Kind, Manner, Row, Settings, Task
from streampool._bench.worker import Worker, WorkerError

__all__ = ["Engine", "Failure"]

_FIRST = 256  # operations of the first look

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """A measurement that was not made."""

    kind: str
    pattern: str
    peer: str
    reason: str


@dataclass(slots=True)
class Engine:
    """One run. `rows` and `failures` fill as it goes; `versions` is what the workers said of themselves."""

    settings: Settings
    progress: Progress
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    _done: int = 0
    _total: int = 0

    def run(self, plans: Mapping[str, tuple[Kind, Sequence[Group]]]) -> None:
        """Measure every group of every kind."""
        self._total = sum(self._steps(kind, group) for kind, groups in plans.values() for group in groups)
        for kind, groups in plans.values():
            first = len(self.rows)
            try:
                self._measure(kind, groups)
            finally:
                rows = self.rows[first:]
                for row in rows:
                    baseline = kind.baseline(row, rows)
                    if baseline is not None and baseline.median > 0:
                        row.baseline, row.ratio = baseline.label, row.median / baseline.median

    def interrupted(self) -> None:
        """Note that the user ended it: what was not measured by then is not there."""
        self.failures.append(Failure("", f"measurement {self._done} of {self._total}", "", "interrupted"))

    def _repetitions(self, kind: Kind) -> int:
        return self.settings.repetitions or kind.repetitions

    def _steps(self, kind: Kind, group: Group) -> int:
        if group.manner is Manner.REPLAY:
            return sum(self._repetitions(kind) + _looks_at_bytes(task) for task in group.tasks)
        return len(group.tasks) * (1 if group.manner is Manner.ORDERING else self._repetitions(kind) + 2)

    def _step(self, kind: Kind, group: Group, task: Task) -> None:
        self._done += 1
        self.progress(self._done, self._total, f"{kind.name}: {group.pattern}: {task.label}")

    def _measure(self, kind: Kind, groups: Sequence[Group]) -> None:
        alone = [group for group in groups if group.manner in (Manner.ALONE, Manner.REPLAY)]
        for process in dict.fromkeys(task.process for group in alone for task in group.tasks):
            with _Workers() as workers:
                for group in alone:
                    for task in group.tasks:
                        if task.process == process:
                            self._alone(kind, group, task, workers)
        with _Workers() as workers:
            for group in groups:
                if group.manner is Manner.TURNS:
                    self._in_turns(kind, group, group.tasks, workers)
                elif group.manner is Manner.ORDERING:
                    for task in group.tasks:
                        self._try(kind, group, task, partial(self._ordering, kind, group, task, workers))

    def _alone(self, kind: Kind, group: Group, task: Task, workers: _Workers) -> None:
        before = len(self.failures)
        if group.manner is Manner.REPLAY:
            self._try(kind, group, task, partial(self._replay, kind, group, task, workers))
        else:
            self._in_turns(kind, group, [task], workers)
        if len(self.failures) != before:  # it may hold what it allocated before it failed: the next one starts anew
            workers.close()

    def _try(self, kind: Kind, group: Group, task: Task, action: Callable[[], None]) -> bool:
        """Do it; what a worker cannot do is noted, and the others go on."""
        try:
            action()
        except WorkerError as error:
            self.failures.append(Failure(kind.name, group.pattern, task.label, str(error)))
            return False
        return True

    # -- asked in turns ------------------------------------------------------------------------------------------------

    def _in_turns(self, kind: Kind, group: Group, tasks: Sequence[Task], workers: _Workers) -> None:
        for task in tasks:  # all start at once: importing a framework takes its time
            self._try(kind, group, task, partial(workers.start, task))
        counts: dict[int, int] = {}
        answers: dict[int, list[dict[str, Any]]] = {}

        def look(number: int, task: Task) -> None:
            counts[number] = self._fitting(group, task, workers.get(task))
            answers[number] = []

        def warm(number: int, task: Task) -> None:
            workers.get(task).ask(task.ask(counts[number]))

        def measure(number: int, task: Task) -> None:
            answers[number].append(workers.get(task).ask(task.ask(counts[number])))

        living = dict(enumerate(tasks))
        rounds = [look, warm, *[measure] * self._repetitions(kind)]
        for turn, action in enumerate(rounds):
            numbers = list(living)
            shift = turn % max(1, len(numbers) - 1)
            order = numbers[:1] + numbers[1 + shift :] + numbers[1 : 1 + shift]
            for number in order:
                task = living[number]
                self._step(kind, group, task)
                if not self._try(kind, group, task, partial(action, number, task)):
                    del living[number]
        for number, task in living.items():
            self.rows += [
                _row(kind, group, task, part, [_part(answer, part) for answer in answers[number]], counts[number])
                for part in group.readings
            ]

    def _fitting(self, group: Group, task: Task, worker: Worker) -> int:
        """Give how many operations fit into the time of one measurement.

        The first look pays for growth and tells nothing; of each later two the faster one counts, since the other may
        have met growth as well.
        """
        most, budget = min(self.settings.operations, group.most or self.settings.operations), self.settings.budget_ns
        if version := worker.hello().get("version"):
            self.versions[task.label] = str(version)
        count = min(_FIRST, most)
        worker.ask(task.ask(count))
        while True:
            looks = [worker.ask(task.ask(count)) for _ in range(2)]
            spent = min(max(_slowest(_part(look, part)) for part in group.readings) for look in looks) * count
            if count == most or spent >= budget / 4:
                return max(min(_FIRST, most), min(most, int(count * budget / max(spent, 1.0))))
            count = min(most, 8 * count)

    # -- replay, ordering ----------------------------------------------------------------------------------------------

    def _replay(self, kind: Kind, group: Group, task: Task, workers: _Workers) -> None:
        """Ask for times, then for bytes. Before each, the worker gives back to the driver what its allocator holds."""
        colds, times, halves, tails = [], [], [], []
        workers.start(task)
        worker = workers.get(task)
        for _ in range(self._repetitions(kind)):
            self._step(kind, group, task)
            answer = worker.ask(task.ask(1))
            colds.append(answer["cold"])
            times += answer["ns"]
            halves.append(answer["p50"])
            tails.append(answer["p99"])
        if version := worker.hello().get("version"):
            self.versions[task.label] = str(version)
        extra = {"cold": statistics.median(colds), "left_out": answer["left_out"]}
        if _looks_at_bytes(task):
            self._step(kind, group, task)
            looked = worker.ask(task.ask(0))
            if looked["held"] >= 0 and looked["peak_live"]:
                extra |= {
                    "held_bytes": looked["held"],
                    "peak_live_bytes": looked["peak_live"],
                    "held_ratio": looked["held"] / looked["peak_live"],
                }
        self.rows.append(
            Row(
                kind.name, group.pattern, task.peer, task.label, task.interface, group.unit, task.parameters,
                statistics.median(times), statistics.median(halves), statistics.median(tails), times, extra=extra,
            )
        )  # fmt: skip

    def _ordering(self, kind: Kind, group: Group, task: Task, workers: _Workers) -> None:
        self._step(kind, group, task)
        workers.start(task)
        for one in workers.get(task).ask(task.ask(1))["rows"]:
            self.rows.append(
                Row(
                    kind.name, one["what"], task.peer, task.label, task.interface, group.unit, {}, one["ns"],
                    one["p50"], one["p99"], [one["ns"]], extra={"calls": one["calls"], "left_out": one["left_out"]},
                )
            )  # fmt: skip


class _Workers:
    """Living processes, one a command. One that did not start is not tried again."""

    def __init__(self) -> None:
        self._living: dict[str, Worker | WorkerError] = {}

    def start(self, task: Task) -> None:
        if task.process in self._living:
            return
        try:
            self._living[task.process] = Worker(task.command, task.environment)
        except WorkerError as error:
            self._living[task.process] = error

    def get(self, task: Task) -> Worker:
        found = self._living[task.process]
        if isinstance(found, WorkerError):
            raise found
        return found

    def close(self, *, at_once: bool = False) -> None:
        for worker in self._living.values():
            if isinstance(worker, Worker):
                worker.close(at_once=at_once)
        self._living.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)


def _looks_at_bytes(task: Task) -> bool:
    return not (task.host or task.fixed)


def _part(answer: dict[str, Any], part: str) -> dict[str, Any]:
    found: dict[str, Any] = answer[part] if part else answer
    return found


def _slowest(answer: dict[str, Any]) -> float:
    return float(max(answer["ns"]))


def _row(kind: Kind, group: Group, task: Task, part: str, answers: list[dict[str, Any]], count: int) -> Row:
    times = [_slowest(answer) for answer in answers]
    parameters = {**task.parameters, **({"part": part} if part else {})}
    return Row(
        kind.name, group.pattern, task.peer, task.label, task.interface, group.unit, parameters,
        statistics.median(times), statistics.median(a["p50"] for a in answers),
        statistics.median(a["p99"] for a in answers), times,
        extra={"operations": count, "left_out": statistics.median(a["left_out"] for a in answers)},
    )  # fmt: skip
