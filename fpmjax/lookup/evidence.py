"""The evidence of an answer: how it was found, which measured rows carry it, and with which weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fpmjax.answer import Array, Evidence, Resolution
from fpmjax.lookup.axis import take
from fpmjax.lookup.curves import Knots
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.kernel import Support
from fpmjax.lookup.prefill import PrefillTable
from fpmjax.lookup.scalar import Answer, DecodeWalk, PrefillWalk

NONE, EXACT, WITHIN, ACROSS_BATCH, ACROSS_KV, ACROSS_TOKENS = (np.int8(r) for r in Resolution)


def gather_evidence(knots: Knots, support: Support, asked: Array, crossing: Array) -> Evidence:
    """Support -> evidence; `asked` bool [...], `crossing` the resolution where two curves answer."""
    found = asked & (support.lo >= 0)
    lo, hi, w = jnp.where(found, support.lo, 0), support.hi, support.across
    weights = [
        jnp.where(found, x, 0.0)
        for x in (
            (1 - w) * (1 - support.along_lo),
            (1 - w) * support.along_lo,
            w * (1 - support.along_hi),
            w * support.along_hi,
        )
    ]
    rows = [jnp.where(x > 0, take(knots.row, p), -1) for x, p in zip(weights, (lo, lo + 1, hi, hi + 1), strict=True)]
    alone = jnp.where(support.along_lo == 0, EXACT, WITHIN)
    resolution = jnp.where(found, jnp.where(lo != hi, crossing, alone), NONE)
    return Evidence(resolution, (*rows,), (*weights,))


def decode_evidence(table: DecodeTable, support: Support, asked: Array) -> Evidence:
    """Evidence of decode lookups."""
    return gather_evidence(table.knots, support, asked, ACROSS_BATCH)


def prefill_evidence(table: PrefillTable, support: Support, asked: Array) -> Evidence:
    """Evidence of prefill lookups: which way they went is written in the knot itself."""
    crossing = jnp.where(support.lo >= table.split, ACROSS_TOKENS, ACROSS_KV)
    return gather_evidence(table.knots, support, asked, crossing)


def baseline_evidence(table: DecodeTable, support: Support, asked: Array) -> Evidence:
    """Evidence of the mixed-pass baseline: the first point of each curve, crossed as the decode query was."""
    head, zero = table.knots.head, jnp.zeros_like(support.across)
    lo = jnp.where(support.lo >= 0, take(head, jnp.maximum(support.lo, 0)), -1)
    first = Support(lo, take(head, support.hi), support.across, zero, zero)
    return gather_evidence(table.knots, first, asked, ACROSS_BATCH)


def collect_evidence(walk: DecodeWalk | PrefillWalk, answers: list[Answer], ok: np.ndarray) -> Evidence:
    """Evidence of lookups made one at a time; `ok` bool [lookups] leaves out refused work."""
    resolution = np.full(len(answers), NONE)
    rows, weights = np.full((4, len(answers)), np.int32(-1)), np.zeros((4, len(answers)))
    for i, answer in enumerate(answers):
        if answer.ms is None or not ok[i]:
            continue
        resolution[i] = answer.resolution
        for slot, (knot, share) in enumerate(walk.knots.corners(answer)):
            if share > 0:
                rows[slot, i], weights[slot, i] = walk.knots.row[knot], share
    return Evidence(resolution, tuple(rows), tuple(weights))
