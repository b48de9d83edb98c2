"""Core attention of the local spec under context parallelism: keys and values are gathered over the group."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig

from megatron_rlvr.actor.context import zigzag_index


class _AllGather(torch.autograd.Function):
    """Concatenate dim 0 over a group; the gradient is the reduce-scattered sum over the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class ContextParallelAttention(torch.nn.Module):
    """Causal grouped-query attention over a context-parallel group, packed or padded; megatron-core's own refuses both.

    Memory is that of whole sequences: this serves CPUs and accelerators without Transformer Engine, whose ring
    attention is used where it is installed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query [s/cp, b, heads, d] and key, value [s/cp, b, groups, d] -> [s/cp, b, heads*d]; packed: without b."""
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        size, rank = self.group.size(), self.group.rank()
        bounds = packed_seq_params.cu_seqlens_q.tolist() if packed_seq_params else [0, size * len(query)]
        key, value = self._whole(key, value, bounds)
        mine = zigzag_index(bounds, size, rank)
        out = []
        for start, end in itertools.pairwise(bounds):
            local = slice(start // size, end // size)
            mask = (mine[local, None] >= torch.arange(start, end)).to(query.device)
            out.append(self._attend(query[local], key[start:end], value[start:end], mask))
        whole = torch.cat(out)
        return whole.squeeze(1).flatten(1) if packed else whole.flatten(2)

    def _whole(self, key: torch.Tensor, value: torch.Tensor, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all ranks [s, b, groups, d] in token order."""
        ranks = range(self.group.size())
        order = torch.cat([zigzag_index(bounds, len(ranks), rank) for rank in ranks]).argsort().to(key.device)
        gathered = _AllGather.apply(torch.stack((key, value), 1), self.group)[order]
        return gathered.unbind(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3)
