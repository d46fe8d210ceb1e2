# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What the checks on a node are asked, and their report as lines for a terminal and as a page for people."""

from __future__ import annotations

from html import escape
from typing import Any

RESULTS = {
    "pass": "Everything passed",
    "warn": "Passed, with warnings",
    "incomplete": "Not complete: checks did not run",
    "fail": "Failed",
}
# What needs a person comes first.
_ORDER = {"fail": 0, "not run": 1, "warn": 2, "pass": 3}
_WIDTHS = (8, 12, 38)


def requested_replicas(replicas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what of the plan's replicas the checks on the node compare with."""
    return [{name: replica[name] for name in ("index", "unit", "port", "gpus", "engine_args")} for replica in replicas]


def needs_attention(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the checks that failed, warn, or did not run although they could have, the worst first."""
    open_ones = [
        check
        for check in report["checks"]
        if check["verdict"] in ("fail", "warn") or (check["verdict"] == "not run" and check["applies"])
    ]
    return sorted(open_ones, key=lambda check: _ORDER[check["verdict"]])


def said(check: dict[str, Any]) -> str:
    """Return what a row says: what was seen, or why nothing was."""
    if check["verdict"] == "not run":
        return str(check["why"])
    return str(check["seen"])


def _level(report: dict[str, Any]) -> str:
    return "quality" if report.get("kind") == "quality" else f"level {report['level']}"


def head(report: dict[str, Any]) -> str:
    """Return the report in one line."""
    counts = report["counts"]
    parts = [f"{counts[name]} {name}" for name in ("pass", "warn", "fail", "not run") if counts[name]]
    return (
        f"{report['node']}, {_level(report)}: {RESULTS[report['result']]}"
        f" ({', '.join(parts)}) in {report['seconds']:.0f} s"
    )


def report_lines(report: dict[str, Any]) -> list[str]:
    """Return the report as a table, a line for each check, and what is to be done below it."""
    lines = [head(report)]
    for check in report["checks"]:
        cells = (check["verdict"], check["target"], check["what"])
        lines.append("".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)) + said(check))
    for check in needs_attention(report):
        wanted = f"; wanted: {check['wanted']}" if check["wanted"] else ""
        remedy = f"; {check['remedy']}" if check["remedy"] else ""
        lines.append(f"{check['verdict'].upper()} {check['target']}, {check['what']}: {said(check)}{wanted}{remedy}")
    return lines


def failures(report: dict[str, Any], require_all: bool) -> list[str]:
    """Return a sentence for each check for which the play fails.

    :param require_all: whether a check that did not run, and could have, is one of them.
    """
    verdicts = ("fail", "not run") if require_all else ("fail",)
    return [
        f"{check['target']}, {check['what']}: {said(check)}"
        + (f" (wanted: {check['wanted']})" if check["wanted"] else "")
        + (f". {check['remedy'][0].upper()}{check['remedy'][1:]}" if check["remedy"] else "")
        for check in needs_attention(report)
        if check["verdict"] in verdicts
    ]


_STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #fff; --text: #1c1f23; --soft: #5d666f; --line: #dfe3e6;
  --pass: #1a7f4b; --warn: #9a6200; --fail: #c0262d; --not: #55606b; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1c2024; --text: #e8eaec; --soft: #9aa4ad;
  --line: #31373d; --pass: #4cc38a; --warn: #e2a53a; --fail: #ff6b70; --not: #9aa4ad; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.soft { color: var(--soft); } .small { font-size: .875rem; }
.badge { font-weight: 600; white-space: nowrap; }
.badge::before { content: ""; display: inline-block; width: .62em; height: .62em; border-radius: 50%;
  margin-right: .45em; background: currentColor; }
.pass { color: var(--pass); } .warn, .incomplete { color: var(--warn); } .fail { color: var(--fail); }
.not-run { color: var(--not); }
.not-run.badge::before { background: none; border: 2px solid currentColor; }
.result { font-size: 1.15rem; margin: .8rem 0 .2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.todo { list-style: none; margin: 0; padding: 0; }
.todo li { background: var(--card); border: 1px solid var(--line); border-left: 4px solid currentColor;
  border-radius: 6px; padding: .6rem .9rem; margin: .5rem 0; }
.todo li > * { color: var(--text); } .todo li > .badge { color: inherit; } .todo li > .soft { color: var(--soft); }
table { width: 100%; table-layout: fixed; border-collapse: collapse; background: var(--card);
  border: 1px solid var(--line); }
th, td { text-align: left; vertical-align: top; padding: .5rem .7rem; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { font-size: .8rem; font-weight: 600; color: var(--soft); border-top: 0; }
th:nth-child(1) { width: 10%; } th:nth-child(2) { width: 10%; } th:nth-child(3) { width: 17%; }
th:nth-child(4), th:nth-child(5) { width: 22%; }
td.none { color: var(--soft); }
.wide { overflow-x: auto; }
.figures { width: auto; table-layout: auto; font-variant-numeric: tabular-nums; }
.figures th, .figures td { width: auto !important; text-align: right; white-space: nowrap; padding: .35rem .7rem;
  vertical-align: baseline; }
.figures th { font-size: .875rem; } .figures tbody th { border-top: 1px solid var(--line); }
@media (max-width: 720px) {
  .checks thead { display: none; }
  .checks, .checks tbody, .checks tr, .checks td { display: block; width: auto !important; }
  .checks tr { padding: .6rem .8rem; border-top: 1px solid var(--line); } .checks tr:first-child { border-top: 0; }
  .checks td { padding: .08rem 0; border: 0; }
  td[data-label]::before { content: attr(data-label) ": "; color: var(--soft); }
  .checks td.none { display: none; } .checks td.verdict, .checks td.target { display: inline; }
  td.target { color: var(--soft); margin-left: .5rem; }
  td.what { font-weight: 600; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; } }
"""


def _badge(verdict: str) -> str:
    return f'<span class="badge {verdict.replace(" ", "-")}">{escape(verdict)}</span>'


def _todo(check: dict[str, Any]) -> str:
    wanted = f'<div class="soft small">Wanted: {escape(check["wanted"])}</div>' if check["wanted"] else ""
    remedy = f"<div><strong>Do:</strong> {escape(check['remedy'])}</div>" if check["remedy"] else ""
    return (
        f'<li class="{check["verdict"].replace(" ", "-")}">{_badge(check["verdict"])} '
        f"<strong>{escape(check['target'])}, {escape(check['what'])}</strong>"
        f"<div>{escape(said(check))}</div>{wanted}{remedy}</li>"
    )


def _cell(label: str, text: str) -> str:
    return f'<td data-label="{label}">{escape(text)}</td>' if text else '<td class="none">-</td>'


def _row(check: dict[str, Any]) -> str:
    seen = "Why" if check["verdict"] == "not run" else "Seen"
    return (
        f'<tr><td class="verdict">{_badge(check["verdict"])}</td><td class="target">{escape(check["target"])}</td>'
        f'<td class="what">{escape(check["what"])}</td>{_cell(seen, said(check))}{_cell("Wanted", check["wanted"])}'
        f"{_cell('Remedy', check['remedy'])}</tr>"
    )


def _part(name: str, checks: list[dict[str, Any]]) -> str:
    heads = "".join(f"<th>{word}</th>" for word in ("Verdict", "Of", "Check", "Seen", "Wanted", "Remedy"))
    rows = "\n".join(_row(check) for check in checks)
    table = f'<table class="checks"><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table>'
    return f"<h2>{escape(name)}</h2>\n{table}"


def _short(address: str) -> str:
    """Return a card's address without the domain that nearly every machine has alone."""
    return address.removeprefix("0000:")


def _way(row: dict[str, Any] | None) -> str:
    """Return the cell of one way from card to card."""
    if row is None:
        return "<td>-</td>"
    if row.get("error"):
        return f'<td class="fail" title="{escape(row["error"])}">{escape(row["error"].partition(":")[0])}</td>'
    if not row["correct"]:
        return '<td class="fail">other data</td>'
    if not row["peer"]:
        return f'<td class="warn">{row["gb_s"]:.1f} by host</td>'
    return f"<td>{row['gb_s']:.1f}</td>"


def _pairs(rows: list[dict[str, Any]]) -> str:
    """Return the copies from card to card as a table by the cards' addresses."""
    ways = {(row["from"], row["to"]): row for row in rows}
    names = sorted({name for way in ways for name in way})
    heads = "".join(f'<th scope="col">{escape(_short(name))}</th>' for name in names)
    body = "\n".join(
        f'<tr><th scope="row">{escape(_short(one))}</th>{"".join(_way(ways.get((one, to))) for to in names)}</tr>'
        for one in names
    )
    return _figures("Copies from card to card, GB/s", "from \\ to", heads, body)


def _sums(by_replica: dict[str, Any]) -> str:
    """Return the all-reduce of each replica's cards as a table by size."""
    cells = {(target, row["bytes"]): row for target, found in by_replica.items() for row in found["sizes"]}
    heads = "".join(f'<th scope="col">{escape(target)}</th>' for target in by_replica)
    body = "\n".join(
        f'<tr><th scope="row">{size:,}</th>{"".join(_sum(cells.get((target, size))) for target in by_replica)}</tr>'
        for size in sorted({size for _, size in cells})
    )
    return _figures("All-reduce over a replica's cards", "bytes", heads, body)


def _sum(row: dict[str, Any] | None) -> str:
    if row is None:
        return "<td>-</td>"
    if not row["correct"]:
        return '<td class="fail">wrong sum</td>'
    return f"<td>{row['us']:,.1f} &micro;s, {row['bus_gb_s']:.1f} GB/s</td>"


def _figures(name: str, corner: str, heads: str, body: str) -> str:
    head = f'<tr><th scope="col">{escape(corner)}</th>{heads}</tr>'
    table = f'<table class="figures"><thead>{head}</thead><tbody>\n{body}\n</tbody></table>'
    return f'<h2>{escape(name)}</h2>\n<div class="wide">{table}</div>'


def _measured(data: dict[str, Any]) -> str:
    """Return what was measured as tables; nothing where nothing was."""
    tables = [_pairs(data["pairs"])] if data.get("pairs") else []
    tables += [_sums(data["all_reduce"])] if data.get("all_reduce") else []
    return "\n".join(tables)


def report_page(report: dict[str, Any]) -> str:
    """Return the report as a page of HTML that needs nothing else."""
    facts = {
        "Node": f"{report['node']}, profile {report['profile']}, model {report['model']}",
        "Begun": f"{report['began']}, took {report['seconds']:.0f} s",
        "Releases": ", ".join(f"replica {index}: {name}" for index, name in report["releases"].items()) or "-",
        **report["versions"],
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    counts = report["counts"]
    summary = ", ".join(f"{counts[name]} {name}" for name in ("pass", "warn", "fail", "not run"))
    todo = "\n".join(_todo(check) for check in needs_attention(report))
    todo = f'<h2>What to do</h2>\n<ul class="todo">\n{todo}\n</ul>' if todo else ""
    parts = dict.fromkeys(check["part"] for check in report["checks"])
    tables = "\n".join(_part(name, [one for one in report["checks"] if one["part"] == name]) for name in parts)
    title = f"{report['node']}: {report.get('kind', 'acceptance')}, {_level(report)}".removesuffix(", quality")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="result"><span class="badge {report["result"]}">{RESULTS[report["result"]]}</span></p>
<p class="soft small">{summary}</p>
<dl>{listed}</dl>
{todo}
{tables}
{_measured(report.get("data") or {})}
</main>
</body>
</html>
"""
