"""Plain Python oracle of the retention grid: bounds that grow, the oldest row of a fullest cell evicted."""

from __future__ import annotations

from collections import deque

import numpy as np


class GridSampler:
    """Grid retention: bounds only grow; evict the oldest row of a fullest cell.

    Deterministic details (verified): equal-size cells -> the lexicographically
    largest cell index loses its oldest row; when the bounds grow, rows are
    re-filed by walking the old cells in increasing index order.
    """

    def __init__(self, bins, capacity):
        self.bins, self.capacity = tuple(bins), capacity
        self.lo = np.full(len(self.bins), np.inf)
        self.hi = np.full(len(self.bins), -np.inf)
        self.cells: dict[tuple, deque] = {}
        self.count = 0
        self.ties = 0
        self.evictions = 0

    def key(self, z):
        k = []
        for v, lo, hi, b in zip(z, self.lo, self.hi, self.bins, strict=True):
            k.append(0 if hi <= lo else min(max(int((v - lo) / (hi - lo) * b), 0), b - 1))
        return tuple(k)

    def add(self, z, row):
        z = np.asarray(z, float)
        if not np.all(np.isfinite(z)):
            return False, None
        grew = bool(np.any(z < self.lo) or np.any(z > self.hi))
        self.lo, self.hi = np.minimum(self.lo, z), np.maximum(self.hi, z)
        if grew and self.count:
            moved = [it for k in sorted(self.cells) for it in self.cells[k]]
            self.cells = {}
            for it in moved:
                self.cells.setdefault(self.key(it[0]), deque()).append(it)
        self.cells.setdefault(self.key(z), deque()).append((z, row))
        self.count += 1
        if self.count <= self.capacity:
            return True, None
        size = max(len(q) for q in self.cells.values())
        full = [k for k, q in self.cells.items() if len(q) == size]
        self.ties += len(full) > 1
        self.evictions += 1
        pick = max(full)
        gone = self.cells[pick].popleft()
        if not self.cells[pick]:
            del self.cells[pick]
        self.count -= 1
        return True, gone[1]

    def rows(self):
        return [it[1] for k in sorted(self.cells) for it in self.cells[k]]
