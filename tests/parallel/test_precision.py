from __future__ import annotations

import pytest
import torch

from elastic_train.model.transformer import Transformer
from elastic_train.parallel.precision import apply_precision, convert_to_float8
from tests.training.synthetic import small_job


def model_of(fp8: bool) -> Transformer:
    model = Transformer(small_job().model)
    if fp8:
        convert_to_float8(model, emulate=True)
    model.to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 if parameter.dim() > 1 else 1.0)
    return model


def test_fp8_is_refused_where_the_device_has_none() -> None:
    model = Transformer(small_job().model)
    training = small_job().training.model_copy(update={"precision": "fp8"})
    with pytest.raises(RuntimeError, match=r"precision=fp8 needs a CUDA device of compute capability 8.9 .*use bf16"):
        apply_precision(model, training, torch.device("cpu"))


def test_fp8_emulated_is_near_bf16_and_changes_blocks_only() -> None:
    pytest.importorskip("torchao")
    bf16, fp8 = model_of(False), model_of(True)
    assert [name for name, _ in fp8.named_parameters()] == [name for name, _ in bf16.named_parameters()]
    converted = {name for name, module in fp8.named_modules() if type(module).__name__ == "Float8Linear"}
    assert len(converted) == 4 * 7 and all(name.startswith("model.layers.") for name in converted)
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected, actual = (model.blocks[0].get_submodule("self_attn.q_proj")(x).float() for model in (bf16, fp8))
    distance = (actual - expected).norm() / expected.norm()
    # Both factors have 3 bits of mantissa: each is up to 1/16 off, about 0.025 in the mean square, and they add up.
    assert 0.02 < distance < 0.05
    fp8(torch.zeros(2, 32, dtype=torch.int64)).float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in fp8.parameters())
