/* A word of shared memory that the kernel marks when this process dies.
 *
 * A robust futex (man 2 set_robust_list): a thread of its own writes its id into the word and
 * names the word as the lock it is just taking.  When the thread ends with its process, by
 * whatever signal, the kernel puts FUTEX_OWNER_DIED in the id's place.  It does that in the
 * thread's exit before the thread lets go of the process's memory and descriptors, and those
 * go only when the last thread has: so whoever finds the word unmarked after reading the
 * process's memory has read it while it was still there (Linux, kernel/exit.c: do_exit calls
 * exit_mm, and with it futex_exit_release, before exit_files).
 *
 * The thread never runs Python.  Its mapping of the word is its own, because one of Python's may
 * be gone before the process is.  Where it has named the word lies in shared memory, too, although
 * nobody shares it: private memory of who was killed may be taken before the kernel has looked
 * there (man 2 process_mrelease, which user space's OOM killers call). */

#define _GNU_SOURCE
#include "py_module.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

_Static_assert(KVSHM_PULSE_DIED == FUTEX_OWNER_DIED, "the kernel's own mark");

enum { STACK_BYTES = 64 << 10, STARTING = 0, BEATING = 1, FAILED = 2, ENDING = 3 };

typedef struct {
    _Atomic uint32_t *word;
    void *page;
    struct robust_list_head *robust; /* a page of its own */
    size_t page_bytes;
    atomic_int state; /* also a futex: both sides wait for it to change */
    atomic_int holders; /* the thread and the capsule */
    int error;
} pulse;

static const char *const CAPSULE = "kvshm pulse";

static void wait_while(atomic_int *state, int value)
{
    while (atomic_load(state) == value)
        syscall(SYS_futex, state, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void change(atomic_int *state, int value)
{
    atomic_store(state, value);
    syscall(SYS_futex, state, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void discard(pulse *held)
{
    if (held->robust)
        munmap(held->robust, held->page_bytes);
    if (held->page)
        munmap(held->page, held->page_bytes);
    free(held);
}

static void let_go(pulse *held)
{
    if (atomic_fetch_sub(&held->holders, 1) == 1)
        discard(held);
}

static void *beat(void *argument)
{
    pulse *held = argument;
    struct robust_list_head *robust = held->robust;
    robust->list.next = &robust->list;
    robust->list_op_pending = (struct robust_list *)(void *)held->word;
    if (syscall(SYS_set_robust_list, robust, sizeof *robust) != 0) {
        held->error = errno;
        change(&held->state, FAILED);
    } else {
        /* release: who sees the pulse sees what was written to the table before it */
        atomic_store_explicit(held->word, (uint32_t)syscall(SYS_gettid), memory_order_release);
        change(&held->state, BEATING);
        wait_while(&held->state, BEATING);
        atomic_store_explicit(held->word, KVSHM_PULSE_DIED, memory_order_release);
    }
    syscall(SYS_set_robust_list, NULL, sizeof *robust); /* its page goes before this thread does */
    let_go(held);
    return NULL;
}

/* A second mapping of the page the word lies in, and the page of the head; false with errno. */
static bool map_pages(pulse *held, uint8_t *word)
{
    size_t bytes = held->page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    size_t within = (uintptr_t)word % bytes;
    /* man mremap: an old size of 0 makes a new mapping of the same pages, if they are shared */
    void *page = mremap(word - within, 0, bytes, MREMAP_MAYMOVE);
    if (page == MAP_FAILED)
        return false;
    held->page = page;
    held->word = (_Atomic uint32_t *)(void *)((uint8_t *)page + within);
    void *head = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (head == MAP_FAILED)
        return false;
    held->robust = head;
    return madvise(head, bytes, MADV_DONTFORK) == 0; /* no child can spoil it */
}

static int start_thread(pulse *held)
{
    pthread_t thread;
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error)
        return error;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before; /* a signal is for a thread that knows Python */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread, &attributes, beat, held);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

static void end(PyObject *capsule)
{
    pulse *held = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!held)
        return;
    change(&held->state, ENDING);
    let_go(held);
}

static PyObject *failed(int error)
{
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Begin to beat in the 8-byte word at an address; NULL with OSError. */
static PyObject *begin(uint8_t *word)
{
    pulse *held = calloc(1, sizeof *held);
    if (!held)
        return PyErr_NoMemory();
    if (!map_pages(held, word)) {
        int error = errno;
        discard(held);
        return failed(error);
    }
    atomic_store(&held->holders, 2);
    int error = start_thread(held);
    if (error) {
        discard(held);
        return failed(error);
    }
    Py_BEGIN_ALLOW_THREADS
    wait_while(&held->state, STARTING);
    Py_END_ALLOW_THREADS
    if (atomic_load(&held->state) == FAILED) {
        error = held->error;
        let_go(held);
        return failed(error);
    }
    PyObject *capsule = PyCapsule_New(held, CAPSULE, end);
    if (!capsule) {
        change(&held->state, ENDING);
        let_go(held);
    }
    return capsule;
}

static PyObject *native_pulse(PyObject *module, PyObject *args)
{
    BUFFER(segment);
    unsigned long long offset;
    if (!PyArg_ParseTuple(args, "w*K:pulse", &segment, &offset))
        return NULL;
    uint64_t value;
    int64_t status = kvshm_load(segment_of(&segment), offset, &value); /* checks the offset */
    return status < 0 ? kvshm_raise(module, &segment, status)
                      : begin((uint8_t *)segment.buf + offset);
}

PyMethodDef kvshm_pulse_methods[] = {
    {"pulse", native_pulse, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
