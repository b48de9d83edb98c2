"""Keys and tokens have no place in files: what looks like one is refused, without being shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rlvr.types import UserError

_NAMES = re.compile(
    r"(?:^|_)(?:token|secret|password|passwd|passphrase|credentials?|apikey|(?:api|access|secret|private|auth)_key)$|^key$"
)
_VALUES = re.compile(
    r"""\b(?:hf_|ghp_|gho_|glpat-|github_pat_|wandb_v\d_)[A-Za-z0-9_-]{16,}   # Hugging Face, GitHub, GitLab, W&B
    | \bsk-[A-Za-z0-9_-]{16,} | \bAKIA[0-9A-Z]{16}\b | \bxox[abp]-[0-9A-Za-z-]{10,}   # OpenAI and kin, AWS, Slack
    | -----BEGIN[ A-Z]*PRIVATE\ KEY----- | ://[^/\s:@]+:[^/\s:@$]+@   # keys in files, passwords in addresses
    | (?:^|[\s=:'"])[0-9a-f]{40}(?:$|[\s'"])   # W&B's older keys; in a path it is a revision of a model
    """,
    re.VERBOSE,
)
_ASSIGNMENT = re.compile(r"""([A-Za-z_][A-Za-z0-9_-]*)["']?\s*[=:]\s*(["']?)([^\s"']+)\2""")
_REFERENCE = re.compile(r"\$\{?[A-Za-z_]")  # a variable of the shell: what it holds is not in the file


def _names_a_secret(name: str) -> bool:
    return _NAMES.search(name.lower().replace("-", "_")) is not None


def _assigned(text: str) -> str | None:
    """The name of a secret that a line of shell or YAML sets, if there is one."""
    for name, _, value in _ASSIGNMENT.findall(text):
        if _names_a_secret(name) and not _REFERENCE.match(value):
            return str(name)
    return None


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    elif isinstance(tree, str):
        yield path, tree


def refuse_secrets(tree: Any, source: str) -> None:
    """Raise UserError where nested dicts and lists hold a key, by the name that holds it or by its look.

    source   file or command line, for the sentence; the value itself is never shown
    """
    for path, value in _leaves(tree):
        last = re.sub(r"\[\d+\]$", "", path).rpartition(".")[2]
        named = _names_a_secret(last) and value != "" and not _REFERENCE.match(value)
        if named or _VALUES.search(value) or _assigned(value):
            raise UserError(
                f"{source}: {path} holds what looks like a key; take it out and export it in the shell that submits, "
                "from where jobs inherit it"
            )


def refuse_secrets_in_text(text: str, source: str) -> None:
    """Raise UserError naming the first line of a script or template that holds a key."""
    for number, line in enumerate(text.splitlines(), start=1):
        if _VALUES.search(line) or _assigned(line):
            raise UserError(
                f"{source} line {number} holds what looks like a key; take it out and export it in the shell that "
                "submits, from where jobs inherit it"
            )
