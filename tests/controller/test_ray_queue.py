"""Which jobs of a cluster wait for hosts that others have to leave them, as their coordinators tell."""

from __future__ import annotations

import json

import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.controller.processes import program
from tests.ray_job import refill

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

QUEUE = """
import json, sys, time
import ray
from elastic_train.controller.ray_actors import NAMESPACE, coordinator_name
from elastic_train.controller.ray_queue import OtherJobs

@ray.remote(num_cpus=0)
class Coordinator:
    def __init__(self, *answers):
        self.answers = list(answers)

    def lacks(self):
        if not self.answers:
            time.sleep(3600)
        return self.answers.pop(0)

@ray.remote(num_cpus=0)
class Older:
    pass

def lacks(cpus, hosts, missing):
    return {"seat": {"CPU": cpus}, "hosts": hosts, "missing": missing}

answers = {
    "own": [lacks(1, 2, 2)],
    "one short": [lacks(1, 2, 1)] * 100,
    "all short": [lacks(2, 2, 2)],  # and then frozen
    "too many": [lacks(1, 5, 5)] * 100,
    "has enough": [None] * 100,
    "frozen": [],
}
ray.init(address=sys.argv[1], namespace="a driver", log_to_driver=False, logging_level="ERROR")
place = {"namespace": NAMESPACE}
actors = {name: Coordinator.options(name=coordinator_name(name), **place).remote(*answers[name]) for name in answers}
actors["older"] = Older.options(name=coordinator_name("of an older release"), **place).remote()
actors["elsewhere"] = Coordinator.options(name=coordinator_name("elsewhere")).remote(lacks(1, 1, 1))
ray.get([actor.__ray_ready__.remote() for actor in actors.values()])
told = []
others = OtherJobs("own", told.append)

def until(waiting):
    deadline = time.monotonic() + 60
    while others.waiting() != waiting and time.monotonic() < deadline:
        time.sleep(0.1)
    return others.waiting()

found = {"waiting": until({"all short": 2, "one short": 1})}
ray.kill(actors["one short"])
found["without one"] = until({"all short": 2})
ray.kill(actors["all short"])
found["without both"] = until({})
for names in ([], ["a"], ["a"], ["a", "b"], []):
    others.leave_seats_to(names)
print(json.dumps(found | {"told": told}))
"""


def test_jobs_that_could_start_on_the_machines_there_are_are_waited_for(ray_cluster: LocalCluster) -> None:
    refill(ray_cluster, nodes=2, cpus=2)
    with program(QUEUE, ray_cluster.address) as asked:
        found = json.loads(asked.hear())
    assert found.pop("told") == [["a"], ["a", "b"], []]
    assert found == {"waiting": {"all short": 2, "one short": 1}, "without one": {"all short": 2}, "without both": {}}
