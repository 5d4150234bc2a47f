from __future__ import annotations

import numpy as np

from tests.parallel.exchanges import exchange
from tests.ranks import run_ranks

RANDOM = np.random.default_rng(0)


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [RANDOM.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_gather_tokens() -> None:
    parts, weights = arrays(*[(2, 4, 5)] * 3), arrays(*[(2, 12, 5)] * 3)
    for rank, (out, gradient) in enumerate(run_ranks(exchange, 3, "gather_tokens", parts, weights)):
        np.testing.assert_array_equal(out, np.concatenate(parts, axis=1))
        np.testing.assert_allclose(gradient, sum(weights)[:, 4 * rank : 4 * rank + 4], rtol=1e-6, atol=1e-6)


def test_scatter_sum() -> None:
    wholes, weights = arrays(*[(2, 12, 5)] * 3), arrays(*[(2, 4, 5)] * 3)
    for rank, (out, gradient) in enumerate(run_ranks(exchange, 3, "scatter_sum", wholes, weights)):
        np.testing.assert_allclose(out, sum(wholes)[:, 4 * rank : 4 * rank + 4], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(gradient, np.concatenate(weights, axis=1))
