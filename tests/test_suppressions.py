"""Suppressions: which findings a rule fits, what a broken one is told, and the rules that are suggested."""

from __future__ import annotations

import pytest
from report_scene import Found, assert_in_order, block, overrun, report

from streampool.faults import FaultKind, Frame
from streampool.leaks import LeakClass
from streampool.suppressions import Suppressions, suggest


# -- suppressions -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rule",
    [
        "overrun:fill_edges",
        "overrun:main",
        "overrun:train.py",
        "overrun:*/train.py",
        "overrun:train.py:31",
        "overrun:train",
        "overrun:app.train",
        "overrun:my tag",
        "*:fill_*",
    ],
)
def test_a_rule_fits_function_file_line_module_or_tag(rule: str) -> None:
    one = report(Found(faults=[overrun(block=block(tag="my tag"))]), suppressions=[rule])
    assert not one.counts
    assert len(one.suppressed_faults) == 1
    assert_in_order(one.to_text(width=200), f"suppressed    {rule} (1)", "no faults", "1 suppressed")


@pytest.mark.parametrize(
    "rule", ["underrun:fill_edges", "overrun:fill", "overrun:Fill_edges", "leak:fill_edges", "overrun:rain"]
)
def test_a_rule_that_does_not_fit_changes_nothing_and_is_listed_as_unused(rule: str) -> None:
    one = report(Found(faults=[overrun()]), suppressions=["# known", "", f"{rule}  # why"])
    assert one.counts == 1
    assert f"unused rules  {rule}" in one.to_text()


@pytest.mark.parametrize("rule", ["lost:fill_edges", "leak:fill_edges", "*:*"])
def test_leaks_can_be_suppressed(rule: str) -> None:
    one = report(Found(live_blocks=[block(owner="raw")]), suppressions=[rule])
    assert not one.counts
    assert "LEAK" not in one.to_text()
    assert one.leaks[0].suppressed_by == rule


@pytest.mark.parametrize(
    ("line", "words"), [("overrun", "not kind:glob"), ("leek:f", "unknown kind 'leek'"), ("overrun:", "not kind")]
)
def test_a_broken_rule_names_its_line(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"rules\.txt, line 2: .*{words}"):
        Suppressions.parse(["# fine", line], source="rules.txt")


def test_every_word_that_an_unknown_kind_is_told_of_is_one() -> None:
    with pytest.raises(ValueError, match="unknown kind 'leaks': there are ") as caught:
        Suppressions.parse(["leaks:*"])
    words = str(caught.value).partition("there are ")[2].split(", ")
    assert words == [*FaultKind, *LeakClass, "leak", "*"]
    assert [rule.kind for rule in Suppressions.parse([f"{word}:x" for word in words]).rules] == words


@pytest.mark.parametrize("function", ["step", "<module>", "<lambda>", "A.f[0]*"])
def test_the_suggested_rule_fits_its_own_finding(function: str) -> None:
    stack = (Frame("/app/a.py", 3, function),)
    rules = Suppressions.parse([suggest("overrun", stack)])
    assert rules.find("overrun", [stack]) is not None
    assert not rules.unused
    tagged = Suppressions.parse([suggest("held", (), "weights[0]")])
    assert tagged.find("held", [()], ["weights[0]"]) is not None
