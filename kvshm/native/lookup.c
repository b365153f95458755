/* Replica index: lookups, beside the writer and in any number of processes.  Contracts: core.h. */

#include "core_index.h"

/* How many hashes' places are fetched at once, before the first of them is looked at: at first, and
 * at most.  What an engine's other work has driven out of the caches, page tables included, then
 * arrives side by side; between the comparisons, whose outcome no processor guesses, less would. */
enum { FIRST_FETCHED = 32, MOST_FETCHED = 512 };

/* As many as were found so far: those that turn out not to be needed are no more than that. */
static size_t how_many_to_fetch(size_t found, size_t left)
{
    size_t wanted = found < FIRST_FETCHED ? FIRST_FETCHED : found;
    wanted = wanted < MOST_FETCHED ? wanted : MOST_FETCHED;
    return wanted < left ? wanted : left;
}

static const uint8_t *home_address(const index_view *index, const kvshm_record *record)
{
    return index->entries + home_of(index, tag_of(record->hash)) * KVSHM_ENTRY_BYTES;
}

static void fill(kvshm_record *record, entry e)
{
    record->block_id = block_of(e);
    record->generation = (uint32_t)(e.place >> 32);
    record->depth = (uint32_t)(e.owner >> 32);
    record->kind = row_of(e); /* until its owner is decided */
}

/* Rows of `rows` that hold the record's hash; the record gets what the first of them says.  Ends
 * as soon as all of `enough` are found: a miss of the caches less. */
static uint64_t holders_of(const index_view *index, kvshm_record *record, uint64_t rows,
                           uint64_t enough)
{
    uint64_t found = 0, tag = tag_of(record->hash), position = home_of(index, tag);
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

/* Cut the longest known prefix into as few owners as possible: keep the rows that hold all of
 * the current run, begin a new run where none is left. */
static size_t assign_owners(const index_view *index, kvshm_record *records, size_t count,
                            uint64_t rows, uint8_t *owners)
{
    uint64_t candidates = 0;
    size_t begin = 0, fetched = 0, i = 0;
    for (; i < count; i++) {
        if (i == fetched) /* not in a function of its own: gcc 12 takes such a one for one without
                           * effect, and leaves its calls out */
            for (size_t end = i + how_many_to_fetch(i, count - i); fetched < end; fetched++) {
                const uint8_t *home = home_address(index, &records[fetched]);
                __builtin_prefetch(home);
                __builtin_prefetch(home + 2 * KVSHM_ENTRY_BYTES - 8); /* its neighbour's owner */
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

/* What the owner itself says, where another row's entry was the first.  How many have it. */
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
        uint64_t before = get_acquire(sequence); /* acquire: entries are read after it */
        length = assign_owners(&index, records, count, rows, owners);
        length = ask_owners(&index, records, length, owners);
        atomic_thread_fence(memory_order_acquire); /* ... and before it is read again */
        if (!(before & 1) && get(sequence) == before)
            break;
    }
    return (int64_t)length;
}
