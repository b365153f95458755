/* The driver's fuzz: damaged segments and senseless arguments. */

#include "core_driver.h"

enum { BATCH = 3, DAMAGED = 1500 };

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
    uint32_t now = below(seed, 9), until = (uint32_t)random_word(seed) >> below(seed, 32);
    switch (below(seed, 12)) {
    case 0: kvshm_publish(table, a.records, a.parents, BATCH, 1); break;
    case 1: kvshm_retract(table, a.blocks, BATCH, a.out, a.draining, &num_draining); break;
    case 2: kvshm_drain(table, a.blocks, BATCH, (uint32_t)random_word(seed)); break;
    case 3: kvshm_force(table, a.blocks, BATCH, &mask); break;
    case 4: kvshm_reset(table); break;
    case 5: kvshm_lease(table, EPOCH, bit, a.records, BATCH, a.flags); break;
    case 6: kvshm_release(table, bit, a.records, BATCH, below(seed, 2) ? a.flags : NULL); break;
    case 7: kvshm_recheck(table, EPOCH, below(seed, 70), a.records, BATCH, a.flags); break;
    case 8: kvshm_sweep(table, (uint32_t)random_word(seed)); break;
    case 9: kvshm_hold(table, EPOCH, a.records, BATCH, now, until); break;
    case 10: kvshm_kept(table, a.blocks, BATCH, now, a.flags); break;
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
    kvshm_applied applied = {0};
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
    case 1: kvshm_index_lookup(index, a.records, BATCH, rows, a.flags); break;
    default:
        kvshm_index_apply(index, tombstones, BLOCKS * KVSHM_TOMBSTONE_BYTES, below(seed, 70),
                          a.records, BATCH, &applied);
    }
    free_arrays(a);
}

/* Whatever is damaged, a duplicate has a copy in a row that has a table. */
static void look_at_free(kvshm_segment table, kvshm_segment index, uint64_t *seed)
{
    arrays a = new_arrays(seed);
    kvshm_segment tables[KVSHM_NUM_ROWS] = {0};
    kvshm_free_block *found = calloc(BATCH, sizeof *found);
    for (uint32_t row = 0; row < 3; row++)
        tables[row] = table;
    if (kvshm_look_at_free(table, index, tables, a.blocks, BATCH, below(seed, 9), found) == KVSHM_OK)
        for (int i = 0; i < BATCH; i++) {
            REQUIRE(found[i].kind != KVSHM_DUPLICATE || found[i].row < 3);
            found[i].row = below(seed, 70);
            found[i].copy.block_id = (uint32_t)random_word(seed) >> below(seed, 32);
        }
    REQUIRE(kvshm_copies_there(tables, index, found, BATCH) <= BATCH);
    free(found);
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

void fuzz(void)
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
            look_at_free(cut, index, &seed);
        }
        free(table.base), free(index.base), free(tombstones);
    }
    printf("%d damaged tables and indexes\n", DAMAGED);
}
