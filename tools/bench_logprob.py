"""Time and peak memory of log-probs over a large vocabulary, forward and backward, four ways and their matrix products.

    python tools/bench_logprob.py [--tokens 1024] [--memory-tokens 1024 2048 4096] [--hidden 2048] [--vocab 151936]
                                  [--dtype float32|bf16] [--threads 1] [--repeats 3] [--json FILE]

    plain     logits, log_softmax and gather on the whole [T, V]
    chunked   the same per 128 tokens, each chunk kept for the backward
    megatron  megatron-core's vocab_parallel_cross_entropy (it turns float32 logits into probabilities in place)
    fused     megatron_rlvr.actor.fused_logprob.linear_logprob, the only one that also gives entropies
    products  the four matrix products that `fused` needs and nothing else: forward, recompute, two gradients

Time: all cases run in turn in one process, the smallest of the repeats counts. `cpu` is the process's CPU time, which
other programs on the machine do not lengthen (with one thread it is the wall time of an idle machine); `x products` is
its ratio to `products` of the same run. Memory: each figure is a process of its own; `extra` is its resident set's
high-water mark over forward and backward, less the resident set before, less the two returned gradients. Paths that
have freed their logits before both gradients exist look smaller by that than they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
CHUNK = 128
MIB = 2**20
LogProb = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    tokens: int
    hidden: int
    vocab: int
    dtype: str

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden [T, h], weight [V, h] (both want gradients), labels [T], upstream gradients [T]."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.empty(self.tokens, self.hidden, dtype=DTYPES[self.dtype]).normal_(generator=generator)
        weight = torch.empty(self.vocab, self.hidden, dtype=DTYPES[self.dtype])
        weight.normal_(std=self.hidden**-0.5, generator=generator)
        labels = torch.randint(self.vocab, (self.tokens,), generator=generator)
        return hidden.requires_grad_(), weight.requires_grad_(), labels, torch.randn(self.tokens, generator=generator)

    def small(self) -> Sizes:
        """Enough to import and prepare what a case uses."""
        return replace(self, tokens=8, vocab=64)


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logprobs = F.linear(hidden, weight).float().log_softmax(-1)
    return logprobs.gather(1, labels.unsqueeze(1)).squeeze(1)


def chunked(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    parts = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    return torch.cat([plain(part, weight, part_labels) for part, part_labels in parts])


def megatron(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(F.linear(hidden, weight).unsqueeze(1), labels.unsqueeze(1)).squeeze(1)


def fused(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from megatron_rlvr.actor.fused_logprob import linear_logprob

    return linear_logprob(hidden, weight, labels, group=None, vocab_size=len(weight))[0]


CASES: dict[str, LogProb] = {"plain": plain, "chunked": chunked, "megatron": megatron, "fused": fused}


def start_megatron() -> None:
    """One-rank groups, which megatron-core's cross entropy asks for even where nothing is split."""
    from megatron_rlvr.actor import parallel

    parallel.join()
    parallel.parallel_state.initialize_model_parallel()


def run_case(name: str, inputs: tuple[torch.Tensor, ...]) -> None:
    """Forward and backward of one case; the gradients are dropped."""
    hidden, weight, labels, upstream = inputs
    CASES[name](hidden, weight, labels).backward(upstream)
    hidden.grad = weight.grad = None


def run_products(inputs: tuple[torch.Tensor, ...], logits: torch.Tensor, grads: tuple[torch.Tensor, ...]) -> None:
    """The four products at their full size, into memory that exists already: nothing but arithmetic."""
    hidden, weight = inputs[0].detach(), inputs[1].detach()
    for _ in range(2):
        torch.mm(hidden, weight.t(), out=logits)
    torch.mm(logits, weight, out=grads[0])
    torch.mm(logits.t(), hidden, out=grads[1])


def measure_time(sizes: Sizes, repeats: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Smallest wall and CPU seconds of each case and of the products, taken in turn."""
    for name in names:
        run_case(name, sizes.small().inputs())
    inputs = sizes.inputs()
    logits = torch.zeros(sizes.tokens, sizes.vocab, dtype=DTYPES[sizes.dtype])
    grads = tuple(torch.zeros_like(x.detach()) for x in inputs[:2])
    runs: dict[str, Callable[[], None]] = {"products": lambda: run_products(inputs, logits, grads)}
    runs |= {name: lambda name=name: run_case(name, inputs) for name in names}  # type: ignore[misc]
    best = {name: {"wall": float("inf"), "cpu": float("inf")} for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            best[name] = {kind: min(best[name][kind], found[kind]) for kind in found}
    return best


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (highest) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory(name: str, sizes: Sizes) -> dict[str, int]:
    """Bytes over forward and backward in this process: `peak` above what was resident before, `gradients` of it."""
    run_case(name, sizes.small().inputs())
    hidden, weight, labels, upstream = sizes.inputs()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    CASES[name](hidden, weight, labels).backward(upstream)
    assert hidden.grad is not None and weight.grad is not None
    return {"peak": resident("VmHWM") - before, "gradients": hidden.grad.nbytes + weight.grad.nbytes}


def memory_of_child(name: str, sizes: Sizes, threads: int) -> int:
    """Extra bytes of one case, measured in a fresh process."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, "--threads", str(threads)]
    command += ["--tokens", str(sizes.tokens), "--hidden", str(sizes.hidden), "--vocab", str(sizes.vocab)]
    output = subprocess.run([*command, "--dtype", sizes.dtype], check=True, capture_output=True, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    return found["peak"] - found["gradients"]


def table(times: dict[str, dict[str, float]], memory: dict[str, dict[int, int]], tokens: list[int]) -> str:
    """The figures as text, one case a line."""
    lines = [
        f"{'':10}{'wall s':>9}{'cpu s':>9}{'x products':>12}" + "".join(f"{f'extra MiB T={t}':>20}" for t in tokens)
    ]
    for name, seconds in times.items():
        cells = [
            f"{name:10}{seconds['wall']:9.2f}{seconds['cpu']:9.2f}{seconds['cpu'] / times['products']['cpu']:12.3f}"
        ]
        found = memory.get(name, {})
        cells += [f"{found[t] / MIB:20.1f}" if t in found else f"{'-':>20}" for t in tokens]
        lines.append("".join(cells))
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="action tokens of the timing")
    parser.add_argument("--memory-tokens", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=1, help="threads of the matrix products")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    warnings.filterwarnings("ignore")
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    sizes = Sizes(args.tokens, args.hidden, args.vocab, args.dtype)
    if "megatron" in ([args.child] if args.child else args.cases):
        start_megatron()
        torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(measure_memory(args.child, sizes)))
        return
    memory: dict[str, dict[int, int]] = {name: {} for name in args.cases}
    for tokens in args.memory_tokens:
        for name in args.cases:
            memory[name][tokens] = memory_of_child(
                name, Sizes(tokens, args.hidden, args.vocab, args.dtype), args.threads
            )
    times = measure_time(sizes, args.repeats, args.cases)
    print(f"{args.dtype}, T={args.tokens}, hidden {args.hidden}, vocabulary {args.vocab}, {args.threads} thread(s)")
    print(table(times, memory, args.memory_tokens))
    if args.json:
        args.json.write_text(json.dumps({"sizes": vars(sizes), "times": times, "extra_bytes": memory}))


if __name__ == "__main__":
    main()
