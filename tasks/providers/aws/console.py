"""What a machine that ended itself said last: its start script's words on the console.

A machine that could not mount its file system has no other way to say so, and EC2 itself tells
only that the machine shut itself down. EC2 keeps the console of an ended instance for about an hour
(docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetConsoleOutput.html).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from elastic_core.cluster.provider import Instance, InstanceState
from elastic_core.errors import ProviderError
from elastic_core.exits import ExitCode
from tasks.providers.aws.faults import naming

SAYS: Final = "elastic-node: "
"""Begins each line that the start script means for us."""

EXITED: Final = "agent exited with "

LOOKS: Final = 24
"""A console that says nothing after so many looks is not asked again."""

_OWN_END: Final = "Client.InstanceInitiatedShutdown"
_WORD: Final = re.compile(rf"{SAYS}([^\r\n]+)")


@dataclass(slots=True)
class Consoles:
    """The last words of ended machines, each asked for until it is known.

    Attributes:
        ec2: A client of the machines' region.
    """

    ec2: Any
    _words: dict[str, str] = field(default_factory=dict)
    _looks: dict[str, int] = field(default_factory=dict)

    def with_last_word(self, instance: Instance) -> Instance:
        """Return an instance that ended itself with why, and with its agent's exit code where it had one."""
        if instance.state is not InstanceState.ENDED or not instance.detail.startswith(_OWN_END):
            return instance
        word = self._last_word(instance.name)
        if not word:
            return instance
        if word.startswith(EXITED):
            return replace(instance, exit_code=int(word.removeprefix(EXITED)))
        return replace(instance, exit_code=int(ExitCode.UNFIT), detail=word)

    def _last_word(self, name: str) -> str:
        """Return what the start script said last, "" while that is not known."""
        looks = self._looks.get(name, 0)
        if name not in self._words and looks < LOOKS:
            self._looks[name] = looks + 1
            words = _WORD.findall(self._console(name))
            if words:
                self._words[name] = words[-1].strip()
        return self._words.get(name, "")

    def _console(self, name: str) -> str:
        try:
            with naming("GetConsoleOutput"):
                answer = self.ec2.get_console_output(InstanceId=name)
        except ProviderError:
            return ""
        return str(answer.get("Output", ""))  # botocore has decoded it
