/* Random reads of 4 KiB, as `tenmil perf URI -q DEPTH -t SECONDS`: the cost of the C interface.
 *
 *     rate [URI [DEPTH [SECONDS [READS]]]]         default: emu:null 128 1; READS ends it earlier
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <tenmil.h>
#include <time.h>
#include <unistd.h>

enum { DEPTH_MAX = 1024, SIZE = 4096 };

static _Noreturn void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n%s\n", what, tenmil_last_error(), tenmil_last_hint());
    exit(1);
}

static void check(const char *what, int code)
{
    if (code < 0)
        fail(what);
}

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* A number below `end`, without a division. */
static uint64_t draw(uint64_t *state, uint64_t end)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint64_t)(((unsigned __int128)*state * end) >> 64);
}

/* Runs this thread on the first processor that the process may use, and those of emulated SSDs on the second, as
 * `tenmil perf` does. */
static void place_threads(void)
{
    cpu_set_t allowed, first, second;
    int found = 0;
    DIR *tasks = opendir("/proc/self/task");

    CPU_ZERO(&first);
    CPU_ZERO(&second);
    if (tasks == NULL || sched_getaffinity(0, sizeof allowed, &allowed) != 0
        || CPU_COUNT(&allowed) < 2)
        return;
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++)
        if (CPU_ISSET(cpu, &allowed))
            CPU_SET(cpu, found++ == 0 ? &first : &second);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        pid_t thread = (pid_t)strtol(task->d_name, NULL, 10);

        if (thread > 0)
            sched_setaffinity(thread, sizeof first, thread == getpid() ? &first : &second);
    }
    closedir(tasks);
}

int main(int argc, char **argv)
{
    const char *uri = argc > 1 ? argv[1] : "emu:null";
    const unsigned depth = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 128;
    const double seconds = argc > 3 ? strtod(argv[3], NULL) : 1;
    const uint64_t most = argc > 4 ? strtoull(argv[4], NULL, 10) : UINT64_MAX;
    tenmil_context context;
    tenmil_device device;
    tenmil_queue queue;
    tenmil_device_info info = {.size = sizeof info};
    static tenmil_io ios[DEPTH_MAX];
    static tenmil_completion completions[DEPTH_MAX];
    static void *buffers[DEPTH_MAX];
    uint64_t random = 0x9e3779b97f4a7c15, reads = 0, errors = 0;

    if (depth == 0 || depth > DEPTH_MAX) {
        fprintf(stderr, "depth is %u, expected 1 to %d\n", depth, DEPTH_MAX);
        return 2;
    }
    check("start", tenmil_context_create(NULL, &context));
    check("open", tenmil_open(context, uri, TENMIL_OPEN_DIRECT, &device));
    place_threads();
    check("describe", tenmil_device_get_info(device, &info));
    /* As many as the device has; the rest waits here. */
    const unsigned in_flight = depth < info.depth_max ? depth : info.depth_max;
    check("create a queue", tenmil_queue_create(device, in_flight, &queue));

    const uint32_t blocks = SIZE / info.block_size;
    const uint64_t places = info.block_count / blocks;
    int waiting = (int)in_flight;
    for (unsigned i = 0; i < in_flight; i++) {
        check("allocate", tenmil_buffer_alloc(context, SIZE, &buffers[i]));
        ios[i] = (tenmil_io){
            .token = i,
            .lba = draw(&random, places) * blocks,
            .blocks = blocks,
            .data = buffers[i],
            .operation = TENMIL_OP_READ,
        };
    }

    const uint64_t start = now_ns();
    uint64_t end = start;
    for (unsigned turn = 0; reads < most; turn++) {
        if (waiting > 0) {
            int taken = tenmil_submit(queue, ios, (uint32_t)waiting);

            check("submit", taken);
            for (int i = taken; i < waiting && taken > 0; i++)
                ios[i - taken] = ios[i];
            waiting -= taken;
        }
        int count = tenmil_poll(queue, completions, in_flight);
        check("poll", count);
        for (int i = 0; i < count; i++) {
            uint64_t token = completions[i].token;

            errors += completions[i].status != 0;
            ios[waiting++] = (tenmil_io){
                .token = token,
                .lba = draw(&random, places) * blocks,
                .blocks = blocks,
                .data = buffers[token],
                .operation = TENMIL_OP_READ,
            };
        }
        reads += (uint64_t)count;
        if (turn % 1024 == 0) {
            end = now_ns();
            if ((double)(end - start) >= seconds * 1e9)
                break;
        }
    }
    end = now_ns();
    printf("%.2f M IOPS   %.1f ns per I/O   %" PRIu64 " reads, %" PRIu64 " errors\n",
           (double)reads * 1e3 / (double)(end - start), (double)(end - start) / (double)reads,
           reads, errors);

    check("destroy the queue", tenmil_queue_destroy(queue));
    for (unsigned i = 0; i < in_flight; i++)
        check("free", tenmil_buffer_free(context, buffers[i]));
    check("close", tenmil_close(device));
    check("end", tenmil_context_destroy(context));
    return errors != 0;
}
