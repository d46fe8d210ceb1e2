"""Fingerprints of keys: what gpg says of the same files, and any damage is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.openpgp import (
    KeyFileError,
    key_fingerprints,
    key_problem,
)
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parent / "fixtures" / "openpgp"
# As `gpg --show-keys --with-colons` prints them. The second key has a subkey, which is none of the pinned ones.
RSA = "D1B39511B655B139D3A322F992711F8FE2EF5C97"
ED25519 = "C2924BF071DA18244FE3B81E6F13B23E11B83E56"


def text(name: str) -> str:
    return (FOLDER / f"{name}.asc").read_text()


@pytest.mark.parametrize(
    ("name", "fingerprints"), [("rsa2048", [RSA]), ("ed25519", [ED25519]), ("two", [RSA, ED25519])]
)
def test_fingerprints(name: str, fingerprints: list[str]) -> None:
    assert key_fingerprints(text(name)) == fingerprints
    assert key_fingerprints(text(name).replace("\n", "\r\n")) == fingerprints


def test_two_blocks_in_one_text() -> None:
    assert key_fingerprints(text("rsa2048") + "\nand another one:\n" + text("ed25519")) == [RSA, ED25519]


def test_headers_before_the_key() -> None:
    head = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n"
    assert key_fingerprints(text("rsa2048").replace(head, head + "Version: GnuPG v2\nComment: x\n")) == [RSA]


@pytest.mark.parametrize("pinned", [RSA, RSA.lower(), " ".join(RSA[i : i + 4] for i in range(0, 40, 4))])
def test_the_pinned_key(pinned: str) -> None:
    assert key_problem(text("rsa2048"), pinned, "https://example.com/key") == ""


def test_another_key_is_refused() -> None:
    problem = key_problem(text("ed25519"), RSA, "https://example.com/key")
    assert f"the key of https://example.com/key has the fingerprint {ED25519}, not {RSA}" in problem


def test_a_second_key_beside_the_pinned_one_is_refused() -> None:
    """apt would trust what either of them signs."""
    assert f"has the fingerprint {RSA}, {ED25519}, not {RSA}" in key_problem(text("two"), RSA, "x")


@pytest.mark.parametrize("pinned", ["", "D1B3", RSA[:-1] + "G", RSA + "0"])
def test_what_is_no_fingerprint(pinned: str) -> None:
    assert "has not 40 hex digits" in key_problem(text("rsa2048"), pinned, "x")


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ("<html>404 not found</html>", "gpg --no-default-keyring"),
        ("", "BEGIN PGP PUBLIC KEY BLOCK"),
        ("-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n-----END PGP PUBLIC KEY BLOCK-----\n", "no public key"),
        ("-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n!!!!\n-----END PGP PUBLIC KEY BLOCK-----\n", "damaged"),
        ("-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nAAAA\n-----END PGP PUBLIC KEY BLOCK-----\n", "damaged"),
    ],
)
def test_what_is_no_key(damaged: str, words: str) -> None:
    with pytest.raises(KeyFileError, match=words):
        key_fingerprints(damaged)
    assert words in key_problem(damaged, RSA, "x")


def test_a_key_cut_short() -> None:
    lines = text("rsa2048").splitlines()
    with pytest.raises(KeyFileError, match="ends within a packet"):
        key_fingerprints("\n".join(lines[:4] + lines[-1:]))


@given(st.integers(0, 2000), st.characters(codec="ascii"))
def test_any_damage_is_no_other_pinned_key(at: int, character: str) -> None:
    whole = text("rsa2048")
    at %= len(whole)
    damaged = whole[:at] + character + whole[at + 1 :]
    try:
        assert key_fingerprints(damaged)
    except KeyFileError as error:
        assert str(error)


@given(st.text() | st.text(alphabet="ABab01+/=\n"))
def test_any_text(body: str) -> None:
    for damaged in (body, f"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n{body}\n-----END PGP PUBLIC KEY BLOCK-----\n"):
        assert key_problem(damaged, RSA, "x")
