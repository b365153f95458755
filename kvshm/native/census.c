/* How many blocks are published, which are the last copies on the node, and what a replica lacks:
 * see core.h. */

#include "core_index.h"

static kvshm_census_cell *find(kvshm_census_cell *places, uint64_t mask, uint64_t key)
{
    uint64_t at = key;
    while (places[at & mask].owner && places[at & mask].key != key)
        at++;
    return &places[at & mask];
}

/* Where the block of a READY slot is counted.  While the slot changes, the hash may be torn. */
static kvshm_census_cell *place_of(const uint8_t *slot, kvshm_census_cell *places, uint64_t mask)
{
    uint64_t group = get_half(slot + KVSHM_SLOT_GROUP_OFFSET);
    uint64_t key = get(slot + KVSHM_SLOT_HASH_OFFSET) ^ group * GROUP_FACTOR;
    kvshm_census_cell *found = find(places, mask, key);
    found->key = key;
    return found;
}

int64_t kvshm_census_add(kvshm_segment segment, kvshm_census_cell *places, uint64_t room, uint64_t *used,
                         uint32_t number, kvshm_census *census)
{
    table_view table;
    RETURN_UNLESS_OK(kvshm_open_table(segment, &table));
    if (room & (room - 1) || *used > room || table.num_blocks >= room - *used)
        return KVSHM_INVALID; /* a place stays free, so that every search ends */
    *used += table.num_blocks;
    *census = (kvshm_census){0};
    for (uint32_t block = 0; block < table.num_blocks; block++) {
        const uint8_t *slot = table.slots + (uint64_t)KVSHM_SLOT_BYTES * block;
        uint64_t word = get_acquire(slot);
        uint32_t state = state_of(word);
        census->leased += (word & LEASES) != 0;
        census->draining += state == KVSHM_DRAINING;
        if (state != KVSHM_READY)
            continue;
        census->ready++;
        kvshm_census_cell *place = place_of(slot, places, room - 1);
        if (!place->owner)
            place->owner = number;
        else if (place->owner != number)
            place->shared = 1;
    }
    return KVSHM_OK;
}

void kvshm_census_of(const kvshm_census_cell *places, uint64_t room, uint32_t number, uint64_t *distinct,
                     uint64_t *last_copies)
{
    *distinct = *last_copies = 0;
    for (uint64_t at = 0; at < room; at++)
        if (places[at].owner == number) {
            ++*distinct;
            *last_copies += !places[at].shared;
        }
}

/* Whether the row's entry for this READY slot is in the index. */
static bool is_known(const index_view *index, uint32_t row, uint32_t block, const uint8_t *slot,
                     uint64_t word)
{
    uint64_t group = get_half(slot + KVSHM_SLOT_GROUP_OFFSET);
    uint64_t tag = get(slot + KVSHM_SLOT_HASH_OFFSET) ^ group * GROUP_FACTOR;
    kvshm_record sought = {.block_id = block, .generation = generation_of(word)};
    uint64_t place = make_place(row, &sought), position = home_of(index, tag);
    for (uint64_t step = 0; step < index->capacity; step++, position = after(index, position)) {
        entry e = entry_at(index, position);
        if (is_free(e))
            break;
        if (e.tag == tag && e.place == place)
            return true;
    }
    return false;
}

int64_t kvshm_census_missing(kvshm_segment segment, kvshm_segment replica, uint32_t row,
                             uint32_t *oldest_ms)
{
    table_view table;
    index_view index;
    RETURN_UNLESS_OK(kvshm_open_table(segment, &table));
    RETURN_UNLESS_OK(open_index(replica, &index));
    int64_t missing = 0;
    *oldest_ms = UINT32_MAX;
    for (uint32_t block = 0; block < table.num_blocks; block++) {
        const uint8_t *slot = table.slots + (uint64_t)KVSHM_SLOT_BYTES * block;
        uint64_t word = get_acquire(slot);
        if (state_of(word) != KVSHM_READY || is_known(&index, row, block, slot, word))
            continue;
        uint32_t published_ms = get_half(slot + KVSHM_SLOT_PUBLISHED_OFFSET);
        if (published_ms < *oldest_ms)
            *oldest_ms = published_ms;
        missing++;
    }
    return missing;
}
