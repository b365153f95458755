/* Drives the core without Python, for the sanitizers (test_sanitizers.py):
 *
 *   leases   importers read plain memory under leases while the exporter reuses it; there is no
 *            other synchronisation, so the thread sanitizer proves the lease protocol's
 *   forced   the same with an exporter that does not wait; re-checks must reject every mixture
 *   deaths   an exporter whose pulse is marked, and whose memory then changes: nobody who read it
 *            after that delivers anything
 *   index    one writer and two readers of a replica index
 *   fuzz     damaged segments and senseless arguments; the address sanitizer watches
 *   scribble a replica index that somebody else writes to as well
 *
 * Prints what it did; ends with 1 at the first thing that is wrong. */

#include "core_driver.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { CLASHES = 300, BATCHES = 4000 };

/* -- leases and forced ------------------------------------------------------------------------- */

typedef struct {
    kvshm_segment table;
    bool forcing;
    atomic_bool finished;
    uint64_t plain[BLOCKS][WORDS];          /* leases */
    _Atomic uint64_t shared[BLOCKS][WORDS]; /* forced: overwritten under its readers */
    atomic_long delivered, discarded, forced, clashes;
} race;

typedef struct {
    race *race;
    int number;
} importer;

static void write_block(race *r, uint32_t block, uint64_t value)
{
    for (int i = 0; i < WORDS; i++)
        if (r->forcing)
            atomic_store_explicit(&r->shared[block][i], value, memory_order_relaxed);
        else
            r->plain[block][i] = value;
}

static bool block_is(race *r, uint32_t block, uint64_t value)
{
    bool same = true;
    for (int i = 0; i < WORDS; i++)
        same &= value == (r->forcing
                              ? atomic_load_explicit(&r->shared[block][i], memory_order_relaxed)
                              : r->plain[block][i]);
    return same;
}

/* Returns only when nobody holds the block any more, or when it was forced. */
static void take_back(race *r, uint32_t block)
{
    kvshm_record record;
    uint32_t draining, holders;
    size_t waiting;
    kvshm_retract(r->table, &block, 1, &record, &draining, &waiting);
    r->clashes += (long)waiting;
    for (int tries = 0; waiting && !(r->forcing && tries == 2); tries++)
        waiting = (size_t)kvshm_drain(r->table, &draining, waiting, 0);
    if (waiting)
        r->forced += kvshm_force(r->table, &draining, waiting, &holders);
}

static void *run_exporter(void *argument)
{
    race *r = argument;
    for (uint32_t round = 0; !r->finished; round++) {
        uint32_t block = round % BLOCKS;
        uint64_t word, parent = 0;
        uint8_t kept;
        REQUIRE(kvshm_kept(r->table, &block, 1, 0, &kept) == kept);
        take_back(r, block);
        kvshm_load(r->table, KVSHM_TABLE_HEADER_BYTES + block * KVSHM_SLOT_BYTES, &word);
        write_block(r, block, ~0ULL);
        write_block(r, block, word >> 32);
        kvshm_record record = {.block_id = block};
        memset(record.hash, (int)(word >> 32 & 0xff), sizeof record.hash);
        record.group = word >> 32 & 1;
        REQUIRE(kvshm_publish(r->table, &record, &parent, 1, 0) == 1);
        REQUIRE(record.generation == word >> 32);
    }
    return NULL;
}

static void load_block(importer *self, kvshm_record *record)
{
    race *r = self->race;
    uint8_t taken, good;
    kvshm_record other = *record;
    other.group ^= 1;
    REQUIRE(record->group == (record->generation & 1));
    REQUIRE(kvshm_lease(r->table, EPOCH, self->number, &other, 1, &taken) == 0);
    if (kvshm_lease(r->table, EPOCH, self->number, record, 1, &taken) != 1)
        return;
    REQUIRE(taken == 1);
    REQUIRE(kvshm_hold(r->table, EPOCH, &other, 1, 0, 9) == 0);
    kvshm_hold(r->table, EPOCH, record, 1, 0, 9); /* while it is given to others, too */
    sched_yield(); /* let the exporter meet the lease */
    bool whole = block_is(r, record->block_id, record->generation);
    int64_t passed = kvshm_recheck(r->table, EPOCH, 1, record, 1, &good);
    REQUIRE(passed == good);
    REQUIRE(!good || whole);
    REQUIRE(r->forcing || good);
    int64_t released = kvshm_release(r->table, self->number, record, 1, &taken);
    REQUIRE(r->forcing || released == 1);
    *(good ? &r->delivered : &r->discarded) += 1;
}

static void *run_importer(void *argument)
{
    importer *self = argument;
    uint64_t seed = (uint64_t)self->number;
    while (self->race->clashes < CLASHES || !self->race->delivered) {
        kvshm_record record;
        uint32_t next = below(&seed, BLOCKS);
        if (kvshm_scan(self->race->table, &next, &record, 1) == 1)
            load_block(self, &record);
    }
    return NULL;
}

static void race_leases(bool forcing)
{
    race *r = calloc(1, sizeof *r);
    REQUIRE(r);
    r->table = new_table();
    r->forcing = forcing;
    pthread_t exporter, threads[IMPORTERS];
    importer importers[IMPORTERS];
    pthread_create(&exporter, NULL, run_exporter, r);
    for (int i = 0; i < IMPORTERS; i++) {
        importers[i] = (importer){r, i * 13}; /* bits 0, 13, 26 */
        pthread_create(&threads[i], NULL, run_importer, &importers[i]);
    }
    for (int i = 0; i < IMPORTERS; i++)
        pthread_join(threads[i], NULL);
    r->finished = true;
    pthread_join(exporter, NULL);
    REQUIRE(r->delivered > 0);
    REQUIRE(kvshm_sweep(r->table, ~0u) == 0);
    REQUIRE(forcing == (r->forced > 0));
    printf("%ld delivered, %ld discarded, %ld forced, %ld times a block was leased when it was "
           "taken back\n", r->delivered, r->discarded, r->forced, r->clashes);
    free(r->table.base);
    free(r);
}

/* -- deaths -------------------------------------------------------------------------------------- */

static void mark(kvshm_segment table, int process)
{
    REQUIRE(kvshm_store(table, KVSHM_PULSES_OFFSET + 8 * process, KVSHM_PULSE_DIED) == KVSHM_OK);
}

/* What the kernel does when rank 1 ends: first the mark, then its memory. */
static void *die(void *argument)
{
    race *r = argument;
    while (r->delivered < CLASHES)
        sched_yield();
    mark(r->table, 2);
    write_block(r, 0, ~0ULL);
    r->finished = true;
    return NULL;
}

static void *read_the_dying(void *argument)
{
    importer *self = argument;
    race *r = self->race;
    kvshm_record record;
    uint32_t next = 0;
    uint8_t taken, good;
    REQUIRE(kvshm_scan(r->table, &next, &record, 1) == 1);
    for (bool last = false; !last;) {
        last = r->finished;
        int64_t leased = kvshm_lease(r->table, EPOCH, self->number, &record, 1, &taken);
        REQUIRE(!last || leased == 0);
        bool whole = block_is(r, 0, 1);
        REQUIRE(kvshm_recheck(r->table, EPOCH, 1, &record, 1, &good) == good);
        REQUIRE(!good || whole);
        REQUIRE(!last || !good);
        if (leased)
            REQUIRE(kvshm_release(r->table, self->number, &record, 1, &taken) == taken);
        *(good ? &r->delivered : &r->discarded) += 1;
    }
    REQUIRE(kvshm_recheck(r->table, EPOCH, 0, &record, 1, &good) == 1); /* rank 0 lives on */
    return NULL;
}

static kvshm_record published(kvshm_segment table)
{
    kvshm_record record = {{1}, 0, 0, 0, KVSHM_PUBLISH, 0};
    uint64_t parent = 0;
    REQUIRE(kvshm_publish(table, &record, &parent, 1, 0) == 1);
    return record;
}

/* The word of each process keeps everybody from leasing; that of no other does. */
static void mark_each(void)
{
    for (int process = 0; process < 1 + KVSHM_MAX_RANKS; process++) {
        kvshm_segment table = new_table();
        kvshm_record record = published(table);
        uint8_t taken, good;
        bool of_it = process <= RANKS;
        mark(table, process);
        REQUIRE(kvshm_lease(table, EPOCH, 0, &record, 1, &taken) == !of_it);
        for (int rank = 0; rank < RANKS; rank++) {
            REQUIRE(kvshm_recheck(table, EPOCH, rank, &record, 1, &good) >= 0);
            REQUIRE(good == (process != 1 + rank));
        }
        free(table.base);
    }
}

static void race_deaths(void)
{
    mark_each();
    race *r = calloc(1, sizeof *r);
    REQUIRE(r);
    r->table = new_table();
    r->forcing = true; /* its bytes change under their readers */
    write_block(r, 0, 1);
    published(r->table);
    pthread_t dying, threads[IMPORTERS];
    importer importers[IMPORTERS];
    pthread_create(&dying, NULL, die, r);
    for (int i = 0; i < IMPORTERS; i++) {
        importers[i] = (importer){r, i * 13};
        pthread_create(&threads[i], NULL, read_the_dying, &importers[i]);
    }
    for (int i = 0; i < IMPORTERS; i++)
        pthread_join(threads[i], NULL);
    pthread_join(dying, NULL);
    REQUIRE(r->discarded >= IMPORTERS);
    printf("%ld delivered, %ld discarded\n", r->delivered, r->discarded);
    free(r->table.base);
    free(r);
}

/* -- index --------------------------------------------------------------------------------------- */

typedef struct {
    kvshm_segment index;
    atomic_bool finished;
} shared_index;

static void *write_index(void *argument)
{
    shared_index *shared = argument;
    _Alignas(8) uint8_t tombstones[2][16 * KVSHM_TOMBSTONE_BYTES] = {{0}};
    uint64_t seed = 1;
    for (uint32_t round = 0; round < BATCHES; round++) {
        kvshm_record batch[4];
        kvshm_applied applied = {0};
        uint32_t row = below(&seed, 2);
        for (int i = 0; i < 4; i++)
            batch[i] = event(below(&seed, 24), below(&seed, 16), round, 1 + below(&seed, 2));
        REQUIRE(kvshm_index_apply(shared->index, tombstones[row], sizeof tombstones[row], row,
                                  batch, 4, &applied) == KVSHM_OK);
        REQUIRE(applied.added + applied.ignored + applied.full <= 4);
        if (round % 64 == 0) {
            REQUIRE(kvshm_index_drop_row(shared->index, row) >= 0);
            memset(tombstones[row], 0, sizeof tombstones[row]);
        }
    }
    shared->finished = true;
    return NULL;
}

static void *read_index(void *argument)
{
    shared_index *shared = argument;
    uint64_t seed = 2;
    while (!shared->finished) {
        kvshm_record records[4];
        uint8_t owners[4];
        for (int i = 0; i < 4; i++)
            records[i] = event(below(&seed, 24), 0, 0, 0);
        int64_t length = kvshm_index_lookup(shared->index, records, 4, 3, owners);
        REQUIRE(length >= 0 && length <= 4);
        for (int64_t i = 0; i < length; i++)
            REQUIRE(owners[i] < 2 && records[i].block_id < 16);
    }
    return NULL;
}

static void race_index(void)
{
    shared_index shared = {.index = new_index()};
    pthread_t writer, readers[2];
    pthread_create(&writer, NULL, write_index, &shared);
    for (int i = 0; i < 2; i++)
        pthread_create(&readers[i], NULL, read_index, &shared);
    pthread_join(writer, NULL);
    for (int i = 0; i < 2; i++)
        pthread_join(readers[i], NULL);
    uint64_t count;
    kvshm_load(shared.index, KVSHM_COUNT_OFFSET, &count);
    int64_t left = kvshm_index_drop_row(shared.index, 0) + kvshm_index_drop_row(shared.index, 1);
    REQUIRE((uint64_t)left == count);
    printf("%d batches, %d entries in the end\n", BATCHES, (int)left);
    free(shared.index.base);
}

int main(int argc, char **argv)
{
    const char *what = argc == 2 ? argv[1] : "";
    if (!strcmp(what, "leases"))
        race_leases(false);
    else if (!strcmp(what, "forced"))
        race_leases(true);
    else if (!strcmp(what, "deaths"))
        race_deaths();
    else if (!strcmp(what, "index"))
        race_index();
    else if (!strcmp(what, "fuzz"))
        fuzz();
    else if (!strcmp(what, "scribble"))
        scribble_on_index();
    else
        return 2;
    return 0;
}
