"""`splitwave certificate keygen|show|verify|diff`: keys and certificates, offline."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from services.cli.certificate_text import described, differing
from splitwave.certify.keys import BadKey, SigningKey, load_trust_store
from splitwave.certify.store import SUFFIX, read_file
from splitwave.core.certificate import (
    BYTES_MAX,
    CertificateRefused,
    Refusal,
    RefusalKind,
    SignedCertificate,
    proves,
)
from splitwave.core.evidence import Level
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.strict_json import Fields, JsonError, parse

EXIT_REFUSED = 3
"""As of a worker that does not serve for want of a certificate."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's verbs and their flags."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    keygen = verbs.add_parser("keygen", help="make a key pair to sign certificates with")
    keygen.add_argument("path", type=Path, help="file of the private key; the public one is beside")
    show = verbs.add_parser("show", help="say what certificates hold, without judging them")
    show.add_argument("paths", type=Path, nargs="+", metavar="FILE")
    show.add_argument(
        "--fingerprint", action="store_true", help="print every value of the fingerprint too"
    )
    verify = verbs.add_parser(
        "verify", help="say whether certificates count now; 3 if one does not"
    )
    verify.add_argument("paths", type=Path, nargs="+", metavar="FILE")
    verify.add_argument(
        "--trust", type=Path, required=True, metavar="DIR", help="directory of trusted public keys"
    )
    verify.add_argument(
        "--level", choices=[level.value for level in Level], default=Level.SMOKE.value,
        help="least level that counts (default: %(default)s)",
    )  # fmt: skip
    diff = verbs.add_parser("diff", help="say by what two certificates differ; 1 if they do")
    diff.add_argument("first", type=Path, metavar="FILE")
    diff.add_argument("second", type=Path, metavar="FILE", help=f"*{SUFFIX}, or a fingerprint")


def run(arguments: argparse.Namespace) -> int:
    """Run one verb. 0 well, 1 different or unreadable, 3 refused."""
    run_verb: Callable[[argparse.Namespace], int] = _RUN[arguments.verb]
    try:
        return run_verb(arguments)
    except BadKey as error:
        print(f"splitwave certificate {arguments.verb}: {error}", file=sys.stderr)
        return 1
    except CertificateRefused as refused:
        print(f"splitwave certificate {arguments.verb}: {refused}", file=sys.stderr)
        return EXIT_REFUSED if arguments.verb == "verify" else 1


def _keygen(arguments: argparse.Namespace) -> int:
    key = SigningKey.generate()
    public_path = key.save(arguments.path)
    print(f"key {key.public.key_id}")
    print(f"private: {arguments.path}  (keep it where certificates are made, and nowhere else)")
    print(f"public:  {public_path}  (copy it into the trust directory of each worker)")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    for line in _each(arguments.paths, arguments.fingerprint):
        print(line)
    return 0


def _each(paths: Sequence[Path], with_fingerprint: bool) -> Iterator[str]:
    for number, path in enumerate(paths):
        if number:
            yield ""
        yield str(path)
        yield from described(read_file(path).certificate, with_fingerprint=with_fingerprint)


def _verify(arguments: argparse.Namespace) -> int:
    try:
        trust = load_trust_store(arguments.trust)
    except BadKey as error:
        raise BadKey(f"--trust: {error}") from None
    code = 0
    for path in arguments.paths:
        try:
            refusal = proves(read_file(path), trust, Level(arguments.level), time.time())
        except CertificateRefused as refused:
            refusal = refused.refusal
        if refusal is None:
            print(f"{path}: good")
        else:
            code = EXIT_REFUSED
            print(f"{path}: refused ({refusal.kind}, {refusal.first}): {refusal.message}")
    return code


def _diff(arguments: argparse.Namespace) -> int:
    first = _read(arguments.first)
    second = _read(arguments.second)
    lines = list(differing(first, second))
    for line in lines:
        print(line)
    return 1 if lines else 0


def _read(path: Path) -> SignedCertificate | Fingerprint:
    """A certificate, or a fingerprint as a plain JSON object of names and values.

    Raises CertificateRefused, which names what is wrong with either.
    """
    if not path.name.endswith(SUFFIX):
        try:
            found = parse(path.read_bytes(), bytes_max=BYTES_MAX)
        except (OSError, JsonError):
            found = None
        if isinstance(found, dict) and "certificate" not in found:
            return _read_fingerprint(path, found)
    return read_file(path)


def _read_fingerprint(path: Path, found: dict[str, object]) -> Fingerprint:
    try:
        return Fingerprint(Fields({"fingerprint": found}, "").scalars("fingerprint"))
    except ValueError as error:  # JsonError among them
        words = f"{path}: is neither a certificate nor a fingerprint: {error}"
        raise CertificateRefused(Refusal(RefusalKind.MALFORMED, "fingerprint", words)) from None


_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "keygen": _keygen,
    "show": _show,
    "verify": _verify,
    "diff": _diff,
}
