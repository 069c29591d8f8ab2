"""The refit by optax.lbfgs: the loss over every round, its gradient by jax, nothing of the closed form."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fpmjax._jax import own_scope

FLAT = 1e-13  # a gradient this small, of a loss of size one, is rounding
LEAST = 64  # smallest padded size


def minimum(
    depth: np.ndarray,
    ratio: np.ndarray,
    v: np.ndarray,
    start: tuple[float, float],
    huber: tuple[float, ...] | None,
    steps: int,
) -> tuple[float, float, int]:
    """(slope, intercept, steps taken) of the smallest sum v (a d + b - r)^2.

    huber: of the smallest sum v |a d + b - r| instead, smoothed below each of these relative errors in turn.
    Draft lengths are shifted and scaled, so that both coefficients matter alike; rounds are padded with weight zero to
    powers of two, so that a few sizes are compiled.
    """
    middle, width = float(depth.mean()), float(depth.std())
    size = max(LEAST, 1 << (len(depth) - 1).bit_length())
    x, r, weight = (
        np.pad(part, (0, size - len(depth)), constant_values=fill)
        for part, fill in (((depth - middle) / width, 0.0), (ratio, 1.0), (v, 0.0))
    )
    theta = np.array([start[0] * width, start[1] + start[0] * middle])
    taken = 0
    # optax mixes types, which some do not let jax do.
    with own_scope(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for smooth in huber or (0.0,):
            theta, used = lbfgs(jnp.asarray(theta), (x, r, weight, np.float64(smooth)), huber is not None, steps)
            taken += int(used)
        slope, level = (float(t) for t in np.asarray(theta))
    return slope / width, level - slope / width * middle, taken


@partial(jax.jit, static_argnames=("absolute", "steps"))
def lbfgs(theta: Any, data: tuple[Any, ...], absolute: bool, steps: int) -> tuple[Any, Any]:
    """(theta, steps taken) from at most `steps` steps; theta: float64 [2]."""
    x, r, weight, smooth = data

    def objective(theta: Any) -> Any:
        miss = theta[0] * x + theta[1] - r
        if not absolute:
            return jnp.sum(weight * miss * miss)
        far = jnp.abs(miss)
        near = smooth * r
        return jnp.sum(weight * jnp.where(far < near, 0.5 * miss * miss / near, far - 0.5 * near))

    optimiser: Any = optax.lbfgs()
    value_and_grad: Any = optax.value_and_grad_from_state(objective)

    def step(carry: Any) -> Any:
        theta, state, count, _ = carry
        value, grad = value_and_grad(theta, state=state)
        update, state = optimiser.update(grad, state, theta, value=value, grad=grad, value_fn=objective)
        moved = theta + update
        flat = jnp.max(jnp.abs(grad)) < FLAT
        return jnp.where(flat, theta, moved), state, jnp.where(flat, count, count + 1), flat

    def going(carry: Any) -> Any:
        return (carry[2] < steps) & ~carry[3]

    first = (theta, optimiser.init(theta), jnp.zeros((), jnp.int32), jnp.zeros((), bool))
    theta, _, count, _ = jax.lax.while_loop(going, step, first)
    return theta, count
