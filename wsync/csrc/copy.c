/* Copying bytes, by ordinary stores or by stores that bypass the caches ("streaming").
 *
 * An ordinary store first reads the cache line that it overwrites, takes it from the core that has read it, and writes it
 * back at some later time. Streaming saves that, and takes two thirds of the time for a quarter of a megabyte and more;
 * a reader on another core finds the data as fast (docs/performance.md). From 8 MiB on it depends on the machine: where
 * the last cache holds source and target, ordinary stores may never reach the memory. So both ways are measured.
 */

#define _GNU_SOURCE /* sched_getaffinity */
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include "loops.h"

enum {
    LINE = 64,                /* bytes of a cache line; the next four are bytes as well */
    STREAM_SHARED = 1 << 17,  /* stream from here on what another process will read */
    LARGE_BITS = 23,          /* log2: from here on both ways are measured */
    HOLD_GIL = 1 << 21,       /* up to here the GIL is not released */
    THREAD_SHARE = 1 << 24,   /* for each thread, if there is more than one */
    MAX_THREADS = 8,
    SIZE_CLASSES = 16,        /* of large copies, by powers of two */
    TRIALS = 6,               /* the first copies of a size take turns */
    RETRY = 64,               /* then so many copies go the faster way before the other one is measured again */
};

#ifdef __SSE2__
#include <emmintrin.h>

static void stream(char *to, const char *from, size_t nbytes)
{
    size_t head = -(uintptr_t)to % LINE;
    head = head < nbytes ? head : nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
        __m128i *target = (__m128i *)to;
        const __m128i *source = (const __m128i *)from;
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a), _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c), _mm_stream_si128(target + 3, d);
    }
    memcpy(to, from, nbytes);
}

/* A core that sees a later store also sees the streaming stores before this. */
static void fence(void)
{
    _mm_sfence();
}
#else
static void stream(char *to, const char *from, size_t nbytes)
{
    memcpy(to, from, nbytes);
}

static void fence(void)
{
}
#endif

/* A thread's part of a copy: of the bytes of all spans, one after the other, those from `begin` to `end`. */
typedef struct {
    const Span *spans;
    size_t count, begin, end;
    int streaming;
} Part;

static void *copy_part(void *given)
{
    const Part *part = given;
    size_t start = 0;
    for (size_t i = 0; i < part->count && start < part->end; i++) {
        const Span *span = &part->spans[i];
        size_t stop = start + span->nbytes;
        size_t begin = part->begin > start ? part->begin : start, end = part->end < stop ? part->end : stop;
        if (begin < end && part->streaming)
            stream(span->to + (begin - start), span->from + (begin - start), end - begin);
        else if (begin < end)
            memcpy(span->to + (begin - start), span->from + (begin - start), end - begin);
        start = stop;
    }
    if (part->streaming)
        fence();
    return NULL;
}

static void copy_together(const Part *whole, size_t threads)
{
    Part parts[MAX_THREADS];
    pthread_t helpers[MAX_THREADS];
    int helped[MAX_THREADS] = {0};
    size_t size = whole->end / threads / LINE * LINE;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for threads of Python */
    for (size_t i = 0; i < threads; i++) {
        parts[i] = *whole;
        parts[i].begin = size * i;
        parts[i].end = i + 1 < threads ? size * (i + 1) : whole->end;
        helped[i] = i && !pthread_create(&helpers[i], NULL, copy_part, &parts[i]);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (size_t i = 0; i < threads; i++)
        if (!helped[i])
            copy_part(&parts[i]);
    for (size_t i = 0; i < threads; i++)
        if (helped[i])
            pthread_join(helpers[i], NULL);
}

static size_t cpus(void)
{
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) ? 1 : (size_t)CPU_COUNT(&allowed);
}

/* Return the number of threads for a copy; 0 with an error. Few threads saturate the memory, so it is half of PyTorch's
 * number, but at least a quarter of the CPUs: PyTorch's number is meant for computations, and torchrun sets it to 1. */
static size_t threads_for(size_t nbytes)
{
    size_t most = nbytes / THREAD_SHARE < MAX_THREADS ? nbytes / THREAD_SHARE : MAX_THREADS;
    if (most < 2)
        return 1;
    PyObject *number = PyObject_CallNoArgs(names.get_num_threads);
    size_t half = number ? PyLong_AsSize_t(number) / 2 : 0;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return 0;
    size_t quarter = cpus() / 4, wanted = half > quarter ? half : quarter;
    return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

/* What large copies of one size have cost, in nanoseconds per byte: [0] ordinary, [1] streaming. Only a thread that has
 * the GIL touches it. */
typedef struct {
    double cost[2];
    unsigned copies;
} Speed;

static Speed *speed_of(size_t nbytes, int shared)
{
    static Speed speeds[2][SIZE_CLASSES];
    size_t index = 0;
    while (index + 1 < SIZE_CLASSES && nbytes >> (LARGE_BITS + index + 1))
        index++;
    return &speeds[!!shared][index];
}

static int choose_way(Speed *speed)
{
    unsigned turn = speed->copies++;
    if (turn < TRIALS)
        return !(turn & 1);
    int faster = speed->cost[1] <= speed->cost[0];
    return turn % RETRY == RETRY - 1 ? !faster : faster;
}

static void note_cost(Speed *speed, int way, double cost)
{
    double *known = &speed->cost[way];
    if (!*known || cost < *known)
        *known = cost;
    else
        *known += (cost - *known) / 8;
}

int copy_spans(const Span *spans, size_t count, int shared)
{
    Part whole = {.spans = spans, .count = count};
    for (size_t i = 0; i < count; i++)
        whole.end += spans[i].nbytes;
    Speed *speed = whole.end >> LARGE_BITS ? speed_of(whole.end, shared) : NULL;
    whole.streaming = speed ? choose_way(speed) : shared && whole.end >= STREAM_SHARED;
    if (whole.end <= HOLD_GIL) {
        copy_part(&whole);
        return 0;
    }
    size_t threads = threads_for(whole.end);
    if (!threads)
        return -1;
    int64_t began = nanoseconds();
    Py_BEGIN_ALLOW_THREADS
    if (threads == 1)
        copy_part(&whole);
    else
        copy_together(&whole, threads);
    Py_END_ALLOW_THREADS
    if (speed)
        note_cost(speed, whole.streaming, (double)(nanoseconds() - began) / (double)whole.end);
    return 0;
}
