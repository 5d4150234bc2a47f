"""The templates of ``infra/``: linted, deployed, and what the roles may do with the bucket that they make."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import yaml
from mlflow.server.security_utils import is_allowed_host_header

from elastic_train.checkpoint.manifest import CheckpointId, object_path
from elastic_train.checkpoint.verify import choose_checkpoint
from elastic_train.config.operation import StorageConfig
from elastic_train.storage import s3_client
from elastic_train.storage.errors import StorageError
from elastic_train.storage.store import Store
from tests.cli.checkpoints import commit_checkpoint, job_record
from tests.infra.aws import INFRA, Aws, Gate, gated, running_aws
from tests.infra.policies import Statement, allowed

pytestmark = pytest.mark.filterwarnings("ignore:Tried to parse:UserWarning")  # what moto does not make

BUCKET = "arn:aws:s3:::{bucket}"
OBJECT = f"{BUCKET}/jobs/llama/checkpoints/step-00000010-g1/rank-00000.bin"
MANIFEST = f"{BUCKET}/jobs/llama/checkpoints/step-00000010-c1.json"
STEPS = f"{BUCKET}/jobs/llama/steps.jsonl"
DATA = f"{BUCKET}/data/wiki/shard-00000.arrow"
ELSEWHERE = f"{BUCKET}/mlflow/1/artifact"
OTHER = "arn:aws:s3:::another-bucket/jobs/llama/checkpoints/step-00000010-g1/rank-00000.bin"
INSTANCE = "arn:aws:ec2:us-east-1:123456789012:instance/i-1"
SPOT_REQUEST = "arn:aws:ec2:us-east-1:123456789012:spot-instances-request/*"  # made with a spot machine, has no id yet

# fmt: off
MAY = [  # action, resource, allowed to the head, allowed to a worker
    ("s3:ListBucket",                 BUCKET,    True,  True),
    ("s3:ListBucketMultipartUploads", BUCKET,    True,  False),
    ("s3:GetObject",                  OBJECT,    True,  True),
    ("s3:GetObject",                  MANIFEST,  True,  True),
    ("s3:GetObject",                  DATA,      True,  True),
    ("s3:GetObject",                  ELSEWHERE, False, False),
    ("s3:GetObject",                  OTHER,     False, False),
    ("s3:PutObject",                  OBJECT,    True,  True),
    ("s3:PutObject",                  MANIFEST,  True,  False),  # only the coordinator commits
    ("s3:PutObject",                  STEPS,     True,  False),
    ("s3:PutObject",                  DATA,      True,  False),
    ("s3:PutObject",                  ELSEWHERE, False, False),
    ("s3:PutObject",                  OTHER,     False, False),
    ("s3:ListMultipartUploadParts",   OBJECT,    True,  True),
    ("s3:AbortMultipartUpload",       OBJECT,    True,  True),
    ("s3:AbortMultipartUpload",       STEPS,     True,  False),
    ("s3:DeleteObject",               OBJECT,    True,  False),
    ("s3:DeleteObject",               MANIFEST,  True,  False),
    ("s3:DeleteObjectVersion",        OBJECT,    False, False),  # what was removed can be brought back
    ("s3:PutLifecycleConfiguration",  BUCKET,    False, False),
    ("s3:PutBucketPolicy",            BUCKET,    False, False),
    ("s3:PutBucketVersioning",        BUCKET,    False, False),
    ("s3:DeleteBucket",               BUCKET,    False, False),
    ("s3:CreateBucket",               OTHER,     False, False),
    ("ec2:DescribeInstances",         "*",       True,  False),
    ("ec2:RunInstances",              INSTANCE,  False, False),  # without the cluster's tag: see below
    ("ec2:RunInstances",              SPOT_REQUEST, True, False),
    ("ec2:TerminateInstances",        INSTANCE,  False, False),
    ("iam:CreateUser",                "*",       False, False),
]
# fmt: on


@pytest.fixture(scope="module")
def aws() -> Iterator[Aws]:
    with running_aws() as server:
        yield server


@pytest.fixture(scope="module")
def network(aws: Aws) -> tuple[str, str, list[str]]:
    return aws.network()


@pytest.fixture(scope="module")
def cluster(aws: Aws, network: tuple[str, str, list[str]]) -> dict[str, str]:
    """Outputs of the deployed ``cluster.yaml``; moto leaves out some properties of a bucket."""
    vpc, routes, _ = network
    outputs = aws.deploy("cluster", VpcId=vpc, VpcCidr="10.1.0.0/16", RouteTableIds=routes)
    aws.client("s3").put_bucket_versioning(
        Bucket=outputs["BucketName"],
        VersioningConfiguration=read("cluster")["Resources"]["Bucket"]["Properties"]["VersioningConfiguration"],
    )
    return outputs


@pytest.fixture
def config(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> StorageConfig:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    return StorageConfig(endpoint_url=aws.endpoint_url, retry_seconds=2.0)


def read(template: str) -> dict[str, Any]:
    """A template with its intrinsic functions as plain values."""

    class Loader(yaml.SafeLoader):
        pass

    def plain(loader: Any, suffix: str, node: Any) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return {suffix: loader.construct_scalar(node)}
        return {suffix: loader.construct_sequence(node, deep=True)}

    Loader.add_multi_constructor("!", plain)
    loaded: dict[str, Any] = yaml.load((INFRA / f"{template}.yaml").read_text(), Loader)
    return loaded


def test_cfn_lint_has_nothing_to_say() -> None:
    command = [Path(sys.executable).with_name("cfn-lint"), *map(str, sorted(INFRA.glob("*.yaml")))]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, ""), said.stdout + said.stderr


# -- the bucket ------------------------------------------------------------------------------------------------------


def test_the_bucket_is_versioned_encrypted_and_closed(aws: Aws, cluster: dict[str, str]) -> None:
    s3, name = aws.client("s3"), {"Bucket": cluster["BucketName"]}
    assert s3.get_bucket_versioning(**name)["Status"] == "Enabled"
    (rule,) = s3.get_bucket_encryption(**name)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    properties = read("cluster")["Resources"]["Bucket"]["Properties"]
    assert properties["OwnershipControls"]["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]
    assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
    assert len(properties["PublicAccessBlockConfiguration"]) == 4


def test_the_lifecycle_never_touches_what_is_current() -> None:
    """A committed checkpoint is a current version: no rule may expire it, nor move it to a slower class."""
    rules = read("cluster")["Resources"]["Bucket"]["Properties"]["LifecycleConfiguration"]["Rules"]
    actions = {key: value for rule in rules for key, value in rule.items() if key not in ("Id", "Status")}
    assert actions.keys() == {
        "AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration", "ExpiredObjectDeleteMarker",
    }  # fmt: skip
    assert {rule["Status"] for rule in rules} == {"Enabled"}
    assert actions["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] >= 7


def test_the_bucket_stays_when_the_stack_goes() -> None:
    bucket = read("cluster")["Resources"]["Bucket"]
    assert (bucket["DeletionPolicy"], bucket["UpdateReplacePolicy"]) == ("Retain", "Retain")


def bucket_policy(bucket: str) -> list[Statement]:
    text = json.dumps(read("cluster")["Resources"]["BucketPolicy"]["Properties"]["PolicyDocument"]["Statement"])
    arn = f"arn:aws:s3:::{bucket}"
    text = text.replace('{"GetAtt": "Bucket.Arn"}', f'"{arn}"').replace('{"Sub": "${Bucket.Arn}/*"}', f'"{arn}/*"')
    statements: list[Statement] = json.loads(text)
    return statements


@pytest.mark.parametrize(("tls", "may"), [("true", True), ("false", False)])
def test_only_over_tls(aws: Aws, cluster: dict[str, str], tls: str, may: bool) -> None:
    bucket = cluster["BucketName"]
    statements = [*bucket_policy(bucket), *aws.role_statements(cluster["HeadRoleArn"])]
    for action, resource in (("s3:PutObject", MANIFEST), ("s3:GetObject", OBJECT), ("s3:ListBucket", BUCKET)):
        where = resource.format(bucket=bucket)
        assert allowed(statements, action, where, {"aws:SecureTransport": tls}) is may, action


# -- what the roles may do -------------------------------------------------------------------------------------------


def test_what_head_and_workers_may_do(aws: Aws, cluster: dict[str, str]) -> None:
    bucket = cluster["BucketName"]
    for column, role in ((2, "HeadRoleArn"), (3, "WorkerRoleArn")):
        statements = [*bucket_policy(bucket), *aws.role_statements(cluster[role])]
        found = {
            row[:2]: allowed(statements, row[0], row[1].format(bucket=bucket), {"aws:SecureTransport": "true"})
            for row in MAY
        }
        assert found == {row[:2]: row[column] for row in MAY}, role


@pytest.mark.parametrize(
    ("action", "key"),
    [
        ("ec2:RunInstances", "aws:RequestTag/ray-cluster-name"),
        ("ec2:TerminateInstances", "ec2:ResourceTag/ray-cluster-name"),
    ],
)
def test_the_autoscaler_has_power_over_its_own_machines_only(
    aws: Aws, cluster: dict[str, str], action: str, key: str
) -> None:
    statements = aws.role_statements(cluster["HeadRoleArn"])
    assert allowed(statements, action, INSTANCE, {key: "elastic-train"})
    assert not allowed(statements, action, INSTANCE, {key: "payroll"})
    assert not allowed(statements, action, INSTANCE, {})
    passed = {"iam:PassedToService": "ec2.amazonaws.com"}
    assert allowed(statements, "iam:PassRole", cluster["WorkerRoleArn"], passed)
    assert not allowed(statements, "iam:PassRole", cluster["HeadRoleArn"], passed)


def test_workers_write_data_when_they_prepare_it(aws: Aws, network: tuple[str, str, list[str]]) -> None:
    vpc, routes, _ = network
    outputs = aws.deploy(
        "cluster", VpcId=vpc, VpcCidr="10.1.0.0/16", RouteTableIds=routes, WorkersPrepareData="true", Platform="eks"
    )
    statements, bucket = aws.role_statements(outputs["WorkerRoleArn"]), outputs["BucketName"]
    assert allowed(statements, "s3:PutObject", DATA.format(bucket=bucket), {})
    assert not allowed(statements, "s3:PutObject", MANIFEST.format(bucket=bucket), {})
    assert not allowed(aws.role_statements(outputs["HeadRoleArn"]), "ec2:DescribeInstances", "*", {})
    role = aws.client("iam").get_role(RoleName=outputs["WorkerRoleArn"].rpartition("/")[2])["Role"]
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "pods.eks.amazonaws.com"}


# -- the storage layer, with the rights of the roles -----------------------------------------------------------------


def store_as(monkeypatch: pytest.MonkeyPatch, gate: Gate, uri: str, config: StorageConfig) -> Store:
    """The job folder, with the rights that ``gate`` leaves."""
    make = s3_client.make_client
    with monkeypatch.context() as patch:
        patch.setattr(s3_client, "make_client", gated(make, gate))
        store = Store.open(uri, config)
        store.exists("job.json")  # the client is made at the first request
    return store


def test_a_checkpoint_makes_its_round_with_the_roles_rights(
    aws: Aws, cluster: dict[str, str], config: StorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that the storage layer asks of S3 is allowed to the role that asks it, and no action is allowed that
    it never needs.
    """
    uri = f"{cluster['StorageUri']}/llama"
    gates = {role: Gate(aws.role_statements(cluster[f"{role}RoleArn"])) for role in ("Head", "Worker")}
    head, worker = (store_as(monkeypatch, gates[role], uri, config) for role in ("Head", "Worker"))

    job_record(head)
    shard = np.arange(9 * 2**18, dtype=np.float32).tobytes()  # 9 MiB: an upload in two parts
    worker.write(object_path(20, 1, 1), [shard], len(shard))
    assert worker.read(object_path(20, 1, 1), 2**23, 64) == shard[2**23 : 2**23 + 64]
    commit_checkpoint(head, 10, hosts=worker)
    loaded = choose_checkpoint(worker, "full").manifest  # every byte is read and checked
    assert loaded is not None and loaded.step == 10

    with pytest.raises(StorageError, match="access denied"):
        worker.create(CheckpointId(11, 1).path, b"{}")
    with pytest.raises(StorageError, match="access denied"):
        worker.delete(loaded.id.path)
    with pytest.raises(StorageError, match="access denied"):
        worker.write("job.json", [b"{}"])
    _fail_in_the_middle(worker, object_path(30, 1, 0))
    _fail_in_the_middle(head, "exports/model.safetensors")
    _retention(aws, cluster["BucketName"], head)

    needless = {role: _granted(gate.statements) - gate.used for role, gate in gates.items()}
    assert needless == {"Head": set(), "Worker": set()}


def _fail_in_the_middle(store: Store, path: str) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(2 * 2**23)
        raise InterruptedError("the machine is taken away")

    with pytest.raises(InterruptedError):
        store.write(path, chunks(), 3 * 2**23)
    assert not store.exists(path)


def _retention(aws: Aws, bucket: str, head: Store) -> None:
    """What the head does when it clears up: finds an upload that nobody ended, and removes a checkpoint's objects."""
    key = "jobs/llama/" + object_path(40, 1, 0)
    aws.client("s3").create_multipart_upload(Bucket=bucket, Key=key)
    (left,) = head.unfinished("checkpoints/")
    head.abandon(left)
    assert not head.unfinished()
    head.delete(object_path(20, 1, 1))
    assert not head.exists(object_path(20, 1, 1))
    _bring_back(aws, bucket, "jobs/llama/" + object_path(20, 1, 1))
    assert head.size(object_path(20, 1, 1)) == 9 * 2**20
    assert head.now() > 0


def _bring_back(aws: Aws, bucket: str, key: str) -> None:
    """As docs/operations.md says: the mark of its removal is removed, with the rights of an administrator."""
    s3 = aws.client("s3")
    (mark,) = s3.list_object_versions(Bucket=bucket, Prefix=key)["DeleteMarkers"]
    s3.delete_object(Bucket=bucket, Key=key, VersionId=mark["VersionId"])


def _granted(statements: list[Statement]) -> set[str]:
    listed = [each["Action"] if isinstance(each["Action"], list) else [each["Action"]] for each in statements]
    return {action for actions in listed for action in actions if action.startswith("s3:")}


# -- network and MLflow ----------------------------------------------------------------------------------------------


def test_nodes_are_reached_by_one_another_and_over_ssh_only(aws: Aws, cluster: dict[str, str]) -> None:
    ec2 = aws.client("ec2")
    nodes, head = (
        ec2.describe_security_groups(GroupIds=[cluster[name]])["SecurityGroups"][0]
        for name in ("NodesGroupId", "HeadGroupId")
    )
    (inside,) = nodes["IpPermissions"]
    assert [pair["GroupId"] for pair in inside["UserIdGroupPairs"]] == [cluster["NodesGroupId"]]
    assert not inside["IpRanges"]
    (ssh,) = head["IpPermissions"]
    assert (ssh["FromPort"], ssh["ToPort"]) == (22, 22)
    assert [each["CidrIp"] for each in ssh["IpRanges"]] == ["10.0.0.0/8"]


def test_s3_goes_through_the_endpoint(aws: Aws, cluster: dict[str, str], network: tuple[str, str, list[str]]) -> None:
    vpc, routes, _ = network
    found = aws.client("ec2").describe_vpc_endpoints(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["VpcEndpoints"]
    assert all(each["ServiceName"] == "com.amazonaws.us-east-1.s3" for each in found)
    assert all(each["RouteTableIds"] == [routes] for each in found)
    assert any(cluster["BucketName"] in str(each["PolicyDocument"]) for each in found)


def test_mlflow_is_deployed_with_its_database(
    aws: Aws, cluster: dict[str, str], network: tuple[str, str, list[str]]
) -> None:
    vpc, _, subnets = network
    outputs = aws.deploy(
        "mlflow",
        VpcId=vpc,
        SubnetIds=",".join(subnets),
        NodesGroupId=cluster["NodesGroupId"],
        BucketName=cluster["BucketName"],
        MlflowImage="registry/mlflow:3.17.2",
    )
    (database,) = aws.client("rds").describe_db_instances()["DBInstances"]
    assert database["Endpoint"]["Address"] == outputs["DatabaseAddress"]
    assert (database["Engine"], database["PubliclyAccessible"], database["StorageEncrypted"]) == (
        "postgres",
        False,
        True,
    )
    ecs = aws.client("ecs")
    (arn,) = ecs.list_task_definitions()["taskDefinitionArns"]
    (container,) = ecs.describe_task_definition(taskDefinition=arn)["taskDefinition"]["containerDefinitions"]
    environment = {each["name"]: each["value"] for each in container["environment"]}
    assert environment["DATABASE_HOST"] == outputs["DatabaseAddress"]
    assert outputs["TrackingUri"].startswith("http://") and outputs["TrackingUri"].endswith(".amazonaws.com:5000")
    _only_own_names_are_served(environment["MLFLOW_SERVER_ALLOWED_HOSTS"])
    assert "PASSWORD" not in " ".join(environment)  # it comes from the secret


def test_mlflow_has_time_to_make_its_tables_and_its_database_is_not_deleted_by_mistake() -> None:
    """moto leaves both out. Without the time a first start is ended, and the stack rolls back (docs/infra.md)."""
    resources = read("mlflow")["Resources"]
    assert resources["Service"]["Properties"]["HealthCheckGracePeriodSeconds"] >= 300
    assert resources["Database"]["Properties"]["DeletionProtection"] is True
    assert resources["Database"]["DeletionPolicy"] == "Snapshot"


def _only_own_names_are_served(allowed_hosts: str) -> None:
    """By MLflow's own check. Clients send the load balancer's name in small letters, whatever capitals AWS gave it."""
    hosts = [host.strip() for host in allowed_hosts.split(",")]
    name = "internal-mlflow-Balan-1Q2W3E4R5T6Y-1234567890.us-east-1.elb.amazonaws.com"
    sent = requests.Request("GET", f"http://{name}:5000/").prepare().url
    assert sent == f"http://{name.lower()}:5000/"
    for host in (f"{name}:5000", f"{name.lower()}:5000", "localhost:5000", "127.0.0.1:5001"):  # the last: a tunnel
        assert is_allowed_host_header(hosts, host), host
    for host in ("evil.example:5000", "localhost.evil.example:5000", "elb.amazonaws.com:5000", ""):
        assert not is_allowed_host_header(hosts, host), host
