import socket

import pytest
from torch.distributed import TCPStore

from megatron_lancet.lab.check.ranks import held_port


def test_port_of_a_run_is_for_its_store_alone():
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert TCPStore("127.0.0.1", port).get("key") == b"value"
