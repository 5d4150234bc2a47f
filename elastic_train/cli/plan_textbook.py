"""``elastic-train plan --params``: model state and days for a plain number of parameters, as textbooks count them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.planner.textbook import Strategy


def answer(
    parameters: float,
    ranks: int,
    strategy: str | None,
    *,
    tokens: float | None,
    flops_per_second: float | None,
    as_json: bool,
) -> None:
    """Print one strategy, or all of them. ``flops_per_second``: sustained by the whole cluster."""
    states = [_state(parameters, name, ranks) for name in _strategies(strategy, ranks)]
    training = _training(parameters, tokens, flops_per_second)
    if as_json:
        # Every rank holds the same; a list of them would say it ``ranks`` times.
        typer.echo(json.dumps({"parameters": parameters, "ranks": ranks, "per_rank": states} | training, indent=2))
        return
    _print(parameters, ranks, states, training)


def _strategies(strategy: str | None, ranks: int) -> list[Strategy]:
    from elastic_train.planner.textbook import STRATEGIES

    if ranks < 1:
        raise UserError(f"--ranks {ranks}: must be at least 1")
    if strategy is None:
        return [name for name in STRATEGIES if name != "hsdp"]
    known = [name for name in STRATEGIES if name == strategy]
    if not known:
        raise UserError(f"--strategy {strategy}: must be one of {', '.join(STRATEGIES)}")
    return known


def _state(parameters: float, strategy: Strategy, ranks: int) -> dict[str, Any]:
    from elastic_train.planner.textbook import textbook_formula, textbook_state

    terms = textbook_state(parameters, strategy, ranks)
    return {
        "strategy": strategy,
        "formula": textbook_formula(strategy),
        "terms_bytes": terms,
        "total_bytes": sum(terms.values()),
    }


def _training(parameters: float, tokens: float | None, flops_per_second: float | None) -> dict[str, Any]:
    from elastic_train.planner.flops import DAY, seconds_for, six_pd

    if tokens is None:
        if flops_per_second is not None:
            raise UserError("--flops-per-second needs --tokens: without them there is nothing to divide")
        return {}
    flops = six_pd(parameters, tokens)
    found: dict[str, Any] = {"tokens": tokens, "flops": flops}
    if flops_per_second is not None:
        seconds = seconds_for(flops, flops_per_second)
        found |= {"flops_per_second": flops_per_second, "seconds": seconds, "days": seconds / DAY}
    return found


def _print(parameters: float, ranks: int, states: list[dict[str, Any]], training: dict[str, Any]) -> None:
    from elastic_train.cli.tables import Column, print_table

    typer.echo(
        f"Model state of mixed-precision Adam for P = {parameters:,.0f} parameters on N = {ranks:,} ranks: 2 bytes of "
        "weights, 2 of gradients, 12 of optimizer each (arXiv:1910.02054). Activations and buffers are not in it."
    )
    columns = [Column("strategy", left=True), Column("per rank", left=True)]
    columns += [Column(name, _both) for name in ("weights", "gradients", "optimizer", "total")]
    print_table(
        columns,
        [
            (state["strategy"], state["formula"], *state["terms_bytes"].values(), state["total_bytes"])
            for state in states
        ],
    )
    if training:
        typer.echo(f"6PD = {training['flops']:.4g} floating point operations for {training['tokens']:,.0f} tokens")
    if "days" in training:
        typer.echo(f"at {training['flops_per_second']:.4g} FLOP/s sustained: {training['days']:,.1f} days")


def _both(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3f} GB = {nbytes / 2**30:,.2f} GiB"
