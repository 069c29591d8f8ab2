"""The form that `learned` fits: a step is overhead, weights or arithmetic, and KV reads.

    T = o + s n + ((w0 + w1 (1 - exp(-t / e)))^p + (c t)^p)^(1/p) + k K (1 + r / (1 + B / b0)) + m K / B + a Q + h H

with n requests, t computed rows, B decode requests and their KV K, Q prefill pairs and H cached prompt KV (see
`observe.sizes`).  Everything is positive: theta holds logarithms, p is 1 + exp.  Decode, prefill and mixed passes are
one form: a mixed pass reads its weights once.  The linear form keeps o, s n, c t, k K, a Q and h H.

Parameters are confounded in pairs (o with w0, s with c, k with r); only predictions mean something, never one
parameter.  The form and the priors were chosen by measurements on synthetic and real engines; their numbers stand in
`benchmarks/README.md`.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fpmjax.errors import OptionError
from fpmjax.observe.sizes import Sizes
from fpmjax.work import Array

# Name: centre and width of the broad prior on theta; milliseconds, tokens and requests.
PRIOR = {
    "o": (math.log(1.0), 1.0),
    "s": (math.log(4e-3), 1.0),
    "w0": (math.log(3.0), 1.2),
    "w1": (math.log(0.5), 1.5),
    "e": (math.log(20.0), 1.0),
    "c": (math.log(0.02), 1.2),
    "p": (math.log(3.0), 0.4),
    "k": (math.log(2e-5), 1.0),
    "r": (math.log(0.2), 1.0),
    "b0": (math.log(8.0), 0.7),
    "m": (math.log(1e-6), 1.5),
    "a": (math.log(1e-6), 1.5),
    "h": (math.log(2e-5), 1.5),
}
NAMES = tuple(PRIOR)
# Shares of a datasheet's peak that engines reach.
BANDWIDTH_SHARE, ARITHMETIC_SHARE = 0.85, 0.7
LINEAR_WIDTH = 3.0  # the linear form is all but free
LARGEST = 1e30  # of a datasheet's numbers; the least is its inverse


@dataclass(frozen=True)
class Hardware:
    """What one rank's datasheet and weights say; with tensor parallelism divide what the ranks share.

    weight_bytes: read by every pass; flops_per_token: of one computed token without attention;
    kv_bytes_per_token: of all layers; bandwidth_bytes_per_s and flops_per_s: peaks.
    Raises OptionError `hardware` for what is not a positive number of sane size.
    """

    weight_bytes: float
    flops_per_token: float
    kv_bytes_per_token: float
    bandwidth_bytes_per_s: float
    flops_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number: Any = value if isinstance(value, numbers.Real) and not isinstance(value, bool) else 0
            if not 1 / LARGEST <= number <= LARGEST:
                raise OptionError(
                    f"{field.name} of the hardware is {value!r}\nhint: give a positive number of SI units, per rank",
                    code="hardware",
                )


def log_ms(xp: Any, theta: Array, sizes: Sizes, linear: bool) -> Array:
    """float64 [n...]: log of the milliseconds; theta float64 [13].  Smooth where any coefficient goes to zero."""
    v = {name: xp.exp(theta[i]) for i, name in enumerate(NAMES)}
    rows = sizes.rows + sizes.tokens
    flat = v["o"] + v["s"] * (sizes.decode + sizes.prefills) + v["a"] * sizes.pairs + v["h"] * sizes.cached
    if linear:
        return xp.log(flat + v["c"] * rows + v["k"] * sizes.kv)
    p = 1.0 + v["p"]
    weights = xp.log(v["w0"] + v["w1"] * -xp.expm1(-rows / v["e"]))
    arithmetic = theta[NAMES.index("c")] + xp.log(rows)
    larger = xp.exp(xp.logaddexp(p * weights, p * arithmetic) / p)
    read = v["k"] * sizes.kv * (1.0 + v["r"] / (1.0 + sizes.decode / v["b0"]))
    return xp.log(flat + larger + read + v["m"] * sizes.past)


def broad_prior(typical_ms: float) -> np.ndarray:
    """float64 [2, 13]: centres and widths when nothing is known but the scale of the latencies."""
    prior = np.array(list(PRIOR.values())).T
    for name, share in (("o", 0.2), ("w0", 0.6), ("w1", 0.2)):
        prior[0, NAMES.index(name)] = math.log(share * typical_ms)
    return prior


def linear_prior(typical_ms: float) -> np.ndarray:
    """float64 [2, 13]: wide enough to let every coefficient vanish."""
    prior = np.array(list(PRIOR.values())).T
    prior[0, NAMES.index("o")] = math.log(0.8 * typical_ms)
    prior[1] = LINEAR_WIDTH
    return prior


def datasheet_prior(typical_ms: float, hardware: Hardware) -> np.ndarray:
    """float64 [2, 13]: weights, arithmetic and KV reads near what the datasheet allows."""
    prior = broad_prior(typical_ms)
    weights = 1e3 * hardware.weight_bytes / (hardware.bandwidth_bytes_per_s * BANDWIDTH_SHARE)
    arithmetic = 1e3 * hardware.flops_per_token / (hardware.flops_per_s * ARITHMETIC_SHARE)
    read = 1e3 * hardware.kv_bytes_per_token / (hardware.bandwidth_bytes_per_s * BANDWIDTH_SHARE)
    known = {"w0": (weights, 0.3), "w1": (0.02 * weights, 1.0), "c": (arithmetic, 0.3), "k": (read, 0.3)}
    for name, (ms, width) in known.items():
        prior[:, NAMES.index(name)] = math.log(ms), width
    return prior
