from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.errors import ConfigError
from elastic_train.config.hf import differences, hf_config, hf_shapes, model_from_hf, sliding_window
from elastic_train.config.model import ModelConfig, RopeScaling
from tests.training.synthetic import small_job

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "eos_token_id": [128001, 128008],
}
SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALING}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}},
    ],
)
def test_both_spellings_of_the_rotary_fields_are_read(spelling: dict[str, Any]) -> None:  # HF-09
    model = model_from_hf(LLAMA | spelling)
    assert model.rope_theta == 500_000.0
    assert model.rope_scaling == RopeScaling(**SCALING)
    assert (model.rms_norm_eps, model.max_position_embeddings, model.head_size) == (1e-6, 131072, 8)


@pytest.mark.parametrize(
    "spelling", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}]
)
def test_without_scaling_theta_is_what_transformers_takes(spelling: dict[str, Any]) -> None:
    model = model_from_hf(LLAMA | spelling)
    assert (model.rope_theta, model.rope_scaling) == (10_000.0, None)


def test_the_length_that_llama3_scaling_was_made_for_defaults_to_the_models() -> None:
    scaling = {key: value for key, value in SCALING.items() if key != "original_max_position_embeddings"}
    model = model_from_hf(LLAMA | {"rope_scaling": {"rope_type": "llama3", **scaling}})
    assert model.rope_scaling == RopeScaling(**{**SCALING, "original_max_position_embeddings": 131072})


def test_fields_that_are_absent_have_the_familys_defaults() -> None:
    absent = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "architectures")
    lengths = {}
    for config in (LLAMA, MISTRAL, QWEN2):
        model = model_from_hf({key: value for key, value in config.items() if key not in absent})
        assert (model.num_key_value_heads, model.rms_norm_eps) == (8, 1e-6)
        lengths[config["model_type"]] = model.max_position_embeddings
    assert lengths == {"llama": 2048, "mistral": 131072, "qwen2": 32768}


def test_qwen2_has_biases_on_q_k_and_v() -> None:
    model = model_from_hf(QWEN2)
    assert model.qkv_bias
    assert [name for name in hf_shapes(model) if name.endswith("bias")][:3] == [
        f"model.layers.0.self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")
    ]
    assert not model_from_hf(MISTRAL).qkv_bias


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["GemmaForCausalLM"]}, "architectures=['GemmaForCausalLM']: must be one of"),
    "no head": ({"architectures": ["LlamaModel"]}, "architectures=['LlamaModel']: must be one of"),
    "type": ({"model_type": "phi"}, "model_type=phi: does not belong to architectures=['LlamaForCausalLM']"),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling linear: only llama3"),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling dynamic: only llama3"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling yarn: only llama3"),
    "half llama3": ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks low_freq_factor, high_freq_factor"),
    "two thetas": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta=10000.0: rope_parameters"),
    "per layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one rotary embedding for all layers"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: only 1 is available"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu' is available"),
    "attention bias": ({"attention_bias": True}, "attention_bias=True: only False is available"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias=True: only False is available"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout=0.1: only 0.0 is available"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}: only None is available"),
    "absent": ({"hidden_size": None}, "hidden_size: is required"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size='64': Input should be a valid integer"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_model_does_not_compute_is_refused_with_its_value(name: str) -> None:
    change, expected = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        model_from_hf(LLAMA | change)
    (sentence,) = caught.value.problems
    assert expected in sentence


def test_all_problems_are_listed_at_once() -> None:
    wrong = {"hidden_act": "relu", "mlp_bias": True, "vocab_size": None, "rope_scaling": {"type": "linear"}}
    with pytest.raises(ConfigError) as caught:
        model_from_hf(LLAMA | wrong)
    assert len(caught.value.problems) == 4


def test_a_window_may_be_no_shorter_than_what_is_trained() -> None:
    assert sliding_window(LLAMA | {"sliding_window": 16}) is None
    assert sliding_window(MISTRAL | {"sliding_window": None}) is None
    assert sliding_window(QWEN2 | {"sliding_window": 16, "use_sliding_window": False}) is None
    assert sliding_window(QWEN2 | {"sliding_window": 16, "use_sliding_window": True}) == 16
    job = small_job(data={"sequence_length": 32}).model_copy(update={"model": model_from_hf(MISTRAL)})
    assert differences(MISTRAL | {"sliding_window": 32}, job) == []
    (sentence,) = differences(MISTRAL | {"sliding_window": 31}, job)
    assert "data.sequence_length=32: must be at most sliding_window=31" in sentence


@pytest.mark.parametrize("biased", [False, True])
def test_what_is_written_is_read_back(biased: bool) -> None:
    model = ModelConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=300,
        head_dim=20,
        rope_scaling=RopeScaling(factor=32.0),
        tie_word_embeddings=True,
        qkv_bias=biased,
        initializer_range=0.01,
    )
    assert model_from_hf(hf_config(model, eos_id=3)) == model
