/* What the parts of the glue share: arguments in, results and errors out. */
#ifndef KVSHM_NATIVE_H
#define KVSHM_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_core.h"

extern PyMethodDef kvshm_slot_methods[], kvshm_index_methods[];

/* Results: status below 0 -> exception (CorruptSegment, IndexError, ValueError) and NULL. */
PyObject *kvshm_raise(PyObject *module, const Py_buffer *segment, int64_t status);

static inline kvshm_segment segment_of(const Py_buffer *buffer)
{
    return (kvshm_segment){buffer->buf, (uint64_t)buffer->len};
}

/* Packed arrays in a buffer, copied, so that they are aligned and may be written.  Sets *count.
 * NULL with ValueError if the length is no multiple of `size`, or with MemoryError.  The
 * caller gives it back with PyMem_Free, after the GIL was taken again. */
void *kvshm_copy_array(const Py_buffer *buffer, size_t size, size_t *count);

/* A sequence of block ids as such an array; IndexError for what no block id can be. */
uint32_t *kvshm_copy_blocks_list(PyObject *sequence, size_t *count);

PyObject *kvshm_list_of_blocks(const uint32_t *blocks, size_t count);

/* The GIL is given up around large batches only.  Whoever gives it up must wait until another
 * thread that took it lets go again, which takes longer than a small batch does: a scheduler
 * would stand still in the middle of a step. */
#define KVSHM_LARGE_BATCH 512

static inline PyThreadState *without_gil(size_t count)
{
    return count >= KVSHM_LARGE_BATCH ? PyEval_SaveThread() : NULL;
}

static inline void with_gil(PyThreadState *saved)
{
    if (saved)
        PyEval_RestoreThread(saved);
}

static inline PyObject *bytes_of(const void *data, size_t size)
{
    return PyBytes_FromStringAndSize(data, (Py_ssize_t)size);
}

#endif
