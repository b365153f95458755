/* Which of an engine's own free blocks other engines have, too.  Contract: core.h. */

#include "core_index.h"

enum { FETCHED = 16 }; /* blocks looked at together; the slots of the next ones are fetched */

typedef struct {
    uint64_t tag, position, steps;
} probe; /* where a block is looked for in the index */

typedef struct {
    const kvshm_segment *tables;
    index_view index;
    uint64_t row; /* whose table was opened last; KVSHM_NUM_ROWS: none */
    bool usable;
    table_view table;
} peers;

/* Open a table, unless it is open: false if the engine has died, or no longer has this table. */
static bool open_row(peers *p, uint64_t row)
{
    if (p->row != row) {
        uint64_t epoch = get(p->index.base + KVSHM_ROWS_OFFSET + row * KVSHM_ROW_BYTES);
        p->row = row;
        p->usable = p->tables[row].base && kvshm_open_table(p->tables[row], &p->table) == KVSHM_OK &&
                    kvshm_is_alive(&p->table, epoch);
    }
    return p->usable;
}

/* Whether the engine would lease the copy. */
static bool would_lease(peers *p, const kvshm_free_block *block)
{
    if (!open_row(p, block->row) || block->copy.block_id >= p->table.num_blocks)
        return false;
    const uint8_t *slot = slot_of(&p->table, block->copy.block_id);
    return kvshm_is_named(slot, get_acquire(slot), &block->copy);
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

/* Go on through the index to the next entry that may be a copy; false if there is none. */
static bool next_copy(const peers *p, probe *at, kvshm_free_block *block)
{
    const index_view *index = &p->index;
    for (; at->steps < index->capacity; at->steps++, at->position = after(index, at->position)) {
        entry e = entry_at(index, at->position);
        if (is_free(e))
            return false;
        if (e.tag != at->tag || row_of(e) >= KVSHM_NUM_ROWS || !p->tables[row_of(e)].base)
            continue;
        block->row = row_of(e);
        block->copy.block_id = block_of(e);
        block->copy.generation = generation_in(e);
        return true;
    }
    return false;
}

/* Look at FETCHED blocks at most: first at their own slots, then in the index, last in the others'
 * tables, so that what one step needs is fetched while the one before goes through all of them. */
static void look(peers *p, const table_view *own, const uint32_t *blocks, size_t count, uint32_t now,
                 kvshm_free_block *found)
{
    probe at[FETCHED];
    for (size_t i = 0; i < count; i++) {
        read_slot(slot_of(own, blocks[i]), now, &found[i]);
        uint64_t tag = tag_of(&found[i].copy);
        at[i] = (probe){tag, home_of(&p->index, tag), 0};
        if (found[i].kind == KVSHM_DUPLICATE)
            __builtin_prefetch(address_of(&p->index, at[i].position));
    }
    for (size_t i = 0; i < count; i++) {
        if (found[i].kind != KVSHM_DUPLICATE)
            continue;
        if (!next_copy(p, &at[i], &found[i]))
            found[i].kind = KVSHM_LAST_COPY;
        else if (open_row(p, found[i].row) && found[i].copy.block_id < p->table.num_blocks)
            __builtin_prefetch(slot_of(&p->table, found[i].copy.block_id));
    }
    for (size_t i = 0; i < count; i++)
        while (found[i].kind == KVSHM_DUPLICATE && !would_lease(p, &found[i])) {
            at[i].steps++;
            at[i].position = after(&p->index, at[i].position);
            if (!next_copy(p, &at[i], &found[i]))
                found[i].kind = KVSHM_LAST_COPY;
        }
}

int64_t kvshm_look_at_free(kvshm_segment segment, kvshm_segment replica, const kvshm_segment *tables,
                           const uint32_t *blocks, size_t count, uint32_t now,
                           kvshm_free_block *found)
{
    table_view table;
    peers p = {.tables = tables, .row = KVSHM_NUM_ROWS};
    RETURN_UNLESS_OK(kvshm_open_for_blocks(segment, &table, blocks, count));
    RETURN_UNLESS_OK(open_index(replica, &p.index));
    for (size_t begin = 0; begin < count; begin += FETCHED) {
        size_t end = count - begin < FETCHED ? count : begin + FETCHED;
        for (size_t i = end; i < count && i < end + FETCHED; i++)
            __builtin_prefetch(slot_of(&table, blocks[i]));
        look(&p, &table, &blocks[begin], end - begin, now, &found[begin]);
    }
    return KVSHM_OK;
}

int64_t kvshm_copies_there(const kvshm_segment *tables, kvshm_segment replica,
                           const kvshm_free_block *duplicates, size_t count)
{
    peers p = {.tables = tables, .row = KVSHM_NUM_ROWS};
    RETURN_UNLESS_OK(open_index(replica, &p.index));
    int64_t there = 0;
    for (size_t i = 0; i < count; i++)
        there += duplicates[i].row < KVSHM_NUM_ROWS && would_lease(&p, &duplicates[i]);
    return there;
}
