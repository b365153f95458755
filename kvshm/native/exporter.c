/* Slots, exporter's side: publish, retract, wait for leases, force.  Contracts: core.h. */

#include "core_words.h"

static bool publish_slot(uint8_t *slot, kvshm_record *record, uint64_t parent,
                         uint32_t published_ms)
{
    uint64_t word = get_acquire(slot);
    if (state_of(word) != KVSHM_EMPTY)
        return false;
    for (int i = 0; i < KVSHM_HASH_BYTES; i += 8) {
        uint64_t part;
        memcpy(&part, record->hash + i, 8);
        put(slot + KVSHM_SLOT_HASH_OFFSET + i, part);
    }
    put(slot + KVSHM_SLOT_PARENT_OFFSET, parent);
    enum { PUBLISHED_SHIFT = 8 * (KVSHM_SLOT_PUBLISHED_OFFSET - KVSHM_SLOT_DEPTH_OFFSET) };
    put(slot + KVSHM_SLOT_DEPTH_OFFSET, (uint64_t)published_ms << PUBLISHED_SHIFT | record->depth);
    put(slot + KVSHM_SLOT_GROUP_OFFSET, record->group); /* behind it, no hold */
    record->generation = generation_of(word);
    sync_point(KVSHM_SYNC_PUBLISH_FILLED);
    /* SYNC POINT: from here on importers may lease the block.  A failed CAS is not repeated: apart
     * from this function only a reset changes an EMPTY slot, and the reset must win. */
    return swap(slot, &word, make_word(record->generation, KVSHM_READY, 0));
}

int64_t kvshm_publish(kvshm_segment segment, kvshm_record *records, const uint64_t *parents,
                      size_t count, uint32_t published_ms)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_for_records(segment, &table, records, count));
    int64_t published = 0;
    for (size_t i = 0; i < count; i++) {
        if (count - i > SLOTS_AHEAD)
            __builtin_prefetch(slot_of(&table, records[i + SLOTS_AHEAD].block_id), 1);
        uint8_t *slot = slot_of(&table, records[i].block_id);
        bool done = publish_slot(slot, &records[i], parents[i], published_ms);
        records[i].kind = done ? KVSHM_PUBLISH : 0;
        published += done;
        if (done)
            sync_point(KVSHM_SYNC_PUBLISHED);
    }
    return published;
}

/* Change the loaded word to (generation + 1, EMPTY, no leases).  False if the slot's word is not
 * the loaded one any more; `*word` then holds the new one. */
static bool vacate(uint8_t *slot, uint64_t *word)
{
    return swap(slot, word, make_word(generation_of(*word) + 1, KVSHM_EMPTY, 0));
}

/* The exporter calls this before it tells anyone that a block may be written: then no write to the
 * block is seen before the words that were changed. */
static void fence_before_reuse(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

/* Take the slot out of READY.  Returns the word before the change; if the slot was not READY, the
 * word that it has. */
static uint64_t leave_ready(uint8_t *slot)
{
    uint64_t word = get_acquire(slot);
    while (state_of(word) == KVSHM_READY) {
        uint64_t leases = word & LEASES;
        if (leases ? swap(slot, &word, make_word(generation_of(word), KVSHM_DRAINING, leases))
                   : vacate(slot, &word))
            break;
    }
    return word;
}

int64_t kvshm_retract(kvshm_segment segment, const uint32_t *blocks, size_t count,
                      kvshm_record *out, uint32_t *draining, size_t *num_draining)
{
    table_view table;
    *num_draining = 0;
    RETURN_UNLESS_OK(kvshm_open_for_blocks(segment, &table, blocks, count));
    int64_t retracted = 0;
    for (size_t i = 0; i < count; i++) {
        if (count - i > SLOTS_AHEAD)
            __builtin_prefetch(slot_of(&table, blocks[i + SLOTS_AHEAD]), 1);
        uint8_t *slot = slot_of(&table, blocks[i]);
        uint64_t before = leave_ready(slot);
        if (state_of(before) == KVSHM_READY) {
            kvshm_record *record = &out[retracted++];
            read_fields(slot, record); /* only this process changes them, when it publishes */
            record->block_id = blocks[i];
            record->generation = generation_of(before);
            record->kind = KVSHM_RETRACT;
            sync_point(KVSHM_SYNC_RETRACTED);
        }
        if (state_of(before) != KVSHM_EMPTY && before & LEASES)
            draining[(*num_draining)++] = blocks[i];
    }
    fence_before_reuse();
    return retracted;
}

/* Whether the caller must wait for a slot; if not, the slot is not DRAINING any more. */
static bool must_wait(uint8_t *slot, uint32_t slow)
{
    uint64_t word = get_acquire(slot);
    while (state_of(word) == KVSHM_DRAINING) {
        if (word & LEASES & ~(uint64_t)slow)
            return true;
        if (vacate(slot, &word))
            break;
    }
    return false;
}

int64_t kvshm_drain(kvshm_segment segment, uint32_t *blocks, size_t count, uint32_t slow)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_for_blocks(segment, &table, blocks, count));
    int64_t waiting = 0;
    for (size_t i = 0; i < count; i++)
        if (must_wait(slot_of(&table, blocks[i]), slow))
            blocks[waiting++] = blocks[i];
    fence_before_reuse();
    return waiting;
}

int64_t kvshm_force(kvshm_segment segment, const uint32_t *blocks, size_t count, uint32_t *holders)
{
    table_view table;
    *holders = 0;
    RETURN_UNLESS_OK(kvshm_open_for_blocks(segment, &table, blocks, count));
    int64_t forced = 0;
    for (size_t i = 0; i < count; i++) {
        uint8_t *slot = slot_of(&table, blocks[i]);
        uint64_t word = get_acquire(slot);
        while (state_of(word) == KVSHM_DRAINING && !vacate(slot, &word)) {
        }
        if (state_of(word) == KVSHM_DRAINING) { /* `word` is what this call replaced */
            *holders |= (uint32_t)(word & LEASES);
            forced++;
            sync_point(KVSHM_SYNC_FORCED);
        }
    }
    fence_before_reuse();
    return forced;
}

int64_t kvshm_reset(kvshm_segment segment)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_table(segment, &table));
    int64_t occupied = 0;
    for (uint32_t block = 0; block < table.num_blocks; block++) {
        uint8_t *slot = slot_of(&table, block);
        uint64_t word = get_acquire(slot);
        while (!vacate(slot, &word)) {
        }
        occupied += state_of(word) != KVSHM_EMPTY;
    }
    fence_before_reuse();
    return occupied;
}

int64_t kvshm_kept(kvshm_segment segment, const uint32_t *blocks, size_t count, uint32_t now,
                   uint8_t *kept)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_for_blocks(segment, &table, blocks, count));
    int64_t found = 0;
    for (size_t i = 0; i < count; i++) {
        if (count - i > SLOTS_AHEAD)
            __builtin_prefetch(slot_of(&table, blocks[i + SLOTS_AHEAD]), 1);
        const uint8_t *slot = slot_of(&table, blocks[i]);
        uint64_t word = get(slot);
        kept[i] = state_of(word) == KVSHM_READY &&
                  (word & LEASES || hold_counts(get_half(slot + KVSHM_SLOT_HELD_OFFSET), now));
        found += kept[i];
    }
    return found;
}
