"""Which models of the native roles run the code that lies in their folders instead."""

from __future__ import annotations

from dataclasses import dataclass

NATIVE, EXECUTE = "native", "execute"


@dataclass(frozen=True, slots=True)
class PythonModels:
    """The models of pre- and postprocessing and BLS whose ``model.py`` is run.

    A model of another role than the native ones runs its code in any case; a token-level
    model never does, as worker groups answer for it.
    """

    names: frozenset[str] = frozenset()
    are_all: bool = False

    @classmethod
    def parse(cls, text: str) -> PythonModels:
        """Read ``native``, ``execute``, or names with commas between."""
        if text == NATIVE:
            return cls()
        if text == EXECUTE:
            return cls(are_all=True)
        return cls(frozenset(filter(None, (name.strip() for name in text.split(",")))))

    def executes(self, name: str) -> bool:
        """Whether this model's code is run if it has any."""
        return self.are_all or name in self.names
