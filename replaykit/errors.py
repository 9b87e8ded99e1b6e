"""Every error a caller can see, and the tree they hang on.

ReplaykitError
├── ConfigurationError        a setting, module or declaration that cannot work
│   ├── SchemaMismatch        the database's schema is older or newer than this release
│   ├── DatabaseUnreachable   no connection could be made
│   └── WorkflowUnknown       no workflow of that name here
├── OutsideRun                a call that only makes sense inside a run (or only outside of a body)
├── NotJournalable            a value that cannot be recorded without loss; names the path in it
├── ResultRejected            a step's result that its retry= did not accept, when the tries are used up
├── StepFailed                a step's error whose class cannot be rebuilt; carries its type's name
├── RunNotFound               no run has that id or key
├── NotLanded                 a step's call that did not happen: raised by its body, or declared with not_landed=
├── InDoubt                   a step's call of which nobody could say whether it happened, and that a person let fail
├── NotRetryable              retry of a run that is neither failed nor held, or that has compensated something
├── NotResolvable             a person's word on a call that is not in doubt, or has another word already
├── KeyConflict               the key belongs to a run of another workflow
├── RunFailed                 Handle.result() of a failed run; __cause__ is the run's error
├── RunHeld                   Handle.result() of a run that waits for a person
└── RunCancelled              Handle.result() of a cancelled run

Gone (BaseException)          raised inside an execution that has left memory; never seen by callers
"""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "DatabaseUnreachable",
    "Gone",
    "InDoubt",
    "KeyConflict",
    "NotJournalable",
    "NotLanded",
    "NotResolvable",
    "NotRetryable",
    "OutsideRun",
    "ReplaykitError",
    "ResultRejected",
    "RunCancelled",
    "RunFailed",
    "RunHeld",
    "RunNotFound",
    "SchemaMismatch",
    "StepFailed",
    "WorkflowUnknown",
]


class ReplaykitError(Exception):
    """The root of all errors that callers see."""


class ConfigurationError(ReplaykitError):
    """A setting, a module or a declaration cannot work as given."""


class SchemaMismatch(ConfigurationError):
    """The database's schema is older or newer than this release of replaykit can use."""


class DatabaseUnreachable(ConfigurationError):
    """No connection to the database could be made; the message never holds the password."""


class WorkflowUnknown(ConfigurationError):
    """No workflow of that name is known here."""


class OutsideRun(ReplaykitError):
    """The call only makes sense inside a run, or only outside of a step's body."""


class NotJournalable(ReplaykitError):
    """A value cannot be recorded without loss. The message begins with the path in the value (`$.rows[3].conn: ...`)."""


class ResultRejected(ReplaykitError):
    """A step's result that its `retry=` did not accept (`retry_if_result`): the last one, when the tries are used up."""


class StepFailed(ReplaykitError):
    """A step's error whose own class could not be rebuilt from the journal.

    Attributes:
        type: qualified name of the class the body raised, such as `"payments.CardDeclined"`.
        attributes: what its attributes held, by name, as far as it was recorded.
    """

    def __init__(self, message: str, type: str = "Exception") -> None:
        super().__init__(message)
        self.type = type
        self.attributes: dict[str, object] = {}


class RunNotFound(ReplaykitError):
    """No run has that id or key."""


class NotLanded(ReplaykitError):
    """A step's call did not happen: the body of a step with an effect raises it to say so, and a reconciler returns it.

    Raised by a body it is the step's error, like any other, and nothing is in doubt. A reconciler's answer after the worker's
    death lets the body run again; after an exception that exception is the step's.
    """


class InDoubt(ReplaykitError):
    """Nobody could say whether a step's call happened, and a person let the step fail; the message says who and why."""


class NotResolvable(ReplaykitError):
    """A person's word is not taken: the call is not in doubt, or there is another word already; the message names it."""


class NotRetryable(ReplaykitError):
    """A run that is neither failed nor held is not retried, nor one that has compensated anything; the message says which."""


class KeyConflict(ReplaykitError):
    """The key already belongs to a run of another workflow; the message names both."""


class RunFailed(ReplaykitError):
    """The run ended with an error, which is this error's `__cause__`.

    Attributes:
        type: qualified name of the error's class.
        message: the error's text.
    """

    def __init__(self, text: str, type: str = "Exception", message: str = "") -> None:
        super().__init__(text)
        self.type = type
        self.message = message


class RunHeld(ReplaykitError):
    """The run cannot go on without a person.

    Attributes:
        reason: why, in one sentence that names both sides.
    """

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class RunCancelled(ReplaykitError):
    """The run was cancelled before it ended."""


class Gone(BaseException):
    """The execution has left memory: nothing that user code does in its `finally` blocks counts any more.

    A BaseException, so that an author's `except Exception` cannot eat it (DESIGN 4, Leaving memory).
    """
