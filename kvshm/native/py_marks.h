/* Marks in C (kvshm/_engine/marks.py): for py_marks.c, which changes them, and py_publish.c. */

#ifndef KVSHM_NATIVE_MARKS_H
#define KVSHM_NATIVE_MARKS_H

#include "py_module.h"

#include <stdbool.h>

enum {
    SOUND = 1,
    SHOWN = 2,
    USED_SHIFT = 2,            /* behind it: when a request last began with it, 0 for never, */
    TICKS_PER_SECOND = 64,     /* in these, */
    TICKS = 0xffffffffu >> USED_SHIFT, /* of which as many are counted */
};

typedef struct {
    uint32_t version, flags;
} mark;

typedef struct {
    uint32_t block, version;
} pair;

typedef struct {
    Py_buffer buffer;
    mark *of;
    size_t count;
} marks_view;

static inline void release_marks(marks_view *marks) { PyBuffer_Release(&marks->buffer); }

#define MARKS(name) __attribute__((cleanup(release_marks))) marks_view name = {0}

/* For O& of PyArg_ParseTuple: a writable buffer as marks. */
static inline int kvshm_to_marks(PyObject *object, void *address)
{
    marks_view *marks = address;
    if (PyObject_GetBuffer(object, &marks->buffer, PyBUF_WRITABLE) < 0)
        return 0;
    marks->of = marks->buffer.buf;
    marks->count = (size_t)marks->buffer.len / sizeof(mark);
    if ((uintptr_t)marks->of % _Alignof(mark) == 0)
        return 1;
    PyErr_SetString(PyExc_ValueError, "misaligned marks");
    return 0;
}

PyObject *kvshm_marks_publish(PyObject *module, PyObject *args);

#endif
