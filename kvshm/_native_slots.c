/* Glue between Python and the core: slots.  Each function checks its arguments, runs the core's
 * function of the same name without the GIL, and packs what it found. */

#include "_native.h"

#include <string.h>

/* -- exporter's side ------------------------------------------------------------------------- */

static size_t keep_published(kvshm_record *records, size_t count)
{
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (records[i].kind == KVSHM_PUBLISH)
            records[kept++] = records[i];
    return kept;
}

static PyObject *native_publish(PyObject *module, PyObject *args)
{
    Py_buffer table, packed, packed_parents;
    unsigned int published_ms;
    if (!PyArg_ParseTuple(args, "w*y*y*I:publish", &table, &packed, &packed_parents,
                          &published_ms))
        return NULL;
    PyObject *result = NULL;
    size_t count, num_parents;
    uint64_t *parents = NULL;
    kvshm_record *records = kvshm_copy_array(&packed, sizeof *records, &count);
    if (records)
        parents = kvshm_copy_array(&packed_parents, sizeof *parents, &num_parents);
    if (parents && count != num_parents) {
        PyErr_Format(PyExc_ValueError, "%zu records, but %zu parents", count, num_parents);
    } else if (parents) {
        int64_t status;
        PyThreadState *saved = without_gil(count);
        status = kvshm_publish(segment_of(&table), records, parents, count, published_ms);
        with_gil(saved);
        result = status < 0
                     ? kvshm_raise(module, &table, status)
                     : bytes_of(records, keep_published(records, count) * sizeof *records);
    }
    PyMem_Free(records);
    PyMem_Free(parents);
    PyBuffer_Release(&table);
    PyBuffer_Release(&packed);
    PyBuffer_Release(&packed_parents);
    return result;
}

PyObject *kvshm_retract_blocks(PyObject *module, const Py_buffer *table, const uint32_t *blocks,
                               size_t count)
{
    PyObject *result = NULL;
    size_t num_draining = 0;
    uint32_t *draining = PyMem_Malloc((count + 1) * sizeof *draining);
    kvshm_record *out;
    PyObject *room = kvshm_new_records(count, &out);
    if (!draining && room)
        PyErr_NoMemory();
    if (draining && room) {
        int64_t retracted;
        PyThreadState *saved = without_gil(count);
        retracted = kvshm_retract(segment_of(table), blocks, count, out, draining, &num_draining);
        with_gil(saved);
        if (retracted < 0)
            kvshm_raise(module, table, retracted);
        else {
            result = Py_BuildValue("(NN)", kvshm_keep_records(room, (size_t)retracted),
                                   kvshm_list_of_blocks(draining, num_draining));
            room = NULL;
        }
    }
    Py_XDECREF(room);
    PyMem_Free(draining);
    return result;
}

PyObject *kvshm_counted(PyObject *module, const Py_buffer *table, uint64_t offset,
                        PyObject *result)
{
    Py_ssize_t bytes = result ? PyBytes_Size(PyTuple_GetItem(result, 0)) : 0;
    uint64_t before;
    int64_t status = KVSHM_OK;
    if (bytes > 0)
        status = kvshm_add(segment_of(table), offset, (uint64_t)bytes / KVSHM_RECORD_BYTES, &before);
    if (status < 0) {
        Py_DECREF(result);
        return kvshm_raise(module, table, status);
    }
    return result;
}

static PyObject *native_retract(PyObject *module, PyObject *args)
{
    Py_buffer table;
    PyObject *sequence, *result = NULL;
    if (!PyArg_ParseTuple(args, "w*O:retract", &table, &sequence))
        return NULL;
    size_t count = 0;
    uint32_t *blocks = kvshm_copy_blocks_list(sequence, &count);
    if (blocks)
        result = kvshm_retract_blocks(module, &table, blocks, count);
    PyMem_Free(blocks);
    PyBuffer_Release(&table);
    return result;
}

static PyObject *native_drain(PyObject *module, PyObject *args)
{
    Py_buffer table;
    PyObject *sequence, *result = NULL;
    unsigned int slow;
    if (!PyArg_ParseTuple(args, "w*OI:drain", &table, &sequence, &slow))
        return NULL;
    size_t count = 0;
    uint32_t *blocks = kvshm_copy_blocks_list(sequence, &count);
    if (blocks) {
        int64_t waiting;
        PyThreadState *saved = without_gil(count);
        waiting = kvshm_drain(segment_of(&table), blocks, count, slow);
        with_gil(saved);
        result = waiting < 0 ? kvshm_raise(module, &table, waiting)
                             : kvshm_list_of_blocks(blocks, (size_t)waiting);
    }
    PyMem_Free(blocks);
    PyBuffer_Release(&table);
    return result;
}

static PyObject *native_force(PyObject *module, PyObject *args)
{
    Py_buffer table;
    PyObject *sequence, *result = NULL;
    if (!PyArg_ParseTuple(args, "w*O:force", &table, &sequence))
        return NULL;
    size_t count = 0;
    uint32_t *blocks = kvshm_copy_blocks_list(sequence, &count);
    if (blocks) {
        int64_t forced;
        uint32_t holders;
        PyThreadState *saved = without_gil(count);
        forced = kvshm_force(segment_of(&table), blocks, count, &holders);
        with_gil(saved);
        result = forced < 0 ? kvshm_raise(module, &table, forced)
                            : Py_BuildValue("(LI)", (long long)forced, holders);
    }
    PyMem_Free(blocks);
    PyBuffer_Release(&table);
    return result;
}

static PyObject *native_reset(PyObject *module, PyObject *args)
{
    Py_buffer table;
    if (!PyArg_ParseTuple(args, "w*:reset", &table))
        return NULL;
    int64_t occupied;
    Py_BEGIN_ALLOW_THREADS
    occupied = kvshm_reset(segment_of(&table));
    Py_END_ALLOW_THREADS
    PyObject *result =
        occupied < 0 ? kvshm_raise(module, &table, occupied) : PyLong_FromLongLong(occupied);
    PyBuffer_Release(&table);
    return result;
}

/* -- importer's side ------------------------------------------------------------------------- */

static PyObject *native_lease(PyObject *module, PyObject *args)
{
    Py_buffer table, packed;
    unsigned long long epoch;
    int bit;
    if (!PyArg_ParseTuple(args, "y*Kiy*:lease", &table, &epoch, &bit, &packed))
        return NULL;
    PyObject *result = NULL;
    size_t count;
    kvshm_record *records = kvshm_copy_array(&packed, sizeof *records, &count);
    uint8_t *taken = records ? PyMem_Calloc(count + 1, 1) : NULL;
    if (taken && bit >= 0 && table.readonly) {
        PyErr_SetString(PyExc_ValueError, "a lease needs a table that is mapped writable");
    } else if (taken) {
        int64_t length;
        PyThreadState *saved = without_gil(count);
        length = kvshm_lease(segment_of(&table), epoch, bit, records, count, taken);
        with_gil(saved);
        result = length < 0 ? kvshm_raise(module, &table, length)
                            : Py_BuildValue("(Ly#)", (long long)length, taken, (Py_ssize_t)count);
    } else if (records)
        PyErr_NoMemory();
    PyMem_Free(records);
    PyMem_Free(taken);
    PyBuffer_Release(&table);
    PyBuffer_Release(&packed);
    return result;
}

static PyObject *native_release(PyObject *module, PyObject *args)
{
    Py_buffer table, packed;
    const char *taken;
    Py_ssize_t num_taken;
    int bit;
    if (!PyArg_ParseTuple(args, "w*iy*z#:release", &table, &bit, &packed, &taken, &num_taken))
        return NULL;
    PyObject *result = NULL;
    size_t count;
    kvshm_record *records = kvshm_copy_array(&packed, sizeof *records, &count);
    if (records && taken && (size_t)num_taken < count) {
        PyErr_Format(PyExc_ValueError, "%zu records, but taken has %zd bytes", count, num_taken);
    } else if (records) {
        int64_t released;
        PyThreadState *saved = without_gil(count);
        released = kvshm_release(segment_of(&table), bit, records, count, (const uint8_t *)taken);
        with_gil(saved);
        result =
            released < 0 ? kvshm_raise(module, &table, released) : PyLong_FromLongLong(released);
    }
    PyMem_Free(records);
    PyBuffer_Release(&table);
    PyBuffer_Release(&packed);
    return result;
}

static PyObject *native_recheck(PyObject *module, PyObject *args)
{
    Py_buffer table, packed;
    unsigned long long epoch;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "y*KIy*:recheck", &table, &epoch, &rank, &packed))
        return NULL;
    PyObject *result = NULL;
    size_t count;
    kvshm_record *records = kvshm_copy_array(&packed, sizeof *records, &count);
    uint8_t *good = records ? PyMem_Calloc(count + 1, 1) : NULL;
    if (good) {
        int64_t passed;
        PyThreadState *saved = without_gil(count);
        passed = kvshm_recheck(segment_of(&table), epoch, rank, records, count, good);
        with_gil(saved);
        result = passed < 0 ? kvshm_raise(module, &table, passed) : bytes_of(good, count);
    } else if (records)
        PyErr_NoMemory();
    PyMem_Free(records);
    PyMem_Free(good);
    PyBuffer_Release(&table);
    PyBuffer_Release(&packed);
    return result;
}

static PyObject *native_sweep(PyObject *module, PyObject *args)
{
    Py_buffer table;
    unsigned int bits;
    if (!PyArg_ParseTuple(args, "w*I:sweep", &table, &bits))
        return NULL;
    int64_t changed;
    Py_BEGIN_ALLOW_THREADS
    changed = kvshm_sweep(segment_of(&table), bits);
    Py_END_ALLOW_THREADS
    PyObject *result =
        changed < 0 ? kvshm_raise(module, &table, changed) : PyLong_FromLongLong(changed);
    PyBuffer_Release(&table);
    return result;
}

static PyObject *native_scan(PyObject *module, PyObject *args)
{
    Py_buffer table;
    unsigned int first;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*In:scan", &table, &first, &count))
        return NULL;
    PyObject *result = NULL;
    kvshm_record *records = NULL;
    uint32_t next = first;
    if (count < 0 || count > UINT32_MAX)
        PyErr_SetString(PyExc_ValueError, "count is negative or beyond any table");
    else if (!(records = PyMem_Malloc(((size_t)count + 1) * sizeof *records)))
        PyErr_NoMemory();
    else {
        int64_t found;
        Py_BEGIN_ALLOW_THREADS
        found = kvshm_scan(segment_of(&table), &next, records, (size_t)count);
        Py_END_ALLOW_THREADS
        result = found < 0 ? kvshm_raise(module, &table, found)
                           : Py_BuildValue("(y#I)", records,
                                           (Py_ssize_t)(found * KVSHM_RECORD_BYTES), next);
    }
    PyMem_Free(records);
    PyBuffer_Release(&table);
    return result;
}

PyMethodDef kvshm_slot_methods[] = {
    {"publish", native_publish, METH_VARARGS, NULL},
    {"retract", native_retract, METH_VARARGS, NULL},
    {"drain", native_drain, METH_VARARGS, NULL},
    {"force", native_force, METH_VARARGS, NULL},
    {"reset", native_reset, METH_VARARGS, NULL},
    {"lease", native_lease, METH_VARARGS, NULL},
    {"release", native_release, METH_VARARGS, NULL},
    {"recheck", native_recheck, METH_VARARGS, NULL},
    {"sweep", native_sweep, METH_VARARGS, NULL},
    {"scan", native_scan, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
