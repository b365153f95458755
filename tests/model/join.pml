/* Joining and resynchronisation of kvshm (docs/protocol.md; kvshm/sequences.py, session.py,
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
 *   COORD    one engine; the coordinator is restarted
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
#ifndef FAULTS
#define FAULTS 1                        /* broadcasts lost, doubled or overtaken */
#endif
#ifndef PIPE
#define PIPE 3                          /* broadcasts under way; a full pipe loses some, too */
#endif
#ifndef UP
#define UP 1                            /* messages of an engine under way; more are lost */
#endif
#ifndef BEATS
#define BEATS 0                         /* 1: heartbeats at any time, not only at the end */
#endif
#ifndef TICKS
#define TICKS 1                         /* before everything is over; for ever afterwards */
#endif

#define EPOCHS 2
#define NOBODY 15                       /* not in the roster; not heard of; no generation */
#define WAITING 0
#define JOINING 1
#define JOINED  2
mtype = { join, events, heartbeat, engine_joined, engine_gone, engine_events, tick };
mtype = { publish, retract };

/* Slot tables, of one slot each. */
byte generation[EPOCHS];
bool ready[EPOCHS];
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
byte known_generation[EPOCHS];
mtype known_kind[EPOCHS];

/* Budgets and ghosts.  A cause: something lost, which the
 * receiver may join or scan again for. */
byte faults = FAULTS, causes, ticks = TICKS, final_ticks, gone_below[EPOCHS];
bool replica_differs, entry_resurrected, resync_without_cause, resync_storm;

#if CONFIG == ONE
#define CAUSE causes++
#else
#define CAUSE skip
#endif
#ifdef KEYED_BY_ENGINE
#define ROW(e) 0
#else
#define ROW(e) (e)
#endif

/* -- replica -------------------------------------------------------------------------------- */

/* One record: news, or ignored. */
inline apply(e, what, g) {
  d_step {
    if
#ifdef NO_TOMBSTONE
    :: what == publish || (known_kind[ROW(e)] == publish && known_generation[ROW(e)] == g) ->
#else
    :: known_kind[ROW(e)] == 0 || g > known_generation[ROW(e)] ||
       (g == known_generation[ROW(e)] && known_kind[ROW(e)] == publish && what == retract) ->
#endif
       entry_resurrected = (what == publish && g < gone_below[e]);
       assert(!entry_resurrected);
       known_generation[ROW(e)] = g;
       known_kind[ROW(e)] = what
    :: else -> skip
    fi;
    if
    :: what == retract && gone_below[e] <= g -> gone_below[e] = g + 1
    :: what == publish && gone_below[e] < g -> gone_below[e] = g
    :: else -> skip
    fi
  }
}

inline drop_row(e) {
  d_step {
    heard[e] = NOBODY; missing[e] = false; gone_below[e] = 0;
#ifndef KEYED_BY_ENGINE
    known_kind[e] = 0; known_generation[e] = 0
#endif
  }
}

/* What the replica had before the scan began, and the scan does not see, has left READY. */
inline rescan(e) {
  d_step {
    resyncing = true;
    resync_storm = (final_ticks == 2);
    assert(!resync_storm);
    before = (known_kind[ROW(e)] == publish -> known_generation[ROW(e)] : NOBODY)
  }
  scanned = (ready[e] -> generation[e] : NOBODY);
#ifndef RESCAN_ONLY_ADDS
  if :: before != NOBODY && scanned == NOBODY -> apply(e, retract, before) :: else -> skip fi;
#endif
  if :: scanned != NOBODY -> apply(e, publish, scanned) :: else -> skip fi;
  d_step { before = 0; scanned = 0 }
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

proctype Engine(byte e) {
  byte n, g, last_beat;
  {
    n = (e == 0 -> STEPS : LATER_STEPS);
    atomic { (CONFIG != RESTART || e == 0 || dead[0]) -> begun[e] = true };
end_member:
    do
#ifdef EVENT_BEFORE_WORD
    :: n > 0 && !ready[e] ->
       send_events(e, publish, generation[e]); ready[e] = true; n--
    :: n > 0 && ready[e] ->
       send_events(e, retract, generation[e]);
       d_step { ready[e] = false; generation[e]++ }; n--
#else
    :: n > 0 && !ready[e] ->
       ready[e] = true; n--; send_events(e, publish, generation[e])
    :: n > 0 && ready[e] ->
       d_step { g = generation[e]; ready[e] = false; generation[e]++ };
       n--; send_events(e, retract, g); g = 0
#endif
    :: atomic { (!member_of[e] || lost[e]) && !joining[e] && nfull(up[e]) ->
                up[e]!join, sequence[e], 0, 0; joining[e] = true; lost[e] = false }
    :: atomic { (n == 0 || BEATS) && member_of[e] && last_beat != sequence[e] && nfull(up[e]) ->
                up[e]!heartbeat, sequence[e], 0, 0; last_beat = sequence[e] }
    :: d_step { member_of[e] && member_of[e] != coordinator ->        /* silence, or told */
                member_of[e] = 0; joining[e] = false; last_beat = 0 }
    :: d_step { n == 0 && !done[e] && last_beat == sequence[e] -> done[e] = true }
    od
  }
  unless { d_step { dead[e] -> n = 0; g = 0; last_beat = 0 } }
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
#define STILL(e) (empty(up[e]) && (NEVER_RUNS(e) || (dead[e] && relayed[e] == NOBODY) || \
                  (done[e] && member_of[e] == coordinator && !lost[e] && !joining[e])))
#define ALL_OVER (over && STILL(0) && STILL(1) && state == JOINED && !busy && !resyncing && \
                  known_coordinator == coordinator && !missing[0] && !missing[1] && \
                  empty(down) && empty(asked) && empty(answered))
#define EXPECTED(e) (relayed[e] != NOBODY && ready[e])
#define DIFFERS(e) (EXPECTED(e) != (heard[e] != NOBODY && known_kind[ROW(e)] == publish) || \
                    (EXPECTED(e) && known_generation[ROW(e)] != generation[e]))

inline send_tick() {
  SEND_DOWN(tick, relayed[0], relayed[1], 0, 0)
}

proctype Coordinator() {
  mtype what, kind;
  byte s, g;
end_serving:
  do
  :: atomic { up[0]?what, s, kind, g -> on_message(0) }
  :: atomic { up[1]?what, s, kind, g -> on_message(1) }
  :: atomic { dead[0] && relayed[0] != NOBODY ->
              relayed[0] = NOBODY; ended[0] = true; topic_sequence++;
              SEND_DOWN(engine_gone, 0, 0, 0, 0) }
  :: atomic { dead[1] && relayed[1] != NOBODY ->
              relayed[1] = NOBODY; ended[1] = true; topic_sequence++;
              SEND_DOWN(engine_gone, 1, 0, 0, 0) }
  :: atomic { asked?_ -> answered!coordinator, topic_sequence, relayed[0], relayed[1] }
  :: atomic { ticks > 0 && nfull(down) -> ticks--; send_tick() }
  :: atomic { ALL_OVER ->
              if :: final_ticks < 2 -> final_ticks++ :: else -> skip fi;
              replica_differs = (final_ticks == 2 && (DIFFERS(0) || DIFFERS(1)));
              assert(!replica_differs);
              send_tick() }
  od
}

/* -- receiver ---------------------------------------------------------------------------------- */

inline needs_cause() {
#if CONFIG != ONE
  skip
#else
  resync_without_cause = (causes == 0);
  assert(!resync_without_cause);
  causes--
#endif
}

/* The broadcasts show a loss: ask for the roster. */
inline join_again() {
  d_step {
    resyncing = true;
    resync_storm = (final_ticks == 2);
    assert(!resync_storm);
    needs_cause();
    state = WAITING
  }
}

inline scan_for_cause(e) {
  d_step { needs_cause() }
  rescan(e)
}

/* What the roster at `c`, `s` says of engine `e`, whose events were relayed up to `r`. */
inline meet(e, r) {
  if
  :: r == NOBODY && heard[e] != NOBODY && c != known_coordinator -> missing[e] = true
  :: r == NOBODY && heard[e] != NOBODY && c == known_coordinator && !missing[e] -> drop_row(e)
  :: r != NOBODY && heard[e] != r -> heard[e] = r; missing[e] = false; rescan(e)
  :: else -> if :: r != NOBODY -> missing[e] = false :: else -> skip fi
  fi
}

inline on_tick(e, r) {
#ifndef TICK_WITHOUT_SEQUENCES
  if
  :: r != NOBODY && heard[e] != NOBODY && r > heard[e] ->
#ifndef TICK_NOT_REMEMBERED
     heard[e] = r;
#endif
     scan_for_cause(e)
  :: else -> skip
  fi
#else
  skip
#endif
}

inline on_broadcast() {
  if
  :: what == engine_joined -> heard[who] = r; missing[who] = false; rescan(who)
  :: what == engine_gone ->
     if :: heard[who] != NOBODY -> drop_row(who) :: else -> skip fi
#ifdef DEAD_EPOCHS_SPEAK
  :: what == engine_events && heard[who] == NOBODY -> heard[who] = r; apply(who, kind, g)
#endif
  :: what == engine_events && heard[who] != NOBODY && r > heard[who] ->
     if
     :: r == heard[who] + 1 -> heard[who] = r
     :: else ->
        heard[who] = r;
#ifndef ENGINE_GAP_IGNORED
        scan_for_cause(who)
#endif
     fi;
     apply(who, kind, g)
  :: else -> skip
  fi
}

proctype Receiver() {
  mtype what, kind;
  byte c, s, who, r, g, before, scanned;
end_listening:
  do
  :: atomic { state == WAITING && nfull(asked) ->
#ifdef BROADCASTS_DROPPED_WHILE_JOINING
              do :: down?what, c, s, who, r, kind, g :: empty(down) -> break od;
#endif
              asked!0; state = JOINING; resyncing = false }
  :: d_step { state == JOINING && empty(asked) && empty(answered) -> state = WAITING }
  :: d_step { state == JOINED && known_coordinator != coordinator -> state = WAITING }
  :: atomic { state == JOINING && nempty(answered) -> answered?c, s, who, r ; busy = true };
     atomic {
#ifdef EXPECT_FIRST_SEEN
       expected = NOBODY;
#else
       expected = s;
#endif
       state = JOINED
     }
     meet(0, who);
     meet(1, r);
     d_step { known_coordinator = c; c = 0; s = 0; who = 0; r = 0; busy = false; resyncing = false }
#ifdef BROADCASTS_DROPPED_WHILE_JOINING
  :: atomic { state == JOINING && nempty(down) -> down?what, c, s, who, r, kind, g;
              what = 0; c = 0; s = 0; who = 0; r = 0; kind = 0; g = 0 }
#endif
  :: atomic { state == JOINED && nempty(down) -> down?what, c, s, who, r, kind, g ; busy = true };
     if
     :: c != known_coordinator -> join_again()
     :: else ->
#ifdef EXPECT_FIRST_SEEN
        if
        :: expected == NOBODY -> expected = (what == tick -> s : s - 1)
        :: else -> skip
        fi;
#endif
        if
        :: what == tick && s == expected -> on_tick(0, who); on_tick(1, r)
#ifndef GAP_IGNORED
        :: what == tick && s > expected -> join_again()
        :: what != tick && s > expected + 1 -> join_again()
#else
        :: what != tick && s > expected + 1 -> expected = s; on_broadcast()
#endif
        :: what != tick && s == expected + 1 -> expected = s; on_broadcast()
        :: else -> skip                 /* old, or said before */
        fi
     fi;
     d_step { what = 0; c = 0; s = 0; who = 0; r = 0; kind = 0; g = 0; busy = false; resyncing = false }
  :: d_step { state == JOINED && known_coordinator == coordinator && missing[0] -> drop_row(0) }
  :: d_step { state == JOINED && known_coordinator == coordinator && missing[1] -> drop_row(1) }
  od
}

/* The receiver's scheduler plans with an entry, and drops it when the lease fails: the slot is
 * not READY at the planned generation any more. */
proctype Planner() {
  byte g;
end_planning:
  d_step { known_kind[ROW(0)] == publish && heard[0] != NOBODY -> g = known_generation[ROW(0)] };
  !(ready[0] && generation[0] == g);
#ifdef DROP_BY_SLOT
  if :: heard[0] != NOBODY -> apply(0, retract, known_generation[ROW(0)]) :: else -> skip fi;
#else
  if :: heard[0] != NOBODY -> apply(0, retract, g) :: else -> skip fi;
#endif
  g = 0
}

/* -- what can go wrong --------------------------------------------------------------------------- */

inline restart_coordinator() {
  coordinator++;
  topic_sequence = 0;
  relayed[0] = NOBODY; relayed[1] = NOBODY; ended[0] = false; ended[1] = false;
  joining[0] = false; joining[1] = false;
  do :: up[0]?_, _, _, _ :: empty(up[0]) -> break od;
  do :: up[1]?_, _, _, _ :: empty(up[1]) -> break od;
  do :: asked?_ :: empty(asked) -> break od;
  do :: answered?_, _, _, _ :: empty(answered) -> break od
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
#if CONFIG == RESTART
  :: !killed && begun[0] -> killed = true; dead[0] = true
#endif
#if CONFIG == COORD
  :: atomic { !restarted -> restarted = true; restart_coordinator() }
#endif
#if CONFIG == PAIR && defined(SEQUENCE_SHARED)
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
