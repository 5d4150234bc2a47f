from __future__ import annotations

import subprocess
import sys

MODULES = [
    "byte_server",
    "description",
    "errors",
    "hf_export",
    "image",
    "manifest",
    "peer",
    "retention",
    "sources",
    "upload",
    "verify",
    "wire",
]


def test_what_hosts_use_does_not_import_torch() -> None:
    """A host must be up in the time a Python process takes to start."""
    lines = [f"import elastic_train.checkpoint.{name}" for name in MODULES]
    program = "; ".join(
        [*lines, "import sys", "print(sorted({'torch', 'ray', 'mlflow', 'transformers'} & set(sys.modules)))"]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
