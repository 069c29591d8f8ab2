"""The embedded table: real measurements of one deployment, in three cells (TP 1, 2 and 4).

Qwen/Qwen3-32B, bfloat16, on NVIDIA B300 under vLLM 0.20.1.  `NOTICE.md` tells whose measurements they are,
`build.py` how the table is made of them.
"""

from __future__ import annotations

from pathlib import Path


def embedded_table() -> Path:
    """Path of the embedded table's Parquet file; its sidecar lies beside it."""
    return Path(__file__).with_name("fpm_forward_perf.parquet")
