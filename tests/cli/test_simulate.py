from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_train.cli.main import app
from tests.cli.command import elastic_train
from tests.config.job_files import GOOD

RUN = Path(__file__).parents[1] / "planner" / "simulation"
TRACE = '{"at": 100, "kind": "kill-node"}\n{"at": 900, "kind": "hang"}\n'


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give a cluster: --nodes, a job file, --like llama3, or --from JOB"),
        (["--nodes", "0"], "--nodes=0: must be at least 1"),
        (["--nodes", "4", "--spares", "-1"], "--spares=-1: must be at least 0"),
        (["--nodes", "4", "--gpus-per-node", "0"], "--gpus-per-node=0: must be at least 1"),
        (["--nodes", "4", "--runs", "0"], "--runs=0: must be at least 1"),
        (["--nodes", "4", "--days", "-3"], "--days=-3: must be a number above 0"),
        (["--nodes", "4", "--mtbf-hours", "0"], "--mtbf-hours=0: must be a number above 0"),
        (["--nodes", "4", "--mtbf-hours", "nan"], "--mtbf-hours=nan: must be a number above 0"),
        (["--nodes", "4", "--unit-nodes", "5"], "--unit-nodes=5: must be at most --nodes=4"),
        (["--nodes", "5", "--unit-nodes", "2"], "--nodes=5: only whole replicas of --unit-nodes=2 work; give 4 or 6"),
        (
            ["--like", "llama3", "--nodes", "8"],
            "--nodes=8: only whole replicas of --unit-nodes=16, as of --like=llama3, work; give 16",
        ),
        (
            ["--nodes", "4", "--failures", "trace.jsonl", "--spot", "1/d"],
            "--spot: all failures are those of trace.jsonl; give only one of them",
        ),
        (["--nodes", "4", "--failures", "trace.jsonl", "--mtbf-hours", "9"], "--mtbf-hours: all failures are those of"),
        (
            ["--nodes", "4", "--failures", "trace.jsonl", "--runs", "3"],
            "--runs=3: trace.jsonl is one run; leave it out",
        ),
        (["--nodes", "4", "--failures", "late.jsonl"], "late.jsonl, line 1: at=1e+308 must be at most 1e+09 seconds"),
        (["job.yaml", "--checkpoint-takes", "1d"], "--checkpoint-takes=86400s: job.yaml saves every"),
        (["--nodes", "4", "--plot", "picture.xyz"], "--plot=picture.xyz: must end in .png"),
        (["--nodes", "4", "--plot", "/proc/x.png"], "--plot=/proc/x.png: cannot be written"),
        (["--nodes", "4", "--html", "empty"], "--html=empty: is a folder; give a file"),
        (["--nodes", "4", "--html", "bad.jsonl/page.html"], "--html=bad.jsonl/page.html: cannot be written"),
        (["--nodes", "4", "--mtbf-hours", "1e-5"], "failures are to be expected in 20 runs: at most 1e+07"),
        (["--nodes", "4", "--days", "1e300"], "failures are to be expected in 20 runs: at most 1e+07"),
        (["--from", "./lone"], "the ledger's last run has no host_joined before its first generation"),
        (["--nodes", "4", "--failures", "gauss"], "--failures='gauss': must be exponential, weibull:SHAPE"),
        (["--nodes", "4", "--failures", "weibull:0"], "--failures='weibull:0': must be exponential, weibull:SHAPE"),
        (["--nodes", "4", "--failures", "bad.jsonl"], "bad.jsonl, line 2: kind='explode' is none of kill-trainer"),
        (["--nodes", "4", "--failures", "none.jsonl"], "none.jsonl cannot be read"),
        (["--nodes", "4", "--spot", "5"], "--spot='5' is no rate; write reclaims per node as 0.05/h"),
        (["--nodes", "4", "--rack-nodes", "2"], "--rack-nodes and --rack-mtbf-hours belong together"),
        (
            ["--nodes", "4", "--checkpoint-every", "5s"],
            "--checkpoint-every=5s: must be at least the 60.98 s that a save takes",
        ),
        (
            ["--nodes", "4", "--checkpoint-every", "5s", "--checkpoint-takes", "8s"],
            "--checkpoint-every=5s: must be at least --checkpoint-takes=8s",
        ),
        (
            ["--nodes", "4", "--checkpoint-stall", "61", "--checkpoint-takes", "1m"],
            "--checkpoint-stall=61s: must be at most --checkpoint-takes=60s",
        ),
        (["--nodes", "4", "--checkpoint-size", "10"], "--checkpoint-size=10: must be a size above 0 such as 840GB"),
        (["--nodes", "4", "--checkpoint-size", "0GB"], "--checkpoint-size=0GB: must be a size above 0 such as 840GB"),
        (["--nodes", "4", "--storage-write", "2TB"], "--storage-write=2TB: must be a rate above 0 such as 2TB/s"),
        (["--nodes", "4", "--storage-read", "fast"], "--storage-read=fast: must be a rate above 0 such as 2TB/s"),
        (["--nodes", "4", "--replace", "never"], "--replace=never: must be a duration as 1h, exponential:MEAN or"),
        (["--nodes", "4", "--replace", "gauss:1h"], "--replace=gauss:1h: must be a duration as 1h"),
        (["--nodes", "4", "--replace", "exponential:1h:2"], "--replace=exponential:1h:2: must be a duration"),
        (["--nodes", "4", "--replace", "lognormal:2h"], "--replace=lognormal:2h: must be a duration"),
        (["--nodes", "4", "--replace", "lognormal:2h:0"], "--replace=lognormal:2h:0: must be a duration"),
        (["--nodes", "4", "--replace", "lognormal:2h:nan"], "--replace=lognormal:2h:nan: must be a duration"),
        (["--nodes", "1", "--failures", "named.jsonl"], "--nodes=1: the trace names 2 nodes, so give at least 2"),
        (["--nodes", "4", "--recovery", "magic"], "--recovery=magic: must be one of elastic, restart, both"),
        (["--nodes", "4", "--best", "price"], "--best=price: must be one of interval, spares"),
        (["--nodes", "4", "--step", "0s"], "'0s' is no duration"),
        (["--like", "gpt5"], "--like=gpt5: must be llama3"),
        (["--from", "nobody", "--days", "4"], "only --seed and --runs go with it"),
        (["--nodes", "4", "--price", "-1"], "--price=-1: must be a number of at least 0"),
        (["--nodes", "4", "--partners", "-1"], "--partners=-1: must be at least 0"),
        (["--nodes", "4", "--checkpoint-stall", "nan"], "--checkpoint-stall=nan: must be at least 0"),
        (["--from", "nobody"], "no job folder runs/nobody"),
        (["--from", "./empty"], "the ledger has no job_started: nothing has run"),
        (["--from", "nobody", "--nodes", "4"], "--from takes cluster, failures and costs from the run's logs"),
        (["job.yaml", "--min-nodes", "2"], "--min-nodes: job.yaml says that itself, by parallel and hosts.min"),
        (["none.yaml"], "none.yaml: no such file"),
        (["job.yaml", "--gpus-per-node", "1", "--nodes", "1"], "job.yaml: 1 host cannot hold parallel.pp=2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"at": 1, "kind": "hang"}\n{"at": 2, "kind": "explode"}\n')
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "named.jsonl").write_text("".join(f'{{"at": 1, "kind": "hang", "node": "{name}"}}\n' for name in "ab"))
    (tmp_path / "late.jsonl").write_text('{"at": 1e308, "kind": "hang"}\n')
    (tmp_path / "lone").mkdir()
    ledger = (RUN / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "lone" / "ledger.jsonl").write_text("".join(line for line in ledger if "host_joined" not in line))
    shutil.copy(RUN / "steps.jsonl", tmp_path / "lone")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "ledger.jsonl").write_text("")
    (tmp_path / "job.yaml").write_text(GOOD + "parallel: {pp: 2, dp_shard: auto}\nhosts: {min: 2, max: 4}\n")
    done = CliRunner().invoke(app, ["simulate", *arguments], terminal_width=200)
    assert done.exit_code == 2, done.stderr
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def test_an_answer_as_json_as_a_table_and_as_a_page(tmp_path: Path) -> None:
    question = ["simulate", "--nodes", "8", "--days", "3", "--mtbf-hours", "100", "--runs", "3", "--price", "2.5"]
    done = elastic_train(*question, "--recovery", "both", "--json", "--html", "out/page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)["answers"]
    assert list(answers) == ["elastic", "restart"]
    figures = answers["elastic"]["figures"]
    assert 80 < answers["restart"]["figures"]["ETTR %"]["mean"] < figures["ETTR %"]["mean"] < 100
    assert figures["cost"]["mean"] == pytest.approx(2.5 * figures["host-hours"]["mean"])
    assert sum(answers["elastic"]["percent_of_host_time"].values()) == pytest.approx(100)
    page = (tmp_path / "out" / "page.html").read_text()
    assert "data:image/png;base64,iVBOR" in page and "restored from storage" in page
    assert "http" not in page  # nothing is fetched
    assert '<meta name="viewport"' in page and page.count('<div class="wide">') == 3  # also on a narrow screen
    assert "e-0" not in page.split("base64,")[1].split('"', 1)[1]  # <0.01, and no 1.601e-05
    notes = " ".join(json.loads(done.stdout)["notes"])
    assert "measured with a small model" in notes and "restart&#39;s are assumed" in page
    assert "assumed: --step 10s, --replace 1h" in notes and "--replace 1h" in page
    table = elastic_train(*question, cwd=tmp_path)
    assert f"goodput %\t{figures['goodput %']['mean']}" in table.stdout


def test_a_trace_a_job_file_and_the_best_interval(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "job.yaml").write_text(GOOD + "parallel: {pp: 2, dp_shard: auto}\nhosts: {min: 2, max: 8}\n")
    arguments = ["job.yaml", "--gpus-per-node", "2", "--failures", "trace.jsonl", "--partners", "0", "--json"]
    done = elastic_train("simulate", *arguments, "--best", "interval", "--plot", "picture.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["question"].startswith("4 nodes x 2 GPUs, 0 spare, 22.5 minutes; 2 failures of trace.jsonl; 1 run")
    assert answer["answers"]["elastic"]["figures"]["restored from storage"]["mean"] == 1
    assert "asks for up to" not in " ".join(answer["notes"])  # the cluster is just what the job asks for
    assert answer["best"]["what"] == "interval"
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_real_trace_and_drawn_repairs(tmp_path: Path) -> None:
    """The second fault of a node that is away strikes nobody: it is told as a failure and interrupts nothing."""
    lines = [
        {"at": 3600, "kind": "kill-trainer", "node": "gpu-07", "away": 7200},
        {"at": 5000, "kind": "kill-node", "node": "gpu-07"},
        {"at": 90000, "kind": "kill-node", "node": "gpu-11"},
    ]
    (tmp_path / "faults.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    question = ["simulate", "--nodes", "8", "--failures", "faults.jsonl", "--days", "2"]
    done = elastic_train(*question, "--replace", "lognormal:2h:1.0", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["answers"]["elastic"]["figures"]
    assert (figures["failures"]["mean"], figures["interruptions"]["mean"]) == (3, 2)
    assert figures["host-hours"]["mean"] < 64 * 48 - 8 * 2  # two hours of the first, some of the second


def test_a_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    for name in ("ledger.jsonl", "steps.jsonl"):
        shutil.copy(RUN / name, folder)
    done = elastic_train("simulate", "--from", "mine", "--runs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "goodput measured 32.4 %, simulated" in done.stdout
    assert "host time\tsimulated %\tmeasured %" in done.stdout


def test_the_documentation_has_every_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    options = re.findall(r"^│ (--[a-z-]+)", CliRunner().invoke(app, ["simulate", "--help"]).stdout, re.MULTILINE)
    assert len(options) > 30
    assert [option for option in options if option not in text and option != "--help"] == []
