"""API keys: what a file may hold, how it is read again, and that a key is known by its hash alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.ingress.auth.api_keys import ApiKeys, KeysError, new_key, parse_keys

KEY = "a-key-of-twenty-characters"
HASH = hashlib.sha256(KEY.encode()).hexdigest()


def test_lines_with_keys_and_with_hashes() -> None:
    text = f"# comment\n\nalice {KEY}\n  bob   sha256:{'AB' * 32}  # bob's\n"
    assert parse_keys(text, "f") == {HASH: "alice", "ab" * 32: "bob"}


def test_a_key_may_contain_what_begins_a_comment() -> None:
    """What stood before it was taken for the key."""
    assert parse_keys(f"alice sha256:{HASH.upper()}#hers", "f") == {HASH: "alice"}, "no hash contains it"
    key = KEY + "#Secret"
    assert parse_keys(f"#{KEY}\nalice {key} # hers", "f") == {hashlib.sha256(key.encode()).hexdigest(): "alice"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"alice {KEY}ü", "f, line 1: a key has at most 512 characters, all of them ASCII"),
        (f"alice {'k' * 513}", "f, line 1: a key has at most 512 characters"),
        ("alice", "f, line 1: expected NAME KEY or NAME sha256:HASH, got 1 words"),
        (f"\nalice {KEY} more", "f, line 2: expected NAME KEY or NAME sha256:HASH, got 3 words"),
        ("alice short", "f, line 1: a key has at least 20 characters"),
        ("alice sha256:abc", "f, line 1: a hash has 64 hexadecimal digits"),
        (f"al/ice {KEY}", "f, line 1: a name has up to 100 letters"),
        (f"alice {KEY}\nbob {KEY}", "f, line 2: the key stands under two names"),
    ],
)
def test_a_line_that_is_none_is_named_and_the_key_is_not(text: str, told: str) -> None:
    with pytest.raises(KeysError) as refused:
        parse_keys(text, "f")
    assert str(refused.value).startswith(told)
    assert KEY not in str(refused.value)


@given(st.text(max_size=60))
def test_no_file_makes_anything_but_keys_or_a_keys_error(text: str) -> None:
    with contextlib.suppress(KeysError):
        parse_keys(text, "f")


def test_a_new_key_is_let_in_by_its_line() -> None:
    key, line = new_key("alice")
    assert key not in line
    assert len(key) > 40
    assert new_key("alice")[0] != key
    assert parse_keys(line, "f") == {hashlib.sha256(key.encode()).hexdigest(): "alice"}


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {KEY}\n")
    keys = ApiKeys(file=str(file), variable=None)
    assert keys.name_of(KEY) == "alice"
    file.write_text(f"alice {KEY}-new\nalice {KEY}\n")
    assert (keys.name_of(KEY + "-new"), keys.name_of(KEY)) == ("alice", "alice")
    file.write_text(f"alice {KEY}-new\n")
    assert (keys.name_of(KEY + "-new"), keys.name_of(KEY)) == ("alice", None)
    file.write_text("# nobody\n")
    assert keys.name_of(KEY + "-new") is None


def test_a_link_to_another_file_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes exchanges secrets: the same size, and a time that may be the same too."""
    link = tmp_path / "keys"
    for name, owner in (("old", "alice"), ("new", "bobby")):
        (tmp_path / name).write_text(f"{owner} {KEY}\n")
        os.utime(tmp_path / name, (1, 1))
    link.symlink_to(tmp_path / "old")
    keys = ApiKeys(file=str(link), variable=None)
    assert keys.name_of(KEY) == "alice"
    link.unlink()
    link.symlink_to(tmp_path / "new")
    assert keys.name_of(KEY) == "bobby"


@pytest.mark.parametrize("damage", ["alice\n", None, "\udcff", ""])
def test_a_damaged_file_leaves_the_keys_as_they_were(
    damage: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {KEY}\n")
    keys = ApiKeys(file=str(file), variable=None)
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage, errors="surrogateescape")
    for _ in range(3):
        assert keys.name_of(KEY) == "alice"
    file.write_text(f"bob {KEY}\n")
    assert keys.name_of(KEY) == "bob"


def test_a_file_that_is_not_there_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="cannot be read: No such file"):
        ApiKeys(file=str(tmp_path / "none"), variable=None)
    with pytest.raises(KeysError, match="variable NO_SUCH_VARIABLE is not set"):
        ApiKeys(file=None, variable="NO_SUCH_VARIABLE")


def test_keys_of_the_environment_and_of_the_file_are_both_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(f"alice {KEY}\n")
    monkeypatch.setenv("SOME_KEYS", f"bob {KEY}-bob\ncarol sha256:{hashlib.sha256(b'x' * 30).hexdigest()}")
    keys = ApiKeys(file=str(tmp_path / "keys"), variable="SOME_KEYS")
    assert [keys.name_of(key) for key in (KEY, KEY + "-bob", "x" * 30)] == ["alice", "bob", "carol"]


@pytest.mark.parametrize(
    "key", ["", " ", KEY[:-1], KEY + "x", KEY.upper(), HASH, "sha256:" + HASH, "\ud800", "x" * 10**6]
)
def test_what_is_not_the_key_is_not_let_in(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEYS", f"alice {KEY}")
    assert ApiKeys(file=None, variable="SOME_KEYS").name_of(key) is None


class LookedUp(dict[str, str]):
    """Answers for one key at a time."""

    def items(self) -> Any:
        raise AssertionError("every key was looked at")


def test_a_key_is_looked_up_by_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hash was compared at every request, on the event loop that streams answers: 10,000 keys took 2.4 ms."""
    monkeypatch.setenv("SOME_KEYS", f"alice {KEY}")
    keys = ApiKeys(file=None, variable="SOME_KEYS")
    keys._env_keys = LookedUp(keys._env_keys)
    assert [keys.name_of(KEY), keys.name_of(KEY + "x")] == ["alice", None]
    assert list(keys._env_keys) == [HASH], "the key itself is not kept"
