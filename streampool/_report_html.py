"""A report as a page of HTML: one file, no scripts, nothing from elsewhere, readable by ear and in black and white.

Everything that came from the program (names, tags, notes, files) goes through `_text`, which escapes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from streampool import _report_words as words
from streampool._bytemap import byte_map, reads_as
from streampool._paths import fault_page
from streampool.faults import BlockFacts, Candidate, Fault, FaultKind, Frame
from streampool.leaks import Leak
from streampool.report import PoolFacts, Report
from streampool.suppressions import suggest

if TYPE_CHECKING:
    from streampool.page_guards import PostMortem
    from streampool.snapshots import Snapshot

__all__ = ["COLORS", "render", "render_post_mortem", "render_snapshot"]

COLORS = {
    "light": {
        "back": "#ffffff",
        "text": "#1b1f24",
        "quiet": "#57606a",
        "link": "#0550ae",
        "bad": "#a40e26",
        "good": "#116329",
    },
    "dark": {
        "back": "#0d1117",
        "text": "#e6edf3",
        "quiet": "#9da7b3",
        "link": "#79c0ff",
        "bad": "#ff9492",
        "good": "#7ee787",
    },
}
"""The page's colours in both schemes; each text colour is told from the background by 4.5 to 1 or more."""

_STYLE = """
body { margin: 0 auto; max-width: 70rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif;
  background: var(--back); color: var(--text); }
a { color: var(--link); }
a:focus-visible, pre:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -99rem; }
.skip:focus { position: static; }
h1, h2, h3 { line-height: 1.25; }
section { border-top: 1px solid var(--quiet); margin-top: 2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
ol.stack { margin: 0; padding-left: 1.5rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9rem; }
pre { overflow-x: auto; margin: 0; }
.bad { color: var(--bad); }
.good { color: var(--good); }
.quiet { color: var(--quiet); margin: 0; }
table { border-collapse: collapse; }
caption { text-align: left; font-weight: bold; padding-bottom: .25rem; }
th, td { text-align: left; padding: .15rem 1rem .15rem 0; border-bottom: 1px solid var(--quiet); vertical-align: top; }
@media (max-width: 40rem) { dl { display: block; } dd { margin-bottom: .5rem; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(report: Report) -> str:
    """Give the page of `report`."""
    groups = report.grouped_faults
    leaks = [leak for leak in report.leaks if not leak.suppressed_by]
    verdict = words.total(report)
    body = [
        '<a class="skip" href="#findings">Skip to the findings</a>',
        "<header>",
        "<h1>streampool report</h1>",
        f'<p class="{"bad" if report.counts else "good"}"><strong>{_text(verdict)}</strong></p>',
        _about(report),
        "</header>",
        _contents(report, groups, leaks),
        '<main id="findings">',
        *(_fault(group, number, len(groups)) for number, group in enumerate(groups, 1)),
        *(_leak(report, leak, number) for number, leak in enumerate(leaks, 1)),
        _coverage(report),
        _pools(report.pools),
        _suppressions(report),
        _pages(report, leaks),
        "</main>",
    ]
    return _document(verdict, body)


def render_post_mortem(records: PostMortem) -> str:
    """Give the page of what the records of page guards say."""
    word = FaultKind.ILLEGAL_ACCESS
    body = [
        '<a class="skip" href="#findings">Skip to the blocks</a>',
        "<header>",
        "<h1>streampool report of page guards</h1>",
        f"<p><strong>{_text(records.verdict)}</strong></p>",
        _list(
            [
                ("process", _text(records.pid)),
                ("pool", _text(f"'{records.pool}' on {records.device}")),
                ("device", f'<span class="bad">{_text(records.error)}</span>' if records.error else ""),
                ("page_guard_seed", _code(str(records.seed))),
                ("records", f'<span class="bad">{_text(records.damage)}</span>' if records.damage else ""),
            ]
        ),
        "</header>",
        '<main id="findings">',
        *(_candidate(one, number, len(records.candidates)) for number, one in enumerate(records.candidates, 1)),
        _about_kind(word),
        "</main>",
    ]
    return _document(records.verdict, body)


def render_snapshot(snapshot: Snapshot) -> str:
    """Give the page of a saved snapshot."""
    held = [one for one in snapshot.holders if one.bytes or one.blocks]
    body = [
        '<a class="skip" href="#findings">Skip to who holds memory</a>',
        "<header>",
        "<h1>streampool snapshot</h1>",
        f"<p><strong>{_text(snapshot.title)}</strong></p>",
        "</header>",
        '<main id="findings">',
        _table("account", "Account", ["part", "bytes"], [[name, f"{value:,}"] for name, value in snapshot.account]),
        '<section id="holders" aria-labelledby="holders-title">',
        f'<h2 id="holders-title">Who holds memory ({_text(snapshot.precision)})</h2>',
        _list((one.title, _stack(one.frames)) for one in held),
        "</section>",
        _table("settings", "Settings", ["option", "value"], snapshot.options.items()),
        "</main>",
    ]
    return _document(snapshot.title, body)


def _document(verdict: str, body: Iterable[str]) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta http-equiv="Content-Security-Policy" content="{_text(_POLICY)}">',
            f"<title>streampool report: {_text(verdict)}</title>",
            f"<style>{_colors()}{_STYLE}</style>",
            "</head>",
            "<body>",
            *filter(None, body),
            "</body>",
            "</html>",
        ]
    )


# -- pieces -----------------------------------------------------------------------------------------------------------
def _text(value: object) -> str:
    """Make anything text of the page. What no text may hold in HTML is shown as an escape."""
    plain = "".join(
        c if c in "\t\n" or ((c.isprintable() or c.isspace()) and ord(c) >= 32) else ascii(c)[1:-1] for c in str(value)
    )
    return escape(plain, quote=True)


def _colors() -> str:
    def scheme(name: str) -> str:
        return "".join(f"--{word}: {color}; " for word, color in COLORS[name].items())

    return f":root {{ {scheme('light')}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {scheme('dark')}}} }}\n"


def _list(rows: Iterable[tuple[str, str]]) -> str:
    """Make a list of terms; the descriptions are HTML already, and those that are empty are left out."""
    items = [f"<dt>{_text(term)}</dt><dd>{html}</dd>" for term, html in rows if html]
    return "\n".join(["<dl>", *items, "</dl>"]) if items else ""


def _stack(frames: Sequence[Frame], when: str = "") -> str:
    said = f'<p class="quiet">{_text(when)}</p>' if when else ""
    if not frames:
        return f'<span class="quiet">no stack was kept (option stack_depth)</span>{said}'
    items = "".join(f"<li><code>{_text(frame)}</code></li>" for frame in frames)
    return f'<ol class="stack">{items}</ol>{said}'


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>" if text else ""


def _about(report: Report) -> str:
    command = " ".join(report.processes[0].command) if report.processes else ""
    more = f" and {len(report.processes) - 1:,} more processes" if len(report.processes) > 1 else ""
    created = f'<time datetime="{_text(report.created)}">{_text(report.created)}</time>' if report.created else ""
    return _list(
        [
            ("command", f"{_code(command)}{more}"),
            ("made", created),
            ("streampool", _text(report.version)),
            ("leaks that count", _text(report.leak_policy)),
            ("exit code", "" if report.exit_code is None else _text(report.exit_code)),
        ]
    )


def _contents(report: Report, groups: Sequence[Sequence[Fault]], leaks: Sequence[Leak]) -> str:
    items = []
    for number, group in enumerate(groups, 1):
        times = words.group_size(group)
        often = f" ({times:,} times)" if times > 1 else ""
        items.append(f'<li><a href="#fault-{number}">{_text(group[0])}</a>{often}</li>')
    for number, leak in enumerate(leaks, 1):
        items.append(f'<li><a href="#leak-{number}">{_text(words.leak_title(leak, report.leak_policy))}</a></li>')
    if not items:
        return ""
    return "\n".join(['<nav aria-label="Findings">', "<h2>Findings</h2>", "<ol>", *items, "</ol>", "</nav>"])


# -- findings ---------------------------------------------------------------------------------------------------------
def _fault(group: Sequence[Fault], number: int, of: int) -> str:
    fault = group[0]
    name = f"fault-{number}"
    rows = [("where", _text(words.where(group))), ("note", _text(fault.note)), ("bytes", _bytes(fault))]
    if fault.at:
        rows.append(("called at", _stack(fault.at)))
    if fault.other_at:
        rows.append(("other use at", _stack(fault.other_at)))
    if fault.block is not None:
        rows += _block(fault.block)
    rows += [
        (side, _text(words.neighbour(side, fault.block, other)))
        for side, other in (("below", fault.below), ("above", fault.above))
        if other is not None
    ]
    rows += [
        ("window", _text(words.window(fault))),
        ("scopes", _text(f"open in the window: {', '.join(fault.scopes)}") if fault.scopes else ""),
        ("candidates", _items(words.candidate(one) for one in fault.candidates)),
        ("next", f'{_text(words.next_for_fault(fault))}; <a href="#about-{fault.kind}">about {fault.kind}</a>'),
        ("suppress with", _code(suggest(fault.kind, fault.stack, fault.tag))),
        ("dedup token", _code(fault.dedup_token)),
    ]
    return "\n".join(
        [
            f'<section id="{name}" aria-labelledby="{name}-title">',
            f'<h2 id="{name}-title">Fault {number} of {of}: <span class="bad">{fault.kind}</span></h2>',
            f"<p><strong>{_text(fault.sentence)}</strong></p>",
            _list(rows),
            "</section>",
        ]
    )


def _items(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<ol>{items}</ol>" if items else ""


def _bytes(fault: Fault) -> str:
    rows = byte_map(fault)
    if not rows:
        return ""
    looks = reads_as(fault)
    reads = f"; they read as {looks}" if looks else ""
    said = f"{fault.bad_bytes:,} of them written{reads}. A dot: untouched; hex: written"
    # It may be wider than the page: then it scrolls, by keyboard too.
    label = _text(f"Bytes of fault {fault.number}")
    return f'{_text(said)}.<pre tabindex="0" role="region" aria-label="{label}">{_text(chr(10).join(rows))}</pre>'


def _block(block: BlockFacts) -> list[tuple[str, str]]:
    rows = [
        ("block", _text(words.block_facts(block))),
        ("allocated at", _stack(block.allocated_at, words.when(block.allocated_thread, block.allocated_time))),
    ]
    if block.was_freed:
        rows.append(("freed at", _stack(block.freed_at, words.when(block.freed_thread, block.freed_time))))
    return rows


def _candidate(one: Candidate, number: int, of: int) -> str:
    name = f"block-{number}"
    return "\n".join(
        [
            f'<section id="{name}" aria-labelledby="{name}-title">',
            f'<h2 id="{name}-title">Block {number} of {of}: #{one.block.serial}</h2>',
            f"<p><strong>{_text(one.why)}</strong></p>",
            _list(_block(one.block)),
            "</section>",
        ]
    )


def _leak(report: Report, leak: Leak, number: int) -> str:
    name = f"leak-{number}"
    counted = report.leak_policy.counts(leak.leak_class)
    growth = " → ".join(f"{size:,}" for size in leak.growth)
    about = f'<a href="#about-{leak.leak_class}">about {leak.leak_class}</a>'
    return "\n".join(
        [
            f'<section id="{name}" aria-labelledby="{name}-title">',
            f'<h2 id="{name}-title"><span class="{"bad" if counted else "quiet"}">'
            f"{_text(words.leak_title(leak, report.leak_policy))}</span></h2>",
            _list(
                [
                    ("allocated at", _stack(leak.allocated_at)),
                    ("blocks", _text(words.leak_blocks(leak))),
                    ("growth", _text(f"{growth} live bytes, epoch by epoch") if growth else ""),
                    ("age", _text(words.ages(leak)) if leak.ages else ""),
                    ("held by", _items(leak.held_by)),
                    ("next", f"{_text(words.next_for_leak(leak))}; {about}"),
                    ("suppress with", _code(suggest(leak.leak_class, leak.allocated_at, leak.tag))),
                ]
            ),
            "</section>",
        ]
    )


# -- what stands behind them ------------------------------------------------------------------------------------------
def _coverage(report: Report) -> str:
    return "\n".join(
        [
            '<section id="coverage" aria-labelledby="coverage-title">',
            '<h2 id="coverage-title">What was looked at</h2>',
            _list(
                [
                    *([("other libraries", _text(opening))] if (opening := words.opening(report.coverage)) else []),
                    ("covered", _text(words.covered(report.coverage))),
                    ("not checked", _items(words.gap(one) for one in report.coverage.not_checked)),
                    *([("limits", _items(notes))] if (notes := words.limits(report.coverage)) else []),
                    ("never seen", _text(words.NOT_SEEN)),
                ]
            ),
            "</section>",
        ]
    )


def _table(name: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in columns)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{_text(first)}</th>{cells}</tr>')
    if not body:
        return ""
    return "\n".join(
        [
            f'<section id="{name}" aria-labelledby="{name}-title">',
            f'<h2 id="{name}-title">{_text(title)}</h2>',
            f"<table><caption>{_text(title)}</caption><thead><tr>{head}</tr></thead>",
            "<tbody>",
            *body,
            "</tbody></table>",
            "</section>",
        ]
    )


def _pools(pools: Sequence[PoolFacts]) -> str:
    columns = ["pool", "device", "memory", "mode", "ended", "allocations", "peak reserved, bytes", "faults"]
    rows = [
        [
            pool.name,
            pool.device,
            pool.kind,
            pool.mode,
            words.pool_end(pool),
            f"{pool.stats.get('allocations', 0):,}",
            f"{pool.stats.get('reserved_peak', 0):,}",
            f"{pool.debug_totals.get('faults', 0):,}",
        ]
        for pool in pools
    ]
    return _table("pools", "Pools", columns, rows)


def _suppressions(report: Report) -> str:
    rows = [[rule.rule, f"{rule.used:,}" if rule.used else "0: unused"] for rule in report.suppressions]
    return _table("suppressions", "Suppressions", ["rule", "findings that it took"], rows)


def _pages(report: Report, leaks: Sequence[Leak]) -> str:
    """Give what the documentation says of the kinds that were found, so that the page answers by itself."""
    found = dict.fromkeys([*(str(f.kind) for f in report.faults), *(str(leak.leak_class) for leak in leaks)])
    return "\n".join(map(_about_kind, found))


def _about_kind(word: str) -> str:
    text = fault_page(word)
    said = _markdown(text) if text else f"<p>See docs/faults/{word}.md of streampool's documentation.</p>"
    return (
        f'<section id="about-{word}" aria-labelledby="about-{word}-title">\n'
        f'<h2 id="about-{word}-title">About {_text(word)}</h2>\n{said}\n</section>'
    )


def _markdown(text: str) -> str:
    """Our own pages of faults, which use little of Markdown: headings, paragraphs, lists, bold, code and links."""
    out: list[str] = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        while lines and lines[0].startswith("#"):
            mark, _, title = lines.pop(0).partition(" ")
            if len(mark) > 1:
                out.append(f"<h3>{_inline(title)}</h3>")
        if not lines:
            continue
        if lines[0].startswith("|"):
            out.append(f'<pre tabindex="0" role="region" aria-label="Table">{_text(chr(10).join(lines))}</pre>')
            continue
        kind = "ul" if lines[0].startswith("- ") else "ol" if lines[0].startswith("1. ") else ""
        if not kind:
            out.append(f"<p>{_inline(' '.join(lines))}</p>")
            continue
        items: list[str] = []
        for line in lines:
            marker, _, rest = line.partition(" ")
            if marker == "-" or (marker[:-1].isdigit() and marker.endswith(".")):
                items.append(rest)
            else:
                items[-1] += f" {line.strip()}"
        out.append(f"<{kind}>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + f"</{kind}>")
    return "\n".join(out)


def _inline(text: str) -> str:
    """Bold, emphasis and code; a link becomes its text, since what it points to is not on this page."""
    html = _text(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text))
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
    html = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", html)
    return re.sub(r"(?<![\w*])\*([^*<>]+)\*(?![\w*])", r"<em>\1</em>", html)
