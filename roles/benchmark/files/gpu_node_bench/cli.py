"""The command line: run, compare, page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_node_bench import baselines, compare, references, request, run
from gpu_node_bench.errors import BenchError

_EXIT_CODES = """\
exit codes: run: 0 every figure has a number, 3 some are invalid (the report says why), 2 nothing was measured.
compare: 0 nothing is worse, 1 something is, 3 nothing is but something cannot be compared, 2 a file cannot be used."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_node_bench",
        description=__doc__,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("run", help="measure; write report.json and page.html")
    one.add_argument("--request", type=Path, help="JSON file with everything below and more")
    one.add_argument("--url", help="base URL of an OpenAI-compatible endpoint")
    one.add_argument("--model", help="the name that it serves the model under")
    one.add_argument("--key-file", default="", help="file of mode 0600 with the key, alone or as NAME=KEY")
    one.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="for example runs=5, levels=[1,8], ignore_eos=true",
    )
    one.add_argument("--part", action="append", choices=request.PARTS, help="only these parts")
    one.add_argument("--out", type=Path, default=Path("."), help="folder for report.json and page.html")
    one.add_argument("--baselines", type=Path, help="folder of earlier reports, by release, to compare with")
    one.add_argument("--keep", action="store_true", help="keep there the figures that its releases have none of")
    one.add_argument("--replace", action="store_true", help="keep its figures there in any case")

    two = commands.add_parser("compare", help="two reports, figure by figure")
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path)
    two.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="KIND=SHARE",
        help="for example decode=0.1; kinds: " + ", ".join(compare.TOLERANCES),
    )
    two.add_argument("--json", action="store_true", help="as JSON")

    three = commands.add_parser("page", help="a report as one HTML page")
    three.add_argument("report", type=Path)
    three.add_argument("--out", type=Path, required=True)
    three.add_argument("--baseline", type=Path, help="an earlier report to compare with")
    three.add_argument("--references", type=Path, default=references.SHIPPED, help="published figures")
    return parser


def _wanted(args: argparse.Namespace) -> request.Request:
    if args.request:
        if args.url or args.model or args.option or args.part:
            raise BenchError("--request says everything: leave out --url, --model, --option and --part")
        return request.load(args.request)
    if not args.url or not args.model:
        raise BenchError("--url and --model are needed, or --request")
    options = {}
    for text in args.option:
        name, equals, value = text.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            raise BenchError(
                f"--option {text}: expected NAME=JSON, for example runs=5{'' if equals else ' (no = in it)'}"
            ) from None
    target = {"name": "endpoint", "url": args.url, "model": args.model, "key_file": args.key_file}
    parts = {"parts": args.part or ["decode", "first"]}
    return request.parse({"name": args.url, "options": options, "targets": [{**target, **parts}]})


def _say(text: str) -> None:
    print(text, flush=True)


def _write_page(report: dict[str, Any], out: Path, published: Path = references.SHIPPED) -> None:
    # Not needed to measure, and the largest part of the program.
    from gpu_node_bench.page import page

    text = page(report, references.load(str(report["profile"]), published))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{out}: {error.strerror}") from None


def _use_baselines(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Compare with the baseline that there is, and keep what it lacks."""
    old, report["unusable_baselines"] = baselines.choose(args.baselines, report["release"])
    for trouble in report["unusable_baselines"]:
        _say(f"passed over: {trouble}")
    if old:
        report["comparison"] = baselines.comparison(report, old)
        _say(f"against {old}:")
        _say(compare.table(compare.compare(compare.load(old), report)))
    if args.keep or args.replace:
        try:
            _say(baselines.keep(report, args.baselines, args.replace))
        except BenchError as why:
            report["unusable_baselines"].append(str(why))
            _say(f"not kept as a baseline: {why}")


def _run(args: argparse.Namespace) -> int:
    wanted = _wanted(args)
    if args.baselines:
        baselines.path(args.baselines, wanted.release)
    report = run.run(wanted, args.out, _say)
    # First of all: what is wrong with a baseline must not cost the measurement.
    run.write(report, args.out / "report.json")
    if args.baselines:
        _use_baselines(report, args)
        run.write(report, args.out / "report.json")
    _write_page(report, args.out / "page.html")
    summary = report["summary"]
    _say(
        f"{summary['figures'] - summary['invalid']} of {summary['figures']} figures have a number, "
        f"in {report['seconds']:.0f} s: {args.out / 'report.json'}"
    )
    return 3 if summary["invalid"] or not summary["figures"] else 0


def _page(args: argparse.Namespace) -> int:
    report = compare.load(args.report)
    if args.baseline:
        report["comparison"] = baselines.comparison(report, args.baseline)
    _write_page(report, args.out, args.references)
    return 0


def _compare(args: argparse.Namespace) -> int:
    tolerances = {}
    for text in args.tolerance:
        kind, _, share = text.partition("=")
        try:
            tolerances[kind] = float(share)
        except ValueError:
            tolerances[kind] = -1.0
        if kind not in compare.TOLERANCES or not 0 <= tolerances[kind] <= 10:
            raise BenchError(f"--tolerance {text}: expected KIND=SHARE, KIND out of {', '.join(compare.TOLERANCES)}")
    rows = compare.compare(compare.load(args.old), compare.load(args.new), tolerances)
    _say(json.dumps([vars(row) for row in rows], indent=1) if args.json else compare.table(rows))
    return compare.exit_code(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "run":
            return _run(args)
        return _compare(args) if args.command == "compare" else _page(args)
    except BenchError as error:
        print(f"gpu_node_bench: error: {error}", file=sys.stderr)
        return 2
