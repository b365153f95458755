/* Glue between Python and the core: replica index and copies. */

#include "py_module.h"

#include <stdbool.h>
#include <string.h>

/* Hashes that are looked up at a time. */
enum { STEP = KVSHM_SEARCH_AHEAD / 2 };

/* -- index ----------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer tombstones;
    unsigned int row;
    const kvshm_record *records; /* of a bytes object, which stays as it is */
    size_t count;
} batch;

static bool take_batch(PyObject *item, batch *taken)
{
    PyObject *packed;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a batch is a tuple");
        return false;
    }
    if (!PyArg_ParseTuple(item, "w*IS:batch", &taken->tombstones, &taken->row, &packed))
        return false;
    size_t size = (size_t)PyBytes_Size(packed);
    taken->records = (const void *)PyBytes_AsString(packed);
    taken->count = size / sizeof(kvshm_record);
    if (size % sizeof(kvshm_record) == 0 &&
        (uintptr_t)taken->records % _Alignof(kvshm_record) == 0)
        return true;
    PyErr_Format(PyExc_ValueError, "%zu bytes are not a whole number of records", size);
    PyBuffer_Release(&taken->tombstones);
    return false;
}

static int64_t apply_batches(kvshm_segment index, const batch *batches, size_t count,
                             kvshm_applied *sum)
{
    int64_t status = KVSHM_OK;
    for (const batch *b = batches; b < batches + count && status == KVSHM_OK; b++)
        status = kvshm_index_apply(index, b->tombstones.buf, (uint64_t)b->tombstones.len, b->row,
                                   b->records, b->count, sum);
    return status;
}

/* Apply all batches, and release the GIL once at most: beside a busy scheduler a thread gets the
 * GIL back only after milliseconds. */
static PyObject *apply_taken(PyObject *module, const Py_buffer *index, const batch *batches,
                             size_t count)
{
    kvshm_applied sum = {0, 0, 0, 0};
    size_t records = 0;
    for (size_t i = 0; i < count; i++)
        records += batches[i].count;
    int64_t status;
    WITHOUT_GIL(records, status = apply_batches(segment_of(index), batches, count, &sum));
    if (status < 0)
        return kvshm_raise(module, index, status);
    return Py_BuildValue("(KKKK)", (unsigned long long)sum.added, (unsigned long long)sum.removed,
                         (unsigned long long)sum.ignored, (unsigned long long)sum.full);
}

static PyObject *native_index_apply(PyObject *module, PyObject *args)
{
    BUFFER(index);
    ARRAY(batches, batch);
    PyObject *list;
    if (!PyArg_ParseTuple(args, "w*O!:index_apply", &index, &PyList_Type, &list))
        return NULL;
    PyObject *items = PyList_AsTuple(list); /* keeps the batches, even if the list changes */
    size_t count = items ? (size_t)PyTuple_Size(items) : 0, taken = 0;
    batch *batch_at = items ? kvshm_make_room(&batches, count) : NULL;
    while (batch_at && taken < count &&
           take_batch(PyTuple_GetItem(items, (Py_ssize_t)taken), &batch_at[taken]))
        taken++;
    PyObject *result =
        batch_at && taken == count ? apply_taken(module, &index, batch_at, count) : NULL;
    while (taken)
        PyBuffer_Release(&batch_at[--taken].tombstones);
    Py_XDECREF(items);
    return result;
}

/* Add to the block ids of records, modulo 2^32. */
static void shift_blocks(kvshm_record *records, size_t count, uint32_t by)
{
    for (size_t i = 0; i < count; i++)
        records[i].block_id += by;
}

/* The core walks the blocks twice, to count the records and to write them: no block may be stale,
 * or every one.  It counts blocks from that of the first tombstone on: a block before it becomes
 * one that is far beyond all tombstones, which the core skips. */
static PyObject *native_index_stale(PyObject *module, PyObject *args)
{
    (void)module;
    BUFFER(before);
    ARRAY(scanned, kvshm_record);
    ARRAY(seen, uint8_t);
    unsigned int first = 0;
    if (!PyArg_ParseTuple(args, "y*O&|I:index_stale", &before, kvshm_to_array, &scanned, &first))
        return NULL;
    shift_blocks(scanned.of, scanned.count, -first);
    size_t bytes = (size_t)before.len, num_blocks = bytes / KVSHM_TOMBSTONE_BYTES, stale;
    if (!kvshm_make_room(&seen, num_blocks))
        return NULL;
    memset(seen.of, 0, seen.count);
    WITHOUT_GIL(num_blocks, stale = kvshm_index_stale(before.buf, bytes, scanned.of, scanned.count,
                                                      seen.of, NULL));
    kvshm_record *out;
    PyObject *records = kvshm_new_records(stale, &out);
    if (records)
        WITHOUT_GIL(num_blocks, kvshm_index_stale(before.buf, bytes, scanned.of, scanned.count,
                                                  seen.of, out);
                    shift_blocks(out, stale, first));
    return records;
}

static PyObject *native_index_drop_row(PyObject *module, PyObject *args)
{
    BUFFER(index);
    unsigned int row;
    if (!PyArg_ParseTuple(args, "w*I:index_drop_row", &index, &row))
        return NULL;
    int64_t dropped;
    WITHOUT_GIL(SIZE_MAX, dropped = kvshm_index_drop_row(segment_of(&index), row));
    return kvshm_number(module, &index, dropped);
}

static PyObject *native_index_copy(PyObject *module, PyObject *args)
{
    BUFFER(from);
    BUFFER(to);
    if (!PyArg_ParseTuple(args, "y*w*:index_copy", &from, &to))
        return NULL;
    int64_t copied;
    WITHOUT_GIL(SIZE_MAX, copied = kvshm_index_copy(segment_of(&from), segment_of(&to)));
    return kvshm_number(module, &to, copied);
}

/* While one hash is read, the memory of the hash this far ahead is fetched.  A bytes object has a
 * head of about DIGEST_AT bytes. */
enum { AHEAD = 16, DIGEST_AT = 32 };

/* A list with `scale` hashes for each block of a group, whose own is its last. */
typedef struct {
    PyObject *hashes;
    Py_ssize_t scale;
    uint16_t group;
} chain;

static PyObject *hash_of(const chain *of, Py_ssize_t block)
{
    return PyList_GetItem(of->hashes, (block + 1) * of->scale - 1);
}

static bool copy_digest(PyObject *item, uint8_t *to)
{
    char *digest;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(item, &digest, &size) < 0)
        return false;
    if (size < 1 || size > KVSHM_HASH_BYTES) {
        PyErr_Format(PyExc_ValueError, "a block hash has 1 to 32 bytes, not %zd", size);
        return false;
    }
    if (size == KVSHM_HASH_BYTES) { /* most hashes: with a constant size memcpy needs no call */
        memcpy(to, digest, KVSHM_HASH_BYTES);
        return true;
    }
    memset(to, 0, KVSHM_HASH_BYTES);
    memcpy(to, digest, (size_t)size);
    return true;
}

static PyObject *fetched_hash(const chain *of, Py_ssize_t block)
{
    PyObject *item = hash_of(of, block);
    __builtin_prefetch(item);
    __builtin_prefetch((const char *)item + DIGEST_AT + KVSHM_HASH_BYTES - 1);
    return item;
}

/* Copy hash, padded with zeros, and group of `count` blocks from `start` on; the list has them all.
 * A block's depth is its place in the prompt: the index does not have it.
 * False with an exception.  Runs no Python code, so that nothing changes the list meanwhile. */
static bool copy_keys(const chain *of, Py_ssize_t start, size_t count, kvshm_record *records)
{
    PyObject *ahead[AHEAD]; /* the hashes of block i and those behind it, each at i % AHEAD */
    Py_ssize_t stop = start + (Py_ssize_t)count;
    for (Py_ssize_t i = start; i < stop && i < start + AHEAD; i++)
        ahead[i % AHEAD] = fetched_hash(of, i);
    for (Py_ssize_t i = start; i < stop; i++, records++) {
        PyObject *hash = ahead[i % AHEAD];
        if (stop - i > AHEAD)
            ahead[i % AHEAD] = fetched_hash(of, i + AHEAD);
        if (!copy_digest(hash, records->hash))
            return false;
        records->group = of->group;
        records->depth = (uint32_t)i;
    }
    return true;
}

/* Cut the first `length` records at each change of owner: a list of (row, records).  `packed` holds
 * `count` records. */
static PyObject *list_of_runs(PyObject *packed, size_t count, const uint8_t *owners,
                              size_t length)
{
    const kvshm_record *records = (const void *)PyBytes_AsString(packed);
    PyObject *runs = PyList_New(0);
    for (size_t begin = 0, end; runs && begin < length; begin = end) {
        for (end = begin + 1; end < length && owners[end] == owners[begin];)
            end++;
        PyObject *part = end - begin == count
                             ? Py_NewRef(packed)
                             : bytes_of(records + begin, (end - begin) * sizeof *records);
        PyObject *run = part ? Py_BuildValue("(iN)", owners[begin], part) : NULL;
        if (!run || PyList_Append(runs, run) < 0)
            Py_CLEAR(runs);
        Py_XDECREF(run);
    }
    return runs;
}

/* Look up behind the first block, which was found.  Hashes are read, and their entries fetched, one
 * step ahead of the search, which costs little where the prefix ends soon. */
static bool search_on(kvshm_search *search, const chain *of, Py_ssize_t start, size_t count,
                      kvshm_record *records, uint8_t *owners)
{
    bool going = true;
    for (size_t filled = 1; going && search->length < count;) {
        size_t stop = search->length + STEP, ahead = stop + STEP;
        stop = stop < count ? stop : count;
        ahead = ahead < count ? ahead : count;
        if (!copy_keys(of, start + (Py_ssize_t)filled, ahead - filled, records + filled))
            return false;
        kvshm_search_fetch(search, records, ahead);
        filled = ahead;
        going = kvshm_search_on(search, records, stop, owners);
    }
    return true;
}

static PyObject *lookup_all(kvshm_search *search, const kvshm_record *first, const chain *of,
                            Py_ssize_t start, size_t count)
{
    ARRAY(owners, uint8_t);
    kvshm_record *records;
    PyObject *packed = kvshm_new_records(count, &records), *runs = NULL;
    if (packed && kvshm_make_room(&owners, count)) {
        records[0] = *first;
        if (search_on(search, of, start, count, records, owners.of)) {
            size_t length = kvshm_search_end(search, records, owners.of);
            runs = list_of_runs(packed, count, owners.of, length);
        }
    }
    Py_XDECREF(packed);
    return runs;
}

typedef struct {
    chain of;
    Py_ssize_t start, stop; /* of the blocks; the list has them all */
    unsigned long long rows;
} asked;

/* Take the arguments of a lookup from the stack: of one that finds no engine, PyArg_ParseTuple would
 * take a third.  False with an exception. */
static bool take_lookup(PyObject *const *args, Py_ssize_t given, Py_buffer *index, asked *a)
{
    if (given < 5 || given > 7)
        return PyErr_Format(PyExc_TypeError, "a lookup takes 5 to 7 arguments, not %zd", given) !=
               NULL;
    if (PyObject_GetBuffer(args[0], index, PyBUF_SIMPLE) < 0)
        return false;
    if (!PyList_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "hashes are a list") != NULL;
    a->start = PyNumber_AsSsize_t(args[2], PyExc_OverflowError);
    a->stop = PyNumber_AsSsize_t(args[3], PyExc_OverflowError);
    a->rows = PyLong_AsUnsignedLongLongMask(args[4]);
    Py_ssize_t group = given > 5 ? PyNumber_AsSsize_t(args[5], PyExc_OverflowError) : 0;
    Py_ssize_t scale = given > 6 ? PyNumber_AsSsize_t(args[6], PyExc_OverflowError) : 1;
    if (PyErr_Occurred())
        return false;
    if (group < 0 || group > UINT16_MAX || scale < 1)
        return PyErr_Format(PyExc_ValueError, "group %zd, or %zd hashes for each block", group,
                            scale) != NULL;
    a->of = (chain){args[1], scale, (uint16_t)group};
    Py_ssize_t available = PyList_Size(args[1]) / scale;
    if (a->stop > available)
        a->stop = available;
    if (a->start < 0 || a->stop < a->start)
        a->stop = a->start = 0;
    return true;
}

/* Begin a search, and look one block up; returns 1 if a row has it, 0, or -1 with an exception. */
static int look_up(PyObject *module, const Py_buffer *index, const asked *a, Py_ssize_t block,
                   kvshm_search *search, kvshm_record *record)
{
    uint8_t owner;
    if (!copy_keys(&a->of, block, 1, record))
        return -1;
    int status = kvshm_search_begin(segment_of(index), a->rows, search);
    if (status == KVSHM_OK)
        return kvshm_search_on(search, record, 1, &owner);
    kvshm_raise(module, index, status);
    return -1;
}

/* Keeps the GIL, whatever the number of hashes: a lookup is shorter than it may take the scheduler's
 * thread to get the GIL back. */
static PyObject *native_index_lookup(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    BUFFER(index);
    asked a;
    kvshm_search search;
    kvshm_record first;
    if (!take_lookup(args, given, &index, &a))
        return NULL;
    /* Most lookups find no engine for the first hash.  Then the other hashes are not read. */
    int found = a.start < a.stop ? look_up(module, &index, &a, a.start, &search, &first) : 0;
    if (found < 0)
        return NULL;
    size_t count = (size_t)(a.stop - a.start);
    return found ? lookup_all(&search, &first, &a.of, a.start, count) : PyList_New(0);
}

static PyObject *native_index_last(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    BUFFER(index);
    asked a;
    kvshm_search search;
    kvshm_record record;
    int found = 0;
    if (!take_lookup(args, given, &index, &a))
        return NULL;
    while (a.stop > a.start &&
           !(found = look_up(module, &index, &a, a.stop - 1, &search, &record)))
        a.stop--;
    return found < 0 ? NULL : PyLong_FromSsize_t(a.stop);
}

/* -- copies ---------------------------------------------------------------------------------- */

/* For O& of PyArg_ParseTuple: a list of tuples as an array of regions. */
static int to_regions(PyObject *list, void *address)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "regions are a list");
        return 0;
    }
    Py_ssize_t length = PyList_Size(list);
    kvshm_region *regions = kvshm_make_room(address, (size_t)length);
    for (Py_ssize_t i = 0; regions && i < length; i++) {
        unsigned long long at, stride, block_bytes, num_blocks;
        PyObject *region = PyList_GetItem(list, i);
        if (!PyTuple_Check(region)) {
            PyErr_SetString(PyExc_TypeError, "a region is a tuple of four numbers");
            return 0;
        }
        if (!PyArg_ParseTuple(region, "KKKK:region", &at, &stride, &block_bytes, &num_blocks))
            return 0;
        regions[i] = (kvshm_region){(uint8_t *)(uintptr_t)at, stride, block_bytes, num_blocks};
    }
    return regions != NULL;
}

static PyObject *native_copy_blocks(PyObject *module, PyObject *args)
{
    ARRAY(from, kvshm_region);
    ARRAY(to, kvshm_region);
    ARRAY(source, uint32_t);
    ARRAY(target, uint32_t);
    BUFFER(stop);
    PyObject *stopped;
    if (!PyArg_ParseTuple(args, "O&O&O&O&O:copy_blocks", to_regions, &from, to_regions, &to,
                          kvshm_to_blocks, &source, kvshm_to_blocks, &target, &stopped))
        return NULL;
    if (stopped != Py_None && PyObject_GetBuffer(stopped, &stop, PyBUF_SIMPLE) < 0)
        return NULL;
    if (from.count != to.count || source.count != target.count ||
        (stop.buf && (stop.len != 4 || (uintptr_t)stop.buf % 4)))
        return PyErr_Format(PyExc_ValueError, "regions or block ids differ in number, or stop is "
                                              "no aligned 4-byte buffer");
    int64_t copied;
    WITHOUT_GIL(SIZE_MAX, copied = kvshm_copy_blocks(from.of, to.of, from.count, source.of,
                                                     target.of, source.count, stop.buf));
    return kvshm_number(module, &stop, copied);
}

PyMethodDef kvshm_index_methods[] = {
    {"index_apply", native_index_apply, METH_VARARGS, NULL},
    {"index_stale", native_index_stale, METH_VARARGS, NULL},
    {"index_drop_row", native_index_drop_row, METH_VARARGS, NULL},
    {"index_copy", native_index_copy, METH_VARARGS, NULL},
    {"index_last", (PyCFunction)(void (*)(void))native_index_last, METH_FASTCALL, NULL},
    {"index_lookup", (PyCFunction)(void (*)(void))native_index_lookup, METH_FASTCALL, NULL},
    {"copy_blocks", native_copy_blocks, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
