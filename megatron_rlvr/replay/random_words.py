"""A resumable stream of uniform numbers whose place is one integer."""

from __future__ import annotations

import numpy as np

_STREAM = 0x565352  # apart from the prompt order, which draws on Philox with the same seed and the epoch


class RandomWords:
    """Uniform numbers in [0, 1) from raw Philox words, whose stream NumPy keeps fixed across its versions."""

    def __init__(self, seed: int, taken: int = 0) -> None:
        self._words = np.random.Philox(key=np.array([seed, _STREAM], dtype=np.uint64))
        self._words.advance(taken // 4)  # a step of the counter makes four words
        self._words.random_raw(taken % 4)
        self.taken = taken

    def uniform(self, count: int) -> list[float]:
        """The next `count` multiples of 2^-53."""
        self.taken += count
        words: list[int] = self._words.random_raw(count).tolist()
        return [(word >> 11) * 2.0**-53 for word in words]
