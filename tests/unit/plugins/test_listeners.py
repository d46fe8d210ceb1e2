"""Listening sockets from the kernel's tables."""

from __future__ import annotations

import ipaddress
import sys

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.listeners import parse_listeners
from hypothesis import given
from hypothesis import strategies as st

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(local: str, state: str = "0A", inode: int = 42) -> str:
    return f"   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1\n"


def kernel_address(text: str) -> str:
    """An address as the kernel writes it on a little-endian machine."""
    raw = ipaddress.ip_address(text).packed
    return b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4)).hex().upper()


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel's tables are in the machine's byte order")
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "192.0.2.7", "::", "::1", "2001:db8::5"])
def test_addresses_are_read_in_the_kernels_order(address: str) -> None:
    text = HEAD + line(f"{kernel_address(address)}:1F90")
    assert parse_listeners(text) == [{"address": address, "port": 8080, "inode": 42}]


def test_only_listening_sockets_count() -> None:
    text = HEAD + line("0100007F:1F90", "01") + line("0100007F:1F91", inode=7) + line("0100007F:1F92", "06")
    assert [item["port"] for item in parse_listeners(text)] == [8081]


@given(st.text() | st.text(alphabet="0123456789ABCDEF: \n").map(lambda text: HEAD + line(text) + text))
def test_any_text_is_a_list_of_sockets(text: str) -> None:
    for item in parse_listeners(text):
        ipaddress.ip_address(item["address"])


def test_a_broken_line_hides_no_other() -> None:
    text = HEAD + line("0100:1F90") + line("ZZ00007F:1F91") + "  1: short\n" + line("0100007F:1F93")
    assert [item["port"] for item in parse_listeners(text)] == [8083]
