/* Lease bits of kvshm across deaths, departures and a restart of the coordinator
 * (coordinator/lease_bits.py, state.py, joining.py), for SPIN.
 *
 * Two engines want the same bit, there is no other, and one slot is all there is to lease.
 * Engine 0 is two processes, EngineCore and a rank, which die one after the other; it may also
 * leave with one epoch and join with the next while a load of the old one is under way.  Nothing
 * outlives the coordinator: a new one learns of a bit from the engine that presents it, until it
 * settles.  An engine that has not come back by then may lose its leases, which is said in advance
 * (overslept): what follows costs copies, and the re-check (slots.pml) keeps them from harm.
 *
 *   spin -a [-DRESTARTS=n] [-DSTAYS] [-D<mutant>] bits.pml
 *
 * STAYS: engine 0 has one epoch.  Mutants: see MUTANTS in mutants.py. */

#ifndef RESTARTS
#define RESTARTS 1
#endif
#define ENGINES 2

byte owner;                             /* as this coordinator knows: 1 + engine; 0: nobody */
bool settled = true;                    /* whether all have had time to come back to it */
bool leased;                            /* the bit in the slot */
bool core_dead[ENGINES], rank_dead[ENGINES];
bool has_bit[ENGINES];                  /* as the engine was told */
bool asks[ENGINES], leaves, departed;   /* engine 0 leaves; it has, and not joined again */
bool given_up;                          /* no process has the table of the epoch it left */
byte loads[ENGINES];                    /* under way */
bool coordinator_dead, swept;            /* swept: at the first death, by this coordinator */

byte holder;                            /* ghost: 1 + load that took the lease */
#define LOAD(e, n) ((e) * 2 + (n))
#define ENGINE_OF(load) ((load) / 2)
#define GONE(e) (core_dead[e] && rank_dead[e])
#define ENDED(e) (core_dead[e] || rank_dead[e])
bool overslept;                         /* ghost: somebody has not come back in time */
bool living_lease_cleared, bit_shared, lease_leaked;

/* -- engines ----------------------------------------------------------------------------------- */

/* One load: EngineCore takes the lease, the rank copies and gives it back. */
proctype Load(byte e; byte number) {
  bool taken;
  {
    atomic {
      if
      :: has_bit[e] && !leased -> leased = true; holder = LOAD(e, number) + 1; taken = true
      :: else -> skip
      fi
    }
  }
  unless { core_dead[e] };
  {
    atomic {
      if
      :: taken && leased ->
         living_lease_cleared = (holder != LOAD(e, number) + 1 && !overslept);
         assert(!living_lease_cleared);
         leased = false; holder = 0
      :: else -> skip
      fi
    }
  }
  unless { rank_dead[e] };
  d_step { taken = false; loads[e]-- }
}

/* Joins and loads; engine 0 may begin a second epoch and load again. */
proctype Engine(byte e) {
  {
    asks[e] = true;
end_unshared:
    atomic { has_bit[e] -> loads[e]++; run Load(e, 0) };
    if
#ifndef STAYS
    :: e == 0 ->                        /* the load of the old epoch may still be under way */
       leaves = true;
end_leaving:
       !leaves;
       if
       :: d_step { departed && loads[0] == 0 -> has_bit[0] = false; given_up = true }
       :: true -> skip
       fi;
       asks[0] = true;
end_second:
       atomic { !asks[0] -> loads[0]++; run Load(0, 1) }
#endif
    :: true -> skip
    fi
  }
  unless { core_dead[e] }
}

proctype Deaths() {
  if
  :: core_dead[0] = true; rank_dead[0] = true
  :: rank_dead[0] = true; core_dead[0] = true
  :: skip
  fi;
  if
  :: atomic { core_dead[1] = true; rank_dead[1] = true }
  :: skip
  fi
}

/* -- coordinator --------------------------------------------------------------------------------- */

#define MAY_COME_BACK(e) (has_bit[e] && !GONE(e) && owner != (e) + 1)

inline sweep() {
  atomic {
    living_lease_cleared = (leased && !ENDED(ENGINE_OF(holder - 1)) && !overslept);
    assert(!living_lease_cleared);
    leased = false; holder = 0
  }
}

inline tell(e) {
  atomic { asks[e] = false; if :: !core_dead[e] -> has_bit[e] = true :: else -> skip fi }
}

/* An engine that presents the bit has it from before; a newcomer's may be that of somebody who
 * died with the coordinator before, so it is swept before the newcomer is told. */
inline on_join(e) {
  atomic {
    owner = e + 1;
    if :: e == 0 -> departed = false; given_up = false :: else -> skip fi;
    if
    :: !settled && !has_bit[e] && MAY_COME_BACK(1 - e) -> overslept = true
    :: else -> skip
    fi
  }
#ifdef TOLD_BEFORE_SWEEP
  tell(e);
#endif
#if defined(NEWCOMER_UNSWEPT)
  skip;
#elif defined(RETURNER_SWEPT)
  if :: !settled -> sweep() :: else -> skip fi;
#elif defined(TOLD_BEFORE_SWEEP)
  if :: !settled -> sweep() :: else -> skip fi;
#else
  if :: !settled && !has_bit[e] -> sweep() :: else -> skip fi;
#endif
#ifndef TOLD_BEFORE_SWEEP
  tell(e)
#endif
}

inline on_leave() {
#ifdef SWEPT_AT_LEAVE
  d_step { leased = false; holder = 0 };
#endif
#ifdef FREED_AT_LEAVE
  owner = 0;
#endif
  atomic { leaves = false; departed = true }
}

/* No process has a table any more under which it could hold leases with the bit. */
inline on_deserted() {
  atomic { swept = false; given_up = false };
#if defined(FREED_BEFORE_SWEEP)
  owner = 0; sweep()
#elif defined(FREED_UNSWEPT)
  owner = 0
#else
  sweep(); owner = 0
#endif
}

/* Bits of nobody are swept once. */
inline settle() {
  atomic {
    overslept = overslept || (owner == 0 && (MAY_COME_BACK(0) || MAY_COME_BACK(1)))
  }
#ifndef NEVER_SWEPT
  if :: owner == 0 -> sweep() :: else -> skip fi;
#endif
  settled = true
}

#define CAN_JOIN(e) (asks[e] && !ENDED(e) && (owner == 0 || owner == (e) + 1))
#define COMES_TOO_LATE(e) (asks[e] && has_bit[e] && owner == 2 - (e))
#if defined(OWNERS_ONLY_SUSPECTED)
#define DESERTED (owner != 0)
#elif defined(CORE_ALONE_COUNTS)
#define DESERTED (owner != 0 && core_dead[owner - 1])
#else
#define DESERTED (owner != 0 && (GONE(owner - 1) || (owner == 1 && given_up)))
#endif

proctype Coordinator() {
end_starting:
  do
  :: {
end_serving:
       do
       :: CAN_JOIN(0) -> on_join(0)
       :: CAN_JOIN(1) -> on_join(1)
       :: atomic { COMES_TOO_LATE(0) -> asks[0] = false; has_bit[0] = false }
       :: atomic { COMES_TOO_LATE(1) -> asks[1] = false; has_bit[1] = false }
       :: leaves -> on_leave()
       :: owner != 0 && ENDED(owner - 1) && !swept -> sweep(); swept = true
       :: DESERTED -> on_deserted()
       :: !settled -> settle()
       od
     }
     unless { coordinator_dead };
     atomic {                           /* the next one knows nothing */
       owner = 0; settled = false; swept = false; given_up = false;
       asks[0] = asks[0] || (has_bit[0] && !core_dead[0]);
       asks[1] = asks[1] || (has_bit[1] && !core_dead[1]);
       coordinator_dead = false
     }
  od
}

proctype Restart() {
  byte restarts = RESTARTS;
  do
  :: restarts > 0 -> restarts--; coordinator_dead = true; !coordinator_dead
  :: restarts = 0; break
  od
}

/* -- invariants ------------------------------------------------------------------------------------ */

proctype Monitor() {
end_watching:
  if
  :: atomic { has_bit[0] && has_bit[1] && !GONE(0) && !GONE(1) && !overslept ->
              bit_shared = true }
  :: atomic { leased && GONE(ENGINE_OF(holder - 1)) && owner != ENGINE_OF(holder - 1) + 1 &&
              settled && !overslept -> lease_leaked = true }
  fi;
  assert(!bit_shared);
  assert(!lease_leaked)
}

init {
  atomic {
    run Monitor(); run Coordinator(); run Restart(); run Deaths(); run Engine(0); run Engine(1)
  }
}
