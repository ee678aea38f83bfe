"""Addresses in a store: the token is shown to processes with the same secret alone, and nothing forged is taken."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync import NotConnected
from wsync.control import Address, seal, unseal

ADDRESS = Address("127.0.0.1", 4711, bytes(range(16)))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a key file."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("WSYNC_AUTHKEY", raising=False)
    return tmp_path / "wsync" / "key"


@pytest.mark.parametrize("address", [ADDRESS, Address("", "wsync-name", b"a secret of any length")])
def test_a_sealed_address_is_opened_with_the_same_secret_and_does_not_show_its_token(address: Address) -> None:
    sealed = seal(address)
    assert unseal(sealed) == unseal(sealed.encode()) == address
    assert address.token.hex() not in sealed and seal(address) != sealed


def test_another_secret_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = seal(ADDRESS)
    monkeypatch.setenv("WSYNC_AUTHKEY", "one")
    by_name = seal(ADDRESS)
    assert unseal(by_name) == ADDRESS
    for sealed in (by_file,):
        with pytest.raises(ValueError, match="another secret"):
            unseal(sealed)
    monkeypatch.setenv("WSYNC_AUTHKEY", "two")
    with pytest.raises(ValueError, match="WSYNC_AUTHKEY"):
        unseal(by_name)


def test_no_part_of_a_sealed_address_can_be_changed() -> None:
    parts = json.loads(seal(ADDRESS))
    for index, other in enumerate(["127.0.0.2", 4712, "00" * 16, "00" * 16, "00" * 32]):
        with pytest.raises(ValueError, match="secret"):
            unseal(json.dumps([*parts[:index], other, *parts[index + 1 :]]))


def test_a_user_without_a_home_directory_is_told_to_set_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(NotConnected, match=r"home directory.*WSYNC_AUTHKEY"):
        seal(ADDRESS)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps))
def test_noise_is_no_address(data: bytes | str) -> None:
    with pytest.raises(ValueError, match="address"):
        unseal(data)


def test_the_key_file_is_made_once_and_only_its_user_can_read_it(state: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        sealed = list(threads.map(lambda _: seal(ADDRESS), range(32)))
    assert {unseal(one) for one in sealed} == {ADDRESS}
    assert stat.S_IMODE(state.stat().st_mode) == 0o600 and [path.name for path in state.parent.iterdir()] == ["key"]


def test_a_key_file_that_others_can_read_is_refused(state: Path) -> None:
    sealed = seal(ADDRESS)
    state.chmod(0o644)
    for call in (lambda: seal(ADDRESS), lambda: unseal(sealed)):
        with pytest.raises(NotConnected, match="WSYNC_AUTHKEY"):
            call()
    state.chmod(0o600)
    state.write_bytes(b"short")
    with pytest.raises(NotConnected, match="damaged"):
        seal(ADDRESS)


def test_without_a_place_for_the_file_the_error_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    with pytest.raises(NotConnected, match="set WSYNC_AUTHKEY"):
        seal(ADDRESS)
