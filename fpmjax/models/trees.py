"""Regression trees in bulk: every tree of a forest at once, one query after the other.

A feature enters as its code: how many of the thresholds on it lie below, -1 for NaN.  `x <= threshold` is then a
comparison of small integers, and equality still goes left.  Two forms of the same trees follow.

    Masks   per tree, and code of a feature, one bit for every leaf that the feature still allows; the bits of all
            features, ANDed, leave the one leaf.  No branch and no walk: whole rows of words, one per 32 leaves.
    Walk    nodes, down to the leaves; for forests whose masks would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from fpmjax._jax import pytree
from fpmjax.models.forest_file import Store, Tree
from fpmjax.work import Array

WORD = 32  # leaves per word
MOST_BYTES = 1 << 26  # of all masks
MOST_WORDS = 8  # of one tree: putting down a mask takes time with its square
TOGETHER = 16  # rows ANDed before the next ones are fetched; few enough for registers, and for the compiler


@pytree()
class Cuts:
    """Thresholds on the features that trees look at, of every store.

    at: float64 [stores, features, c], rising, c a power of two and more than any has, +inf where there are no more.
    """

    at: Array

    def codes(self, xp: Any, store: Array, x: Array) -> Array:
        """int32 [n, features]: thresholds of store [n] below x [n, features]; -1 for NaN."""
        _, features, width = self.at.shape
        flat = self.at.reshape(-1)
        first = (store[:, None] * np.int32(features) + np.arange(features, dtype=np.int32)[None, :]) * np.int32(width)
        below = xp.zeros(x.shape, np.int32)
        step = width // 2
        while step:
            further = flat[first + below + np.int32(step - 1)] < x
            below = below + xp.where(further, np.int32(step), np.int32(0))
            step //= 2
        return xp.where(xp.isnan(x), np.int32(-1), below)


@pytree()
class Masks:
    """bits: uint32 [rows, words], the leaves that a code allows, the first leaf in the highest bit.
    first: int32 [stores, features], the row of code -1.
    value: float64 [stores, words, 33], of the leaves; 0 behind the last one, where a word has none left.
    """

    bits: Array
    first: Array
    value: Array

    def total(self, xp: Any, start: Array, store: Array, codes: Array) -> Array:
        """float64 [n]: start [n] and the sum over trees, on the host in their order."""
        rows = self.first[store] + codes + np.int32(1)
        _, words, leaves = self.value.shape
        place = np.arange(words, dtype=np.int32) * np.int32(leaves)
        offset = store * np.int32(words * leaves)
        value = self.value.reshape(-1)
        if xp is np:
            left = np.bitwise_and.reduce(self.bits[rows], axis=1)
            leaf = (WORD - np.frexp(left)[1]).astype(np.int32)
            return in_order(start, value[offset[:, None] + place[None, :] + leaf])
        features = rows.shape[1]
        groups = -(-features // TOGETHER)
        together = -(-features // groups)
        rows = xp.pad(rows, ((0, 0), (0, groups * together - features)), mode="edge").reshape(-1, groups, together)

        def one(query: tuple[Array, Array]) -> Array:
            rows, offset = query

            def narrow(left: Array, some: Array) -> tuple[Array, None]:
                for i in range(some.shape[0]):
                    left = left & row(self.bits, some[i])
                return left, None

            left, _ = lax.scan(narrow, xp.full(words, np.uint32(0xFFFFFFFF)), rows)
            leaf = lax.clz(left).astype(np.int32)
            return row(value, offset + place + leaf).sum()

        return start + each(one, (rows, offset))

    def check(self, stores: int, features: int, most: Array) -> None:
        """ValueError where the arrays do not fit each other; most: thresholds per store and feature."""
        rows, words = np.shape(self.bits)
        of_type(self.bits, "bits", np.uint32, rows, words)
        of_type(self.value, "value", np.float64, stores, words, WORD + 1)
        first = of_type(self.first, "first", np.int32, stores, features)
        if (first < 0).any() or (first + most + 2 > rows).any() or not words:
            raise ValueError("rows of the masks are missing")


@pytree()
class Walk:
    """Nodes of all trees behind each other.

    left, right, feature, cut: int32 [nodes]; a leaf is its own child.  missing_left: bool [nodes].
    value: float64 [nodes], 0 at inner nodes.  root: int32 [stores, trees].
    """

    left: Array
    right: Array
    feature: Array
    cut: Array
    missing_left: Array
    value: Array
    root: Array

    def total(self, xp: Any, start: Array, store: Array, codes: Array) -> Array:
        """float64 [n]: start [n] and the sum over trees, on the host in their order."""

        def down(node: Array, code: Array) -> Array:
            left = xp.where(code < 0, self.missing_left[node], code <= self.cut[node])
            return xp.where(left, self.left[node], self.right[node])

        if xp is np:
            node, query = self.root[store], np.arange(len(store))[:, None]
            while np.any((below := down(node, codes[query, self.feature[node]])) != node):
                node = below
            return in_order(start, self.value[node])

        def one(query: tuple[Array, Array]) -> Array:
            store, code = query

            def step(nodes: tuple[Array, Array]) -> tuple[Array, Array]:
                _, node = nodes
                return node, down(node, code[self.feature[node]])

            root = self.root[store]
            node, _ = lax.while_loop(lambda nodes: (nodes[0] != nodes[1]).any(), step, (xp.full_like(root, -1), root))
            return self.value[node].sum()

        return start + each(one, (store, codes))

    def check(self, stores: int, features: int, most: Array) -> None:
        """ValueError where the arrays do not fit each other; most: thresholds per store and feature."""
        n = len(self.value)
        of_type(self.value, "value", np.float64, n)
        of_type(self.missing_left, "missing_left", np.bool_, n)
        of_type(self.cut, "cut", np.int32, n)
        feature = of_type(self.feature, "feature", np.int32, n)
        root = of_type(self.root, "root", np.int32, stores, np.shape(self.root)[-1])
        children = [of_type(getattr(self, name), name, np.int32, n) for name in ("left", "right")]
        own = np.arange(n)
        backward = any((child < own).any() or (child >= n).any() for child in children)
        if backward or (root < 0).any() or (root >= n).any() or (feature < 0).any() or (feature >= features).any():
            raise ValueError("nodes lead nowhere, or back")


def of_type(x: Array, name: str, dtype: Any, *shape: int) -> np.ndarray:
    """The array on the host; ValueError for another type or shape."""
    x = np.asarray(x)
    if x.dtype != dtype or x.shape != shape:
        raise ValueError(f"{name} is {x.dtype} of shape {x.shape} instead of {np.dtype(dtype)} of shape {shape}")
    return x


def row(table: Array, i: Array) -> Array:
    return table.at[i].get(mode="promise_in_bounds")


def each(one: Any, queries: Any) -> Array:
    """`one` of every query.  On a CPU a query fills the vector unit, and its rows are read as they stand."""
    if jax.default_backend() == "cpu":
        return lax.map(one, queries)
    return lax.map(one, queries, batch_size=1 << 12)


def in_order(start: Array, values: Array) -> Array:
    """start [n] and the sum of values [n, trees], first to last, as the peer sums."""
    return np.cumsum(np.concatenate([start[:, None], values], -1), -1)[:, -1]


# Building


def compile_trees(stores: Sequence[Store], used: Sequence[int]) -> tuple[list[list[np.ndarray]], Masks | Walk]:
    """(distinct thresholds per store and used feature, the trees over their codes).

    used: the features of the artifact that some inner node looks at, rising.
    """
    place = {feature: i for i, feature in enumerate(used)}
    cuts = [[thresholds_on(store, feature) for feature in used] for store in stores]
    nodes = [[coded(tree, mine, place) for tree in store.trees] for store, mine in zip(stores, cuts, strict=True)]
    leaves = [[count_leaves(tree) for tree in trees] for trees in nodes]
    largest = max([-(-n // WORD) for counts in leaves for n in counts], default=1)
    words = max(1, *(sum(-(-n // WORD) for n in counts) for counts in leaves))
    rows = sum(len(cut) + 2 for mine in cuts for cut in mine)
    if largest > MOST_WORDS or rows * words * 4 > MOST_BYTES:
        return cuts, compile_walk(nodes)
    return cuts, compile_masks(nodes, cuts, leaves, words)


def thresholds_on(store: Store, feature: int) -> np.ndarray:
    found = [t.threshold[~t.leaf & (t.feature == feature)] for t in store.trees]
    return np.unique(np.concatenate([*found, np.empty(0)]))


class Nodes(NamedTuple):
    """A tree over codes: children as they stand in the tree, int64 [nodes]; a leaf has left -1."""

    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    cut: np.ndarray
    missing_left: np.ndarray
    value: np.ndarray


def coded(tree: Tree, cuts: Sequence[np.ndarray], place: dict[int, int]) -> Nodes:
    feature, cut = np.zeros(len(tree.value), np.int64), np.zeros(len(tree.value), np.int64)
    for i in np.flatnonzero(~tree.leaf).tolist():
        feature[i] = place[int(tree.feature[i])]
        cut[i] = np.searchsorted(cuts[feature[i]], tree.threshold[i])
    return Nodes(tree.left, tree.right, feature, cut, tree.missing_left, tree.value)


def count_leaves(tree: Nodes) -> int:
    """Paths from the root to leaves, at most `MOST_BYTES`: where nodes share a child there are more than leaves."""
    left, right = tree.left.tolist(), tree.right.tolist()
    paths = [1] * len(left)
    for i in reversed(range(len(left))):
        if left[i] >= 0:
            paths[i] = min(paths[left[i]] + paths[right[i]], MOST_BYTES)
    return paths[0]


def compile_masks(nodes: list[list[Nodes]], cuts: list[list[np.ndarray]], leaves: list[list[int]], words: int) -> Masks:
    sizes = [[len(cut) + 2 for cut in mine] for mine in cuts]
    stores, features = len(cuts), len(cuts[0])
    first = np.cumsum([0, *[n for mine in sizes for n in mine]])[:-1].astype(np.int32).reshape(stores, features)
    value = np.zeros((stores, words, WORD + 1))
    bits = np.zeros((sum(map(sum, sizes)), words), np.uint32)
    start = 0
    for s, trees in enumerate(nodes):
        stop = start + sum(sizes[s])
        word = 0
        for tree, count in zip(trees, leaves[s], strict=True):
            more = -(-count // WORD)
            block = np.broadcast_to(bits_of(0, count, more)[:, None], (more, stop - start)).copy()
            at = value[s, word : word + more, :WORD].reshape(-1)  # a copy
            narrow_down(tree, block, first[s] - start, sizes[s], at)
            value[s, word : word + more, :WORD] = at.reshape(more, WORD)
            bits[start:stop, word : word + more] = block.T
            word += more
        start = stop
    return Masks(bits, first, value)


def narrow_down(tree: Nodes, block: np.ndarray, first: np.ndarray, sizes: Sequence[int], value: np.ndarray) -> None:
    """Take the leaves out of `block`, uint32 [words, rows], that a code rules out, and put down their values.

    Leaves are numbered from left to right, so those below a node are one range; a shared child has several.
    """
    left, right, feature, cut, missing_left = (x.tolist() for x in tree[:5])
    words = len(block)
    numbered = 0
    pending: list[tuple[int, int, int]] = [
        (0, -1, -1)
    ]  # (node, first leaf, first leaf on the right; -1: not yet known)
    while pending:
        node, begin, middle = pending.pop()
        if left[node] < 0:
            value[numbered] = tree.value[node]
            numbered += 1
        elif begin < 0:
            pending += [(node, numbered, -1), (left[node], -1, -1)]
        elif middle < 0:
            pending += [(node, begin, numbered), (right[node], -1, -1)]
        else:
            off_left, off_right = (
                ~bits_of(*leaves, words)[:, None] for leaves in ((middle, numbered), (begin, middle))
            )
            row, end = first[feature[node]], first[feature[node]] + sizes[feature[node]]
            split = row + 2 + cut[node]  # codes up to `cut` go left
            block[:, row + 1 : split] &= off_left
            block[:, split:end] &= off_right
            block[:, row : row + 1] &= off_left if missing_left[node] else off_right


def bits_of(begin: int, end: int, words: int) -> np.ndarray:
    """uint32 [words]: the bits of leaves begin to end, exclusive."""
    place = np.arange(words, dtype=np.int64) * WORD
    low, high = np.clip(begin - place, 0, WORD), np.clip(end - place, 0, WORD)
    full = np.int64(1) << np.int64(WORD)
    return ((full >> low) - (full >> high)).astype(np.uint32)


def compile_walk(nodes: list[list[Nodes]]) -> Walk:
    most = max(map(len, nodes))
    root = np.zeros((len(nodes), most), np.int32)  # node 0 is a leaf of 0: the trees that a store has fewer
    none, zero = np.full(1, -1), np.zeros(1, np.int64)
    empty = Nodes(none, none, zero, zero, zero > 0, np.zeros(1))
    parts, start = [linked(empty, 0)], 1
    for s, trees in enumerate(nodes):
        for t, tree in enumerate(trees):
            root[s, t] = start
            parts.append(linked(tree, start))
            start += len(tree.value)
    all_nodes = Nodes._make(np.concatenate(x) for x in zip(*parts, strict=True))
    left, right, feature, cut = (x.astype(np.int32) for x in all_nodes[:4])
    return Walk(left, right, feature, cut, all_nodes.missing_left, all_nodes.value, root)


def linked(tree: Nodes, start: int) -> Nodes:
    """The tree as it stands behind `start` nodes; leaves lead to themselves."""
    leaf = tree.left < 0
    own = np.arange(len(leaf)) + start
    left, right = (np.where(leaf, own, child + start) for child in tree[:2])
    return tree._replace(left=left, right=right, value=np.where(leaf, tree.value, 0.0))
