"""What went wrong, named by what the caller should do. Each class's docstring is its default message."""

from __future__ import annotations

OK, ENDED_BADLY, USAGE, NEEDS_A_PERSON, TRY_AGAIN, INTERNAL = 0, 1, 2, 3, 75, 70
"""The exit codes of every command. 75 and 70 are `EX_TEMPFAIL` and `EX_SOFTWARE` of sysexits.h."""


class HarnessError(Exception):
    """The run stopped early; run the same command again."""

    exit_code = TRY_AGAIN

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.__doc__)


class UsageError(HarnessError):
    """The command is wrong; fix it."""

    exit_code = USAGE


class ContractMismatch(HarnessError):
    """This run id already stands for another contract; choose another run id."""

    exit_code = USAGE


class IllegalMove(HarnessError):
    """The run's state does not allow this; look at the run first."""

    exit_code = USAGE


class ProposalRejected(HarnessError):
    """The model's answer is not an acceptable proposal; this is final for that answer."""

    exit_code = ENDED_BADLY


class ModelUnavailable(HarnessError):
    """The model did not answer; the request is debited and the run can ask again."""


class RunBusy(HarnessError):
    """Another process that is alive drives this run; wait for it."""


class Fenced(HarnessError):
    """Another process has taken this run over; this one has stopped and written nothing more."""


class ToolUnavailable(HarnessError):
    """The tool could not be asked; nothing was decided. Try later."""


class Misdeclared(ToolUnavailable):
    """What is declared of the tool does not fit it; mend harness.toml."""

    exit_code = USAGE


class CannotTell(HarnessError):
    """The tool offers no way to look up what is there."""


class Denied(HarnessError):
    """A rule denies this call."""

    exit_code = ENDED_BADLY


class ApprovalNeeded(HarnessError):
    """A person has to approve this call."""

    exit_code = NEEDS_A_PERSON


class OutcomeUnknown(HarnessError):
    """The tool call may or may not have taken effect; look the operation up before acting."""


class Interrupted(HarnessError):
    """Stopped by a signal."""


class StoreError(HarnessError):
    """The database could not be used; what was committed before is untouched."""
