"""A 7x7 maze: cells, moves and distances. Moving into a wall or out of the grid stays where it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUT = (
    "S..#...",
    ".#.#.#.",
    ".#...#.",
    ".####..",
    "...#..#",
    "##...#.",
    "...#..G",
)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


@dataclass(frozen=True)
class Maze:
    """n free cells, numbered in reading order.

    cells      (row, column) of each
    moves      [n, 4] int64     the cell that each action leads to
    start, goal                 numbers of S and G
    distance   [n] float64      least number of moves to the goal
    """

    cells: tuple[tuple[int, int], ...]
    moves: Tensor
    start: int
    goal: int
    distance: Tensor


def read_maze(layout: tuple[str, ...] = LAYOUT) -> Maze:
    """A drawing of S, G, free cells (.) and walls (#). Raises ValueError where a free cell cannot reach the goal."""
    marks = {(i, j): mark for i, row in enumerate(layout) for j, mark in enumerate(row) if mark != "#"}
    number = {cell: k for k, cell in enumerate(marks)}
    moves = [[number.get((i + di, j + dj), number[i, j]) for di, dj in MOVES] for i, j in marks]
    start, goal = (next(number[cell] for cell, mark in marks.items() if mark == which) for which in "SG")
    distance = {goal: 0}
    queue = [goal]
    for cell in queue:  # moves are symmetric, so a walk from the goal finds the way to it
        fresh = [other for other in moves[cell] if other not in distance]
        distance |= dict.fromkeys(fresh, distance[cell] + 1)
        queue += dict.fromkeys(fresh)
    if len(distance) < len(marks):
        raise ValueError(f"{len(marks) - len(distance)} free cells cannot reach the goal")
    steps = torch.tensor([distance[k] for k in range(len(marks))], dtype=torch.float64)
    return Maze(tuple(marks), torch.tensor(moves), start, goal, steps)
