"""Sums over a changing list of weights: which item does a point of the total fall on, in O(log n)."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import ArrayLike


class SumTree:
    """A complete binary tree over non-negative float64 weights; items are 0 .. capacity - 1, unused ones weigh 0.

    Each inner node is always the float sum of its two children, never a running difference: after any history of
    changes the tree equals, bit for bit, the one built from its weights at once. Growing keeps the subtrees, so that
    `find` depends on the weights alone. `array` beats NumPy where one item at a time is read.
    """

    def __init__(self, weights: ArrayLike = ()) -> None:
        self._build(np.asarray(weights, dtype=np.float64))

    @property
    def total(self) -> float:
        return self._nodes[1]

    def weight(self, item: int) -> float:
        """The weight of `item`, which has been set."""
        return self._nodes[self._capacity + item]

    def set(self, item: int, weight: float) -> None:
        """Give `item` (0 or more; the tree grows) its weight."""
        while item >= self._capacity:
            self._build(np.pad(np.array(self._nodes[self._capacity :]), (0, self._capacity)))
        nodes, node = self._nodes, self._capacity + item
        nodes[node] = weight
        while node > 1:
            node >>= 1
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]

    def find(self, point: float) -> int:
        """The item that `point` in [0, total) falls on, never one of weight 0 while the total is positive."""
        nodes, node = self._nodes, 1
        while node < self._capacity:
            node *= 2
            left = nodes[node]
            if point >= left and nodes[node + 1] > 0.0:  # rounding may leave `point` a little past the last item
                point -= left
                node += 1
        return node - self._capacity

    def _build(self, leaves: np.ndarray) -> None:
        self._capacity = 1 << max(len(leaves) - 1, 0).bit_length()
        self._nodes = array("d", bytes(16 * self._capacity))  # the root at 1, the children of k at 2k and 2k + 1
        nodes, first = np.frombuffer(self._nodes), self._capacity
        nodes[first : first + len(leaves)] = leaves
        while first > 1:
            nodes[first // 2 : first] = nodes[first : 2 * first : 2] + nodes[first + 1 : 2 * first : 2]
            first //= 2
