"""What the core of kvshm logs in an engine."""

from __future__ import annotations

from logging import DEBUG, ERROR, INFO, WARNING

from .log_lines import LogLine


class CoreLine(LogLine):
    """Level, text and remedy of each; docs/operations.md shows them."""

    PUBLISH_FAILED = (
        ERROR,
        "blocks could not be published",
        "report it, with the traceback: the transport has failed in an unforeseen "
        "way, and these blocks stay unshared",
    )
    EXPORT_NOT_CLOSED = (
        ERROR,
        "the memory's export could not be closed",
        "report it, with the traceback; the engine has left the node",
    )
    NO_CLIENT_SOCKETS = (
        ERROR,
        "no sockets for the coordinator: %s (serving on, unshared)",
        "too few open files are left to connect: raise the limit of open files (`ulimit -n`) "
        "and restart the engine to share",
    )
    ATTACH_FAILED = (
        ERROR,
        "engine %s could not be attached",
        "report the traceback; the blocks are computed",
    )
    TIDY_FAILED = (
        ERROR,
        "peers that have ended could not be unmapped, or new ones attached",
        "report it; memory of ended engines stays mapped until this one ends",
    )
    UPDATE_FAILED = (
        ERROR,
        "%s failed (logged once; the client goes on)",
        "report the traceback",
    )
    REQUEST_FAILED = (
        ERROR,
        "request at %s failed",
        "report the traceback",
    )
    SOCKET_RESTORED = (
        WARNING,
        "%s was removed or replaced, and is there again",
        "find out what removes files in the run directory; the socket is made again within "
        "two seconds",
    )
    NOT_SHARING = (
        WARNING,
        "not sharing the prefix cache: %s",
        "see [the reasons](#why-an-engine-does-not-share); the engine serves as plain vLLM",
    )
    NOT_SHARING_NOW = (
        WARNING,
        "not sharing the prefix cache: %s (serving on, unshared)",
        "do what it says: usually there is too little memory, or too few open files or "
        "threads are permitted. The engine tries again, every 30 s at least, and logs this "
        "once",
    )
    FAULT_SET = (
        WARNING,
        "KVSHM_FAULT=%s: every import is made wrong on purpose",
        "unset KVSHM_FAULT, and start the engines of this namespace again: wrong blocks are "
        "published on",
    )
    NOT_OPENED = (
        WARNING,
        "%s (the engine serves on and tries another epoch)",
        "do what it says (`rank … cannot export: …`): usually too few open files or threads "
        "are permitted. The engine tries again, every 30 s at least, and logs this once",
    )
    REFUSED = (
        WARNING,
        "the coordinator refuses this engine: %s; %s (serving on, unshared)",
        "do what follows the semicolon",
    )
    NO_COORDINATOR = (
        WARNING,
        "no coordinator in this run directory: nothing is shared until one is started: %s",
        "run the command at the end of the line, as the engine's user; or, if one runs, give both "
        "the same KVSHM_RUN_DIR and KVSHM_NAMESPACE; logged once, when no coordinator has answered "
        "for 5 s",
    )
    COORDINATOR_LOST = (
        WARNING,
        "no coordinator: serving on with what is known, joining again when it is back",
        "start or restart the coordinator",
    )
    INCOMPATIBLE = (
        WARNING,
        "engine %s cannot share with this one: %s",
        "if they should share, make the named fields equal: the first is the cause. A "
        "warning where both seem to serve one model; else information, once for all engines "
        "that differ in the same",
    )
    PEER_LEFT_OUT = (
        WARNING,
        "engine %s is left out: %s",
        "nothing at first: this engine tries again, every 30 s at least. If the other "
        "engine's blocks stay unused, do what the reason says, or restart that engine",
    )
    BAD_EVENTS = (
        WARNING,
        "engine %s sent events that make no sense: %s",
        "restart that engine; report it",
    )
    PEER_DIED = (
        WARNING,
        "engine %s has died",
        "find out why; no block is read from that engine any more, and a coordinator cleans "
        "up after it",
    )
    PEER_FAILED = (
        WARNING,
        "engine %s failed %d times, not used for %.0f s",
        "look at that engine: it hangs, or its memory cannot be read",
    )
    UNKNOWN_SETTING = (
        WARNING,
        "%s is not a setting of kvshm and does nothing; %s",
        "correct the name",
    )
    PLUGIN_LEFT_OUT = (
        WARNING,
        "VLLM_PLUGINS=%r leaves kvshm out, so vLLM does not look at KVSHM_ENABLE; add kvshm to it",
        "do what it says",
    )
    LEASE_FAILED = (
        WARNING,
        "cannot lease from engine %s: %s",
        "nothing; report it if it repeats",
    )
    READ_FAILED = (
        WARNING,
        "cannot read from engine %s: %s",
        "nothing; the blocks are computed. If it repeats, look at that engine",
    )
    LOAD_DISCARDED = (
        WARNING,
        "a load could not be checked and is discarded: %s",
        "nothing; the blocks are computed",
    )
    MISMATCH = (
        WARNING,
        "engine %s: copied bytes differ from what it published (block %d, key %s...)",
        "report it (`KVSHM_VERIFY=1` has prevented a wrong token)",
    )
    LEASES_NOT_RELEASED = (
        WARNING,
        "leases could not be released; the exporter will: %s",
        "nothing",
    )
    LEASES_LEFT = (
        WARNING,
        "leases of engine %s could not be released: %s",
        "nothing: that engine waits for them within its drain budget, once",
    )
    TICKET_FAILED = (
        WARNING,
        "a load's ticket cannot be counted: %s",
        "nothing; report it if it repeats",
    )
    PEER_LIST_NOT_WRITTEN = (
        WARNING,
        "%s: %s; ranks attach peers when they are needed",
        "look at the run directory (full, or not writable); first imports from a peer may "
        "come too late",
    )
    PEER_LIST_UNREADABLE = (
        WARNING,
        "%s cannot be read: %s",
        "look at the run directory; first imports from a peer may come too late",
    )
    INDEX_FULL = (
        WARNING,
        "%s is full and cannot grow: %s; new entries are refused",
        "free memory, or raise the container's limit",
    )
    CLIENT_NOT_ENDED = (
        WARNING,
        "client's thread has not ended within %.1f s",
        "nothing: it comes while the engine ends",
    )
    FOREIGN_USER = (
        WARNING,
        "uid %d asked at %s: refused",
        "a process of another user tried to connect; engines of different users never share",
    )
    NOT_SERVED = (
        WARNING,
        "a socket cannot be made again: %s",
        "remove what has taken the socket's place (a directory), or make room; the engine "
        "tries again every two seconds, and logs this once",
    )
    ACCEPT_FAILED = (
        WARNING,
        "cannot accept at %s: %s",
        "raise the limit of open files (`ulimit -n`)",
    )
    NOT_IN_FILE = (
        WARNING,
        "lines are not written to %s, but here: %s",
        "make room, or give the file back to the engine's user; until then lines go where "
        "they go without `KVSHM_LOG_FILE`",
    )
    MISSING_IN_FILE = (
        WARNING,
        "%d lines before this one are not in this file",
        "look for them in vLLM's log, or on the coordinator's stderr",
    )
    TOO_MANY_LINES = (
        WARNING,
        "more than %d lines in %.0f s: further ones are left out until this time is over",
        "read the lines before it: something repeats; report it",
    )
    LINES_LEFT_OUT = (
        WARNING,
        "%d lines were left out, because there were too many at once",
        "read the lines before it: something repeats; report it",
    )
    LOG_FILE = (
        INFO,
        "the lines of this process go to %s",
        "look into that file (`KVSHM_LOG_FILE`)",
    )
    MINUTE = (
        INFO,
        "last %.0f s: %s",
        "nothing where prefixes are found (`… of … lookups found a prefix, … tokens "
        "imported, … loads failed; not imported: …`). Once a minute, if anything happened; "
        "the reasons are those of the dump (`miss_…`), and normal where prompts have no "
        "common prefix",
    )
    JOINED = (
        INFO,
        "joined as %s, lease bit %d, peers to share with: %d",
        "nothing",
    )
    SHARES_IF = (
        INFO,
        "engine %s shares its prefix cache if its role and its KV cache allow it, run directory %s",
        "nothing: `joined as …` follows, or the reason why the engine does not share",
    )
    PEER_JOINED = (
        INFO,
        "engine %s joined",
        "nothing",
    )
    PEER_GONE = (
        INFO,
        "engine %s is gone: %s",
        "nothing, or find out why it died",
    )
    PEER_EPOCH_ENDED = (
        INFO,
        "engine %s has ended its epoch: %s",
        "nothing: that engine has been reset, or has left, since it joined",
    )
    NOT_CLEANED = (
        DEBUG,
        "nothing cleaned up: %s",
        "nothing; `kvshm clean` does it when nothing runs any more",
    )
    OPTIONAL_CALL_FAILED = (
        DEBUG,
        "%s of the transport failed",
        "nothing, if its other calls work: kvshm does without this one, with the traceback "
        "in the log",
    )
    PEER_HUNG_UP = (
        DEBUG,
        "a peer left %s before its answer: %s",
        "nothing",
    )
