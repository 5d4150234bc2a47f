"""Hugging Face's ``config.json`` and the ``model`` section of a job file, each made from the other.

Defaults of absent fields, and the two spellings of the rotary fields, are those of transformers 5
(``configuration_llama.py``, ``configuration_mistral.py``, ``configuration_qwen2.py``, ``modeling_rope_utils.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from elastic_train.config.errors import ConfigError
from elastic_train.config.job import Job
from elastic_train.config.model import ModelConfig

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,  # of Llama: it would put a bias on o_proj too
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
"""Fields that change the arithmetic, and the one value that the model here computes."""
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    qkv_bias: bool
    max_position_embeddings: int
    """The default of the family's configuration class."""


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", False, 2048),
    "mistral": _Family("MistralForCausalLM", False, 131_072),
    "qwen2": _Family("Qwen2ForCausalLM", True, 32_768),
}


def model_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The ``model`` section for a ``config.json``. Raises ConfigError with everything in it that cannot be trained."""
    family, problems = _family(config)
    problems += [f"{name}: is required" for name in _REQUIRED if config.get(name) is None]
    problems += [
        f"{name}={config[name]!r}: only {value!r} is available"
        for name, value in _ONLY.items()
        if config.get(name, value) != value
        and config[name] is not None
        and not (name == "attention_bias" and family.qkv_bias)  # Qwen2 has it without being told, on q, k and v only
    ]
    rope = _rope(config, family, problems)
    if problems:
        raise ConfigError(problems)
    heads = config["num_attention_heads"]
    fields = {name: config[name] for name in _REQUIRED} | {
        "num_key_value_heads": heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"],
        "head_dim": config.get("head_dim"),
        "max_position_embeddings": config.get("max_position_embeddings", family.max_position_embeddings),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "initializer_range": config.get("initializer_range", 0.02),
        "qkv_bias": family.qkv_bias,
        **rope,
    }
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError([_sentence(details) for details in error.errors()]) from None


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """How many tokens attention looks back, None without a limit. Up to this length it is ordinary attention."""
    used = config.get("use_sliding_window", config.get("model_type") == "mistral")
    return config.get("sliding_window") if used else None


def differences(config: Mapping[str, Any], job: Job) -> list[str]:
    """What the job says otherwise than the ``config.json`` of its ``init_from``, with both values; else ConfigError.

    ``initializer_range`` may differ: nothing is initialised.
    """
    theirs, ours = model_from_hf(config), job.model
    problems = [
        f"model.{name}={getattr(ours, name)}: the config.json of init_from has {getattr(theirs, name)}"
        for name in ModelConfig.model_fields
        if name not in ("head_dim", "rope_scaling", "initializer_range")
        and getattr(ours, name) != getattr(theirs, name)
    ]
    if ours.head_size != theirs.head_size:
        problems.append(f"model.head_dim={ours.head_size}: the config.json of init_from has {theirs.head_size}")
    if ours.rope_scaling != theirs.rope_scaling:
        ours_text, theirs_text = (
            "null" if model.rope_scaling is None else str(model.rope_scaling.model_dump()) for model in (ours, theirs)
        )
        problems.append(f"model.rope_scaling={ours_text}: the config.json of init_from has {theirs_text}")
    window = sliding_window(config)
    if window is not None and window < job.data.sequence_length:
        problems.append(
            f"data.sequence_length={job.data.sequence_length}: must be at most sliding_window={window} of init_from, "
            "as attention here has no window"
        )
    return problems


def hf_config(model: ModelConfig, eos_id: int) -> dict[str, Any]:
    """``config.json`` of a model that began with random weights, in float32.

    Documents are separated by one token, so it both begins and ends a text.
    """
    family = "qwen2" if model.qkv_bias else "llama"
    own = {"use_sliding_window": False} if model.qkv_bias else {"attention_bias": False, "mlp_bias": False}
    return {
        "architectures": [_FAMILIES[family].architecture],
        "model_type": family,
        **own,
        "attention_dropout": 0.0,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": model.initializer_range,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_position_embeddings,
        "num_attention_heads": model.num_attention_heads,
        "num_hidden_layers": model.num_hidden_layers,
        "num_key_value_heads": model.num_key_value_heads,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_scaling": model.rope_scaling.model_dump() if model.rope_scaling else None,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": model.vocab_size,
    }


def hf_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in HF's order; a tied head has no entry of its own."""
    d, f = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * model.head_size, model.num_key_value_heads * model.head_size
    layer: dict[str, tuple[int, ...]] = {}
    for projection, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        layer[f"self_attn.{projection}.weight"] = (rows, d)
        if model.qkv_bias:
            layer[f"self_attn.{projection}.bias"] = (rows,)
    layer |= {
        "self_attn.o_proj.weight": (d, q),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, d)}
    for index in range(model.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, d)
    return shapes


def _family(config: Mapping[str, Any]) -> tuple[_Family, list[str]]:
    """The family, and what is wrong with its name (the family is then a guess, to find the other problems)."""
    kind, named = config.get("model_type"), config.get("architectures") or []
    known = {family.architecture: name for name, family in _FAMILIES.items()}
    accepted = ", ".join(known)
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        return _FAMILIES["llama"], [f"architectures={named!r}: must be one of {accepted}"]
    if not isinstance(kind, str | None):
        return _FAMILIES["llama"], [f"model_type={kind!r}: must be a name such as llama"]
    if not named and kind in _FAMILIES:
        return _FAMILIES[kind], []
    if len(named) != 1 or named[0] not in known:
        return _FAMILIES["llama"], [f"architectures={named}: must be one of {accepted}"]
    if kind is not None and kind != known[named[0]]:
        return _FAMILIES[known[named[0]]], [f"model_type={kind}: does not belong to architectures={named}"]
    return _FAMILIES[known[named[0]]], []


def _rope(config: Mapping[str, Any], family: _Family, problems: list[str]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``, written in the old way (two fields) or the new one (``rope_parameters``)."""
    rope: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(written := config.get(name) or {}, Mapping):
            rope |= written
        else:
            problems.append(f"{name}={written!r}: must be an object")
    thetas = []
    for place in (rope, config):
        theta = place.get("rope_theta")
        if isinstance(theta, int | float) and not isinstance(theta, bool):
            thetas.append(float(theta))
        elif theta is not None:
            problems.append(f"rope_theta={theta!r}: must be a number")
    if len(set(thetas)) > 1:
        problems.append(f"rope_theta={thetas[1]}: rope_parameters has {thetas[0]}")
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        problems.append(f"rope_parameters={{{', '.join(nested)}}}: one rotary embedding for all layers is available")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        problems.append(f"partial_rotary_factor={partial}: only 1 is available")
    plain = {"rope_theta": thetas[0] if thetas else 10_000.0}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" or nested:
        return plain
    if kind != "llama3":
        problems.append(f"rope scaling {kind}: only llama3 and no scaling (default) are available")
        return plain
    positions = config.get("max_position_embeddings", family.max_position_embeddings)
    rope.setdefault("original_max_position_embeddings", positions)
    missing = [name for name in _SCALING if rope.get(name) is None]
    if missing:
        problems.append(f"rope scaling llama3: lacks {', '.join(missing)}")
        return plain
    return {**plain, "rope_scaling": {name: rope[name] for name in _SCALING}}


def _sentence(details: Any) -> str:
    path = ".".join(str(part) for part in details["loc"])
    cause = details.get("ctx", {}).get("error")
    return str(cause) if cause is not None else f"{path}={details['input']!r}: {details['msg']}"
