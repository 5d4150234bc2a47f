"""The templates, deployed on moto's AWS server, and clients of the storage layer that obey a role's policies."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import yaml
from moto.server import ThreadedMotoServer

from elastic_train.storage import s3_client
from tests.infra.policies import S3_ACTIONS, Statement, allowed

INFRA = Path(__file__).parents[2] / "infra"
REGION = "us-east-1"


@dataclass(frozen=True)
class Aws:
    """A server of its own: nothing is shared with other tests."""

    endpoint_url: str

    def client(self, service: str) -> Any:
        return boto3.client(
            service, endpoint_url=self.endpoint_url, region_name=REGION,
            aws_access_key_id="testing", aws_secret_access_key="testing",
        )  # fmt: skip

    def network(self) -> tuple[str, str, list[str]]:
        """(VPC, its route table, two subnets)."""
        ec2 = self.client("ec2")
        vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
        subnets = [
            ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.1.{i}.0/24", AvailabilityZone=f"{REGION}{zone}")["Subnet"]
            for i, zone in enumerate("ab")
        ]
        tables = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"]
        return vpc, tables[0]["RouteTableId"], [subnet["SubnetId"] for subnet in subnets]

    def deploy(self, template: str, **parameters: str) -> dict[str, str]:
        """The outputs of the stack."""
        formation, name = self.client("cloudformation"), f"{template}-{secrets.token_hex(3)}"
        formation.create_stack(
            StackName=name,
            TemplateBody=(INFRA / f"{template}.yaml").read_text(),
            Capabilities=["CAPABILITY_IAM"],
            Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
        )
        (stack,) = formation.describe_stacks(StackName=name)["Stacks"]
        assert stack["StackStatus"] == "CREATE_COMPLETE", stack
        return {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}

    def role_statements(self, arn: str) -> list[Statement]:
        """Of all policies of a role, as they are stored there."""
        iam, role = self.client("iam"), arn.rpartition("/")[2]
        documents = [
            iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
            for name in iam.list_role_policies(RoleName=role)["PolicyNames"]
        ]
        for attached in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
            arn = attached["PolicyArn"]
            version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
            documents.append(iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"])
        documents = [
            yaml.safe_load(each) if isinstance(each, str) else each for each in documents
        ]  # moto: Python's repr
        return [statement for document in documents for statement in document["Statement"]]


@contextmanager
def running_aws() -> Iterator[Aws]:
    """Loopback only, on a free port."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield Aws(f"http://{host}:{port}")
    finally:
        server.stop()


@dataclass
class Gate:
    """Lets the storage layer's requests through that ``statements`` allow, and notes the actions that it needed."""

    statements: list[Statement]
    used: set[str] = field(default_factory=set)

    def watch(self, client: Any) -> Any:
        client.meta.events.register("provide-client-params.s3", self._check)
        return client

    def _check(self, params: Mapping[str, Any], model: Any, **_: Any) -> None:
        action = S3_ACTIONS[model.name]
        resource = f"arn:aws:s3:::{params['Bucket']}" + (f"/{params['Key']}" if "Key" in params else "")
        context = {"aws:SecureTransport": "true"}
        if "Prefix" in params:
            context["s3:prefix"] = params["Prefix"]
        self.used.add(action)
        if not allowed(self.statements, action, resource, context):
            raise botocore.exceptions.ClientError(
                {
                    "Error": {"Code": "AccessDenied", "Message": f"{action} on {resource}"},
                    "ResponseMetadata": {"HTTPStatusCode": 403},
                },
                model.name,
            )


def gated(make: Any, gate: Gate) -> Any:
    """``s3_client.make_client`` with ``gate`` in front."""
    assert make is s3_client.make_client

    def make_client(*args: Any) -> Any:
        return gate.watch(make(*args))

    return make_client
