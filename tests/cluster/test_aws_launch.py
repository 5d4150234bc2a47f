"""The machines of ``cluster/aws.yaml``, ordered by Ray's own code from moto's server as ``ray up`` does it.

The network is that of docs/clusters.md, and the file is filled in with the outputs of ``infra/cluster.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from ray.autoscaler._private.aws import utils
from ray.autoscaler._private.aws.config import bootstrap_aws
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.util import prepare_config

from elastic_train.cluster.cluster_file import read_cluster
from tests.cli.command import ROOT
from tests.infra.aws import REGION, Aws, running_aws

pytestmark = pytest.mark.filterwarnings("ignore:Tried to parse:UserWarning")  # what moto does not make


@pytest.fixture(scope="module")
def aws() -> Iterator[Aws]:
    with running_aws() as server:
        yield server


@pytest.fixture
def account(aws: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Ray's clients go to moto, and it writes the SSH key that it makes below ``tmp_path``."""
    environment = {"AWS_ENDPOINT_URL": aws.endpoint_url, "AWS_ACCESS_KEY_ID": "testing"}
    for name, value in {**environment, "AWS_SECRET_ACCESS_KEY": "testing", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    yield
    utils.resource_cache.cache_clear()
    utils.client_cache.cache_clear()


@pytest.fixture(scope="module")
def place(aws: Aws) -> dict[str, str]:
    """What the cluster file is to be filled in with; the private subnet is not the first of its zone."""
    ec2 = aws.client("ec2")
    vpc, routes, (public, _) = aws.network()
    ec2.modify_subnet_attribute(SubnetId=public, MapPublicIpOnLaunch={"Value": True})
    made = ec2.create_subnet(VpcId=vpc, CidrBlock="10.1.9.0/24", AvailabilityZone=f"{REGION}a")
    private = made["Subnet"]["SubnetId"]
    outputs = aws.deploy("cluster", VpcId=vpc, VpcCidr="10.1.0.0/16", RouteTableIds=routes)
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    return {**outputs, "ami": image, "subnet": private}


def filled_in(place: dict[str, str], folder: Path) -> dict[str, Any]:
    """The cluster file without a REPLACE-ME, as Ray completes it before it talks to AWS."""
    text = (ROOT / "cluster" / "aws.yaml").read_text()
    for name, value in place.items():
        text = text.replace(f"{name}-REPLACE-ME", value)
    path = folder / "cluster" / "aws.yaml"
    path.parent.mkdir()
    path.write_text(text)
    for name in ("elastic_train", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        (folder / name).symlink_to(ROOT / name)
    config: dict[str, Any] = prepare_config(read_cluster(path))
    return config


def launch(config: dict[str, Any], kind: str) -> str:
    """The id of a machine of that kind, which Ray orders."""
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    node = config["available_node_types"][kind]["node_config"]
    (made,) = provider.create_node(node, {"ray-node-kind": "head" if kind == "head" else "worker"}, 1)
    return str(made)


@pytest.mark.slow
@pytest.mark.usefixtures("account")
def test_ray_starts_the_machines_in_the_private_subnet(aws: Aws, place: dict[str, str], tmp_path: Path) -> None:
    config = bootstrap_aws(filled_in(place, tmp_path))
    assert "REPLACE-ME" not in str(config)
    for kind in config["available_node_types"]:
        found = aws.client("ec2").describe_instances(InstanceIds=[launch(config, kind)])
        (machine,) = found["Reservations"][0]["Instances"]
        assert machine["SubnetId"] == place["subnet"], kind
        assert "PublicIpAddress" not in machine, kind
        assert {"Key": "ray-cluster-name", "Value": "elastic-train"} in machine["Tags"], kind
        assert machine.get("InstanceLifecycle") == ("spot" if kind == "gpu-spot" else None)


@pytest.mark.slow
@pytest.mark.usefixtures("account")
def test_without_internal_addresses_ray_refuses_that_subnet(place: dict[str, str], tmp_path: Path) -> None:
    """Why the file says ``use_internal_ips``; if Ray changes its mind, the line can go."""
    config = filled_in(place, tmp_path)
    del config["provider"]["use_internal_ips"]
    with pytest.raises(click.ClickException, match="No usable subnets found for node type head"):
        bootstrap_aws(config)
