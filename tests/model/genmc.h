/* What weak_memory.c and weak_index.c put between the C core and GenMC.
 *
 * DROPPED removes the fences of that order and makes its read-modify-writes relaxed,
 * LOADS_RELAXED all loads, STORES_RELAXED all stores: something must break.
 *
 * GenMC knows neither accesses of two sizes to one word nor some intrinsics, hence the
 * definitions down here; none of them changes an order that was not asked for. */
#ifndef KVSHM_TEST_GENMC_H
#define KVSHM_TEST_GENMC_H

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#ifndef DROPPED
#define DROPPED (-1)
#endif
#define KEPT(order) ((int)(order) == (int)(DROPPED) ? memory_order_relaxed : (order))
#ifdef LOADS_RELAXED
#define LOAD(order) memory_order_relaxed
#else
#define LOAD(order) order
#endif

#undef atomic_load_explicit
#define atomic_load_explicit(p, order)                                                           \
    ((__typeof__(__c11_atomic_load(p, order)))(                                                  \
        __c11_atomic_load((_Atomic uint64_t *)((uintptr_t)(p) & ~(uintptr_t)7), LOAD(order)) >>  \
        (8 * ((uintptr_t)(p) & 4))))
#ifdef STORES_RELAXED
#undef atomic_store_explicit
#define atomic_store_explicit(p, value, order) __c11_atomic_store(p, value, memory_order_relaxed)
#endif
#undef atomic_thread_fence
#define atomic_thread_fence(order)                                                               \
    do {                                                                                         \
        if ((int)(order) != (int)(DROPPED))                                                      \
            __c11_atomic_thread_fence(order);                                                    \
    } while (0)
#undef atomic_fetch_add_explicit
#define atomic_fetch_add_explicit(p, change, order) __c11_atomic_fetch_add(p, change, KEPT(order))
#undef atomic_compare_exchange_strong_explicit
#define atomic_compare_exchange_strong_explicit(p, expected, desired, success, failure)          \
    __c11_atomic_compare_exchange_strong(p, expected, desired, KEPT(success), failure)
#define memcpy(to, from, bytes) (*(uint64_t *)(to) = *(const uint64_t *)(from))
#define __builtin_prefetch(...) ((void)0)
#define __builtin_mul_overflow(a, b, product) (*(product) = (a) * (b), 0)
#define __builtin_add_overflow(a, b, sum) (*(sum) = (a) + (b), 0)

#endif
