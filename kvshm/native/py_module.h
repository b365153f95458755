/* What the files of the glue share: arguments, results, errors, and the module's state. */
#ifndef KVSHM_NATIVE_H
#define KVSHM_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

extern PyMethodDef kvshm_slot_methods[], kvshm_index_methods[], kvshm_mark_methods[],
    kvshm_pool_methods[], kvshm_duplicate_methods[];

PyObject *kvshm_pulse(PyObject *module, PyObject *args);
PyObject *kvshm_marks_step(PyObject *module, PyObject *args);

/* Raise the exception that a status below 0 stands for: CorruptSegment, IndexError or ValueError.
 * Returns NULL. */
PyObject *kvshm_raise(PyObject *module, const Py_buffer *segment, int64_t status);

static inline kvshm_segment segment_of(const Py_buffer *buffer)
{
    return (kvshm_segment){buffer->buf, (uint64_t)buffer->len};
}

/* A status as a Python number; NULL with an exception if it is below 0. */
static inline PyObject *kvshm_number(PyObject *module, const Py_buffer *segment, int64_t status)
{
    return status < 0 ? kvshm_raise(module, segment, status) : PyLong_FromLongLong(status);
}

/* Declare a buffer, which is empty until an argument is read into it, and released when its block
 * ends. */
#define BUFFER(name) __attribute__((cleanup(PyBuffer_Release))) Py_buffer name = {0}

/* An array that is freed when its block ends; the thread must hold the GIL then. */
typedef struct {
    size_t size, count; /* of an element; of elements */
    void *of;
} kvshm_array;

static inline void kvshm_free_array(kvshm_array *array) { PyMem_Free(array->of); }

#define ARRAY(name, type) \
    __attribute__((cleanup(kvshm_free_array))) kvshm_array name = {.size = sizeof(type)}

/* Allocate room for `count` elements; NULL with MemoryError. */
static inline void *kvshm_make_room(kvshm_array *array, size_t count)
{
    array->count = count;
    array->of = PyMem_Malloc((count + 1) * array->size);
    return array->of ? array->of : PyErr_NoMemory();
}

/* For O& of PyArg_ParseTuple.  kvshm_to_array copies a packed array from a buffer, so that it is
 * aligned and writable: ValueError if the length is not a whole number of elements.
 * kvshm_to_blocks copies a sequence of block ids to uint32_t: IndexError for an impossible block
 * id. */
int kvshm_to_array(PyObject *object, void *array);
int kvshm_to_blocks(PyObject *object, void *array);

/* The number that an object stands for, which is released; -1 with an exception, also for NULL. */
static inline long long number_of(PyObject *value)
{
    long long number = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

/* An element of a sequence, as a new reference; NULL with an exception. */
static inline PyObject *kvshm_item(PyObject *sequence, Py_ssize_t index)
{
    if (!PyList_CheckExact(sequence))
        return PySequence_GetItem(sequence, index);
    PyObject *item = PyList_GetItem(sequence, index);
    return item ? Py_NewRef(item) : NULL;
}

PyObject *kvshm_list_of_blocks(const uint32_t *blocks, size_t count);

/* A new bytes object with room for `count` records; NULL with an exception. */
static inline PyObject *kvshm_new_records(size_t count, kvshm_record **records)
{
    Py_ssize_t size = (Py_ssize_t)(count * sizeof **records);
    PyObject *room = PyBytes_FromStringAndSize(NULL, size);
    *records = room ? (kvshm_record *)(void *)PyBytes_AsString(room) : NULL;
    return room;
}

/* The first `count` records of such an object, which is released.  If it has no more records, it is
 * returned and nothing is copied. */
static inline PyObject *kvshm_keep_records(PyObject *room, size_t count)
{
    Py_ssize_t size = (Py_ssize_t)(count * sizeof(kvshm_record));
    if (size == PyBytes_Size(room))
        return room;
    PyObject *kept = PyBytes_FromStringAndSize(PyBytes_AsString(room), size);
    Py_DECREF(room);
    return kept;
}

/* Retract blocks: the event to send, and the list of those to wait for. */
PyObject *kvshm_retract_blocks(PyObject *module, const Py_buffer *table, const uint32_t *blocks,
                               size_t count);

/* Add the number of records in `result`, a tuple (records, ...), to the table's counter at
 * `offset`.  Returns `result`; NULL with an exception, also if `result` is NULL. */
PyObject *kvshm_counted(PyObject *module, const Py_buffer *table, uint64_t offset,
                        PyObject *result);

/* The GIL is released around large batches only.  A thread that releases the GIL must then wait
 * until the thread that took it releases it, which takes longer than a small batch: a scheduler
 * would stand still in the middle of a step. */
#define KVSHM_LARGE_BATCH 512

#define WITHOUT_GIL(count, work)                                                       \
    do {                                                                               \
        PyThreadState *saved = (count) >= KVSHM_LARGE_BATCH ? PyEval_SaveThread() : NULL; \
        work;                                                                          \
        if (saved)                                                                     \
            PyEval_RestoreThread(saved);                                               \
    } while (0)

/* -- attributes of objects of one class (py_slot_offsets.c) ------------------------------------- */

enum { KVSHM_MAX_PLACES = 5 };

typedef struct {
    const char *asked_for, *kept_as; /* a property's name, and the attribute that it returns */
} kvshm_name;

typedef struct {
    kvshm_name names[KVSHM_MAX_PLACES];
    PyTypeObject *type;           /* the class whose places are known; NULL: none */
    PyTypeObject *tried;          /* the class that was examined last; a reference is held */
    size_t at[KVSHM_MAX_PLACES];  /* in words */
} kvshm_slot_offsets;

enum kvshm_of_block {
    KVSHM_BLOCK_ID,
    KVSHM_BLOCK_HASH,
    KVSHM_REF_CNT,
    KVSHM_NEXT_FREE,
    KVSHM_PREV_FREE
};
enum kvshm_of_tracked { KVSHM_REQUEST, KVSHM_COMPLETE, KVSHM_EPOCHS, KVSHM_PREEMPTIONS };

/* Names of attributes that requests have (vLLM's). */
enum kvshm_of_request {
    KVSHM_COMPUTED,
    KVSHM_REQUEST_PREEMPTIONS,
    KVSHM_TOKENS,
    KVSHM_PLACEHOLDERS,
    KVSHM_NUM_REQUEST_NAMES
};

typedef struct {
    PyObject *corrupt_segment; /* the exception */
    kvshm_slot_offsets blocks, tracked;
    PyObject *request_names[KVSHM_NUM_REQUEST_NAMES];
} kvshm_state;

static inline kvshm_state *kvshm_state_of(PyObject *module) { return PyModule_GetState(module); }

/* May run Python code. */
void kvshm_find_slot_offsets(kvshm_slot_offsets *places, PyTypeObject *type);

/* An attribute, as a new reference; NULL with an exception. */
static inline PyObject *kvshm_get(kvshm_slot_offsets *places, PyObject *object, int which)
{
    if (Py_TYPE(object) != places->tried)
        kvshm_find_slot_offsets(places, Py_TYPE(object));
    PyObject *kept =
        Py_TYPE(object) == places->type ? ((PyObject **)object)[places->at[which]] : NULL;
    return kept ? Py_NewRef(kept) : PyObject_GetAttrString(object, places->names[which].asked_for);
}

/* Set an attribute; false with an exception. */
static inline bool kvshm_set(kvshm_slot_offsets *places, PyObject *object, int which, PyObject *value)
{
    if (Py_TYPE(object) != places->tried)
        kvshm_find_slot_offsets(places, Py_TYPE(object));
    if (Py_TYPE(object) != places->type)
        return PyObject_SetAttrString(object, places->names[which].kept_as, value) == 0;
    PyObject **word = (PyObject **)object + places->at[which], *before = *word;
    *word = Py_NewRef(value);
    Py_XDECREF(before);
    return true;
}

static inline PyObject *bytes_of(const void *data, size_t size)
{
    return PyBytes_FromStringAndSize(data, (Py_ssize_t)size);
}

#endif
