"""What is searched: the protocols as they are, and each way to build them wrong.

Every case is one search of one model file; ``defines`` chooses its configuration and, for a
mutant, the switch that breaks it.  ``docs/model-checking.md`` holds the results.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One search.  ``name`` is unique; a mutant's is its switch."""

    name: str
    model: str
    config: str
    about: str
    settings: str = ""
    violates: str = ""
    """The property that catches this mutant; empty: all properties hold."""
    loops: bool = False
    """Search for endless loops instead of broken properties."""

    @property
    def defines(self) -> list[str]:
        chosen = [f"CONFIG={self.config}"] if self.config else []
        switches = [self.name] if self.violates else []
        return [f"-D{d}" for d in [*chosen, *self.settings.split(), *switches]]


PROPERTIES = {
    "foreign_bytes_delivered": "No importer delivers bytes of another generation or epoch.",
    "waits_for_ever": "No exporter, engine or coordinator waits for ever.",
    "living_lease_cleared": "Nobody clears a lease of an importer whose epoch goes on, but "
    "the exporter whose budget is spent, and the load that took it.",
    "lease_leaked": "An importer's lease bit does not outlive the importer.",
    "ready_slot_lies": "Every slot that is READY or DRAINING holds what its key says: "
    "its hash, and its group if there are several.",
    "part_restored": "No request continues with the blocks of some of its groups alone.",
    "bit_shared": "No two living engines hold the same lease bit.",
    "replica_differs": "When all is quiet the replica equals the slot tables.",
    "entry_resurrected": "A generation once known to be retracted never enters the replica again.",
    "resync_without_cause": "The receiver joins or scans again only after something was lost.",
    "resync_storm": "When all is quiet no tick causes another resynchronisation.",
    "runs_for_ever": "No process repeats steps for ever: every endless run is one of ticks alone.",
}

CHECKED = (
    Case("sharing", "slots", "SHARE", "two loads of one importer share its bit"),
    Case("third importer", "slots", "SHARE", "... beside one with a bit of its own",
         "STEPS=1 THIRD=1"),
    Case("no bit left", "slots", "SHARE", "... beside one without a bit", "STEPS=1 THIRD=9"),
    Case("bits", "slots", "BITS", "an importer dies by halves; its bit is swept and handed on"),
    Case("lives", "slots", "LIVES", "the exporter dies anywhere and is started again"),
    Case("ranks", "slots", "RANKS", "two ranks on both sides"),
    Case("reset", "slots", "RESET", "pool reset of the exporter, own reset of the importer",
         "STEPS=1"),
    Case("two blocks", "slots", "PAIR", "batches of two blocks, one budget for both"),
    Case("mutual", "slots", "MUTUAL", "two engines read from each other"),
    Case("mutual, no budget", "slots", "MUTUAL", "... and wait for leases as long as it takes",
         "NO_BUDGET"),
    Case("groups", "slots", "GROUPS", "an import needs a block of each of two groups"),
    Case("groups, true records", "slots", "GROUPS", "... the lease compares no group, but every "
         "record was once true", "NO_GROUP RECORDS_TRUE"),
    Case("no circles", "slots", "SHARE", "two loads share a bit", "STEPS=1", loops=True),
    Case("one engine", "join", "ONE", "with a broadcast lost, doubled or overtaken"),
    Case("one engine, a late answer", "join", "ONE", "or the coordinator given up too early",
         "FAULTS=0 TIMEOUTS=1"),
    Case("one engine, two blocks", "join", "ONE", "with a full pipe", "FAULTS=0 BLOCKS=2 STEPS=3"),
    Case("two engines", "join", "PAIR", "of one topic", "FAULTS=0 STEPS=1"),
    Case("engine restarted", "join", "RESTART", "dies and begins again in the same place",
         "FAULTS=0 STEPS=1"),
    Case("coordinator restarted", "join", "COORD", "with a broadcast lost, doubled or overtaken"),
    Case("coordinator restarted, engine dies", "join", "COORD", "before, meanwhile or after",
         "FAULTS=0 KILL"),
    Case("calm", "join", "ONE", "with a full pipe", "FAULTS=0", loops=True),
    Case("bits kept", "bits", "", "across deaths and a departure", "RESTARTS=0"),
    Case("bits presented", "bits", "", "across deaths and a new coordinator", "STAYS"),
)  # fmt: skip
"""Run by ``make model`` and by the tests."""

FULL = (
    Case("sharing, three loads", "slots", "SHARE", "one importer's bit shared, another's own",
         "THIRD=1"),
    Case("sharing, no bit left", "slots", "SHARE", "one importer's bit shared, another has none",
         "THIRD=9"),
    Case("sharing, three generations", "slots", "SHARE", "two loads share a bit", "STEPS=3"),
    Case("bits, three generations", "slots", "BITS", "death by halves, sweep, next owner",
         "STEPS=3"),
    Case("lives, longer", "slots", "LIVES", "two publications in each epoch", "LATER_STEPS=2"),
    Case("lives, two importers", "slots", "LIVES", "one publication in each epoch",
         "STEPS=1 SECOND_LOAD"),
    Case("ranks, three generations", "slots", "RANKS", "two ranks on both sides", "STEPS=3"),
    Case("reset, two generations", "slots", "RESET", "pool reset and own reset"),
    Case("groups, one importer", "slots", "GROUPS", "two loads share a bit", "SECOND=0"),
    Case("groups, two importers", "slots", "GROUPS", "... or have a bit each", "SECOND=1"),
    Case("one engine, two faults", "join", "ONE", "three changes", "FAULTS=2 STEPS=3"),
    Case("one engine, late answers and a fault", "join", "ONE", "three changes",
         "TIMEOUTS=1 STEPS=3"),
    Case("one engine, ticks between", "join", "ONE", "heartbeats and a full pipe, too",
         "TICKS=1 BEATS=1 OVERFLOW=1"),
    Case("one engine, two blocks, a fault", "join", "ONE", "three changes", "BLOCKS=2 STEPS=3"),
    Case("two engines, a fault", "join", "PAIR", "of one topic", "STEPS=1"),
    Case("two engines, a late answer", "join", "PAIR", "or given up too early",
         "FAULTS=0 STEPS=1 TIMEOUTS=1"),
    Case("two engines, full pipes", "join", "PAIR", "two changes and one",
         "FAULTS=0 OVERFLOW=1"),
    Case("engine restarted, a fault", "join", "RESTART", "in the same place", "STEPS=1"),
    Case("engine restarted, two changes", "join", "RESTART", "in the same place", "FAULTS=0"),
    Case("coordinator restarted, ticks between", "join", "COORD", "and a fault",
         "TICKS=1 BEATS=1"),
    Case("coordinator restarted, a late answer", "join", "COORD", "or given up too early",
         "FAULTS=0 TIMEOUTS=1"),
    Case("coordinator restarted, engine dies, a fault", "join", "COORD", "any time", "KILL"),
    Case("bits kept and presented", "bits", "", "deaths, a departure, a new coordinator"),
    Case("bits presented, two restarts", "bits", "", "deaths", "RESTARTS=2 STAYS"),
    Case("no circles, lives", "slots", "LIVES", "death and restart", "STEPS=1", loops=True),
    Case("no circles, bits", "slots", "BITS", "death and sweep", loops=True),
    Case("no circles, mutual", "slots", "MUTUAL", "two engines", loops=True),
    Case("calm after a fault", "join", "ONE", "three changes", "STEPS=3", loops=True),
    Case("calm after a late answer", "join", "ONE", "or the coordinator given up too early",
         "FAULTS=0 TIMEOUTS=1", loops=True),
    Case("calm after a restart", "join", "COORD", "of the coordinator", "FAULTS=0", loops=True),
)  # fmt: skip
"""Run by ``make model-full`` in addition."""
