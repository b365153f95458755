/* Glue between Python and the core: marks (kvshm/marks.py).  One call per request and step walks
 * vLLM's own block objects; nothing here needs another process.  All calls keep the GIL. */

#include "_native_marks.h"

/* The mark of element `index` of a sequence: a number, or an object that has a block_id.  NULL
 * with an exception. */
static mark *mark_at(const marks_view *marks, PyObject *sequence, Py_ssize_t index,
                     kvshm_places *places)
{
    PyObject *item = kvshm_item(sequence, index), *id = NULL;
    if (item) /* the type that is met most is compared first: PyLong_Check is a call */
        id = Py_TYPE(item) != places->type && PyLong_Check(item)
                 ? Py_NewRef(item)
                 : kvshm_get(places, item, KVSHM_BLOCK_ID);
    Py_XDECREF(item);
    long long value = id ? PyLong_AsLongLong(id) : -1;
    Py_XDECREF(id);
    if (value >= 0 && (unsigned long long)value < marks->count)
        return &marks->of[value];
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "element %zd is no block that has a mark", index);
    return NULL;
}

static uint32_t block_of(const marks_view *marks, const mark *one)
{
    return (uint32_t)(one - marks->of);
}

/* The contents change: all but the flags in `keep` is forgotten.  Whether it was published. */
static bool change(mark *one, uint32_t keep)
{
    bool shown = one->flags & SHOWN;
    one->version++;
    one->flags &= keep;
    return shown;
}

/* Change all blocks of a sequence.  Returns those that were published, for PyMem_Free, and how
 * many; NULL with an exception. */
static uint32_t *change_all(const marks_view *marks, PyObject *blocks, kvshm_places *places,
                            uint32_t keep, size_t *num_shown)
{
    Py_ssize_t count = PySequence_Size(blocks);
    uint32_t *shown = count < 0 ? NULL : PyMem_New(uint32_t, (size_t)count + 1);
    *num_shown = 0;
    if (count >= 0 && !shown)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; shown && i < count; i++) {
        mark *one = mark_at(marks, blocks, i, places);
        if (!one) {
            PyMem_Free(shown);
            return NULL;
        }
        if (change(one, keep))
            shown[(*num_shown)++] = block_of(marks, one);
    }
    return shown;
}

/* ``change_all``; those that were published are retracted if there is a table, else returned. */
static PyObject *changed(PyObject *module, const Py_buffer *table, marks_view *marks,
                         PyObject *blocks, uint32_t keep)
{
    kvshm_places *places = kvshm_places_of(module, KVSHM_BLOCKS);
    PyObject *result = NULL;
    size_t count;
    uint32_t *shown = view_marks(marks) ? change_all(marks, blocks, places, keep, &count) : NULL;
    if (shown)
        result = table ? kvshm_retract_blocks(module, table, shown, count)
                       : kvshm_list_of_blocks(shown, count);
    PyMem_Free(shown);
    PyBuffer_Release(&marks->buffer);
    return result;
}

static PyObject *native_marks_change(PyObject *module, PyObject *args)
{
    marks_view marks;
    PyObject *blocks;
    unsigned int keep;
    if (!PyArg_ParseTuple(args, "w*OI:marks_change", &marks.buffer, &blocks, &keep))
        return NULL;
    return changed(module, NULL, &marks, blocks, keep & SOUND);
}

static PyObject *native_marks_retract(PyObject *module, PyObject *args)
{
    Py_buffer table;
    marks_view marks;
    PyObject *blocks;
    unsigned long long counter;
    if (!PyArg_ParseTuple(args, "w*w*OK:marks_retract", &table, &marks.buffer, &blocks, &counter))
        return NULL;
    PyObject *result =
        kvshm_counted(module, &table, counter, changed(module, &table, &marks, blocks, 0));
    PyBuffer_Release(&table);
    return result;
}

static PyObject *native_marks_sound(PyObject *module, PyObject *args)
{
    marks_view marks;
    PyObject *table;
    Py_ssize_t stop, sound = 0;
    kvshm_places *places = kvshm_places_of(module, KVSHM_BLOCKS);
    if (!PyArg_ParseTuple(args, "y*On:marks_sound", &marks.buffer, &table, &stop))
        return NULL;
    Py_ssize_t length = view_marks(&marks) ? PySequence_Size(table) : -1;
    for (; sound < stop && sound < length; sound++) {
        const mark *one = mark_at(&marks, table, sound, places);
        if (!one || !(one->flags & SOUND))
            break;
    }
    PyBuffer_Release(&marks.buffer);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(sound);
}

static PyObject *native_marks_write(PyObject *module, PyObject *args)
{
    marks_view marks;
    PyObject *table, *result = NULL;
    Py_ssize_t first, last, complete;
    kvshm_places *places = kvshm_places_of(module, KVSHM_BLOCKS);
    if (!PyArg_ParseTuple(args, "w*Onnn:marks_write", &marks.buffer, &table, &first, &last,
                          &complete))
        return NULL;
    Py_ssize_t length = PySequence_Size(table);
    if (first < 0 || last > length) {
        if (length >= 0)
            PyErr_SetString(PyExc_IndexError, "the table has no such blocks");
        PyBuffer_Release(&marks.buffer);
        return NULL;
    }
    size_t room = last > first ? (size_t)(last - first) : 0, whole = 0, num_shown = 0;
    pair *pairs = PyMem_New(pair, room + 1);
    uint32_t *shown = PyMem_New(uint32_t, room + 1);
    bool done = shown && pairs && view_marks(&marks);
    if (!shown || !pairs)
        PyErr_NoMemory();
    for (Py_ssize_t i = first; done && i < last; i++) {
        mark *one = mark_at(&marks, table, i, places);
        done = one != NULL;
        if (one && change(one, 0))
            shown[num_shown++] = block_of(&marks, one);
        if (one && i < complete) {
            one->flags = SOUND;
            pairs[whole++] = (pair){block_of(&marks, one), one->version};
        }
    }
    if (done)
        result = Py_BuildValue("(y#N)", pairs, (Py_ssize_t)(whole * sizeof *pairs),
                               kvshm_list_of_blocks(shown, num_shown));
    PyMem_Free(pairs);
    PyMem_Free(shown);
    PyBuffer_Release(&marks.buffer);
    return result;
}

PyMethodDef kvshm_mark_methods[] = {
    {"marks_change", native_marks_change, METH_VARARGS, NULL},
    {"marks_retract", native_marks_retract, METH_VARARGS, NULL},
    {"marks_sound", native_marks_sound, METH_VARARGS, NULL},
    {"marks_write", native_marks_write, METH_VARARGS, NULL},
    {"marks_step", kvshm_marks_step, METH_VARARGS, NULL},
    {"marks_publish", kvshm_marks_publish, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
