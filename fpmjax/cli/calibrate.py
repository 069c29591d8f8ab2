"""`fpmjax calibrate`: is the factor of a speculative round right for one's own engine?"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

from fpmjax.cli.arguments import (
    EMBEDDED,
    NOT_COVERED,
    UsageError,
    add_choice,
    add_command,
    count,
    flag_value,
    is_saved,
    one_count,
    shorten,
)
from fpmjax.cli.output import note, print_json
from fpmjax.cli.saved import HELP, open_model
from fpmjax.study.columns import METHODS, SCOPES

TABLE_FILES = (".parquet", ".metadata.json")  # what a folder that holds a table is read for
LONG = 5.0  # seconds from which a study says what it cost
ABOUT = f"""\
STUDY is a .parquet or .csv file of measured rounds, one row each; NAME.json beside it, the sidecar, is optional:
  who     study_id gpu tp dtype framework framework_version model method attention_backend timing_scope topk
  what    kind (stp: ordinary, method none, draft_length 0; sd: speculative) draft_length batch_size initial_context
  when    repetition (stp rows of 0 make the reference, sd rows of 1 are scored) round_index (the first 16 are dropped)
  number  total_kv_tokens (past KV of the whole batch before the round) latency_ms
  also    cuda_graph active_requests emitted_tokens proposed_tokens var_kv reason (why a row is left out), if known
  words   method: {" ".join(METHODS)}
          timing_scope: {" ".join(SCOPES)}
--template study.csv writes a small synthetic one to look at.

A round with d drafts and B requests is compared with what an ordinary pass of (d + 1) B requests takes at the same KV,
so ordinary rounds are needed at those batches.  Scored is the fixed rule, 0.08 d + 1.25 or that of --rule: MAPE with
every round one vote, and with every configuration one vote; a refit follows, with intervals that resample whole
configurations, fits on parts of the study that are scored on the rest, and what looks wrong with the measurements.

-o DIR makes a folder to keep: README.md, result.json, chart.svg, the data, and figures where matplotlib is installed;
the same study and seed give the same bytes.  --rule-out writes the refit for --rule of `fpmjax estimate`.
"""
EXAMPLES = """\
  fpmjax calibrate --template study.csv
  fpmjax calibrate study.csv -o my-study
  fpmjax calibrate study.csv -o my-study --rule-out my-rule.json
  fpmjax estimate embedded --select tp=1 --batch 8 --kv 8192 --draft-length 1:4 --rule my-rule.json
  fpmjax calibrate rounds.parquet -o judged --reference estimator --model embedded --select tp=1
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "calibrate",
        "whether the factor of a speculative round is right for my engine",
        run,
        about=ABOUT,
        examples=EXAMPLES,
    )
    parser.add_argument("study", metavar="STUDY", nargs="?", help="measured rounds: a .parquet, .csv or .csv.gz file")
    parser.add_argument("--sidecar", metavar="FILE", help="what describes it (default: NAME.json beside it, if there)")
    parser.add_argument("-o", "--out", metavar="DIR", help="the evidence folder to make (default: only tell)")
    parser.add_argument("--overwrite", action="store_true", help="replace the study that the folder holds")
    parser.add_argument("--rule", metavar="FILE", help="the rule that is judged (default: the published one)")
    parser.add_argument("--rule-out", metavar="FILE", help="write the refit as a rule file")
    parser.add_argument(
        "--rule-of",
        metavar="GROUP",
        default="pooled",
        help="whose refit that is: pooled, or a 'MODEL + METHOD' of the study (default: pooled)",
    )
    parser.add_argument(
        "--template", metavar="FILE", help="write a synthetic example study as CSV with its sidecar, and stop"
    )
    parser.add_argument("--json", action="store_true", help="result.json on stdout (default: text)")
    how = parser.add_argument_group("how")
    how.add_argument("--draws", metavar="N", type=draws, default=2000, help="of the bootstrap (default: 2000)")
    how.add_argument("--seed", metavar="N", type=whole, default=0, help="of the bootstrap (default: 0)")
    how.add_argument(
        "--repetition",
        metavar="N",
        type=which,
        default=1,
        help="speculative rounds that are scored, or all (default: 1)",
    )
    how.add_argument(
        "--warmup", metavar="N", type=whole, default=16, help="rounds dropped at the start of every run (default: 16)"
    )
    how.add_argument(
        "--no-figures", action="store_true", help="no PNG figures (default: where matplotlib is installed)"
    )
    other = parser.add_argument_group("where ordinary times come from")
    other.add_argument(
        "--reference",
        choices=("measured", "estimator", "interpolated_batch"),
        default="measured",
        help="ordinary rounds of the study; a model; or the study's, linear between batches too, for public anchors "
        "that are scored and never fitted (default: measured)",
    )
    other.add_argument("--model", metavar="MODEL", help=f"with --reference estimator: {HELP}")
    add_choice(other)


def whole(text: str) -> int:
    """A count from 0; an argparse type."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not a whole number")
    return count(text)


def draws(text: str) -> int:
    """How many draws; an argparse type."""
    from fpmjax.study.result import MOST_DRAWS

    if (number := one_count(text)) > MOST_DRAWS:
        raise argparse.ArgumentTypeError(f"{shorten(text)} are too many: 2,000 do, at most {MOST_DRAWS:,}")
    return number


def which(text: str) -> int | None:
    """A repetition, or None for all; an argparse type."""
    return None if text == "all" else whole(text)


def run(args: argparse.Namespace) -> int:
    if args.template is not None:
        return template(args)
    if args.study is None:
        raise UsageError("no study is given\nhint: name a .parquet or .csv file, or start with --template study.csv")
    check_flags(args)
    from fpmjax.study.folder import check_folder
    from fpmjax.study.read import read_study
    from fpmjax.study.result import run_study
    from fpmjax.study.summary import summary

    if args.out is not None:
        check_folder(args.out, args.overwrite)  # before a long computation
    check_outputs(args)
    rule = None
    if args.rule is not None:
        from fpmjax.rule_file import load_rule

        rule = load_rule(args.rule)
    model, options = estimator(args)
    begin = time.monotonic()
    result = run_study(
        read_study(args.study, sidecar=args.sidecar, anchors=args.reference == "interpolated_batch"),
        rule=rule,
        reference=args.reference,
        model=model,
        repetition=args.repetition,
        warmup=args.warmup,
        draws=args.draws,
        seed=args.seed,
        options=[*options, *([("no-figures", "")] if args.no_figures else [])],
    )
    seconds = time.monotonic() - begin
    print(result.json() if args.json else "\n".join([*summary(result.document), ""]), end="")
    if seconds > LONG:
        rows = sum(kind["rows"] for kind in result.document["rows"].values())
        note(f"{rows:,} rows and {args.draws:,} draws took {seconds:.0f} s")
    if args.rule_out is not None:
        result.rule(args.rule_of)  # what was found is told all the same, but nothing is written without a rule
    if args.out is not None:
        result.save(args.out, overwrite=args.overwrite, figures=False if args.no_figures else None)
        if not args.json:
            print(f"folder    {args.out}: begin with README.md and chart.svg")
    if args.rule_out is not None:
        result.save_rule(args.rule_out, args.rule_of)
        note(f"{args.rule_out}: the {args.rule_of} refit, {result.rule(args.rule_of)}")
    if result.document["overall"]["rounds"]:
        return 0
    note("no round has a reference: ordinary rounds are needed at batch (d + 1) B, around the same KV")
    return NOT_COVERED


def check_outputs(args: argparse.Namespace) -> None:
    """No file that is read may be written, but for a folder's own study, which is made again inside of it."""
    from fpmjax.file_name import same_file
    from fpmjax.rule_file import check_place
    from fpmjax.study.folder import is_ours

    out, written = args.out, args.rule_out
    if written is not None:
        check_place(written)
        for what, name in inputs(args):
            if same_file(written, name):
                raise UsageError(
                    f"--rule-out {written} is {what}, which is read\nhint: name another file, e.g. rule.json"
                )
    if out is None:
        return
    if written is not None and is_ours(inside(out, written)):
        raise UsageError(f"--rule-out {written} is a file of the folder {out}\nhint: name a file beside those")
    again = dict(places(args))
    for what, name in inputs(args):
        place = inside(out, name)
        if is_ours(place) and place != again.get(what):
            raise UsageError(f"{what} {name} is a file that -o {out} replaces\nhint: move it, or name another folder")


def inside(folder: str, name: str) -> str:
    """The way from a folder to a file, by what they are and not by how they are named."""
    return os.path.relpath(os.path.realpath(name), os.path.realpath(folder))


def inputs(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(what it is, name) of every file that is read."""
    from fpmjax.study.sidecar import sidecar_name
    from fpmjax.study.source import FILES

    yield "the study", args.study
    if args.sidecar is not None or args.study.lower().endswith(FILES):
        yield "its sidecar", sidecar_name(args.study) if args.sidecar is None else args.sidecar
    if args.rule is not None:
        yield "the rule", args.rule
    if args.model not in (None, EMBEDDED):
        yield "the model", args.model
        if os.path.isdir(args.model):
            names = (name for name in sorted(os.listdir(args.model)) if name.endswith(TABLE_FILES))
            yield from (("the model", os.path.join(args.model, name)) for name in names)
        elif args.model.endswith(".parquet"):
            yield "the model", args.model.removesuffix(".parquet") + ".metadata.json"


def places(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Where a folder keeps what was read, from inside of it."""
    from fpmjax.study.folder import RULE
    from fpmjax.study.sidecar import sidecar_name
    from fpmjax.study.source import FILES

    yield "the rule", RULE
    yield "the study", (study := f"data/{os.path.basename(args.study)}")
    if study.lower().endswith(FILES):
        yield "its sidecar", sidecar_name(study)


def check_flags(args: argparse.Namespace) -> None:
    """What goes together, before anything is read."""
    if args.reference == "estimator" and args.model is None:
        raise UsageError("--reference estimator needs --model\nhint: --model embedded --select tp=1")
    for flag, given in (("--model", args.model), ("--select", args.select), ("--fake-kv", args.fake_kv)):
        if given and args.reference != "estimator":
            raise UsageError(f"{flag} is about the estimator\nhint: add --reference estimator")
    if args.overwrite and args.out is None:
        raise UsageError("--overwrite needs -o\nhint: for example -o my-study")
    if args.rule_out is None and args.rule_of != "pooled":
        raise UsageError("--rule-of says whose refit is written\nhint: add --rule-out rule.json")


def estimator(args: argparse.Namespace) -> tuple[Any, list[tuple[str, str]]]:
    """The model of --model, and its flags as the folder records them: without the way to a file."""
    if args.model is None:
        return None, []
    args.table = args.model
    name = args.model if args.model == "embedded" else os.path.basename(os.path.normpath(args.model))
    options = [("model", name), *(("select", f"{field}={flag_value(value)}") for field, value in args.select)]
    if args.fake_kv and not is_saved(args.model):
        options.append(("fake-kv", args.fake_kv))
    return open_model(args), options


def template(args: argparse.Namespace) -> int:
    if args.study is not None:
        raise UsageError("--template writes a study, and one is given\nhint: leave one of them out")
    from fpmjax.study.template import write_template

    table, sidecar = write_template(args.template)
    if args.json:
        print_json({"study": str(table), "sidecar": str(sidecar)})
    else:
        print(f"{table}: a synthetic study, which no engine was measured for; {sidecar}: its sidecar")
        print(f"next: fpmjax calibrate {table} -o my-study")
    return 0
