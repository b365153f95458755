/* How many blocks are published, and which are the last copies on the node: see core.h. */

#include "core_words.h"

static kvshm_place *find(kvshm_place *places, uint64_t mask, uint64_t key)
{
    uint64_t at = key;
    while (places[at & mask].owner && places[at & mask].key != key)
        at++;
    return &places[at & mask];
}

/* Where the block of a READY slot is counted.  While the slot changes, the hash may be torn. */
static kvshm_place *place_of(const uint8_t *slot, kvshm_place *places, uint64_t mask)
{
    uint64_t group = get_half(slot + KVSHM_SLOT_GROUP_OFFSET);
    uint64_t key = get(slot + KVSHM_SLOT_HASH_OFFSET) ^ group * 0x9e3779b97f4a7c15u;
    kvshm_place *found = find(places, mask, key);
    found->key = key;
    return found;
}

int64_t kvshm_census_add(kvshm_segment segment, kvshm_place *places, uint64_t room, uint64_t *used,
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
        uint64_t state = word >> KVSHM_STATE_SHIFT & 0xF;
        census->leased += (word & KVSHM_LEASE_MASK) != 0;
        census->draining += state == KVSHM_DRAINING;
        if (state != KVSHM_READY)
            continue;
        census->ready++;
        kvshm_place *place = place_of(slot, places, room - 1);
        if (!place->owner)
            place->owner = number;
        else if (place->owner != number)
            place->shared = 1;
    }
    return KVSHM_OK;
}

void kvshm_census_of(const kvshm_place *places, uint64_t room, uint32_t number, uint64_t *distinct,
                     uint64_t *last_copies)
{
    *distinct = *last_copies = 0;
    for (uint64_t at = 0; at < room; at++)
        if (places[at].owner == number) {
            ++*distinct;
            *last_copies += !places[at].shared;
        }
}
