/* Replica index: lookups, beside the writer and in any number of processes.  Contracts: _core.h. */

#include "_core_index.h"

/* Rows of `rows` that hold the tag. */
static uint64_t rows_with(const index_view *index, uint64_t tag, uint64_t rows)
{
    uint64_t found = 0, position = home_of(index, tag);
    for (uint64_t step = 0; step < index->capacity; step++, position = after(index, position)) {
        entry e = entry_at(index, position);
        if (is_free(e))
            break;
        if (e.tag == tag && row_of(e) < KVSHM_NUM_ROWS)
            found |= (uint64_t)1 << row_of(e);
    }
    return found & rows;
}

static bool fill_record(const index_view *index, const uint8_t *hash, uint32_t row,
                        kvshm_record *record)
{
    uint64_t tag = tag_of(hash), position = home_of(index, tag);
    for (uint64_t step = 0; step < index->capacity; step++, position = after(index, position)) {
        entry e = entry_at(index, position);
        if (is_free(e))
            break;
        if (e.tag != tag || row_of(e) != row)
            continue;
        memcpy(record->hash, hash, KVSHM_HASH_BYTES);
        record->block_id = block_of(e);
        record->generation = (uint32_t)(e.place >> 32);
        record->depth = (uint32_t)(e.owner >> 32);
        record->kind = KVSHM_PUBLISH;
        return true;
    }
    return false;
}

static void own(uint8_t *owners, size_t from, size_t to, uint64_t candidates)
{
    if (from < to)
        memset(owners + from, __builtin_ctzll(candidates), to - from);
}

/* Cut the longest known prefix into as few owners as possible: keep the rows that hold all of
 * the current run, begin a new run where none is left. */
static size_t assign_owners(const index_view *index, const uint8_t *hashes, size_t count,
                            uint64_t rows, uint8_t *owners)
{
    uint64_t candidates = 0;
    size_t begin = 0, i = 0;
    for (; i < count; i++) {
        uint64_t holders = rows_with(index, tag_of(hashes + i * KVSHM_HASH_BYTES), rows);
        if (!holders)
            break;
        if (!(candidates & holders)) {
            own(owners, begin, i, candidates);
            begin = i;
            candidates = holders;
        }
        candidates &= holders;
    }
    own(owners, begin, i, candidates);
    return i;
}

int64_t kvshm_index_lookup(kvshm_segment segment, const uint8_t *hashes, size_t count,
                           uint64_t rows, kvshm_record *records, uint8_t *owners)
{
    index_view index;
    int status = open_index(segment, &index);
    if (status != KVSHM_OK)
        return status;
    const uint8_t *sequence = index.base + KVSHM_SEQUENCE_OFFSET;
    size_t length = 0;
    for (int attempt = 0; attempt < 4; attempt++) {
        uint64_t before = get_acquire(sequence); /* acquire: entries are read after it */
        size_t found = assign_owners(&index, hashes, count, rows, owners);
        for (length = 0; length < found; length++)
            if (!fill_record(&index, hashes + length * KVSHM_HASH_BYTES, owners[length],
                             &records[length]))
                break;
        atomic_thread_fence(memory_order_acquire); /* ... and before it is read again */
        if (!(before & 1) && get(sequence) == before)
            break;
    }
    return (int64_t)length;
}
