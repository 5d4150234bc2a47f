"""The rendezvous store of a job: a TCPStore in a process of its own beside the coordinator.

It outlives every trainer, so rank 0 is as expendable as the others; keys of different generations have different
prefixes. Run as ``python -m elastic_train.controller.rendezvous ADDRESS``: prints the port, ends with its parent.
"""

from __future__ import annotations

import gc
import socket
import sys


def main() -> None:
    gc.disable()  # there is nothing to collect, neither while torch is imported nor later
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from elastic_train.controller.process_control import end_with_parent, name_process

    end_with_parent()
    name_process("et-rendezvous")
    address = sys.argv[1]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))  # given to the store, which would otherwise listen on every interface
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    print(port, flush=True)
    sys.stdin.read()
    del store


if __name__ == "__main__":
    main()
