"""Rotary position embedding in the rotate-half convention of HF Llama, with the Llama 3.1 frequency scaling.

Shape suffixes: B batch, H heads, T tokens, E width of one head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from elastic_train.config.model import ModelConfig, RopeScaling


class Rotary:
    """cos/sin tables, computed once per (length, device). Not a module: there is nothing to train, save or shard."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._key: tuple[int, torch.device] | None = None
        self._tables: tuple[Tensor, Tensor]

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """float32 cos_TE and sin_TE for positions 0 .. length-1."""
        if self._key != (length, device):
            angles_TE = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(self._config)[None, :]
            angles_TE = torch.cat((angles_TE, angles_TE), dim=-1)
            self._tables = (angles_TE.cos().to(device), angles_TE.sin().to(device))
            self._key = (length, device)
        return self._tables


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [head_size / 2], radians per position: ``theta ** (-2i / head_size)``, scaled as Llama 3.1 does."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponents)
    return _scale_llama3(frequencies, config.rope_scaling) if config.rope_scaling else frequencies


def _scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by ``factor``, short ones kept, the band between is interpolated (HF ``llama3``)."""
    low_wavelength = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high_wavelength = scaling.original_max_position_embeddings / scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low_wavelength, frequencies / scaling.factor, between)
    return torch.where(wavelengths < high_wavelength, frequencies, scaled)


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + E/2) by the angle of their position, in float32. ``cos``, ``sin``: [.., T, E]."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return (x_BHTE * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x_BHTE)
