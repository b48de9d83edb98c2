"""Preflight and planner: what a run needs of GPUs before any is asked for. `python -m megatron_rlvr plan`."""

from launch.plan.planner import Plan, make_plan
from launch.plan.report import render, verdict

__all__ = ["Plan", "make_plan", "render", "verdict"]
