"""elastic_train: elastic training of language models, orchestrated by Ray.

The layers of the package, top to bottom (imports point down only; ``.importlinter`` enforces it)::

    cli
    tracking | controller
    checkpoint
    training
    parallel
    model
    data
    planner
    storage
    config
"""

__version__ = "0.1.0"
