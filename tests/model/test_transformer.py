from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from elastic_train.config.model import ModelConfig, RopeScaling
from elastic_train.model.rotary import Rotary
from elastic_train.model.transformer import Transformer

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # not 8 / 2 groups of 2: transposed grouping would go unnoticed with 4 heads and 2 groups
    "intermediate_size": 112,
    "vocab_size": 131,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}
# Wavelengths 6, 20, 63 and 199 tokens: one is kept, two are interpolated, one is scaled (bounds 16 and 64).
SCALED = SHAPE | {
    "rope_theta": 100.0,
    "rope_scaling": RopeScaling(factor=32.0, original_max_position_embeddings=64),
}
VARIANTS = {
    "plain": SHAPE,
    "llama3": SCALED,
    "tied": SHAPE | {"tie_word_embeddings": True},
    "wide": SHAPE | {"head_dim": 12},
}


def reference(config: ModelConfig) -> LlamaForCausalLM:
    fields = config.model_dump(exclude={"rope_theta", "rope_scaling", "qkv_bias"})
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= config.rope_scaling.model_dump()
    torch.manual_seed(3)
    llama = LlamaForCausalLM(LlamaConfig(**fields | {"head_dim": config.head_size}, rope_parameters=rope))
    # Larger than usual weights: attention is then far from uniform, and a wrong rotation shows.
    for parameter in llama.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return llama.eval()


def ours(config: ModelConfig, llama: LlamaForCausalLM) -> Transformer:
    model = Transformer(config).to_empty(device="cpu")
    model.tie()
    model.load_state_dict(llama.state_dict(), strict=True)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_hf_llama(variant: str) -> None:
    config = ModelConfig(**VARIANTS[variant])
    llama = reference(config)
    ids = torch.randint(0, config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, actual = llama(ids).logits, ours(config, llama)(ids)
    assert expected.std() > 0.1
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_shapes_are_hf_llamas(variant: str) -> None:
    config = ModelConfig(**VARIANTS[variant])
    names = {name: parameter.shape for name, parameter in Transformer(config).named_parameters()}
    assert names == {name: parameter.shape for name, parameter in reference(config).named_parameters()}
    assert sum(shape.numel() for shape in names.values()) == config.num_parameters


@pytest.mark.parametrize("variant", ["plain", "llama3"])
def test_rotary_tables_equal_hf_at_far_positions(variant: str) -> None:
    config = ModelConfig(**VARIANTS[variant])
    cos, sin = Rotary(config).tables(20_001, torch.device("cpu"))
    expected_cos, expected_sin = reference(config).model.rotary_emb(torch.zeros(1), torch.tensor([[20_000]]))
    torch.testing.assert_close(cos[20_000], expected_cos[0, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[20_000], expected_sin[0, 0], rtol=0, atol=1e-6)


def test_stages_compose_to_the_whole_under_global_names() -> None:
    config = ModelConfig(**SHAPE)
    whole = ours(config, reference(config))
    first = Transformer(config, range(2), first=True, last=False).to_empty(device="cpu")
    last = Transformer(config, range(2, 3), first=False, last=True).to_empty(device="cpu")
    state = whole.state_dict()
    assert set(first.state_dict()) | set(last.state_dict()) == set(state)
    assert not set(first.state_dict()) & set(last.state_dict())
    assert "model.layers.2.mlp.up_proj.weight" in last.state_dict()
    for stage in (first, last):
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(last(first(ids)), whole(ids))


def test_parameters_are_created_on_the_meta_device() -> None:
    assert {parameter.device.type for parameter in Transformer(ModelConfig(**SHAPE)).parameters()} == {"meta"}
