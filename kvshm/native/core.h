/* kvshm's native core: everything that needs an atomic read-modify-write across processes, or
 * a loop over thousands of blocks.  The core knows no Python, so that sanitizers and a plain C
 * driver can run it.  docs/layout.md draws the layout; layout.h is made from layout.py.
 *
 * Every function takes whole segments as (base, length) and checks each offset and count
 * against them: a corrupt segment gives KVSHM_CORRUPT, never a fault.  Segments must be
 * mapped at least 8-byte aligned.  No function blocks. */
#ifndef KVSHM_CORE_H
#define KVSHM_CORE_H

#include "layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum kvshm_status {
    KVSHM_OK = 0,
    KVSHM_CORRUPT = -1,   /* a header contradicts itself or the segment's length */
    KVSHM_OUT_OF_RANGE = -2, /* a block id, rank, bit or row that does not exist */
    KVSHM_FULL = -3,      /* the index is filled to 3/4 (within the core only) */
    KVSHM_INVALID = -4,   /* misaligned memory, or arguments that contradict each other */
};

typedef struct {
    uint8_t hash[KVSHM_HASH_BYTES];
    uint32_t block_id, generation, depth;
    uint16_t kind, group;
} kvshm_record;

typedef struct {
    uint8_t *base;
    uint64_t length;
} kvshm_segment;

typedef struct {
    uint8_t *base;        /* address of block 0 */
    uint64_t stride, block_bytes, num_blocks;
} kvshm_region;

/* -- slots: exporter's side ---------------------------------------------------------- */

/* EMPTY -> READY for each record; fills in the record's generation and kind.  parents[i]: the first
 * 8 bytes of the parent's hash.  A slot that is not EMPTY is not changed, and its record gets kind
 * 0.  Returns how many slots are READY by this call. */
int64_t kvshm_publish(kvshm_segment table, kvshm_record *records, const uint64_t *parents,
                      size_t count, uint32_t published_ms);

/* READY -> EMPTY at generation + 1 if there is no lease, else -> DRAINING.  `out` gets a RETRACT
 * record (hash, group and OLD generation) for each slot that was READY.  `draining` gets the blocks
 * that the caller must wait for: those that are DRAINING after the call, if they have leases.
 * *num_draining gets their number.  Returns the number of records in `out`.
 * retract, drain, force and reset end with a seq_cst fence: a block that is EMPTY after the call
 * may be written. */
int64_t kvshm_retract(kvshm_segment table, const uint32_t *blocks, size_t count,
                      kvshm_record *out, uint32_t *draining, size_t *num_draining);

/* Blocks that are DRAINING, with no leases but those in `slow`, become EMPTY at generation + 1.
 * The other DRAINING blocks are packed to the front of `blocks`.  Returns their number.  The
 * function looks at each block once; the caller repeats the call within its drain budget. */
int64_t kvshm_drain(kvshm_segment table, uint32_t *blocks, size_t count, uint32_t slow);

/* Force DRAINING blocks to EMPTY at generation + 1 with no leases; *holders gets the union of
 * the lease bits that were overridden.  Returns how many slots were forced. */
int64_t kvshm_force(kvshm_segment table, const uint32_t *blocks, size_t count, uint32_t *holders);

/* Every slot -> EMPTY at generation + 1, whatever its state and leases.  Returns how many
 * slots were not EMPTY. */
int64_t kvshm_reset(kvshm_segment table);

/* kept[i] = 1 if the block is READY, and leased, or held at `now` (seconds since the table was
 * created).  Only a hint: both may change at any time.  Returns how many are. */
int64_t kvshm_kept(kvshm_segment table, const uint32_t *blocks, size_t count, uint32_t now,
                   uint8_t *kept);

/* A free block of the engine's own, and who else has the same block, of the same group. */
typedef struct {
    kvshm_record copy; /* hash, depth and group of the block; block id and generation of the copy */
    uint64_t parent;   /* first bytes of the hash before it in its chain; 0: none */
    uint32_t row;      /* of the copy's engine in the replica */
    uint32_t published_ms; /* since the table was created */
    enum { KVSHM_UNPUBLISHED, KVSHM_LAST_COPY, KVSHM_DUPLICATE } kind;
} kvshm_free_block;

/* Find out what free blocks are at this moment: a READY block is a duplicate if it is neither leased
 * nor held at `now`, and an engine in `tables` (by row of the replica; base NULL: none) would lease
 * the same one.  The replica gives hints, the other's table decides. */
int64_t kvshm_look_at_free(kvshm_segment table, kvshm_segment index, const kvshm_segment *tables,
                           const uint32_t *blocks, size_t count, uint32_t now,
                           kvshm_free_block *found);

/* Of how many duplicates the engine that has the copy would still lease it. */
int64_t kvshm_copies_there(const kvshm_segment *tables, kvshm_segment index,
                           const kvshm_free_block *duplicates, size_t count);

/* -- slots: importer's side ---------------------------------------------------------- */

/* Lease the longest possible prefix of `records` (hash, group and generation must match, READY) for
 * lease bit `bit` (-1: check only; the table may then be mapped read-only).  taken[i] = 1 if
 * the bit was set by this call, 0 if it was set already (another load of this engine holds
 * the lease) or bit is -1.  Nothing is leased if the table is retired, its epoch is not `epoch`, a
 * life word is not `epoch`, or one of its processes has died.  A block id that does not exist
 * ends the prefix, because records come from hints.  Returns the length of the leased prefix. */
int64_t kvshm_lease(kvshm_segment table, uint64_t epoch, int bit, const kvshm_record *records,
                    size_t count, uint8_t *taken);

/* Clear `bit` in each record's slot if its generation is still the record's and taken[i]
 * (NULL: all).  Returns how many bits were cleared. */
int64_t kvshm_release(kvshm_segment table, int bit, const kvshm_record *records, size_t count,
                      const uint8_t *taken);

/* Call this after the last byte was copied.  After an acquire fence, good[i] = 1 if the slot is not
 * EMPTY and has the record's generation.  No record is good if the table's epoch or the rank's life
 * word is not `epoch`, or if the rank's process has died.  Returns how many are good. */
int64_t kvshm_recheck(kvshm_segment table, uint64_t epoch, uint32_t rank,
                      const kvshm_record *records, size_t count, uint8_t *good);

/* Hold each record's block until `until` (seconds since the table was created; it is `now`): the
 * owner is asked to reuse other blocks first.  A later end that a hold has already stays, up to
 * KVSHM_MAX_HOLD_SECONDS ahead.  Nothing is held in a table that kvshm_lease would refuse, nor a
 * block whose slot is not READY with the record's hash, group and generation.  A slot that is
 * reused meanwhile may end up with the hold or without.  Returns how many blocks were found. */
int64_t kvshm_hold(kvshm_segment table, uint64_t epoch, const kvshm_record *records, size_t count,
                   uint32_t now, uint32_t until);

/* Clear the lease bits in `bits` in every slot; their owners are dead.  Returns how many slots
 * changed. */
int64_t kvshm_sweep(kvshm_segment table, uint32_t bits);

/* Collect stable READY slots from block `*next` on, at most `count`; advances *next (to
 * num_blocks at the end).  A slot that changes during the call may be left out: the change
 * causes an event of its own.  Returns how many records were written. */
int64_t kvshm_scan(kvshm_segment table, uint32_t *next, kvshm_record *records, size_t count);

/* The same of the blocks before `stop` only. */
int64_t kvshm_scan_part(kvshm_segment table, uint32_t *next, uint32_t stop, kvshm_record *records,
                        size_t count);

/* -- statistics ---------------------------------------------------------------------------- */

/* A block that several tables may have; zero: the place is free.  Private memory of the caller. */
typedef struct {
    uint64_t key;
    uint32_t owner;  /* number of the first table that has it, from 1 on */
    uint32_t shared; /* 1: another table has it, too */
} kvshm_census_cell;

typedef struct {
    uint64_t ready, draining, leased;
} kvshm_census;

/* Count a table's blocks and enter the READY ones into `places`, roughly while they change.  `room`
 * places, a power of two; *used, 0 at first, counts the slots of all tables so far.  KVSHM_INVALID
 * if they do not leave a place free. */
int64_t kvshm_census_add(kvshm_segment table, kvshm_census_cell *places, uint64_t room, uint64_t *used,
                         uint32_t number, kvshm_census *census);

/* How many blocks table `number` was the first to have, and how many no other table has. */
void kvshm_census_of(const kvshm_census_cell *places, uint64_t room, uint32_t number, uint64_t *distinct,
                     uint64_t *last_copies);

/* How many READY blocks of the table a replica lacks in the table's row, roughly while they change.
 * *oldest_ms: when the first of them was published, as slots have it; UINT32_MAX: none is. */
int64_t kvshm_census_missing(kvshm_segment table, kvshm_segment index, uint32_t row,
                             uint32_t *oldest_ms);

/* -- words of a table's header --------------------------------------------------------- */

/* 8-byte atomics at a checked, aligned offset of a segment. */
/* acquire */
int64_t kvshm_load(kvshm_segment segment, uint64_t offset, uint64_t *value);
/* seq_cst, then a seq_cst fence */
int64_t kvshm_store(kvshm_segment segment, uint64_t offset, uint64_t value);
/* acq_rel */
int64_t kvshm_add(kvshm_segment segment, uint64_t offset, uint64_t delta, uint64_t *before);
/* two kvshm_add: count a value in the histogram at that offset */
int64_t kvshm_observe(kvshm_segment segment, uint64_t histogram, uint64_t value);
/* acq_rel; returns 1 if the word was exchanged, else 0 */
int64_t kvshm_compare_exchange(kvshm_segment segment, uint64_t offset, uint64_t *expected,
                               uint64_t desired);
/* The 4-byte layout version, written last with release order. */
int64_t kvshm_mark_ready(kvshm_segment segment, uint32_t layout_version);

/* -- replica index ------------------------------------------------------------------- */

typedef struct {
    uint64_t added, removed, ignored, full;
} kvshm_applied;

/* An entry's tag mixes the first 8 bytes of its hash with its group; in group 0 it is these bytes.
 * Each call keeps the index's count and the entries that each row counts up to date.  An index may
 * have one writing thread, no more. */

/* Apply an ordered batch of one engine's events.  `tombstones` holds 16 bytes per block of that
 * engine, zeros at first.  A record is applied only if its generation is newer than the tombstone's
 * (as a signed 32-bit distance), or if it retracts the generation that the tombstone has as
 * published; other records, and those of an unknown kind, are counted as ignored.  A newer publish
 * replaces the block's entry.  When the index is filled to 3/4, a publish is counted in `full` and
 * leaves its tombstone unchanged, so that it can be applied again to a larger index.  The call adds
 * its counts to `*applied`.  Returns KVSHM_OK, or KVSHM_OUT_OF_RANGE before anything is applied if
 * a block id lies beyond the tombstones. */
int64_t kvshm_index_apply(kvshm_segment index, uint8_t *tombstones, uint64_t tombstone_bytes,
                          uint32_t row, const kvshm_record *records, size_t count,
                          kvshm_applied *applied);

/* A RETRACT record for every block that is published according to `tombstones` but missing in
 * `scanned`; instead of hash and group it has the tag, as a hash of group 0.  Returns the number of
 * records; `out` gets them unless it is NULL.  `seen`: one zeroed byte per block, for the call's
 * own use.  Blocks beyond the tombstones are skipped: kvshm_index_apply refuses them. */
size_t kvshm_index_stale(const uint8_t *tombstones, uint64_t tombstone_bytes,
                         const kvshm_record *scanned, size_t count, uint8_t *seen,
                         kvshm_record *out);

/* Remove all entries of a row; the caller zeroes its tombstones.  Returns how many were removed. */
int64_t kvshm_index_drop_row(kvshm_segment index, uint32_t row);

/* Copy an index into a larger one that is not in use yet: the rows, and the entries that name a row
 * in use and a block of that row's engine.  Returns the number of copied entries; KVSHM_INVALID if
 * they do not fit or `to` is not empty. */
int64_t kvshm_index_copy(kvshm_segment from, kvshm_segment to);

/* Records behind a search's `length` that kvshm_search_fetch reads ahead for, at most. */
#define KVSHM_SEARCH_AHEAD 64

/* A search for the longest prefix that rows in `rows` (bit mask) have, from as few rows as possible.
 * It takes its records part by part, so that a caller need not fill in what is never looked at.
 * `length` is that of the prefix so far; the other fields are the core's. */
typedef struct {
    size_t length, begin, fetched;
    uint64_t rows, candidates, capacity;
    uint8_t *base;
    int tries;
    uint64_t homes[KVSHM_SEARCH_AHEAD]; /* of the records before `fetched`, by their place */
} kvshm_search;

int kvshm_search_begin(kvshm_segment index, uint64_t rows, kvshm_search *search);

/* Fetch into the caches what the search will read for the records behind those that it was called
 * for, before `stop`, which have their hash and group. */
void kvshm_search_fetch(kvshm_search *search, const kvshm_record *records, size_t stop);

/* Go on, by hash and group, with the records behind `length` and before `stop`: each gets block_id,
 * generation and kind KVSHM_PUBLISH (the depth is the caller's), its owner the row.  Returns whether all of them were found; if
 * not, the search has ended.  Takes no lock against the writer: a torn read is a miss, or a wrong
 * hint, which the lease refuses. */
bool kvshm_search_on(kvshm_search *search, kvshm_record *records, size_t stop, uint8_t *owners);

/* Choose the owners of the prefix.  Returns its length; later records are not valid. */
size_t kvshm_search_end(kvshm_search *search, kvshm_record *records, uint8_t *owners);

/* The whole search of `count` records.  Returns the prefix's length. */
int64_t kvshm_index_lookup(kvshm_segment index, kvshm_record *records, size_t count,
                           uint64_t rows, uint8_t *owners);

/* -- copies ---------------------------------------------------------------------------- */

/* Copy blocks source[i] of every region of `from` onto target[i] of the same region of `to`, in
 * order.  Checks all ids, and that the regions agree in block_bytes, before it copies a byte.
 * Reads `stop`, unless NULL, before each block, and ends early if it is not 0.  Returns the number
 * of blocks copied in all regions. */
int64_t kvshm_copy_blocks(const kvshm_region *from, const kvshm_region *to, size_t regions,
                          const uint32_t *source, const uint32_t *target, size_t count,
                          const int32_t *stop);

/* -- tests: a process can be stopped or killed at every SYNC POINT -------------------- */

enum kvshm_sync_point {
    KVSHM_SYNC_PUBLISH_FILLED = 0, /* slot filled, word not yet READY */
    KVSHM_SYNC_PUBLISHED,          /* word READY, event not yet sent */
    KVSHM_SYNC_LEASE_LOADED,       /* word and hash read, CAS not yet tried */
    KVSHM_SYNC_LEASED,             /* bit set, copy not yet begun */
    KVSHM_SYNC_RETRACTED,          /* word no longer READY, event not yet sent */
    KVSHM_SYNC_FORCED,             /* generation advanced although there were leases */
    KVSHM_SYNC_CORE_COUNT
};
extern void (*kvshm_sync_hook)(int point); /* NULL in production */

#endif
