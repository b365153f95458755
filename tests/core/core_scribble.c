/* A replica index whose words another thread changes all the time, and puts back, as any process of
 * the user could: whatever the writer and a reader make of it, they stay inside the segment. */

#include "core_driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

enum { SECONDS = 3, HEARD_OF = 16, ROW_FAR_AWAY = 254 /* its counter lies 16 KiB off */ };

typedef struct {
    kvshm_segment index;
    atomic_bool finished;
} scribbled;

static _Atomic uint64_t *word(kvshm_segment segment, uint64_t offset)
{
    return (_Atomic uint64_t *)(void *)(segment.base + offset);
}

static void change(_Atomic uint64_t *at, uint64_t value)
{
    uint64_t before = atomic_load_explicit(at, memory_order_relaxed);
    atomic_store_explicit(at, value, memory_order_relaxed);
    for (volatile int i = 0; i < 30; i++) {
    }
    atomic_store_explicit(at, before, memory_order_relaxed);
}

static void *scribble(void *argument)
{
    scribbled *shared = argument;
    uint64_t seed = 3;
    while (!shared->finished)
        for (uint64_t entry = 0; entry < CAPACITY; entry++) {
            uint64_t at = KVSHM_INDEX_HEADER_BYTES + entry * KVSHM_ENTRY_BYTES;
            _Atomic uint64_t *place = word(shared->index, at + 8);
            uint64_t held = atomic_load_explicit(place, memory_order_relaxed);
            uint64_t row = (uint64_t)0xff << KVSHM_ENTRY_ROW_SHIFT;
            if (held & row)
                change(place, held | row);
            if (below(&seed, 64))
                continue;
            at = below(&seed, 2) ? at : below(&seed, KVSHM_INDEX_HEADER_BYTES / 8) * 8;
            change(word(shared->index, at), random_word(&seed));
        }
    return NULL;
}

/* Else it is so spoilt after a while that nothing is looked at any more. */
static void begin_again(kvshm_segment index, uint8_t *tombstones)
{
    memset(tombstones, 0, HEARD_OF * KVSHM_TOMBSTONE_BYTES);
    for (uint64_t at = KVSHM_INDEX_HEADER_BYTES; at < index.length; at += 8)
        atomic_store_explicit(word(index, at), 0, memory_order_relaxed);
    atomic_store_explicit(word(index, KVSHM_COUNT_OFFSET), 0, memory_order_relaxed);
}

static void write_and_read(kvshm_segment index, uint8_t *tombstones, uint32_t round)
{
    kvshm_record batch[4];
    kvshm_applied applied = {0};
    uint8_t owners[4];
    for (uint32_t i = 0; i < 4; i++)
        batch[i] = event((round * 4 + i) % 24, (round + i) % HEARD_OF, round, KVSHM_PUBLISH);
    kvshm_index_apply(index, tombstones, HEARD_OF * KVSHM_TOMBSTONE_BYTES, 0, batch, 4, &applied);
    kvshm_index_lookup(index, batch, 4, ~0ULL, owners);
    if (round % 1000 == 0) {
        kvshm_index_drop_row(index, 0);
        begin_again(index, tombstones);
    }
    if (round % 10000 == 0) {
        kvshm_segment larger = new_index();
        kvshm_index_copy(index, larger);
        free(larger.base);
    }
}

void scribble_on_index(void)
{
    scribbled shared = {.index = new_index()};
    pthread_t scribbler;
    pthread_create(&scribbler, NULL, scribble, &shared);
    _Alignas(8) uint8_t tombstones[HEARD_OF * KVSHM_TOMBSTONE_BYTES] = {0};
    uint32_t round = 0;
    for (time_t end = time(NULL) + SECONDS; time(NULL) < end;)
        for (int i = 0; i < 1000; i++)
            write_and_read(shared.index, tombstones, ++round);
    shared.finished = true;
    pthread_join(scribbler, NULL);
    printf("%u rounds\n", round);
    free(shared.index.base);
}
