/* Replica index: lookups.  Any number of processes look up while the writer writes.  Contracts:
 * core.h. */

#include "core_index.h"

/* Tries of a whole search, beyond the first of each record, to read it while nothing is written. */
enum { TRIES = 3 };

static index_view view_of(const kvshm_search *search)
{
    return (index_view){search->base, search->base + KVSHM_INDEX_HEADER_BYTES, search->capacity};
}

static void fill(kvshm_record *record, entry e)
{
    record->block_id = block_of(e);
    record->generation = generation_in(e);
    record->kind = (uint16_t)row_of(e); /* until the owner is chosen; a row is below NUM_ROWS */
}

/* Find the rows of `rows` that hold the record's hash in its group; fill the record from the first
 * entry found.  The search ends once all rows of `enough` are found, which saves a cache miss. */
static uint64_t holders_of(const index_view *index, kvshm_record *record, uint64_t home,
                           uint64_t rows, uint64_t enough)
{
    uint64_t found = 0, tag = tag_of(record), position = home;
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

/* The same while nothing is written, as long as the search has tries left. */
static uint64_t find(kvshm_search *search, kvshm_record *record, uint64_t home, uint64_t rows,
                     uint64_t enough)
{
    index_view index = view_of(search);
    const uint8_t *sequence = index.base + KVSHM_SEQUENCE_OFFSET;
    for (;;) {
        uint64_t before = get_acquire(sequence); /* acquire: the entries are read after it */
        uint64_t found = holders_of(&index, record, home, rows, enough);
        atomic_thread_fence(memory_order_acquire); /* acquire: it is read again after the entries */
        if ((!(before & 1) && get(sequence) == before) || search->tries == 0)
            return found;
        search->tries--;
    }
}

int kvshm_search_begin(kvshm_segment segment, uint64_t rows, kvshm_search *search)
{
    index_view index;
    RETURN_UNLESS_OK(open_index(segment, &index));
    /* All but the homes, which are many for a search that ends at its first record. */
    search->length = search->begin = search->fetched = 0;
    search->rows = rows, search->candidates = 0;
    search->base = index.base, search->capacity = index.capacity;
    search->tries = TRIES;
    return KVSHM_OK;
}

void kvshm_search_fetch(kvshm_search *search, const kvshm_record *records, size_t stop)
{
    index_view index = view_of(search);
    size_t i = search->fetched > search->length ? search->fetched : search->length;
    if (stop > search->length + KVSHM_SEARCH_AHEAD)
        stop = search->length + KVSHM_SEARCH_AHEAD;
    for (; i < stop; i++) {
        uint64_t home = home_of(&index, tag_of(&records[i]));
        search->homes[i % KVSHM_SEARCH_AHEAD] = home;
        __builtin_prefetch(address_of(&index, home));
    }
    search->fetched = i;
}

/* Of the record that the search is at: known, if kvshm_search_fetch was called for it. */
static uint64_t next_home(const kvshm_search *search, const kvshm_record *record)
{
    index_view index = view_of(search);
    return search->length < search->fetched ? search->homes[search->length % KVSHM_SEARCH_AHEAD]
                                            : home_of(&index, tag_of(record));
}

static void end_run(kvshm_search *search, uint8_t *owners)
{
    if (search->begin < search->length)
        memset(owners + search->begin, __builtin_ctzll(search->candidates),
               search->length - search->begin);
    search->begin = search->length;
}

/* Cut the prefix into as few runs of one owner as possible: keep the rows that hold all hashes of
 * the current run, and begin a new run where no such row is left. */
bool kvshm_search_on(kvshm_search *search, kvshm_record *records, size_t stop, uint8_t *owners)
{
    for (; search->length < stop; search->length++) {
        kvshm_record *record = &records[search->length];
        uint64_t candidates = search->candidates;
        uint64_t holders = find(search, record, next_home(search, record), search->rows,
                                candidates ? candidates : search->rows);
        if (!holders)
            return false;
        if (!(candidates & holders)) {
            end_run(search, owners);
            candidates = holders;
        }
        search->candidates = candidates & holders;
    }
    return true;
}

/* Fill each record from the entry of its owner, if it was filled from another row's entry.  The
 * prefix ends before the first whose owner has no entry any more. */
size_t kvshm_search_end(kvshm_search *search, kvshm_record *records, uint8_t *owners)
{
    index_view index = view_of(search);
    end_run(search, owners);
    for (size_t i = 0; i < search->length; i++) {
        uint64_t row = (uint64_t)1 << owners[i];
        if (records[i].kind != owners[i] &&
            !find(search, &records[i], home_of(&index, tag_of(&records[i])), row, row))
            search->length = i;
        else
            records[i].kind = KVSHM_PUBLISH;
    }
    return search->length;
}

int64_t kvshm_index_lookup(kvshm_segment segment, kvshm_record *records, size_t count,
                           uint64_t rows, uint8_t *owners)
{
    kvshm_search search;
    RETURN_UNLESS_OK(kvshm_search_begin(segment, rows, &search));
    kvshm_search_on(&search, records, count, owners);
    return (int64_t)kvshm_search_end(&search, records, owners);
}
