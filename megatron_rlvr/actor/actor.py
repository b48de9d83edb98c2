"""The learner as the trainer sees it: load shards, update on a mini-batch, give log-probs, give weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rlvr.actor import parallel, platform
from megatron_rlvr.actor.aux_loss import scale_aux_loss
from megatron_rlvr.actor.head import LogprobHead
from megatron_rlvr.actor.loading import TensorSource, fill
from megatron_rlvr.actor.metrics import padding_share, reduce_metrics
from megatron_rlvr.actor.model import DTYPES, build_chunks
from megatron_rlvr.actor.naming import named_parameters
from megatron_rlvr.actor.objective import objective, settle
from megatron_rlvr.actor.optimizer import build_optimizer, build_scheduler, wrap_chunks
from megatron_rlvr.actor.reference import ReferencePolicy
from megatron_rlvr.actor.schedule import Schedule
from megatron_rlvr.actor.shards import ShardPlan
from megatron_rlvr.config.checks import check_known_faults, installed_version
from megatron_rlvr.config.tree import ActorConfig, LossConfig, OptimizerConfig
from megatron_rlvr.ranges import phase_range
from megatron_rlvr.types import LogprobDistribution, MiniBatch, ModelSpec


class Actor:
    """A Megatron model, its optimizer and its schedule on this rank."""

    def __init__(
        self,
        spec: ModelSpec,
        config: ActorConfig,
        optimizer: OptimizerConfig,
        *,
        updates: int,
        seed: int,
        distribution: LogprobDistribution | None = None,
    ):
        check_known_faults(config, spec, installed_version("megatron-core"))
        parallel.initialize(config, seed)
        self.spec, self.config = spec, config
        self.megatron_config, self.chunks = build_chunks(spec, config)
        self.place = parallel.place()
        self.version = 0
        self.reference: ReferencePolicy | None = None
        self._optimizer_config, self._updates = optimizer, updates
        self._distribution = distribution or LogprobDistribution()
        self._parameters = dict(named_parameters(self.chunks))
        self._plan = ShardPlan(self._parameters)

    @property
    def data_parallel_rank(self) -> int:
        """Which share of a mini-batch this rank trains on."""
        return parallel.data_parallel_rank()

    @property
    def device(self) -> torch.device:
        return platform.device()

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    def load(
        self, source: TensorSource, broadcast: bool = False, progress: Callable[[int], object] | None = None
    ) -> None:
        """Fill this rank's shards from `source`, then build the optimizer on them (its master weights are copies).

        See `loading.fill`.
        """
        fill(self._parameters, self.place, source, broadcast, progress)
        wrapped = wrap_chunks(self.config, self.megatron_config, self.chunks)
        self.optimizer = build_optimizer(self._optimizer_config, self.config, self.megatron_config, wrapped)
        self.scheduler = build_scheduler(self._optimizer_config, self.optimizer, self._updates)
        self.wrapped = wrapped
        heads = [c.output_layer for c in self.chunks if c.post_process]
        assert all(isinstance(head, LogprobHead) for head in heads)
        for head in heads:
            head.distribution = self._distribution
        self.schedule = Schedule(self.megatron_config, wrapped, heads)

    def update(self, mini_batch: MiniBatch, loss: LossConfig) -> dict[str, float]:
        """One optimizer update; metrics of the whole mini-batch, gradient norm and learning rate, equal on all ranks.

        A non-finite gradient norm leaves the weights untouched and is reported as `actor/skipped_updates` 1.
        """
        metrics = self.accumulate(mini_batch, loss) | self.step()
        return metrics | {"actor/padding": padding_share(mini_batch)}

    def refresh_reference(self) -> None:
        """Freeze the present weights as the reference policy."""
        if self.reference is None:
            self.reference = ReferencePolicy(self._parameters.values())
        self.reference.refresh(self.version)

    @property
    def reference_version(self) -> int:
        """Version of the reference's weights; -1 where there is none yet."""
        return -1 if self.reference is None else self.reference.version

    def score_reference(self, mini_batch: MiniBatch) -> None:
        """Fill `reference_logprobs` of every micro-batch where the loss is formed (the last pipeline stage).

        Raises RuntimeError when no reference was frozen.
        """
        if self.reference is None:
            raise RuntimeError("score_reference before refresh_reference: there is no reference policy yet")
        fresh = self.reference.version == self.version  # the learner itself, no need to swap
        with contextlib.nullcontext() if fresh else self.reference.swapped_in():
            scores = self.schedule.logprobs(mini_batch)
        for batch, (logprobs, _) in zip(mini_batch.micro_batches, scores, strict=False):
            batch.reference_logprobs = logprobs

    def rescore_behavior(self, mini_batch: MiniBatch, replace: bool) -> dict[str, float]:
        """The gap between the engine's log-probs and the learner's now; with `replace`, the learner's take their place.

        Returns rollout/logprob_gap (mean, nats) and rollout/logprob_gap/max, equal on all ranks.
        """
        sums = []
        for batch, (logprobs, _) in zip(mini_batch.micro_batches, self.schedule.logprobs(mini_batch), strict=False):
            gap = (logprobs - batch.behavior_logprobs.to(logprobs.device)).abs().double()
            sums.append(
                {
                    "rollout/logprob_gap/num": gap.sum(),
                    "rollout/logprob_gap/den": torch.full_like(gap.sum(), gap.numel()),
                    "rollout/logprob_gap/max": gap.max() if gap.numel() else torch.zeros_like(gap.sum()),
                }
            )
            if replace:
                batch.behavior_logprobs = logprobs
        return reduce_metrics(sums)

    def accumulate(self, mini_batch: MiniBatch, loss: LossConfig) -> dict[str, float]:
        """Forward and backward of all micro-batches; gradients are whole (reduced over all groups) afterwards."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        scale_aux_loss(self.megatron_config, self.config.moe_aux_loss_coeff, mini_batch)
        return reduce_metrics(self.schedule.train(mini_batch, objective(loss, mini_batch)), settle(mini_batch))

    def step(self) -> dict[str, float]:
        """Clip, gate on finiteness, step the optimizer, publish the next version of the weights."""
        self.scheduler.step(1)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        finite = math.isfinite(norm)
        if finite:
            with phase_range("optimizer"):
                self.optimizer.step()
        self.version += 1
        lr = self.optimizer.param_groups[0]["lr"]
        return {"actor/grad_norm": norm, "actor/lr": lr, "actor/skipped_updates": 0.0 if finite else 1.0}

    def logprobs(self, mini_batch: MiniBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(logprobs [A], entropy [A]) for each micro-batch of this data-parallel rank, on every rank."""
        results = self.schedule.logprobs(mini_batch)
        boxed = [[(a.cpu(), b.cpu()) for a, b in results] if results else None]
        if self.config.pipeline_parallel > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(boxed, src=source, group=parallel_state.get_pipeline_model_parallel_group())
        return boxed[0] or []

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """(canonical name, shards in tensor-rank order) of every parameter; a collective on all ranks."""
        yield from self._plan.gather(lambda p: p.data, DTYPES[dtype or self.config.dtype])

    def owned_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(canonical name, this rank's slice) of the parameters that this rank writes for all."""
        return self._plan.owned()

    def gradients(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """As `weights`, of the gradients that `accumulate` left; a distributed optimizer keeps only shards of them."""
        yield from self._plan.gather(_main_grad, torch.float32)

    def replica_spread(self) -> float:
        """Largest difference between ranks that should hold the same values; 0.0 is the only healthy answer."""
        spread = 0.0
        parameters = self._parameters
        for name, shards in self._plan.gather(lambda p: p.data, torch.float32):
            if name in parameters:
                mine = parameters[name].detach().float()
                spread = max(spread, (mine - shards[self._plan.index(name)]).abs().max().item())
        everyone = torch.tensor(spread, device=platform.device())
        dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
        return everyone.item()

    def close(self, keep_process_group: bool = False) -> None:
        """Leave the parallel groups, and the default group too unless another actor is to be built in it."""
        parallel.shutdown(keep_process_group)


def _main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Where Megatron's DDP accumulates the gradient."""
    return parameter.main_grad  # type: ignore[attr-defined, no-any-return]
