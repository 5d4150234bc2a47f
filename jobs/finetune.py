"""Train a Hugging Face model further, on a running Ray cluster: all of its weights, or adapters beside them (`lora`).

    ray job submit --working-dir . -- python jobs/finetune.py --config jobs/configs/finetune.yaml [section.key=value]
    ray job submit --working-dir . -- python jobs/finetune.py --config jobs/configs/finetune_lora.yaml

A job like any other, which begins with the weights of `init_from` (docs/huggingface.md). Paths, signals and exit codes
as in jobs/pretrain.py.
"""

from __future__ import annotations

import sys

from elastic_train.cli.main import app

if __name__ == "__main__":
    app(["train", "--address", "auto", *sys.argv[1:]])
