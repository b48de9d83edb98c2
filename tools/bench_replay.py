"""Cost of keeping and drawing prefixes in proportion to sigma-hat, three ways.

    python tools/bench_replay.py [--prefixes 1e6 1e7] [--length 1000] [--stride 1] [--draws 2000] [--json FILE]

    buffer    megatron_rlvr.replay.PrefixBuffer: a sum tree over trajectories, running sums within each
    choice    one flat array of weights; Generator.choice(p=...) reads all of it in every call
    sum tree  one leaf per prefix in the same tree that `buffer` uses over trajectories, prefixes set one by one

`insert` is per prefix, tokens copied and scores computed in all three (the sum tree's is measured on the last 20,000
prefixes); `choice` has to normalise its array once more after each change, which is not counted. `draw 1` is one call
for one prefix, `draw 64` a call for 64, per prefix; the smallest of three passes. Times are the process's CPU time,
which other programs on the machine do not lengthen. `bytes` is what each prefix takes beyond the trajectories' int32
tokens, by tracemalloc. Responses have `length`/2 to 3/2 `length` tokens after a prompt of 64, p0 in eighths.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_rlvr.replay import PrefixBuffer, prefix_score
from megatron_rlvr.replay.sum_tree import SumTree

PROMPT_LENGTH = 64
BATCH = 64
TREE_SAMPLE = 20_000


class Case(Protocol):
    """A way to keep prefixes; `insert_seconds` holds the CPU time per prefix."""

    insert_seconds: float

    def draw(self, count: int) -> list[NDArray[np.int32]]: ...


def trajectories(prefixes: int, length: int, stride: int) -> list[tuple[int, float]]:
    """(response length, p0) of trajectories that make about `prefixes` prefixes."""
    generator, made, total = np.random.default_rng(0), [], 0
    while total < prefixes:
        tokens = int(generator.integers(max(length // 2, 1), length + length // 2 + 1))
        made.append((tokens, int(generator.integers(1, 9)) / 8 - 0.125))
        total += -(-tokens // stride)
    return made


class Buffer:
    def __init__(self, lengths: list[tuple[int, float]], stride: int) -> None:
        self.buffer, tokens = PrefixBuffer(None, stride), token_source(lengths)
        start = time.process_time()
        for number, (length, rate) in enumerate(lengths):
            self.buffer.insert(str(number), tokens[: PROMPT_LENGTH + length], PROMPT_LENGTH, rate, 0)
        self.insert_seconds = (time.process_time() - start) / len(self.buffer)

    def draw(self, count: int) -> list[NDArray[np.int32]]:
        return [prefix.token_ids for prefix in self.buffer.draw(count)]


class Flat:
    """Trajectories, and per prefix its trajectory and position (int32 both) and weight."""

    def __init__(self, lengths: list[tuple[int, float]], stride: int) -> None:
        self.generator, self.stored, tokens = np.random.default_rng(0), [], token_source(lengths)
        owners, positions, weights = [], [], []
        start = time.process_time()
        for number, (length, rate) in enumerate(lengths):
            self.stored.append(tokens[: PROMPT_LENGTH + length].copy())
            positions.append(np.arange(0, length, stride, dtype=np.int32))
            owners.append(np.full(len(positions[-1]), number, dtype=np.int32))
            weights.append(np.asarray(prefix_score(positions[-1], length, rate)))
        self.owners, self.positions = np.concatenate(owners), np.concatenate(positions)
        self.weights = np.concatenate(weights)
        self.insert_seconds = (time.process_time() - start) / len(self.weights)

    def tokens_of(self, prefix: int) -> NDArray[np.int32]:
        return self.stored[self.owners[prefix]][: PROMPT_LENGTH + self.positions[prefix]]


class Choice(Flat):
    def __init__(self, lengths: list[tuple[int, float]], stride: int) -> None:
        super().__init__(lengths, stride)
        self.weights /= self.weights.sum()

    def draw(self, count: int) -> list[NDArray[np.int32]]:
        chosen = self.generator.choice(len(self.weights), size=count, p=self.weights)
        return [self.tokens_of(prefix) for prefix in chosen]


class Tree(Flat):
    def __init__(self, lengths: list[tuple[int, float]], stride: int) -> None:
        super().__init__(lengths, stride)
        self.tree = SumTree(self.weights)
        last = self.weights[-TREE_SAMPLE:].tolist()
        first, start = len(self.weights) - len(last), time.process_time()
        for number, weight in enumerate(last):
            self.tree.set(first + number, weight)
        self.insert_seconds += (time.process_time() - start) / len(last)
        del self.weights

    def draw(self, count: int) -> list[NDArray[np.int32]]:
        points = self.generator.random(count) * self.tree.total
        return [self.tokens_of(self.tree.find(point)) for point in points.tolist()]


CASES: dict[str, Callable[[list[tuple[int, float]], int], Case]] = {
    "buffer": Buffer,
    "choice": Choice,
    "sum tree": Tree,
}


def token_source(lengths: list[tuple[int, float]]) -> NDArray[np.int32]:
    """The longest prompt and response, of which each trajectory copies its part."""
    return np.arange(PROMPT_LENGTH + max(length for length, _ in lengths), dtype=np.int32)


def draw_seconds(case: Case, count: int, draws: int, budget: float = 2.0) -> float:
    """Smallest CPU time per prefix of three passes of `draws` prefixes, each cut off after `budget` seconds."""
    passes = []
    for _ in range(3):
        start, done = time.process_time(), 0
        while done < draws and time.process_time() - start < budget:
            done += len(case.draw(count))
        passes.append((time.process_time() - start) / done)
    return min(passes)


def bytes_per_prefix(make: Callable[[], Case], token_bytes: int, prefixes: int) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
        del kept
    finally:
        tracemalloc.stop()
    return (used - token_bytes) / prefixes


def measure(name: str, prefixes: int, length: int, stride: int, draws: int) -> dict[str, float | str]:
    lengths = trajectories(prefixes, length, stride)
    exact = sum(-(-tokens // stride) for tokens, _ in lengths)
    case = CASES[name](lengths, stride)
    row: dict[str, float | str] = {
        "case": name,
        "prefixes": exact,
        "insert_us": case.insert_seconds * 1e6,
        "draw_1_us": draw_seconds(case, 1, draws) * 1e6,
        f"draw_{BATCH}_us": draw_seconds(case, BATCH, draws) * 1e6,
    }
    del case
    token_bytes = 4 * sum(PROMPT_LENGTH + tokens for tokens, _ in lengths)
    return {**row, "bytes": bytes_per_prefix(lambda: CASES[name](lengths, stride), token_bytes, exact)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", type=float, nargs="+", default=[1e6, 1e7], help="sizes of the buffer")
    parser.add_argument("--length", type=int, default=1000, help="mean response length in tokens")
    parser.add_argument("--stride", type=int, default=1, help="tokens between prefixes")
    parser.add_argument("--draws", type=int, default=2000, help="prefixes drawn per pass")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    chosen = parser.parse_args()
    if min(*chosen.prefixes, chosen.length, chosen.stride, chosen.draws) < 1:
        parser.error("--prefixes, --length, --stride and --draws must be 1 or more")
    return chosen


def main() -> None:
    chosen = arguments()
    print(f"{'case':<9} {'prefixes':>10} {'insert us':>10} {'draw 1 us':>12} {'draw 64 us':>12} {'bytes':>7}")
    rows = []
    for prefixes in chosen.prefixes:
        for name in CASES:
            row = measure(name, int(prefixes), chosen.length, chosen.stride, chosen.draws)
            rows.append(row)
            print(
                f"{row['case']:<9} {row['prefixes']:>10,} {row['insert_us']:>10.3f} {row['draw_1_us']:>12,.1f} "
                f"{row[f'draw_{BATCH}_us']:>12,.1f} {row['bytes']:>7.2f}",
                flush=True,
            )
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
