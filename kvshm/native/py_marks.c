/* Glue between Python and the core: marks (kvshm/_engine/marks.py).  One call per request and step
 * reads vLLM's own block objects.  Calls keep the GIL; only a large retract releases it. */

#include "py_marks.h"

/* The mark of element `index` of a sequence of block ids, or of objects that have a block_id.  NULL
 * with an exception. */
static mark *mark_at(const marks_view *marks, PyObject *sequence, Py_ssize_t index,
                     kvshm_slot_offsets *places)
{
    PyObject *item = kvshm_item(sequence, index), *id = NULL;
    if (item) /* the most frequent type is compared first, because PyLong_Check is a call */
        id = Py_TYPE(item) != places->type && PyLong_Check(item)
                 ? Py_NewRef(item)
                 : kvshm_get(places, item, KVSHM_BLOCK_ID);
    Py_XDECREF(item);
    long long value = number_of(id);
    if (value >= 0 && (unsigned long long)value < marks->count)
        return &marks->of[value];
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "element %zd is not a block that has a mark", index);
    return NULL;
}

static uint32_t block_of(const marks_view *marks, const mark *one)
{
    return (uint32_t)(one - marks->of);
}

/* The contents change: clear all flags except those in `keep`.  Returns whether the block was
 * published. */
static bool change(mark *one, uint32_t keep)
{
    bool shown = one->flags & SHOWN;
    one->version++;
    one->flags &= keep;
    return shown;
}

/* Change the marks of all blocks of a sequence; `shown` gets the blocks that were published.  False
 * with an exception. */
static bool change_all(const marks_view *marks, PyObject *blocks, kvshm_slot_offsets *places,
                       uint32_t keep, kvshm_array *shown)
{
    Py_ssize_t count = PySequence_Size(blocks);
    uint32_t *room = count < 0 ? NULL : kvshm_make_room(shown, (size_t)count);
    shown->count = 0;
    for (Py_ssize_t i = 0; room && i < count; i++) {
        mark *one = mark_at(marks, blocks, i, places);
        if (!one)
            return false;
        if (change(one, keep))
            room[shown->count++] = block_of(marks, one);
    }
    return room != NULL;
}

static PyObject *native_marks_change(PyObject *module, PyObject *args)
{
    MARKS(marks);
    ARRAY(shown, uint32_t);
    PyObject *blocks;
    unsigned int keep;
    if (!PyArg_ParseTuple(args, "O&OI:marks_change", kvshm_to_marks, &marks, &blocks, &keep) ||
        !change_all(&marks, blocks, &kvshm_state_of(module)->blocks, keep & SOUND, &shown))
        return NULL;
    return kvshm_list_of_blocks(shown.of, shown.count);
}

static PyObject *native_marks_retract(PyObject *module, PyObject *args)
{
    BUFFER(table);
    MARKS(marks);
    ARRAY(shown, uint32_t);
    PyObject *blocks;
    unsigned long long counter;
    if (!PyArg_ParseTuple(args, "w*O&OK:marks_retract", &table, kvshm_to_marks, &marks, &blocks,
                          &counter) ||
        !change_all(&marks, blocks, &kvshm_state_of(module)->blocks, 0, &shown))
        return NULL;
    return kvshm_counted(module, &table, counter,
                         kvshm_retract_blocks(module, &table, shown.of, shown.count));
}

/* The number of sound blocks before the first that is not; of these `tick`, unless it is 0, is the
 * last use. */
static PyObject *count_sound(PyObject *module, PyObject *args, const char *format)
{
    MARKS(marks);
    PyObject *table;
    Py_ssize_t stop, sound = 0;
    unsigned int tick = 0;
    kvshm_slot_offsets *places = &kvshm_state_of(module)->blocks;
    if (!PyArg_ParseTuple(args, format, kvshm_to_marks, &marks, &table, &stop, &tick))
        return NULL;
    Py_ssize_t length = PySequence_Size(table);
    for (; sound < stop && sound < length; sound++) {
        mark *one = mark_at(&marks, table, sound, places);
        if (!one || !(one->flags & SOUND))
            break;
        if (tick)
            one->flags = tick << USED_SHIFT | (one->flags & (SOUND | SHOWN));
    }
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(sound);
}

static PyObject *native_marks_sound(PyObject *module, PyObject *args)
{
    return count_sound(module, args, "O&On:marks_sound");
}

static PyObject *native_marks_touch(PyObject *module, PyObject *args)
{
    return count_sound(module, args, "O&OnI:marks_touch");
}

static PyObject *native_marks_write(PyObject *module, PyObject *args)
{
    MARKS(marks);
    ARRAY(pairs, pair);
    ARRAY(shown, uint32_t);
    PyObject *table;
    Py_ssize_t first, last, complete;
    kvshm_slot_offsets *places = &kvshm_state_of(module)->blocks;
    if (!PyArg_ParseTuple(args, "O&Onnn:marks_write", kvshm_to_marks, &marks, &table, &first,
                          &last, &complete))
        return NULL;
    Py_ssize_t length = PySequence_Size(table);
    if (length < 0)
        return NULL;
    if (first < 0 || last > length)
        return PyErr_Format(PyExc_IndexError, "the table has no such blocks");
    size_t room = last > first ? (size_t)(last - first) : 0, whole = 0, num_shown = 0;
    pair *pair_at = kvshm_make_room(&pairs, room);
    uint32_t *shown_at = kvshm_make_room(&shown, room);
    if (!pair_at || !shown_at)
        return NULL;
    for (Py_ssize_t i = first; i < last; i++) {
        mark *one = mark_at(&marks, table, i, places);
        if (!one)
            return NULL;
        if (change(one, 0))
            shown_at[num_shown++] = block_of(&marks, one);
        if (i < complete) {
            one->flags = SOUND;
            pair_at[whole++] = (pair){block_of(&marks, one), one->version};
        }
    }
    return Py_BuildValue("(y#N)", pair_at, (Py_ssize_t)(whole * sizeof *pair_at),
                         kvshm_list_of_blocks(shown_at, num_shown));
}

PyMethodDef kvshm_mark_methods[] = {
    {"marks_change", native_marks_change, METH_VARARGS, NULL},
    {"marks_retract", native_marks_retract, METH_VARARGS, NULL},
    {"marks_sound", native_marks_sound, METH_VARARGS, NULL},
    {"marks_touch", native_marks_touch, METH_VARARGS, NULL},
    {"marks_write", native_marks_write, METH_VARARGS, NULL},
    {"marks_step", kvshm_marks_step, METH_VARARGS, NULL},
    {"marks_publish", kvshm_marks_publish, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
