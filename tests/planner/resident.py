import ctypes, gc, re
from pathlib import Path
from elastic_train.training.engine import Engine
from tests.training.synthetic import SyntheticBatches


def status(field):
    return int(re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) * 1024


def train(job, layout, rank, steps=3):
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    for step in range(1, steps + 1):
        engine.train_step(step)


def growth(rank, small, job, layout, trim=True, steps=3):
    ctypes.CDLL("libc.so.6").mallopt(-3, 65536)
    ctypes.CDLL("libc.so.6").mallopt(-1, 131072)
    train(small, layout, rank)
    out = []
    for i in range(2):
        gc.collect()
        if trim:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        base = status("VmRSS")
        anon = status("RssAnon")
        train(job, layout, rank, steps)
        out.append((base, status("VmHWM") - base, status("RssAnon") - anon))
    return out
