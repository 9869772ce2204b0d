"""Sign what the launchers of a run send each other with a secret.

No message contains the secret.

    secret = read_secret("secret.txt", os.environ)      # of --rdzv-secret-file, or of the scheduler's environment
    data = secret.sign("settings", {"--nnodes": "2"})
    secret.read("settings", data)                       # raises SignatureError for what another secret signed

Signed values are JSON, so reading one never runs code.
"""

import hashlib
import hmac
import json
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, final

from lockstep.errors import ConfigError, LockstepError

__all__ = ["NO_SECRET", "SECRET_VARIABLE", "Secret", "SignatureError", "read_secret"]

SECRET_VARIABLE = "LOCKSTEP_RDZV_SECRET"
_FLAG = "--rdzv-secret-file"
# Bytes of a secret.
_LEAST = 16


class SignatureError(LockstepError):
    """A value was not signed with this secret."""


@final
class Secret:
    """A key that signs values.

    Args:
        key: without one, anybody who can read a value can sign others.
    """

    def __init__(self, key: bytes = b"") -> None:
        self._key = key

    def __bool__(self) -> bool:
        return bool(self._key)

    def __repr__(self) -> str:
        return "Secret()"

    def sign(self, purpose: str, value: Any) -> bytes:
        """Return a JSON value with its signature, in one line.

        Args:
            purpose: so that a value cannot be used in place of another.
        """
        text = json.dumps(value, sort_keys=True)
        return f"{self._digest(purpose, text)} {text}".encode()

    def read(self, purpose: str, data: bytes) -> Any:
        """Return the value that `sign` was given.

        Raises:
            SignatureError: it was signed with another secret, or for another purpose.
        """
        digest, _, text = data.decode("utf-8", "replace").partition(" ")
        # compare_digest takes the same time for any difference, so the time does not reveal a digest.
        if not hmac.compare_digest(digest.encode(), self._digest(purpose, text).encode()):
            raise SignatureError(
                f"what another launcher wrote ({purpose}) is not signed with this launcher's secret; give all of them "
                f"the same {_FLAG}, or {SECRET_VARIABLE}"
            )
        return json.loads(text)

    def derive(self, text: str) -> "Secret":
        """Return the secret of one round or connection."""
        return Secret(bytes.fromhex(self._digest("derive", text)))

    def _digest(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}\n{text}".encode(), hashlib.sha256).hexdigest()


NO_SECRET = Secret()


def read_secret(path: str | None, environ: MutableMapping[str, str]) -> Secret:
    """Return the secret of --rdzv-secret-file, else that of the environment.

    The ranks do not get the variable.

    Raises:
        ConfigError: it is too short, or other users may read or change the file.
    """
    # Remove the variable, so that the ranks do not inherit it.
    text = environ.pop(SECRET_VARIABLE, "").strip()
    if path is None:
        if text and len(text) < _LEAST:
            raise ConfigError(f"{SECRET_VARIABLE} has {len(text)} characters: it must have at least {_LEAST}")
        return Secret(text.encode())
    try:
        with Path(path).expanduser().open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(1 << 16).strip()
    except OSError as error:
        raise ConfigError(f"{_FLAG} {path} cannot be read: {error.strerror or error}") from error
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{_FLAG} {path} can be read or changed by other users: chmod 600 {path}")
    if len(data) < _LEAST:
        raise ConfigError(f"{_FLAG} {path} has {len(data)} bytes: it must have at least {_LEAST}")
    return Secret(data)
