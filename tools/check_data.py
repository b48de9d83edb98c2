"""What is wrong with a run's problems, before it starts.

    python tools/check_data.py RUN.yaml [section.key=value ...]

Reads data.train and data.validation as the run would (files, folders, hub:<published set>) with the model's tokenizer,
and prints a table of both, then a sentence for every fault and warning: missing answers, prompts over
data.max_prompt_length, the same problem with different answers, repeats, held-out problems that are trained on. Exit
code 2 where the run would be refused, else 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rlvr.config.load import load_config
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.data import DataReport, data_warnings, inspect_source, load_tokenizer
from megatron_rlvr.types import UserError


def table(reports: Sequence[DataReport]) -> str:
    """The reports as a Markdown table."""
    lines = [
        "| source | problems | missing | repeated | conflicting | too long | longest prompt | non-ASCII |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        lines.append(
            f"| {report.source} | {len(report.problems)} | {len(report.missing)} | {report.repeated} "
            f"| {len(report.conflicts)} | {len(report.too_long)} | {report.longest} tokens | {report.non_ascii:.2%} |"
        )
    return "\n".join(lines)


def inspect_run(config: RunConfig) -> list[DataReport]:
    """A report for data.train and one for data.validation, as far as they are set. Raises UserError for neither."""
    data = config.data
    sources = [source for source in (data.train, data.validation) if source is not None]
    if not sources:
        raise UserError("data.train and data.validation are unset, so there is nothing to check; set one of them.")
    tokenizer = load_tokenizer(config.model.path)
    return [
        inspect_source(source, data.prompt_key, data.answer_key, tokenizer=tokenizer, **data.prompt_options)
        for source in sources
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 2 where a run would be refused."""
    parser = argparse.ArgumentParser(description="Check the problems of a run.")
    parser.add_argument("config", metavar="RUN.yaml", type=Path)
    parser.add_argument("overrides", metavar="section.key=value", nargs="*")
    options = parser.parse_args(arguments)
    try:
        reports = inspect_run(load_config(options.config, options.overrides))
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(table(reports))
    faults = [fault for report in reports for fault in report.faults]
    for fault in faults:
        print(f"fault: {fault}.")
    for warning in data_warnings([(report.source, report.problems) for report in reports]):
        print(f"warning: {warning}.")
    return 2 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
