/* kvshm native core, see _core.h.
 *
 * Memory order (protocol-review A7; each line is stated again where it is used)
 * =============================================================================
 *
 *   operation        order                                why
 *   ---------------  -----------------------------------  ------------------------------------------
 *   publish          fields relaxed, CAS acq_rel          readers who see READY see the fields
 *   lease            word acquire, hash relaxed,          the CAS closes the bracket: it succeeds
 *                    CAS acq_rel from the LOADED value    only if nothing changed since the load
 *   retract, drain,  CAS acq_rel, then fence seq_cst      importers' reads come before the reuse,
 *   force, reset                                          the new word before the new bytes
 *   release, sweep   CAS release                          own reads of the block come before it
 *   re-check         fence acquire AFTER the last byte    an acquire load alone would not keep the
 *                    was read, then relaxed loads         earlier reads of bytes before it
 *   scan             word acquire, fields relaxed,        a seq-lock read: unchanged word, hence
 *                    fence acquire, word relaxed          untorn fields
 *   ready mark       release, read with acquire           openers see a whole header
 *   life, retired    store, then fence seq_cst            before the owner frees its memory
 *   index            sequence odd, fence release,         a seq-lock; its reader may give up, since
 *                    entries relaxed, sequence release    what it finds is a hint
 *
 * Nobody ever stores plainly to a slot's word: each change is a read-modify-write, so that the
 * exporter's next one synchronises with all releases before it.  A CAS that fails starts again
 * with the value it found, and with all checks of that value; only publish gives up. */

#include "_core_words.h"

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
    /* acquire: pairs with kvshm_mark_ready, the header below is whole */
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
    int status = kvshm_open_segment(segment, KVSHM_TABLE_HEADER_BYTES, &bytes);
    if (status != KVSHM_OK)
        return status;
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
    int status = kvshm_open_table(segment, table);
    for (size_t i = 0; status == KVSHM_OK && i < count; i++)
        if (records[i].block_id >= table->num_blocks)
            status = KVSHM_OUT_OF_RANGE;
    return status;
}

int kvshm_open_for_blocks(kvshm_segment segment, table_view *table, const uint32_t *blocks,
                           size_t count)
{
    int status = kvshm_open_table(segment, table);
    for (size_t i = 0; status == KVSHM_OK && i < count; i++)
        if (blocks[i] >= table->num_blocks)
            status = KVSHM_OUT_OF_RANGE;
    return status;
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
    int status = check_word(segment, offset);
    if (status == KVSHM_OK)
        *value = get_acquire(segment.base + offset);
    return status;
}

int64_t kvshm_store(kvshm_segment segment, uint64_t offset, uint64_t value)
{
    int status = check_word(segment, offset);
    if (status == KVSHM_OK) {
        atomic_store_explicit(word_at(segment.base + offset), value, memory_order_seq_cst);
        /* seq_cst: no later write passes a zeroed life word (a store alone lets it, on Arm) */
        atomic_thread_fence(memory_order_seq_cst);
    }
    return status;
}

int64_t kvshm_add(kvshm_segment segment, uint64_t offset, uint64_t delta, uint64_t *before)
{
    int status = check_word(segment, offset);
    if (status == KVSHM_OK) /* acq_rel: a ticket's last rank sees what the others did */
        *before = atomic_fetch_add_explicit(word_at(segment.base + offset), delta,
                                            memory_order_acq_rel);
    return status;
}

int64_t kvshm_compare_exchange(kvshm_segment segment, uint64_t offset, uint64_t *expected,
                               uint64_t desired)
{
    int status = check_word(segment, offset);
    return status == KVSHM_OK ? swap(segment.base + offset, expected, desired) : status;
}

int64_t kvshm_mark_ready(kvshm_segment segment, uint32_t layout_version)
{
    int status = check_word(segment, KVSHM_VERSION_OFFSET);
    if (status == KVSHM_OK) /* release: openers who see the version see the whole header */
        atomic_store_explicit(
            (_Atomic uint32_t *)(uintptr_t)(segment.base + KVSHM_VERSION_OFFSET), layout_version,
            memory_order_release);
    return status;
}

/* -- copies ---------------------------------------------------------------------------------- */

static int check_region(const kvshm_region *region, const uint32_t *blocks, size_t count)
{
    uint64_t reach;
    if (region->num_blocks && (__builtin_mul_overflow(region->num_blocks - 1, region->stride, &reach) ||
                               __builtin_add_overflow(reach, region->block_bytes, &reach) ||
                               __builtin_add_overflow(reach, (uintptr_t)region->base, &reach)))
        return KVSHM_INVALID;
    for (size_t i = 0; i < count; i++)
        if (blocks[i] >= region->num_blocks)
            return KVSHM_OUT_OF_RANGE;
    return KVSHM_OK;
}

int64_t kvshm_copy_blocks(const kvshm_region *from, const kvshm_region *to, size_t regions,
                          const uint32_t *source, const uint32_t *target, size_t count,
                          const int32_t *stop)
{
    int status = KVSHM_OK;
    for (size_t r = 0; r < regions && status == KVSHM_OK; r++) {
        status = from[r].block_bytes == to[r].block_bytes ? KVSHM_OK : KVSHM_INVALID;
        if (status == KVSHM_OK)
            status = check_region(&from[r], source, count);
        if (status == KVSHM_OK)
            status = check_region(&to[r], target, count);
    }
    if (status != KVSHM_OK)
        return status;
    size_t done = 0;
    for (; done < count; done++) {
        /* relaxed: a request to end early orders nothing */
        if (stop && atomic_load_explicit((const _Atomic int32_t *)stop, memory_order_relaxed))
            break;
        for (size_t r = 0; r < regions; r++)
            memmove(to[r].base + target[done] * to[r].stride,
                    from[r].base + source[done] * from[r].stride, to[r].block_bytes);
    }
    return (int64_t)done;
}
