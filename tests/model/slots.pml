/* The slot protocol of kvshm (docs/protocol.md, kvshm/native/core.c), for SPIN.
 *
 * What one statement does here, one atomic operation (or one plain access to KV memory) does
 * in the C core; everything between two statements can be interleaved.  A block's bytes are
 * two halves, written and copied one after the other.  A half holds the name of what was
 * written there: (table, generation, hash), so that bytes of the same content but of another
 * generation are told apart.  Every process ends, so a run that is searched in full without
 * an invalid end state is one in which nobody waits for ever.
 *
 *   spin -a -DCONFIG=SHARE [-DSTEPS=n] [-D<mutant>] slots.pml          (run_models.py does it)
 *
 * Configurations: what is taken together in one search.
 *   SHARE   one exporter; two loads of one importer share bit 0, another importer has bit 1,
 *           or imports without a lease; one importer may stop for ever while it holds a lease
 *   BITS    an importer of two processes (EngineCore, rank) which die or are only suspected;
 *           the coordinator sweeps its bit and hands it on to another importer
 *   LIVES   the exporter dies anywhere and is started again: new table, new memory
 *   RANKS   two ranks on both sides: a life word each, the last rank releases the lease
 *   RESET   pool reset: new table (epoch) over the same memory; the importer's own epoch ends
 *   PAIR    two blocks: a batch takes the longest prefix, one budget for both
 *   MUTUAL  two engines read from each other and publish what they imported
 *   GROUPS  a block is of one of two groups; an import needs a block of each, or uses none
 *
 * Mutants: each is one way to build it wrong; MUTANTS in mutants.py says what each one is
 * and which property catches it. */

#define SHARE  1
#define BITS   2
#define LIVES  3
#define RANKS  4
#define RESET  5
#define PAIR   6
#define MUTUAL 7
#define GROUPS 8
#ifndef CONFIG
#define CONFIG SHARE
#endif
#ifndef STEPS
#define STEPS 2                         /* publications in the exporter's first life */
#endif
#ifndef LATER_STEPS
#define LATER_STEPS 1                   /* and in the next one */
#endif

#ifndef THIRD
#define THIRD 0                         /* lease bit of a second importer in SHARE; 0: there is none */
#endif

#ifndef SECOND
#define SECOND NO_BIT                   /* lease bit of the second load in GROUPS */
#endif

#if CONFIG == LIVES || CONFIG == RESET || CONFIG == MUTUAL
#define TABLES 2
#else
#define TABLES 1
#endif
#if CONFIG == PAIR || CONFIG == MUTUAL || CONFIG == GROUPS
#define BLOCKS 2
#else
#define BLOCKS 1
#endif
#if CONFIG == RANKS
#define LIFE_WORDS 2
#else
#define LIFE_WORDS 1
#endif

#define EMPTY    0
#define READY    1
#define DRAINING 2
#define NO_BIT   9                      /* an importer beyond the lease bits */
#define WANTED   1                      /* the hash importers look for; exporters store 1 or 2 */
#define NOTHING  0                      /* bytes of no block */
#ifdef GENERATION_WRAPS
#define NEXT(g)  (((g) + 1) % 2)
#else
#define NEXT(g)  ((g) + 1)
#endif
#define NAME(t, g, k) (1 + (t) * 32 + (g) * 4 + (k))
#define KEY_OF(name)  (((name) - 1) % 4)

/* A block's key, of 0..3: its hash, and in GROUPS its group, too. */
#if CONFIG == GROUPS
#define KEY(h, group) ((h) % 2 + 2 * (group))
#define WANTED_KEY(b) KEY(WANTED, b)    /* an import needs slot 0's block of group 0, 1's of 1 */
#define KEY_AT(t, b)  KEY(SLOT(t, b).hash, SLOT(t, b).group)
typedef Slot { byte generation; byte state; byte leases; byte hash; byte group };
#else
#define KEY(h, group) (h)
#define WANTED_KEY(b) WANTED
#define KEY_AT(t, b)  SLOT(t, b).hash
typedef Slot { byte generation; byte state; byte leases; byte hash };
#endif
typedef Table { Slot slot[BLOCKS]; bool life[LIFE_WORDS]; bool retired };
typedef Memory { byte half[2 * BLOCKS] };
Table table[TABLES];
Memory memory[TABLES];
#define SLOT(t, b)    table[t].slot[b]
#define HALF(m, b, i) memory[m].half[(b) * 2 + (i)]
#define LIFE(t, i)    table[t].life[(i) * LIFE_WORDS / 2]
#define BIT(i)        (1 << (i))

bool exporter_dead;
bool core_dead, rank_dead;              /* the two processes of importer 0 */
bool swept;                             /* importer 0's bit, everywhere */
bool own_epoch_ended;                   /* importer 0's own pool was reset */
byte loads;                             /* loads that have not ended */
#ifdef COUNT_BY_SLOT
byte count;                             /* loads that hold importer 0's lease, by slot alone */
#endif

/* Ghosts: 1 + the load that took a bit, and the properties' verdicts. */
byte holder[TABLES * BLOCKS * 2];
#define HOLDER(t, b, lease_bit) holder[((t) * BLOCKS + (b)) * 2 + (lease_bit)]
bool foreign_bytes_delivered, living_lease_cleared, lease_leaked, ready_slot_lies;
#if CONFIG == GROUPS
bool part_restored;
#endif

#ifdef SCHEDULER_RELEASES
#define NO_BUDGET                       /* each alone only costs time */
#endif

#include "slots_exporter.inc"
#include "slots_importer.inc"
#include "slots_engines.inc"

/* -- deaths ----------------------------------------------------------------------------------- */

#if CONFIG == RESET
proctype OwnReset() { if :: own_epoch_ended = true :: skip fi }
#endif

#if CONFIG == BITS
proctype Fate() {
  if
  :: core_dead = true; rank_dead = true
  :: rank_dead = true; core_dead = true
  :: skip                               /* only suspected: nothing follows from that */
  fi
}

/* With the first of its processes to die an importer's epoch has ended: its leases are cleared,
 * for what it still copies is discarded.  But the others may lease and release until they are
 * dead, too: then the bit is swept again, and handed on. */
inline sweep() {
  atomic {
    living_lease_cleared = ((SLOT(0, 0).leases & 1) &&
                            (HOLDER(0, 0, 0) != 1 || !(core_dead || rank_dead)));
    assert(!living_lease_cleared);
    SLOT(0, 0).leases = SLOT(0, 0).leases & ~1;
    HOLDER(0, 0, 0) = 0
  }
}

inline hand_on() { atomic { swept = true; loads++; run Load(2, 0) } }

proctype Coordinator() {
end_alive:
#ifdef SUSPECTED_IS_DEAD
  skip;
#else
  (core_dead || rank_dead);
#endif
#if defined(BIT_BEFORE_SWEEP)
  (core_dead && rank_dead);
  hand_on();
  sweep()
#elif defined(BIT_FREED_AT_FIRST_DEATH) || defined(SUSPECTED_IS_DEAD)
  sweep();
  hand_on()
#else
  sweep();
end_half_dead:
  (core_dead && rank_dead);
#ifndef SWEPT_ONCE
  sweep();
#endif
  hand_on()
#endif
}
#endif

/* The exporter dies anywhere.  The kernel marks each rank's pulse, which stands in LIFE here as
 * leases and re-checks read both alike, and may take that rank's memory away only after that
 * (docs/model-checking.md: the assumption).  Nobody has to notice the death. */
#if CONFIG == LIVES || CONFIG == RANKS
proctype Kernel() {
  if
  :: exporter_dead = true;
#if CONFIG == LIVES
     LIFE(1, 0) = true;
     run Exporter(1, 1, LATER_STEPS);
#endif
#ifdef MEMORY_CHANGES_AT_DEATH
     HALF(0, 0, 0) = NOTHING;
#endif
     LIFE(0, 0) = false;
     HALF(0, 0, 0) = NOTHING;
     LIFE(0, 1) = false;
     HALF(0, 0, 1) = NOTHING
  :: skip
  fi
}
#endif

/* -- invariants: enabled only in a state that breaks one ---------------------------------------- */

#define HOLDS(m, b, i, t) (KEY_OF(HALF(m, b, i)) == KEY_AT(t, b))
#define LIES(t, m, b) (LIFE(t, 0) && LIFE(t, 1) && SLOT(t, b).state != EMPTY && \
                       !(HOLDS(m, b, 0, t) && HOLDS(m, b, 1, t)))
#if CONFIG == LIVES || CONFIG == MUTUAL
#define SECOND_MEMORY 1
#else
#define SECOND_MEMORY 0
#endif

proctype Monitor() {
end_watching:
  if
  :: atomic { LIES(0, 0, 0) -> ready_slot_lies = true }
#if BLOCKS > 1
  :: atomic { LIES(0, 0, 1) -> ready_slot_lies = true }
#endif
#if TABLES > 1
  :: atomic { LIES(1, SECOND_MEMORY, 0) -> ready_slot_lies = true }
#if BLOCKS > 1
  :: atomic { LIES(1, SECOND_MEMORY, 1) -> ready_slot_lies = true }
#endif
#endif
  :: atomic { loads == 0 && ((!core_dead && !rank_dead) || swept) && (SLOT(0, 0).leases
#if BLOCKS > 1
     || SLOT(0, 1).leases
#endif
#if TABLES > 1
     || SLOT(1, 0).leases
#endif
     ) -> lease_leaked = true }
  fi;
  assert(!ready_slot_lies);
  assert(!lease_leaked)
}

init {
  atomic {
    LIFE(0, 0) = true; LIFE(0, 1) = true;
    run Monitor();
#if CONFIG == SHARE
    loads = 2; run Exporter(0, 0, STEPS); run Load(0, 0); run Load(1, 0);
    if :: THIRD -> loads = 3; run Load(2, THIRD) :: else -> skip fi
#elif CONFIG == BITS
    loads = 1; run Exporter(0, 0, STEPS); run Load(0, 0); run Fate(); run Coordinator()
#elif CONFIG == LIVES
    loads = 1; run Exporter(0, 0, STEPS); run Load(0, 0); run Kernel()
#ifdef SECOND_LOAD
    ; loads = 2; run Load(1, 1)
#endif
#elif CONFIG == RANKS
    loads = 1; run Exporter(0, 0, STEPS); run Core(0, 0); run Kernel()
#ifdef SECOND_LOAD
    ; loads = 2; run Core(1, 0)
#endif
#elif CONFIG == RESET
    loads = 2; run Exporter(0, 0, STEPS); run Load(0, 0); run Load(1, 0);
    run OwnReset()
#elif CONFIG == PAIR
    loads = 2; run Exporter(0, 0, STEPS); run Load(0, 0); run Load(1, 1)
#elif CONFIG == GROUPS
    loads = 2; run Exporter(0, 0, STEPS); run Load(0, 0); run Load(1, SECOND)
#else
    LIFE(1, 0) = true;
    loads = 2; run Worker(0, 1); run Worker(1, 0); run Scheduler(0, 1); run Scheduler(1, 0)
#endif
  }
}
