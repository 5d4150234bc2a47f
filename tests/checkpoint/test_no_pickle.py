"""Nothing that is loaded is ever unpickled: no module could, and a pickle in the place of a checkpoint is refused."""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path

import pytest

import elastic_train
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.checkpoint.restore_checkpoint import restore_from_checkpoint
from elastic_train.checkpoint.verify import choose_checkpoint
from elastic_train.storage.store import Store
from tests.checkpoint.states import emptied, even_layout, save_and_commit, some_tensors

PACKAGE = Path(elastic_train.__file__).parent
LOAD_PATH = ("checkpoint", "storage", "controller", "model/hf_folder.py")
UNSAFE_MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "pickletools", "copyreg",
}  # fmt: skip
UNSAFE_CALLS = {"torch.load", "torch.jit.load", "torch.package", "torch.distributed.checkpoint"}
OBJECT_COLLECTIVES = ("_object", "_object_list")
"""How the names of torch's collectives end that pickle what they send: all_gather_object, broadcast_object_list."""


def sources() -> list[Path]:
    found = [PACKAGE / name for name in LOAD_PATH]
    return sorted(path for entry in found for path in ([entry] if entry.is_file() else entry.rglob("*.py")))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute; "" of what is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    return ""


def unsafe(source: str) -> list[str]:
    """What in the text of a module unpickles or could."""
    found, full = [], {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            full |= {name.asname or name.name.split(".")[0]: name.name if name.asname else "" for name in node.names}
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            full |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            found += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            found += [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    bad = [name for name in found if name.split(".")[-1] in UNSAFE_MODULES or name.split(".")[0] in UNSAFE_MODULES]
    bad += [name for name in found if name in UNSAFE_CALLS]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            head, _, rest = dotted(node).partition(".")
            name = f"{full.get(head) or head}.{rest}"
            collective = name.startswith("torch.") and name.endswith(OBJECT_COLLECTIVES)
            if name in UNSAFE_CALLS or rest in UNSAFE_MODULES or collective:
                bad.append(name)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            safe = isinstance(node.value, ast.Constant) and node.value.value is False
            bad += [] if safe else ["allow_pickle"]
    return bad


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from cloudpickle import loads",
        "from ray import cloudpickle",
        "def f():\n    import marshal",
        "import torch\nx = torch.load('a')",
        "import torch as t\nx = t.load('a')",
        "from torch import load",
        "import numpy as np\nx = np.load('a', allow_pickle=True)",
        "import torch.distributed as dist\ndist.broadcast_object_list([], 0)",
        "import torch.distributed.checkpoint as dcp",
        "import importlib\nimportlib.import_module('dill')",
    ],
)
def test_what_unpickles_is_recognized(source: str) -> None:
    assert unsafe(source)


def test_no_module_of_the_load_path_can_unpickle() -> None:
    assert len(sources()) > 60
    assert {str(path.relative_to(PACKAGE)): bad for path in sources() if (bad := unsafe(path.read_text()))} == {}


class Attack:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.made}'",)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return tmp_path / "made"


def attack(made: Path, nbytes: int = 0) -> bytes:
    """The pickle, filled up to ``nbytes``."""
    return pickle.dumps(Attack(made)).ljust(nbytes, b"\0")


def test_the_attack_works_where_it_is_unpickled(made: Path) -> None:
    pickle.loads(attack(made))
    assert made.exists()


@pytest.mark.parametrize("spoilt", ["objects", "manifest", "both"])
def test_a_pickle_in_place_of_a_checkpoint_is_refused_and_not_run(tmp_path: Path, made: Path, spoilt: str) -> None:
    store, states = Store.open(str(tmp_path / "job")), even_layout(some_tensors(10), 2)
    manifest = save_and_commit(store, tmp_path, states, 10)
    if spoilt != "manifest":
        for path, nbytes in manifest.objects.items():
            store.write(path, [attack(made, nbytes)])
            assert len(store.read(path)) == nbytes  # only the checksums tell
    if spoilt != "objects":
        store.write(CheckpointId(10, manifest.claim).path, [attack(made)])
    target = emptied(states[0])
    with pytest.raises(CheckpointError, match=r"step-00000010-c1\.json|step 10 is damaged"):
        restore_from_checkpoint(target, store)
    chosen = choose_checkpoint(store, "full")
    assert chosen.manifest is None
    assert len(chosen.refused) == 1
    assert not made.exists()
