/* A word of shared memory that the kernel marks when this process dies.
 *
 * The word is a robust futex (man 2 set_robust_list): a dedicated thread writes its id into the
 * word and registers the word as the lock that it is taking.  When the thread ends with its
 * process, by whatever signal, the kernel replaces the id by FUTEX_OWNER_DIED.  The kernel does
 * that in the thread's exit, before the thread releases the process's memory and descriptors, which
 * are freed only after the last thread has released them.  So a peer that finds the word unmarked
 * after it has read the process's memory has read valid memory (Linux, kernel/exit.c: do_exit calls
 * exit_mm, and thereby futex_exit_release, before exit_files).
 *
 * The thread never runs Python.  It has its own mapping of the word, because Python's mapping may
 * be closed before the process ends.  The registration (robust list head) lies in shared memory,
 * too, although no process shares it: the private memory of a killed process may be freed before
 * the kernel reads it (man 2 process_mrelease, which OOM killers in user space call). */

#define _GNU_SOURCE
#include "py_module.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
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

static void drop_holder(pulse *held)
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
        /* release: a process that sees the pulse sees all earlier writes to the table */
        atomic_store_explicit(held->word, (uint32_t)syscall(SYS_gettid), memory_order_release);
        change(&held->state, BEATING);
        wait_while(&held->state, BEATING);
        atomic_store_explicit(held->word, KVSHM_PULSE_DIED, memory_order_release);
    }
    /* the list head's page is unmapped before the thread ends */
    syscall(SYS_set_robust_list, NULL, sizeof *robust);
    drop_holder(held);
    return NULL;
}

/* Map the word's page a second time, and a page for the list head.  Returns 0 or an errno. */
static int map_pages(pulse *held, uint8_t *word)
{
    size_t bytes = held->page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    size_t within = (uintptr_t)word % bytes;
    /* man mremap: an old size of 0 makes a new mapping of the same pages, if they are shared */
    void *page = mremap(word - within, 0, bytes, MREMAP_MAYMOVE);
    if (page == MAP_FAILED)
        return errno;
    held->page = page;
    held->word = (_Atomic uint32_t *)(void *)((uint8_t *)page + within);
    void *head = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (head == MAP_FAILED)
        return errno;
    held->robust = head;
    /* a forked child does not get the page, so it cannot overwrite the list head */
    return madvise(head, bytes, MADV_DONTFORK) == 0 ? 0 : errno;
}

/* Returns 0 or an errno. */
static int start_thread(pulse *held)
{
    pthread_t thread;
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (error)
        return error;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before; /* the thread blocks all signals: threads that run Python handle them */
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
    drop_holder(held);
}

/* Begin to beat in the 8-byte word at an address; NULL with OSError. */
static PyObject *begin(uint8_t *word)
{
    pulse *held = calloc(1, sizeof *held);
    if (!held)
        return PyErr_NoMemory();
    atomic_store(&held->holders, 2);
    int error = map_pages(held, word);
    if (!error)
        error = start_thread(held);
    if (error) {
        discard(held);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_BEGIN_ALLOW_THREADS
    wait_while(&held->state, STARTING);
    Py_END_ALLOW_THREADS
    if (atomic_load(&held->state) == FAILED) {
        error = held->error;
        drop_holder(held);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    PyObject *capsule = PyCapsule_New(held, CAPSULE, end);
    if (!capsule) {
        change(&held->state, ENDING);
        drop_holder(held);
    }
    return capsule;
}

PyObject *kvshm_pulse(PyObject *module, PyObject *args)
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
