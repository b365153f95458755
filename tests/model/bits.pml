/* Lease bits of kvshm across deaths, departures and a restart of the coordinator
 * (coordinator/lease_bits.py, lease_table.py, state.py), for SPIN.
 *
 * Two engines want the same bit, there is no other, and one slot is all there is to lease.
 * Engine 0 is two processes, EngineCore and a rank, which die one after the other; it may also
 * leave with one epoch and join with the next while a load of the old one is under way.  The
 * coordinator keeps who holds the bit in a table that outlives it.
 *
 *   spin -a [-DRESTARTS=n] [-D<mutant>] bits.pml
 *
 * Mutants: see MUTANTS in cases.py. */

#ifndef RESTARTS
#define RESTARTS 1
#endif
#define ENGINES 2

byte owner;                             /* the lease table: 1 + engine; 0: the bit is free */
bool leased;                            /* the bit in the slot */
bool core_dead[ENGINES], rank_dead[ENGINES];
bool has_bit[ENGINES];                  /* as the engine was told */
bool asks[ENGINES], leaves;             /* leaves: engine 0 */
bool coordinator_dead, swept;            /* swept: at the first death, by this coordinator */
byte busy;                              /* engines and loads that have not ended */

byte holder;                            /* ghost: 1 + load that took the lease */
#define LOAD(e, n) ((e) * 2 + (n))
#define ENGINE_OF(load) ((load) / 2)
#define GONE(e) (core_dead[e] && rank_dead[e])
#define ENDED(e) (core_dead[e] || rank_dead[e])
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
         living_lease_cleared = (holder != LOAD(e, number) + 1);
         assert(!living_lease_cleared);
         leased = false; holder = 0
      :: else -> skip
      fi
    }
  }
  unless { rank_dead[e] };
  d_step { taken = false; busy-- }
}

/* Joins and loads; engine 0 may begin a second epoch and load again. */
proctype Engine(byte e) {
  {
    asks[e] = true;
end_unshared:
    atomic { has_bit[e] -> busy++; run Load(e, 0) };
    if
    :: e == 0 ->                        /* the load of the old epoch may still be under way */
       leaves = true;
end_leaving:
       !leaves;
       asks[0] = true;
end_second:
       atomic { !asks[0] -> busy++; run Load(0, 1) }
    :: true -> skip
    fi
  }
  unless { core_dead[e] };
  busy--
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

inline sweep() {
  atomic {
    living_lease_cleared = (leased && !ENDED(ENGINE_OF(holder - 1)));
    assert(!living_lease_cleared);
    leased = false; holder = 0
  }
}

inline note(e) { owner = e + 1 }

inline tell(e) {
  atomic { asks[e] = false; if :: !core_dead[e] -> has_bit[e] = true :: else -> skip fi }
}

inline on_join(e) {
#ifdef TOLD_BEFORE_NOTED
  tell(e); note(e)
#else
  note(e); tell(e)
#endif
}

inline on_leave() {
#ifdef SWEPT_AT_LEAVE
  d_step { leased = false; holder = 0 };
#endif
#ifdef FREED_AT_LEAVE
  owner = 0;
#endif
  leaves = false
}

/* Every process that may hold leases with the bit is gone. */
inline on_last_death() {
  swept = false;
#if defined(FREED_BEFORE_SWEEP)
  owner = 0; sweep()
#elif defined(FREED_UNSWEPT)
  owner = 0
#else
  sweep(); owner = 0
#endif
}

#define CAN_JOIN(e) (asks[e] && !ENDED(e) && (owner == 0 || owner == (e) + 1))
#if defined(OWNERS_ONLY_SUSPECTED)
#define KNOWN_DEAD (owner != 0)
#elif defined(CORE_ALONE_COUNTS)
#define KNOWN_DEAD (owner != 0 && core_dead[owner - 1])
#else
#define KNOWN_DEAD (owner != 0 && GONE(owner - 1))
#endif

proctype Coordinator() {
end_starting:
  do
  :: {
end_serving:
       do
       :: CAN_JOIN(0) -> on_join(0)
       :: CAN_JOIN(1) -> on_join(1)
       :: leaves -> on_leave()
       :: owner != 0 && ENDED(owner - 1) && !swept -> sweep(); swept = true
       :: KNOWN_DEAD -> on_last_death()
       od
     }
     unless { coordinator_dead };
     atomic {                           /* the next one finds nothing but the lease table */
#ifdef TABLE_FORGOTTEN
       owner = 0;
#endif
       asks[0] = asks[0] || (has_bit[0] && !core_dead[0]);
       asks[1] = asks[1] || (has_bit[1] && !core_dead[1]);
       swept = false;
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
  :: atomic { has_bit[0] && has_bit[1] && !GONE(0) && !GONE(1) -> bit_shared = true }
  :: atomic { leased && owner == 0 && busy == 0 -> lease_leaked = true }
  fi;
  assert(!bit_shared);
  assert(!lease_leaked)
}

init {
  atomic {
    busy = ENGINES;
    run Monitor(); run Coordinator(); run Restart(); run Deaths(); run Engine(0); run Engine(1)
  }
}
