"""The learner: the only room that imports megatron.core. Parallel groups, model, optimizer, schedule step, shards."""
