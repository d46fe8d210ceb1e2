"""A report as one page: no script, nothing from elsewhere, for a phone and a large screen, light and dark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from gpu_node_bench import charts
from gpu_node_bench.charts import Mark, Series
from gpu_node_bench.compare import shown
from gpu_node_bench.references import Reference, References

_STYLE = Path(__file__).with_name("style.css")
_MIB_GIB = 1024
_GIB = 1024**3
# First words of what many streams are measured as.
LOADS = {"load": "Many streams to one replica", "total": "Many streams to the node, all its replicas together"}


def value_text(value: float | None, unit: str) -> str:
    """A value with its unit; short times in milliseconds."""
    if value is None:
        return "-"
    if unit == "s" and value < 1:
        return f'<b>{value * 1000:.3g}</b> <span class="u">ms</span>'
    return f"<b>{shown(value, unit)}</b>" + ("" if unit == "share" else f' <span class="u">{escape(unit)}</span>')


class Page:
    """Puts the parts together."""

    def __init__(self, report: dict[str, Any], published: References) -> None:
        self.report = report
        self.published = published
        self.targets: list[dict[str, Any]] = report["targets"]
        self.figures = {one["id"]: one for one in report["figures"]}
        self.comparison: dict[str, Any] = report.get("comparison") or {}
        self.rows = {row["id"]: row for row in self.comparison.get("rows", [])}
        self.node: dict[str, Any] = report.get("node") or {}
        self._sources = list(published.sources)

    # small things

    def names(self, *parts: str) -> list[str]:
        """The targets that have figures of these measures' first words."""
        return [
            target["name"]
            for target in self.targets
            if any(
                one["target"] == target["name"] and one["measure"].split("/")[0] in parts
                for one in self.figures.values()
            )
        ]

    def measures(self, *words: str) -> list[str]:
        """The measures with this first word, each once, in the report's order."""
        return list(
            dict.fromkeys(one["measure"] for one in self.figures.values() if one["measure"].split("/")[0] in words)
        )

    def get(self, target: str, measure: str) -> dict[str, Any] | None:
        return self.figures.get(f"{target}/{measure}")

    def value(self, target: str, measure: str) -> float | None:
        one = self.get(target, measure)
        return None if one is None or one["value"] is None else float(one["value"])

    def old(self, id_: str) -> float | None:
        found = (self.comparison.get("old") or {}).get(id_)
        return None if found is None else float(found)

    def source(self, key: str) -> str:
        number = self._sources.index(key) + 1
        return f'<a href="#source-{number}">[{number}]</a>'

    def first_source(self, one: Reference) -> bool:
        return one.source == self._sources[0] if self._sources else False

    def mark(self, x: float, one: Reference) -> Mark:
        kind = "ref" if self.first_source(one) else "ref2"
        return Mark(x, one.value, f"{one.label}: {shown(one.value, one.unit)} {one.unit}", kind)

    # figures as cells

    def cell(self, one: dict[str, Any] | None) -> str:
        if one is None:
            return '<td class="n"></td>'
        if one["invalid"]:
            return '<td class="n"><span class="tag bad">invalid</span></td>'
        lines = []
        if one["spread"] is not None:
            lines.append(f"<small>spread {one['spread']:.1%}</small>")
        if one["details"].get("first_p50_s") is not None:
            middle, late = (time_text(one["details"][name]) for name in ("first_p50_s", "first_p99_s"))
            lines.append(f"<small>first token {middle}, p99 {late}</small>")
        row = self.rows.get(one["id"])
        if row and row["change"] is not None:
            kind = {"worse": "bad", "better": "good"}.get(row["verdict"], "")
            lines.append(f'<small class="{kind}">{row["change"]:+.1%} to baseline</small>')
        return f'<td class="n">{value_text(one["value"], one["unit"])}{"".join(lines)}</td>'

    def published_text(self, measure: str) -> str:
        return "".join(
            f"<div>{value_text(one.value, one.unit)}<small>{escape(one.label)} {self.source(one.source)}</small></div>"
            for one in self.published.of(measure)
        )

    def group(self, title: str, measures: Sequence[tuple[str, str]], columns: Sequence[str], published: bool) -> str:
        """Rows of the table of figures under a title of their own; measures: (measure, name)."""
        if not measures:
            return ""
        rows = (
            f'<tr class="group"><th colspan="{1 + len(columns) + published}" scope="rowgroup">{escape(title)}</th></tr>'
        )
        for measure, name in measures:
            cells = "".join(self.cell(self.get(target, measure)) for target in columns)
            text = self.published_text(measure)
            cells += f'<td class="n pub">{text}</td>' if published else ""
            rows += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
            if text:
                # On a narrow screen it stands below the values: a column of its own would be off the screen.
                rows += f'<tr class="below"><td colspan="{1 + len(columns)}"><div>published {text}</div></td></tr>'
        return f"<tbody>{rows}</tbody>"

    # sections

    def header(self) -> str:
        summary = self.report["summary"]
        chips = [("", f"{summary['figures'] - summary['invalid']} of {summary['figures']} figures have a number")]
        if summary["invalid"]:
            chips.append(("bad", f"{summary['invalid']} invalid"))
        chips += self.baseline_chips()
        if self.report["clock"]["note"]:
            chips.append(("warn", self.report["clock"]["note"]))
        items = "".join(f'<li class="{kind}">{escape(text)}</li>' for kind, text in chips)
        model = (self.node.get("model") or {}).get("name") or self.targets[0]["model"]
        profile = f"profile {self.report['profile']}, " if self.report["profile"] else ""
        when = str(self.report["created"]).replace("T", " ").replace("+00:00", " UTC")
        return (
            f"<header><h1>{escape(self.report['name'])}: {escape(model)}</h1>"
            f"<p>{escape(profile)}measured {escape(when)} in {minutes(self.report['seconds'])}</p>"
            f'<ul class="chips">{items}</ul></header>'
        )

    def baseline_chips(self) -> list[tuple[str, str]]:
        unusable = (
            [("warn", "a baseline cannot be used: see the notes")] if self.report.get("unusable_baselines") else []
        )
        return [*self.comparison_chips(), *unusable]

    def comparison_chips(self) -> list[tuple[str, str]]:
        if not self.comparison:
            return [("", "no baseline to compare with")]
        worse = sum(row["verdict"] == "worse" for row in self.rows.values())
        of = "of these releases" if self.comparison["same_release"] else f"of release {self.comparison['release']}"
        day = str(self.comparison["created"])[:10]
        if worse:
            return [("bad", f"{worse} worse than the baseline {of} ({day})")]
        unknown = sum(row["verdict"] == "unknown" for row in self.rows.values())
        if unknown == len(self.rows):
            return [("warn", f"nothing can be compared with the baseline {of} ({day})")]
        return [("good", f"nothing worse than the baseline {of} ({day})")]

    def key_table(self) -> str:
        drafts = sorted(self.measures("acceptance", "accepted"), key=_draft_order)
        groups = (
            ("Decode, one stream", [(measure, measure.partition("/")[2]) for measure in self.measures("decode")]),
            ("Time to the first token", self.first_rows()),
            ("Drafts of the speculation", [(measure, draft_name(measure)) for measure in drafts]),
            (f"{LOADS['load']}: whole requests", self.stream_rows("load")),
            (f"{LOADS['total']}: whole requests", self.stream_rows("total")),
        )
        measures = [measure for _, rows in groups for measure, _ in rows]
        columns = [target["name"] for target in self.targets]
        published = any(self.published.of(measure) for measure in measures)
        heads = "".join(f'<th class="n" scope="col">{escape(name)}</th>' for name in columns)
        heads += '<th class="n pub" scope="col">published</th>' if published else ""
        body = "".join(self.group(title, rows, columns, published) for title, rows in groups)
        return (
            '<h2>Figures</h2><div class="scroll"><table class="figures">'
            f"<thead><tr><td></td>{heads}</tr></thead>{body}</table></div>"
        )

    def stream_rows(self, word: str) -> list[tuple[str, str]]:
        return [(measure, stream_name(measure)) for measure in self.measures(word)]

    def first_rows(self) -> list[tuple[str, str]]:
        rows = []
        for measure in self.measures("first", "prefill", "repeat"):
            word, _, length = measure.partition("/")
            if length == "short":
                rows.append((measure, "short prompt"))
            else:
                name = {"first": "tokens, cold", "prefill": "tokens, prefill rate", "repeat": "tokens, from the cache"}[
                    word
                ]
                rows.append((measure, f"{int(length):,} {name}"))
        return rows

    def chart(self, title: str, sub: str, body: str) -> str:
        return f'<section class="card"><h3>{escape(title)}</h3><p class="sub">{escape(sub)}</p>{body}</section>'

    def plots(self) -> str:
        parts = [self.decode_plot(), *(self.load_plot(word, title) for word, title in LOADS.items())]
        parts += [self.first_plot(), self.acceptance_plot(), self.power_plot()]
        return '<h2>Plots</h2><div class="grid2">' + "".join(part for part in parts if part) + "</div>"

    def decode_plot(self) -> str:
        measures, targets = self.measures("decode"), self.names("decode")
        if not measures:
            return ""
        series = [
            Series(name, tuple((at, self.value(name, measure)) for at, measure in enumerate(measures)))
            for name in targets
        ]
        marks = [self.mark(at, one) for at, measure in enumerate(measures) for one in self.published.of(measure)]
        marks += [
            Mark(at, old, f"baseline of {name}: {old:.4g}", "base")
            for at, measure in enumerate(measures)
            for name in targets
            if (old := self.old(f"{name}/{measure}")) is not None
        ]
        body = charts.bars(
            [measure.partition("/")[2] for measure in measures], series, marks,
            label="Decode speed of one stream by workload", x_title="workload", y_title="tok/s",
        )  # fmt: skip
        return self.chart("Decode, one stream", "tokens a second by workload", drawn(series, body, marks))

    def load_plot(self, word: str, title: str) -> str:
        measures, targets = self.measures(word), self.names(word)
        if not measures:
            return ""
        levels = [float(measure.rpartition("/")[2]) for measure in measures]
        series = [
            Series(
                name, tuple((level, self.value(name, measure)) for level, measure in zip(levels, measures, strict=True))
            )
            for name in targets
        ]
        marks = [
            self.mark(level, one)
            for level, measure in zip(levels, measures, strict=True)
            for one in self.published.of(measure)
        ]
        marks += [
            Mark(level, old, f"baseline of {name}: {old:.4g}", "base")
            for level, measure in zip(levels, measures, strict=True)
            for name in targets
            if (old := self.old(f"{name}/{measure}")) is not None
        ]
        body = charts.lines(
            series, marks, places=levels,
            label="Tokens a second by concurrent streams", x_title="concurrent streams", y_title="tok/s, all together",
        )  # fmt: skip
        return self.chart(title, "generated tokens a second, whole requests", drawn(series, body, marks))

    def first_plot(self) -> str:
        targets = self.names("first")
        if not targets:
            return ""
        series, marks = [], []
        for name in targets:
            points = []
            for measure in self.measures("first"):
                one = self.get(name, measure)
                if one is not None:
                    points.append((float(one["details"].get("prompt_tokens") or 0), one["value"]))
                    if (old := self.old(one["id"])) is not None:
                        marks.append(Mark(points[-1][0], old, f"baseline of {name}: {old:.4g} s", "base"))
            series.append(Series(name, tuple(sorted(points))))
        for measure in self.measures("first"):
            length = measure.partition("/")[2]
            if length.isdecimal():
                marks += [self.mark(float(length), one) for one in self.published.of(measure)]
        body = charts.lines(
            series,
            marks,
            label="Time to the first token by length of a cold prompt",
            x_title="tokens of the prompt",
            y_title="s",
        )
        return self.chart(
            "Time to the first token", "by length of a prompt that is not cached", drawn(series, body, marks)
        )

    def acceptance_plot(self) -> str:
        series = []
        for target in self.targets:
            seen = target["speculation"]
            # Of all workloads where there is such a thing, else of each of those that were asked for.
            found = {target["name"]: seen["all"]} if "all" in seen else {}
            found = found or {f"{target['name']}, {workload}": one for workload, one in seen.items()}
            series += [Series(name, tuple(enumerate(one["at"]))) for name, one in found.items() if one["at"]]
        if not series:
            return ""
        width = max(len(one.points) for one in series)
        body = charts.bars(
            [str(at + 1) for at in range(width)], series, [], percent=True,
            label="Share of drafts accepted by position", x_title="position in the draft", y_title="accepted",
        )  # fmt: skip
        return self.chart(
            "Acceptance by position", "share of drafts whose token there was accepted", drawn(series, body, [])
        )

    def power_plot(self) -> str:
        cards = [card for card in self.report["cards"] if card["power"]]
        if not cards:
            why = self.report["cards_note"] or "nvidia-smi said nothing of power"
            return self.chart(
                "Power", "watts of each card over the run", f'<p class="none">not measured: {escape(why)}</p>'
            )
        series = [Series(card["address"], tuple((x, y) for x, y in card["power"])) for card in cards]
        bands = [(one["begin"], one["end"], one["name"]) for one in self.report["phases"]]
        body = charts.lines(
            series, [], label="Power of each card over time", x_title="seconds", y_title="W", dots=False, bands=bands
        )
        return self.chart(
            "Power", "watts of each card over the run; shaded: its parts in turn", drawn(series, body, [])
        )

    def memory(self) -> str:
        bars = [one for one in self.node.get("budgets", []) if one["unit"] in ("MiB", "GiB")]
        plan = next((one for one in bars if one["name"].startswith("GPU memory")), None)
        parts = [meter_of_card(card, plan) for card in self.report["cards"] if card["memory_peak_mib"] is not None]
        if not parts:
            parts.append(f'<p class="none">cards not measured: {escape(self.report["cards_note"] or "no answer")}</p>')
        planned = [
            meter(
                one["name"],
                f"{one['used']:,.5g} of {one['total']:,.5g} {one['unit']}, {one['basis']}",
                one["used"] / one["total"],
                None,
                plan=True,
            )
            for one in bars
            if one["total"] and one is not plan
        ]
        title = '<h2>Memory</h2><div class="grid2"><section class="card"><h3>Cards, peak of the run</h3>'
        line = f'<p class="sub">line: the plan, {plan["used"]:,.0f} MiB ({plan["basis"]})</p>' if plan else ""
        rest = f'<section class="card"><h3>Planned</h3>{"".join(planned)}</section>' if planned else ""
        return f"{title}{line}{''.join(parts)}</section>{rest}</div>"

    def picture(self) -> str:
        if not self.node:
            return ""
        nodes = self.node["numa_nodes"]
        cards = {card["address"]: card for card in self.report["cards"]}
        boxes = ""
        for one in nodes:
            inside = [
                replica for replica in self.node["replicas"] if str(one["id"]) in replica["memory_nodes"].split(",")
            ]
            if not inside and len(nodes) == 1:
                inside = self.node["replicas"]
            used = {address for replica in inside for address in replica["gpus"]}
            free = [gpu for gpu in self.node["gpus"] if gpu["numa_node"] == one["id"] and gpu["address"] not in used]
            idle = "".join(gpu_box(gpu, cards) for gpu in free)
            memory = f", {one['memory_bytes'] / _GIB:,.0f} GiB" if one["memory_bytes"] else ""
            socket = f", socket {one['socket']}" if one.get("socket") is not None else ""
            boxes += (
                f'<div class="card"><h3>NUMA node {one["id"]}</h3><p class="sub">{one["cpus"]} CPUs{memory}{socket}</p>'
                + "".join(self.replica(replica, cards) for replica in inside)
                + (f'<p class="sub">not used:</p><div class="gpus">{idle}</div>' if free else "")
                + "</div>"
            )
        return f'<h2>Node</h2><div class="node">{boxes}</div>'

    def replica(self, replica: dict[str, Any], cards: dict[str, Any]) -> str:
        gpus = [gpu for gpu in self.node["gpus"] if gpu["address"] in replica["gpus"]]
        cpus = f", CPUs {replica['cpus']}" if replica["cpus"] else ""
        boxes = f'<div class="gpus">{"".join(gpu_box(gpu, cards) for gpu in gpus)}</div>' if gpus else ""
        return (
            f'<div class="replica s{replica["index"] % 8}"><b>replica {replica["index"]}</b>, '
            f"port {replica['port']}{escape(cpus)}"
            f"<br>release {escape(replica['release'])}{boxes}</div>"
        )

    def troubles(self) -> str:
        invalid = [(one["id"], one["invalid"]) for one in self.figures.values() if one["invalid"]]
        worse = [
            (one["id"], f"{one['change']:+.1%}, allowed {one['tolerance']:.0%}")
            for one in self.rows.values()
            if one["verdict"] == "worse"
        ]
        notes = [(target["name"], note) for target in self.targets for note in target["notes"]]
        notes += [(one["id"], note) for one in self.figures.values() for note in one["notes"]]
        notes += [("node", note) for note in self.node.get("notes", [])]
        notes += [("baseline", trouble) for trouble in self.report.get("unusable_baselines", [])]
        if self.report["cards"] and self.report["cards_note"]:
            notes.append(("cards", self.report["cards_note"]))
        for card in self.report["cards"]:
            if card["power_capped"]:
                notes.append((card["address"], "reached its power limit at times, which is normal under load"))
        text = "".join(
            f'<section class="card"><h3>{title}</h3><ul class="plain">{items(found)}</ul></section>'
            for title, found in (
                ("Invalid: no number, and why", invalid),
                ("Worse than the baseline", worse),
                ("Notes", grouped(notes)),
            )
            if found
        )
        return f'<h2>To be looked at</h2><div class="grid2">{text}</div>' if text else ""

    def details(self) -> str:
        engine = {
            f"{target['name']}: {key.replace('_', ' ')}": value
            for target in self.targets
            for key, value in target["engine"].items()
        }
        image, model = self.node.get("image") or {}, self.node.get("model") or {}
        drafter = self.node.get("drafter") or {}
        versions = {
            "releases": self.report["release"],
            "image": f"{image.get('ref', '')} {str(image.get('id', ''))[:12]}".strip(),
            "model": f"{model.get('name', '')} {str(model.get('digest', ''))[:12]}".strip(),
            "drafter": f"{drafter.get('name', '')} {str(drafter.get('digest', ''))[:12]}".strip(),
            "driver": self.node.get("driver"),
            "benchmark program": self.report["program"],
            **engine,
        }
        parts = [("Versions", versions), ("Method", self.report["method"])]
        if self.node:
            parts += [
                ("Engine arguments", self.node["engine_args"]),
                ("Settings that differ from the profile", self.node["changed_settings"]),
            ]
        return "<h2>What was measured, and how</h2>" + "".join(folded(title, value) for title, value in parts if value)

    def sources(self) -> str:
        if not self.published.sources:
            return ""
        entries = "".join(
            f'<li id="source-{number}"><b>{escape(one["title"])}</b><br>{escape(one["place"])}<br>'
            f"{escape(one['conditions'])}</li>"
            for number, one in enumerate(self.published.sources.values(), 1)
        )
        return (
            f'<h2>Sources of published figures</h2><section class="card"><ol class="sources">{entries}</ol></section>'
        )

    def text(self) -> str:
        """The whole page."""
        title = f"{self.report['name']}, benchmark of {str(self.report['created'])[:10]}"
        # What has no number comes first: a table with holes would be read as a whole one.
        first, last = (self.troubles(), "") if self.report["summary"]["invalid"] else ("", self.troubles())
        body = [self.header(), first, self.key_table(), self.plots(), self.picture(), self.memory()]
        body += [last, self.details(), self.sources()]
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(title)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head>"
            f"<body><main>{''.join(body)}</main></body></html>\n"
        )


def _draft_order(measure: str) -> tuple[bool, str]:
    """What is of all workloads first."""
    word, _, workload = measure.partition("/")
    return bool(workload), workload + word


def draft_name(measure: str) -> str:
    word, _, workload = measure.partition("/")
    return f"{'accepted' if word == 'acceptance' else 'tokens a draft'}, {workload or 'all'}"


def time_text(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{shown(seconds, 's')} s"


def stream_name(measure: str) -> str:
    word, _, streams = measure.split("/")
    return f"{streams} stream{'' if streams == '1' else 's'}{' in all' if word == 'total' else ''}"


def minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def drawn(series: Sequence[Series], body: str, marks: Sequence[Mark]) -> str:
    """The plot with its legend; without a single point the words for it."""
    if not any(y is not None for one in series for _, y in one.points):
        return '<p class="none">no figure has a number: see why above</p>'
    return body + charts.legend([one.name for one in series], marks)


def grouped(notes: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Notes that several share, once."""
    by_text: dict[str, list[str]] = {}
    for who, text in notes:
        by_text.setdefault(text, []).append(who)
    return [(", ".join(dict.fromkeys(who)), text) for text, who in by_text.items()]


def items(found: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<li><b>{escape(name)}</b>: {escape(why)}</li>" for name, why in found)


def meter(name: str, words: str, share: float, line: float | None, plan: bool = False) -> str:
    """A bar of a share from 0 to 1, with a line at another."""
    mark = f'<div class="plan-line" style="left:{min(100.0, line * 100):.1f}%"></div>' if line is not None else ""
    kind = "fill plan" if plan else "fill"
    return (
        f'<div class="meter"><div class="row">{escape(name)} <span>{escape(words)}</span></div>'
        f'<div class="track"><div class="{kind}" style="width:{min(100.0, share * 100):.1f}%"></div>{mark}</div></div>'
    )


def meter_of_card(card: dict[str, Any], plan: dict[str, Any] | None) -> str:
    peak, total = card["memory_peak_mib"], card["memory_total_mib"] or 0
    whole = max(total, peak, plan["used"] if plan else 0) or 1
    words = f"{peak:,.0f} of {total:,.0f} MiB"
    return meter(card["address"], words, peak / whole, plan["used"] / whole if plan else None)


def gpu_box(gpu: dict[str, Any], cards: dict[str, Any]) -> str:
    card = cards.get(str(gpu["address"]).lower()[-12:])
    seen = ""
    if card and card["temperature_peak_c"] is not None:
        seen = f"<span>max {card['temperature_peak_c']:.0f} °C</span><span>max {card['power_peak_w'] or 0:.0f} W</span>"
    memory = f"<span>{gpu['memory_mib'] / _MIB_GIB:.0f} GiB</span>" if gpu.get("memory_mib") else ""
    address, model = escape(str(gpu["address"])[-7:]), escape(str(gpu["model"]), quote=True)
    return f'<div class="gpu" title="{model}">{address}{memory}{seen}</div>'


def folded(title: str, value: dict[str, Any]) -> str:
    rows = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(one if isinstance(one, str) else json.dumps(one))}</dd>"
        for name, one in value.items()
        if one not in (None, "")
    )
    return f"<details><summary>{escape(title)}</summary><dl>{rows}</dl></details>"


def page(report: dict[str, Any], published: References) -> str:
    """The page of a report."""
    return Page(report, published).text()
