"""The progress bar: updates done, reward, response length, entropy, tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

# what the bar shows: label, metrics in order of preference, format
_SHOWN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/rewards/mean", "critic/score/mean"), "{:.3f}"),
    ("loss", ("actor/loss",), "{:.4f}"),
    ("length", ("response_length/mean",), "{:.1f}"),
    ("entropy", ("actor/entropy",), "{:.3f}"),
    ("tokens/s", ("perf/throughput",), "{:,.0f}"),
)


def summary(metrics: Mapping[str, float | int | None]) -> dict[str, str]:
    """The few values worth a glance, as text; those that were not measured are left out."""
    shown = {}
    for label, names, form in _SHOWN:
        value = next((metrics[name] for name in names if metrics.get(name) is not None), None)
        if value is not None:
            shown[label] = form.format(value)
    return shown


def byte_bar(num_bytes: int, name: str, *, shown: bool, file: TextIO | None = None) -> tqdm:
    """A bar over the bytes of a transfer, with GB/s and the time left; `update` takes bytes. A context.

    It appears after 2 s, so that short transfers leave the terminal alone.
    """
    return tqdm(
        total=num_bytes,
        desc=name,
        unit="B",
        unit_scale=True,
        disable=not shown,
        file=file,
        delay=2,
        dynamic_ncols=True,
    )


class Progress:
    """A bar over the updates of a run; held-out accuracy stays in it between evaluations."""

    def __init__(self, updates: int, *, name: str, done: int = 0, file: TextIO | None = None) -> None:
        self._bar = tqdm(
            total=updates, initial=done, desc=name, unit="update", file=file, dynamic_ncols=True, smoothing=0.1
        )
        self._held_out: dict[str, str] = {}

    def show(self, step: int, metrics: Mapping[str, float | int | None], accuracy: float | None) -> None:
        """Move to `step` and show its metrics."""
        if accuracy is not None:
            self._held_out = {"held-out": f"{accuracy:.3f}"}
        self._bar.update(step - self._bar.n)
        self._bar.set_postfix({**summary(metrics), **self._held_out}, refresh=True)

    def close(self) -> None:
        self._bar.close()
