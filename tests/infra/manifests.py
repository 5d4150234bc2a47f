"""The manifests as ``kubectl apply -k`` would send them, and what an API server would refuse in them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from referencing import Registry
from referencing.jsonschema import DRAFT202012

KUBERNETES = "1.33"
FOLDER = Path(__file__).parents[2] / "cluster" / "kuberay"
VARIANTS = ("cpu", "gpu", "gpu-ha", "job-cpu", "job-gpu", "kueue")

Manifest = dict[str, Any]


@cache
def build(folder: Path) -> list[Manifest]:
    """The output of Kustomize."""
    kubectl = Path(sys.executable).with_name("kubectl")
    built = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return [manifest for manifest in yaml.safe_load_all(built.stdout) if manifest]


@cache
def _registry() -> Registry[Any]:
    """``k8s``: the schemas of Kubernetes' own types, in which fields that are not listed are refused."""
    package = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    definitions = json.loads((package / f"v{KUBERNETES}.0-local-strict" / "_definitions.json").read_text())
    registry: Registry[Any] = Registry().with_resource("k8s", DRAFT202012.create_resource(definitions))
    return registry


@cache
def _custom(group: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / "schemas" / f"{group}.yaml").read_text())


def problems(manifest: Manifest) -> list[str]:
    """One line for each; [] when it would be taken."""
    custom = Path(__file__).parent / "schemas" / f"{manifest['apiVersion'].replace('/', '_')}.yaml"
    if custom.exists():
        schema = {**_custom(custom.stem), "$ref": f"#/$defs/{manifest['kind']}"}
        validator = jsonschema.Draft202012Validator(schema, registry=_registry())
        return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError:
        return [f"{manifest['apiVersion']} {manifest['kind']}: is no kind of Kubernetes {KUBERNETES}, KubeRay or Kueue"]
    return []
