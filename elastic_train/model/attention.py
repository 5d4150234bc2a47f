"""Causal grouped-query attention, and what it needs to know about the tokens beside their values.

Shape suffixes: B batch, S tokens of the whole sequence, T tokens held here, D hidden size, H heads, E width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_train.config.model import ModelConfig
from elastic_train.model.rotary import Rotary, rotate

_GROUPS_UNDER_MASKS = ("cpu",)
"""Devices of which torch has a kernel that takes both a mask and grouped heads. On cuda its flash kernel takes no mask,
and its memory-efficient one no groups (``sdp_utils.cpp`` of torch 2.13): the rest falls to ``math``, which keeps the
probabilities, [B, H, T, S] in float32."""


class Context:
    """Places and documents of the tokens of one micro-batch: made once, used by every block.

    ``documents_BS``: int64 number of the document that each token of the sequence is in, not decreasing; None: one
    document. ``indices_T``: int64 place in the sequence of each token held here; None: all of them, in order.
    """

    def __init__(
        self, rotary: Rotary, length: int, device: torch.device, documents_BS: Tensor | None, indices_T: Tensor | None
    ) -> None:
        self.length = length
        self.documents_BS = documents_BS
        self.indices_T = torch.arange(length, device=device) if indices_T is None else indices_T
        self._masks: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._cos_sin = rotary.tables(length, device)
        if documents_BS is not None:
            positions_BT = _positions(documents_BS)[:, self.indices_T]
            cos_SE, sin_SE = self._cos_sin
            self._cos_sin = cos_SE[positions_BT][:, None], sin_SE[positions_BT][:, None]
        elif indices_T is not None:
            cos_SE, sin_SE = self._cos_sin
            self._cos_sin = cos_SE[indices_T], sin_SE[indices_T]

    def rotate(self, x_BHTE: Tensor) -> Tensor:
        """Rotary embedding by the place of each token in its document."""
        return rotate(x_BHTE, *self._cos_sin)

    def mask(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [B or 1, 1, end - start, end]: 0 where a query sees a key, else -infinity.

        Queries are the tokens at places ``start`` .. ``end - 1`` of the sequence, keys all those before ``end``.

        Made once, and in the dtype of the scores: torch would keep a converted copy of a boolean mask in every block.
        """
        key = (start, end, dtype)
        if key not in self._masks:
            place_S = torch.arange(end, device=self.indices_T.device)
            seen = (place_S <= place_S[start:, None])[None]
            if self.documents_BS is not None:
                documents_BS = self.documents_BS[:, :end]
                seen = seen & (documents_BS[:, None, :] == documents_BS[:, start:, None])
            zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._masks[key] = zeros.masked_fill_(~seen, float("-inf"))[:, None]
        return self._masks[key]


def _positions(documents_BS: Tensor) -> Tensor:
    """Place of each token in its document: distance to the last token that begins one."""
    place_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    begins_BS = F.pad(documents_BS[:, 1:] != documents_BS[:, :-1], (1, 0), value=True)
    start_BS = torch.where(begins_BS, place_S, 0).cummax(dim=1).values
    return place_S - start_BS


class AttentionCore(nn.Module):
    """softmax(q k / sqrt(E)) v over all tokens of the sequence. What context parallelism and recomputation replace."""

    def forward(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, context: Context) -> Tensor:
        return attend(q_BHTE, k_BHTE, v_BHTE, context, start=0)


def attend(q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, context: Context, *, start: int) -> Tensor:
    """Attention out_BHTE of T queries at places ``start``, ``start + 1``, .. of the sequence.

    Keys and values are in the order of the sequence, from its first token on; those after the last query are left out.
    """
    end = start + q_BHTE.shape[2]
    causal = start == 0 and context.documents_BS is None
    mask = None if causal else context.mask(start, end, q_BHTE.dtype)
    k_BHSE, v_BHSE = k_BHSE[:, :, :end], v_BHSE[:, :, :end]
    group = q_BHTE.shape[1] // k_BHSE.shape[1]
    if group > 1 and mask is not None and q_BHTE.device.type not in _GROUPS_UNDER_MASKS:
        k_BHSE, v_BHSE = (x_BHSE.repeat_interleave(group, dim=1) for x_BHSE in (k_BHSE, v_BHSE))
        group = 1
    return F.scaled_dot_product_attention(
        q_BHTE, k_BHSE, v_BHSE, attn_mask=mask, is_causal=causal, enable_gqa=group > 1
    )


class Projection(nn.Linear):
    """A linear map without initial values: those come from ``initialize``, the same on any mesh."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias, device="meta", dtype=torch.float32)

    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    """Query head i uses key/value head ``i // (heads / kv_heads)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_size, config.qkv_bias
        self.q_proj = Projection(hidden, config.num_attention_heads * head, bias)
        self.k_proj = Projection(hidden, config.num_key_value_heads * head, bias)
        self.v_proj = Projection(hidden, config.num_key_value_heads * head, bias)
        self.o_proj = Projection(config.num_attention_heads * head, hidden)
        self.core = AttentionCore()
        self.head_size = head

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        # The number of heads is read off the projections: under tensor parallelism they give this rank's heads only.
        q_BHTE, k_BHTE, v_BHTE = (
            self._heads(projection(x_BTD)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BHTE = self.core(context.rotate(q_BHTE), context.rotate(k_BHTE), v_BHTE, context)
        out: Tensor = self.o_proj(out_BHTE.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)
