/* Glue between Python and the core: slots.  Each function checks its arguments, runs the core's
 * function of the same name (without the GIL for a large batch), and packs the result. */

#include "py_module.h"

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
    BUFFER(table);
    ARRAY(records, kvshm_record);
    ARRAY(parents, uint64_t);
    unsigned int published_ms;
    if (!PyArg_ParseTuple(args, "w*O&O&I:publish", &table, kvshm_to_array, &records,
                          kvshm_to_array, &parents, &published_ms))
        return NULL;
    if (records.count != parents.count)
        return PyErr_Format(PyExc_ValueError, "%zu records, but %zu parents", records.count,
                            parents.count);
    int64_t status;
    WITHOUT_GIL(records.count,
                status = kvshm_publish(segment_of(&table), records.of, parents.of, records.count,
                                       published_ms));
    return status < 0 ? kvshm_raise(module, &table, status)
                      : bytes_of(records.of, keep_published(records.of, records.count) *
                                                 sizeof(kvshm_record));
}

PyObject *kvshm_retract_blocks(PyObject *module, const Py_buffer *table, const uint32_t *blocks,
                               size_t count)
{
    size_t num_draining = 0;
    ARRAY(draining, uint32_t);
    kvshm_record *out;
    PyObject *room = kvshm_new_records(count, &out);
    if (!room || !kvshm_make_room(&draining, count)) {
        Py_XDECREF(room);
        return NULL;
    }
    int64_t retracted;
    WITHOUT_GIL(count, retracted = kvshm_retract(segment_of(table), blocks, count, out,
                                                 draining.of, &num_draining));
    if (retracted < 0) {
        Py_DECREF(room);
        return kvshm_raise(module, table, retracted);
    }
    return Py_BuildValue("(NN)", kvshm_keep_records(room, (size_t)retracted),
                         kvshm_list_of_blocks(draining.of, num_draining));
}

PyObject *kvshm_counted(PyObject *module, const Py_buffer *table, uint64_t offset,
                        PyObject *result)
{
    Py_ssize_t bytes = result ? PyBytes_Size(PyTuple_GetItem(result, 0)) : 0;
    uint64_t before, count = (uint64_t)bytes / KVSHM_RECORD_BYTES;
    int64_t status = KVSHM_OK;
    if (count > 0)
        status = kvshm_add(segment_of(table), offset, count, &before);
    if (status < 0) {
        Py_DECREF(result);
        return kvshm_raise(module, table, status);
    }
    return result;
}

static PyObject *native_retract(PyObject *module, PyObject *args)
{
    BUFFER(table);
    ARRAY(blocks, uint32_t);
    if (!PyArg_ParseTuple(args, "w*O&:retract", &table, kvshm_to_blocks, &blocks))
        return NULL;
    return kvshm_retract_blocks(module, &table, blocks.of, blocks.count);
}

static PyObject *native_drain(PyObject *module, PyObject *args)
{
    BUFFER(table);
    ARRAY(blocks, uint32_t);
    unsigned int slow;
    if (!PyArg_ParseTuple(args, "w*O&I:drain", &table, kvshm_to_blocks, &blocks, &slow))
        return NULL;
    int64_t waiting;
    WITHOUT_GIL(blocks.count,
                waiting = kvshm_drain(segment_of(&table), blocks.of, blocks.count, slow));
    return waiting < 0 ? kvshm_raise(module, &table, waiting)
                       : kvshm_list_of_blocks(blocks.of, (size_t)waiting);
}

static PyObject *native_force(PyObject *module, PyObject *args)
{
    BUFFER(table);
    ARRAY(blocks, uint32_t);
    if (!PyArg_ParseTuple(args, "w*O&:force", &table, kvshm_to_blocks, &blocks))
        return NULL;
    int64_t forced;
    uint32_t holders;
    WITHOUT_GIL(blocks.count,
                forced = kvshm_force(segment_of(&table), blocks.of, blocks.count, &holders));
    return forced < 0 ? kvshm_raise(module, &table, forced)
                      : Py_BuildValue("(LI)", (long long)forced, holders);
}

static PyObject *native_reset(PyObject *module, PyObject *args)
{
    BUFFER(table);
    if (!PyArg_ParseTuple(args, "w*:reset", &table))
        return NULL;
    int64_t occupied;
    WITHOUT_GIL(SIZE_MAX, occupied = kvshm_reset(segment_of(&table)));
    return kvshm_number(module, &table, occupied);
}

/* -- importer's side ------------------------------------------------------------------------- */

static PyObject *native_lease(PyObject *module, PyObject *args)
{
    BUFFER(table);
    ARRAY(records, kvshm_record);
    ARRAY(taken, uint8_t);
    unsigned long long epoch;
    int bit;
    if (!PyArg_ParseTuple(args, "y*KiO&:lease", &table, &epoch, &bit, kvshm_to_array, &records))
        return NULL;
    if (bit >= 0 && table.readonly)
        return PyErr_Format(PyExc_ValueError, "a lease needs a table that is mapped writable");
    if (!kvshm_make_room(&taken, records.count))
        return NULL;
    memset(taken.of, 0, taken.count);
    int64_t length;
    WITHOUT_GIL(records.count, length = kvshm_lease(segment_of(&table), epoch, bit, records.of,
                                                    records.count, taken.of));
    return length < 0 ? kvshm_raise(module, &table, length)
                      : Py_BuildValue("(Ly#)", (long long)length, taken.of,
                                      (Py_ssize_t)taken.count);
}

static PyObject *native_release(PyObject *module, PyObject *args)
{
    BUFFER(table);
    ARRAY(records, kvshm_record);
    const uint8_t *taken;
    Py_ssize_t num_taken;
    int bit;
    if (!PyArg_ParseTuple(args, "w*iO&z#:release", &table, &bit, kvshm_to_array, &records, &taken,
                          &num_taken))
        return NULL;
    if (taken && (size_t)num_taken < records.count)
        return PyErr_Format(PyExc_ValueError, "%zu records, but taken has %zd bytes",
                            records.count, num_taken);
    int64_t released;
    WITHOUT_GIL(records.count, released = kvshm_release(segment_of(&table), bit, records.of,
                                                        records.count, taken));
    return kvshm_number(module, &table, released);
}

static PyObject *native_recheck(PyObject *module, PyObject *args)
{
    BUFFER(table);
    ARRAY(records, kvshm_record);
    ARRAY(good, uint8_t);
    unsigned long long epoch;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "y*KIO&:recheck", &table, &epoch, &rank, kvshm_to_array,
                          &records) ||
        !kvshm_make_room(&good, records.count))
        return NULL;
    int64_t passed;
    WITHOUT_GIL(records.count, passed = kvshm_recheck(segment_of(&table), epoch, rank, records.of,
                                                      records.count, good.of));
    return passed < 0 ? kvshm_raise(module, &table, passed) : bytes_of(good.of, good.count);
}

static PyObject *native_hold(PyObject *module, PyObject *args)
{
    BUFFER(table);
    ARRAY(records, kvshm_record);
    unsigned long long epoch;
    unsigned int now, until;
    if (!PyArg_ParseTuple(args, "y*KO&II:hold", &table, &epoch, kvshm_to_array, &records, &now,
                          &until))
        return NULL;
    if (table.readonly)
        return PyLong_FromLong(0);
    int64_t found;
    WITHOUT_GIL(records.count, found = kvshm_hold(segment_of(&table), epoch, records.of,
                                                  records.count, now, until));
    return kvshm_number(module, &table, found);
}

static PyObject *native_sweep(PyObject *module, PyObject *args)
{
    BUFFER(table);
    unsigned int bits;
    if (!PyArg_ParseTuple(args, "w*I:sweep", &table, &bits))
        return NULL;
    int64_t changed;
    WITHOUT_GIL(SIZE_MAX, changed = kvshm_sweep(segment_of(&table), bits));
    return kvshm_number(module, &table, changed);
}

static PyObject *native_scan(PyObject *module, PyObject *args)
{
    BUFFER(table);
    ARRAY(records, kvshm_record);
    unsigned int next, stop = UINT32_MAX;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*In|I:scan", &table, &next, &count, &stop))
        return NULL;
    if (count < 0 || count > UINT32_MAX)
        return PyErr_Format(PyExc_ValueError, "count is negative or beyond any table");
    if (!kvshm_make_room(&records, (size_t)count))
        return NULL;
    int64_t found;
    WITHOUT_GIL(SIZE_MAX, found = kvshm_scan_part(segment_of(&table), &next, stop, records.of,
                                                  records.count));
    return found < 0 ? kvshm_raise(module, &table, found)
                     : Py_BuildValue("(y#I)", records.of,
                                     (Py_ssize_t)(found * KVSHM_RECORD_BYTES), next);
}

static PyObject *native_census_add(PyObject *module, PyObject *args)
{
    BUFFER(table);
    BUFFER(places);
    unsigned long long used;
    unsigned int number;
    if (!PyArg_ParseTuple(args, "y*w*KI:census_add", &table, &places, &used, &number))
        return NULL;
    kvshm_census census = {0};
    uint64_t room = (uint64_t)places.len / sizeof(kvshm_census_cell), sum = used;
    int64_t status;
    WITHOUT_GIL(SIZE_MAX, status = kvshm_census_add(segment_of(&table), places.buf, room, &sum,
                                                    number, &census));
    return status < 0 ? kvshm_raise(module, &table, status)
                      : Py_BuildValue("(KKKK)", sum, census.ready, census.draining, census.leased);
}

static PyObject *native_census_of(PyObject *module, PyObject *args)
{
    (void)module;
    BUFFER(places);
    unsigned int number;
    if (!PyArg_ParseTuple(args, "y*I:census_of", &places, &number))
        return NULL;
    uint64_t room = (uint64_t)places.len / sizeof(kvshm_census_cell), distinct, last_copies;
    WITHOUT_GIL(SIZE_MAX, kvshm_census_of(places.buf, room, number, &distinct, &last_copies));
    return Py_BuildValue("(KK)", distinct, last_copies);
}

static PyObject *native_census_missing(PyObject *module, PyObject *args)
{
    BUFFER(table);
    BUFFER(replica);
    unsigned int row;
    if (!PyArg_ParseTuple(args, "y*y*I:census_missing", &table, &replica, &row))
        return NULL;
    uint32_t oldest_ms = 0;
    int64_t missing;
    WITHOUT_GIL(SIZE_MAX, missing = kvshm_census_missing(segment_of(&table), segment_of(&replica),
                                                         row, &oldest_ms));
    return missing < 0 ? kvshm_raise(module, &table, missing)
                       : Py_BuildValue("(LI)", (long long)missing, (unsigned int)oldest_ms);
}

PyMethodDef kvshm_slot_methods[] = {
    {"census_missing", native_census_missing, METH_VARARGS, NULL},
    {"census_add", native_census_add, METH_VARARGS, NULL},
    {"census_of", native_census_of, METH_VARARGS, NULL},
    {"publish", native_publish, METH_VARARGS, NULL},
    {"retract", native_retract, METH_VARARGS, NULL},
    {"drain", native_drain, METH_VARARGS, NULL},
    {"force", native_force, METH_VARARGS, NULL},
    {"reset", native_reset, METH_VARARGS, NULL},
    {"lease", native_lease, METH_VARARGS, NULL},
    {"release", native_release, METH_VARARGS, NULL},
    {"recheck", native_recheck, METH_VARARGS, NULL},
    {"hold", native_hold, METH_VARARGS, NULL},
    {"sweep", native_sweep, METH_VARARGS, NULL},
    {"scan", native_scan, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
