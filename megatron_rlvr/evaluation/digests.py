"""Contents in a few digits, so that a resumed evaluation goes on with the same model and problems or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_rlvr.types import UserError

_WHOLE_FILE, _PIECE = 8 << 20, 1 << 20


def model_digest(path: Path) -> str:
    """Digest of a checkpoint's config, tokenizer, chat template and weights."""
    patterns = ("config.json", "tokenizer*", "*.jinja", "*.safetensors")
    files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    return _short(b"".join(file.name.encode() + file_digest(file).encode() for file in files))


def file_digest(path: Path) -> str:
    """Digest of a file; over 8 MiB, of its size and its first, middle and last MiB: training moves all of a tensor.

    Raises UserError where it cannot be read.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            if size <= _WHOLE_FILE:
                return _short(file.read())
            pieces = [str(size).encode()]
            for start in (0, size // 2, size - _PIECE):
                file.seek(start)
                pieces.append(file.read(_PIECE))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a file that exists") from None
    return _short(b"".join(pieces))


def text_digest(*texts: str) -> str:
    """Digest of texts in their order."""
    return _short(b"".join(hashlib.sha256(text.encode(errors="surrogatepass")).digest() for text in texts))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
