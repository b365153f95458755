/* Drives the core without Python, for the sanitizers (test_sanitizers.py):
 *
 *   leases   importers read plain memory under leases while the exporter reuses it; there is no
 *            other synchronisation, so the thread sanitizer proves the lease protocol's
 *   forced   the same with an exporter that does not wait; re-checks must reject every mixture
 *   index    one writer and two readers of a replica index
 *   fuzz     damaged segments and senseless arguments; the address sanitizer watches
 *
 * Prints what it did; ends with 1 at the first thing that is wrong. */

#include "_core.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 4, RANKS = 2, IMPORTERS = 3, WORDS = 64, CAPACITY = 64 };
enum { CLASHES = 300, BATCHES = 4000, DAMAGED = 1500 };

#define EPOCH 0x123456789abcdef0ULL

#define REQUIRE(condition)                                                                       \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);              \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

static uint64_t random_word(uint64_t *seed) /* splitmix64 */
{
    uint64_t word = *seed += 0x9e3779b97f4a7c15ULL;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9ULL;
    word = (word ^ word >> 27) * 0x94d049bb133111ebULL;
    return word ^ word >> 31;
}

static uint32_t below(uint64_t *seed, uint32_t limit)
{
    return (uint32_t)(random_word(seed) % limit);
}

/* -- segments of exactly the size they state, so that a byte beyond is a report ---------------- */

static kvshm_segment new_segment(uint32_t header_bytes, uint64_t length)
{
    kvshm_segment segment = {calloc(1, length), length};
    REQUIRE(segment.base);
    memcpy(segment.base + KVSHM_HEADER_BYTES_OFFSET, &header_bytes, 4);
    memcpy(segment.base + KVSHM_SEGMENT_BYTES_OFFSET, &length, 8);
    REQUIRE(kvshm_mark_ready(segment, KVSHM_LAYOUT_VERSION) == KVSHM_OK);
    return segment;
}

static kvshm_segment new_table(void)
{
    uint64_t length = KVSHM_TABLE_HEADER_BYTES + BLOCKS * (KVSHM_SLOT_BYTES + 8 * RANKS);
    kvshm_segment table = new_segment(KVSHM_TABLE_HEADER_BYTES, length);
    uint32_t counts[3] = {BLOCKS, 16, RANKS};
    memcpy(table.base + KVSHM_NUM_BLOCKS_OFFSET, counts, sizeof counts);
    REQUIRE(kvshm_store(table, KVSHM_EPOCH_OFFSET, EPOCH) == KVSHM_OK);
    for (int rank = 0; rank < RANKS; rank++)
        REQUIRE(kvshm_store(table, KVSHM_LIFE_OFFSET + 8 * rank, EPOCH) == KVSHM_OK);
    return table;
}

static kvshm_segment new_index(void)
{
    uint64_t length = KVSHM_INDEX_HEADER_BYTES + CAPACITY * KVSHM_ENTRY_BYTES;
    kvshm_segment index = new_segment(KVSHM_INDEX_HEADER_BYTES, length);
    REQUIRE(kvshm_store(index, KVSHM_CAPACITY_OFFSET, CAPACITY) == KVSHM_OK);
    return index;
}

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
        take_back(r, block);
        kvshm_load(r->table, KVSHM_TABLE_HEADER_BYTES + block * KVSHM_SLOT_BYTES, &word);
        write_block(r, block, ~0ULL);
        write_block(r, block, word >> 32);
        kvshm_record record = {.block_id = block};
        memset(record.hash, (int)(word >> 32 & 0xff), sizeof record.hash);
        REQUIRE(kvshm_publish(r->table, &record, &parent, 1, 0) == 1);
        REQUIRE(record.generation == word >> 32);
    }
    return NULL;
}

static void load_block(importer *self, kvshm_record *record)
{
    race *r = self->race;
    uint8_t taken, good;
    if (kvshm_lease(r->table, EPOCH, self->number, record, 1, &taken) != 1)
        return;
    REQUIRE(taken == 1);
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

/* -- index --------------------------------------------------------------------------------------- */

static kvshm_record event(uint32_t number, uint32_t block, uint32_t generation, uint32_t kind)
{
    kvshm_record record = {{0}, block, generation, number, kind};
    memcpy(record.hash, &number, 4);
    return record;
}

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
        kvshm_applied applied;
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
        kvshm_record records[4], wanted;
        uint8_t hashes[4 * KVSHM_HASH_BYTES], owners[4];
        for (int i = 0; i < 4; i++) {
            wanted = event(below(&seed, 24), 0, 0, 0);
            memcpy(hashes + i * KVSHM_HASH_BYTES, wanted.hash, KVSHM_HASH_BYTES);
        }
        int64_t length = kvshm_index_lookup(shared->index, hashes, 4, 3, records, owners);
        REQUIRE(length >= 0 && length <= 4);
        for (int64_t i = 0; i < length; i++)
            REQUIRE(owners[i] < 2 && records[i].block_id < 16 && records[i].depth < 24);
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

/* -- fuzz ---------------------------------------------------------------------------------------- */

enum { BATCH = 3 };

/* Output arrays on the heap, of exactly the promised size. */
typedef struct {
    kvshm_record *records, *out;
    uint32_t *blocks, *draining;
    uint64_t *parents;
    uint8_t *flags;
} arrays;

static arrays new_arrays(uint64_t *seed)
{
    arrays a = {malloc(BATCH * sizeof *a.records),  malloc(BATCH * sizeof *a.out),
                malloc(BATCH * sizeof *a.blocks),   malloc(BATCH * sizeof *a.draining),
                calloc(BATCH, sizeof *a.parents), calloc(BATCH, 1)};
    for (int i = 0; i < BATCH; i++) {
        uint32_t block = below(seed, 16) ? below(seed, BLOCKS) : (uint32_t)random_word(seed);
        a.records[i] = event(below(seed, 3), block, below(seed, 3), below(seed, 4));
        a.blocks[i] = block;
    }
    return a;
}

static void free_arrays(arrays a)
{
    free(a.records), free(a.out), free(a.blocks), free(a.draining), free(a.parents), free(a.flags);
}

static void call_table(kvshm_segment table, uint64_t *seed)
{
    arrays a = new_arrays(seed);
    uint32_t mask, next = below(seed, BLOCKS + 2);
    size_t num_draining;
    int bit = (int)below(seed, 32) - 2;
    switch (below(seed, 10)) {
    case 0: kvshm_publish(table, a.records, a.parents, BATCH, 1); break;
    case 1: kvshm_retract(table, a.blocks, BATCH, a.out, a.draining, &num_draining); break;
    case 2: kvshm_drain(table, a.blocks, BATCH, (uint32_t)random_word(seed)); break;
    case 3: kvshm_force(table, a.blocks, BATCH, &mask); break;
    case 4: kvshm_reset(table); break;
    case 5: kvshm_lease(table, EPOCH, bit, a.records, BATCH, a.flags); break;
    case 6: kvshm_release(table, bit, a.records, BATCH, below(seed, 2) ? a.flags : NULL); break;
    case 7: kvshm_recheck(table, EPOCH, below(seed, 70), a.records, BATCH, a.flags); break;
    case 8: kvshm_sweep(table, (uint32_t)random_word(seed)); break;
    default: kvshm_scan(table, &next, a.out, BATCH); break;
    }
    free_arrays(a);
}

/* What a scan did not see of what was heard: counted first, then written where just that fits. */
static void find_stale(const uint8_t *tombstones, const kvshm_record *scanned)
{
    uint8_t *seen = calloc(BLOCKS, 1);
    uint64_t bytes = BLOCKS * KVSHM_TOMBSTONE_BYTES;
    size_t count = kvshm_index_stale(tombstones, bytes, scanned, BATCH, seen, NULL);
    kvshm_record *stale = malloc(count * sizeof *stale + 1);
    REQUIRE(kvshm_index_stale(tombstones, bytes, scanned, BATCH, seen, stale) == count);
    for (size_t i = 0; i < count; i++)
        REQUIRE(stale[i].kind == KVSHM_RETRACT && stale[i].block_id < BLOCKS &&
                !seen[stale[i].block_id]);
    free(seen);
    free(stale);
}

static void call_index(kvshm_segment index, uint8_t *tombstones, uint64_t *seed)
{
    arrays a = new_arrays(seed);
    kvshm_applied applied;
    uint8_t *hashes = malloc(BATCH * KVSHM_HASH_BYTES);
    for (int i = 0; i < BATCH; i++)
        memcpy(hashes + i * KVSHM_HASH_BYTES, a.records[i].hash, KVSHM_HASH_BYTES);
    uint64_t rows = random_word(seed) | random_word(seed);
    switch (below(seed, 6)) {
    case 5: find_stale(tombstones, a.records); break;
    case 4: {
        kvshm_segment larger = new_index();
        kvshm_index_copy(index, larger);
        free(larger.base);
        break;
    }
    case 0: kvshm_index_drop_row(index, below(seed, 70)); break;
    case 1: kvshm_index_lookup(index, hashes, BATCH, rows, a.out, a.flags); break;
    default:
        kvshm_index_apply(index, tombstones, BLOCKS * KVSHM_TOMBSTONE_BYTES, below(seed, 70),
                          a.records, BATCH, &applied);
    }
    free(hashes);
    free_arrays(a);
}

/* Overwrite some bytes, by preference where the numbers stand. */
static void damage(kvshm_segment segment, uint64_t *seed)
{
    for (uint32_t times = below(seed, 4); times; times--) {
        uint64_t limit = below(seed, 2) ? 128 : segment.length;
        uint64_t value = below(seed, 2) ? random_word(seed) : below(seed, 200);
        memcpy(segment.base + random_word(seed) % (limit - 8), &value, 1 + below(seed, 8));
    }
}

static void fuzz(void)
{
    uint64_t seed = 3;
    for (int round = 0; round < DAMAGED; round++) {
        kvshm_segment table = new_table(), index = new_index();
        uint8_t *tombstones = calloc(BLOCKS, KVSHM_TOMBSTONE_BYTES);
        for (int call = 0; call < 60; call++) {
            if (call == 20 || call == 40) {
                damage(table, &seed);
                damage(index, &seed);
            }
            kvshm_segment cut = table;
            if (call > 50)
                cut.length = random_word(&seed) % (table.length + 1);
            call_table(cut, &seed);
            call_index(index, tombstones, &seed);
        }
        free(table.base), free(index.base), free(tombstones);
    }
    printf("%d damaged tables and indexes\n", DAMAGED);
}

int main(int argc, char **argv)
{
    const char *what = argc == 2 ? argv[1] : "";
    if (!strcmp(what, "leases"))
        race_leases(false);
    else if (!strcmp(what, "forced"))
        race_leases(true);
    else if (!strcmp(what, "index"))
        race_index();
    else if (!strcmp(what, "fuzz"))
        fuzz();
    else
        return 2;
    return 0;
}
