"""Layer parts of the local spec that megatron-core lacks: a norm that allows sequence parallelism, packed attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig


class _Biased:
    """Mixin before a parallel linear layer: it has a bias, whatever its builder asks for."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)  # type: ignore[call-arg]


def with_bias(linear: type) -> type:
    """The parallel linear layer class `linear`, always with a bias."""
    return linear if issubclass(linear, _Biased) else type(f"Biased{linear.__name__}", (_Biased, linear), {})


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; the stock local norm refuses sequence_parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps, self.shape = eps, (hidden_size,)
        weight = torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class SdpaCoreAttention(torch.nn.Module):
    """Causal grouped-query attention on torch's scaled_dot_product_attention, for packed and padded batches.

    The local DotProductAttention refuses packed sequences. Here a pack is laid out as right-padded rows: behind a
    causal mask no real token sees the padding. Rows cost S * longest tokens; Transformer Engine serves long contexts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

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
        """query [s, b, heads, d] and key, value [s, b, groups, d] -> [s, b, heads*d]; packed: without b."""
        if packed_seq_params is None:
            return self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3).flatten(2)
        row, column = _row_and_column(packed_seq_params.cu_seqlens_q, len(query))
        shape = (len(packed_seq_params.cu_seqlens_q) - 1, int(packed_seq_params.max_seqlen_q))
        out = self._attend(*(_to_rows(x, row, column, shape) for x in (query, key, value)))
        return out.transpose(1, 2)[row, column].flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[b, heads, s, d], [b, groups, s, d] twice -> [b, heads, s, d]."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)


def _row_and_column(cu_seqlens: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence number [T] and position in the sequence [T] of every packed token."""
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    row = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    return row, token - cu_seqlens.long()[row]


def _to_rows(x: torch.Tensor, row: torch.Tensor, column: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Packed [T, n, d] -> [S, n, longest, d], zeros behind each sequence."""
    rows = x.new_zeros((*shape, *x.shape[1:]))
    return rows.index_put((row, column), x).transpose(1, 2)
