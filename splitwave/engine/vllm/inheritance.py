"""What engine processes inherit: the variables of the group that starts, and of no earlier one."""

from collections.abc import Mapping, MutableMapping


class Inheritance:
    """A process's environment, lent to one group after another.

    Invariant: what the last group had set is there, or what was there before any had.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._set: dict[str, str] = {}
        self._before: dict[str, str | None] = {}

    def take_back(self) -> None:
        """Put back what was there before `give`, unless somebody else has changed it since."""
        for name, before in self._before.items():
            if self._environ.get(name) != self._set[name]:
                continue
            if before is None:
                del self._environ[name]
            else:
                self._environ[name] = before
        self._set, self._before = {}, {}

    def give(self, variables: Mapping[str, str]) -> None:
        """Set the variables of the group that starts next; `take_back` comes first."""
        assert not self._set, "an earlier group's variables are still set"
        self._set = dict(variables)
        self._before = {name: self._environ.get(name) for name in variables}
        self._environ.update(variables)
