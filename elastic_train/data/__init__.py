"""From text to batches: corpora, prepared token shards, the global sample order and the slots of a step."""
