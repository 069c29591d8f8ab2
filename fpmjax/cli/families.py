"""The families of `fpmjax.learned` on the command line: their flags, the fit, and what observations lack for it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.cli.arguments import UsageError, counts
from fpmjax.cli.describe import AXES
from fpmjax.cli.flags import Flag, add_flags, given, real, spelled

if TYPE_CHECKING:
    from fpmjax.observe.observations import Observations

LEARNED_FAMILIES = ("committee", "roofline", "linear")
# Name here -> name in `fpmjax.Hardware`.
HARDWARE = {
    "weight_bytes": "weight_bytes",
    "flops_per_token": "flops_per_token",
    "kv_bytes_per_token": "kv_bytes_per_token",
    "bandwidth": "bandwidth_bytes_per_s",
    "flops": "flops_per_s",
}
FASTER = 50  # times that a pass takes at most what reading its weights takes, unless a number is wrong
ABOUT_HARDWARE = """\
With these five, all of one rank (with tensor parallelism divide what the ranks share), a fit also knows what narrow
batches cannot show.  For Qwen3-32B in bfloat16 on one B300: --weight-bytes 65.5e9 --flops-per-token 65.5e9
--kv-bytes-per-token 262144 --bandwidth 8e12 --flops 2.25e15.
"""
OF_HARDWARE = (
    Flag("weight_bytes", "bytes of weights that a pass reads", real, "BYTES"),
    Flag("flops_per_token", "floating-point operations per computed token, without attention", real, "FLOP"),
    Flag("kv_bytes_per_token", "bytes of KV cache per past token, over all layers", real, "BYTES"),
    Flag("bandwidth", "memory bandwidth of the datasheet, bytes per second", real, "BYTES/S"),
    Flag("flops", "arithmetic of the datasheet, floating-point operations per second", real, "FLOP/S"),
)
ABOUT = """\
A committee is the median of a nonnegative linear form and a roofline form, the latter also with the hardware where that
is given; roofline and linear are one of them alone.  Each answer comes with its range and whether it is extrapolated.
A kind of work takes at least 16 observations, with 4 distinct batch sizes and 4 distinct contexts.
"""
OPTIONS = (
    Flag(
        "cuda_graph_batch_sizes",
        "batch sizes that the engine captured as CUDA graphs; decode runs at the next of them (default: not known)",
        counts,
        "LIST",
    ),
    Flag("key", "seed of the fit; the same key and observations give the same model (default: 0)", int, "N"),
    Flag("level", "share of measured times that the range of an answer holds (default: 0.9)", real, "X"),
    Flag(
        "allow_extrapolation",
        "answer draft lengths whose batch is more than twice the largest observed one too (default: not ready there)",
    ),
)
OF_A_FAMILY = tuple(flag.name for flag in (*OPTIONS, *OF_HARDWARE))


def add_families(parser: argparse.ArgumentParser) -> None:
    """The flags of the learned families."""
    add_flags(parser.add_argument_group("learned families: committee, roofline, linear", ABOUT), OPTIONS)
    add_flags(parser.add_argument_group("hardware of a learned family, all five or none", ABOUT_HARDWARE), OF_HARDWARE)


@dataclass(frozen=True)
class Family:
    """A learned model before it has seen anything: `update` fits it once, to all there is."""

    options: dict[str, Any]

    def update(self, observations: Observations) -> Any:
        from fpmjax.models.learned import learned

        return learned(observations, **self.options)

    def lacks(self, observations: Observations) -> dict[str, str]:
        """By kind of work why these observations do not make its store ready."""
        from fpmjax.models.learned import split
        from fpmjax.observe.sizes import ladder_of

        ladder = ladder_of(self.options.get("cuda_graph_batch_sizes"))
        parts = split(observations, self.options["role"], None, ladder)
        return {rows.kind: why for rows in parts if (why := shortage(rows))}

    def doubt(self, observations: Observations) -> str:
        """What is odd about the hardware beside these times, a slip of a unit for example; empty where nothing is."""
        known = self.options.get("hardware")
        if known is None:
            return ""
        read, typical = 1e3 * known.weight_bytes / known.bandwidth_bytes_per_s, float(np.median(observations.wall_ms))
        if typical / FASTER <= read <= typical:
            return ""
        words = f"--weight-bytes at --bandwidth takes {read:.3g} ms, but a pass took {typical:.3g} ms"
        return f"{words}: are both in bytes, of one rank?"


def shortage(rows: Any) -> str:
    """What the observations of one kind of work lack to be fitted, in words; empty where they suffice."""
    from fpmjax.models.committee import LEAST_ROWS, VARIED
    from fpmjax.observe.sizes import BOX, coordinates

    n, at = len(rows.wall_ms), coordinates(np, rows.sizes)
    if n < LEAST_ROWS:
        return f"{n:,} observations, but a fit takes at least {LEAST_ROWS}"
    for names, least in VARIED[rows.kind].items():
        values = len(np.unique(at[:, [BOX.index(name) for name in names]], axis=0))
        if values < least:
            axes = " and ".join(AXES[name] for name in names)
            return f"{n:,} observations with {values} distinct values of {axes}, but a fit takes at least {least}"
    return ""


def new_family(args: argparse.Namespace) -> Family:
    """What the flags make of a learned family; UsageError where the hardware is given in part."""
    options = {"role": args.role, "family": args.family} | given(args, *(flag.name for flag in OPTIONS))
    known = given(args, *HARDWARE)
    if known:
        missing = [spelled(name) for name in HARDWARE if name not in known]
        if missing:
            raise UsageError(
                f"{spelled(next(iter(known)))} needs {', '.join(missing)} too: hardware is known as a whole\n"
                "hint: give all five, of one rank, or none of them"
            )
        from fpmjax.models.roofline import Hardware

        options["hardware"] = Hardware(**{HARDWARE[name]: value for name, value in known.items()})
    from fpmjax.models.learned import LEVEL, check_options
    from fpmjax.observe.sizes import ladder_of

    # What is wrong with an option is told before traces are read.
    ladder_of(options.get("cuda_graph_batch_sizes"))
    check_options(args.role, args.family, [options.get("hardware")], options.get("level", LEVEL), False)
    return Family(options)
