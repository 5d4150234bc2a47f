"""The main job as a newcomer runs it, shortened: three real nodes, one killed, one come back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.command import elastic_train

pytestmark = pytest.mark.cluster

STEPS = 400
"""Steps of a quarter of a second, so that the node is back (torch imported, settled) well before the last one."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_survives_a_node_and_takes_it_back(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastic_train.cli.main", "quickstart", f"training.steps={STEPS}"]
    folder = tmp_path / "runs" / "quickstart"
    try:
        done = subprocess.run(
            [*command, "data.sequence_length=64"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        ledger = folder / "ledger.jsonl"
        pytest.fail(f"{(error.stdout or b'')[-3000:]!r}\n{ledger.read_text() if ledger.exists() else 'no ledger'}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    audit = elastic_train("data", "audit", "--job", "quickstart", cwd=tmp_path)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "no gap, no repeat: every step was trained on its own samples, each once" in audit.stdout
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    causes = [event["cause"] for event in ledger if event["event"] == "generation_formed"]
    assert causes == ["start", "host_lost", "growth"]
    summary = " ".join(done.stdout.split())
    for pattern in (
        r"steps lost 0 ",
        r"time of hosts goodput [0-9.]+ % of [0-9,]+ host-seconds; start ",
        r"recovered in [0-9.]+ s to the next finished step, in layout pp2 ",
        r"node taken in at step \d+, layout pp2 x dp_shard2",
        r"mlflow ui --backend-store-uri sqlite:",
    ):
        assert re.search(pattern, summary), f"{pattern} is not in: {summary[-2000:]}"
    for plot in ("loss.png", "time.png"):
        assert (folder / plot).read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(folder / "exports" / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "exports" / "hf")
    prompt = tokenizer("def ", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=5, do_sample=False).shape[1] == prompt["input_ids"].shape[1] + 5
    assert not list(Path("/dev/shm").glob("elastic_train-quickstart-*"))
