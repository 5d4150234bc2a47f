"""The program of a host of tests: its settings come as JSON over stdin, the reason of its end goes to stdout."""

from __future__ import annotations

import json
import sys

from elastic_train.controller.forkserver_client import BeginForkServer, begin_python
from elastic_train.controller.host import HostSettings, run_host


def main(begin_forkserver: BeginForkServer = begin_python) -> None:
    settings = json.load(sys.stdin)
    settings["coordinator"] = tuple(settings["coordinator"])
    print(run_host(HostSettings(**settings), begin_forkserver=begin_forkserver), flush=True)


def warm() -> None:
    """The same in a process of ``tests.warm``, of which the forkserver is made, too."""
    from tests.warm import Unborn

    main(Unborn().begin)


if __name__ == "__main__":
    main()
