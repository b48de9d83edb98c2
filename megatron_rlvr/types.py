"""The nouns of the loop: Prompt, Trajectory, Group and PackedBatch, each field with its shape, dtype and unit.

Everything else in the package may import this module; it imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time the words of the package load without either: verifier processes know only text
    import numpy as np
    import torch


class UserError(Exception):
    """A fault in config, data, checkpoint or layout: one sentence with thing, value and remedy; exit code 2."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder as its Hugging Face config.json describes it; sizes are counts, `hidden_size` etc. are features.

    attention_bias  q, k and v have a bias; `output_bias` says so of o_proj, `mlp_bias` of the dense MLP
    moe_layers      [num_layers] bool   True where the MLP is a mixture of experts
    rope_scaling    rope_type and the variant's parameters as config.json names them, defaults filled in (empty:
                    default RoPE)
    eos_token_ids   ids that end a response
    """

    family: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qk_norm: bool
    attention_bias: bool
    eos_token_ids: tuple[int, ...]
    moe_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    rope_scaling: tuple[tuple[str, object], ...] = ()
    output_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True)
class Place:
    """Where one rank stands in the groups that split a tensor (not pipeline: that decides which layers it has)."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1


@dataclass(frozen=True)
class LogprobDistribution:
    """Which distribution over the vocabulary log-probs belong to: the raw softmax, or what sampling makes of it.

    temperature  divides the logits
    top_p        then only the likeliest tokens stay, until their mass reaches this share; 1.0: all
    top_k        before that, only this many tokens stay; -1: all
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    @property
    def truncated(self) -> bool:
        """Whether some tokens have probability 0."""
        return self.top_p < 1 or self.top_k > 0

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, top_p {self.top_p:g}, top_k {self.top_k}"


@dataclass(frozen=True)
class Prompt:
    """A state that responses start from: one problem, and for a replayed state the first tokens of a response to it.

    token_ids   the problem as the engine reads it
    answer      what the verifier compares with
    text        the problem for people
    prefix      tokens of an earlier response, given to the engine behind token_ids: context, never trained on
    replayed    True where a replay buffer proposed the state (its prefix may still be empty)
    restore     what brings an environment back to this state (None for problems that are one text)
    """

    id: str
    token_ids: tuple[int, ...]
    answer: str
    text: str = ""
    prefix: tuple[int, ...] = ()
    replayed: bool = False
    restore: Any = None


@dataclass
class Trajectory:
    """One response with its context, as token ids; N = context + response tokens.

    token_ids         [N] int32    everything the model read and wrote, in order
    action_mask       [N] bool     True where the token was sampled by the policy and is trained on
    behavior_logprobs [N] float32  nats, log-prob under the sampler that drew the token; 0 where action_mask is False
    versions          [N] int32    weight version that sampled the token; -1 where action_mask is False
    routed_experts    [N-1, layers, top_k] uint8/uint16 or None: routes of every token that was fed to the model
    finish_reason     "stop" (end-of-sequence token) or "length" (cut at the cap)
    text              the decoded response, a replayed prefix included: what verifiers judge and people read
    score             verifier's verdict before shaping; NaN until rewarded
    reward            score plus shaping terms, what advantages are computed from; NaN until rewarded
    advantage         this response's advantage; NaN until known
    reward_parts      named parts of the reward, for the metrics
    """

    token_ids: np.ndarray
    action_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    text: str = ""
    routed_experts: np.ndarray | None = None
    score: float = float("nan")
    reward: float = float("nan")
    advantage: float = float("nan")
    reward_parts: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """All tokens, context included."""
        return len(self.token_ids)

    @property
    def response_length(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.action_mask.sum())


@dataclass
class Group:
    """The responses to one starting state (a fresh prompt, or a prompt with a replayed prefix)."""

    prompt: Prompt
    trajectories: list[Trajectory]


@dataclass
class PackedBatch:
    """One micro-batch of S sequences; A = its action tokens. Labels are shifted once, before any split over ranks.

    `packed` layout: rows == 1, columns == T, sequences one after the other with position ids that restart.
    `padded` layout: rows == S, columns == the longest sequence, right-padded (the reference layout).

    token_ids         [rows, columns] int64
    position_ids      [rows, columns] int64
    padding_mask      [rows, columns] bool  True where there is no token
    cu_seqlens        [S+1] int32   boundaries of the packed sequences in tokens (None when padded); [S+2] where the row
                                    ends in padding, a segment of its own that no sequence attends to
    max_seqlen        longest segment in tokens
    action_index      [A] int64     flat index (row-major) of the position whose logits predict each action token
    labels            [A] int64     the action tokens themselves
    action_cu_seqlens [S+1] int64   boundaries of the sequences in action tokens
    behavior_logprobs [A] float32   nats
    versions          [A] int64     weight version that sampled each action token
    advantages        [S] float32   one per response
    reference_logprobs [A] float32  nats, or None
    sequence_index    [S] int64     place of each response among those of the whole mini-batch, -1 for a dummy; or None
    num_tokens        tokens that the model is fed here, padding left out
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    padding_mask: torch.Tensor
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    action_index: torch.Tensor
    labels: torch.Tensor
    action_cu_seqlens: torch.Tensor
    behavior_logprobs: torch.Tensor
    versions: torch.Tensor
    advantages: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    sequence_index: torch.Tensor | None = None
    num_tokens: int = 0

    @property
    def num_sequences(self) -> int:
        return len(self.action_cu_seqlens) - 1

    @property
    def num_action_tokens(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with every tensor on `device`."""
        moved: dict[str, Any] = {k: v.to(device) if hasattr(v, "to") else v for k, v in vars(self).items()}
        return PackedBatch(**moved)


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer update trains on, as one data-parallel rank sees it.

    micro_batches      this rank's micro-batches; every rank of the run has the same count (pipeline schedules need it)
    num_action_tokens  action tokens of the whole mini-batch over all ranks: the one denominator of `token-mean`
    num_sequences      responses of the whole mini-batch over all ranks: the denominator of `seq-mean-*`
    group_index        [num_sequences] int64 which group each response belongs to, from 0, in the order that the
                       micro-batches' `sequence_index` counts; None where responses form no groups
    """

    micro_batches: list[PackedBatch]
    num_action_tokens: int
    num_sequences: int
    group_index: torch.Tensor | None = None
