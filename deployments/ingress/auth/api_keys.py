"""API keys from a file, reloaded when it changes, or an environment variable. Keys are stored as hashes.

A line is `NAME KEY` or `NAME sha256:HASH`; `#` at the start of a line or after white space starts a comment. Several
keys may have one name, for the rotation of a tenant's key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from pathlib import Path

logger = logging.getLogger("ray.serve")

KEY_PREFIX = "vitray-"
HASH_PREFIX = "sha256:"
MIN_KEY_CHARACTERS = 20
MAX_KEY_BYTES = 512

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,100}")
_HASH = re.compile(r"[0-9a-f]{64}")
_COMMENT = re.compile(rf"(?i:(?:^|\s|(?<={HASH_PREFIX}[0-9a-f]{{64}}))#)")


class KeysError(ValueError):
    """The keys cannot be read. The message names the line and never contains a key."""


def new_key(name: str) -> tuple[str, str]:
    """Returns a key of 256 random bits and the line of a keys file that admits it. Raises KeysError for a bad name."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, f"{_checked_name(name, 'the name')} {HASH_PREFIX}{_hash(key)}"


def parse_keys(text: str, source: str) -> dict[str, str]:
    """Returns names by the SHA-256 hashes of their keys, 64 hexadecimal digits.

    Raises:
        KeysError: a line is malformed, or two names have one key. The message names `source` and the line.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = _COMMENT.split(line, maxsplit=1)[0].split()
        if not words:
            continue
        where = f"{source}, line {number}"
        if len(words) != 2:
            raise KeysError(f"{where}: expected NAME KEY or NAME {HASH_PREFIX}HASH, got {len(words)} words")
        name, key = _checked_name(words[0], where), words[1]
        if key.startswith(HASH_PREFIX):
            hashed = key.removeprefix(HASH_PREFIX).lower()
            if not _HASH.fullmatch(hashed):
                raise KeysError(f"{where}: a hash has 64 hexadecimal digits")
        elif len(key) < MIN_KEY_CHARACTERS:
            raise KeysError(f"{where}: a key has at least {MIN_KEY_CHARACTERS} characters")
        elif not key.isascii() or len(key) > MAX_KEY_BYTES:
            raise KeysError(f"{where}: a key has at most {MAX_KEY_BYTES} characters, all of them ASCII")
        else:
            hashed = _hash(key)
        if found.setdefault(hashed, name) != name:
            raise KeysError(f"{where}: the key stands under two names")
    return found


class ApiKeys:
    """The keys that are valid now. Used from one event loop.

    keys = ApiKeys(file="keys.txt", variable=None)
    name = keys.name_of(key)  # None for an unknown key
    """

    def __init__(self, *, file: str | None, variable: str | None) -> None:
        """Raises KeysError if the file or the variable cannot be read. Later, an unreadable file changes no key."""
        self._file = Path(file) if file is not None else None
        self._env_keys: dict[str, str] = {}
        if variable is not None:
            if variable not in os.environ:
                raise KeysError(f"environment variable {variable} is not set")
            self._env_keys = parse_keys(os.environ[variable], variable)
        self._seen: object = None
        self._file_keys: dict[str, str] = {}
        if self._file is not None:
            self._seen = self._file_state()
            self._file_keys = self._read()

    def name_of(self, key: str) -> str | None:
        """Returns the name of `key`, None for an unknown key.

        The look-up by hash need not take constant time: its duration reveals at most the hash, and no key follows from
        a hash.
        """
        self._reload_if_changed()
        encoded = key.encode("utf-8", "surrogatepass")
        if len(encoded) > MAX_KEY_BYTES:
            return None
        hashed = hashlib.sha256(encoded).hexdigest()
        return self._file_keys.get(hashed) or self._env_keys.get(hashed)

    def _reload_if_changed(self) -> None:
        if self._file is None or (state := self._file_state()) == self._seen:
            return
        self._seen = state
        try:
            self._file_keys = self._read()
        except KeysError as error:  # a half-written or malformed file must not lock out all clients
            logger.error("API keys: %s; those read before stay valid", error)
            return
        logger.info("API keys: %d read", len(self._file_keys))

    def _file_state(self) -> object:
        """Returns a value that changes with the file, also when a symbolic link is replaced."""
        assert self._file is not None
        try:
            found = self._file.stat()
        except OSError as error:
            return error.errno
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev

    def _read(self) -> dict[str, str]:
        assert self._file is not None
        try:
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise KeysError(f"{self._file}: cannot be read: {reason}") from error
        if not text:  # as while it is written
            raise KeysError(f"{self._file.name}: the file is empty; without keys, it has a comment")
        return parse_keys(text, self._file.name)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _checked_name(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        raise KeysError(f"{where}: a name has up to 100 letters, digits and . _ @ -")
    return name
