"""A certificate that is good, to be spoilt by tests."""

from typing import Any  # a test's keywords

from splitwave.certify.keys import SigningKey, TrustStore, sign_certificate
from splitwave.core.certificate import Certificate, SignedCertificate, Wanted
from splitwave.core.envelope import Envelope, GroupShape, Traffic
from splitwave.core.evidence import Check, Control, Evidence, Level, required_checks
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.mode import lookup

NOW_S = 1_800_000_000
DAY_S = 86_400
MODE = "decode_cpu_compiled"
KEY = SigningKey.generate()
TRUST = TrustStore({KEY.public.key_id: KEY.public})

VALUES: dict[str, str | int | float | bool | None] = {
    "version.vllm": "0.32.0",
    "hardware.cpu": "a processor",
    "parallel.ranks": 2,
    "env.NCCL_ODD_NEW_ONE": "1",
    "vllm.model_config.enforce_eager": False,
    "vllm.scheduler_config.watermark": 0.5,
    "vllm.lora_config": None,
    "kernel.Attention": "CPU_ATTN x2",
    "weights.model.safetensors": "9f86d0",
}
ENVELOPE = Envelope(
    ranks=2, capture_grid=(1, 2, 3, 4), step_max_tokens=4, seats_max=4, prompt_max_tokens=96,
    sequence_max_tokens=128, traffic=Traffic(output_max_tokens=64, sampling=("seed", "top_k")),
)  # fmt: skip
SHAPE = GroupShape(
    ranks=2, tensor_parallel=1, seats_per_rank=4, sequence_max_tokens=128, step_max_tokens=4,
    capture_grid=(1, 2, 3, 4),
)  # fmt: skip


CONTROL = Control(broken="routing shifted by one", was_caught=True, figures={"rows": 3})


def evidence(*checks: Check, **changed: Any) -> tuple[Evidence, ...]:
    """Good evidence of some checks, all with the same changes."""
    fields: dict[str, Any] = {
        "passed": True,
        "seconds": 1.5,
        "replays": 12,
        "figures": {"drift": 1.01},
        "control": CONTROL,
    }
    return tuple(Evidence(check=check, **(fields | changed)) for check in checks)


FULL = required_checks(lookup(MODE), Level.FULL, ranks=2)


def certificate(**changed: Any) -> Certificate:
    """A full certificate of two ranks, with changes."""
    fields: dict[str, Any] = {
        "level": Level.FULL,
        "mode": MODE,
        "role": "decode",
        "envelope": ENVELOPE,
        "fingerprint": Fingerprint(VALUES),
        "evidence": evidence(*FULL),
        "issued_at_s": NOW_S - DAY_S,
        "expires_at_s": NOW_S + DAY_S,
        "key_id": KEY.public.key_id,
    }
    return Certificate(**(fields | changed))


def signed(**changed: Any) -> SignedCertificate:
    """The same, signed by KEY."""
    return sign_certificate(certificate(**changed), KEY)


def wanted(**changed: Any) -> Wanted:
    """The group that `certificate()` is for, with changes."""
    fields: dict[str, Any] = {
        "mode": MODE,
        "role": "decode",
        "fingerprint": Fingerprint(VALUES),
        "shape": SHAPE,
        "level": Level.FULL,
    }
    return Wanted(**(fields | changed))
