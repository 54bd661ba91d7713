"""What this machine keeps for certificates: its key, the keys that it trusts, its certificates."""

import os
from dataclasses import dataclass
from pathlib import Path

from splitwave.certify.keys import (
    KeyExists,
    SigningKey,
    load_signing_key,
    make_directory,
    write_public,
)
from splitwave.certify.store import SUFFIX

KEY_NAME = "machine.key"


@dataclass(frozen=True, slots=True)
class Machine:
    """Directories below one, which is the user's unless said otherwise."""

    home: Path

    @property
    def key(self) -> Path:
        """The private key that signs what is made here."""
        return self.home / "keys" / KEY_NAME

    @property
    def trust(self) -> Path:
        """Public keys whose certificates count here."""
        return self.home / "trust"

    @property
    def certificates(self) -> Path:
        """Certificates that were made here."""
        return self.home / "certificates"

    def make_key(self) -> SigningKey:
        """This machine's key, made and trusted when it is first asked for. Raises BadKey.

        Of several who ask first at once one makes it, and all have that one.
        """
        key = self._made_or_found()
        public = self.trust / f"{key.public.key_id}.pem"
        if not public.exists():
            make_directory(self.trust)
            write_public(key.public, public)
        return key

    def _made_or_found(self) -> SigningKey:
        if self.key.exists():
            return load_signing_key(self.key)
        key = SigningKey.generate()
        try:
            key.save(self.key)
        except KeyExists:
            if self.key.exists():  # Somebody was faster.
                return load_signing_key(self.key)
            raise
        return key

    def has_certificates(self) -> bool:
        """True if any lies here; whether one fits is a worker's to say."""
        return any(self.certificates.glob(f"*{SUFFIX}"))


def default_home() -> Path:
    """Where a user's state lies, by the convention of desktops."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "splitwave"
