"""The learner: the only room that imports megatron.core. Parallel groups, model, optimizer, schedule step, shards.

Importing any module of this room prepares torch for megatron-core first: on a CPU, the stand-ins for CUDA must be in
place before megatron.core is imported, whoever imports it.
"""

from megatron_rlvr.actor.platform import install

install()
