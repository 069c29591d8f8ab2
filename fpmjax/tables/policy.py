"""The measurement policies: what the milliseconds of a table are, one row of data per policy.

A policy names the clock and what a row is.  Everything the loader has to know about it stands in its
`Policy`; the loader itself has no branch per policy.  Source: the artifact's two schema versions (6, 7)
and the policies of the peer, plus the native CUDA policy of autoregressive execution.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_NAME = "aic_fpm_forward_perf"
SCHEMA_VERSIONS = (6, 7)
COORDINATE_SYSTEM = "iteration_totals_balanced_v1"
PARTITION_POLICY = "balanced_v1"

AUTOREGRESSIVE = "autoregressive"
SPECULATIVE_ROUND = "speculative_round"

REAL_KV = "real_kv"
FAKE_KV = "fake_fallback"
FAKE_KV_CHOICES = ("drop", "heal", "keep")


@dataclass(frozen=True)
class Policy:
    """What one `measurement_policy` demands of the sidecar and of every row."""

    name: str
    clock: str
    schemas: tuple[int, ...] = SCHEMA_VERSIONS
    backend: str | None = None
    """The only serving backend that may carry it; None where any may."""
    execution: str = AUTOREGRESSIVE
    """What a row times: one autoregressive pass, or a whole draft-and-verify round."""
    sidecar: tuple[tuple[str, int | str], ...] = ()
    """Exact sidecar fields, in the order in which they are checked."""
    self_named: bool = False
    """Whether each row repeats the policy in its column `measurement_policy`."""
    row_constants: tuple[tuple[str, int | str], ...] = ()
    """Columns with one legal value, in the order in which they are checked."""
    row_pairs: tuple[tuple[str, int], ...] = ()
    """Legal (`measurement_policy`, `measurement_repeats`) of a row, where rows may differ."""
    sample_contract: bool = False
    """Whether rows state timing scope, reduction and sample count (`REDUCTIONS`)."""
    fake_kv: bool = True
    """Whether rows seeded with fabricated KV are legal at all."""
    full_text_only: bool = False
    """Whether every row must be the full text autoregressive execution, with real KV where KV is read."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Row columns that must exist for this policy, beyond those of the schema."""
        names = [name for name, _ in self.row_constants]
        if self.row_pairs:
            names += ["measurement_policy", "measurement_repeats"]
        if self.sample_contract:
            names += ["timing_scope", "measurement_reduction", "source_sample_count"]
        return tuple(names)


CUDA_SCOPE = "model_step_cuda"

# Legal sample counts of a native CUDA row, smallest and largest.  "actual_upper_median" names a value that
# was really observed (the upper of the two middle ones), so it needs at least two samples.
REDUCTIONS: dict[str, tuple[int, int]] = {"single_sample": (1, 1), "actual_upper_median": (2, 2**32 - 1)}

SINGLE_SAMPLE = "dynamo_native_single_sample_v1"


def _median(name: str, backend: str, protocol: str, clock: str) -> Policy:
    return Policy(
        name,
        clock=f"wall time, median of 10 repeats after 5 warm-ups ({clock})",
        schemas=(7,),
        backend=backend,
        sidecar=(("warmup_repeats", 5), ("measurement_repeats", 10)),
        self_named=True,
        row_constants=(
            ("global_warmup_iterations", 0),
            ("warmup_repeats", 5),
            ("measurement_repeats", 10),
            ("state_protocol", protocol),
            ("timing_boundary", clock),
        ),
        fake_kv=False,
    )


def _cuda(name: str, clock: str, **rest) -> Policy:
    return Policy(
        name,
        clock=clock,
        schemas=(7,),
        backend="vllm",
        sidecar=(("timing_scope", CUDA_SCOPE),),
        self_named=True,
        sample_contract=True,
        **rest,
    )


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(SINGLE_SAMPLE, clock="scheduler wall time, maximum over ranks, one sample"),
        Policy(
            "per_row_single_sample_or_median_of_3",
            clock="scheduler wall time, one sample or the median of 3 per row",
            row_pairs=((SINGLE_SAMPLE, 1), ("kvwarm_median_of_3", 3)),
        ),
        Policy(
            "per_row_single_sample_or_full_grid_median_v1",
            clock="scheduler wall time, one sample or the median of 3 independent grids per row",
            row_pairs=((SINGLE_SAMPLE, 1), ("independent_full_grid_median_of_3", 3)),
        ),
        _median(
            "vllm_native_fpm_prefix_seed_median_v1",
            "vllm",
            "glm53flash_prefix_cache_real_seed_v1",
            "dynamo_vllm_instrumented_scheduler_fpm_wall_time",
        ),
        _median(
            "sglang_native_fpm_radix_seed_median_v1",
            "sglang",
            "glm53flash_sglang_radix_real_seed_v1",
            "sglang_native_fpm_rank0_device_timer_wall_time",
        ),
        _cuda(
            "vllm_native_fpm_model_step_cuda_v1",
            clock="CUDA time of a whole speculative round: draft, verification and sampling",
            execution=SPECULATIVE_ROUND,
        ),
        _cuda(
            "vllm_native_ar_model_step_cuda_v1",
            clock="CUDA time of a whole autoregressive model step, sampling included",
            full_text_only=True,
        ),
    )
}
