"""What a router demands of groups that want work, and of requests that want a group."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from splitwave.core.envelope import Envelope, OutsideEnvelope
from splitwave.core.evidence import Level
from splitwave.core.generation import Request, features
from splitwave.core.mode_guard import Standing
from splitwave.core.worker import Certification

_LEVELS = frozenset(Level)


class RefusedGroup(enum.StrEnum):
    """Why a router gives a group no work, as metrics and the status name it."""

    UNKNOWN = "unknown"
    """It has not described itself."""
    UNCERTIFIED = "uncertified"
    LEVEL = "level"
    """Its certificate proves too little."""
    DECERTIFIED = "decertified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What one router demands."""

    level: Level = Level.FULL
    allow_uncertified: bool = False
    decertified_groups_max: float = 0.25
    """Share of a pool that may be out for steps outside their mode; beyond it groups serve on."""

    def refuse(
        self, certification: Certification, standing: Standing
    ) -> tuple[RefusedGroup, str] | None:
        """Why a group gets no work, with words for people; None if it may."""
        if standing is Standing.DECERTIFIED:
            first = next(iter(certification.violations), None)
            return RefusedGroup.DECERTIFIED, "it ran a step outside its mode" + (
                f": {first}" if first is not None else ""
            )
        if self.allow_uncertified:
            return None
        if not certification.certificate_id:
            why = certification.refusal or "it says nothing of a certificate"
            return RefusedGroup.UNCERTIFIED, f"it is uncertified: {why}"
        known = certification.level in _LEVELS  # Another release's worker may have further ones.
        if not known or not Level(certification.level).reaches(self.level):
            return (
                RefusedGroup.LEVEL,
                f"its certificate is of level {certification.level}; {self.level} is demanded",
            )
        return None


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What of a request has to lie within an envelope."""

    prompt_tokens: int
    output_max_tokens: int
    sampling: tuple[str, ...] = ()
    """Names of its sampling features."""

    @classmethod
    def of(cls, request: Request) -> "RequestShape":
        """That of a request."""
        sampling = request.sampling
        return cls(len(request.token_ids), sampling.max_tokens, features(sampling))

    @property
    def in_prefill(self) -> "RequestShape":
        """What of it prefill computes: the prompt, and one token behind it."""
        return RequestShape(self.prompt_tokens, 1, self.sampling)

    def outside(self, envelope: Envelope | None) -> OutsideEnvelope | None:
        """Why a group must not serve it, or None; a group without an envelope has no such limit."""
        if envelope is None:
            return None
        return envelope.refuse_request(
            prompt_tokens=self.prompt_tokens,
            output_max_tokens=self.output_max_tokens,
            sampling=self.sampling,
        )

    def outside_all(self, envelopes: Iterable[Envelope | None]) -> OutsideEnvelope | None:
        """Why none of some groups may serve it; None if one may, or if there is none."""
        first: OutsideEnvelope | None = None
        for envelope in envelopes:
            outside = self.outside(envelope)
            if outside is None:
                return None
            first = first or outside
        return first
