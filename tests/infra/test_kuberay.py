"""The manifests of ``cluster/kuberay``: built by Kustomize, checked against schemas, and for what goes wrong in use."""

from __future__ import annotations

import contextlib
import copy
import http.client
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml

from elastic_train.cli.job_server import GRACE, JOB
from elastic_train.config.load import parse_job
from elastic_train.config.sizes import parse_size
from elastic_train.controller.local_cluster import LocalCluster, LocalNode
from elastic_train.controller.local_node import HEALTH_CHECKS
from elastic_train.controller.ray_versions import TESTED_RAY_VERSIONS
from tests.infra.manifests import FOLDER, VARIANTS, Manifest, build, problems
from tests.ray_job import until

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def named(variant: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in build(FOLDER / variant) if manifest["kind"] == kind]


def cluster_spec(variant: str) -> dict[str, Any]:
    """Of the RayCluster, or of the one that the RayJob starts."""
    (manifest,) = named(variant, "RayCluster") + named(variant, "RayJob")
    spec: dict[str, Any] = manifest["spec"]
    return spec.get("rayClusterSpec", spec)


def groups(variant: str) -> list[dict[str, Any]]:
    """The head's and the workers'."""
    spec = cluster_spec(variant)
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def pods(variant: str) -> Iterator[dict[str, Any]]:
    """Every pod template."""
    yield from (group["template"] for group in groups(variant))
    yield from (job["spec"]["submitterPodTemplate"] for job in named(variant, "RayJob"))
    yield from (each["spec"]["template"] for each in named(variant, "StatefulSet"))


def test_every_variant_is_tested() -> None:
    bases = {"base", "job"}
    assert set(VARIANTS) | bases == {each.name for each in FOLDER.iterdir() if each.is_dir()}


@every_variant
def test_an_api_server_takes_all(variant: str) -> None:
    manifests = build(FOLDER / variant)
    assert {f"{each['kind']} {each['metadata']['name']}": problems(each) for each in manifests} == {
        f"{each['kind']} {each['metadata']['name']}": [] for each in manifests
    }


POD = "spec.headGroupSpec.template"


@pytest.mark.parametrize(
    ("variant", "kind", "path", "value", "said"),
    [
        ("gpu", "RayCluster", "spec.autoscalerOption", {}, "autoscalerOption"),
        ("gpu", "RayCluster", "spec.autoscalerOptions.version", "v3", "v3"),
        ("gpu", "RayCluster", "spec.autoscalerOptions.upscalingMode", "Fast", "Fast"),
        ("gpu", "RayCluster", "spec.authOptions.mode", "none", "none"),
        ("gpu", "RayCluster", "spec.authOptions.secretName", "token", "secretName"),  # of a later KubeRay
        ("gpu", "RayCluster", "spec.headGroupSpec", None, "None is not of type"),
        ("gpu", "RayCluster", "spec.headGroupSpec.replicas", 1, "replicas"),
        ("gpu", "RayCluster", "spec.workerGroupSpecs.0.minReplicas", "2", "'2' is not of type"),
        ("gpu", "RayCluster", "spec.workerGroupSpecs.0.maxReplicas", -1, "-1"),
        ("gpu", "RayCluster", "spec.workerGroupSpecs.0.rayStartParams.num-cpus", 4, "4 is not of type"),
        ("gpu", "RayCluster", f"{POD}.metadata.ownerReferences", [], "ownerReferences"),
        ("gpu", "RayCluster", f"{POD}.spec.containers.0.readynessProbe", {}, "readynessProbe"),
        ("gpu", "RayCluster", f"{POD}.spec.containers.0.readinessProbe.httpGet.port", None, "port"),
        ("gpu", "RayCluster", f"{POD}.spec.containers.0.ports.0.containerPort", "6379", "6379"),
        ("gpu", "RayCluster", f"{POD}.spec.containers.0.resources.limits.memory", [1], "[1]"),
        ("gpu", "RayCluster", f"{POD}.spec.volumes.0.emptyDir.sizelimit", "4Gi", "sizelimit"),
        ("gpu", "RayCluster", f"{POD}.spec.securityContext.runAsUser", "ray", "ray"),
        ("gpu", "RayCluster", "apiVersion", "ray.io/v1alpha1", "ray.io/v1alpha1"),
        ("gpu", "PodDisruptionBudget", "spec.minAvalable", 1, "minAvalable"),
        ("gpu", "NetworkPolicy", "spec.policyTypes", "Ingress", "Ingress"),
        ("gpu-ha", "RayCluster", "spec.gcsFaultToleranceOptions.redisAdress", "redis:6379", "redisAdress"),
        ("gpu-ha", "RayCluster", "spec.gcsFaultToleranceOptions", {}, "redisAddress"),
        ("gpu-ha", "StatefulSet", "spec.replicas", "1", "'1' is not of type"),
        ("job-gpu", "RayJob", "spec.ttlSecondsAfterFinish", 600, "ttlSecondsAfterFinish"),
        ("job-gpu", "RayJob", "spec.submissionMode", "K8sJob", "K8sJob"),
        ("job-gpu", "RayJob", "spec.backoffLimit", -1, "-1"),
        ("job-gpu", "RayJob", "spec.runtimeEnvYAML", {"env_vars": {}}, "env_vars"),
        ("job-gpu", "RayJob", "spec.metadata.grace_seconds", 60, "60 is not of type"),
        ("job-gpu", "RayJob", "spec.rayClusterSpec.workerGroupSpecs.0.groupname", "a", "groupname"),
        ("job-gpu", "RayJob", "spec.submitterPodTemplate.spec.restartPolcy", "Never", "restartPolcy"),
        ("kueue", "ClusterQueue", "spec.preemption.withinClusterQueue", "Always", "Always"),
        ("kueue", "ClusterQueue", "spec.resourceGroups.0.flavors.0.resources.0.quota", 1, "quota"),
        ("kueue", "ClusterQueue", "spec.resourceGroups.0.coveredResources", [], "[]"),
        ("kueue", "LocalQueue", "spec.clusterQueue", None, "None is not of type"),
        ("kueue", "LocalQueue", "spec.cohort", "a", "cohort"),
        ("kueue", "ResourceFlavor", "spec.nodeLabels", ["spot"], "spot"),
    ],
)
def test_a_wrong_field_is_found(variant: str, kind: str, path: str, value: Any, said: str) -> None:
    manifest = copy.deepcopy(named(variant, kind)[0])
    *parents, last = path.split(".")
    place: Any = manifest
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    assert problems(manifest) == []
    place[last] = value
    assert said in " ".join(problems(manifest))


@pytest.mark.parametrize(
    ("variant", "kind", "path"),
    [
        ("gpu", "RayCluster", "spec.headGroupSpec"),
        ("gpu", "RayCluster", "spec.headGroupSpec.template"),
        ("gpu", "RayCluster", "spec.workerGroupSpecs.0.groupName"),
        ("gpu", "RayCluster", "spec.workerGroupSpecs.0.maxReplicas"),
        ("gpu", "RayCluster", f"{POD}.spec.containers"),
        ("gpu", "RayCluster", f"{POD}.spec.containers.0.name"),
        ("job-gpu", "RayJob", "spec"),
        ("kueue", "LocalQueue", "spec.clusterQueue"),
        ("kueue", "ClusterQueue", "spec.resourceGroups.0.flavors.0.name"),
        ("gpu", "NetworkPolicy", "spec.podSelector"),
    ],
)
def test_a_field_that_is_not_there_is_found(variant: str, kind: str, path: str) -> None:
    manifest = copy.deepcopy(named(variant, kind)[0])
    *parents, last = path.split(".")
    place: Any = manifest
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    del place[last]
    assert f"'{last}' is a required property" in " ".join(problems(manifest))


# -- what a schema does not see ----------------------------------------------------------------------------------------


@every_variant
def test_one_image_with_a_tag_for_all_and_one_version_of_ray(variant: str) -> None:
    """Two versions of Ray or Python in one cluster fail late (ray-project/ray#44063, ray-project/kuberay#154)."""
    templates = [*(group["template"] for group in groups(variant))]
    templates += [job["spec"]["submitterPodTemplate"] for job in named(variant, "RayJob")]
    images = {container["image"] for template in templates for container in template["spec"]["containers"]}
    assert len(images) == 1
    assert re.fullmatch(r"elastic-train:[0-9.]+-(cpu|cuda)", images.pop())
    assert cluster_spec(variant)["rayVersion"] == ray.__version__
    assert ray.__version__ in TESTED_RAY_VERSIONS


@every_variant
def test_shared_memory_is_a_volume_that_fits_into_the_limit(variant: str) -> None:
    """RY-10: without one a pod has 64 MB (NVIDIA/nccl#525); and what is in it counts as the container's memory."""
    for group in groups(variant):
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        (volume,) = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        (directory,) = [v["emptyDir"] for v in spec["volumes"] if v["name"] == volume]
        limit = parse_size(container["resources"]["limits"]["memory"] + "B")
        assert directory["medium"] == "Memory"
        assert parse_size(directory["sizeLimit"] + "B") + int(group["rayStartParams"]["object-store-memory"]) < limit


@every_variant
def test_pods_get_what_they_ask_for_and_no_rights(variant: str) -> None:
    for template in pods(variant):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]  # guaranteed, not burstable
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
        head = template["metadata"]["labels"].get("app.kubernetes.io/component") == "head"
        assert head or spec["automountServiceAccountToken"] is False  # the head's autoscaler needs it


@every_variant
def test_groups_can_grow_and_the_autoscaler_may_end_idle_ones(variant: str) -> None:
    spec = cluster_spec(variant)
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    names = [group["groupName"] for group in spec["workerGroupSpecs"]]
    assert names and len(names) == len(set(names))
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@every_variant
def test_probes_ask_the_dashboard_of_the_head_and_the_agent_of_workers(variant: str) -> None:
    for number, group in enumerate(groups(variant)):
        (container,) = group["template"]["spec"]["containers"]
        asked = {(container[probe]["httpGet"]["path"], container[probe]["httpGet"]["port"]) for probe in PROBES}
        assert asked == {("/api/local_raylet_healthz", 52365) if number else ("/api/gcs_healthz", 8265)}


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[LocalCluster, LocalNode]]:
    """A head with its dashboard, and a worker node."""
    with LocalCluster(include_dashboard=True) as cluster:
        (node,) = cluster.add_nodes(1, cpus=1)
        yield cluster, node


def answer(address: str, port: int, path: str) -> int:
    """The status of a GET without a token."""
    try:
        with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):  # nothing is there, or not HTTP
        return 0


def ports_of_agent(pid: int) -> list[int]:
    """On which it listens; none when it is not Ray's agent, or has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if "Agent" in process.name():
            return [each.laddr.port for each in process.net_connections("inet") if each.status == "LISTEN"]
    return []


@pytest.mark.slow
@pytest.mark.cluster
def test_ray_answers_the_probes_without_a_token(nodes: tuple[LocalCluster, LocalNode]) -> None:
    cluster, node = nodes
    head_path, worker_path = (
        group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] for group in groups("cpu")
    )
    port = cluster.dashboard_port
    assert port is not None
    until(lambda: answer("127.0.0.2", port, head_path) == 200)
    assert answer("127.0.0.2", port, "/api/jobs/") == 401  # others are asked for one

    def agent_answers() -> bool:  # on a port of its own here: several nodes share the machine
        heard = [port for pid in node.pids() for port in ports_of_agent(pid)]
        return 200 in [answer(node.address, port, worker_path) for port in heard]

    until(agent_answers)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_pod_that_is_ended_drains_its_node(nodes: tuple[LocalCluster, LocalNode]) -> None:
    """The preStop hook, as a pod would run it, but for the wait after it.

    Ray drains the node that it finds among the processes: those of the head are not to be seen, as from another pod.
    """
    cluster, worker = nodes
    head = next(pid for pid in cluster.nodes[0].pids() if psutil.Process(pid).name() == "raylet")
    apart = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none /proc/{head} && exec "$@"', "sh"]
    (container,) = groups("cpu")[1]["template"]["spec"]["containers"]
    *shell, script = container["lifecycle"]["preStop"]["exec"]["command"]
    tools = os.pathsep.join([str(Path(ray_executable()).parent), os.environ["PATH"]])
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PATH": tools}
    subprocess.run([*apart, *shell, script.replace("sleep 60", "true")], env=environment, check=True, timeout=120)
    look = (  # a node without work ends as soon as it is drained
        "import ray; from ray._private.state import state; ray.init(logging_level='error'); "
        "ended = {node['NodeID'] for node in ray.nodes() if not node['Alive']} | set(state.get_draining_nodes()); "
        "print(*(node['NodeManagerAddress'] for node in ray.nodes() if node['NodeID'] in ended))"
    )
    seen = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.split() == [worker.address]


def ray_executable() -> str:
    """Beside this Python, where ``ray`` is installed."""
    found = shutil.which("ray", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found is not None
    return found


@every_variant
def test_a_pod_has_time_to_leave(variant: str) -> None:
    for group in cluster_spec(variant)["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        script = container["lifecycle"]["preStop"]["exec"]["command"][-1]
        (deadline,), (pause,) = re.findall(r"remaining-seconds (\d+)", script), re.findall(r"sleep (\d+)", script)
        assert int(deadline) <= int(pause) < spec["terminationGracePeriodSeconds"] <= 120


@every_variant
def test_budgets_and_policies_are_about_the_pods(variant: str) -> None:
    labels = [template["metadata"]["labels"] for template in pods(variant)]

    def matched(selector: dict[str, Any]) -> list[dict[str, str]]:
        return [each for each in labels if selector["matchLabels"].items() <= each.items()]

    budgets = named(variant, "PodDisruptionBudget")
    kept = [each for budget in budgets for each in matched(budget["spec"]["selector"])]
    assert [each for each in labels if each.get("app.kubernetes.io/component") in ("head", "worker")] == kept
    for budget in budgets:
        # A percentage or maxUnavailable needs a controller with a scale subresource, and a RayCluster has none.
        assert isinstance(budget["spec"]["minAvailable"], int)
        assert "maxUnavailable" not in budget["spec"]
    policies = named(variant, "NetworkPolicy")
    guarded = [each for policy in policies for each in matched(policy["spec"]["podSelector"])]
    assert all(each in guarded for each in labels)  # no pod is open to everyone
    for policy in policies:
        assert all("from" in rule for rule in policy["spec"].get("ingress", ()))
    closed = [policy for policy in policies if "Egress" in policy["spec"]["policyTypes"]]
    assert all(any(each in matched(policy["spec"]["podSelector"]) for policy in closed) for each in labels)


def test_spot_machines_are_tolerated_by_their_group_alone() -> None:
    on_demand, spot = cluster_spec("gpu")["workerGroupSpecs"]
    assert spot["template"]["spec"]["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}
    tolerated = [
        {each["key"] for each in group["template"]["spec"]["tolerations"]} for group in (on_demand, spot)
    ]  # fmt: skip
    assert tolerated == [{"nvidia.com/gpu"}, {"nvidia.com/gpu", "elastic-train/spot"}]
    assert spot["minReplicas"] == 0
    (container,) = spot["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


@every_variant
def test_the_head_is_never_on_a_spot_machine(variant: str) -> None:
    """With it the cluster ends. Where there are no spot machines, nothing is asked of the head's machine."""
    spec = cluster_spec(variant)
    head, *workers = (group["template"] for group in groups(variant))
    kinds = {template["spec"].get("nodeSelector", {}).get("karpenter.sh/capacity-type") for template in workers}
    assert ("spot" in kinds) == ("cpu" not in spec["workerGroupSpecs"][0]["groupName"])
    if "spot" in kinds:
        assert head["spec"]["nodeSelector"] == {"karpenter.sh/capacity-type": "on-demand"}
        assert head["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    assert head["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


@every_variant
def test_the_heads_logs_are_where_kuberay_puts_those_of_the_autoscaler(variant: str) -> None:
    """KubeRay mounts the volume ``ray-logs`` at /tmp/ray of the autoscaler's container, and makes one if there is none:
    the autoscaler's log would lie where the dashboard does not look.
    """
    spec = cluster_spec(variant)["headGroupSpec"]["template"]["spec"]
    (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["mountPath"] == "/tmp/ray"]
    assert mount["name"] == "ray-logs"
    assert [each["name"] for each in spec["volumes"]].count("ray-logs") == 1


@every_variant
def test_a_node_that_is_gone_is_noticed_as_in_the_tests(variant: str) -> None:
    (container,) = cluster_spec(variant)["headGroupSpec"]["template"]["spec"]["containers"]
    assert {each["name"]: each.get("value") for each in container["env"]}.items() >= HEALTH_CHECKS.items()


def test_the_head_finds_its_redis() -> None:
    options = cluster_spec("gpu-ha")["gcsFaultToleranceOptions"]
    (service,), (redis,) = named("gpu-ha", "Service"), named("gpu-ha", "StatefulSet")
    assert options["redisAddress"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["selector"].items() <= redis["spec"]["template"]["metadata"]["labels"].items()
    reached = {"podSelector": {"matchLabels": service["spec"]["selector"]}}
    (leading,) = [
        policy["spec"]
        for policy in named("gpu-ha", "NetworkPolicy")
        if any(reached in rule.get("to", ()) for rule in policy["spec"].get("egress", ()))
    ]
    head = cluster_spec("gpu-ha")["headGroupSpec"]["template"]["metadata"]["labels"]
    assert leading["podSelector"]["matchLabels"].items() <= head.items()
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == options["redisPassword"]["valueFrom"]["secretKeyRef"]


# -- jobs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["job-cpu", "job-gpu", "kueue"])
def test_the_job_file_is_where_the_entrypoint_looks_and_valid(variant: str) -> None:
    (job,), (config,) = named(variant, "RayJob"), named(variant, "ConfigMap")
    head = cluster_spec(variant)["headGroupSpec"]["template"]["spec"]
    (volume,) = [each for each in head["volumes"] if each.get("configMap")]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    (mount,) = [each for each in head["containers"][0]["volumeMounts"] if each["name"] == volume["name"]]
    (path,) = re.findall(r"--config (\S+)", job["spec"]["entrypoint"])
    assert Path(path).parent == Path(mount["mountPath"])
    parsed = parse_job(config["data"][Path(path).name])
    seats = sum(
        group["maxReplicas"]
        * _seats(group["template"]["spec"]["containers"][0], parsed.hosts.device, parsed.hosts.cpus)
        for group in cluster_spec(variant)["workerGroupSpecs"]
    )
    assert parsed.hosts.max <= seats
    environment = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert environment["RAY_JOB_STOP_SIGNAL"] == "SIGTERM"
    # How `elastic-train stop NAME` knows what is to be stopped, and how long it may take.
    assert job["spec"]["metadata"] == {JOB: parsed.name, GRACE: environment["RAY_JOB_STOP_WAIT_TIME_S"]}


def _seats(container: dict[str, Any], device: str, cpus: float) -> int:
    limits = container["resources"]["limits"]
    by_cpu = int(int(limits["cpu"]) // cpus)
    return min(by_cpu, int(limits["nvidia.com/gpu"])) if device == "cuda" else by_cpu


def test_kueue_has_quota_for_the_job_and_a_flavor_for_each_group() -> None:
    (job,), (queue,), (local,) = (named("kueue", kind) for kind in ("RayJob", "ClusterQueue", "LocalQueue"))
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"  # or one that autoscales is refused
    assert "clusterSelector" not in job["spec"]  # Kueue refuses a job on a cluster that is there already
    selected = [flavor["spec"]["nodeLabels"] for flavor in named("kueue", "ResourceFlavor")]
    for group in cluster_spec("kueue")["workerGroupSpecs"]:
        assert group["template"]["spec"]["nodeSelector"] in selected
    (resources,) = queue["spec"]["resourceGroups"]
    flavors = {flavor["metadata"]["name"] for flavor in named("kueue", "ResourceFlavor")}
    assert {flavor["name"] for flavor in resources["flavors"]} == flavors
