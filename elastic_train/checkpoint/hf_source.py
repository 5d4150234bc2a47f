"""What a job folder keeps of the Hugging Face folder that the job's weights came from: ``hf/``.

The small files go out again with every export as they came in; ``source.json`` has the dtype of every tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.model.hf_folder import SMALL_FILES, HfFolder
from elastic_train.storage.errors import NotFound
from elastic_train.storage.formats import KEY, require_known
from elastic_train.storage.store import Store, join

FORMAT_VERSION = 1
"""Of ``source.json``."""
_FOLDER = "hf"
_RECORD = "source.json"


@dataclass(frozen=True, slots=True)
class HfSource:
    """``uri``: where it was. ``dtypes``: tensor -> its dtype there ("BF16"). ``files``: name -> content."""

    uri: str
    dtypes: dict[str, str]
    files: dict[str, bytes]


def keep_source(folder: HfFolder, job_folder: Store) -> None:
    """Copy the small files of ``folder`` into the job folder; the record is written last."""
    kept = job_folder.sub(_FOLDER)
    for name in SMALL_FILES:
        if folder.store.exists(name):
            kept.write(name, [folder.store.read(name)])
    dtypes = {name: tensor.dtype for name, tensor in folder.tensors.items()}
    record = {KEY: FORMAT_VERSION, "uri": folder.store.uri, "dtypes": dtypes}
    kept.write(_RECORD, [json.dumps(record, indent=1).encode()])


def kept_source(job_folder: Store) -> HfSource | None:
    """What ``keep_source`` has kept; None for a job that began with random weights."""
    kept = job_folder.sub(_FOLDER)
    try:
        record = json.loads(kept.read(_RECORD))
    except NotFound:
        return None
    except ValueError as error:
        raise CheckpointError(f"{_FOLDER}/{_RECORD} in {job_folder.uri} is not JSON: {error}") from None
    require_known(join(kept.uri, _RECORD), record.get(KEY), FORMAT_VERSION)
    files = {name: kept.read(name) for name in SMALL_FILES if kept.exists(name)}
    return HfSource(record["uri"], record["dtypes"], files)
