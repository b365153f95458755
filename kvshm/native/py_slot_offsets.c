/* Glue between Python and the core: attributes of vLLM's objects, and the walk over a step's
 * requests.  A class with __slots__ keeps an attribute at the same place in all its objects.  An
 * experiment finds the place, once per class; objects of other classes are read through getattr. */

#include "py_module.h"

#include <stdbool.h>
#include <string.h>

/* -- places ---------------------------------------------------------------------------------- */

/* Find the word of a new object that holds the attribute; 0 if there is not exactly one. */
static size_t place_of(PyTypeObject *type, const kvshm_name *name, size_t words)
{
    size_t found = 0, matches = 0;
    PyObject *fresh = PyObject_CallMethod((PyObject *)type, "__new__", "O", type);
    PyObject *value = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type), *seen = NULL;
    if (fresh && value && Py_TYPE(fresh) == type &&
        PyObject_SetAttrString(fresh, name->kept_as, value) == 0) {
        PyObject **word = (PyObject **)fresh;
        for (size_t i = sizeof(PyObject) / sizeof *word; i < words; i++)
            if (word[i] == value) {
                found = i;
                matches++;
            }
        seen = PyObject_GetAttrString(fresh, name->asked_for);
    }
    bool plain = matches == 1 && seen == value;
    Py_XDECREF(seen);
    Py_XDECREF(value);
    Py_XDECREF(fresh);
    return plain ? found : 0;
}

void kvshm_find_slot_offsets(kvshm_slot_offsets *places, PyTypeObject *type)
{
    places->type = NULL;
    PyTypeObject *before = places->tried;
    places->tried = (PyTypeObject *)Py_NewRef((PyObject *)type);
    Py_XDECREF((PyObject *)before);
    PyObject *bytes = PyObject_GetAttrString((PyObject *)type, "__basicsize__");
    size_t words = bytes ? PyLong_AsSize_t(bytes) / sizeof(PyObject *) : 0;
    Py_XDECREF(bytes);
    bool all = !PyErr_Occurred();
    for (int i = 0; all && i < KVSHM_MAX_PLACES && places->names[i].asked_for; i++)
        all = (places->at[i] = place_of(type, &places->names[i], words)) != 0;
    PyErr_Clear(); /* then the attributes are read through getattr */
    if (all)
        places->type = places->tried;
}

/* -- a step's requests ----------------------------------------------------------------------- */

typedef struct {
    PyObject *const *names; /* of a request's attributes */
    kvshm_slot_offsets *places;
    long long size, epochs, drafts;
} walk;

/* Whether the step writes a block that may have a mark, completes a block, or may have another
 * table than before: 1, 0, or -1 with an exception.  Sets the first block that the step writes, or
 * that an accepted draft has ended, and the token before which the step ends. */
static int must_look(const walk *w, PyObject *tracked, PyObject *request, long long count,
                     long long *first, long long *end)
{
    long long begin = number_of(PyObject_GetAttr(request, w->names[KVSHM_COMPUTED])), known = 0;
    *end = begin + count;
    if (w->drafts) {
        /* The drafts of a step under way may be rejected.  Then this step begins further back, but
         * never before the last known token. */
        known = number_of(PyObject_GetAttr(request, w->names[KVSHM_TOKENS]));
        begin = begin < known - 1 ? begin : known - 1;
    }
    *first = begin >= 0 ? begin / w->size : -1; /* before the table: marks_write refuses it */
    long long complete = number_of(kvshm_get(w->places, tracked, KVSHM_COMPLETE));
    bool same = number_of(kvshm_get(w->places, tracked, KVSHM_EPOCHS)) == w->epochs &&
                number_of(kvshm_get(w->places, tracked, KVSHM_PREEMPTIONS)) ==
                    number_of(PyObject_GetAttr(request, w->names[KVSHM_REQUEST_PREEMPTIONS]));
    bool look = !same || *first < complete;
    if (w->drafts && same && *first > complete) {
        *first = complete; /* drafts complete no block: one that was accepted has ended this one */
        look = true;
    }
    if (!look && *end / w->size > *first) {
        look = true;
        if (w->drafts) {
            known += number_of(PyObject_GetAttr(request, w->names[KVSHM_PLACEHOLDERS]));
            look = (*end < known ? *end : known) / w->size > *first;
        }
    }
    return PyErr_Occurred() ? -1 : look;
}

static bool add_if_needed(const walk *w, PyObject *found, PyObject *tracked, PyObject *count)
{
    long long first, end, tokens = PyLong_AsLongLong(count);
    PyObject *request = kvshm_get(w->places, tracked, KVSHM_REQUEST);
    int look = request && !PyErr_Occurred()
                   ? must_look(w, tracked, request, tokens, &first, &end)
                   : -1;
    Py_XDECREF(request);
    if (look <= 0)
        return look == 0;
    PyObject *one = Py_BuildValue("(OLL)", tracked, first, end);
    int status = one ? PyList_Append(found, one) : -1;
    Py_XDECREF(one);
    return status == 0;
}

PyObject *kvshm_marks_step(PyObject *module, PyObject *args)
{
    PyObject *requests, *scheduled, *found;
    walk w = {.places = &kvshm_state_of(module)->tracked,
              .names = kvshm_state_of(module)->request_names};
    if (!PyArg_ParseTuple(args, "O!O!LLL:marks_step", &PyDict_Type, &requests, &PyDict_Type,
                          &scheduled, &w.size, &w.epochs, &w.drafts))
        return NULL;
    if (w.size < 1)
        return PyErr_Format(PyExc_ValueError, "a block has at least one token");
    found = PyList_New(0);
    PyObject *name, *count;
    Py_ssize_t at = 0;
    while (found && PyDict_Next(scheduled, &at, &name, &count)) {
        PyObject *tracked = Py_XNewRef(PyDict_GetItemWithError(requests, name));
        if (tracked ? !add_if_needed(&w, found, tracked, count) : PyErr_Occurred() != NULL)
            Py_CLEAR(found);
        Py_XDECREF(tracked);
    }
    return found;
}
