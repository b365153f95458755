/* Replica index: lookups.  Any number of processes look up while the writer writes.  Contracts:
 * core.h. */

#include "core_index.h"

/* For how many hashes entries are fetched at once, before the first of these hashes is looked up:
 * at the beginning, and at most.  An engine's other work drives the entries and their page tables
 * out of the caches.  Fetched at once, they arrive at the same time.  Fetched between the
 * comparisons, fewer would, because no processor predicts the outcome of a comparison. */
enum { FIRST_FETCHED = 32, MOST_FETCHED = 512 };

/* As many as were found so far, so that at most as many are fetched in vain. */
static size_t how_many_to_fetch(size_t found, size_t left)
{
    size_t wanted = found < FIRST_FETCHED ? FIRST_FETCHED : found;
    wanted = wanted < MOST_FETCHED ? wanted : MOST_FETCHED;
    return wanted < left ? wanted : left;
}

static const uint8_t *home_address(const index_view *index, const kvshm_record *record)
{
    return index->entries + home_of(index, tag_of(record)) * KVSHM_ENTRY_BYTES;
}

static void fill(kvshm_record *record, entry e)
{
    record->block_id = block_of(e);
    record->generation = (uint32_t)(e.place >> 32);
    record->depth = (uint32_t)(e.owner >> 32);
    record->kind = (uint16_t)row_of(e); /* until the owner is chosen; a row is below NUM_ROWS */
}

/* Find the rows of `rows` that hold the record's hash in its group; fill the record from the first
 * entry found.  The search ends once all rows of `enough` are found, which saves a cache miss. */
static uint64_t holders_of(const index_view *index, kvshm_record *record, uint64_t rows,
                           uint64_t enough)
{
    uint64_t found = 0, tag = tag_of(record), position = home_of(index, tag);
    for (uint64_t step = 0; step < index->capacity; step++, position = after(index, position)) {
        entry e = entry_at(index, position);
        if (is_free(e))
            break;
        if (e.tag != tag || row_of(e) >= KVSHM_NUM_ROWS || !((uint64_t)1 << row_of(e) & rows))
            continue;
        if (!found)
            fill(record, e);
        found |= (uint64_t)1 << row_of(e);
        if ((found & enough) == enough)
            break;
    }
    return found;
}

static void own(uint8_t *owners, size_t from, size_t to, uint64_t candidates)
{
    if (from < to)
        memset(owners + from, __builtin_ctzll(candidates), to - from);
}

/* Cut the longest known prefix into as few runs of one owner as possible: keep the rows that hold
 * all hashes of the current run, and begin a new run where no such row is left.  Returns the length
 * of the prefix. */
static size_t assign_owners(const index_view *index, kvshm_record *records, size_t count,
                            uint64_t rows, uint8_t *owners)
{
    uint64_t candidates = 0;
    size_t begin = 0, fetched = 0, i = 0;
    for (; i < count; i++) {
        if (i == fetched) /* no function of its own: gcc 12 believes that a function which only
                           * fetches has no effect, and leaves out its calls */
            for (size_t end = i + how_many_to_fetch(i, count - i); fetched < end; fetched++) {
                const uint8_t *home = home_address(index, &records[fetched]);
                __builtin_prefetch(home);
                __builtin_prefetch(home + 2 * KVSHM_ENTRY_BYTES - 8); /* the next entry's owner */
            }
        uint64_t holders = holders_of(index, &records[i], rows, candidates ? candidates : rows);
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

/* Fill each record from the entry of its owner, if it was filled from another row's entry.  Returns
 * the number of records up to the first whose owner has no entry any more. */
static size_t ask_owners(const index_view *index, kvshm_record *records, size_t count,
                         const uint8_t *owners)
{
    size_t i = 0;
    for (; i < count; i++) {
        uint64_t row = (uint64_t)1 << owners[i];
        if (records[i].kind != owners[i] && !holders_of(index, &records[i], row, row))
            break;
        records[i].kind = KVSHM_PUBLISH;
    }
    return i;
}

int64_t kvshm_index_lookup(kvshm_segment segment, kvshm_record *records, size_t count,
                           uint64_t rows, uint8_t *owners)
{
    index_view index;
    RETURN_UNLESS_OK(open_index(segment, &index));
    const uint8_t *sequence = index.base + KVSHM_SEQUENCE_OFFSET;
    size_t length = 0;
    for (int attempt = 0; attempt < 4; attempt++) {
        uint64_t before = get_acquire(sequence); /* acquire: the entries are read after it */
        length = assign_owners(&index, records, count, rows, owners);
        length = ask_owners(&index, records, length, owners);
        atomic_thread_fence(memory_order_acquire); /* acquire: it is read again after the entries */
        if (!(before & 1) && get(sequence) == before)
            break;
    }
    return (int64_t)length;
}
