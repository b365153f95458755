/* The slot protocol of kvshm (docs/protocol.md, kvshm/_core.c), for SPIN.
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
 *           the coordinator sweeps its bit and hands it to a third importer
 *   LIVES   the exporter dies anywhere and is started again: new table, new memory
 *   RANKS   two ranks on both sides: a life word each, the last rank releases the lease
 *   RESET   pool reset: new table (epoch) over the same memory; the importer's own epoch ends
 *   PAIR    two blocks: a batch takes the longest prefix, one budget for both
 *   MUTUAL  two engines read from each other and publish what they imported
 *
 * Mutants: each is one way to build it wrong; MUTANTS in run_models.py says what each one is
 * and which property catches it. */

#define SHARE  1
#define BITS   2
#define LIVES  3
#define RANKS  4
#define RESET  5
#define PAIR   6
#define MUTUAL 7
#ifndef CONFIG
#define CONFIG SHARE
#endif
#ifndef STEPS
#define STEPS 2                         /* publications in the exporter's first life */
#endif
#ifndef LATER_STEPS
#define LATER_STEPS 1                   /* and in the next one */
#endif

#ifndef OTHER_BIT
#define OTHER_BIT 1                     /* of the second importer in SHARE; 9 (NO_BIT): none */
#endif

#if CONFIG == LIVES || CONFIG == RESET || CONFIG == MUTUAL
#define TABLES 2
#else
#define TABLES 1
#endif
#if CONFIG == PAIR || CONFIG == MUTUAL
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
#define NAME(t, g, h) (1 + (t) * 32 + (g) * 4 + (h))
#define HASH_OF(name) (((name) - 1) % 4)

typedef Slot { byte generation; byte state; byte leases; byte hash };
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

/* Ghosts: 1 + the load that took a bit, and the properties' verdicts. */
byte holder[TABLES * BLOCKS * 2];
#define HOLDER(t, b, lease_bit) holder[((t) * BLOCKS + (b)) * 2 + (lease_bit)]
bool foreign_bytes_delivered, living_lease_cleared, lease_leaked, ready_slot_lies;

#ifdef SCHEDULER_RELEASES
#define NO_BUDGET                       /* each alone only costs time */
#endif

/* -- exporter ------------------------------------------------------------------------------ */

inline bump(t, b) {
#ifndef FORCE_WITHOUT_BUMP
  SLOT(t, b).generation = NEXT(SLOT(t, b).generation);
#endif
  SLOT(t, b).state = EMPTY
}

inline force(t, b) {
  bump(t, b);
#ifndef FORCE_KEEPS_BITS
  SLOT(t, b).leases = 0;
#endif
  HOLDER(t, b, 0) = 0; HOLDER(t, b, 1) = 0
}

inline retract(t, b) {
  atomic {
    if
#ifndef WRITE_WITHOUT_RETRACT
    :: SLOT(t, b).state == READY && SLOT(t, b).leases == 0 ->
       SLOT(t, b).generation = NEXT(SLOT(t, b).generation); SLOT(t, b).state = EMPTY
    :: SLOT(t, b).state == READY && SLOT(t, b).leases != 0 -> SLOT(t, b).state = DRAINING
#endif
    :: else -> skip
    fi
  }
}

/* DRAINING -> EMPTY.  The budget may be spent at any moment; a lame importer is one for whom
 * it is spent at once. */
inline drain(t, b) {
  if
  :: SLOT(t, b).state != DRAINING -> skip
  :: atomic { SLOT(t, b).state == DRAINING && SLOT(t, b).leases == 0 -> bump(t, b) }
#ifndef NO_BUDGET
  :: atomic { SLOT(t, b).state == DRAINING && SLOT(t, b).leases != 0 -> force(t, b) }
#endif
  fi
}

/* The last step of a reuse with its order broken: the generation becomes visible only after
 * the first bytes of the next step (no seq_cst fence, or dispatched too early). */
inline retract_too_late(t, m, b) {
  HALF(m, b, 0) = NOTHING;
  retract(t, b);
  drain(t, b)
}

inline publish(t, b, h) {
  SLOT(t, b).hash = h;                  /* frozen until EMPTY again */
  atomic { SLOT(t, b).state == EMPTY -> SLOT(t, b).state = READY }
}

/* One step of the engine writes blocks 0..last and publishes them once they are computed. */
inline engine_step(t, m, last, b, h) {
#ifndef BUMP_AFTER_DISPATCH
  b = 0; do :: b <= last -> retract(t, b); b++ :: else -> break od;
  b = 0; do :: b <= last -> drain(t, b); b++ :: else -> break od;
#else
  b = 0; do :: b <= last -> retract_too_late(t, m, b); b++ :: else -> break od;
#endif
  if :: h = 1 :: h = 2 fi;
  b = 0;
  do
  :: b <= last ->
     HALF(m, b, 0) = NAME(t, SLOT(t, b).generation, h);
#if defined(PUBLISH_BEFORE_COMPUTE)
     publish(t, b, h);
     HALF(m, b, 1) = NAME(t, SLOT(t, b).generation, h);
#elif defined(HASH_AFTER_READY)
     HALF(m, b, 1) = NAME(t, SLOT(t, b).generation, h);
     SLOT(t, b).state = READY;
     SLOT(t, b).hash = h;
#else
     HALF(m, b, 1) = NAME(t, SLOT(t, b).generation, h);
#ifdef WRITE_WITHOUT_RETRACT
     if :: SLOT(t, b).state == EMPTY -> publish(t, b, h) :: else -> skip fi;
#else
     publish(t, b, h);
#endif
#endif
     b++
  :: else -> break
  od;
  b = 0; h = 0
}

/* A rank gives its memory back: its life word first. */
inline end_rank(t, m, i) {
#ifdef FREE_BEFORE_LIFE
  HALF(m, 0, i) = NOTHING;
  LIFE(t, i) = false
#else
  LIFE(t, i) = false;
  HALF(m, 0, i) = NOTHING
#endif
}

/* Every slot EMPTY, the table retired, before the next epoch's first byte is written. */
inline pool_reset(t) {
#ifndef RESET_KEEPS_TABLE
  table[t].retired = true;
  LIFE(t, 0) = false;
  atomic { if :: SLOT(t, 0).state != EMPTY -> force(t, 0) :: else -> skip fi }
#else
  skip
#endif
}

#if CONFIG != MUTUAL
proctype Exporter(byte t; byte m; byte steps) {
  byte b, h, last;
  {
    do
    :: steps > 0 ->
#if CONFIG == PAIR
       if :: last = 0 :: last = 1 fi;
#endif
       engine_step(t, m, last, b, h);
       steps--
#if CONFIG == RESET
    :: t == 0 -> pool_reset(0); t = 1; LIFE(1, 0) = true; steps = LATER_STEPS
#endif
    :: steps == 0 -> break
    od;
    retract(t, 0);                      /* the block is used for something never published */
    drain(t, 0);
    HALF(m, 0, 0) = NOTHING;
#if CONFIG == LIVES || CONFIG == RANKS
    end_rank(t, m, 0);
    end_rank(t, m, 1);
#endif
  }
#if CONFIG == LIVES || CONFIG == RANKS
  unless { d_step { exporter_dead && t == 0 -> b = 0; h = 0; last = 0; steps = 0; m = 0 } }
#endif
}
#endif

/* -- importer ------------------------------------------------------------------------------ */

/* Take the lease of one slot: load the word, compare the hash, CAS from the loaded word.
 * A plan names (table, block, generation, hash); a plan whose generation is not the word's
 * fails here and does nothing else, so the search only follows those that fit.
 * `taken` is false for a load that finds its importer's own bit set: it has no lease. */
inline lease(t, b, lease_bit, id, want, n, seen, taken, leased) {
  leased = false; taken = false;
#ifdef HASH_BEFORE_WORD
  seen = SLOT(t, b).hash;
#endif
  atomic {
    n = SLOT(t, b).generation;
    leased = (SLOT(t, b).state == READY && LIFE(t, 0) && LIFE(t, 1) && !table[t].retired)
  }
  if
  :: leased ->
#ifdef NO_HASH
     seen = want;
#elif !defined(HASH_BEFORE_WORD)
     seen = SLOT(t, b).hash;
#endif
     leased = (seen == want);
     seen = 0
  :: else -> skip
  fi;
  if
  :: leased && lease_bit != NO_BIT ->
     atomic {
#ifdef NO_CLOSING_CAS
       if :: true ->
#else
       if :: SLOT(t, b).state == READY && SLOT(t, b).generation == n ->
#endif
          if
          :: SLOT(t, b).leases & BIT(lease_bit) -> skip
          :: else ->
             SLOT(t, b).leases = SLOT(t, b).leases | BIT(lease_bit);
             HOLDER(t, b, lease_bit) = id + 1;
             taken = true
          fi
       :: else -> leased = false
       fi
     }
#ifdef GENERATION_FROM_WORD
     n = SLOT(t, b).generation
#endif
  :: else -> skip
  fi
}

inline release(t, b, lease_bit, id, n, taken) {
  atomic {
    if
#if defined(RIDER_RELEASES)
    :: lease_bit != NO_BIT && SLOT(t, b).generation == n && (SLOT(t, b).leases & BIT(lease_bit)) ->
#elif defined(RELEASE_ANY_GENERATION)
    :: taken && (SLOT(t, b).leases & BIT(lease_bit)) ->
#else
    :: taken && SLOT(t, b).generation == n && (SLOT(t, b).leases & BIT(lease_bit)) ->
#endif
       living_lease_cleared = (HOLDER(t, b, lease_bit) != id + 1);
       assert(!living_lease_cleared);
       SLOT(t, b).leases = SLOT(t, b).leases & ~BIT(lease_bit);
       HOLDER(t, b, lease_bit) = 0
    :: else -> skip
    fi;
    taken = false
  }
}

/* What the worker rank does when it holds all bytes: the acquire fence, then the words. */
inline recheck(t, b, n, good) {
  good = (SLOT(t, b).generation == n && SLOT(t, b).state != EMPTY)
}

/* One load: the scheduler leases the longest prefix, the rank copies, re-checks, releases
 * and reports, the scheduler delivers.  `bit` may be NO_BIT.  Memory is attached together
 * with the table, epoch by epoch. */
#if CONFIG != MUTUAL && CONFIG != RANKS
proctype Load(byte id; byte lease_bit) {
  byte t, m, b, length, seen;
  byte n[BLOCKS], c[2 * BLOCKS];
  bool taken[BLOCKS], good[BLOCKS], leased, alive, ours;
  {
#if TABLES > 1
    if :: t = 0 :: LIFE(1, 0) -> t = 1 fi;
#endif
#if CONFIG == LIVES
    m = t;
#ifdef MIXED_ATTACHMENT
    if :: m = 0 :: m = t fi;
#endif
#endif
    do
    :: length < BLOCKS ->
       lease(t, length, lease_bit, id, WANTED, n[length], seen, taken[length], leased);
       if :: leased -> length++ :: else -> break fi
    :: else -> break
    od;
#ifdef FAILED_BATCH_KEEPS_LEASE
    if :: BLOCKS > 1 && length == 1 -> length = 0 :: else -> skip fi;
#endif
    leased = (length > 0)
  }
#if CONFIG == BITS
  unless { core_dead && lease_bit == 0 && id == 0 }
#endif
  ;
  {
    if
    :: !leased -> goto ended
#if CONFIG == SHARE
    :: leased && id == 0 -> goto end_stopped            /* SIGSTOP, for ever */
#endif
    :: leased -> skip
    fi;
#ifdef COPY_AFTER_RELEASE
    release(t, 0, lease_bit, id, n[0], taken[0]);
#endif
    b = 0;
    do
    :: b < length - 1 ->
       c[2 * b] = HALF(m, b, 0); c[2 * b + 1] = HALF(m, b, 1); b++
    :: else -> break
    od;
    c[2 * b] = HALF(m, b, 0);
#ifdef RECHECK_BEFORE_LAST_READ
    b = 0; do :: b < length -> recheck(t, b, n[b], good[b]); b++ :: else -> break od;
    b = length - 1;
    c[2 * b + 1] = HALF(m, b, 1);
#else
    c[2 * b + 1] = HALF(m, b, 1);
    b = 0; do :: b < length -> recheck(t, b, n[b], good[b]); b++ :: else -> break od;
#endif
#ifdef LIFE_NOT_RECHECKED
    alive = true;
#else
    alive = LIFE(t, 0);
#endif
#if CONFIG == RESET
    ours = !own_epoch_ended;
#else
    ours = true;
#endif
    b = 0; do :: b < length -> release(t, b, lease_bit, id, n[b], taken[b]); b++ :: else -> break od;
    /* The scheduler takes the report. */
    atomic {
      b = 0;
      do
      :: b < length ->
#ifdef NO_RECHECK
         good[b] = true;
#endif
#ifdef OWN_EPOCH_RECHECKED_ONCE
         if
         :: good[b] && alive && ours ->
#else
         if
         :: good[b] && alive && ours && !(CONFIG == RESET && own_epoch_ended) ->
#endif
            foreign_bytes_delivered =
               (c[2 * b] != NAME(t, n[b], WANTED) || c[2 * b + 1] != NAME(t, n[b], WANTED) ||
                (CONFIG == RESET && own_epoch_ended));
            assert(!foreign_bytes_delivered)
         :: else -> skip
         fi;
         b++
      :: else -> break
      od
    }
  }
#if CONFIG == BITS
  unless { rank_dead && id == 0 };
  if                                    /* a rank that died leaves it to its scheduler */
  :: rank_dead && !core_dead && id == 0 && length > 0 ->
     { release(t, 0, lease_bit, id, n[0], taken[0]) } unless { core_dead }
  :: else -> skip
  fi
#endif
  ;
ended:
  skip;
  d_step {                              /* what is not needed any more makes no states */
    t = 0; m = 0; length = 0; leased = false; alive = false; ours = false;
    b = 0;
    do
    :: b < BLOCKS -> n[b] = 0; good[b] = false; taken[b] = false; b++
    :: else -> break
    od;
    b = 0;
    do :: b < 2 * BLOCKS -> c[b] = 0; b++ :: else -> break od;
    b = 0; loads--
  }
  goto done;
end_stopped:
  false;
done:
  skip
}
#endif

/* -- importer of two ranks ------------------------------------------------------------------ */

#if CONFIG == RANKS
byte planned[2], pending[2], copied[4], reports[2];
bool held[2], bad[2];

proctype Rank(byte id; byte rank; byte lease_bit) {
  bool good;
  copied[2 * id + rank] = HALF(0, 0, rank);
  recheck(0, 0, planned[id], good);
#ifdef FIRST_RANKS_LIFE_ONLY
  good = good && LIFE(0, 0);
#else
  good = good && LIFE(0, rank);
#endif
  if :: !good -> bad[id] = true :: else -> skip fi;
  atomic { pending[id]--; good = (pending[id] == 0) };
#ifdef FIRST_RANK_RELEASES
  good = true;
#endif
  if
  :: good ->
     atomic {
       living_lease_cleared = (held[id] && pending[id] > 0);
       assert(!living_lease_cleared)
     }
     release(0, 0, lease_bit, id, planned[id], held[id])
  :: else -> skip
  fi;
  reports[id]++
}

proctype Core(byte id; byte lease_bit) {
  byte seen;
  bool leased, taken;
  lease(0, 0, lease_bit, id, WANTED, planned[id], seen, taken, leased);
  if
  :: leased ->
     held[id] = taken;
     pending[id] = 2;
     run Rank(id, 0, lease_bit);
     run Rank(id, 1, lease_bit);
     atomic {
       reports[id] == 2;
       foreign_bytes_delivered = (!bad[id] && (copied[2 * id] != NAME(0, planned[id], WANTED) ||
                                               copied[2 * id + 1] != NAME(0, planned[id], WANTED)));
       assert(!foreign_bytes_delivered)
     }
  :: else -> skip
  fi;
  d_step {
    planned[id] = 0; reports[id] = 0; held[id] = false; bad[id] = false;
    copied[2 * id] = 0; copied[2 * id + 1] = 0;
    leased = false; taken = false; loads--
  }
}
#endif

/* -- two engines, each both ------------------------------------------------------------------ */

#if CONFIG == MUTUAL
#define COMPUTED 0                      /* block 0: own; block 1: where the import goes */
#define IMPORTED 1
byte planned[2];
bool held[2], ordered[2], reported[2], fine[2];

/* A worker never waits for its scheduler, nor for the peer. */
proctype Worker(byte e; byte p) {
  bool good;
end_idle:
  ordered[e];
  HALF(e, IMPORTED, 0) = HALF(p, COMPUTED, 0);
#ifdef REPORT_BEFORE_LAST_WRITE
  recheck(p, COMPUTED, planned[e], good);
  if
  :: !good -> fine[e] = false; reported[e] = true; HALF(e, IMPORTED, 1) = HALF(p, COMPUTED, 1)
  :: else -> HALF(e, IMPORTED, 1) = HALF(p, COMPUTED, 1)
  fi;
#else
  HALF(e, IMPORTED, 1) = HALF(p, COMPUTED, 1);
#endif
  recheck(p, COMPUTED, planned[e], good);
#ifdef NO_RECHECK
  good = true;
#endif
#ifndef SCHEDULER_RELEASES
  release(p, COMPUTED, e, e, planned[e], held[e]);
#endif
  atomic { if :: !reported[e] -> fine[e] = good; reported[e] = true :: else -> skip fi }
}

proctype Scheduler(byte e; byte p) {
  byte seen;
  bool leased;
  HALF(e, COMPUTED, 0) = NAME(e, 0, e + 1);
  HALF(e, COMPUTED, 1) = NAME(e, 0, e + 1);
  publish(e, COMPUTED, e + 1);
  lease(p, COMPUTED, e, e, p + 1, planned[e], seen, held[e], leased);
  ordered[e] = leased;
  retract(e, COMPUTED);                 /* memory pressure: the step needs this block */
  drain(e, COMPUTED);
  HALF(e, COMPUTED, 0) = NOTHING;
  HALF(e, COMPUTED, 1) = NOTHING;
  if
  :: leased ->
     reported[e];
#ifdef SCHEDULER_RELEASES
     release(p, COMPUTED, e, e, planned[e], held[e]);
#endif
     if
     :: fine[e] ->
        atomic {
          foreign_bytes_delivered = (HALF(e, IMPORTED, 0) != NAME(p, planned[e], p + 1) ||
                                     HALF(e, IMPORTED, 1) != NAME(p, planned[e], p + 1));
          assert(!foreign_bytes_delivered)
        }
     :: else ->                         /* recomputed in place */
        HALF(e, IMPORTED, 0) = NAME(e, 0, p + 1);
        HALF(e, IMPORTED, 1) = NAME(e, 0, p + 1)
     fi;
     publish(e, IMPORTED, p + 1);
     retract(e, IMPORTED);
     drain(e, IMPORTED)
  :: else -> skip
  fi;
  loads--
}
#endif

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

/* The bit is free when every process of its owner is known dead and every table swept. */
proctype Coordinator() {
#ifdef BIT_BEFORE_SWEEP
  loads++; run Load(2, 0);
#endif
end_alive:
#if defined(SUSPECTED_IS_DEAD)
  skip;
#elif defined(SWEEP_AT_FIRST_DEATH)
  (core_dead || rank_dead);
#else
  (core_dead && rank_dead);
#endif
  atomic {
    living_lease_cleared = ((SLOT(0, 0).leases & 1) && (HOLDER(0, 0, 0) != 1 || !core_dead || !rank_dead));
    assert(!living_lease_cleared);
    SLOT(0, 0).leases = SLOT(0, 0).leases & ~1;
    HOLDER(0, 0, 0) = 0;
    swept = true
#ifndef BIT_BEFORE_SWEEP
    ; loads++; run Load(2, 0)
#endif
  }
}
#endif

/* The exporter dies anywhere.  Whoever has confirmed it zeroes its life words; what was its
 * memory may hold anything only after that (docs/model-checking.md: the assumption). */
#if CONFIG == LIVES || CONFIG == RANKS
proctype Reaper() {
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
     LIFE(0, 1) = false;
     HALF(0, 0, 0) = NOTHING;
     HALF(0, 0, 1) = NOTHING
  :: skip
  fi
}
#endif

/* -- invariants: enabled only in a state that breaks one ---------------------------------------- */

#define HOLDS(m, b, i, t) (HASH_OF(HALF(m, b, i)) == SLOT(t, b).hash)
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
    loads = 3; run Exporter(0, 0, STEPS); run Load(0, 0); run Load(1, 0); run Load(2, OTHER_BIT)
#elif CONFIG == BITS
    loads = 1; run Exporter(0, 0, STEPS); run Load(0, 0); run Fate(); run Coordinator()
#elif CONFIG == LIVES
    loads = 1; run Exporter(0, 0, STEPS); run Load(0, 0); run Reaper()
#ifdef SECOND_LOAD
    ; loads = 2; run Load(1, 1)
#endif
#elif CONFIG == RANKS
    loads = 1; run Exporter(0, 0, STEPS); run Core(0, 0); run Reaper()
#ifdef SECOND_LOAD
    ; loads = 2; run Core(1, 0)
#endif
#elif CONFIG == RESET
    loads = 2; run Exporter(0, 0, STEPS); run Load(0, 0); run Load(1, 0);
    run OwnReset()
#elif CONFIG == PAIR
    loads = 2; run Exporter(0, 0, STEPS); run Load(0, 0); run Load(1, 1)
#else
    LIFE(1, 0) = true;
    loads = 2; run Worker(0, 1); run Worker(1, 0); run Scheduler(0, 1); run Scheduler(1, 0)
#endif
  }
}
