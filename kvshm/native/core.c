/* kvshm native core, see core.h.
 *
 * Memory order
 * ============
 *
 * Every atomic operation of the core and the reason for its order; a test compares this table with
 * the code.  get, put, get_acquire and swap (core_words.h) are listed as the operations that they
 * are.  CAS: order of success/failure.  Checked under weak memory by tests/model/weak_memory.c
 * (slots) and weak_index.c.  Untested on aarch64.
 *
 *     function               operation            why
 *     ---------------------  -------------------  ------------------------------------------------
 *   core_words.h
 *     read_fields            load relaxed         the caller orders it: read_ready's fences; in
 *                                                 retract no other thread writes
 *   core.c
 *     kvshm_open_segment     load acquire         the version, see kvshm_mark_ready
 *     kvshm_open_segment     load relaxed         behind that acquire; these words never change
 *                                                 again
 *     kvshm_open_table       load relaxed         likewise
 *     kvshm_load             load acquire         who sees a word sees what was done before it was
 *                                                 stored
 *     kvshm_store            store seq_cst        releases what came before: set_life, the memory
 *                                                 it vouches for
 *     kvshm_store            fence seq_cst        a zeroed life word before what the owner does to
 *                                                 its memory next; a store alone lets later stores
 *                                                 pass it, on Arm
 *     kvshm_add              add acq_rel          counters and heartbeats: none is lost; more order
 *                                                 than they need
 *     kvshm_compare_exchange CAS acq_rel/acquire  tickets: the last rank has all others' reads
 *                                                 behind it when it releases their leases
 *     kvshm_mark_ready       store release        openers who see the version see the whole header
 *     kvshm_copy_blocks      load relaxed         a request to end early orders nothing
 *   exporter.c
 *     publish_slot           load acquire         start of the CAS; more than needed, this thread
 *                                                 emptied the slot
 *     publish_slot           store relaxed        the fields: not trusted before the CAS
 *     publish_slot           CAS acq_rel/acquire  who sees READY sees the fields, and the bytes:
 *                                                 whoever wrote them told this thread before
 *     vacate                 CAS acq_rel/acquire  importers' reads, released with their leases,
 *                                                 before the reuse
 *     fence_before_reuse     fence seq_cst        the new words before the new bytes, which others
 *                                                 write once they are told; no CAS keeps later
 *                                                 stores back, on Arm
 *     leave_ready            load acquire         start of the CAS, which checks again
 *     leave_ready            CAS acq_rel/acquire  to DRAINING: a lease is either in this word or
 *                                                 fails
 *     must_wait              load acquire         start of the CAS in vacate
 *     kvshm_force            load acquire         start of the CAS in vacate
 *     kvshm_reset            load acquire         start of the CAS in vacate
 *     kvshm_kept             load relaxed         word and hold: a hint, nothing is read behind it
 *   importer.c
 *     same_key               load relaxed         between the acquire before and the CAS after it
 *     kvshm_is_alive         load acquire         who finds a table alive finds its memory as it
 *                                                 was when that was said
 *     has_died               load relaxed         for a lease a hint; in the re-check behind its
 *                                                 fence: the kernel marks a death before it gives
 *                                                 any of the process's memory back
 *     lease_slot             load acquire         the hash is read after the word
 *     lease_slot             CAS acq_rel/acquire  from the LOADED word: nothing changed since, so
 *                                                 word and hash belong together; without a bit the
 *                                                 re-check closes the bracket
 *     clear_leases           load relaxed         start of the CAS, which checks again
 *     clear_leases           CAS release/relaxed  own reads of the block before it; the exporter's
 *                                                 CAS acquires
 *     raise_hold             load relaxed         start of the CAS
 *     raise_hold             CAS relaxed/relaxed  a hint: a reuse between check and CAS gives the
 *                                                 hold to other contents, or clears it
 *     kvshm_hold             load acquire         the hash is read after the word
 *     kvshm_recheck          fence acquire        AFTER the last byte was read: a load-acquire of
 *                                                 the word would not keep earlier reads before it
 *     kvshm_recheck          load relaxed         behind that fence
 *     read_ready             load acquire         the fields are read after the word
 *     read_ready             fence acquire        ... and before it is read again: unchanged, hence
 *                                                 untorn
 *     read_ready             load relaxed         behind that fence
 *   census.c
 *     kvshm_census_add       load acquire         statistics: a slot that changes may be counted as
 *                                                 it was, or by a torn hash
 *     place_of               load relaxed         likewise
 *     kvshm_census_missing   load acquire         likewise
 *     kvshm_census_missing   load relaxed         likewise
 *     is_known               load relaxed         likewise; and an entry that moves may be missed
 *   duplicates.c
 *     open_row               load relaxed         a row that is reused: the table is asked for the
 *                                                 epoch
 *     would_lease            load acquire         the hash is read after the word; all of it a hint
 *     read_slot              load relaxed         own words, which this thread writes; the hold is a
 *                                                 hint
 *   core_index.h
 *     open_index             load relaxed         the capacity never changes after kvshm_mark_ready
 *     entry_at               load relaxed         a reader: within its seq-lock; the writer: its
 *                                                 own words
 *   replica.c
 *     set_entry              store relaxed        between begin_write and end_write
 *     begin_write            load relaxed         one writer
 *     begin_write            store relaxed        odd: kept before the entries by the fence
 *     begin_write            fence release        odd before the first entry changes
 *     end_write              store release        even after the last entry has changed
 *     count_entry            load relaxed         one writer
 *     count_entry            store relaxed        the writer's own; others only show it
 *     insert                 load relaxed         one writer
 *     copy_row               load relaxed         one writer
 *     copy_row               store relaxed        no reader has the new index yet:
 *                                                 kvshm_store does that
 *     is_sound               load relaxed         one writer
 *     kvshm_index_copy       load relaxed         one writer
 *   lookup.c
 *     find                   load acquire         even: the entries are read after it
 *     find                   fence acquire        ... and before it is read again; after the last
 *                                                 try the reader takes what it has, a hint
 *     find                   load relaxed         behind that fence
 *   py_module.c
 *     at_sync_point          sub seq_cst          tests only
 *     native_arm_sync_point  store seq_cst        tests only
 *   py_pulse.c
 *     beat                   store release        who sees the pulse sees what was done before it;
 *                                                 the kernel's mark is a read-modify-write
 *     wait_while             load seq_cst         both sides of a futex of this process; rare
 *     change                 store seq_cst        likewise
 *     drop_holder            sub seq_cst          the last of two frees
 *     begin                  store seq_cst        before the thread exists, or when it never will
 *     begin                  load seq_cst         how the thread began
 *
 * No code stores plainly to a slot's word: each change is a read-modify-write, so that the
 * exporter's next one synchronises with all releases before it.  A failed CAS is repeated with the
 * value that it found, after all checks of that value; only publish gives up. */

#include "core_words.h"

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "64-bit atomics must be lock-free to be shared");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the layout is little-endian");
_Static_assert(sizeof(kvshm_record) == KVSHM_RECORD_BYTES, "records have no padding");

void (*kvshm_sync_hook)(int point) = NULL;

/* -- views: every number of a header is read once and checked before it is used ------------- */

int kvshm_open_segment(kvshm_segment segment, uint32_t header_bytes, uint64_t *bytes)
{
    if (segment.length < header_bytes)
        return KVSHM_CORRUPT;
    if ((uintptr_t)segment.base % 8)
        return KVSHM_INVALID;
    /* acquire: pairs with kvshm_mark_ready, so that the rest of the header is complete */
    uint32_t version = atomic_load_explicit(
        (_Atomic uint32_t *)(uintptr_t)(segment.base + KVSHM_VERSION_OFFSET), memory_order_acquire);
    *bytes = get(segment.base + KVSHM_SEGMENT_BYTES_OFFSET);
    bool sound = version == KVSHM_LAYOUT_VERSION && *bytes <= segment.length &&
                 *bytes >= header_bytes &&
                 get_half(segment.base + KVSHM_HEADER_BYTES_OFFSET) == header_bytes;
    return sound ? KVSHM_OK : KVSHM_CORRUPT;
}

int kvshm_open_table(kvshm_segment segment, table_view *table)
{
    uint64_t bytes;
    RETURN_UNLESS_OK(kvshm_open_segment(segment, KVSHM_TABLE_HEADER_BYTES, &bytes));
    table->base = segment.base;
    table->slots = segment.base + KVSHM_TABLE_HEADER_BYTES;
    table->num_blocks = get_half(segment.base + KVSHM_NUM_BLOCKS_OFFSET);
    table->num_ranks = get_half(segment.base + KVSHM_NUM_RANKS_OFFSET);
    if (!table->num_blocks || !table->num_ranks || table->num_ranks > KVSHM_MAX_RANKS)
        return KVSHM_CORRUPT;
    uint64_t per_block = KVSHM_SLOT_BYTES + 8 * (uint64_t)table->num_ranks;
    uint64_t room = bytes - KVSHM_TABLE_HEADER_BYTES;
    return table->num_blocks <= room / per_block ? KVSHM_OK : KVSHM_CORRUPT;
}

int kvshm_open_for_records(kvshm_segment segment, table_view *table, const kvshm_record *records,
                            size_t count)
{
    RETURN_UNLESS_OK(kvshm_open_table(segment, table));
    for (size_t i = 0; i < count; i++)
        if (records[i].block_id >= table->num_blocks)
            return KVSHM_OUT_OF_RANGE;
    return KVSHM_OK;
}

int kvshm_open_for_blocks(kvshm_segment segment, table_view *table, const uint32_t *blocks,
                           size_t count)
{
    RETURN_UNLESS_OK(kvshm_open_table(segment, table));
    for (size_t i = 0; i < count; i++)
        if (blocks[i] >= table->num_blocks)
            return KVSHM_OUT_OF_RANGE;
    return KVSHM_OK;
}

/* -- words of a header ----------------------------------------------------------------------- */

static int check_word(kvshm_segment segment, uint64_t offset)
{
    if ((uintptr_t)segment.base % 8 || offset % 8)
        return KVSHM_INVALID;
    return segment.length >= 8 && offset <= segment.length - 8 ? KVSHM_OK : KVSHM_OUT_OF_RANGE;
}

int64_t kvshm_load(kvshm_segment segment, uint64_t offset, uint64_t *value)
{
    RETURN_UNLESS_OK(check_word(segment, offset));
    *value = get_acquire(segment.base + offset);
    return KVSHM_OK;
}

int64_t kvshm_store(kvshm_segment segment, uint64_t offset, uint64_t value)
{
    RETURN_UNLESS_OK(check_word(segment, offset));
    atomic_store_explicit(word_at(segment.base + offset), value, memory_order_seq_cst);
    /* seq_cst: no later write passes a zeroed life word.  On Arm one may pass a store alone. */
    atomic_thread_fence(memory_order_seq_cst);
    return KVSHM_OK;
}

int64_t kvshm_add(kvshm_segment segment, uint64_t offset, uint64_t delta, uint64_t *before)
{
    RETURN_UNLESS_OK(check_word(segment, offset));
    /* acq_rel: counters would need less */
    *before = atomic_fetch_add_explicit(word_at(segment.base + offset), delta,
                                        memory_order_acq_rel);
    return KVSHM_OK;
}

int64_t kvshm_observe(kvshm_segment segment, uint64_t histogram, uint64_t value)
{
    uint64_t bits = value ? 64 - (uint64_t)__builtin_clzll(value) : 0, before;
    uint64_t bucket = bits < KVSHM_NUM_BUCKETS ? bits : KVSHM_NUM_BUCKETS - 1;
    RETURN_UNLESS_OK(kvshm_add(segment, histogram + 8 * bucket, 1, &before));
    return kvshm_add(segment, histogram + 8 * KVSHM_NUM_BUCKETS, value, &before);
}

int64_t kvshm_compare_exchange(kvshm_segment segment, uint64_t offset, uint64_t *expected,
                               uint64_t desired)
{
    RETURN_UNLESS_OK(check_word(segment, offset));
    return swap(segment.base + offset, expected, desired);
}

int64_t kvshm_mark_ready(kvshm_segment segment, uint32_t layout_version)
{
    RETURN_UNLESS_OK(check_word(segment, KVSHM_VERSION_OFFSET));
    /* release: openers that see the version see the whole header */
    atomic_store_explicit((_Atomic uint32_t *)(uintptr_t)(segment.base + KVSHM_VERSION_OFFSET),
                          layout_version, memory_order_release);
    return KVSHM_OK;
}

/* -- copies ---------------------------------------------------------------------------------- */

static int check_region(const kvshm_region *region, const uint32_t *blocks, size_t count)
{
    uint64_t reach;
    if (region->num_blocks &&
        (__builtin_mul_overflow(region->num_blocks - 1, region->stride, &reach) ||
         __builtin_add_overflow(reach, region->block_bytes, &reach) ||
         __builtin_add_overflow(reach, (uintptr_t)region->base, &reach)))
        return KVSHM_INVALID;
    for (size_t i = 0; i < count; i++)
        if (blocks[i] >= region->num_blocks)
            return KVSHM_OUT_OF_RANGE;
    return KVSHM_OK;
}

static uint8_t *at(const kvshm_region *region, uint32_t block)
{
    return region->base + block * region->stride;
}

enum { CACHE_LINE = 64, READ_AHEAD = 1024, WRITE_AHEAD = 512 };

/* While a block of one region is copied, the beginning of the next is fetched: the processor sees
 * only after some lines that it is read and written in order, which is much of the time of a block
 * of 4 KiB.  Always inline: gcc leaves out calls of a function that only fetches. */
static inline __attribute__((always_inline)) void fetch_ahead(const uint8_t *from,
                                                              const uint8_t *to, uint64_t bytes)
{
    for (uint64_t line = 0; line < READ_AHEAD && line < bytes; line += CACHE_LINE)
        __builtin_prefetch(from + line);
    for (uint64_t line = 0; line < WRITE_AHEAD && line < bytes; line += CACHE_LINE)
        __builtin_prefetch(to + line, 1);
}

int64_t kvshm_copy_blocks(const kvshm_region *from, const kvshm_region *to, size_t regions,
                          const uint32_t *source, const uint32_t *target, size_t count,
                          const int32_t *stop)
{
    for (size_t r = 0; r < regions; r++) {
        if (from[r].block_bytes != to[r].block_bytes)
            return KVSHM_INVALID;
        RETURN_UNLESS_OK(check_region(&from[r], source, count));
        RETURN_UNLESS_OK(check_region(&to[r], target, count));
    }
    size_t done = 0;
    for (; done < count; done++) {
        /* relaxed: a request to end early orders nothing */
        if (stop && atomic_load_explicit((const _Atomic int32_t *)stop, memory_order_relaxed))
            break;
        for (size_t r = 0; r < regions; r++) {
            size_t next = r + 1 < regions ? done : done + 1, of = r + 1 < regions ? r + 1 : 0;
            if (next < count)
                fetch_ahead(at(&from[of], source[next]), at(&to[of], target[next]),
                            to[of].block_bytes);
            memmove(at(&to[r], target[done]), at(&from[r], source[done]), to[r].block_bytes);
        }
    }
    return (int64_t)done;
}
