"""The soft penalty on long responses (DAPO's overlong buffer, as the 30B runs use it)."""

from __future__ import annotations


def overlong_penalty(length: int, start: int = 4096, limit: int = 8192) -> float:
    """0 up to `start` tokens, then falling linearly to -1 at `limit` tokens, the cap on the response.

    Past `limit`, which a capped response cannot reach, the line goes on below -1.
    Raises ValueError unless 0 < start < limit.
    """
    if not 0 < start < limit:
        raise ValueError(f"overlong_penalty needs 0 < start < limit, got start={start}, limit={limit}")
    return -max(0.0, (length - start) / (limit - start))
