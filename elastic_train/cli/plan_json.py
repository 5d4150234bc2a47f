"""``elastic-train plan --json``: bytes, seconds and FLOP/s, one object per pipeline rank with every term."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_train.cli.plan_answer import Answer, Priced, Sent


def document(answer: Answer) -> dict[str, Any]:
    """JSON-ready. Units are in the names."""
    question = answer.question
    return {
        "job": question.job.as_dict(),
        "parameters": question.job.model.num_parameters,
        "gpus": question.gpus,
        "accelerator": dataclasses.asdict(question.accelerator),
        "memory_limit_bytes": question.memory_limit,
        "host_memory_limit_bytes": question.accelerator.host_memory_bytes,
        "tokens": question.tokens,
        "tokens_per_step": question.tokens_per_step,
        "flops_per_token": answer.work,
        "assumed": question.assumed,
        "calibration": answer.calibration,
        "as_the_file_is": answer.as_is,
        "layouts": [_layout(number, row) for number, row in enumerate(answer.priced, start=1)],
        "rejected": [
            {"limit": entry.limit, "count": entry.count, "example": entry.example}
            for entry in answer.ranking.rejected.values()
        ],
    }


def _layout(number: int, row: Priced) -> dict[str, Any]:
    plan = row.candidate
    return {
        "number": number,
        "layout": plan.layout.as_dict(),
        "ranks": plan.layout.world_size,
        "options": plan.options,
        "memory": [
            {
                "pipeline_rank": index,
                "stages": list(rank.stages),
                "terms_bytes": rank.terms,
                "total_bytes": rank.total,
                "moment": rank.moment,
                "state_bytes": rank.state,
                "host_terms_bytes": rank.host,
                "host_total_bytes": sum(rank.host.values()),
            }
            for index, rank in enumerate(row.memory)
        ],
        "host_bytes_per_node": row.host_bytes,
        "model_state_bytes": row.state,
        "model_state_formula": row.state_formula,
        "traffic": [_sent(each) for each in row.traffic],
        "step_seconds": plan.time.total,
        "terms_seconds": plan.time.terms,
        "tokens_per_second": plan.time.tokens_per_second,
        "hidden_seconds": plan.time.hidden,
        "exposed_seconds": plan.time.exposed,
        "mfu": plan.time.use.mfu,
        "mfu_causal": plan.time.use.mfu_causal,
        "hfu": plan.time.use.hfu,
        "bubble": plan.time.bubble,
        "days": row.days,
        "cost": row.cost,
        "currency": row.currency,
        "reasons": row.reasons,
    }


def _sent(each: Sent) -> dict[str, Any]:
    """Of the pipeline rank that sends most, in one step."""
    exchange = each.exchange
    return {
        "axis": exchange.axis,
        "what": exchange.what,
        "collective": exchange.collective,
        "count": exchange.count,
        "dtype": exchange.dtype,
        "payload_bytes": exchange.payload_bytes,
        "sent_bytes": exchange.sent_bytes,
        "seconds": each.seconds,
        "overlaps": exchange.overlaps,
    }
