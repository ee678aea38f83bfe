/* Copying, by the shortest way to who will read it.
 *
 * An ordinary store first fetches the line that it overwrites, takes it from whichever core has read it, and writes it
 * back some time. What another core will read, or is too much for the caches anyway, is written past them instead:
 * two thirds of the time from a quarter of a megabyte on, and the reader finds it as fast (docs/performance.md).
 */

#include <signal.h>

#include "native.h"

enum {
    LINE = 64,             /* bytes, as all of these: of a cache */
    PAST_SHARED = 1 << 17, /* from here on past the caches, if another process will read it */
    PAST_OWN = 1 << 23,    /* or if this one will */
    BRIEF = 1 << 21,       /* up to here no other thread of Python is let run meanwhile */
    MUCH = 1 << 24,        /* for each thread, if there is more than one */
    MOST_THREADS = 8,
};

#ifdef __SSE2__
#include <emmintrin.h>

static void past_caches(char *to, const char *from, size_t nbytes)
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

/* Behind it, whoever sees a later store sees those past the caches, too. */
static void fence(void)
{
    _mm_sfence();
}
#else
static void past_caches(char *to, const char *from, size_t nbytes)
{
    memcpy(to, from, nbytes);
}

static void fence(void)
{
}
#endif

/* A thread's part of a copy: of all bytes, one span behind another, those from `begin` to `end`. */
typedef struct {
    const Span *spans;
    size_t count, begin, end;
    int past;
} Share;

static void *copy_share(void *given)
{
    const Share *share = given;
    size_t start = 0;
    for (size_t i = 0; i < share->count && start < share->end; i++) {
        const Span *span = &share->spans[i];
        size_t stop = start + span->nbytes;
        size_t begin = share->begin > start ? share->begin : start, end = share->end < stop ? share->end : stop;
        if (begin < end && share->past)
            past_caches(span->to + (begin - start), span->from + (begin - start), end - begin);
        else if (begin < end)
            memcpy(span->to + (begin - start), span->from + (begin - start), end - begin);
        start = stop;
    }
    if (share->past)
        fence();
    return NULL;
}

static void copy_together(const Share *whole, size_t threads)
{
    Share shares[MOST_THREADS];
    pthread_t helpers[MOST_THREADS];
    int helped[MOST_THREADS] = {0};
    size_t part = whole->end / threads / LINE * LINE;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* a signal is for a thread that Python knows */
    for (size_t i = 0; i < threads; i++) {
        shares[i] = *whole;
        shares[i].begin = part * i;
        shares[i].end = i + 1 < threads ? part * (i + 1) : whole->end;
        helped[i] = i && !pthread_create(&helpers[i], NULL, copy_share, &shares[i]);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (size_t i = 0; i < threads; i++)
        if (!helped[i])
            copy_share(&shares[i]);
    for (size_t i = 0; i < threads; i++)
        if (helped[i])
            pthread_join(helpers[i], NULL);
}

/* How many threads are to copy so much: half of those that PyTorch would take, for the memory is soon as fast as it can
 * be. 0 with an error. */
static size_t threads_for(size_t nbytes)
{
    size_t most = nbytes / MUCH < MOST_THREADS ? nbytes / MUCH : MOST_THREADS;
    if (most < 2)
        return 1;
    PyObject *number = PyObject_CallNoArgs(names.get_num_threads);
    size_t half = number ? PyLong_AsSize_t(number) / 2 : 0;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return 0;
    return half < 1 ? 1 : half < most ? half : most;
}

int copy_spans(const Span *spans, size_t count, int shared)
{
    Share whole = {.spans = spans, .count = count};
    for (size_t i = 0; i < count; i++)
        whole.end += spans[i].nbytes;
    whole.past = whole.end >= (shared ? PAST_SHARED : PAST_OWN);
    if (whole.end <= BRIEF) {
        copy_share(&whole);
        return 0;
    }
    size_t threads = threads_for(whole.end);
    if (!threads)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    if (threads == 1)
        copy_share(&whole);
    else
        copy_together(&whole, threads);
    Py_END_ALLOW_THREADS
    return 0;
}
