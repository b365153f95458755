/* Slots, importer's side: lease, re-check, release, hold; sweep and scan.  Contracts: core.h. */

#include "core_words.h"

/* Fetch the slot that the loop over records will come to; `for_write`: to change its word. */
#define FETCH_AHEAD(table, records, i, count, for_write)                                        \
    do {                                                                                        \
        if ((count) - (i) > SLOTS_AHEAD &&                                                      \
            (records)[(i) + SLOTS_AHEAD].block_id < (table)->num_blocks)                        \
            __builtin_prefetch(slot_of(table, (records)[(i) + SLOTS_AHEAD].block_id), for_write); \
    } while (0)

/* Whether the slot has the record's hash and group. */
static bool same_key(const uint8_t *slot, const kvshm_record *record)
{
    uint64_t difference = get_half(slot + KVSHM_SLOT_GROUP_OFFSET) ^ record->group;
    for (int i = 0; i < KVSHM_HASH_BYTES; i += 8) {
        uint64_t wanted;
        memcpy(&wanted, record->hash + i, 8);
        difference |= wanted ^ get(slot + KVSHM_SLOT_HASH_OFFSET + i);
    }
    return difference == 0;
}

/* Process 0 is the table's owner, process 1 + r its rank r. */
static bool has_died(const table_view *table, uint32_t process)
{
    return get(table->base + KVSHM_PULSES_OFFSET + 8 * process) & KVSHM_PULSE_DIED;
}

bool kvshm_is_alive(const table_view *table, uint64_t epoch)
{
    /* acquire: a caller that finds the table alive sees the table as its owner made it */
    bool good = get_acquire(table->base + KVSHM_EPOCH_OFFSET) == epoch &&
                get_acquire(table->base + KVSHM_RETIRED_OFFSET) == 0 && !has_died(table, 0);
    for (uint32_t rank = 0; good && rank < table->num_ranks; rank++)
        good = get_acquire(table->base + KVSHM_LIFE_OFFSET + 8 * rank) == epoch &&
               !has_died(table, 1 + rank);
    return good;
}

bool kvshm_is_named(const uint8_t *slot, uint64_t word, const kvshm_record *record)
{
    return state_of(word) == KVSHM_READY && generation_of(word) == record->generation &&
           same_key(slot, record);
}

/* Set the bit of `mask` in the slot's word if the slot is READY with the record's generation,
 * hash and group.  Returns -1 if the slot is not so, else whether the bit is new.  If `mask` is 0,
 * the function only checks the slot. */
static int lease_slot(uint8_t *slot, const kvshm_record *record, uint64_t mask)
{
    uint64_t word = get_acquire(slot); /* acquire: the hash is read after the word */
    for (;;) {
        if (!kvshm_is_named(slot, word, record))
            return -1;
        sync_point(KVSHM_SYNC_LEASE_LOADED);
        if (!mask)
            return 0;
        uint64_t before = word;
        /* SYNC POINT: from here on the exporter waits for this lease.  The CAS is made even if the
         * bit is set already, because only a CAS proves that word and hash belonged together. */
        if (swap(slot, &word, word | mask))
            return !(before & mask);
    }
}

int64_t kvshm_lease(kvshm_segment segment, uint64_t epoch, int bit, const kvshm_record *records,
                    size_t count, uint8_t *taken)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_table(segment, &table));
    if (bit < -1 || bit >= KVSHM_NUM_LEASE_BITS)
        return KVSHM_OUT_OF_RANGE;
    if (!kvshm_is_alive(&table, epoch))
        return 0;
    uint64_t mask = bit < 0 ? 0 : (uint64_t)1 << bit;
    size_t length = 0;
    for (; length < count; length++) {
        if (records[length].block_id >= table.num_blocks)
            break;
        FETCH_AHEAD(&table, records, length, count, 1);
        int new_bit = lease_slot(slot_of(&table, records[length].block_id), &records[length], mask);
        if (new_bit < 0)
            break;
        taken[length] = (uint8_t)new_bit;
        if (mask)
            sync_point(KVSHM_SYNC_LEASED);
    }
    return (int64_t)length;
}

/* Clear the bits of `mask`, if the slot has that generation (NULL: any).  Returns whether a bit was
 * cleared.  release: this process's reads of the block come before the change; the exporter's CAS
 * acquires the change, so the exporter writes the block after those reads. */
static bool clear_leases(uint8_t *slot, uint64_t mask, const uint32_t *generation)
{
    uint64_t word = get(slot);
    while (word & mask && (!generation || generation_of(word) == *generation))
        if (atomic_compare_exchange_strong_explicit(word_at(slot), &word, word & ~mask,
                                                    memory_order_release, memory_order_relaxed))
            return true;
    return false;
}

int64_t kvshm_release(kvshm_segment segment, int bit, const kvshm_record *records, size_t count,
                      const uint8_t *taken)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_for_records(segment, &table, records, count));
    if (bit < 0 || bit >= KVSHM_NUM_LEASE_BITS)
        return KVSHM_OUT_OF_RANGE;
    int64_t released = 0;
    for (size_t i = 0; i < count; i++) {
        FETCH_AHEAD(&table, records, i, count, 1);
        if (!taken || taken[i])
            released += clear_leases(slot_of(&table, records[i].block_id), (uint64_t)1 << bit,
                                     &records[i].generation);
    }
    return released;
}

int64_t kvshm_recheck(kvshm_segment segment, uint64_t epoch, uint32_t rank,
                      const kvshm_record *records, size_t count, uint8_t *good)
{
    /* acquire fence: every byte copied before this line was read before the words below are */
    atomic_thread_fence(memory_order_acquire);
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_for_records(segment, &table, records, count));
    if (rank >= table.num_ranks)
        return KVSHM_OUT_OF_RANGE;
    bool valid = get(table.base + KVSHM_EPOCH_OFFSET) == epoch &&
                 get(table.base + KVSHM_LIFE_OFFSET + 8 * rank) == epoch &&
                 !has_died(&table, 1 + rank);
    int64_t passed = 0;
    for (size_t i = 0; i < count; i++) {
        FETCH_AHEAD(&table, records, i, count, 0);
        uint64_t word = get(slot_of(&table, records[i].block_id));
        good[i] = valid && state_of(word) != KVSHM_EMPTY &&
                  generation_of(word) == records[i].generation;
        passed += good[i];
    }
    return passed;
}

/* A hold is a hint: nothing is ordered against a reuse or another holder's hold. */
static void raise_hold(uint8_t *slot, uint32_t now, uint32_t until)
{
    uint8_t *at = slot + KVSHM_SLOT_HELD_OFFSET;
    uint32_t held = get_half(at);
    while (!(hold_counts(held, now) && held - now >= until - now) &&
           !atomic_compare_exchange_strong_explicit((_Atomic uint32_t *)(uintptr_t)at, &held, until,
                                                    memory_order_relaxed, memory_order_relaxed)) {
    }
}

int64_t kvshm_hold(kvshm_segment segment, uint64_t epoch, const kvshm_record *records, size_t count,
                   uint32_t now, uint32_t until)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_table(segment, &table));
    int64_t found = 0;
    if (!kvshm_is_alive(&table, epoch))
        return 0;
    for (size_t i = 0; i < count; i++) {
        if (records[i].block_id >= table.num_blocks)
            continue;
        uint8_t *slot = slot_of(&table, records[i].block_id);
        if (kvshm_is_named(slot, get_acquire(slot), &records[i])) {
            raise_hold(slot, now, until);
            found++;
        }
    }
    return found;
}

int64_t kvshm_sweep(kvshm_segment segment, uint32_t bits)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_table(segment, &table));
    int64_t changed = 0;
    for (uint32_t block = 0; block < table.num_blocks; block++)
        changed += clear_leases(slot_of(&table, block), bits & LEASES, NULL);
    return changed;
}

/* Read one slot as a seq-lock.  Returns false if the slot is not READY or changes meanwhile: the
 * change causes an event of its own. */
static bool read_ready(const uint8_t *slot, kvshm_record *record)
{
    uint64_t before = get_acquire(slot); /* acquire: the fields are read after the word */
    if (state_of(before) != KVSHM_READY)
        return false;
    read_fields(slot, record);
    atomic_thread_fence(memory_order_acquire); /* acquire: it is read again after the fields */
    uint64_t after = get(slot);
    record->generation = generation_of(before);
    record->kind = KVSHM_PUBLISH;
    return (before & ~LEASES) == (after & ~LEASES);
}

int64_t kvshm_scan(kvshm_segment segment, uint32_t *next, kvshm_record *records, size_t count)
{
    return kvshm_scan_part(segment, next, UINT32_MAX, records, count);
}

int64_t kvshm_scan_part(kvshm_segment segment, uint32_t *next, uint32_t stop,
                        kvshm_record *records, size_t count)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_table(segment, &table));
    size_t found = 0;
    for (; *next < table.num_blocks && *next < stop && found < count; ++*next)
        if (read_ready(slot_of(&table, *next), &records[found]))
            records[found++].block_id = *next;
    return (int64_t)found;
}

