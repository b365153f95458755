/* Glue between Python and the core: the walk along vLLM's queue of free blocks to those that other
 * engines have, too (hooks/vllm/exports/duplicates.py).  Keeps the GIL.
 *
 * A block is of no use without the blocks before it in its chain.  So a duplicate stays if a block
 * behind it stays that has been used more than once, because it is a last copy or stays itself.
 * vLLM frees a request's blocks from the last to the first, and a hit frees a block anew: the walk
 * meets the blocks behind a block before the block.
 *
 * What this engine would not import again counts as a last copy. */

#include "py_marks.h"

#include <string.h>

enum { AT_ONCE = 64 }; /* blocks */

typedef struct {
    Py_buffer buffers[KVSHM_NUM_ROWS];
    kvshm_segment of[KVSHM_NUM_ROWS];
} peer_tables;

static void release_tables(peer_tables *tables)
{
    for (int row = 0; row < KVSHM_NUM_ROWS; row++)
        PyBuffer_Release(&tables->buffers[row]);
}

#define TABLES(name) __attribute__((cleanup(release_tables))) peer_tables name = {0}

/* For O& of PyArg_ParseTuple: a dict of rows and their tables. */
static int to_tables(PyObject *dict, void *address)
{
    peer_tables *tables = address;
    PyObject *key, *table;
    Py_ssize_t at = 0;
    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "tables are a dict");
        return 0;
    }
    while (PyDict_Next(dict, &at, &key, &table)) {
        long row = PyLong_AsLong(key);
        if (row < 0 || row >= KVSHM_NUM_ROWS) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "there is no row %ld", row);
            return 0;
        }
        if (PyObject_GetBuffer(table, &tables->buffers[row], PyBUF_SIMPLE) < 0)
            return 0;
        tables->of[row] = segment_of(&tables->buffers[row]);
    }
    return 1;
}

typedef struct {
    PyObject *module;
    const Py_buffer *table, *index;
    const kvshm_segment *tables;
    kvshm_slot_offsets *places;
    unsigned int now;
} view;

/* The id of a pool block; -1 for the end of the queue, and with an exception. */
static long long id_of(const view *v, PyObject *block)
{
    long long id = number_of(kvshm_get(v->places, block, KVSHM_BLOCK_ID));
    return id > UINT32_MAX ? UINT32_MAX : id; /* no table has that */
}

/* Look at `count` blocks; false with an exception. */
static bool look_at(const view *v, const uint32_t *ids, size_t count, kvshm_free_block *found)
{
    int64_t status = kvshm_look_at_free(segment_of(v->table), segment_of(v->index), v->tables, ids,
                                        count, v->now, found);
    return status == KVSHM_OK || kvshm_raise(v->module, v->table, status);
}

/* -- which blocks have blocks behind them that stay ------------------------------------------------ */

typedef struct {
    uint64_t *of; /* first bytes of hashes, each in its own place or, overwritten, forgotten */
    size_t count; /* a power of two */
    uint64_t round; /* mixed into all of them: those of other rounds are never found */
} hash_set;

static uint64_t *place_in(const hash_set *set, uint64_t hash)
{
    return &set->of[(hash ^ hash >> 29) * 0x9e3779b97f4a7c15ULL >> 20 & (set->count - 1)];
}

static uint64_t first_bytes(const kvshm_record *record)
{
    uint64_t bytes;
    memcpy(&bytes, record->hash, sizeof bytes);
    return bytes;
}

/* When a request last began with a block, in ticks; 0 for never. */
static uint32_t used_at(const marks_view *marks, uint32_t id)
{
    return id < marks->count ? marks->of[id].flags >> USED_SHIFT : 0;
}

/* Whether a duplicate may go.  Remembers what has to stay because of a block that stays. */
static bool may_go(const hash_set *needed, const marks_view *marks, uint32_t id,
                   const kvshm_free_block *block)
{
    if (block->kind == KVSHM_UNPUBLISHED)
        return false;
    uint64_t own = first_bytes(&block->copy) ^ needed->round;
    bool is_needed = *place_in(needed, own) == own;
    if (block->kind == KVSHM_DUPLICATE && !is_needed)
        return true;
    if (block->parent && (is_needed || used_at(marks, id))) {
        uint64_t parent = block->parent ^ needed->round;
        *place_in(needed, parent) = parent;
    }
    return false;
}

/* -- the walk ------------------------------------------------------------------------------------ */

/* Fill `ahead` and `ids` with the next blocks of the queue, up to its end; returns how many, or -1
 * with an exception. */
static Py_ssize_t read_ahead(const view *v, PyObject *at, PyObject **ahead, uint32_t *ids,
                             size_t count)
{
    size_t i = 0;
    for (; i < count; i++) {
        PyObject *next = kvshm_get(v->places, i ? ahead[i - 1] : at, KVSHM_NEXT_FREE);
        long long id = next ? id_of(v, next) : -1;
        if (id < 0) {
            Py_XDECREF(next);
            break;
        }
        ahead[i] = next;
        ids[i] = (uint32_t)id;
    }
    if (!PyErr_Occurred())
        return (Py_ssize_t)i;
    while (i)
        Py_DECREF(ahead[--i]);
    return -1;
}

typedef struct {
    PyObject *at, *found; /* references are held; those found that are not known yet */
    mark *were;           /* the mark of each of these */
    kvshm_free_block *copies; /* and a copy of it */
    const Py_buffer *known; /* for each block: whether it was found before */
    Py_ssize_t wanted, met, most, walked; /* met: found, known ones as well */
    bool ended;
    unsigned int tick, age_ms; /* the time, as marks and slots have it */
    double ratio;              /* what importing a block costs, divided by computing it */
    double oldest;             /* seconds for which the first last copy has rested; 0: none was met */
    unsigned int least, most_blocks; /* of a prefix that is imported */
} progress;

/* Seconds since a block was used last. */
static double age_of(const progress *p, const marks_view *marks, uint32_t id,
                     const kvshm_free_block *block)
{
    uint32_t used = used_at(marks, id);
    return used ? (double)((p->tick - used) & TICKS) / TICKS_PER_SECOND
                : (double)(uint32_t)(p->age_ms - block->published_ms) / 1e3;
}

/* Whether a prefix that ends with this block could be imported. */
static bool is_imported(const progress *p, const kvshm_free_block *block)
{
    return block->copy.depth + 1 >= p->least && block->copy.depth < p->most_blocks;
}

/* Whether a duplicate costs no less to drop than the last copy that has rested longest: what is used
 * so much more often, as its age says, is imported again as much sooner.  The queue is in the order in
 * which requests have ended, so that there may be older ones behind it. */
static bool is_too_young(const progress *p, double age)
{
    return age < p->ratio * p->oldest;
}

/* Blocks of a list are no longer known.  Stops at an exception. */
static void forget(kvshm_slot_offsets *places, const Py_buffer *known, PyObject *blocks)
{
    for (Py_ssize_t i = 0; i < PyList_Size(blocks) && !PyErr_Occurred(); i++) {
        PyObject *block = kvshm_item(blocks, i);
        long long id = block ? number_of(kvshm_get(places, block, KVSHM_BLOCK_ID)) : -1;
        Py_XDECREF(block);
        if (id >= 0 && id < known->len)
            ((uint8_t *)known->buf)[id] = 0;
    }
}

/* With an exception: nobody gets these blocks, so another walk may find them. */
static void lose(const view *v, const Py_buffer *known, PyObject *blocks)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    forget(v->places, known, blocks);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

/* Add a duplicate that may go, unless it is known, or has lost its hash unnoticed; false with an
 * exception. */
static bool add_found(const view *v, progress *p, const marks_view *marks, PyObject *block,
                      uint32_t id, const kvshm_free_block *looked)
{
    uint8_t *known = p->known->buf;
    if (id >= p->known->len || id >= marks->count)
        return PyErr_Format(PyExc_IndexError, "there is no block %lu", (unsigned long)id) != NULL;
    PyObject *hash = kvshm_get(v->places, block, KVSHM_BLOCK_HASH);
    bool hashed = hash && hash != Py_None;
    Py_XDECREF(hash);
    if (!hashed)
        return !PyErr_Occurred();
    p->met++;
    if (known[id])
        return true;
    Py_ssize_t index = PyList_Size(p->found);
    known[id] = 1;
    p->were[index] = marks->of[id];
    p->copies[index] = *looked;
    return PyList_Append(p->found, block) == 0;
}

/* Walk AT_ONCE blocks at most; false with an exception. */
static bool walk_some(const view *v, const marks_view *marks, const hash_set *needed, progress *p)
{
    PyObject *ahead[AT_ONCE];
    uint32_t ids[AT_ONCE];
    kvshm_free_block looked[AT_ONCE];
    Py_ssize_t left = p->most - p->walked, most = left < AT_ONCE ? left : AT_ONCE;
    Py_ssize_t count = read_ahead(v, p->at, ahead, ids, (size_t)most), used = 0;
    bool good = count >= 0 && look_at(v, ids, (size_t)(count < 0 ? 0 : count), looked);
    for (; good && used < count && p->met < p->wanted; used++) {
        if (looked[used].kind == KVSHM_DUPLICATE && !is_imported(p, &looked[used]))
            looked[used].kind = KVSHM_LAST_COPY;
        double age = age_of(p, marks, ids[used], &looked[used]);
        if (looked[used].kind == KVSHM_LAST_COPY && !(p->oldest > 0))
            p->oldest = age;
        if (may_go(needed, marks, ids[used], &looked[used]) && !is_too_young(p, age))
            good = add_found(v, p, marks, ahead[used], ids[used], &looked[used]);
    }
    if (good && used) {
        Py_DECREF(p->at);
        p->at = Py_NewRef(ahead[used - 1]);
    }
    p->walked += used;
    p->ended = good && used == count && count < most;
    for (Py_ssize_t i = 0; i < count; i++)
        Py_DECREF(ahead[i]);
    return good;
}

/* A buffer as a set; false with an exception. */
static bool to_set(const Py_buffer *room, unsigned long long round, hash_set *set)
{
    *set = (hash_set){room->buf, (size_t)room->len / sizeof(uint64_t),
                      (round + 1) * 0xff51afd7ed558ccdULL};
    if (set->count && !(set->count & (set->count - 1)) && !((uintptr_t)room->buf % sizeof(uint64_t)))
        return true;
    PyErr_Format(PyExc_ValueError, "room for %zu hashes", set->count);
    return false;
}

static PyObject *native_find_duplicates(PyObject *module, PyObject *args)
{
    BUFFER(table);
    BUFFER(index);
    BUFFER(room);
    BUFFER(known);
    TABLES(tables);
    MARKS(marks);
    ARRAY(were, mark);
    ARRAY(copies, kvshm_free_block);
    progress p = {0};
    unsigned long long round;
    view v = {module, &table, &index, tables.of, &kvshm_state_of(module)->blocks, 0};
    if (!PyArg_ParseTuple(args, "y*y*O&O&w*Kw*OnnI(IIddII):find_duplicates", &table, &index,
                          to_tables, &tables, kvshm_to_marks, &marks, &room, &round, &known, &p.at,
                          &p.wanted, &p.most, &v.now, &p.tick, &p.age_ms, &p.ratio, &p.oldest,
                          &p.least, &p.most_blocks))
        return NULL;
    hash_set needed;
    Py_ssize_t most = p.wanted < p.most ? p.wanted : p.most;
    size_t num_found = most > 0 ? (size_t)most : 0;
    if (!to_set(&room, round, &needed) || !(p.were = kvshm_make_room(&were, num_found)) ||
        !(p.copies = kvshm_make_room(&copies, num_found)) || !(p.found = PyList_New(0)))
        return NULL;
    p.known = &known;
    Py_INCREF(p.at);
    bool good = true;
    while (good && !p.ended && p.walked < p.most && p.met < p.wanted)
        good = walk_some(&v, &marks, &needed, &p);
    Py_ssize_t found = PyList_Size(p.found);
    PyObject *result =
        good ? Py_BuildValue("(Oy#y#nOnOd)", p.found, (const char *)p.were,
                             found * (Py_ssize_t)sizeof *p.were, (const char *)p.copies,
                             found * (Py_ssize_t)sizeof *p.copies, p.met, p.at, p.walked,
                             p.ended ? Py_True : Py_False, p.oldest)
             : NULL;
    if (!result)
        lose(&v, &known, p.found);
    Py_DECREF(p.at);
    Py_DECREF(p.found);
    return result;
}

/* -- blocks that were found before ------------------------------------------------------------------ */

/* Whether a block that had this mark when it was found is free and still holds the same: nothing has
 * changed it, and no request has begun with it.  A block without a hash is at the queue's head
 * already.  False also with an exception. */
static bool is_unused(const view *v, const marks_view *marks, PyObject *block, uint32_t id, mark was)
{
    if (id >= marks->count || memcmp(&marks->of[id], &was, sizeof was))
        return false;
    PyObject *next = kvshm_get(v->places, block, KVSHM_NEXT_FREE);
    PyObject *hash = next ? kvshm_get(v->places, block, KVSHM_BLOCK_HASH) : NULL;
    bool unused = hash && next != Py_None && hash != Py_None;
    Py_XDECREF(next);
    Py_XDECREF(hash);
    return unused;
}

/* Read the ids of the blocks of a list; false with an exception. */
static bool read_ids(const view *v, PyObject *blocks, size_t count, uint32_t *ids)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *block = kvshm_item(blocks, (Py_ssize_t)i);
        long long id = block ? id_of(v, block) : -1;
        Py_XDECREF(block);
        if (PyErr_Occurred())
            return false;
        ids[i] = id < 0 ? UINT32_MAX : (uint32_t)id;
    }
    return true;
}

static PyObject *native_still_duplicates(PyObject *module, PyObject *args)
{
    BUFFER(table);
    BUFFER(index);
    BUFFER(room);
    BUFFER(known);
    TABLES(tables);
    MARKS(marks);
    ARRAY(were, mark);
    ARRAY(ids, uint32_t);
    ARRAY(looked, kvshm_free_block);
    PyObject *blocks;
    unsigned long long round;
    hash_set needed;
    view v = {module, &table, &index, tables.of, &kvshm_state_of(module)->blocks, 0};
    if (!PyArg_ParseTuple(args, "y*y*O&O&w*Kw*O!O&I:still_duplicates", &table, &index, to_tables,
                          &tables, kvshm_to_marks, &marks, &room, &round, &known, &PyList_Type,
                          &blocks, kvshm_to_array, &were, &v.now) ||
        !to_set(&room, round, &needed))
        return NULL;
    size_t count = (size_t)PyList_Size(blocks), kept = 0;
    if (count != were.count)
        return PyErr_Format(PyExc_ValueError, "%zu marks of %zu blocks", were.count, count);
    kvshm_free_block *copies = kvshm_make_room(&looked, count);
    if (!copies || !kvshm_make_room(&ids, count) || !read_ids(&v, blocks, count, ids.of) ||
        !look_at(&v, ids.of, count, copies))
        return NULL;
    PyObject *found = PyList_New(0);
    bool good = found != NULL;
    for (size_t i = 0; good && i < count; i++) {
        uint32_t id = ((const uint32_t *)ids.of)[i];
        PyObject *block = kvshm_item(blocks, (Py_ssize_t)i);
        if (block && is_unused(&v, &marks, block, id, ((const mark *)were.of)[i]) &&
            may_go(&needed, &marks, id, &copies[i])) {
            copies[kept++] = copies[i];
            good = PyList_Append(found, block) == 0;
        } else if (id < (size_t)known.len) {
            ((uint8_t *)known.buf)[id] = 0;
        }
        Py_XDECREF(block);
        good = good && !PyErr_Occurred();
    }
    PyObject *result = good ? Py_BuildValue("(Oy#)", found, (const char *)copies,
                                            (Py_ssize_t)(kept * sizeof *copies))
                            : NULL;
    Py_XDECREF(found);
    return result;
}

static PyObject *native_forget(PyObject *module, PyObject *args)
{
    BUFFER(known);
    PyObject *blocks;
    if (!PyArg_ParseTuple(args, "w*O!:forget", &known, &PyList_Type, &blocks))
        return NULL;
    forget(&kvshm_state_of(module)->blocks, &known, blocks);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *native_count_lost(PyObject *module, PyObject *args)
{
    BUFFER(index);
    TABLES(tables);
    ARRAY(copies, kvshm_free_block);
    if (!PyArg_ParseTuple(args, "y*O&O&:count_lost", &index, to_tables, &tables, kvshm_to_array,
                          &copies))
        return NULL;
    int64_t there = kvshm_copies_there(tables.of, segment_of(&index), copies.of, copies.count);
    return kvshm_number(module, &index, there < 0 ? there : (int64_t)copies.count - there);
}

PyMethodDef kvshm_duplicate_methods[] = {
    {"find_duplicates", native_find_duplicates, METH_VARARGS, NULL},
    {"still_duplicates", native_still_duplicates, METH_VARARGS, NULL},
    {"forget", native_forget, METH_VARARGS, NULL},
    {"count_lost", native_count_lost, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
