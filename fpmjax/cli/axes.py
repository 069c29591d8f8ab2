"""What a sweep asks, on the command line: axes as lists, a file of axes, or a table of queries."""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

from fpmjax import strict_json
from fpmjax.cli.arguments import (
    EMBEDDED,
    INSIDE,
    LIST,
    UsageError,
    counts,
    is_saved,
    open_cells,
    require_path,
    selected,
    separating_flags,
    shorten,
)
from fpmjax.cli.flags import add_rule, rule_of
from fpmjax.cli.output import note
from fpmjax.cli.saved import open_model
from fpmjax.cli.study import rule_legend
from fpmjax.errors import CellNotFoundError, OptionError

AXES = {
    "decode_requests": ("--batch", "decode requests in the iteration"),
    "decode_kv": ("--kv", "past KV tokens, summed over the decode requests"),
    "kv_per_request": (None, "past KV tokens of each decode request, instead of a sum"),
    "prefill_requests": (None, "requests that compute new tokens"),
    "prefill_tokens": (None, "tokens they compute, in total"),
    "tokens_per_request": (None, "tokens each of them computes, instead of a total"),
    "prefill_kv": (None, "cached tokens they read, in total"),
    "draft_length": (None, "draft tokens per round; 0 is ordinary decoding"),
}
SHORT: dict[str, str] = {short.lstrip("-"): name for name, (short, _) in AXES.items() if short}
EXAMPLE = '{"decode_requests": "1:8", "decode_kv": 8192}'
DOCUMENTS = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
ABOUT = f"""\
Axes are combined in every way, the first one below outermost; counts are totals of one iteration and rank unless
their name says per request.  --spec takes them from a file instead:
  axes.json, axes.yaml     {{"decode_requests": "1:512", "kv_per_request": [512, 4096], "draft_length": "0:4"}}
  queries.parquet, .csv    a table with columns of these names, one iteration a row; its other columns are carried
                           through as they stand, one that is nearly called like an input that is not
                           there is refused, and a row that cannot be asked is kept as a refused one
In both batch and kv are short for decode_requests and decode_kv.

{LIST}"""


def add_axes(parser: argparse.ArgumentParser) -> None:
    """Every axis, --spec and --rule."""
    group = parser.add_argument_group("what is asked")
    for name, (short, text) in AXES.items():
        flags = [spelled(name), *([short] if short else [])]
        group.add_argument(*flags, dest=name, metavar="LIST", type=counts, help=text)
    group.add_argument("--spec", metavar="FILE", help="a file of axes, or a table of queries, instead")
    add_rule(group)


def rule_for(args: argparse.Namespace) -> Any:
    """The rule of --rule, told once; what --spec holds is asked for its draft lengths later."""
    rule = rule_of(args, drafted=args.draft_length is not None or args.spec is not None)
    if rule is not None:
        note(rule_legend(rule))
    return rule


def spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def queries_of(args: argparse.Namespace) -> Any:
    """A grid, or the name of a table of queries."""
    given = {name: values for name in AXES if (values := getattr(args, name)) is not None}
    if args.spec is None:
        if not given:
            raise UsageError("nothing is asked\nhint: give --decode-requests with --kv-per-request, or --spec FILE")
        return grid_of(given, "")
    if given:
        raise UsageError(f"--spec says what is asked, so {spelled(next(iter(given)))} cannot be given as well")
    require_path(args.spec, "a file of axes, or a table of queries")
    kind = DOCUMENTS.get(os.path.splitext(args.spec)[1].lower())
    return args.spec if kind is None else grid_of(axes_of(args.spec, kind), f"{args.spec}: ")


def grid_of(axes: Mapping[str, Any], where: str) -> Any:
    from fpmjax.grid import grid

    unknown = [name for name in axes if name not in AXES]
    try:
        return grid(**{name: axes[name] for name in (*AXES, *unknown) if name in axes})
    except OptionError as error:
        text = str(error)
        if not where:
            for name in sorted(AXES, key=len, reverse=True):  # in the words of the command line
                text = text.replace(f"add {name}=1", f"add {spelled(name)} 1")
            text = text.replace(
                "grid(decode_requests=[1, 8], decode_kv=8192)", "--decode-requests 1,8 --decode-kv 8192"
            )
        raise UsageError(where + text, code=error.code) from None


def axes_of(name: str, kind: str) -> dict[str, Any]:
    """The axes in a document; a text is a list as on the command line."""
    with open(name, encoding="utf-8-sig") as file:
        try:
            found = strict_json.decode(file.read()) if kind == "JSON" else yaml_of(file.read())
        except (ValueError, RecursionError) as error:
            what = f"{name} is not readable {kind}: {str(error).splitlines()[0]}"
            raise UsageError(f"{what}\nhint: {EXAMPLE} is, with a comma between axes") from None
    if not isinstance(found, dict) or not found or not all(isinstance(x, str) for x in found):
        raise UsageError(f"{name} holds no axes\nhint: for example {EXAMPLE}")
    axes: dict[str, Any] = {}
    for given, values in found.items():
        axis = SHORT.get(str(given), str(given))
        if axis in axes:
            raise UsageError(f"{name}: {given} and {axis} are the same axis\nhint: keep one of them")
        parts = values if isinstance(values, list) else [values]
        axes[axis] = []
        for part in parts:
            try:
                axes[axis] += counts(part) if isinstance(part, str) else [part]
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"{name}: {axis}: {error}") from None
    return axes


def yaml_of(text: str) -> Any:
    """The document, all of its scalars as text: YAML's own numbers read 1:40 in base 60, and 010 in base 8."""
    try:
        import yaml  # pyright: ignore[reportMissingModuleSource]
    except ImportError:
        raise UsageError("YAML needs the package pyyaml\nhint: pip install pyyaml, or write the axes as JSON") from None
    try:
        node = yaml.compose(text, yaml.BaseLoader)
        names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise ValueError(f"key {twice[0]!r} occurs twice")
        return yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


# Models


def models_of(
    names: list[str], args: argparse.Namespace, *, every_cell: bool = False, beside: Sequence[str] = ()
) -> dict[str, Any]:
    """Name -> model, in order; a name that is given twice is told apart by its position.

    beside: names of models that are opened with the same flags elsewhere.
    """
    found: dict[str, Any] = {}
    some_table = not all(map(is_saved, (*names, *beside)))
    for i, name in enumerate(names):
        one = copy.copy(args)
        one.table = name
        if is_saved(name) and some_table:
            one.select, one.fake_kv = [], None  # they are about the tables beside it
        for label, model in cells_in(one) if every_cell and not is_saved(name) else [(name, open_model(one))]:
            found[label if label not in found else f"{label} ({i + 1})"] = model
    return found


def cells_in(args: argparse.Namespace) -> list[tuple[str, Any]]:
    """Every cell of a table that --select leaves, named by what tells them apart."""
    from fpmjax.models.direct import direct

    if args.table != EMBEDDED:
        require_path(args.table, f"a table, or {INSIDE}")
    wanted, cells = selected(args), open_cells(args)
    try:
        identities = [cells.select(**wanted).identity]
    except CellNotFoundError as error:
        if error.code != "cell_ambiguous":
            raise
        identities = [identity for identity in cells if not identity.differences(wanted)]
    words = [flag.replace("--select ", "") for flag in separating_flags(identities)]
    named = zip(words, identities, strict=True)
    return [(f"{args.table} {word}".strip(), direct(cells[identity])) for word, identity in named]


def names_of(text: str) -> tuple[str, ...]:
    """Comma-separated names; an argparse type."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{shorten(text)} has an empty name")
    return names
