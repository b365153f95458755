/* The replica index in memory, for its writer (replica.c) and its readers (lookup.c).
 *
 * The index uses open addressing with linear probing over 16-byte entries: an entry lies between
 * its home and the first free entry after its home.  A home is the first of the four entries that
 * share a cache line, so that most searches touch one line. */
#ifndef KVSHM_CORE_INDEX_H
#define KVSHM_CORE_INDEX_H

#include "core_words.h"

typedef struct {
    uint8_t *base, *entries;
    uint64_t capacity;
} index_view;

typedef struct {
    uint64_t tag, place;
} entry;

static inline int open_index(kvshm_segment segment, index_view *index)
{
    uint64_t bytes;
    RETURN_UNLESS_OK(kvshm_open_segment(segment, KVSHM_INDEX_HEADER_BYTES, &bytes));
    uint64_t capacity = get(segment.base + KVSHM_CAPACITY_OFFSET);
    uint64_t room = (bytes - KVSHM_INDEX_HEADER_BYTES) / KVSHM_ENTRY_BYTES;
    if (capacity < 8 || capacity & (capacity - 1) || capacity > room)
        return KVSHM_CORRUPT;
    *index = (index_view){segment.base, segment.base + KVSHM_INDEX_HEADER_BYTES, capacity};
    return KVSHM_OK;
}

/* Odd, so that the tags of one hash differ in all groups. */
#define GROUP_FACTOR 0x9e3779b97f4a7c15ULL

static inline uint64_t tag_of(const kvshm_record *record)
{
    uint64_t tag;
    memcpy(&tag, record->hash, 8);
    return tag ^ record->group * GROUP_FACTOR;
}

enum { LINE_ENTRIES = 64 / KVSHM_ENTRY_BYTES };

/* Where the chain of a tag begins.  murmur3's finalizer mixes the tag, because hashes need not be
 * uniform. */
static inline uint64_t home_of(const index_view *index, uint64_t tag)
{
    tag = (tag ^ tag >> 33) * 0xff51afd7ed558ccdULL;
    tag = (tag ^ tag >> 33) * 0xc4ceb9fe1a85ec53ULL;
    return (tag ^ tag >> 33) & (index->capacity - 1) & ~(uint64_t)(LINE_ENTRIES - 1);
}

static inline uint64_t after(const index_view *index, uint64_t position)
{
    return (position + 1) & (index->capacity - 1);
}

static inline const uint8_t *address_of(const index_view *index, uint64_t position)
{
    return index->entries + position * KVSHM_ENTRY_BYTES;
}

static inline entry entry_at(const index_view *index, uint64_t position)
{
    const uint8_t *at = address_of(index, position);
    return (entry){get(at), get(at + 8)};
}

static inline uint64_t make_place(uint32_t row, const kvshm_record *record)
{
    return (uint64_t)record->generation << 32 | (row + 1) << KVSHM_ENTRY_ROW_SHIFT |
           record->block_id;
}

static inline uint32_t row_of(entry e) { return ((uint32_t)e.place >> KVSHM_ENTRY_ROW_SHIFT) - 1; }
static inline bool is_free(entry e) { return row_of(e) == UINT32_MAX; }
static inline uint32_t generation_in(entry e) { return (uint32_t)(e.place >> 32); }

static inline uint32_t block_of(entry e)
{
    return (uint32_t)e.place & ((1u << KVSHM_ENTRY_ROW_SHIFT) - 1);
}

#endif
