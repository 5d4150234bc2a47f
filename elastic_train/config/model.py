"""The shape of the model."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from elastic_train.config.section import Section


class RopeScaling(Section):
    """Llama 3.1 rotary scaling, fields as in the HF ``config.json``."""

    rope_type: Literal["llama3"] = Field(default="llama3", description="kind of scaling")
    factor: Annotated[float, Field(gt=0)] = Field(default=8.0, description="stretch of the low frequencies")
    low_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="wavelengths above original length / this are stretched fully"
    )
    high_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=4.0, description="wavelengths below original length / this are left alone"
    )
    original_max_position_embeddings: Annotated[int, Field(ge=1)] = Field(
        default=8192, description="length the frequencies were made for"
    )


class ModelConfig(Section):
    """Shape of the decoder-only transformer. Field names follow the HF Llama ``config.json``."""

    hidden_size: Annotated[int, Field(ge=1)] = Field(description="width of the residual stream")
    num_hidden_layers: Annotated[int, Field(ge=1)] = Field(description="transformer blocks")
    num_attention_heads: Annotated[int, Field(ge=1)] = Field(description="query heads")
    num_key_value_heads: Annotated[int, Field(ge=1)] = Field(
        description="key and value heads; query head i uses head i // (query heads / kv heads)"
    )
    intermediate_size: Annotated[int, Field(ge=1)] = Field(description="width of the MLP")
    vocab_size: Annotated[int, Field(ge=2)] = Field(description="rows of the embedding; at least the tokenizer's")
    head_dim: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="default: hidden_size / num_attention_heads"
    )
    max_position_embeddings: Annotated[int, Field(ge=1)] = Field(
        default=8192, description="longest sequence the model is meant for"
    )
    rms_norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="epsilon of the norms")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=500_000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(default=None, description="Llama 3.1 scaling; null: none")
    tie_word_embeddings: bool = Field(default=False, description="the output layer is the embedding")
    qkv_bias: bool = Field(default=False, description="q, k and v projections add a bias (Qwen2)")
    initializer_range: Annotated[float, Field(gt=0)] = Field(
        default=0.02, description="standard deviation of the initial matrices"
    )

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                "change one of them or give head_dim"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_dim={self.head_size} is odd; rotary embedding needs an even head_dim")
        return self

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        """Number of unique parameters (a tied embedding counts once)."""
        d, kv = self.hidden_size, self.num_key_value_heads * self.head_size
        q = self.num_attention_heads * self.head_size
        layer = d * q + 2 * d * kv + q * d + 3 * d * self.intermediate_size + 2 * d
        layer += (q + 2 * kv) if self.qkv_bias else 0
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + d
