"""Native models for tests of what stands around a model."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree
from fpmjax.iteration import estimate_of
from fpmjax.status import Status
from fpmjax.work import COUNTS


@pytree()
class Recorded:
    """Model that knows the milliseconds of some iterations, float64 [m]; rows: uint32 [m, r, 5]."""

    rows: Any
    ms: Any

    composition, execution, ready = "whole_forward", "autoregressive", True

    def __call__(self, work, *, evidence=False, xp=jnp):
        asked = xp.stack([getattr(work, name) for name in COUNTS], -1).reshape(-1, 1, work.ranks, 5)
        missing = work.ranks - self.rows.shape[1]
        rows = xp.pad(self.rows, [(0, 0), (0, missing), (0, 0)])[None]
        at = (asked == rows).all((-1, -2)).argmax(-1)
        ms = self.ms[at].reshape(*work.shape, 1)
        return estimate_of(xp, ms, xp.where(ms > 0, np.int8(Status.OK), np.int8(Status.IDLE)))

    def on_host(self, work, *, evidence=False):
        return self(work, xp=np)


@pytree()
class Toy:
    """Takes 1 + P + B + K / 16 ms; refuses the KV totals in `holes`."""

    holes: Any

    composition, execution, ready = "whole_forward", "autoregressive", True

    def __call__(self, work, *, evidence=False, xp=jnp):
        p, b, k = (
            xp.zeros((*work.shape, work.ranks)) if x is None else x.astype(np.float64)
            for x in (work.prefill_tokens, work.decode_requests, work.decode_kv)
        )
        busy = (p > 0) | (b > 0)
        ms = xp.where(busy, 1.0 + p + b + k / 16.0, 0.0)
        status = xp.where(busy, np.int8(Status.OK), np.int8(Status.IDLE))
        holes = xp.asarray(self.holes)
        hole = (k[..., None] == holes.reshape((1,) * k.ndim + (-1,))).any(-1) & busy
        return estimate_of(xp, xp.where(hole, np.nan, ms), xp.where(hole, np.int8(Status.NO_ROWS), status))

    def on_host(self, work, *, evidence=False):
        return self(work, xp=np)


TOY = Toy(np.full(1, -1.0))
