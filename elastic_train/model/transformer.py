"""The decoder-only transformer. It knows no mesh: parallel axes act on it from outside, by module name.

Module names give HF Llama's state-dict names. A pipeline stage holds some of the layers, under their global numbers.

Shape suffixes: B batch, T tokens, D hidden size, H heads, E width of one head, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_train.config.model import ModelConfig
from elastic_train.model.attention import Attention, Context, Projection
from elastic_train.model.rotary import Rotary


def _meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=torch.float32)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(_meta(size))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


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
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), context)
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Decoder(nn.Module):
    """Everything that HF names ``model.*``."""

    def __init__(self, config: ModelConfig, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        table = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(*table, _weight=_meta(*table)) if first else None
        self.layers = nn.ModuleDict({str(index): Block(config) for index in layers})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if last else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x_BTD = x if self.embed_tokens is None else self.embed_tokens(x)
        for block in self.layers.values():
            x_BTD = block(x_BTD, context)
        return x_BTD if self.norm is None else self.norm(x_BTD)


class Transformer(nn.Module):
    """One pipeline stage, or the whole model. Parameters are created on the meta device, in float32.

    ``layers``: global numbers of the blocks held here, None for all; ``first`` adds the embedding, ``last`` the final
    norm and the head.
    """

    def __init__(self, config: ModelConfig, layers: range | None = None, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config)
        self.sequence_length: int | None = None
        """Tokens of the whole sequence, where a stage sees a part of them; None: as many as it sees."""
        self.indices_T: Tensor | None = None
        """Places in the sequence of the tokens held here, set by context parallelism; None: all of them."""
        self.model = Decoder(config, range(config.num_hidden_layers) if layers is None else layers, first, last)
        self.lm_head = Projection(config.hidden_size, config.vocab_size) if last else None
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter, where the configuration says so.

        To be called again after anything that replaces parameters (sharding, moving off the meta device).
        """
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, x: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """``x``: int64 token ids [B, T] on the first stage, else x_BTD in the precision of compute.

        ``documents_BS``: see ``Context``. Returns logits_BTV on the last stage, else x_BTD.
        """
        length = self.sequence_length or x.shape[1]
        context = Context(self.rotary, length, x.device, documents_BS, self.indices_T)
        x_BTD = self.model(x, context)
        out: Tensor = x_BTD if self.lm_head is None else self.lm_head(x_BTD)
        return out

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The blocks held here by global layer number."""
        return {int(index): block for index, block in self.model.layers.items()}
