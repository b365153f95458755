"""What the hooks into engines log."""

from __future__ import annotations

from logging import DEBUG, ERROR, INFO, WARNING

from kvshm._base.log_lines import LogLine


class HookLine(LogLine):
    """Level, text and remedy of each; docs/operations.md shows them."""

    NOT_PREEMPTED = (
        ERROR,
        "request %.100r could not be preempted and was ended",
        "report it, with the traceback before it: a request had computed from blocks that "
        "did not arrive",
    )
    HOOK_FAILED = (
        ERROR,
        "%s failed; kvshm is off for this engine, which serves on",
        "report the traceback; restart the engine to share again",
    )
    FALLBACK_FAILED = (
        ERROR,
        "%s failed, and so did what takes its place",
        "restart the engine; report the traceback",
    )
    UNSAFE = (
        ERROR,
        "%s failed, and kvshm could not make its state safe",
        "restart the engine; report the traceback",
    )
    UNKNOWN_QUEUE = (
        WARNING,
        "leased, held and last blocks are reused like others: unknown block queue",
        "nothing has to be done: blocks are handed out in vLLM's own order, and imports of "
        "blocks that are reused meanwhile fail and are computed. The version of vLLM is one "
        "that kvshm does not know",
    )
    EXPORTING_ONLY = (
        WARNING,
        "exporting only: %s",
        "nothing, if you meant it: the engine lets others read its blocks and imports none. "
        "What the line names has decided it; information if that is a setting of kvshm. "
        "`VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1`: unset it, since vLLM 0.32 ends at a "
        "client's retry that comes under the same id while an import of the first try is "
        "under way. `vLLM's scheduler was not found`: report it, with how the engine was "
        "started. `this vLLM frees blocks while they are written`: report it, with the "
        "version of vLLM",
    )
    IMPORTING_ONLY = (
        WARNING,
        "importing only: %s",
        "nothing, if you meant it: the engine reads others' blocks and shows none; "
        "information if a setting of kvshm has decided it. If it names something of this "
        "vLLM, report it, with the version of vLLM: it is not as kvshm knows it",
    )
    UNTESTED = (
        WARNING,
        "sharing all the same (KVSHM_UNTESTED=1), and answers may be wrong: %s",
        "compare answers with those of an unshared engine (`kvshm verify-logits`), or "
        "upgrade kvshm; the line says what this vLLM has in another way",
    )
    UNTESTED_TRANSFORMERS = (
        WARNING,
        "sharing on transformers %s, which is not tested with this kvshm; tested is %s",
        "upgrade kvshm; it has found the methods that it wraps or calls as it knows them, "
        "and compares [no more than that](transformers.md#what-is-not-shared)",
    )
    SOURCE_UNREADABLE = (
        WARNING,
        "vLLM's source cannot be compared",
        "read the traceback of the line after it; install kvshm and vLLM again, and report "
        "it if it repeats",
    )
    VLLM_CHANGED = (
        WARNING,
        "vLLM has changed in what kvshm needs",
        "read the traceback of the line after it; upgrade kvshm",
    )
    BAD_OPTION = (
        WARNING,
        "request not shared: %s",
        "have the client correct the option that the line names ([per "
        "request](configuration.md#per-request)); one a minute is logged, `bad_options` "
        "counts all",
    )
    BAD_RECEIPT = (
        WARNING,
        "receipt ignored: %s",
        "have the proxy pass on `after` of the first engine's answer unchanged ([per "
        "request](configuration.md#per-request)); until then a request may be computed whose "
        "blocks another engine has just published",
    )
    LOADS_LOST = (
        WARNING,
        "loads lost: %d; no rank reported their end, and they are computed",
        "report it, with the log of the whole engine; the requests have waited for half a minute",
    )
    LOADS_NOT_AWAITED = (
        WARNING,
        "loads reported as ended that no request waits for: %d; ignored",
        "report it, with the log of the whole engine",
    )
    LOAD_GOES_ON = (
        WARNING,
        "a load has not ended within %g s and cannot be ended: its copy goes on, and its "
        "request waits for it; nothing is imported until it has ended",
        "look at the machine: a copy of memory hangs. The request's blocks cannot be used "
        "while it may write; restart the engine if it stays",
    )
    STILL_MAPPED = (
        WARNING,
        "rank %d goes to sleep, and after %.0f s other engines still map its KV cache (%d "
        "mappings): its memory is given back when they have unmapped it or ended",
        "look at the other engines (`kvshm status`): one hangs or is stopped, and keeps the "
        "memory until it goes on or ends; answers stay right. `still_mapped` counts it",
    )
    WEIGHTS_WRITTEN = (
        WARNING,
        "rank %d: weights were written without an announcement, found in %s: the blocks "
        "computed so far are withdrawn, and the weights are digested anew; reset the prefix "
        "cache after each update (docs/fingerprint.md)",
        "have the trainer reset the prefix cache after each update "
        "([why](fingerprint.md#weights-that-change-while-an-engine-runs)); if nothing writes "
        "weights, report it: something changes that parameter while the engine serves",
    )
    EPOCH_NOT_ENDED = (
        WARNING,
        "cannot end the epoch before new weights: %s",
        "nothing; the epoch ends with the next step",
    )
    SIGNAL_NOT_WATCHED = (
        WARNING,
        "cannot watch for the stop signal (%s): the peers will report a crash when this "
        "engine stops",
        "nothing, or do what it says",
    )
    NO_SPANS = (
        WARNING,
        "no trace spans: %s",
        "do what it says, usually to install OpenTelemetry's SDK and exporter; the engine "
        "serves as usual",
    )
    SPANS_ENDED = (
        WARNING,
        "no more trace spans from this engine",
        "report it, with the traceback; restart the engine to trace again",
    )
    SPANS_BESIDE = (
        WARNING,
        "trace spans are not below vLLM's, but beside it: %s",
        "nothing; the version of vLLM is one that kvshm does not know",
    )
    TESTED_LIKE = (
        INFO,
        "vLLM %s is not among the tested %s, but all that kvshm relies on is there as in these",
        "nothing; a later kvshm may have [tested it](versions.md)",
    )
    NO_SOURCE = (
        INFO,
        "this vLLM has no source of %s to compare with the tested one: kvshm goes by its "
        "version %s",
        "nothing, if this vLLM is an unchanged one of that version",
    )
    INSTALLED = (
        INFO,
        "connector installed: the engine shares its prefix cache if its role and its KV "
        "cache allow it",
        "nothing: `joined as …` follows, or the reason why the engine does not share",
    )
    EXPORTING_AND_IMPORTING = (
        INFO,
        "exporting and importing",
        "nothing: [what decides it](configuration.md#what-an-engine-does-exporting-and-importing)",
    )
    BESIDE = (
        INFO,
        "beside %s, in a MultiConnector: the longer prefix is loaded, and failed loads of both are "
        "recomputed",
        "nothing (`KVSHM_BESIDE=1`)",
    )
    CALL_MAY_WRITE = (
        INFO,
        "%s of all ranks may write weights: the blocks computed so far are withdrawn, and "
        "the weights are digested anew; if it only reads, name it in KVSHM_READ_ONLY_CALLS",
        "nothing if the call writes weights; if it only reads, name it in "
        "`KVSHM_READ_ONLY_CALLS`: each such call ends what is shared. Logged once for each "
        "name",
    )
    RECOMPUTE = (
        INFO,
        "kv_load_failure_policy=%s overridden with recompute: a block that is lost to reuse "
        "is a miss, no error",
        "nothing",
    )
    RECOMPUTE_ALL = (
        INFO,
        "kv_load_failure_policy=fail overridden with recompute for all connectors",
        "nothing: the policy of a MultiConnector counts for all of its connectors",
    )
    ASYNCHRONOUS = (
        INFO,
        "imports are asynchronous: vLLM's scheduler has no %s",
        "nothing; imports take a few steps more than a local hit",
    )
    PEERS_MAY_REPORT_CRASH = (
        DEBUG,
        "the peers may take the end of an engine for a crash",
        "nothing: the version of vLLM is one that kvshm does not know, as the traceback "
        "says; the engine ends as without kvshm",
    )
    LEAVING_NOT_SEEN = (
        DEBUG,
        "the server cannot see whether this engine has left: %s",
        "nothing: the peers may take its end for a crash",
    )
    WORKER_NOT_SHARING = (
        DEBUG,
        "not sharing the prefix cache: %s",
        "nothing: a worker process says again what its engine has said as a warning",
    )
