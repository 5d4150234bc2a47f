"""Pretrain a model on a running Ray cluster.

    ray job submit --working-dir . -- python jobs/pretrain.py --config jobs/configs/quickstart.yaml [section.key=value]

The same as `elastic-train train` on the cluster the job was submitted to. Relative paths of the job file start from
$ELASTIC_TRAIN_HOME, or from ~/elastic_train where Ray has unpacked this folder (Ray deletes its copy). SIGTERM and
SIGINT lead to a last checkpoint. Exit codes as for `elastic-train`.
"""

from __future__ import annotations

import sys

from elastic_train.cli.main import app

if __name__ == "__main__":
    app(["train", "--address", "auto", *sys.argv[1:]])
