"""TLS: certificate and key from files into an ssl.SSLContext, and again when they are renewed."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from engine_core import ConfigError
from server.access.secret import Secret


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a certificate is made of, in PEM.

    Attributes:
        certfile: The certificate, and the chain that vouches for it.
        keyfile: Its private key; None = in the same file.
        password: Of the key; None = it is not encrypted.
    """

    certfile: Path
    keyfile: Path | None = None
    password: Secret | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files there are."""
        return (self.certfile,) if self.keyfile is None else (self.certfile, self.keyfile)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have a context use these files for connections from here on.

        Raises:
            ConfigError: They cannot be read or do not fit each other; the context is as it was.
        """
        # First into one that nobody uses: of a pair that does not fit, the certificate would already be taken.
        self._load(create_context())
        self._load(context)

    def _load(self, context: ssl.SSLContext) -> None:
        password = "" if self.password is None else self.password.reveal()
        try:
            # A password always: without one OpenSSL would ask at the terminal, and the server would hang there.
            context.load_cert_chain(self.certfile, self.keyfile, password)
        except FileNotFoundError:
            missing = next((path for path in self.paths if not path.exists()), self.certfile)
            raise ConfigError(f"{missing} is not there; check --ssl-certfile and --ssl-keyfile") from None
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(self._describe(error)) from None

    def _describe(self, error: OSError) -> str:
        names = " and ".join(map(str, self.paths))
        reason = getattr(error, "reason", None)
        if isinstance(error, PermissionError):
            return f"{names} cannot be read by this user; give it the right to, or start as another user"
        if reason == "KEY_VALUES_MISMATCH":
            return f"{self.keyfile or self.certfile} is not the key of the certificate in {self.certfile}"
        if self._is_encrypted():
            return f"the key in {self.paths[-1]} is encrypted, and --ssl-keyfile-password is missing or wrong"
        return f"{names} cannot be used for TLS ({reason or error}); both must be PEM, the key without a passphrase"

    def _is_encrypted(self) -> bool:
        try:
            return b"ENCRYPTED" in self.paths[-1].read_bytes()
        except OSError:
            return False


def create_context() -> ssl.SSLContext:
    """Return a server's context without a certificate: TLS 1.2 or newer, HTTP/1.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
