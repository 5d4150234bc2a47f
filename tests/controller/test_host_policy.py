"""How many hosts the policy starts with, on a real cluster, and that what it wished for meanwhile is given back."""

from __future__ import annotations

import json

import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.controller.processes import program
from tests.ray_job import refill

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

ROUNDS = 6
POLICY = """
import json, sys, time
import ray
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2.api.config import ScalingConfig
from ray.util import placement_group_table
from elastic_train.controller.ray_internals import HostPolicy, count_seats

def decide(policy):
    while not isinstance(decision := policy.make_decision_for_non_running_worker_group(), ResizeDecision):
        pass
    return decision.num_workers

def policy(minimum, maximum, wait):
    return HostPolicy(ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}), minimum, maximum, wait, str, id)

@ray.remote(num_cpus=1)
class Busy:
    def there(self):
        return True

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
before = len(placement_group_table())  # those of jobs that have ended are told of, too
found = {"at once": decide(policy(1, 4, 60.0)), "groups made": len(placement_group_table()) - before}
found["freed meanwhile"] = []
for number in range(int(sys.argv[2])):
    busy = [Busy.remote() for _ in range(4)]
    ray.get([each.there.remote() for each in busy])
    waiting = policy(2, 4, 60.0)
    waiting.make_decision_for_non_running_worker_group()
    for each in busy:  # any of them may be the one that the group just needed
        ray.kill(each)
    found["freed meanwhile"].append(decide(waiting))
    deadline = time.monotonic() + 20
    while count_seats({"CPU": 1}) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
found["seats"] = count_seats({"CPU": 1})
print(json.dumps(found))
"""


def test_no_wish_is_made_for_seats_that_are_free_and_none_is_removed_while_it_is_placed(
    ray_cluster: LocalCluster,
) -> None:
    refill(ray_cluster, nodes=2, cpus=2)
    with program(POLICY, ray_cluster.address, str(ROUNDS)) as asked:
        found = json.loads(asked.hear())
    assert found == {"at once": 4, "groups made": 0, "freed meanwhile": [4] * ROUNDS, "seats": 4}
