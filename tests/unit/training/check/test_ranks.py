import socket

import pytest
from torch.distributed import TCPStore

from megatron_lancet.lab.check.ranks import held_port
from tests.features import deleted
from tests.ranks.launch import free_port


def test_port_of_a_run_is_for_its_store_alone():
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert TCPStore("127.0.0.1", port).get("key") == b"value"


def test_port_of_test_ranks_is_for_their_store_alone():
    with deleted.held_port() as holder:
        for port in (free_port(), holder.getsockname()[1]):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            store.set("key", "value")
            assert TCPStore("127.0.0.1", port).get("key") == b"value"
