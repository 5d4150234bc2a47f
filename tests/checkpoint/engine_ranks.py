"""What the ranks of ``test_engine_states`` do; runs inside a gloo group."""

from __future__ import annotations

from pathlib import Path

from elastic_train.checkpoint.capture import Capture
from elastic_train.checkpoint.image import Image, adoptable, image_name
from elastic_train.checkpoint.reader import Part, restore
from elastic_train.checkpoint.sources import ImageSource
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.training.engine import Engine
from tests.training.synthetic import SyntheticBatches


def move(rank: int, job: Job, layout: Layout, source: Path | None, target: Path) -> None:
    """Trains step 1, or restores it from the images in ``source``; writes its image to ``target``."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    if source is None:
        engine.initialize()
        engine.train_step(1)
    else:
        parts = [Part(image.description, ImageSource(image.path, 1)) for image in adoptable(source)]
        restore(engine.state(), parts, rank=rank)
    capture = Capture(engine.state())
    image = Image.create(target / image_name(1, rank, 0), 1, rank, capture.description)
    capture.write(image, 1)
