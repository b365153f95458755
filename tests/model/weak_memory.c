/* The C core itself under weak memory, for GenMC: not a model of it, the same source files.
 *
 *   genmc --rc11 --disable-estimation --disable-warn-on-unfreed-memory -unroll=6 -- \
 *       -Ikvshm -DREUSE [-DBIT=-1] [-DDROPPED=memory_order_...] tests/model/weak_memory.c
 *
 * Scenarios: REUSE    lease, copy, re-check against retract, force, new bytes, publish
 *            WAIT     a lease against an exporter that waits for it: plain accesses, no race
 *            RANKS    the same with two ranks, the last of which gives the lease back
 *            LIFE     lease, copy, re-check against a life word zeroed before new bytes
 *            SCAN     a scan against retract and publish
 * The replica index is weak_index.c's matter; genmc.h has what may be taken away. */

#include "genmc.h"

#ifndef BIT
#define BIT 0
#endif

#include "core.c"
#include "exporter.c"
#include "importer.c"

enum { EPOCH = 7, TICKET = 4096, WORDS = (KVSHM_TABLE_HEADER_BYTES + KVSHM_SLOT_BYTES + 8) / 8 };

static uint64_t memory[WORDS];
static kvshm_segment table = {(uint8_t *)memory, sizeof memory};
static kvshm_record first, second, plan;
static uint64_t parent;

/* One block's bytes, two words: atomic where they may change under a reader's hands, as no
 * other access may by the language; that memmove is no worse is the processor's business. */
#if defined(WAIT) || defined(RANKS)
static uint64_t kv[2];
#define READ(i) kv[i]
#define WRITE(i, value) (kv[i] = (value))
#else
static _Atomic uint64_t kv[2];
#define READ(i) atomic_load_explicit(&kv[i], memory_order_relaxed)
#define WRITE(i, value) atomic_store_explicit(&kv[i], value, memory_order_relaxed)
#endif

static void *exporter(void *unused)
{
    uint32_t block = 0, holders;
    size_t draining;
    kvshm_record out;
#ifdef LIFE
    kvshm_store(table, KVSHM_LIFE_OFFSET, 0);
    WRITE(0, 2);
    WRITE(1, 2);
    return unused;
#endif
#ifndef RANKS
    WRITE(0, 1);
    WRITE(1, 1);
    kvshm_publish(table, &first, &parent, 1, 0);
#endif
    kvshm_retract(table, &block, 1, &out, &block, &draining);
#if defined(WAIT) || defined(RANKS)
    if (draining && kvshm_drain(table, &block, 1, 0))
        return unused; /* its budget is endless here: what follows happens in another run */
#else
    if (draining)
        kvshm_force(table, &block, 1, &holders);
#endif
    WRITE(0, 2);
    WRITE(1, 2);
#if !defined(WAIT) && !defined(RANKS)
    kvshm_publish(table, &second, &parent, 1, 0);
#endif
    return unused;
}

static void *importer(void *unused)
{
    uint8_t taken, good;
#ifdef SCAN
    uint32_t next = 0;
    kvshm_record seen;
    if (kvshm_scan(table, &next, &seen, 1) == 1)
        for (int i = 0; i < KVSHM_HASH_BYTES; i += 8)
            assert(*(uint64_t *)(seen.hash + i) == seen.generation + 1);
    return unused;
#endif
    if (kvshm_lease(table, EPOCH, BIT, &plan, 1, &taken) != 1)
        return unused;
    uint64_t bytes[2];
    bytes[0] = READ(0);
    bytes[1] = READ(1);
#ifdef WAIT
    assert(bytes[0] == 1 && bytes[1] == 1);
#else
    if (kvshm_recheck(table, EPOCH, 0, &plan, 1, &good) == 1)
        assert(bytes[0] == 1 && bytes[1] == 1);
#endif
    if (BIT >= 0)
        kvshm_release(table, BIT, &plan, 1, &taken);
    return unused;
}

#ifdef RANKS
/* As TableHeader.finish_ticket does it. */
static int is_last(void)
{
    uint64_t left;
    kvshm_load(table, TICKET, &left);
    while (left) {
        uint64_t before = left;
        if (kvshm_compare_exchange(table, TICKET, &left, before - 1) == 1)
            return before == 1;
    }
    return 0;
}

/* Both were handed a load whose lease is taken; a ticket counts who has yet to finish. */
static void *rank(void *own)
{
    uint8_t taken = 1;
    assert(READ(*(int *)own) == 1);
    if (is_last())
        kvshm_release(table, BIT, &plan, 1, &taken);
    return NULL;
}
#endif

static void fill(kvshm_record *record, uint64_t hash)
{
    for (int i = 0; i < KVSHM_HASH_BYTES; i += 8)
        *(uint64_t *)(record->hash + i) = hash;
}

int main(void)
{
    memory[1] = KVSHM_LAYOUT_VERSION | (uint64_t)KVSHM_TABLE_HEADER_BYTES << 32;
    memory[KVSHM_SEGMENT_BYTES_OFFSET / 8] = sizeof memory;
    memory[KVSHM_EPOCH_OFFSET / 8] = EPOCH;
    memory[KVSHM_NUM_BLOCKS_OFFSET / 8] = 1;
    memory[KVSHM_NUM_RANKS_OFFSET / 8] = 1;
    memory[KVSHM_LIFE_OFFSET / 8] = EPOCH;
    fill(&first, 1);
    fill(&second, 2);
    fill(&plan, 1); /* generation 0 */
#if defined(LIFE) || defined(RANKS)
    WRITE(0, 1);
    WRITE(1, 1);
    kvshm_publish(table, &first, &parent, 1, 0);
#endif
    pthread_t one, other;
#ifdef RANKS
    static int numbers[2] = {0, 1};
    uint8_t taken;
    pthread_t ranks[2];
    memory[TICKET / 8] = 2;
    kvshm_lease(table, EPOCH, BIT, &plan, 1, &taken);
    for (int i = 0; i < 2; i++)
        pthread_create(&ranks[i], NULL, rank, &numbers[i]);
    pthread_create(&one, NULL, exporter, NULL);
    for (int i = 0; i < 2; i++)
        pthread_join(ranks[i], NULL);
    pthread_join(one, NULL);
    return 0;
#endif
    pthread_create(&one, NULL, exporter, NULL);
    pthread_create(&other, NULL, importer, NULL);
    pthread_join(one, NULL);
    pthread_join(other, NULL);
    return 0;
}
