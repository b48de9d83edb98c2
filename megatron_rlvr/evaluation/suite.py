"""The typed tree of a suite: which benchmarks, how each is sampled, by what engine, what judges, what is averaged.

Two suites are shipped: `respo` and `proximal_kl`, as those papers evaluate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_rlvr.config.load import build_tree, parse_yaml, read_tree, with_overrides
from megatron_rlvr.config.tree import DataPath, FilePath, Section
from megatron_rlvr.types import UserError

INSTRUCTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
OPENAI = "openai:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A shortcut for the two that every call sets; everything else goes by its place in the tree.
_SHORT = {"model": "model", "engine": "engine.name"}


class BenchmarkConfig(Section):
    """One problem set and how it is sampled."""

    data: DataPath = Field(description="JSONL, JSON or parquet file, folder of these, or hub:<published set>")
    samples: PositiveInt = Field(1, description="responses to each problem")
    greedy: bool = Field(False, description="arg-max decoding, one response to each problem")
    temperature: PositiveFloat = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, description="-1: no top-k")
    max_response_length: PositiveInt = Field(16384, description="cap in tokens")
    prompt_key: str = "problem"
    answer_key: str = "answer"
    problems: PositiveInt | None = Field(None, description="how many the published set has; another number is refused")
    first: PositiveInt | None = Field(None, description="only the first n problems; default: all")


class PromptConfig(Section):
    """How problems become prompts; what is not set is as in the run that `model` names."""

    chat_template: bool | None = Field(None, description="default: the run's, else true")
    suffix: str | None = Field(None, description="default: the run's, else the boxed-answer instruction")
    max_prompt_length: PositiveInt = Field(2048, description="tokens")


class EngineConfig(Section):
    """What samples. The keys after `name` are of in-process engines, those in `openai` of a server."""

    name: str = Field("vllm", description="vllm, transformers, or openai:URL of a server such as http://host:8000/v1")
    precision: Literal["float32", "bf16"] = "bf16"
    max_num_seqs: PositiveInt = 256
    kv_cache_gb: PositiveFloat | None = None
    memory_utilization: float = Field(0.9, gt=0, lt=1)
    enforce_eager: bool = False
    requests: PositiveInt = Field(
        1024, description="responses sampled between two writes to the disk: what a kill may cost"
    )
    served_model: str | None = Field(None, description="openai: the model's name there; default: `model`")
    concurrency: PositiveInt = Field(64, description="openai: requests that are open at once")
    timeout: PositiveFloat = Field(1800.0, description="openai: seconds of silence after which a request is repeated")
    retries: int = Field(5, ge=0, description="openai: repetitions of a failed request")
    key_file: FilePath | None = Field(None, description="openai: file that holds the API key")

    @property
    def url(self) -> str | None:
        """The server's address; None for an engine of our own."""
        return self.name.removeprefix(OPENAI).rstrip("/") if self.name.startswith(OPENAI) else None


class VerifierConfig(Section):
    """What judges responses; keys as in a run's `rewards`."""

    name: Literal["strict_box", "normalized_box", "math_verify", "custom"] = "math_verify"
    function: str | None = Field(None, description='custom: import path "package.module:function"')
    guard: bool = Field(False, description="math_verify: reject other units, bases and brackets that it lets pass")
    workers: PositiveInt = Field(2, description="verifier processes")
    timeout: PositiveFloat = Field(30.0, description="seconds for one response, then it counts as wrong")
    memory_gb: PositiveFloat = Field(2.0, description="GiB that a verifier process may take")


class BootstrapConfig(Section):
    resamples: int = Field(10_000, ge=2)
    seed: int = Field(0, ge=0)


class SuiteConfig(Section):
    """A suite with the model that it evaluates."""

    suite: str = Field(description="name of the suite")
    model: str = Field(description="Hugging Face directory, run directory, or a served model's name")
    output: FilePath = Field(description="directory of generations, scores, tables and plots")
    seed: int = Field(0, ge=0, lt=2**31)
    average: Literal["macro", "micro"] = Field(
        "macro", description="macro: benchmarks count alike; micro: responses count alike"
    )
    prompt: PromptConfig = PromptConfig()
    engine: EngineConfig = EngineConfig()
    verifier: VerifierConfig = VerifierConfig()
    bootstrap: BootstrapConfig = BootstrapConfig()
    length_bins: int = Field(10, ge=2)
    benchmarks: dict[str, BenchmarkConfig] = Field(min_length=1)


def suite_names() -> list[str]:
    """The suites that are shipped."""
    return sorted(file.name.removesuffix(".yaml") for file in _folder().iterdir() if file.name.endswith(".yaml"))


def is_suite(source: str) -> bool:
    """Whether `source` names a shipped suite or a file with benchmarks; a file that cannot be read is none."""
    if _shipped(source):
        return True
    try:
        return "benchmarks" in read_tree(Path(source))
    except UserError:
        return False


def load_suite(source: str, overrides: Sequence[str] = ()) -> SuiteConfig:
    """The suite of a YAML file, or a shipped one by its name, with `key=value` overrides.

    `engine=NAME` is short for `engine.name=NAME`. Where no output is set it is runs/eval/<suite>/<model's folder>.
    Raises UserError: one sentence that names the key, its value and the remedy.
    """
    tree = _read(source)
    _spread_defaults(tree)
    with_overrides(tree, [_expand(override) for override in overrides])
    model = tree.get("model")
    if isinstance(model, str) and model:
        tree.setdefault("output", f"runs/eval/{tree.get('suite', 'suite')}/{_folder_name(model)}")
    else:
        tree.setdefault("output", "runs/eval")
    suite = build_tree(tree, SuiteConfig)
    _check(suite)
    return suite


def _read(source: str) -> dict[str, Any]:
    if not _shipped(source):
        return read_tree(Path(source))
    return parse_yaml((_folder() / f"{source}.yaml").read_text(encoding="utf-8"), f"suite {source}")


def _shipped(source: str) -> bool:
    return source in suite_names() and not Path(source).is_file()


def _folder() -> Any:
    return resources.files("megatron_rlvr.evaluation") / "suites"


def _spread_defaults(tree: dict[str, Any]) -> None:
    """`defaults` holds what all benchmarks have in common, so that a file says it once."""
    defaults, benchmarks = tree.pop("defaults", None) or {}, tree.get("benchmarks")
    if isinstance(defaults, dict) and isinstance(benchmarks, dict):
        for name, benchmark in benchmarks.items():
            if isinstance(benchmark, dict):
                benchmarks[name] = {**defaults, **benchmark}


def _expand(override: str) -> str:
    key, equals, value = override.partition("=")
    return f"{_SHORT.get(key.strip(), key)}{equals}{value}"


def _folder_name(model: str) -> str:
    """ "a/b/run/model" and "a/b/run" give "run"; characters that a folder's name should not have are dropped."""
    parts = [part for part in Path(model).parts if part not in ("/", "model")]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1]) if parts else "model"


def _check(suite: SuiteConfig) -> None:
    for name, benchmark in suite.benchmarks.items():
        if not _NAME.fullmatch(name):
            raise UserError(f"benchmark {name!r} names a file; use letters, digits, dots, dashes and underscores")
        if benchmark.greedy and benchmark.samples > 1:
            raise UserError(
                f"benchmarks.{name}.samples is {benchmark.samples}, but greedy decoding gives the same response each "
                "time; set samples to 1 or greedy to false"
            )
    engine = suite.engine
    if engine.name not in ("vllm", "transformers") and not engine.name.startswith(
        (f"{OPENAI}http://", f"{OPENAI}https://")
    ):
        raise UserError(
            f"engine {engine.name} is not known; use vllm, transformers or openai:URL such as "
            "openai:http://localhost:8000/v1"
        )
