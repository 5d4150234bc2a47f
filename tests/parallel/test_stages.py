from __future__ import annotations

from torch import nn

from elastic_train.config.model import ModelConfig
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.stages import EMBEDDING, HEAD, stages_of


def model(tied: bool) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "hidden_size": 8,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 8,
            "vocab_size": 16,
            "tie_word_embeddings": tied,
        }
    )


def test_stages_of_one_rank_keep_the_global_names() -> None:
    config = model(tied=False)
    first = Transformer(config, range(1), first=True, last=False)
    third = Transformer(config, range(2, 3), first=False, last=False)
    stages = stages_of([first, third])
    assert [index for index, _ in stages.blocks()] == [0, 2]
    names = [name for name, _ in stages.named_parameters()]
    assert len(names) == len(set(names)) == 1 + 2 * 9
    assert {name.split(".")[2] for name in names if "layers" in name} == {"0", "2"}
    assert stages.shapes[EMBEDDING] == (16, 8)


def test_a_tied_head_on_another_stage_goes_by_the_embedding() -> None:
    last = Transformer(model(tied=True), range(3, 4), first=False, last=True)
    named = dict(stages_of([last]).named_parameters())
    assert last.lm_head is not None
    assert named[EMBEDDING] is last.lm_head.weight
    assert HEAD not in named
    assert isinstance(named[EMBEDDING], nn.Parameter)
