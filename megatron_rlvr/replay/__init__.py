"""Which states a batch starts from (VSR): prefixes of successful trajectories, scored, kept, drawn."""

from megatron_rlvr.replay.buffer import PrefixBuffer
from megatron_rlvr.replay.experts import ExpertTrajectory, load_expert_trajectories
from megatron_rlvr.replay.scores import prefix_score
from megatron_rlvr.replay.trajectory import Prefix

__all__ = ["ExpertTrajectory", "Prefix", "PrefixBuffer", "load_expert_trajectories", "prefix_score"]
