"""Two of three nodes die at the same moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import make_job
from tests.local_job import LocalJob
from tests.recovered import assert_recovered

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("partners", [1, 2])
def test_two_nodes_at_once_cost_no_step_with_two_copies_and_else_those_since_the_checkpoint(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path, partners: int
) -> None:
    options = ("parallel.pp=1", "hosts.max=3", f"snapshot.partners={partners}")
    with LocalJob(make_job(corpus, tmp_path, "two", *options)) as run:
        run.start_hosts("abc")
        before = run.wait(lambda status: status["step"] >= 13 and bool(run.told("checkpoint_committed")))
        run.kill_host("a0")
        run.kill_host("b1")
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start", "host_lost"])
        last = run.told("generation_formed")[-1]
        assert last["layout"] == "single"
        assert {event["node"] for event in run.told("host_lost")} == {"a", "b"}
        if partners == 2:
            assert last["step"] >= before["step"]
            assert not run.told("rolled_back")
            assert set(last["restored_bytes"]) == {"image"}
        else:  # one of the two had the copies of the other
            (back,) = run.told("rolled_back")
            saved = [event["step"] for event in run.told("checkpoint_committed") if event["time"] < back["time"]]
            assert last["step"] == back["to_step"] == saved[-1]
            assert "object" in last["restored_bytes"]
