"""The logs of a made-up run: a host is lost at step 60 of 160 and comes back at step 110."""

from __future__ import annotations

import math
from typing import Any


def made_up_run(steps: int = 160) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(lines of steps.jsonl, lines of ledger.jsonl)."""
    lines = []
    for step in range(1, steps + 1):
        generation = 1 if step <= 60 else 2 if step <= 110 else 3
        loss = 3.2 + 5.1 * math.exp(-step / 28) + 0.06 * math.sin(step * 1.7) + 0.04 * math.sin(step * 5.1)
        lines.append(
            {
                "step": step,
                "loss": loss,
                "generation": generation,
                "layout": "pp2" if generation == 2 else "pp2 x dp_shard2",
                "valid_tokens": 2048,
                "seconds": (1.9 if generation == 2 else 1.0) + 0.05 * math.sin(step),
            }
        )
    ledger = [
        {"event": "generation_formed", "generation": 1, "hosts": 4, "cause": "start", "recovery_seconds": 6.0},
        {"event": "host_lost", "host": 3},
        {"event": "generation_formed", "generation": 2, "hosts": 2, "cause": "host_lost", "recovery_seconds": 2.3},
        {"event": "generation_formed", "generation": 3, "hosts": 4, "cause": "growth", "recovery_seconds": 1.4},
    ]
    return lines, ledger
