"""Suppressions: lines ``kind:glob`` that keep known findings from counting.

``kind`` is a fault's word, a leak class, ``leak`` for all of these, or ``*``. The glob is held against the function,
the file, the module and ``file:line`` of every frame, and against the block's tag. ``#`` starts a comment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from streampool.faults import FaultKind, Frame

__all__ = ["Rule", "Suppressions", "suggest"]

LEAK_CLASSES = ("lost", "growing", "held")
_KINDS = (*FaultKind, *LEAK_CLASSES, "leak", "*")
_SPECIAL = re.compile(r"([*?\[])")


@dataclass(slots=True)
class Rule:
    """One line, and how many findings it matched."""

    kind: str
    glob: str
    used: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.glob}"

    def matches(self, kind: str, names: Iterable[str]) -> bool:
        """Say whether the rule is for `kind` and its glob fits one of `names`."""
        fits = self.kind in (kind, "*") or (self.kind == "leak" and kind in LEAK_CLASSES)
        return fits and any(fnmatchcase(name, self.glob) for name in names)


@dataclass(slots=True)
class Suppressions:
    """Rules in the order they were given; the first that fits is used."""

    rules: list[Rule] = field(default_factory=list)

    @classmethod
    def parse(cls, lines: Iterable[str], *, source: str = "suppressions") -> Suppressions:
        """Read rules, one a line.

        Raises
        ------
        ValueError
            A line is not ``kind:glob``, or its kind is unknown; the text names the line.
        TypeError
            `lines` is one text, or a line is none.
        """
        if isinstance(lines, str):
            raise TypeError("lines must be a list of lines, not one text: use text.splitlines()")
        rules = []
        for number, raw in enumerate(lines, 1):
            if not isinstance(raw, str):
                raise TypeError(f"{source}, line {number}: a rule is text, not {raw!r}")
            line = raw.partition("#")[0].strip()
            if not line:
                continue
            kind, colon, glob = (part.strip() for part in line.partition(":"))
            if not colon or not glob:
                raise ValueError(f"{source}, line {number}: {line!r} is not kind:glob")
            if kind not in _KINDS:
                raise ValueError(f"{source}, line {number}: unknown kind {kind!r}: there are {', '.join(_KINDS)}")
            rules.append(Rule(kind, glob))
        return cls(rules)

    @classmethod
    def read(cls, path: str | Path) -> Suppressions:
        """Read a file of rules; ``OSError`` when it cannot be read, ``ValueError`` when it is wrong."""
        return cls.parse(Path(path).read_text(encoding="utf-8").splitlines(), source=str(path))

    def find(
        self, kind: str, stacks: Iterable[Sequence[Frame]], tags: Iterable[str] = (), *, count: int = 1
    ) -> Rule | None:
        """Give the first rule that fits a finding, and count its use: `count` findings of one kind and place."""
        names = {name for stack in stacks for frame in stack for name in _names(frame)}
        names.update(tag for tag in tags if tag)
        for rule in self.rules:
            if rule.matches(kind, names):
                rule.used += count
                return rule
        return None

    @property
    def used(self) -> list[Rule]:
        """Rules that matched something."""
        return [rule for rule in self.rules if rule.used]

    @property
    def unused(self) -> list[Rule]:
        """Rules that matched nothing: candidates for removal."""
        return [rule for rule in self.rules if not rule.used]


def _names(frame: Frame) -> Iterable[str]:
    yield frame.function
    base = os.path.basename(frame.file)
    for file in (frame.file, base):
        yield file
        yield f"{file}:{frame.line}"
    # Every dotted tail of the path is a name that the module may go by: model, pkg.model, …
    parts = os.path.splitext(frame.file)[0].split(os.sep)
    for start in range(1, len(parts)):
        yield ".".join(parts[start:])


def suggest(kind: str, stack: Sequence[Frame], tag: str = "") -> str:
    """Give a ready line for a finding: its function where that has a name, else its file and line, else its tag."""
    if stack:
        frame = stack[0]
        name = frame.function
        if not name.isidentifier():
            name = f"{os.path.basename(frame.file)}:{frame.line}"
    else:
        name = tag
    escaped = _SPECIAL.sub(r"[\1]", name)
    return f"{kind}:{escaped or '*'}"
