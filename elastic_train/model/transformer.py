"""The decoder-only transformer. It knows no mesh: parallel axes act on it from outside, by module name.

Module names give HF Llama's state-dict names. A pipeline stage holds some of the layers, under their global numbers.

Shape suffixes: B batch, T tokens, D hidden size, H heads, E width of one head, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_train.config.job import ModelConfig
from elastic_train.model.rotary import Rotary, rotate


def _meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=torch.float32)


class Projection(nn.Linear):
    """A linear map without bias and without initial values: those come from ``initialize``, the same on any mesh."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta", dtype=torch.float32)

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(_meta(size))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention: query head i uses key/value head ``i // (heads / kv_heads)``."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_size
        self.q_proj = Projection(hidden, config.num_attention_heads * head)
        self.k_proj = Projection(hidden, config.num_key_value_heads * head)
        self.v_proj = Projection(hidden, config.num_key_value_heads * head)
        self.o_proj = Projection(config.num_attention_heads * head, hidden)
        self.head_size = head
        self.rotary = rotary

    def forward(self, x_BTD: Tensor) -> Tensor:
        # The number of heads is read off the projections: under tensor parallelism they give this rank's heads only.
        q_BHTE = self._heads(self.q_proj(x_BTD))
        k_BHTE = self._heads(self.k_proj(x_BTD))
        v_BHTE = self._heads(self.v_proj(x_BTD))
        cos_TE, sin_TE = self.rotary.tables(q_BHTE.shape[2], q_BHTE.device)
        q_BHTE, k_BHTE = rotate(q_BHTE, cos_TE, sin_TE), rotate(k_BHTE, cos_TE, sin_TE)
        grouped = q_BHTE.shape[1] != k_BHTE.shape[1]
        out_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.o_proj(out_BHTE.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD))
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Decoder(nn.Module):
    """Everything that HF names ``model.*``."""

    def __init__(self, config: ModelConfig, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        rotary = Rotary(config)
        table = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(*table, _weight=_meta(*table)) if first else None
        self.layers = nn.ModuleDict({str(index): Block(config, rotary) for index in layers})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x_BTD = x if self.embed_tokens is None else self.embed_tokens(x)
        for block in self.layers.values():
            x_BTD = block(x_BTD)
        return x_BTD if self.norm is None else self.norm(x_BTD)


class Transformer(nn.Module):
    """One pipeline stage, or the whole model. Parameters are created on the meta device, in float32.

    ``layers``: global numbers of the blocks held here, None for all; ``first`` adds the embedding, ``last`` the final
    norm and the head.
    """

    def __init__(self, config: ModelConfig, layers: range | None = None, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, range(config.num_hidden_layers) if layers is None else layers, first, last)
        self.lm_head = Projection(config.hidden_size, config.vocab_size) if last else None
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter, where the configuration says so.

        To be called again after anything that replaces parameters (sharding, moving off the meta device).
        """
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """``x``: int64 token ids [B, T] on the first stage, else float32 x_BTD.

        Returns float32 logits_BTV on the last stage, else x_BTD.
        """
        x_BTD = self.model(x)
        out: Tensor = x_BTD if self.lm_head is None else self.lm_head(x_BTD)
        return out

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The blocks held here by global layer number."""
        return {int(index): block for index, block in self.model.layers.items()}
