/* Glue between Python and the core: publishes marked blocks that vLLM has hashed.  Keeps the GIL,
 * except for a large batch. */

#include "py_marks.h"

#include <string.h>

enum { GROUP_ID_BYTES = sizeof(uint32_t) };

typedef struct {
    kvshm_slot_offsets *places;
    PyObject *pool;
    const marks_view *marks;
    PyObject *room; /* of the records */
    kvshm_record *records;
    uint64_t *parents;
    uint32_t *runs; /* of each record */
    uint8_t *waiting; /* of each run */
    size_t count;
} batch;

typedef struct {
    PyObject *chain;
    Py_ssize_t scale; /* hashes of the chain for each block, whose own is its last */
    uint32_t number;
} run_view;

/* vLLM's hash of the block at `index`, as a borrowed reference; NULL if there is none. */
static const char *chain_hash(const run_view *run, Py_ssize_t index, Py_ssize_t *length)
{
    char *bytes = NULL;
    size_t end;
    if (index < 0 || __builtin_mul_overflow((size_t)index + 1, (size_t)run->scale, &end) ||
        end > (size_t)PyList_Size(run->chain))
        return NULL;
    PyObject *hash = PyList_GetItem(run->chain, (Py_ssize_t)end - 1);
    if (PyBytes_AsStringAndSize(hash, &bytes, length) < 0)
        return NULL;
    if (*length > 0 && *length <= KVSHM_HASH_BYTES)
        return bytes;
    PyErr_Format(PyExc_ValueError, "a block hash has %zd bytes", *length);
    return NULL;
}

/* Set the parent of the next record, which is usually the previous record. */
static bool set_parent(batch *b, const run_view *run, Py_ssize_t index)
{
    uint64_t *parent = &b->parents[b->count];
    const kvshm_record *before = b->count ? &b->records[b->count - 1] : NULL;
    *parent = 0;
    if (before && b->runs[b->count - 1] == run->number && before->depth + 1 == (uint64_t)index) {
        memcpy(parent, before->hash, sizeof *parent);
        return true;
    }
    Py_ssize_t length = 0;
    const char *hash = chain_hash(run, index - 1, &length);
    if (hash)
        memcpy(parent, hash, (size_t)(length < 8 ? length : 8));
    return hash || !PyErr_Occurred();
}

/* Most hashes have one length.  memcmp needs no call if the length is a constant. */
static bool hashes_equal(const char *one, const char *other, size_t length)
{
    return length == KVSHM_HASH_BYTES ? memcmp(one, other, KVSHM_HASH_BYTES) == 0
                                      : memcmp(one, other, length) == 0;
}

/* The group behind the hash in vLLM's key: big endian. */
static uint32_t group_of(const char *key, Py_ssize_t hash_length)
{
    uint32_t group;
    memcpy(&group, key + hash_length, sizeof group);
    return __builtin_bswap32(group);
}

/* Add the record of a block with a key, if the chain has the key's hash for `index`, and a record
 * has room for its group.  False with an exception. */
static bool add_record(batch *b, const run_view *run, Py_ssize_t index, uint32_t block,
                       PyObject *key)
{
    char *given;
    Py_ssize_t given_length, length = 0;
    if (PyBytes_AsStringAndSize(key, &given, &given_length) < 0)
        return false;
    const char *expected = chain_hash(run, index, &length);
    if (!expected)
        return !PyErr_Occurred();
    if (given_length != length + GROUP_ID_BYTES || !hashes_equal(given, expected, (size_t)length))
        return true;
    uint32_t group = group_of(given, length);
    if (group > UINT16_MAX)
        return true;
    kvshm_record *record = &b->records[b->count];
    *record = (kvshm_record){{0}, block, 0, (uint32_t)index, 0, (uint16_t)group};
    if (length == KVSHM_HASH_BYTES)
        memcpy(record->hash, expected, KVSHM_HASH_BYTES);
    else
        memcpy(record->hash, expected, (size_t)length);
    if (!set_parent(b, run, index))
        return false;
    b->runs[b->count++] = run->number;
    return true;
}

/* Handle one block of a run.  A block without a hash waits while a request uses it, because it may
 * still get a hash. */
static bool look_at(batch *b, const run_view *run, Py_ssize_t index, pair one)
{
    if (one.block >= b->marks->count)
        return PyErr_Format(PyExc_IndexError, "block %u has no mark", one.block) != NULL;
    const mark *now = &b->marks->of[one.block];
    if (now->version != one.version || now->flags & SHOWN)
        return true;
    PyObject *block = kvshm_item(b->pool, one.block);
    PyObject *hash = block ? kvshm_get(b->places, block, KVSHM_BLOCK_HASH) : NULL;
    bool done = hash != NULL;
    if (hash == Py_None) {
        long long users = number_of(kvshm_get(b->places, block, KVSHM_REF_CNT));
        done = !PyErr_Occurred();
        b->waiting[run->number] |= users > 0;
    } else if (hash)
        done = add_record(b, run, index, one.block, hash);
    Py_XDECREF(hash);
    Py_XDECREF(block);
    return done;
}

static bool collect_run(batch *b, PyObject *runs, uint32_t number)
{
    run_view run = {.scale = 1, .number = number};
    const char *packed;
    Py_ssize_t first, bytes;
    PyObject *of_caller; /* whatever the caller adds, to know the run again */
    if (!PyArg_ParseTuple(PyList_GetItem(runs, number), "Ony#|nO:run", &run.chain, &first, &packed,
                          &bytes, &run.scale, &of_caller))
        return false;
    if (run.scale < 1)
        return PyErr_Format(PyExc_ValueError, "%zd hashes for each block", run.scale) != NULL;
    for (Py_ssize_t i = 0; i < bytes / (Py_ssize_t)sizeof(pair); i++) {
        pair one;
        memcpy(&one, packed + (size_t)i * sizeof one, sizeof one);
        if (!look_at(b, &run, first + i, one))
            return false;
    }
    return true;
}

/* Number of blocks in all runs; -1 with an exception. */
static Py_ssize_t count_pairs(PyObject *runs)
{
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(runs); i++) {
        PyObject *packed = PyTuple_GetItem(PyList_GetItem(runs, i), 2);
        Py_ssize_t bytes = packed ? PyBytes_Size(packed) : -1;
        if (bytes < 0)
            return -1;
        total += bytes / (Py_ssize_t)sizeof(pair);
    }
    return total;
}

/* Mark the published blocks and move their records to the front; runs with another block wait.
 * Returns the number of published blocks. */
static size_t keep_published(batch *b)
{
    size_t published = 0;
    for (size_t i = 0; i < b->count; i++) {
        if (b->records[i].kind == KVSHM_PUBLISH) {
            b->marks->of[b->records[i].block_id].flags |= SHOWN;
            if (published != i)
                b->records[published] = b->records[i];
            published++;
        } else
            b->waiting[b->runs[i]] = 1;
    }
    return published;
}

static PyObject *runs_that_wait(const batch *b, PyObject *runs)
{
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left && i < PyList_Size(runs); i++)
        if (b->waiting[i] && PyList_Append(left, PyList_GetItem(runs, i)) < 0)
            Py_CLEAR(left);
    return left;
}

static PyObject *publish_batch(PyObject *module, const Py_buffer *table, batch *b, PyObject *runs,
                               unsigned int published_ms)
{
    for (uint32_t run = 0; run < (uint32_t)PyList_Size(runs); run++)
        if (!collect_run(b, runs, run))
            return NULL;
    int64_t status;
    WITHOUT_GIL(b->count, status = kvshm_publish(segment_of(table), b->records, b->parents,
                                                 b->count, published_ms));
    if (status < 0)
        return kvshm_raise(module, table, status);
    size_t published = keep_published(b);
    PyObject *room = b->room;
    b->room = NULL;
    return Py_BuildValue("(NN)", kvshm_keep_records(room, published), runs_that_wait(b, runs));
}

PyObject *kvshm_marks_publish(PyObject *module, PyObject *args)
{
    BUFFER(table);
    MARKS(marks);
    ARRAY(parents, uint64_t);
    ARRAY(run_of, uint32_t);
    ARRAY(waiting, uint8_t);
    PyObject *runs, *result = NULL;
    unsigned int published_ms;
    unsigned long long counter;
    batch b = {.marks = &marks, .places = &kvshm_state_of(module)->blocks};
    if (!PyArg_ParseTuple(args, "w*O&OO!IK:marks_publish", &table, kvshm_to_marks, &marks, &b.pool,
                          &PyList_Type, &runs, &published_ms, &counter))
        return NULL;
    /* a new list, which no Python code that runs meanwhile can change */
    runs = PyList_GetSlice(runs, 0, PyList_Size(runs));
    Py_ssize_t room = runs ? count_pairs(runs) : -1;
    if (room >= 0 && (b.room = kvshm_new_records((size_t)room, &b.records)) &&
        (b.parents = kvshm_make_room(&parents, (size_t)room)) &&
        (b.runs = kvshm_make_room(&run_of, (size_t)room)) &&
        (b.waiting = kvshm_make_room(&waiting, (size_t)PyList_Size(runs)))) {
        memset(b.waiting, 0, waiting.count);
        result = kvshm_counted(module, &table, counter,
                               publish_batch(module, &table, &b, runs, published_ms));
    }
    Py_XDECREF(runs);
    Py_XDECREF(b.room);
    return result;
}
