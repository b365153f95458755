/* What the files of the core share: atomic access to words, and checked views of segments.  Only
 * the core includes this file. */
#ifndef KVSHM_CORE_WORDS_H
#define KVSHM_CORE_WORDS_H

#include "core.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

static inline void sync_point(enum kvshm_sync_point point)
{
    if (kvshm_sync_hook)
        kvshm_sync_hook((int)point);
}

/* Return from the function with the status of `call` unless that is KVSHM_OK. */
#define RETURN_UNLESS_OK(call)            \
    do {                                  \
        int status_of_call = (call);      \
        if (status_of_call != KVSHM_OK)   \
            return status_of_call;        \
    } while (0)

/* -- words -------------------------------------------------------------------------------- */

static inline _Atomic uint64_t *word_at(const uint8_t *address)
{
    return (_Atomic uint64_t *)(uintptr_t)address;
}

static inline uint64_t get(const uint8_t *address)
{
    return atomic_load_explicit(word_at(address), memory_order_relaxed);
}

static inline uint32_t get_half(const uint8_t *address)
{
    return atomic_load_explicit((_Atomic uint32_t *)(uintptr_t)address, memory_order_relaxed);
}

static inline void put(uint8_t *address, uint64_t value)
{
    atomic_store_explicit(word_at(address), value, memory_order_relaxed);
}

static inline uint64_t get_acquire(const uint8_t *address)
{
    return atomic_load_explicit(word_at(address), memory_order_acquire);
}

/* acq_rel: the caller sees what other processes did before they changed the word, and they see the
 * caller's earlier writes once they see this change. */
static inline bool swap(uint8_t *address, uint64_t *expected, uint64_t desired)
{
    return atomic_compare_exchange_strong_explicit(word_at(address), expected, desired,
                                                   memory_order_acq_rel, memory_order_acquire);
}

#define LEASES ((uint64_t)KVSHM_LEASE_MASK) /* so wide that ~LEASES keeps state and generation */
#define STATES ((1u << (KVSHM_GENERATION_SHIFT - KVSHM_STATE_SHIFT)) - 1)

static inline uint64_t make_word(uint32_t generation, enum kvshm_state state, uint64_t leases)
{
    return (uint64_t)generation << KVSHM_GENERATION_SHIFT | (uint64_t)state << KVSHM_STATE_SHIFT |
           leases;
}

static inline uint32_t generation_of(uint64_t word)
{
    return (uint32_t)(word >> KVSHM_GENERATION_SHIFT);
}

static inline uint32_t state_of(uint64_t word) { return word >> KVSHM_STATE_SHIFT & STATES; }

/* Whether a hold until `held` counts at `now`: seconds modulo 2^32, in which 0 stands for no hold.
 * One that ends too far ahead was set before the machine's clock was set back. */
static inline bool hold_counts(uint32_t held, uint32_t now)
{
    uint32_t left = held - now;
    return held && left && left <= KVSHM_MAX_HOLD_SECONDS;
}

/* -- views: every number of a header is read once and checked before it is used ------------- */

typedef struct {
    uint8_t *base, *slots;
    uint32_t num_blocks, num_ranks;
} table_view;

/* Check the header that all segments share; *bytes gets the length that the segment states. */
int kvshm_open_segment(kvshm_segment segment, uint32_t header_bytes, uint64_t *bytes);

/* Check a slot table; the second and third function also check every block id. */
int kvshm_open_table(kvshm_segment segment, table_view *table);
int kvshm_open_for_records(kvshm_segment segment, table_view *table, const kvshm_record *records,
                           size_t count);
int kvshm_open_for_blocks(kvshm_segment segment, table_view *table, const uint32_t *blocks,
                          size_t count);

/* Whether all processes of an engine live, and its table is of this epoch (importer.c). */
bool kvshm_is_alive(const table_view *table, uint64_t epoch);

/* Whether a slot, whose word was loaded (acquire), is READY with what the record says. */
bool kvshm_is_named(const uint8_t *slot, uint64_t word, const kvshm_record *record);

static inline uint8_t *slot_of(const table_view *table, uint32_t block_id)
{
    return table->slots + (uint64_t)block_id * KVSHM_SLOT_BYTES;
}

/* While one block's slot is changed, the slot of the block this far ahead is fetched. */
enum { SLOTS_AHEAD = 12 };

/* Read a slot's hash, depth and group.  They may change meanwhile, so each word is read
 * atomically.  A group that no record can have is cut: a wrong hint, which no lease accepts. */
static inline void read_fields(const uint8_t *slot, kvshm_record *record)
{
    for (int i = 0; i < KVSHM_HASH_BYTES; i += 8) {
        uint64_t part = get(slot + KVSHM_SLOT_HASH_OFFSET + i);
        memcpy(record->hash + i, &part, 8);
    }
    record->depth = get_half(slot + KVSHM_SLOT_DEPTH_OFFSET);
    record->group = (uint16_t)get_half(slot + KVSHM_SLOT_GROUP_OFFSET);
}

#endif
