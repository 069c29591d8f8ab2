"""What `fpmjax fit` is to make: the flags of every kind of model, and the model before it learns."""

from __future__ import annotations

import argparse
import os
from typing import Any

from fpmjax.cli.arguments import EMBEDDED, UsageError, add_choice, is_artifact, one_count
from fpmjax.cli.families import LEARNED_FAMILIES, OF_A_FAMILY, add_families, new_family
from fpmjax.cli.flags import (
    Flag,
    add_flags,
    bounds,
    given,
    is_given,
    names,
    real,
    refuse_any,
    sizes,
    spelled,
)
from fpmjax.cli.saved import load, open_model
from fpmjax.model_file import is_model_file

BOTH = (
    Flag("min_observations", "rows before a store answers or is heard (default: 5)", one_count, "N"),
    Flag("max_observations", "rows that a store retains (default: 64)", one_count, "N"),
    Flag("bins", "cells per axis over which they are spread (default: 4 on every axis)", sizes, "LIST"),
)
FITTED = (
    Flag("role", "the worker's work; required for a new one", choices=("decode", "prefill", "aggregated")),
    Flag("family", "kind of fit (default: regression)", choices=("regression", *LEARNED_FAMILIES)),
)
REGRESSION = (
    Flag("feature_axes", "1 to 6 features that are fitted (default: attention,moe)", names, "LIST"),
    Flag("sampling_axes", "features over which rows are spread (default: attention,moe)", names, "LIST"),
    Flag("signed", "let slopes fall as well as rise (default: they never fall)"),
    Flag("singular_ridge_scale", "ridge where rows do not determine the slopes (default: 1e-9)", real, "X"),
    Flag("attention_kv_weight", "weight of KV reads in `attention` (default: 1)", real, "X"),
    Flag("prefill_attention_pair_weight", "weight of prefill pairs in `attention` (default: 1)", real, "X"),
    Flag("ffn_token_weight", "weight of tokens in `moe` (default: 1)", real, "X"),
)
FEATURES = """\
features: attention, moe, n, logN, n2; and of traces that list every request's length also E, P, maxE, maxP, minP, P2,
F, nE, logF, logP, meanE, meanP, cvE2, cvP2.
"""
REFITS = (
    Flag("lazy", "fit again only where rows are missed (default: after every change of the rows)"),
    Flag("rebuild_interval", "and at the latest after N rows came or went (default: never)", one_count, "N"),
    Flag("spline", "add learned knots where observations lie (default: a linear fit alone)"),
    Flag("knots_per_axis", "2 or 3 knots (default: 2)", one_count, "N"),
    Flag("search_step", "search knots again every N rows (default: where rows are missed)", one_count, "N"),
    Flag("relative_tolerance", "share of the observed time (default: 0.05)", real, "X"),
    Flag("absolute_tolerance_ms", "milliseconds (default: 1)", real, "X"),
    Flag("window", "rows that are watched for misses (default: 16)", one_count, "N"),
    Flag("trigger", "misses among them that are too many (default: 8)", one_count, "N"),
    Flag("cooldown", "rows from one refit or search to the next (default: 64)", one_count, "N"),
    Flag("startup_observations", "rows that are always fitted (default: 10)", one_count, "N"),
)
MISSED = """\
A row is missed where the prediction before it is off by more than the larger one of both tolerances.  --lazy fits, and
--spline searches its knots, again after TRIGGER misses in the last WINDOW rows.
"""
CORRECTION = (
    Flag("policy", "where factors come from (default: fixed)", choices=("fixed", "dynamic_local", "hybrid")),
    Flag("factor_bounds", "bounds of a factor, `none` for no bound (default: 0.5,2)", bounds, "LOW,HIGH"),
    Flag("max_num_tokens", "largest number of tokens in a step of this worker (default: 8192)", one_count, "N"),
    Flag("max_batch_size", "its largest number of decode requests (default: 512)", one_count, "N"),
    Flag(
        "max_kv_tokens",
        "its largest KV total; the grid of a correction spans these three (default: 2000000)",
        one_count,
        "N",
    ),
)
OF_A_FIT = tuple(flag.name for flag in FITTED)
OF_BOTH = tuple(flag.name for flag in BOTH)
OF_A_REGRESSION = tuple(flag.name for flag in (*REGRESSION, *REFITS))
OF_A_CORRECTION = (*(flag.name for flag in CORRECTION), "select", "fake_kv")
THRESHOLD = ("relative_tolerance", "absolute_tolerance_ms", "window", "trigger", "cooldown")
# Flags that say how refits go, and the switches that there has to be one of.
BELONGS = {
    "knots_per_axis": ("spline",),
    "search_step": ("spline",),
    **dict.fromkeys(THRESHOLD, ("lazy", "spline")),
    "startup_observations": ("lazy",),
    "rebuild_interval": ("lazy",),
}


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Every flag that makes a model."""
    both = parser.add_argument_group("model")
    both.add_argument(
        "-o",
        "--output",
        metavar="MODEL",
        required=True,
        help="file to write, Parquet where its name ends in .parquet, else NPZ",
    )
    both.add_argument(
        "--continue",
        dest="continued",
        metavar="MODEL",
        help="teach this saved model the new observations; it keeps the options that it was made with, and its file "
        "stays as it is unless -o names it too (default: a new model)",
    )
    add_flags(both, FITTED)
    add_families(parser)
    add_flags(parser.add_argument_group("rows of a regression or a correction"), BOTH)
    add_flags(parser.add_argument_group("regression", FEATURES), REGRESSION)
    add_flags(parser.add_argument_group("refits and knots of a regression", MISSED), REFITS)
    correction = parser.add_argument_group("correction instead of a fit")
    correction.add_argument(
        "--correct", dest="table", metavar="TABLE", help=f"table, or saved model, to correct; also `{EMBEDDED}`"
    )
    add_flags(correction, CORRECTION)
    add_choice(correction)


def starting_model(args: argparse.Namespace) -> Any:
    """The model before it has seen any of these observations."""
    if args.continued is not None:
        return continued_model(args)
    if args.table is not None:
        refuse_any(args, OF_A_FIT, "belongs to a regression or a learned model", "it has no part in --correct")
        refuse_any(args, OF_A_REGRESSION, "belongs to a regression", "it has no part in --correct")
        refuse_any(args, OF_A_FAMILY, "belongs to a learned model", "it has no part in --correct")
        from fpmjax.models.corrected import corrected

        options = given(args, *OF_BOTH, *(flag.name for flag in CORRECTION))
        return corrected(open_model(args), **options)
    refuse_any(args, OF_A_CORRECTION, "belongs to a correction", "--correct says of what")
    if not args.role:
        raise UsageError(
            "--role is missing: decode and prefill workers learn one kind of work, aggregated ones all kinds\n"
            "hint: add --role decode, prefill or aggregated; for a correction --correct TABLE"
        )
    if args.family in LEARNED_FAMILIES:
        hint = f"leave it out, or --family {args.family}"
        refuse_any(args, (*OF_BOTH, *OF_A_REGRESSION), "belongs to a regression", hint)
        return new_family(args)
    refuse_any(args, OF_A_FAMILY, "belongs to a learned model", f"add --family {', '.join(LEARNED_FAMILIES)}")
    return new_regression(args)


def new_regression(args: argparse.Namespace) -> Any:
    from fpmjax.models.regression import regression
    from fpmjax.models.settings import DEFAULT_AXES, ErrorThreshold, Knots

    for name, switches in BELONGS.items():
        if is_given(args, name) and not any(getattr(args, switch) for switch in switches):
            needed = " or ".join(map(spelled, switches))
            raise UsageError(f"{spelled(name)} needs {needed}\nhint: see `fpmjax fit --help` for what it is part of")
    if args.spline:
        refuse_any(args, ("lazy", "signed"), "does not go with --spline", "leave one of them out")
        for name in ("feature_axes", "sampling_axes"):
            if is_given(args, name) and getattr(args, name) != DEFAULT_AXES:
                raise UsageError(
                    f"{spelled(name)} {','.join(getattr(args, name))} does not go with --spline\n"
                    f"hint: knots lie on {' and '.join(DEFAULT_AXES)}"
                )
        if args.search_step:
            refuse_any(args, THRESHOLD, "does not go with --search-step", "knots are searched by misses or by step")
    options = given(
        args,
        "role",
        "min_observations",
        "max_observations",
        *(flag.name for flag in REGRESSION if flag.name != "signed"),
        "rebuild_interval",
    )
    if args.bins or args.sampling_axes:
        options["bins_per_axis"] = args.bins or (4,) * len(args.sampling_axes)
    missed = given(args, *THRESHOLD)
    if args.lazy:
        start = given(args, "startup_observations")
        options["lazy"] = ErrorThreshold(**(defaults_of(Knots) | missed | start))
    if args.spline:
        if "relative_tolerance" in missed:
            missed["tolerance"] = missed.pop("relative_tolerance")
        knots = {"per_axis": args.knots_per_axis, "step": args.search_step}
        options["spline"] = Knots(**missed, **{name: value for name, value in knots.items() if value is not None})
    return regression(non_negative=not args.signed, **options)


def defaults_of(knots: Any) -> dict[str, Any]:
    """When a row is missed and a fit too old, as for knots: the Python API has no usual values for lazy refits."""
    plain = knots()
    return {name: getattr(plain, "tolerance" if name == "relative_tolerance" else name) for name in THRESHOLD}


def continued_model(args: argparse.Namespace) -> Any:
    """The saved model that goes on learning; UsageError for what cannot, and for flags that would make another one."""
    name = args.continued
    shaping = (*OF_BOTH, *OF_A_REGRESSION, *OF_A_FAMILY, "table", *OF_A_CORRECTION)
    refuse_any(args, shaping, f"makes a new model, but {name} keeps its own options", "leave it out, or --continue")
    if not is_model_file(name):
        if name == EMBEDDED or os.path.isdir(name) or is_parquet(name):
            what, hint = "is a table, which learns nothing", f"`--correct {name}` learns factors over it"
        elif is_artifact(name):
            what, hint = "is a learned artifact, which learns nothing", f"`--correct {name}` learns factors over it"
        elif os.path.exists(name):
            what, hint = "is no saved model", "--continue takes a file that `fpmjax fit` wrote"
        else:
            what, hint = "does not exist", "--continue takes a file that `fpmjax fit` wrote; leave it out for a new one"
        raise UsageError(f"{name} {what}\nhint: {hint}")
    model = load(name)
    kind = type(model).__name__
    if kind == "Learned":
        raise UsageError(
            f"{name} is a learned model, which is fitted to all observations at once and does not go on learning\n"
            "hint: fit again with all of them, or `--correct` it, which learns factors over it"
        )
    if not hasattr(model, "update"):
        held = "learned trees" if kind == "Forest" else "a measured table"
        raise UsageError(f"{name} holds {held}, which learns nothing\nhint: --correct {name} learns factors")
    role = getattr(model, "role", None)
    if args.family in LEARNED_FAMILIES:
        raise UsageError(f"--family {args.family} does not go with --continue\nhint: fit all observations anew")
    if role is None:
        what = "a correction" if kind == "Corrected" else "a choice between two models"
        refuse_any(args, OF_A_FIT, f"belongs to a regression, but {name} is {what}", "leave it out")
    elif args.role not in (None, role):
        raise UsageError(
            f"{name} is a regression of {role} work, not of {args.role} work\n"
            f"hint: leave --role out to teach it {role} work, or --continue for a new model"
        )
    return model


def is_parquet(name: str) -> bool:
    if not os.path.isfile(name):
        return False
    with open(name, "rb") as file:
        return file.read(4) == b"PAR1"
