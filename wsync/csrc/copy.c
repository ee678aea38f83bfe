/* Copying bytes, by ordinary stores or by stores that bypass the caches ("streaming").
 *
 * An ordinary store first reads the cache line that it overwrites, takes it from the core that has read it, and writes it
 * back at some later time. Streaming saves that, and takes two thirds of the time; of 64 KiB a fifth, if the lines are in
 * another core's cache. A reader on another core finds the data as fast (docs/performance.md).
 */

#include <pthread.h>
#include <sched.h>

#include "native.h"

enum {
    LINE = 64,               /* bytes of a cache line; the others are bytes as well */
    STREAM_SHARED = 1 << 15, /* stream from here on what another process will read */
    HOLD_GIL = 1 << 21,      /* up to here the GIL is not released */
    THREAD_SHARE = 1 << 24,  /* for each thread, if there is more than one */
    MAX_THREADS = 8,
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
#define fence _mm_sfence
#else
#define stream memcpy
#define fence() ((void)0)
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
    for (size_t i = 0; i < threads; i++) {
        parts[i] = *whole;
        parts[i].begin = size * i;
        parts[i].end = i + 1 < threads ? size * (i + 1) : whole->end;
        helped[i] = i && !pthread_create(&helpers[i], NULL, copy_part, &parts[i]);
    }
    for (size_t i = 0; i < threads; i++)
        if (!helped[i])
            copy_part(&parts[i]);
    for (size_t i = 0; i < threads; i++)
        if (helped[i])
            pthread_join(helpers[i], NULL);
}

/* Few threads saturate the memory. PyTorch's number is for computations, and torchrun sets it to 1. */
static size_t threads_for(size_t nbytes)
{
    cpu_set_t allowed;
    size_t half = sched_getaffinity(0, sizeof allowed, &allowed) ? 1 : (size_t)CPU_COUNT(&allowed) / 2;
    size_t most = nbytes / THREAD_SHARE < MAX_THREADS ? nbytes / THREAD_SHARE : MAX_THREADS;
    return most < half ? most : half;
}

void copy_spans(const Span *spans, size_t count, int shared)
{
    Part whole = {.spans = spans, .count = count};
    for (size_t i = 0; i < count; i++)
        whole.end += spans[i].nbytes;
    whole.streaming = shared && whole.end >= STREAM_SHARED;
    if (whole.end <= HOLD_GIL) {
        copy_part(&whole);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    size_t threads = threads_for(whole.end);
    if (threads < 2)
        copy_part(&whole);
    else
        copy_together(&whole, threads);
    Py_END_ALLOW_THREADS
}
