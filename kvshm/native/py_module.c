/* Glue between Python and the core: module, arguments, words, sync points.
 *
 * Large batches of blocks run without the GIL; their buffers are held meanwhile.  The format of a
 * buffer argument says what happens to the buffer: w* is written, y* only read. */

#include "py_module.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

static const char *const request_names[KVSHM_NUM_REQUEST_NAMES] = {
    [KVSHM_COMPUTED] = "num_computed_tokens",
    [KVSHM_REQUEST_PREEMPTIONS] = "num_preemptions",
    [KVSHM_TOKENS] = "num_tokens",
    [KVSHM_PLACEHOLDERS] = "num_output_placeholders",
};

static const kvshm_slot_offsets unknown_blocks = {
    .names = {{"block_id", "block_id"},
              {"block_hash", "_block_hash"},
              {"ref_cnt", "ref_cnt"},
              {"next_free_block", "next_free_block"},
              {"prev_free_block", "prev_free_block"}}};

static const kvshm_slot_offsets unknown_tracked = {.names = {{"request", "request"},
                                                       {"complete", "complete"},
                                                       {"epochs", "epochs"},
                                                       {"preemptions", "preemptions"}}};

PyObject *kvshm_raise(PyObject *module, const Py_buffer *segment, int64_t status)
{
    uint64_t version = 0, bytes = 0;
    kvshm_segment memory = segment_of(segment);
    switch (status) {
    case KVSHM_CORRUPT:
        kvshm_load(memory, KVSHM_VERSION_OFFSET, &version);
        kvshm_load(memory, KVSHM_SEGMENT_BYTES_OFFSET, &bytes);
        return PyErr_Format(kvshm_state_of(module)->corrupt_segment,
                            "%zd bytes are mapped, but their header says layout %llu, header "
                            "%llu bytes, segment %llu bytes, or its counts do not fit in them",
                            segment->len, (unsigned long long)(uint32_t)version,
                            (unsigned long long)(version >> 32), (unsigned long long)bytes);
    case KVSHM_OUT_OF_RANGE:
        return PyErr_Format(PyExc_IndexError, "no such block, rank, lease bit, row or offset");
    default:
        return PyErr_Format(PyExc_ValueError, "misaligned memory, or regions that do not match");
    }
}

/* -- arguments and results ------------------------------------------------------------------- */

int kvshm_to_array(PyObject *object, void *address)
{
    kvshm_array *array = address;
    BUFFER(given);
    if (PyObject_GetBuffer(object, &given, PyBUF_SIMPLE) < 0)
        return 0;
    size_t bytes = (size_t)given.len;
    if (bytes % array->size) {
        PyErr_Format(PyExc_ValueError, "%zu bytes are not a whole number of %zu-byte elements",
                     bytes, array->size);
        return 0;
    }
    if (!kvshm_make_room(array, bytes / array->size))
        return 0;
    memcpy(array->of, given.buf, bytes);
    return 1;
}

int kvshm_to_blocks(PyObject *object, void *address)
{
    kvshm_array *array = address;
    Py_ssize_t length = PySequence_Size(object);
    uint32_t *blocks = length < 0 ? NULL : kvshm_make_room(array, (size_t)length);
    for (Py_ssize_t i = 0; blocks && i < length; i++) {
        PyObject *item = kvshm_item(object, i);
        long long value = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError))
            return 0;
        if (value < 0 || value > UINT32_MAX) {
            PyErr_Format(PyExc_IndexError, "element %zd is not a block id", i);
            return 0;
        }
        blocks[i] = (uint32_t)value;
    }
    return blocks != NULL;
}

PyObject *kvshm_list_of_blocks(const uint32_t *blocks, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *block = PyLong_FromUnsignedLong(blocks[i]);
        if (!block || PyList_SetItem(list, (Py_ssize_t)i, block) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* -- words ----------------------------------------------------------------------------------- */

/* Take a segment and `count` words from the stack, MOST_WORDS at most: the most frequent calls of all,
 * of which PyArg_ParseTuple would take half.  False with an exception. */
enum { MOST_WORDS = 8 };

static bool take_words(const char *name, PyObject *const *args, Py_ssize_t given, Py_ssize_t count,
                       Py_buffer *segment, int flags, uint64_t *words)
{
    if (given != 1 + count)
        return PyErr_Format(PyExc_TypeError, "%s takes a buffer and %zd numbers, not %zd arguments",
                            name, count, given) != NULL;
    if (PyObject_GetBuffer(args[0], segment, flags) < 0)
        return false;
    for (Py_ssize_t i = 1; i < given; i++) {
        words[i - 1] = PyLong_AsUnsignedLongLongMask(args[i]);
        if (words[i - 1] == UINT64_MAX && PyErr_Occurred())
            return false;
    }
    return true;
}

static PyObject *native_load(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    BUFFER(segment);
    uint64_t words[MOST_WORDS], value = 0;
    if (!take_words("load", args, given, 1, &segment, PyBUF_SIMPLE, words))
        return NULL;
    int64_t status = kvshm_load(segment_of(&segment), words[0], &value);
    return status < 0 ? kvshm_raise(module, &segment, status) : PyLong_FromUnsignedLongLong(value);
}

static PyObject *native_store(PyObject *module, PyObject *args)
{
    BUFFER(segment);
    unsigned long long offset, value;
    if (!PyArg_ParseTuple(args, "w*KK:store", &segment, &offset, &value))
        return NULL;
    int64_t status = kvshm_store(segment_of(&segment), offset, value);
    return status < 0 ? kvshm_raise(module, &segment, status) : Py_NewRef(Py_None);
}

static PyObject *native_add(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    BUFFER(segment);
    uint64_t words[MOST_WORDS], before = 0, first = 0;
    Py_ssize_t count = given > 1 + MOST_WORDS ? MOST_WORDS : given < 3 ? 2 : (given - 1) / 2 * 2;
    if (!take_words("add", args, given, count, &segment, PyBUF_WRITABLE, words))
        return NULL;
    int64_t status = KVSHM_OK;
    for (Py_ssize_t i = 0; i < count && status >= 0; i += 2) {
        status = kvshm_add(segment_of(&segment), words[i], words[i + 1], &before);
        first = i ? first : before;
    }
    return status < 0 ? kvshm_raise(module, &segment, status) : PyLong_FromUnsignedLongLong(first);
}

static PyObject *native_observe(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    BUFFER(segment);
    uint64_t words[MOST_WORDS];
    if (!take_words("observe", args, given, 2, &segment, PyBUF_WRITABLE, words))
        return NULL;
    int64_t status = kvshm_observe(segment_of(&segment), words[0], words[1]);
    return status < 0 ? kvshm_raise(module, &segment, status) : Py_NewRef(Py_None);
}

/* segment, histogram, begun, loop, pending: below 0 it is 0. */
static PyObject *native_hook_took(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    BUFFER(taken);
    uint64_t words[MOST_WORDS];
    if (!take_words("hook_took", args, given, 4, &taken, PyBUF_WRITABLE, words))
        return NULL;
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    uint64_t now = (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
    uint64_t histogram = words[0], begun = words[1], loop = words[2];
    kvshm_segment segment = segment_of(&taken);
    int64_t status = kvshm_observe(segment, histogram, now > begun ? now - begun : 0);
    if (status >= 0)
        status = kvshm_store(segment, loop, (int64_t)words[3] > 0 ? words[3] : 0);
    if (status >= 0)
        status = kvshm_store(segment, loop + 8, now);
    return status < 0 ? kvshm_raise(module, &taken, status) : Py_NewRef(Py_None);
}

static PyObject *native_compare_exchange(PyObject *module, PyObject *args)
{
    BUFFER(segment);
    unsigned long long offset, wanted, desired;
    if (!PyArg_ParseTuple(args, "w*KKK:compare_exchange", &segment, &offset, &wanted, &desired))
        return NULL;
    uint64_t expected = wanted;
    int64_t status = kvshm_compare_exchange(segment_of(&segment), offset, &expected, desired);
    return status < 0 ? kvshm_raise(module, &segment, status) : PyBool_FromLong((long)status);
}

static PyObject *native_mark_ready(PyObject *module, PyObject *args)
{
    BUFFER(segment);
    unsigned int version;
    if (!PyArg_ParseTuple(args, "w*I:mark_ready", &segment, &version))
        return NULL;
    int64_t status = kvshm_mark_ready(segment_of(&segment), version);
    return status < 0 ? kvshm_raise(module, &segment, status) : Py_NewRef(Py_None);
}

static PyObject *native_address(PyObject *module, PyObject *args)
{
    (void)module;
    BUFFER(buffer);
    if (!PyArg_ParseTuple(args, "y*:address", &buffer))
        return NULL;
    return PyLong_FromVoidPtr(buffer.buf);
}

/* -- sync points: tests stop or kill the process at one of them ------------------------------- */

static int armed_point = -1, armed_signal;
static atomic_int armed_countdown;

static void at_sync_point(int point)
{
    /* raise, not kill: this very thread gets the signal before raise returns */
    if (point == armed_point && atomic_fetch_sub(&armed_countdown, 1) == 1)
        raise(armed_signal);
}

static PyObject *native_unmap_pages(PyObject *module, PyObject *args)
{
    (void)module;
    BUFFER(mapping);
    if (!PyArg_ParseTuple(args, "y*:unmap_pages", &mapping))
        return NULL;
    int failed;
    WITHOUT_GIL(SIZE_MAX, failed = madvise(mapping.buf, (size_t)mapping.len, MADV_DONTNEED));
    return failed ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

static PyObject *native_arm_sync_point(PyObject *module, PyObject *args)
{
    (void)module;
    int point, signal_number, nth;
    if (!PyArg_ParseTuple(args, "iii:arm_sync_point", &point, &signal_number, &nth))
        return NULL;
    if (point < 0 || point >= KVSHM_SYNC_CORE_COUNT || nth < 1)
        return PyErr_Format(PyExc_ValueError, "no such sync point, or nth below 1");
    armed_point = point;
    armed_signal = signal_number;
    atomic_store(&armed_countdown, nth);
    kvshm_sync_hook = at_sync_point;
    Py_RETURN_NONE;
}

/* -- module ---------------------------------------------------------------------------------- */

/* Refuse to load unless layout.py states the layout that this module was built with. */
static int check_layout(void)
{
    PyObject *records = PyImport_ImportModule("kvshm._shm.layout");
    PyObject *result = records ? PyObject_CallMethod(records, "check_layout", "I",
                                                     (unsigned int)KVSHM_LAYOUT_DIGEST)
                               : NULL;
    Py_XDECREF(result);
    Py_XDECREF(records);
    return result ? 0 : -1;
}

static int native_exec(PyObject *module)
{
    kvshm_state *state = kvshm_state_of(module);
    state->blocks = unknown_blocks;
    state->tracked = unknown_tracked;
    for (int i = 0; i < KVSHM_NUM_REQUEST_NAMES; i++)
        if (!(state->request_names[i] = PyUnicode_InternFromString(request_names[i])))
            return -1;
    PyObject *errors = PyImport_ImportModule("kvshm.errors");
    if (!errors)
        return -1;
    state->corrupt_segment = PyObject_GetAttrString(errors, "CorruptSegment");
    Py_DECREF(errors);
    if (!state->corrupt_segment || check_layout() < 0 ||
        PyModule_AddIntConstant(module, "NUM_SYNC_POINTS", KVSHM_SYNC_CORE_COUNT) < 0 ||
        PyModule_AddFunctions(module, kvshm_slot_methods) < 0 ||
        PyModule_AddFunctions(module, kvshm_pool_methods) < 0 ||
        PyModule_AddFunctions(module, kvshm_duplicate_methods) < 0 ||
        PyModule_AddFunctions(module, kvshm_index_methods) < 0)
        return -1;
    return PyModule_AddFunctions(module, kvshm_mark_methods);
}

static int native_traverse(PyObject *module, visitproc visit, void *arg)
{
    kvshm_state *state = kvshm_state_of(module);
    Py_VISIT(state->corrupt_segment);
    Py_VISIT((PyObject *)state->blocks.tried);
    Py_VISIT((PyObject *)state->tracked.tried);
    return 0;
}

static int native_clear(PyObject *module)
{
    kvshm_state *state = kvshm_state_of(module);
    Py_CLEAR(state->corrupt_segment);
    for (int i = 0; i < KVSHM_NUM_REQUEST_NAMES; i++)
        Py_CLEAR(state->request_names[i]);
    state->blocks.type = state->tracked.type = NULL;
    Py_CLEAR(state->blocks.tried);
    Py_CLEAR(state->tracked.tried);
    return 0;
}

static PyObject *native_timer(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    return fd < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(fd);
}

/* Keeps the GIL.  A function that releases it, as os.eventfd_write does, must wait for the thread
 * that it wakes, which takes the GIL. */
static PyObject *native_wake(PyObject *module, PyObject *args)
{
    (void)module;
    int fd;
    unsigned int microseconds;
    if (!PyArg_ParseTuple(args, "iI:wake", &fd, &microseconds))
        return NULL;
    struct itimerspec when = {.it_value = {.tv_sec = microseconds / 1000000,
                                           .tv_nsec = microseconds % 1000000 * 1000L}};
    if (microseconds == 0)
        when.it_value.tv_nsec = 1; /* 0 would stop the timer */
    if (timerfd_settime(fd, 0, &when, NULL) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyMethodDef word_methods[] = {
    {"load", (PyCFunction)(void (*)(void))native_load, METH_FASTCALL, NULL},
    {"store", native_store, METH_VARARGS, NULL},
    {"add", (PyCFunction)(void (*)(void))native_add, METH_FASTCALL, NULL},
    {"observe", (PyCFunction)(void (*)(void))native_observe, METH_FASTCALL, NULL},
    {"hook_took", (PyCFunction)(void (*)(void))native_hook_took, METH_FASTCALL, NULL},
    {"compare_exchange", native_compare_exchange, METH_VARARGS, NULL},
    {"mark_ready", native_mark_ready, METH_VARARGS, NULL},
    {"address", native_address, METH_VARARGS, NULL},
    {"timer", native_timer, METH_NOARGS, NULL},
    {"wake", native_wake, METH_VARARGS, NULL},
    {"unmap_pages", native_unmap_pages, METH_VARARGS, NULL},
    {"pulse", kvshm_pulse, METH_VARARGS, NULL},
    {"arm_sync_point", native_arm_sync_point, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot native_slots[] = {
    {Py_mod_exec, native_exec},
    {0, NULL},
};

static PyModuleDef native_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvshm._native",
    .m_doc = "Atomic operations on kvshm's shared memory; contracts in _native.pyi.",
    .m_size = sizeof(kvshm_state),
    .m_methods = word_methods,
    .m_slots = native_slots,
    .m_traverse = native_traverse,
    .m_clear = native_clear,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&native_module);
}
