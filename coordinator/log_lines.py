"""The events that the coordinator logs: docs/operations.md has them as a table."""

from __future__ import annotations

from logging import DEBUG, ERROR, INFO, WARNING

from kvshm._base.log_lines import LogLine

RETRIED = "none needed; retried automatically"
"""The remedy where the coordinator or the engine tries again by itself."""
_FIELD = "`remedy`"


class Event(LogLine):
    """An event: its level, what it means, and what to do.  A line names it, with fields."""

    SERVING = INFO, "engines can join", "none"
    ENDED = (
        INFO,
        "SIGTERM or SIGINT ended the coordinator; `complaints` counts the messages it dropped",
        "none",
    )
    STOPPED = (
        ERROR,
        "a coordinator on a thread (`kvshm.coordinator.in_process`) cannot go on: `reason`",
        "do what it says; the program goes on, its engines serve on with what they know",
    )
    EXHAUSTED = (
        ERROR,
        "a coordinator on a thread (`kvshm.coordinator.in_process`) has closed all connections, "
        "because its process has too few descriptors left: `reason`",
        "do what it says; it serves again when there are enough",
    )
    JOIN = INFO, "an engine joined; it can share with `shares_with` others", "none"
    NO_LEASE_BIT = (
        WARNING,
        "there are more engines than lease bits: this one imports without leases, so more of its "
        "copies are discarded",
        "use several namespaces",
    )
    CANNOT_SHARE = (
        INFO,
        "two engines differ; the first field with both values",
        "make the field equal, if they should share",
    )
    REFUSED = WARNING, "an engine may not join: `reason`", _FIELD
    LEAVE = INFO, "an engine has ended in good order", "none"
    DEATH = INFO, "a process has died; its engine's blocks are withdrawn", "find out why"
    SUSPECTED = (
        WARNING,
        "an engine has been silent for `silent_s` seconds",
        "find out whether it hangs",
    )
    RECOVERED = INFO, "a suspected engine speaks again", "none"
    GARBLED = (
        WARNING,
        "a message could not be read and was dropped",
        "look up the process `pid`; report it if that is an engine of this version",
    )
    REPEATED = WARNING, "events came a second time and were dropped", "report it"
    IMPOSTOR = (
        WARNING,
        "a process sent a message in the name of another process's engine, which was ignored",
        "look up the process `pid`",
    )
    RESTORED = (
        WARNING,
        "the lock file had been removed, and was made again",
        "find out what removes files in the run directory",
    )
    REMOVED = INFO, "a socket or list of a dead process was removed", "none"
    FAILED = (
        WARNING,
        "something could not be done: `what`",
        f"{RETRIED}; if it goes on, read `reason`",
    )
    BUG = (
        ERROR,
        "an unexpected error in `what`, with a `traceback`; logged once, the coordinator goes on",
        "report the traceback",
    )
    NOT_SWEPT = (
        WARNING,
        "an engine's table cannot be read any more: a process has overwritten it",
        "restart that engine; report it",
    )
    FEW_DESCRIPTORS = (
        WARNING,
        "the limit of open files is low: hundreds of connections within a millisecond could end "
        "the coordinator",
        _FIELD,
    )
    LINES_LOST = (
        WARNING,
        "no process read the log, or its disk hung, and more than 1,000 lines of it waited: "
        "`lines` of them are lost; the coordinator went on",
        _FIELD,
    )
    NOT_IN_FILE = (
        WARNING,
        "the log file does not take lines: `reason`; they go to stderr",
        "make room, or give the file back to the coordinator's user",
    )
    LEFT_OUT = (
        WARNING,
        "more lines than [permitted](#bounds): `reason`",
        "read the lines before it: something repeats; report it",
    )
    FATAL = (
        ERROR,
        "the coordinator cannot serve: `reason`. In text, on stderr, it is a line without keys",
        "do what it says ([exit status](#start-and-stop))",
    )
    UNKNOWN_SETTING = WARNING, "a variable `KVSHM_...` is not a setting", "correct the name"
    NOT_NOTIFIED = (
        WARNING,
        "systemd was not notified that the coordinator serves",
        "check that `NOTIFY_SOCKET` is reachable: systemd may restart a coordinator that serves",
    )
    SWEPT = DEBUG, "lease bits of dead engines were cleared in a table", "none"
    LEFT_ALONE = DEBUG, "a file of a dead process could not be removed at the end", "none"
    UNSENT = DEBUG, "an engine that a reply was meant for has gone, or does not read", "none"
