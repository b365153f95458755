/* Joining and resynchronisation of kvshm (docs/protocol.md; kvshm/_node/event_order.py, coordinator_session.py,
 * index.py; coordinator/state.py, joining.py), for SPIN.
 *
 * Two epochs of engines publish and retract one block each; a coordinator sequences and relays
 * their events; one receiver keeps a replica of what they hold.  Receivers do not influence
 * each other, so one stands for all.  Events are lost, doubled and overtaken within a budget;
 * engines die, are started again in the same place, and the coordinator is restarted.  When
 * all of that is over the coordinator ticks for ever: then the replica must equal the slot
 * tables, and no tick may cause another resynchronisation.
 *
 *   spin -a -DCONFIG=RESTART [-DFAULTS=n] [-DSTEPS=n] [-D<mutant>] join.pml
 *
 * Configurations:
 *   RESTART  epoch 1 is a new life of the engine of epoch 0, which dies
 *   PAIR     epochs 0 and 1 are two engines
 *   COORD    one engine, which may die (KILL); the coordinator is restarted
 *   ONE      one engine; the receiver's scheduler drops an entry whose lease failed; each
 *            resynchronisation must have a cause
 *
 * Mutants: see MUTANTS in cases.py. */

#define RESTART 1
#define PAIR    2
#define COORD   3
#define ONE     4
#ifndef CONFIG
#define CONFIG RESTART
#endif
#ifndef STEPS
#define STEPS 2                         /* publishes and retracts of epoch 0, in turns */
#endif
#ifndef LATER_STEPS
#define LATER_STEPS 1                   /* and of epoch 1 */
#endif
#ifndef BLOCKS
#define BLOCKS 1                        /* slots of each table */
#endif
#ifndef FAULTS
#define FAULTS 1                        /* broadcasts lost, doubled or overtaken */
#endif
#ifndef PIPE
#define PIPE 2                          /* broadcasts under way */
#endif
#ifndef OVERFLOW
#define OVERFLOW 0                      /* 1: what a full pipe cannot take is lost */
#endif
#ifndef UP
#define UP 1                            /* messages of an engine under way; more are lost */
#endif
#ifndef BEATS
#define BEATS 0                         /* 1: heartbeats at any time, not only at the end */
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0                      /* answers not waited for, coordinators given up too early */
#endif
#ifndef TICKS
#define TICKS 0                         /* before everything is over; for ever afterwards */
#endif

#define EPOCHS 2
#define NOBODY 15                       /* not in the roster; not heard of; no generation */
#define WAITING 0
#define JOINING 1
#define JOINED  2
mtype = { join, events, heartbeat, engine_joined, engine_gone, engine_events, tick };
mtype = { publish, retract };

/* Slot tables. */
#define SLOTS (EPOCHS * BLOCKS)
byte generation[SLOTS];
bool ready[SLOTS];
bool begun[EPOCHS], dead[EPOCHS], done[EPOCHS], over;

/* The engines' sessions. */
byte sequence[EPOCHS];                  /* of the last batch of events, sent or dropped */
byte member_of[EPOCHS];                 /* coordinator that has this engine in its roster */
bool joining[EPOCHS], lost[EPOCHS];

/* The coordinator: its epoch, and for each engine of the roster the last events' sequence. */
byte coordinator = 1, topic_sequence;
byte relayed[EPOCHS] = NOBODY;
bool ended[EPOCHS];

/* Engine to coordinator: what, sequence, record.  Coordinator to receiver: what, coordinator,
 * sequence, engine, its sequence, record (of a tick: relayed[0], relayed[1]). */
chan up[EPOCHS] = [UP] of { mtype, byte, mtype, byte };
chan down = [PIPE] of { mtype, byte, byte, byte, byte, mtype, byte };
chan asked = [2] of { bit };
chan answered = [2] of { byte, byte, byte, byte };

/* The receiver: its stream, and the replica's tombstones. */
byte state = WAITING, known_coordinator, expected;
byte heard[EPOCHS] = NOBODY;
bool missing[EPOCHS], busy, resyncing;
byte known_generation[SLOTS];
mtype known_kind[SLOTS];

/* Budgets and ghosts.  A cause: something lost, which the
 * receiver may join or scan again for. */
byte faults = FAULTS, timeouts = TIMEOUTS, causes, ticks = TICKS, final_ticks, gone_below[SLOTS];
bool replica_differs, entry_resurrected, resync_without_cause, resync_storm;

#if CONFIG == ONE
#define CAUSE causes++
#else
#define CAUSE skip
#endif
#define SLOT(e, b) ((e) * BLOCKS + (b))
#ifdef KEYED_BY_ENGINE
#define ENTRY(e, b) (b)
#else
#define ENTRY(e, b) SLOT(e, b)
#endif
/* A record in a message: block and generation in one byte. */
#define RECORD(b, g) ((g) * BLOCKS + (b))
#define BLOCK_OF(record) ((record) % BLOCKS)
#define GENERATION_OF(record) ((record) / BLOCKS)

/* -- replica -------------------------------------------------------------------------------- */

/* One record of entry `i`: news, or ignored. */
inline apply(i, what, g) {
  d_step {
    if
#ifdef NO_TOMBSTONE
    :: what == publish || (known_kind[i] == publish && known_generation[i] == g) ->
#else
    :: known_kind[i] == 0 || g > known_generation[i] ||
       (g == known_generation[i] && known_kind[i] == publish && what == retract) ->
#endif
       entry_resurrected = (what == publish && g < gone_below[i]);
       assert(!entry_resurrected);
       known_generation[i] = g;
       known_kind[i] = what
    :: else -> skip
    fi;
#ifndef KEYED_BY_ENGINE
    if
    :: what == retract && gone_below[i] <= g -> gone_below[i] = g + 1
    :: what == publish && gone_below[i] < g -> gone_below[i] = g
    :: else -> skip
    fi
#endif
  }
}

inline drop_row(e) {
  d_step {
    heard[e] = NOBODY; missing[e] = false;
#ifndef KEYED_BY_ENGINE
    known_kind[SLOT(e, 0)] = 0; known_generation[SLOT(e, 0)] = 0; gone_below[SLOT(e, 0)] = 0;
#if BLOCKS > 1
    known_kind[SLOT(e, 1)] = 0; known_generation[SLOT(e, 1)] = 0; gone_below[SLOT(e, 1)] = 0
#endif
#endif
  }
}

/* What the replica had before the scan began, and the scan does not see, has left READY. */
inline rescan(e) {
  d_step {
    resyncing = true;
    resync_storm = (final_ticks == 2);
    assert(!resync_storm);
    b = 0
  }
  do
  :: b < BLOCKS ->
     before = (known_kind[ENTRY(e, b)] == publish -> known_generation[ENTRY(e, b)] : NOBODY);
     scanned = (ready[SLOT(e, b)] -> generation[SLOT(e, b)] : NOBODY);
#ifndef RESCAN_ONLY_ADDS
     if
     :: before != NOBODY && scanned == NOBODY -> apply(ENTRY(e, b), retract, before)
     :: else -> skip
     fi;
#endif
     if :: scanned != NOBODY -> apply(ENTRY(e, b), publish, scanned) :: else -> skip fi;
     d_step { before = 0; scanned = 0; b++ }
  :: else -> break
  od;
  b = 0
}

/* -- engines ---------------------------------------------------------------------------------- */

inline send_events(e, what, g) {
  atomic {
#ifdef DROPPED_BATCH_NOT_COUNTED
    if
    :: member_of[e] && nfull(up[e]) -> sequence[e]++; up[e]!events, sequence[e], what, g
    :: !member_of[e] || full(up[e]) -> CAUSE
    fi
#else
    sequence[e]++;
    if
    :: member_of[e] && nfull(up[e]) -> up[e]!events, sequence[e], what, g
    :: !member_of[e] || full(up[e]) -> lost[e] = true; CAUSE
    fi
#endif
  }
}

inline another_block() {
  n--; g = 0;
#if BLOCKS > 1
  if :: n > 0 -> if :: b = 0 :: b = 1 fi :: else -> b = 0 fi
#endif
}

proctype Engine(byte e) {
  byte n, b, g, last_beat;
  {
    n = (e == 0 -> STEPS : LATER_STEPS);
    atomic { (CONFIG != RESTART || e == 0 || dead[0]) -> begun[e] = true };
end_member:
    do
#ifdef EVENT_BEFORE_WORD
    :: n > 0 && !ready[SLOT(e, b)] ->
       g = generation[SLOT(e, b)];
       send_events(e, publish, RECORD(b, g)); ready[SLOT(e, b)] = true; another_block()
    :: n > 0 && ready[SLOT(e, b)] ->
       g = generation[SLOT(e, b)];
       send_events(e, retract, RECORD(b, g));
       d_step { ready[SLOT(e, b)] = false; generation[SLOT(e, b)]++ }; another_block()
#else
    :: n > 0 && !ready[SLOT(e, b)] ->
       d_step { g = generation[SLOT(e, b)]; ready[SLOT(e, b)] = true };
       send_events(e, publish, RECORD(b, g)); another_block()
    :: n > 0 && ready[SLOT(e, b)] ->
       d_step { g = generation[SLOT(e, b)]; ready[SLOT(e, b)] = false; generation[SLOT(e, b)]++ };
       send_events(e, retract, RECORD(b, g)); another_block()
#endif
    :: atomic { (!member_of[e] || lost[e]) && !joining[e] && nfull(up[e]) ->
                up[e]!join, sequence[e], 0, 0; joining[e] = true; lost[e] = false }
    :: atomic { (n == 0 || BEATS) && member_of[e] && last_beat != sequence[e] && nfull(up[e]) ->
                up[e]!heartbeat, sequence[e], 0, 0; last_beat = sequence[e] }
    :: d_step { member_of[e] && member_of[e] != coordinator ->        /* silence, or told */
                member_of[e] = 0; joining[e] = false; last_beat = 0 }
#if TIMEOUTS
    :: d_step { timeouts > 0 && member_of[e] -> timeouts--;           /* nothing heard for long */
                member_of[e] = 0; joining[e] = false; last_beat = 0 }
#endif
    :: d_step { n == 0 && !done[e] && last_beat == sequence[e] -> done[e] = true }
    od
  }
  unless { d_step { dead[e] -> n = 0; b = 0; g = 0; last_beat = 0 } }
}

/* -- coordinator ------------------------------------------------------------------------------- */

#define SEND_DOWN(what, e, s, kind, g) \
  if :: nfull(down) -> down!what, coordinator, topic_sequence, e, s, kind, g \
     :: full(down) -> CAUSE fi

inline on_message(e) {
  if
  :: what == join && !ended[e] ->
     if
     :: relayed[e] == NOBODY || relayed[e] != s ->
        relayed[e] = s;
        topic_sequence++;
        SEND_DOWN(engine_joined, e, s, 0, 0)
     :: else -> skip
     fi;
     member_of[e] = coordinator; joining[e] = false
  :: what == events && relayed[e] != NOBODY && s > relayed[e] ->
     relayed[e] = s;
     topic_sequence++;
     SEND_DOWN(engine_events, e, s, kind, g)
#ifdef DEAD_EPOCHS_SPEAK
  :: what == events && relayed[e] == NOBODY ->
     topic_sequence++;
     SEND_DOWN(engine_events, e, s, kind, g)
#else
  :: what == events && relayed[e] == NOBODY && !joining[e] -> member_of[e] = 0
#endif
  :: what == heartbeat && relayed[e] != NOBODY && s > relayed[e] -> relayed[e] = s
  :: what == heartbeat && relayed[e] == NOBODY && !joining[e] -> member_of[e] = 0
  :: else -> skip                       /* repeated, or of an epoch that has ended */
  fi;
  what = 0; s = 0; kind = 0; g = 0
}

#if CONFIG == RESTART
#define NEVER_RUNS(e) ((e) == 1 && !dead[0])
#elif CONFIG == PAIR
#define NEVER_RUNS(e) false
#else
#define NEVER_RUNS(e) ((e) == 1)
#endif
#define ROOM (OVERFLOW || nfull(down))
#define STILL(e) (empty(up[e]) && (NEVER_RUNS(e) || (dead[e] && relayed[e] == NOBODY) || \
                  (done[e] && member_of[e] == coordinator && !lost[e] && !joining[e])))
#define ALL_OVER (over && STILL(0) && STILL(1) && state == JOINED && !busy && !resyncing && \
                  known_coordinator == coordinator && !missing[0] && !missing[1] && \
                  empty(down) && empty(asked) && empty(answered))
#define WANTED(e, b) (relayed[e] != NOBODY && ready[SLOT(e, b)])
#define HELD(e, b) (heard[e] != NOBODY && known_kind[ENTRY(e, b)] == publish)
#define DIFFERS(e, b) (WANTED(e, b) != HELD(e, b) || \
                       (WANTED(e, b) && known_generation[ENTRY(e, b)] != generation[SLOT(e, b)]))

inline send_tick() {
  SEND_DOWN(tick, relayed[0], relayed[1], 0, 0)
}

proctype Coordinator() {
  mtype what, kind;
  byte s, g;
end_serving:
  do
  :: atomic { ROOM && nempty(up[0]) -> up[0]?what, s, kind, g; on_message(0) }
  :: atomic { ROOM && nempty(up[1]) -> up[1]?what, s, kind, g; on_message(1) }
  :: atomic { ROOM && dead[0] && relayed[0] != NOBODY ->
              relayed[0] = NOBODY; ended[0] = true; topic_sequence++;
              SEND_DOWN(engine_gone, 0, 0, 0, 0) }
  :: atomic { ROOM && dead[1] && relayed[1] != NOBODY ->
              relayed[1] = NOBODY; ended[1] = true; topic_sequence++;
              SEND_DOWN(engine_gone, 1, 0, 0, 0) }
  :: atomic { asked?_ -> answered!coordinator, topic_sequence, relayed[0], relayed[1] }
  :: atomic { ticks > 0 && nfull(down) -> ticks--; send_tick() }
  :: atomic { ALL_OVER ->
              if :: final_ticks < 2 -> final_ticks++ :: else -> skip fi;
              replica_differs = (final_ticks == 2 && (DIFFERS(0, 0) || DIFFERS(1, 0) ||
                                 DIFFERS(0, BLOCKS - 1) || DIFFERS(1, BLOCKS - 1)));
              assert(!replica_differs);
              send_tick() }
  od
}

#include "join_receiver.inc"

/* -- what can go wrong --------------------------------------------------------------------------- */

inline restart_coordinator() {
  coordinator++;
  topic_sequence = 0;
  relayed[0] = NOBODY; relayed[1] = NOBODY; ended[0] = false; ended[1] = false;
  joining[0] = false; joining[1] = false;
  do :: up[0]?_, _, _, _ :: empty(up[0]) -> break od;
  do :: up[1]?_, _, _, _ :: empty(up[1]) -> break od;
  do :: asked?_ :: empty(asked) -> break od     /* its last answer may still arrive */
}

proctype World() {
  bool killed, restarted;
  mtype what, kind;
  byte c, s, who, r, g;
  do
  :: atomic { faults > 0 && nempty(down) ->
              down?what, c, s, who, r, kind, g;
              faults--;
              if
              :: CAUSE                                             /* lost */
              :: nempty(down) -> CAUSE; down!what, c, s, who, r, kind, g      /* overtaken */
              fi;
              what = 0; c = 0; s = 0; who = 0; r = 0; kind = 0; g = 0 }
  :: atomic { faults > 0 && nfull(down) && nempty(down) ->
              down?<what, c, s, who, r, kind, g>;
              faults--; down!what, c, s, who, r, kind, g;               /* doubled */
              what = 0; c = 0; s = 0; who = 0; r = 0; kind = 0; g = 0 }
#if CONFIG == RESTART || defined(KILL)
  :: !killed && begun[0] -> killed = true; dead[0] = true
#endif
#if CONFIG == COORD
  :: atomic { !restarted -> restarted = true; restart_coordinator() }
#endif
#ifdef SEQUENCE_SHARED
  :: !restarted -> restarted = true; topic_sequence++      /* an event of another topic */
#endif
  :: killed = false; restarted = false; over = true; break
  od
}

init {
  atomic {
    run Coordinator(); run Receiver(); run World(); run Engine(0);
#if CONFIG == RESTART || CONFIG == PAIR
    run Engine(1)
#elif CONFIG == ONE
    run Planner()
#else
    skip
#endif
  }
}

#ifdef LIVENESS
ltl calm { <> [] !resyncing }
#endif
