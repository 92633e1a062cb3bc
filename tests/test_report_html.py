"""Reports as HTML: whole, accessible, without scripts, and nothing of the program's ever becomes markup."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_scene import Found, block, fault, freed, report, written

import streampool as sp
from streampool._report_html import COLORS
from streampool.faults import FaultKind, Frame
from streampool.leaks import LeakClass, LeakPolicy
from streampool.report import Report

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """A page's tree, as far as the tests ask; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.headings: list[int] = []
        self.declared = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_decl(self, decl: str) -> None:
        self.declared = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute of <{tag}> stands there twice"
        self.tags.append((tag, dict(attrs)))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def whole() -> Report:
    """A report with a fault of each kind, a leak of each class, gaps and rules."""
    facts = [written("overrun", 1013, b"\xab\xcd", before=5, of=freed(tag="edges"), below=block(serial=11))]
    facts += [
        {"kind": kind, "block": freed(), "address": block()["address"], "at": 3, "note": f"about {kind}"}
        for kind in FaultKind
        if kind != "overrun"
    ]
    live = [block(owner="raw", serial=1), block(owner="buffer", serial=2, allocated_at=3)]
    found = Found(faults=facts, live_blocks=live, not_checked=[block()], problems=["last check: it failed"])
    one = report(found, suppressions=["race:fill_edges", "lost:nobody", "race:*"])
    held = one.leaks.held[0]
    grown = replace(
        held,
        leak_class=LeakClass.GROWING,
        growth=(1, 2, 3),
        ages=(0, 1013, 0, 0, 0, 5),
        held_by=("module train: cache", "['a'] of a dict of 1"),
    )
    one.leaks = replace(one.leaks, items=(*one.leaks.items, grown))
    return one


def assert_sound(text: str) -> Page:
    """Hold a page to what every page promises."""
    page = Page(text)
    assert page.declared == "DOCTYPE html"
    assert page.all("html")[0]["lang"] == "en"
    (title,) = re.findall("<title>([^<]+)</title>", text)
    assert title.startswith("streampool report: ")
    # Readable without scripts, and by itself: nothing runs and nothing is loaded.
    assert {tag for tag, _ in page.tags} & {"script", "iframe", "img", "link", "object", "form", "base"} == set()
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name in ("src", "style", "action") for name in attributes), tag
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert (policy or "").startswith("default-src 'none'")
    # Names are there once, and links and labels lead to one.
    names = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in page.tags:
        for target in (attributes.get("href"), attributes.get("aria-labelledby")):
            assert target is None or target.removeprefix("#") in names
    # One title, and no level of headings is jumped over; one main part.
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(deeper - level <= 1 for level, deeper in zip(page.headings, page.headings[1:], strict=False))
    assert len(page.all("main")) == 1
    assert page.all("a")[0]["class"] == "skip"
    # What may scroll can be reached by keyboard and has a name; tables say what heads what.
    assert all(pre["tabindex"] == "0" and pre["aria-label"] for pre in page.all("pre"))
    assert all(cell["scope"] in ("col", "row") for cell in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    return page


def test_the_page_says_all_that_the_text_says() -> None:
    one = whole()
    said = assert_sound(one.to_html()).text
    lines = [line.strip() for line in one.to_text(width=10_000).splitlines()]
    for line in lines:
        for label in ("block ", "below ", "window ", "note: ", "covered ", "never seen ", "blocks ", "age ", "growth "):
            if line.startswith(label):
                assert " ".join(line.removeprefix(label).split()) in said
    for part in (
        *(f.sentence for f in one.faults),
        *(str(f.stack[0]) for f in one.faults if f.stack),
        "|ab cd . .",
        "LEAK: growing",
        "NOTE: held",
        "module train: cache",
        "race:fill_edges",
        "0: unused",
        "last check: it failed",
    ):
        assert " ".join(part.split()) in said


def test_the_page_answers_whether_the_pool_is_wrong_for_each_kind_that_was_found() -> None:
    one = whole()
    page = assert_sound(one.to_html())
    found = {str(f.kind) for f in one.faults} | {str(leak.leak_class) for leak in one.leaks}
    assert len(found) == len(FaultKind) - 1 + len(LeakClass)  # races were suppressed
    sections = {str(a["id"]) for a in page.all("section")}
    assert {f"about-{word}" for word in found} <= sections
    assert page.text.count("Is the pool wrong?") == len(found)
    assert "**" not in page.text
    assert "](" not in page.text


def test_a_clean_report_is_a_sound_page_too() -> None:
    page = assert_sound(report(Found()).to_html())
    assert "no faults, no leaks that count" in page.text
    assert "Findings" not in page.text.split("Skip to the findings")[1]
    assert_sound(Report().to_html())


@given(
    st.text(alphabet=st.characters(), max_size=40),
    st.sampled_from(["<script>alert(1)</script>", '" onload="x', "</title><b>", "&lt;", "\x00\x08\udc80", "]]>-->"]),
)
def test_nothing_of_the_programs_becomes_markup(text: str, hostile: str) -> None:
    evil = f"{hostile}{text}"
    one = fault(written("overrun", 1013, b"\1", of=freed(tag=evil), note=evil, scopes=[evil]))
    one = replace(one, at=(Frame(evil, 1, evil),), pool=evil, device=evil)
    leaky = report(Found(name=evil, live_blocks=[block(owner="raw", tag=evil, allocated_at=0)], problems=[evil]))
    made = replace(leaky, faults=(one,), leak_policy=LeakPolicy.ALL)
    page = made.to_html()
    assert_sound(page)
    page.encode("utf-8")
    assert {tag for tag, _ in Page(page).tags} == {tag for tag, _ in Page(whole_clean(made)).tags}


def whole_clean(made: Report) -> str:
    """The same report with harmless words."""
    plain = replace(made.faults[0], note="n", scopes=("s",), at=(Frame("f.py", 1, "f"),), pool="p", device="d")
    assert plain.block is not None
    plain = replace(plain, block=replace(plain.block, tag="t"))
    items = tuple(replace(leak, tags=("t",), pool="p") for leak in made.leaks)
    return replace(made, faults=(plain,), leaks=replace(made.leaks, items=items)).to_html()


def luminance(color: str) -> float:
    """Relative luminance, after WCAG 2.2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", COLORS)
def test_every_colour_of_text_is_told_from_the_background(scheme: str) -> None:
    colors = COLORS[scheme]
    for word, color in colors.items():
        if word == "back":
            continue
        light, dark = sorted((luminance(color), luminance(colors["back"])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, word


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_chromium_reads_the_page_as_it_was_written(tmp_path: Path) -> None:
    one = whole()
    place = tmp_path / "report.html"
    place.write_text(one.to_html(), encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--dump-dom",
            place.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    # Where the page was not well formed, the browser's tree would be another one.
    written_down, read = Page(one.to_html()), Page(done.stdout)
    assert read.text == written_down.text
    missing = [tag for tag, _ in written_down.tags if tag not in dict(read.tags)]
    assert missing == []
    assert [a for t, a in read.tags if t == "section"] == [a for t, a in written_down.tags if t == "section"]
    assert "CONSOLE" not in done.stderr, done.stderr  # no complaint about the page or its policy


def test_a_real_fault_makes_a_page() -> None:
    device = sp.Device("sim:0")
    stream = device.create_stream()
    with sp.Pool(device, mode="debug") as pool:
        one = pool.allocate(1000, stream=stream, tag="<scores>")
        stream.launch(lambda out: out.fill(1), writes=[(one.handle, 1001)])
        stream.sync()
        one.close(stream)
        pool.check()
        page = assert_sound(Report(faults=tuple(pool.faults())).to_html())
    assert "tag '<scores>'" in page.text
    assert "write of 1 byte, 0 bytes behind the end of a 1000-byte block" in page.text
