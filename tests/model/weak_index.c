/* The replica index under weak memory, for GenMC: the writer's source files and the reader's.
 *
 *   genmc --rc11 --disable-estimation --disable-warn-on-unfreed-memory -unroll=6 -- \
 *       -O1 -Ikvshm -DINDEX [-DSHIFTED] [-DDROPPED=memory_order_...] tests/model/weak_index.c
 *
 * Two entries share a home: one is retracted, which shifts the other back into its place, and
 * published anew by another engine.  What a try of a lookup accepts is what stood in the index
 * at the sequence that it read: no entry torn, and none missed that was there.
 *
 * Scenarios: INDEX          a lookup of the entry that is retracted and published anew
 *            INDEX SHIFTED  a lookup of the entry that is there throughout, but moves
 *
 * GenMC cannot assign a struct through a pointer; -O1 makes words of it.  What -O1 makes of
 * functions that are not called, GenMC may not know: internal linkage removes them. */

#include "genmc.h"

#define memset(to, value, bytes) (assert((bytes) == 1), *(to) = (uint8_t)(value))

#pragma clang attribute push(__attribute__((internal_linkage)), apply_to = function)
#include "core.c"
#include "replica.c"

/* A reader's first try is all that counts: it may see whatever a later try may, which is the
 * first of a reader that begins later.  So where it is not accepted the thread ends, and a
 * lookup that returns has accepted what it returns, at this sequence. */
static uint64_t accepted;
static int tries;

static uint64_t begin_try(const uint8_t *sequence)
{
    if (tries++)
        pthread_exit(NULL);
    return accepted = get_acquire(sequence);
}

#define get_acquire(sequence) begin_try(sequence)
#include "lookup.c"
#pragma clang attribute pop

enum {
    CAPACITY = 8,
    WORDS = (KVSHM_INDEX_HEADER_BYTES + CAPACITY * KVSHM_ENTRY_BYTES) / 8,
    ROWS = 2,
    BLOCKS = 4,
    SET_UP = 4, /* the sequence after main's two batches */
    RETRACTED_AT = SET_UP + 2,
};

typedef struct {
    uint64_t tag;
    uint32_t row, block, generation;
} publication;

/* Tags of one home (main asserts it); all else differs, so that no mixture is a publication. */
static const publication before = {30, 0, 1, 5}, anew = {30, 1, 2, 6},
                         beside = {79, 1, 3, 7};

static uint64_t memory[WORDS];
static kvshm_segment segment = {(uint8_t *)memory, sizeof memory};
static tombstone tombstones[ROWS][BLOCKS];

static void apply(const publication *p, uint32_t kind)
{
    kvshm_applied applied = {0};
    kvshm_record record = {.group = 0};
    *(uint64_t *)record.hash = p->tag;
    record.block_id = p->block;
    record.generation = p->generation;
    record.kind = kind;
    int64_t status = kvshm_index_apply(segment, (uint8_t *)tombstones[p->row],
                                       sizeof tombstones[p->row], p->row, &record, 1, &applied);
    assert(status == KVSHM_OK && applied.added + applied.removed == 1);
}

static void *writer(void *unused)
{
    apply(&before, KVSHM_RETRACT);
    apply(&anew, KVSHM_PUBLISH);
    return unused;
}

static void *reader(void *unused)
{
    uint8_t owner;
    kvshm_record record = {.group = 0};
#ifdef SHIFTED
    const publication *sought = &beside;
#else
    const publication *sought = &before;
#endif
    *(uint64_t *)record.hash = sought->tag;
    int64_t length = kvshm_index_lookup(segment, &record, 1, (1 << ROWS) - 1, &owner);
#ifndef SHIFTED
    if (accepted == RETRACTED_AT) {
        assert(length == 0);
        return unused;
    }
    if (accepted > RETRACTED_AT)
        sought = &anew;
#endif
    assert(length == 1 && owner == sought->row && record.block_id == sought->block);
    assert(record.generation == sought->generation);
    return unused;
}

int main(void)
{
    memory[1] = KVSHM_LAYOUT_VERSION | (uint64_t)KVSHM_INDEX_HEADER_BYTES << 32;
    memory[KVSHM_SEGMENT_BYTES_OFFSET / 8] = sizeof memory;
    memory[KVSHM_CAPACITY_OFFSET / 8] = CAPACITY;
    index_view index = {(uint8_t *)memory, NULL, CAPACITY};
    assert(home_of(&index, before.tag) == home_of(&index, beside.tag));
    apply(&before, KVSHM_PUBLISH);
    apply(&beside, KVSHM_PUBLISH);
    assert(memory[KVSHM_SEQUENCE_OFFSET / 8] == SET_UP);
    pthread_t one, other;
    pthread_create(&one, NULL, writer, NULL);
    pthread_create(&other, NULL, reader, NULL);
    pthread_join(one, NULL);
    pthread_join(other, NULL);
    return 0;
}
