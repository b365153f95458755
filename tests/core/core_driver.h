/* What the parts of the driver share: checks, dice, segments, records. */
#ifndef CORE_DRIVER_H
#define CORE_DRIVER_H

#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 4, RANKS = 2, IMPORTERS = 3, WORDS = 64, CAPACITY = 64 };

#define EPOCH 0x123456789abcdef0ULL

#define REQUIRE(condition)                                                                       \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);              \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

static inline uint64_t random_word(uint64_t *seed) /* splitmix64 */
{
    uint64_t word = *seed += 0x9e3779b97f4a7c15ULL;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9ULL;
    word = (word ^ word >> 27) * 0x94d049bb133111ebULL;
    return word ^ word >> 31;
}

static inline uint32_t below(uint64_t *seed, uint32_t limit)
{
    return (uint32_t)(random_word(seed) % limit);
}

/* -- segments of exactly the size they state, so that a byte beyond is a report ---------------- */

static inline kvshm_segment new_segment(uint32_t header_bytes, uint64_t length)
{
    kvshm_segment segment = {calloc(1, length), length};
    REQUIRE(segment.base);
    memcpy(segment.base + KVSHM_HEADER_BYTES_OFFSET, &header_bytes, 4);
    memcpy(segment.base + KVSHM_SEGMENT_BYTES_OFFSET, &length, 8);
    REQUIRE(kvshm_mark_ready(segment, KVSHM_LAYOUT_VERSION) == KVSHM_OK);
    return segment;
}

static inline kvshm_segment new_table(void)
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

static inline kvshm_segment new_index(void)
{
    uint64_t length = KVSHM_INDEX_HEADER_BYTES + CAPACITY * KVSHM_ENTRY_BYTES;
    kvshm_segment index = new_segment(KVSHM_INDEX_HEADER_BYTES, length);
    REQUIRE(kvshm_store(index, KVSHM_CAPACITY_OFFSET, CAPACITY) == KVSHM_OK);
    return index;
}

static inline kvshm_record event(uint32_t number, uint32_t block, uint32_t generation, uint32_t kind)
{
    kvshm_record record = {{0}, block, generation, number, kind, number % 3};
    memcpy(record.hash, &number, 4);
    return record;
}

void fuzz(void);              /* core_fuzz.c */
void scribble_on_index(void); /* core_scribble.c */

#endif
