"""Stages 1 to 5 as one: what to start from, roll-outs, rewards, advantages, packed mini-batches."""

from megatron_rlvr.controller.controller import Controller

__all__ = ["Controller"]
