"""The pipeline stages of one rank, and the names and places of the parameters in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from elastic_train.model.transformer import Transformer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Stages:
    """``modules``: this rank's stages, in the order of their place in the model; one without virtual stages.

    ``shapes``: state name -> global shape of every parameter held here.
    """

    modules: list[Transformer]
    shapes: dict[str, tuple[int, ...]]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by state name: a head that is tied to an embedding on another stage goes by the embedding's."""
        for module in self.modules:
            for name, parameter in module.named_parameters():
                yield state_name(module, name), parameter

    @property
    def trained(self) -> list[str]:
        """State names of the parameters that get gradients."""
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Global layer number and module of every block held here."""
        for module in self.modules:
            yield from module.blocks.items()


def state_name(module: Transformer, name: str) -> str:
    """The name under which a parameter of ``module`` is saved."""
    return EMBEDDING if name == HEAD and module.config.tie_word_embeddings else name


def stages_of(modules: list[Transformer]) -> Stages:
    """Take down the global shapes, before any axis cuts the parameters."""
    shapes = {state_name(module, name): tuple(p.shape) for module in modules for name, p in module.named_parameters()}
    return Stages(modules, shapes)
