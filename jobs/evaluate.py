"""Compute the loss of a checkpoint on held-out data, as a job of a running Ray cluster.

    ray job submit --working-dir . -- python jobs/evaluate.py --config jobs/configs/evaluate.yaml [section.key=value]

The same as `elastic-train run` with that file, which has the options of the verb. Relative paths start from
$ELASTIC_TRAIN_HOME, or from ~/elastic_train where Ray has unpacked this folder. Exit codes as for `elastic-train`.
"""

from __future__ import annotations

import sys

from elastic_train.cli.main import app

if __name__ == "__main__":
    app(["run", *sys.argv[1:]])
