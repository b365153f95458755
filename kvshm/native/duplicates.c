/* Which of an engine's own free blocks other engines have, too.  Contract: core.h. */

#include "core_index.h"

enum { FETCHED = 16 }; /* blocks whose entries, and before these their slots, are fetched ahead */

static bool would_lease(const kvshm_segment *tables, const index_view *index,
                        const kvshm_free_block *block)
{
    uint8_t taken;
    uint64_t epoch = get(index->base + KVSHM_ROWS_OFFSET + block->row * KVSHM_ROW_BYTES);
    return kvshm_lease(tables[block->row], epoch, -1, &block->copy, 1, &taken) == 1;
}

static void read_slot(const uint8_t *slot, uint32_t now, kvshm_free_block *block)
{
    uint64_t word = get(slot);
    block->kind = KVSHM_UNPUBLISHED;
    if (state_of(word) != KVSHM_READY)
        return;
    read_fields(slot, &block->copy); /* only this process changes them */
    block->parent = get(slot + KVSHM_SLOT_PARENT_OFFSET);
    block->published_ms = get_half(slot + KVSHM_SLOT_PUBLISHED_OFFSET);
    bool kept = word & LEASES || hold_counts(get_half(slot + KVSHM_SLOT_HELD_OFFSET), now);
    block->kind = kept ? KVSHM_LAST_COPY : KVSHM_DUPLICATE; /* until no copy is found */
}

static bool find_copy(const index_view *index, const kvshm_segment *tables, kvshm_free_block *block)
{
    uint64_t tag = tag_of(&block->copy), position = home_of(index, tag);
    for (uint64_t step = 0; step < index->capacity; step++, position = after(index, position)) {
        entry e = entry_at(index, position);
        if (is_free(e))
            break;
        if (e.tag != tag || row_of(e) >= KVSHM_NUM_ROWS || !tables[row_of(e)].base)
            continue;
        block->row = row_of(e);
        block->copy.block_id = block_of(e);
        block->copy.generation = generation_in(e);
        if (would_lease(tables, index, block))
            return true;
    }
    return false;
}

int64_t kvshm_look_at_free(kvshm_segment segment, kvshm_segment replica, const kvshm_segment *tables,
                           const uint32_t *blocks, size_t count, uint32_t now,
                           kvshm_free_block *found)
{
    table_view table;
    index_view index;
    RETURN_UNLESS_OK(kvshm_open_for_blocks(segment, &table, blocks, count));
    RETURN_UNLESS_OK(open_index(replica, &index));
    for (size_t begin = 0; begin < count; begin += FETCHED) {
        size_t end = count - begin < FETCHED ? count : begin + FETCHED;
        for (size_t i = begin; i < end; i++) {
            if (i + FETCHED < count)
                __builtin_prefetch(slot_of(&table, blocks[i + FETCHED]));
            read_slot(slot_of(&table, blocks[i]), now, &found[i]);
            if (found[i].kind == KVSHM_DUPLICATE)
                __builtin_prefetch(
                    address_of(&index, home_of(&index, tag_of(&found[i].copy))));
        }
        for (size_t i = begin; i < end; i++)
            if (found[i].kind == KVSHM_DUPLICATE && !find_copy(&index, tables, &found[i]))
                found[i].kind = KVSHM_LAST_COPY;
    }
    return KVSHM_OK;
}

bool kvshm_copy_is_there(const kvshm_segment *tables, kvshm_segment replica,
                         const kvshm_free_block *duplicate)
{
    index_view index;
    return open_index(replica, &index) == KVSHM_OK && duplicate->row < KVSHM_NUM_ROWS &&
           tables[duplicate->row].base && would_lease(tables, &index, duplicate);
}
