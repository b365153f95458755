"""Each way to build a protocol wrong, and the property that catches it."""

from __future__ import annotations

from .cases import Case

MUTANTS = (
    # slots: the exporter's side
    Case("PUBLISH_BEFORE_COMPUTE", "slots", "SHARE", "the word turns READY before the last byte "
         "is computed", "STEPS=1", "ready_slot_lies"),
    Case("HASH_AFTER_READY", "slots", "SHARE", "weak order: READY is seen before the fields",
         "STEPS=1", "ready_slot_lies"),
    Case("WRITE_WITHOUT_RETRACT", "slots", "SHARE", "a step writes a block that is still "
         "published", "", "ready_slot_lies"),
    Case("BUMP_AFTER_DISPATCH", "slots", "SHARE", "weak order, or no fence: new bytes are seen "
         "before the new word", "", "ready_slot_lies"),
    Case("FORCE_WITHOUT_BUMP", "slots", "SHARE", "leases are overridden, the generation stays",
         "", "foreign_bytes_delivered"),
    Case("FORCE_KEEPS_BITS", "slots", "SHARE", "lease bits are kept over a bump", "",
         "lease_leaked"),
    Case("NO_BUDGET", "slots", "SHARE", "the exporter waits for leases as long as it takes", "",
         "waits_for_ever"),
    Case("GENERATION_WRAPS", "slots", "SHARE", "the generation comes round within one load",
         "STEPS=3",
         "foreign_bytes_delivered"),
    Case("GROUP_AFTER_READY", "slots", "GROUPS", "weak order: READY is seen before the group",
         "STEPS=1", "ready_slot_lies"),
    Case("RESET_KEEPS_TABLE", "slots", "RESET", "a pool reset begins an epoch without "
         "withdrawing the old one's blocks", "STEPS=1", "ready_slot_lies"),
    Case("FREE_BEFORE_LIFE", "slots", "RANKS", "a rank frees memory, then zeroes its life word",
         "STEPS=1", "ready_slot_lies"),
    # slots: the importer's side
    Case("HASH_BEFORE_WORD", "slots", "SHARE", "weak order: the hash is read before the word", "",
         "foreign_bytes_delivered"),
    Case("NO_HASH", "slots", "SHARE", "the lease does not compare the hash", "STEPS=1",
         "foreign_bytes_delivered"),
    Case("NO_GROUP", "slots", "GROUPS", "the lease compares the hash, and not the group",
         "STEPS=1", "foreign_bytes_delivered"),
    Case("GROUP_BEFORE_WORD", "slots", "GROUPS", "weak order: the group is read before the word",
         "", "foreign_bytes_delivered"),
    Case("EACH_GROUP_ALONE", "slots", "GROUPS", "blocks of one group are used though the re-check "
         "of another's failed", "STEPS=1", "part_restored"),
    Case("GIVEN_UP_KEEPS_LEASES", "slots", "GROUPS", "an import in which one group's block "
         "is missing keeps its leases of the other's", "STEPS=1", "lease_leaked"),
    Case("NO_CLOSING_CAS", "slots", "SHARE", "the bit is set whatever the word has become", "",
         "lease_leaked"),
    Case("COUNT_BY_SLOT", "slots", "SHARE", "a count of loads, keyed by slot, lets a second one "
         "join without a look at the word", "", "foreign_bytes_delivered"),
    Case("GENERATION_FROM_WORD", "slots", "SHARE", "a load learns its generation after it leased",
         "", "foreign_bytes_delivered"),
    Case("NO_RECHECK", "slots", "SHARE", "no re-check after the copy", "",
         "foreign_bytes_delivered"),
    Case("RECHECK_BEFORE_LAST_READ", "slots", "SHARE", "weak order, or no fence: the word is "
         "read before the last byte", "", "foreign_bytes_delivered"),
    Case("LIFE_NOT_RECHECKED", "slots", "LIVES", "the re-check looks at the slot's word only",
         "STEPS=1", "foreign_bytes_delivered"),
    Case("FIRST_RANKS_LIFE_ONLY", "slots", "RANKS", "every rank looks at rank 0's life word",
         "STEPS=1", "foreign_bytes_delivered"),
    Case("MIXED_ATTACHMENT", "slots", "LIVES", "slot table and memory of different epochs",
         "STEPS=1", "foreign_bytes_delivered"),
    Case("MEMORY_CHANGES_AT_DEATH", "slots", "LIVES", "a dead exporter's memory is gone before "
         "its life word (the assumption)", "STEPS=1", "ready_slot_lies"),
    Case("OWN_EPOCH_RECHECKED_ONCE", "slots", "RESET", "the scheduler takes reports of an epoch "
         "of its own that has ended", "STEPS=1", "foreign_bytes_delivered"),
    Case("RIDER_RELEASES", "slots", "SHARE", "a load that found the bit set clears it", "STEPS=1",
         "living_lease_cleared"),
    Case("RELEASE_ANY_GENERATION", "slots", "SHARE", "a release does not compare the generation",
         "", "living_lease_cleared"),
    Case("FIRST_RANK_RELEASES", "slots", "RANKS", "the first rank to finish gives the lease back",
         "STEPS=1", "living_lease_cleared"),
    Case("FAILED_BATCH_KEEPS_LEASE", "slots", "PAIR", "a batch cut short drops what it leased",
         "STEPS=1", "lease_leaked"),
    Case("REPORT_BEFORE_LAST_WRITE", "slots", "MUTUAL", "a rank reports a load that can still "
         "write", "", "ready_slot_lies"),
    Case("SCHEDULER_RELEASES", "slots", "MUTUAL", "schedulers give leases back, and wait without "
         "a budget", "", "waits_for_ever"),
    # slots: the coordinator's side
    Case("BIT_BEFORE_SWEEP", "slots", "BITS", "the bit is handed on before the sweep",
         "STEPS=1", "living_lease_cleared"),
    Case("BIT_FREED_AT_FIRST_DEATH", "slots", "BITS", "... when one of two processes is dead",
         "STEPS=1", "lease_leaked"),
    Case("SWEPT_ONCE", "slots", "BITS", "no second sweep when the last process is dead",
         "STEPS=1", "lease_leaked"),
    Case("SUSPECTED_IS_DEAD", "slots", "BITS", "a suspected importer is treated as dead",
         "STEPS=1", "living_lease_cleared"),
    # join
    Case("SEQUENCE_SHARED", "join", "ONE", "one sequence for all topics", "FAULTS=0",
         "resync_without_cause"),
    Case("GAP_IGNORED", "join", "ONE", "a gap in the topic's sequence is ignored", "",
         "replica_differs"),
    Case("ENGINE_GAP_IGNORED", "join", "ONE", "a gap in an engine's sequence is ignored",
         "FAULTS=0 BLOCKS=2 STEPS=3 PIPE=1", "replica_differs"),
    Case("TICK_WITHOUT_SEQUENCES", "join", "ONE", "ticks do not carry the engines' sequences", "",
         "replica_differs"),
    Case("TICK_NOT_REMEMBERED", "join", "ONE", "a scan for a tick's sake does not note the "
         "sequence", "", "resync_storm"),
    Case("DROPPED_BATCH_NOT_COUNTED", "join", "ONE", "a batch that cannot be sent uses no "
         "sequence", "FAULTS=0", "replica_differs"),
    Case("EVENT_BEFORE_WORD", "join", "ONE", "the event is sent before the word changes",
         "FAULTS=0", "replica_differs"),
    Case("NO_TOMBSTONE", "join", "ONE", "the replica applies whatever it receives", "",
         "entry_resurrected"),
    Case("RESCAN_ONLY_ADDS", "join", "ONE", "a scan removes nothing", "", "replica_differs"),
    Case("DROP_BY_SLOT", "join", "ONE", "a failed lease drops the block's entry of any "
         "generation", "FAULTS=0 STEPS=3", "replica_differs"),
    Case("BROADCASTS_DROPPED_WHILE_JOINING", "join", "ONE", "what comes between Join and Joined "
         "is dropped", "FAULTS=0", "resync_without_cause"),
    Case("EXPECT_FIRST_SEEN", "join", "PAIR", "the first broadcast heard sets the sequence, not "
         "the roster", "STEPS=1 LATER_STEPS=0 PIPE=1", "replica_differs"),
    Case("KEYED_BY_ENGINE", "join", "RESTART", "records are keyed by engine, not by epoch",
         "FAULTS=0 STEPS=1 PIPE=1", "replica_differs"),
    Case("DEAD_EPOCHS_SPEAK", "join", "RESTART", "events of an epoch that has ended are relayed "
         "and applied", "FAULTS=0 STEPS=1 LATER_STEPS=0", "replica_differs"),
    # bits
    Case("NEWCOMER_UNSWEPT", "bits", "", "a new coordinator gives a newcomer a bit that the dead "
         "may have left in a slot", "", "lease_leaked"),
    Case("TOLD_BEFORE_SWEEP", "bits", "", "the engine gets its bit before the sweep", "",
         "living_lease_cleared"),
    Case("RETURNER_SWEPT", "bits", "", "an engine that comes back to a new coordinator is "
         "swept, too", "", "living_lease_cleared"),
    Case("NEVER_SWEPT", "bits", "", "a new coordinator leaves bits unswept that no engine "
         "presents", "", "lease_leaked"),
    Case("FREED_BEFORE_SWEEP", "bits", "", "a bit is freed, then swept", "", "lease_leaked"),
    Case("FREED_UNSWEPT", "bits", "", "a bit is freed without a sweep", "",
         "lease_leaked"),
    Case("SWEPT_AT_LEAVE", "bits", "", "a departure sweeps the bit, though its process "
         "goes on", "", "living_lease_cleared"),
    Case("FREED_AT_LEAVE", "bits", "", "a departure frees the bit", "", "lease_leaked"),
    Case("CORE_ALONE_COUNTS", "bits", "", "freed when EngineCore is dead, while its rank lives",
         "", "bit_shared"),
    Case("OWNERS_ONLY_SUSPECTED", "bits", "", "a suspected owner is treated as dead", "",
         "living_lease_cleared"),
)  # fmt: skip
