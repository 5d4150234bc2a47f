from __future__ import annotations

import pytest

from elastic_train.config.model import ModelConfig
from elastic_train.config.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        # embeddings 2 x 256 x 64, 4 layers of (64 x (64 + 2 x 32 + 64) + 3 x 64 x 128 + 2 x 64), last norm 64
        ("tiny", 2 * 256 * 64 + 4 * (64 * 192 + 3 * 64 * 128 + 128) + 64),
    ],
)
def test_published_number_of_parameters(name: str, parameters: int) -> None:
    assert ModelConfig.model_validate(PRESETS[name], strict=False).num_parameters == parameters


def test_llama_31_scaling() -> None:
    model = ModelConfig.model_validate(PRESETS["llama3-405b"], strict=False)
    assert (model.num_hidden_layers, model.hidden_size, model.intermediate_size) == (126, 16384, 53248)
    assert (model.num_attention_heads, model.num_key_value_heads, model.vocab_size) == (128, 8, 128256)
    assert model.rope_scaling is not None
    assert (model.rope_theta, model.rope_scaling.factor, model.max_position_embeddings) == (500_000.0, 8.0, 131072)
