"""Stage 2 of the loop: G responses to every prompt, as trajectories that the later stages score and train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_rlvr.rollout.engine import Completion, Engine, SamplingSettings
from megatron_rlvr.types import Group, Prompt, Trajectory


def roll_out(
    engine: Engine,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: SamplingSettings,
    decode: Callable[[list[int]], str],
) -> list[Group]:
    """`group_size` responses to each prompt, in the order of the prompts; a replayed prefix is part of the context.

    `sampling.max_response_length` counts the prefix: what continues it may have that much less.
    `decode` turns the response's ids (prefix and sampled, end-of-sequence included) into the text that verifiers read;
    it should leave special tokens out. Raises what Engine.generate raises.
    """
    contexts = [[*prompt.token_ids, *prompt.prefix] for prompt in prompts]
    if any(prompt.prefix for prompt in prompts):
        limits = [sampling.max_response_length - len(prompt.prefix) for prompt in prompts]
        sampled = engine.generate(contexts, group_size, sampling, limits)
    else:
        sampled = engine.generate(contexts, group_size, sampling)
    return [
        Group(prompt, [to_trajectory(prompt, completion, decode) for completion in completions])
        for prompt, completions in zip(prompts, sampled, strict=True)
    ]


def to_trajectory(prompt: Prompt, completion: Completion, decode: Callable[[list[int]], str]) -> Trajectory:
    """Problem and prefix (masked) and the sampled tokens (trained on) as one trajectory."""
    context = [*prompt.token_ids, *prompt.prefix]
    before, length = len(context), len(completion.token_ids)
    mask = np.zeros(before + length, bool)
    mask[before:] = True
    return Trajectory(
        token_ids=np.concatenate([np.asarray(context, np.int32), completion.token_ids]),
        action_mask=mask,
        behavior_logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(before, -1, np.int32), completion.versions]),
        finish_reason=completion.finish_reason,
        text=decode([*prompt.prefix, *completion.token_ids.tolist()]),
    )
