"""`eval` of a suite: sample, score, tabulate; `eval rescore` and `eval compare` work from what it left on the disk.

The output directory holds suite.yaml (everything resolved), generations/<benchmark>.jsonl, scores.json, results.json,
results.md and plots/.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_rlvr.config.load import build_tree, dump_config, load_config, read_tree, with_overrides
from megatron_rlvr.config.tree import DataConfig, RunConfig
from megatron_rlvr.data import load_tokenizer
from megatron_rlvr.evaluation import compare as comparison
from megatron_rlvr.evaluation import results
from megatron_rlvr.evaluation.digests import model_digest
from megatron_rlvr.evaluation.engine_sampler import EngineSampler
from megatron_rlvr.evaluation.figures import draw
from megatron_rlvr.evaluation.generation import Sampler, generate, read_generations, read_problems, stored_responses
from megatron_rlvr.evaluation.openai_client import OpenAISampler, Server
from megatron_rlvr.evaluation.scoring import BenchmarkScores, load_scores, open_judge, save_scores, score
from megatron_rlvr.evaluation.suite import INSTRUCTION, SuiteConfig, is_suite, load_suite
from megatron_rlvr.files import write_whole
from megatron_rlvr.rollout.engine import Engine
from megatron_rlvr.types import UserError

WRITTEN = ("suite.yaml", "generations", "scores.json", "results.json", "results.md", "plots")
_RESCORED = ("verifier", "average", "bootstrap", "length_bins")


def is_command(source: str) -> bool:
    """Whether `eval SOURCE` is one of these commands and not a run's held-out evaluation."""
    return source in ("rescore", "compare") or is_suite(source)


def run_command(source: str, arguments: Sequence[str], overwrite: bool) -> None:
    """`eval SUITE key=value ...`, `eval rescore DIR key=value ...` or `eval compare DIR DIR ... output=DIR`.

    Prints the table. Raises UserError.
    """
    directories = [Path(argument) for argument in arguments if "=" not in argument]
    settings = [argument for argument in arguments if "=" in argument]
    if source == "compare":
        print(compare(directories, settings))
    elif source == "rescore":
        if len(directories) != 1:
            raise UserError(f"eval rescore takes one directory, not {len(directories)}; name the output of one `eval`")
        print(rescore(directories[0], settings))
    else:
        if directories:
            raise UserError(f"{directories[0]} is no key=value; write for example model=DIR engine=vllm")
        print(evaluate(load_suite(source, settings), overwrite))


def evaluate(suite: SuiteConfig, overwrite: bool = False) -> str:
    """Sample what is missing, score and write the results; returns the Markdown page."""
    suite, model = resolve(suite)
    problems = {name: read_problems(name, benchmark) for name, benchmark in suite.benchmarks.items()}
    with _open_sampler(suite, model) as sampler:
        for name, found in problems.items():
            sampler.check(found, suite.benchmarks[name])
        _prepare(suite, overwrite)
        identity = _identity(suite, model)
        total = sum(len(found) * suite.benchmarks[name].samples for name, found in problems.items())
        stored = sum(stored_responses(suite.output, name) for name in problems)
        with _progress(total, f"{suite.suite}: sampling", stored) as advance:
            for name, found in problems.items():
                generate(suite, name, found, sampler, identity, advance)
    return _finish(suite)


def rescore(directory: Path, overrides: Sequence[str]) -> str:
    """Judge stored generations again, with other settings of the verifier or the statistics; the Markdown page."""
    tree = _stored_suite(directory)
    for override in overrides:
        if override.partition("=")[0].partition(".")[0] not in _RESCORED:
            raise UserError(
                f"{override} cannot change without sampling again; `eval rescore` takes {', '.join(_RESCORED)}"
            )
    suite = build_tree(with_overrides(tree, overrides), SuiteConfig).model_copy(update={"output": directory})
    return _finish(suite)


def compare(directories: Sequence[Path], settings: Sequence[str]) -> str:
    """Paired contrasts of evaluated runs, written to `output` (default: comparison); the Markdown page."""
    if len(directories) < 2:
        raise UserError(f"eval compare takes at least two directories, not {len(directories)}; name outputs of `eval`")
    output = Path("comparison")
    for setting in settings:
        key, _, value = setting.partition("=")
        if key != "output":
            raise UserError(f"eval compare does not know {setting}; it takes directories and output=DIR")
        output = Path(value)
    suites = [build_tree(_stored_suite(directory), SuiteConfig) for directory in directories]
    labels = _labels(directories)
    runs = {label: load_scores(place / "scores.json") for label, place in zip(labels, directories, strict=True)}
    tree = comparison.compare(runs, dict(zip(labels, suites, strict=True)))
    page = comparison.markdown(tree)
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "comparison.json", _json(tree))
    write_whole(output / "comparison.md", _with_plots(page, draw(tree["runs"], output / "plots"), output))
    return page


def resolve(suite: SuiteConfig) -> tuple[SuiteConfig, Path | None]:
    """The suite with its prompt's defaults filled in, and the model's directory (None: a server has the model)."""
    model = None if suite.engine.url is not None else model_directory(suite.model)
    run = _data_of_run(model) if model is not None else None
    chat, suffix = (True, INSTRUCTION) if run is None else (run.chat_template, run.suffix)
    prompt = suite.prompt
    filled = {
        "chat_template": chat if prompt.chat_template is None else prompt.chat_template,
        "suffix": suffix if prompt.suffix is None else prompt.suffix,
    }
    return suite.model_copy(update={"prompt": prompt.model_copy(update=filled)}), model


def model_directory(model: str) -> Path:
    """The Hugging Face directory that `model` is, or that the run of that directory has written. Raises UserError."""
    path = Path(model).expanduser().absolute()
    for candidate in (path, path / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    raise UserError(
        f"model {model} is neither a Hugging Face directory nor a run directory with a model in it; name one, or give "
        "engine=openai:URL for a served model"
    )


def _data_of_run(model: Path) -> DataConfig | None:
    """The data section of the run that wrote the model: RUN/model or RUN/checkpoints/NAME; None for other models."""
    for root in (model.parent, model.parent.parent):
        if (root / "config.yaml").is_file() and (root / "metrics.jsonl").is_file():
            return load_config(root / "config.yaml").data
    return None


@contextmanager
def _open_sampler(suite: SuiteConfig, model: Path | None) -> Iterator[Sampler]:
    sampler: Sampler
    engine, prompt = suite.engine, suite.prompt
    if model is None:
        key = None if engine.key_file is None else _read_key(engine.key_file)
        served = engine.served_model or suite.model
        server = Server(str(engine.url), served, key, engine.timeout, engine.retries, engine.concurrency)
        sampler = OpenAISampler(server, chat=bool(prompt.chat_template), suffix=str(prompt.suffix))
    else:
        path = model
        sampler = EngineSampler(lambda: _start_engine(suite, path), load_tokenizer(path), prompt.model_dump())
    try:
        yield sampler
    finally:
        sampler.close()


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"engine.key_file {path} cannot be read ({error.strerror}); name a file with the key") from None


def _start_engine(suite: SuiteConfig, model: Path) -> Engine:
    """The engine on this process's device, long enough for every benchmark. Raises UserError where it refuses."""
    import torch

    from megatron_rlvr.hf import read_model_spec
    from megatron_rlvr.rollout.factory import build_engine

    engine = suite.engine
    keys = ("precision", "max_num_seqs", "kv_cache_gb", "memory_utilization", "enforce_eager")
    longest = max(benchmark.max_response_length for benchmark in suite.benchmarks.values())
    rollout = {key: getattr(engine, key) for key in keys} | {"engine": engine.name, "max_response_length": longest}
    tree = {
        "run_dir": suite.output,
        "seed": suite.seed,
        "model": {"path": model},
        "data": {"max_prompt_length": suite.prompt.max_prompt_length},
        "rollout": rollout,
    }
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return build_engine(RunConfig.model_validate(tree), read_model_spec(model), device)


def _identity(suite: SuiteConfig, model: Path | None) -> dict[str, Any]:
    """What responses depend on beside the benchmark: another model or prompt must not go on with these journals."""
    if model is None:
        served = suite.engine.served_model or suite.model
        return {"served_model": served, "prompt": suite.prompt.model_dump()}
    engine = {"precision": suite.engine.precision, "max_num_seqs": suite.engine.max_num_seqs}
    return {"model": model_digest(model), "prompt": suite.prompt.model_dump(), **engine}


def _prepare(suite: SuiteConfig, overwrite: bool) -> None:
    """The output directory with its suite.yaml; with `overwrite`, without what an earlier evaluation left."""
    output = suite.output
    try:
        output.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for name in WRITTEN:
                _remove(output / name)
    except OSError as error:
        raise UserError(f"output {output} cannot be made ({error.strerror}); name another directory") from None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _finish(suite: SuiteConfig) -> str:
    """Score what is stored and write scores, results, table and plots."""
    scores = _score(suite)
    tree = results.summarise(suite, scores)
    page = results.markdown(tree)
    output = suite.output
    write_whole(output / "suite.yaml", dump_config(suite).encode())
    save_scores(scores, output / "scores.json")
    write_whole(output / "results.json", _json(tree))
    plots = draw({suite.model: tree}, output / "plots")
    write_whole(output / "results.md", _with_plots(page, plots, output))
    return page


def _score(suite: SuiteConfig) -> dict[str, BenchmarkScores]:
    rows = {name: read_generations(suite.output, name) for name in suite.benchmarks}
    total = sum(len(row["responses"]) for found in rows.values() for row in found)
    with open_judge(suite.verifier) as judge, _progress(total, f"{suite.suite}: scoring") as advance:
        return {
            name: score(found, suite.benchmarks[name].max_response_length, judge, advance)
            for name, found in rows.items()
        }


@contextmanager
def _progress(total: int, name: str, stored: int = 0) -> Iterator[Callable[[int], object]]:
    """A bar over responses with the time left; those that are `stored` already do not count for its rate."""
    with tqdm(total=total, initial=stored, desc=name, unit="response", dynamic_ncols=True, smoothing=0.1) as bar:
        yield bar.update


def _stored_suite(directory: Path) -> dict[str, Any]:
    if not (directory / "suite.yaml").is_file():
        raise UserError(f"{directory} holds no suite.yaml; name the output directory of a finished `eval`")
    return read_tree(directory / "suite.yaml")


def _labels(directories: Sequence[Path]) -> list[str]:
    """The folders' names where they differ, else their paths."""
    names = [directory.absolute().name for directory in directories]
    labels = names if len(set(names)) == len(names) else [str(directory) for directory in directories]
    if len(set(labels)) < len(labels):
        raise UserError(f"{labels[0]} is compared with itself; name each directory once")
    return labels


def _with_plots(page: str, plots: Sequence[Path], output: Path) -> bytes:
    lines = [f"\n![{plot.stem}]({plot.relative_to(output).as_posix()})\n" for plot in plots]
    return (page + "".join(lines)).encode()


def _json(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()
