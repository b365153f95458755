/* Glue between Python and the core: vLLM's queue of free blocks, a linked list through the blocks
 * themselves: the walk along it (hooks/vllm/exports/kept_blocks.py), and blocks that move to its
 * head (duplicates.py there).  Keeps the GIL. */

#include "py_module.h"

#include <string.h>

enum { AT_LEAST = 64 }; /* blocks looked at together, once a kept one was found */

typedef struct {
    PyObject *module;
    const Py_buffer *table;
    kvshm_slot_offsets *places;
    PyObject *at;            /* the block before the next one, a reference is held */
    unsigned long long wanted, most; /* others; blocks that may still be walked */
    unsigned int now;
    PyObject *runs, *first, *last; /* the runs of kept blocks; the ends of the present one */
    size_t idle, kept;
} walk;

/* Move a reference along the queue; NULL with an exception at its end. */
static PyObject *next_of(const walk *w, PyObject *block)
{
    PyObject *next = kvshm_get(w->places, block, KVSHM_NEXT_FREE);
    Py_DECREF(block);
    return next;
}

static bool end_run(walk *w)
{
    if (!w->first)
        return true;
    PyObject *run = Py_BuildValue("(NN)", w->first, w->last);
    w->first = w->last = NULL;
    int status = run ? PyList_Append(w->runs, run) : -1;
    Py_XDECREF(run);
    return status == 0;
}

/* Add the block at which the walk is. */
static bool add_block(walk *w, bool kept)
{
    if (!kept) {
        w->idle++;
        return end_run(w);
    }
    w->kept++;
    if (!w->first)
        w->first = Py_NewRef(w->at);
    Py_XDECREF(w->last);
    w->last = Py_NewRef(w->at);
    return true;
}

/* Read the ids of the next `count` blocks. */
static bool read_ids(const walk *w, uint32_t *ids, size_t count)
{
    PyObject *block = Py_NewRef(w->at);
    for (size_t i = 0; block && i < count; i++) {
        if (!(block = next_of(w, block)))
            break;
        /* the queue's end has -1, which no table has: kvshm_kept refuses it */
        ids[i] = (uint32_t)number_of(kvshm_get(w->places, block, KVSHM_BLOCK_ID));
        if (PyErr_Occurred())
            Py_CLEAR(block);
    }
    Py_XDECREF(block);
    return block != NULL;
}

/* Walk the next blocks, `count` at most.  False with an exception. */
static bool walk_blocks(walk *w, size_t count)
{
    ARRAY(ids, uint32_t);
    ARRAY(kept, uint8_t);
    if (!kvshm_make_room(&ids, count) || !kvshm_make_room(&kept, count) ||
        !read_ids(w, ids.of, count))
        return false;
    int64_t found = kvshm_kept(segment_of(w->table), ids.of, count, w->now, kept.of);
    if (found < 0)
        return kvshm_raise(w->module, w->table, found) != NULL;
    const uint8_t *is_kept = kept.of;
    if (!found && !w->kept) { /* as almost always: then these are all that were wanted */
        w->idle += count;
        w->most -= count;
        return true;
    }
    for (size_t i = 0; i < count && w->idle < w->wanted; i++, w->most--)
        if (!(w->at = next_of(w, w->at)) || !add_block(w, is_kept[i]))
            return false;
    return true;
}

static PyObject *native_kept_runs(PyObject *module, PyObject *args)
{
    BUFFER(table);
    walk w = {.module = module, .table = &table, .places = &kvshm_state_of(module)->blocks};
    if (!PyArg_ParseTuple(args, "y*OKKI:kept_runs", &table, &w.at, &w.wanted, &w.most, &w.now) ||
        !(w.runs = PyList_New(0)))
        return NULL;
    w.at = Py_NewRef(w.at);
    bool good = true;
    while (good && w.idle < w.wanted && w.most) {
        size_t count = w.wanted - w.idle;
        if (w.kept && count < AT_LEAST)
            count = AT_LEAST;
        good = walk_blocks(&w, count < w.most ? count : w.most);
    }
    good = good && end_run(&w);
    Py_XDECREF(w.at);
    Py_XDECREF(w.first);
    Py_XDECREF(w.last);
    PyObject *result = good ? Py_BuildValue("(Onn)", w.runs, (Py_ssize_t)w.idle, (Py_ssize_t)w.kept)
                            : NULL;
    Py_DECREF(w.runs);
    return result;
}

/* -- blocks that move to the queue's head ---------------------------------------------------------- */

/* Have two blocks of the queue follow each other. */
static bool join(kvshm_slot_offsets *places, PyObject *before, PyObject *behind)
{
    return kvshm_set(places, before, KVSHM_NEXT_FREE, behind) &&
           kvshm_set(places, behind, KVSHM_PREV_FREE, before);
}

/* A walk that has ended at a block which is about to move steps back to the one before. */
static bool step_back(kvshm_slot_offsets *places, PyObject *ends, PyObject *block)
{
    for (Py_ssize_t i = 0; i < PyList_Size(ends); i++) {
        if (PyList_GetItem(ends, i) != block)
            continue;
        PyObject *before = kvshm_get(places, block, KVSHM_PREV_FREE);
        if (!before || PyList_SetItem(ends, i, before) < 0)
            return false;
    }
    return true;
}

/* Move a block of the queue between two others that follow each other, or leave it there if it is
 * the second of them. */
static bool put_between(kvshm_slot_offsets *places, PyObject *place, PyObject *block,
                        PyObject *following)
{
    if (block == following)
        return true;
    PyObject *before = kvshm_get(places, block, KVSHM_PREV_FREE);
    PyObject *behind = before ? kvshm_get(places, block, KVSHM_NEXT_FREE) : NULL;
    bool good = behind && join(places, before, behind) && join(places, place, block) &&
                join(places, block, following);
    Py_XDECREF(before);
    Py_XDECREF(behind);
    return good;
}

/* Move a block of the queue behind another one of it.  False with an exception. */
static bool move_behind(kvshm_slot_offsets *places, PyObject *place, PyObject *block, PyObject *ends)
{
    PyObject *following = kvshm_get(places, place, KVSHM_NEXT_FREE);
    bool good = following && step_back(places, ends, block) &&
                put_between(places, place, block, following);
    Py_XDECREF(following);
    return good;
}

static PyObject *native_put_behind(PyObject *module, PyObject *args)
{
    BUFFER(known);
    PyObject *place, *blocks, *ends;
    kvshm_slot_offsets *places = &kvshm_state_of(module)->blocks;
    if (!PyArg_ParseTuple(args, "w*OO!O!:put_behind", &known, &place, &PyList_Type, &blocks,
                          &PyList_Type, &ends))
        return NULL;
    Py_INCREF(place);
    bool good = true;
    for (Py_ssize_t i = 0; good && i < PyList_Size(blocks); i++) {
        PyObject *block = kvshm_item(blocks, i);
        long long id = block ? number_of(kvshm_get(places, block, KVSHM_BLOCK_ID)) : -1;
        if (id >= 0 && id < known.len)
            ((uint8_t *)known.buf)[id] = 0;
        good = block && !PyErr_Occurred() && move_behind(places, place, block, ends);
        Py_DECREF(place);
        place = block;
    }
    Py_XDECREF(place);
    return good ? Py_NewRef(Py_None) : NULL;
}

/* Of the next blocks, `wanted` at most, those that have no hash and come before any that has. */
static PyObject *native_skip_unhashed(PyObject *module, PyObject *args)
{
    PyObject *place;
    unsigned long long wanted;
    kvshm_slot_offsets *places = &kvshm_state_of(module)->blocks;
    if (!PyArg_ParseTuple(args, "OK:skip_unhashed", &place, &wanted))
        return NULL;
    Py_INCREF(place);
    for (; wanted; wanted--) {
        PyObject *next = kvshm_get(places, place, KVSHM_NEXT_FREE);
        PyObject *hash = next ? kvshm_get(places, next, KVSHM_BLOCK_HASH) : NULL;
        bool unhashed = hash == Py_None;
        Py_XDECREF(hash);
        if (!unhashed) {
            Py_XDECREF(next);
            break;
        }
        Py_DECREF(place);
        place = next;
    }
    PyObject *result = PyErr_Occurred() ? NULL : Py_BuildValue("(OK)", place, wanted);
    Py_DECREF(place);
    return result;
}

PyMethodDef kvshm_pool_methods[] = {
    {"skip_unhashed", native_skip_unhashed, METH_VARARGS, NULL},
    {"put_behind", native_put_behind, METH_VARARGS, NULL},
    {"kept_runs", native_kept_runs, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
