"""Sums over a changing list of weights: which item does a point of the total fall on, in O(log n)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class SumTree:
    """A complete binary tree over non-negative float64 weights; items are 0 .. capacity - 1, unused ones weigh 0.

    Each inner node is always the float sum of its two children, never a running difference: after any history of
    changes the tree equals, bit for bit, the one built from its weights at once. Growing keeps the subtrees, so that
    `find` depends on the weights alone. An array of C doubles beats NumPy here: one item at a time is read.
    """

    def __init__(self, weights: Iterable[float] = ()) -> None:
        self._build(array("d", weights))

    @property
    def total(self) -> float:
        return self._nodes[1]

    def set(self, item: int, weight: float) -> None:
        """Give `item` (0 or more; the tree grows) its weight."""
        while item >= self._capacity:
            self._build(self._nodes[self._capacity :] + array("d", bytes(8 * self._capacity)))
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

    def _build(self, leaves: array[float]) -> None:
        self._capacity = 1 << max(len(leaves) - 1, 0).bit_length()
        self._nodes = array("d", bytes(16 * self._capacity))  # the root at 1, the children of k at 2k and 2k + 1
        self._nodes[self._capacity : self._capacity + len(leaves)] = leaves
        for node in range(self._capacity - 1, 0, -1):
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]
