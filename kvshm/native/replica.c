/* Replica index: its one writer.  core_index.h has the layout, lookup.c the readers.  Contracts:
 * core.h.
 *
 * A removal leaves no mark; it moves later entries back, so that chains stay short.  At most 3/4 of
 * the entries are in use, so that each chain ends soon. */

#include "core_index.h"

static void set_entry(const index_view *index, uint64_t position, entry value)
{
    uint8_t *at = index->entries + position * KVSHM_ENTRY_BYTES;
    put(at, value.tag);
    put(at + 8, value.place);
}

static uint64_t begin_write(const index_view *index)
{
    uint64_t sequence = get(index->base + KVSHM_SEQUENCE_OFFSET) | 1;
    put(index->base + KVSHM_SEQUENCE_OFFSET, sequence);
    atomic_thread_fence(memory_order_release); /* release: odd before the first entry changes */
    return sequence;
}

static void end_write(const index_view *index, uint64_t sequence)
{
    /* release: even after the last entry has changed */
    atomic_store_explicit(word_at(index->base + KVSHM_SEQUENCE_OFFSET), sequence + 1,
                          memory_order_release);
}

static uint8_t *row_at(const index_view *index, uint32_t row)
{
    return index->base + KVSHM_ROWS_OFFSET + row * KVSHM_ROW_BYTES;
}

static void count_entry(const index_view *index, uint32_t row, uint64_t change)
{
    uint8_t *total = index->base + KVSHM_COUNT_OFFSET;
    uint8_t *of_row = row_at(index, row) + KVSHM_ROW_ENTRIES_OFFSET;
    put(total, get(total) + change);
    put(of_row, get(of_row) + change);
}

static int insert(const index_view *index, entry value)
{
    if (get(index->base + KVSHM_COUNT_OFFSET) >= index->capacity / 4 * 3)
        return KVSHM_FULL;
    uint64_t position = home_of(index, value.tag);
    for (uint64_t step = 0; step < index->capacity; step++, position = after(index, position))
        if (is_free(entry_at(index, position))) {
            set_entry(index, position, value);
            count_entry(index, row_of(value), 1);
            return KVSHM_OK;
        }
    return KVSHM_CORRUPT; /* the count said that there was room */
}

/* Remove the entry of `row` at position `hole` and close the hole: move back each later entry of
 * the chain whose home allows that.  The row comes from the caller, who has checked it: any process
 * of the user may write to the index, so the entry may name another row when it is read again. */
static int remove_at(const index_view *index, uint64_t hole, uint32_t row)
{
    uint64_t mask = index->capacity - 1, position = hole;
    count_entry(index, row, (uint64_t)-1);
    for (uint64_t step = 0; step < index->capacity; step++) {
        position = after(index, position);
        entry e = entry_at(index, position);
        if (is_free(e)) {
            set_entry(index, hole, (entry){0, 0});
            return KVSHM_OK;
        }
        uint64_t from_home = (position - home_of(index, e.tag)) & mask;
        if (from_home >= ((position - hole) & mask)) {
            set_entry(index, hole, e);
            hole = position;
        }
    }
    return KVSHM_CORRUPT;
}

/* Returns 1 if the block's entry was removed, 0 if there was none, or a status below 0. */
static int remove_entry(const index_view *index, uint64_t tag, uint32_t row, uint32_t block)
{
    uint64_t position = home_of(index, tag);
    for (uint64_t step = 0; step < index->capacity; step++, position = after(index, position)) {
        entry e = entry_at(index, position);
        if (is_free(e))
            return 0;
        if (e.tag == tag && row_of(e) == row && block_of(e) == block) {
            int status = remove_at(index, position, row);
            return status == KVSHM_OK ? 1 : status;
        }
    }
    return KVSHM_CORRUPT;
}

enum { UNHEARD = 0, PUBLISHED = KVSHM_PUBLISH, RETRACTED = KVSHM_RETRACT };

typedef struct {
    uint64_t tag;
    uint32_t state, generation;
} tombstone;

_Static_assert(sizeof(tombstone) == KVSHM_TOMBSTONE_BYTES, "tombstones have no padding");

/* Whether the record is newer than everything known of its block.  The distance is signed because
 * generations wrap. */
static bool is_news(const tombstone *known, const kvshm_record *record)
{
    int32_t distance = (int32_t)(record->generation - known->generation);
    if (record->kind != KVSHM_PUBLISH && record->kind != KVSHM_RETRACT)
        return false;
    if (known->state == UNHEARD || distance > 0)
        return true;
    return distance == 0 && known->state == PUBLISHED && record->kind == KVSHM_RETRACT;
}

static int apply_record(const index_view *index, tombstone *known, uint32_t row,
                        const kvshm_record *record, kvshm_applied *applied)
{
    if (!is_news(known, record)) {
        applied->ignored++;
        return KVSHM_OK;
    }
    if (known->state == PUBLISHED) {
        int removed = remove_entry(index, known->tag, row, record->block_id);
        if (removed < 0)
            return removed;
        applied->removed += (uint64_t)removed;
    }
    tombstone heard = {tag_of(record), record->kind, record->generation};
    if (record->kind == KVSHM_PUBLISH) {
        int status = insert(index, (entry){heard.tag, make_place(row, record)});
        if (status == KVSHM_FULL) { /* then nothing was removed: the tombstone is still right */
            applied->full++;
            return KVSHM_OK;
        }
        RETURN_UNLESS_OK(status);
        applied->added++;
    }
    *known = heard;
    return KVSHM_OK;
}

/* While one record is applied, the memory of later ones is fetched: first their tombstones, and then
 * where the entries lie that these and the records name: a third of the time in a large index.
 * Always inline: gcc leaves out calls of a function that only fetches. */
enum { RECORDS_AHEAD = 8 };

static inline __attribute__((always_inline)) void
fetch_entries(const index_view *index, const tombstone *heard, const kvshm_record *record)
{
    uint64_t homes[] = {home_of(index, tag_of(record)),
                        home_of(index, heard[record->block_id].tag)};
    for (int i = 0; i < 2; i++)
        __builtin_prefetch(index->entries + homes[i] * KVSHM_ENTRY_BYTES, 1);
}

int64_t kvshm_index_apply(kvshm_segment segment, uint8_t *tombstones, uint64_t tombstone_bytes,
                          uint32_t row, const kvshm_record *records, size_t count,
                          kvshm_applied *applied)
{
    index_view index;
    RETURN_UNLESS_OK(open_index(segment, &index));
    if ((uintptr_t)tombstones % 8)
        return KVSHM_INVALID;
    if (row >= KVSHM_NUM_ROWS)
        return KVSHM_OUT_OF_RANGE;
    uint64_t num_blocks = tombstone_bytes / KVSHM_TOMBSTONE_BYTES;
    for (size_t i = 0; i < count; i++)
        if (records[i].block_id >= num_blocks || records[i].block_id >= KVSHM_MAX_BLOCKS)
            return KVSHM_OUT_OF_RANGE;
    int status = KVSHM_OK;
    uint64_t sequence = begin_write(&index);
    tombstone *heard = (tombstone *)(void *)tombstones;
    for (size_t i = 0; i < count && status == KVSHM_OK; i++) {
        if (count - i > 2 * RECORDS_AHEAD)
            __builtin_prefetch(heard + records[i + 2 * RECORDS_AHEAD].block_id, 1);
        if (count - i > RECORDS_AHEAD)
            fetch_entries(&index, heard, &records[i + RECORDS_AHEAD]);
        tombstone *known = heard + records[i].block_id;
        status = apply_record(&index, known, row, &records[i], applied);
    }
    end_write(&index, sequence);
    return status;
}

size_t kvshm_index_stale(const uint8_t *tombstones, uint64_t tombstone_bytes,
                         const kvshm_record *scanned, size_t count, uint8_t *seen,
                         kvshm_record *out)
{
    uint64_t num_blocks = tombstone_bytes / KVSHM_TOMBSTONE_BYTES;
    size_t stale = 0;
    for (size_t i = 0; i < count; i++)
        if (scanned[i].block_id < num_blocks)
            seen[scanned[i].block_id] = 1;
    for (uint64_t block = 0; block < num_blocks; block++) {
        tombstone known;
        memcpy(&known, tombstones + block * sizeof known, sizeof known);
        if (known.state != PUBLISHED || seen[block])
            continue;
        if (out) {
            kvshm_record gone = {{0}, (uint32_t)block, known.generation, 0, KVSHM_RETRACT, 0};
            memcpy(gone.hash, &known.tag, sizeof known.tag); /* in group 0 its own tag */
            out[stale] = gone;
        }
        stale++;
    }
    return stale;
}

int64_t kvshm_index_drop_row(kvshm_segment segment, uint32_t row)
{
    index_view index;
    RETURN_UNLESS_OK(open_index(segment, &index));
    if (row >= KVSHM_NUM_ROWS)
        return KVSHM_OUT_OF_RANGE;
    int status = KVSHM_OK;
    int64_t dropped = 0;
    uint64_t sequence = begin_write(&index);
    for (uint64_t position = 0; position < index.capacity && status == KVSHM_OK;) {
        entry e = entry_at(&index, position);
        if (is_free(e) || row_of(e) != row) {
            position++;
            continue;
        }
        status = remove_at(&index, position, row); /* may move another entry here: look again */
        dropped++;
    }
    end_write(&index, sequence);
    return status == KVSHM_OK ? dropped : status;
}

static void copy_row(const index_view *from, const index_view *to, uint32_t row)
{
    for (int at = 0; at < KVSHM_ROW_BYTES; at += 8)
        put(row_at(to, row) + at,
            at == KVSHM_ROW_ENTRIES_OFFSET ? 0 : get(row_at(from, row) + at));
}

/* Whether the entry names a block of a row in use.  If not, another process has overwritten it;
 * without the entry, lookups of its hash miss. */
static bool is_sound(const index_view *index, entry e)
{
    if (is_free(e) || row_of(e) >= KVSHM_NUM_ROWS)
        return false;
    uint64_t state = get(row_at(index, row_of(e)) + KVSHM_ROW_STATE_OFFSET);
    return (uint32_t)state != KVSHM_FREE && block_of(e) < (uint32_t)(state >> 32);
}

int64_t kvshm_index_copy(kvshm_segment segment, kvshm_segment larger)
{
    index_view from, to;
    RETURN_UNLESS_OK(open_index(segment, &from));
    RETURN_UNLESS_OK(open_index(larger, &to));
    if (get(to.base + KVSHM_COUNT_OFFSET))
        return KVSHM_INVALID;
    int status = KVSHM_OK;
    int64_t copied = 0;
    uint64_t sequence = begin_write(&to);
    for (uint32_t row = 0; row < KVSHM_NUM_ROWS; row++)
        copy_row(&from, &to, row);
    for (uint64_t position = 0; position < from.capacity && status == KVSHM_OK; position++) {
        entry e = entry_at(&from, position);
        if (!is_sound(&from, e))
            continue;
        status = insert(&to, e);
        copied++;
    }
    end_write(&to, sequence);
    if (status == KVSHM_FULL)
        return KVSHM_INVALID;
    return status == KVSHM_OK ? copied : status;
}
