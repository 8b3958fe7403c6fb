/* Copies a device to another one, with memory of the program and many I/Os in flight.
 *
 *     2_own_memory [FROM [TO]]         default: ram:4m to another ram:4m
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <tenmil.h>

enum { DEPTH = 32, CHUNK = 64 * 1024 };

/* A chunk that is read from one device and written to the other. */
struct chunk {
    uint64_t lba;
    uint32_t blocks;
};

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

static void submit(tenmil_queue queue, const struct chunk *chunk, char *memory, uint64_t token,
                   uint8_t operation)
{
    tenmil_io io = {
        .token = token,
        .lba = chunk->lba,
        .blocks = chunk->blocks,
        .data = memory + token * CHUNK,
        .operation = operation,
    };

    /* Each chunk has one I/O at a time, so that a queue with as many places always accepts it. */
    if (tenmil_submit(queue, &io, 1) != 1)
        fail("submit");
}

int main(int argc, char **argv)
{
    const char *uris[2] = {argc > 1 ? argv[1] : "ram:4m", argc > 2 ? argv[2] : "ram:4m"};
    tenmil_context context;
    tenmil_device devices[2];
    tenmil_queue queues[2];
    tenmil_device_info infos[2] = {{.size = sizeof infos[0]}, {.size = sizeof infos[1]}};
    struct chunk chunks[DEPTH];
    /* No alignment is needed; a multiple of the block size saves a device that needs it a copy. */
    char *memory = aligned_alloc(4096, (size_t)DEPTH * CHUNK);

    if (memory == NULL)
        return 1;
    check("start", tenmil_context_create(NULL, &context));
    check("register", tenmil_memory_register(context, memory, (size_t)DEPTH * CHUNK));
    for (int i = 0; i < 2; i++) {
        check("open", tenmil_open(context, uris[i], i == 0 ? TENMIL_OPEN_READ_ONLY : 0, &devices[i]));
        check("describe", tenmil_device_get_info(devices[i], &infos[i]));
        check("create a queue", tenmil_queue_create(devices[i], DEPTH, &queues[i]));
    }
    if (infos[0].block_size != infos[1].block_size || infos[0].block_count > infos[1].block_count) {
        fprintf(stderr, "%s does not fit on %s\n", uris[0], uris[1]);
        return 1;
    }

    const uint32_t blocks = CHUNK / infos[0].block_size;
    uint64_t next = 0, done = 0, busy = 0;

    for (uint64_t i = 0; i < DEPTH && next < infos[0].block_count; i++, busy++) {
        uint64_t rest = infos[0].block_count - next;

        chunks[i] = (struct chunk){next, rest < blocks ? (uint32_t)rest : blocks};
        next += chunks[i].blocks;
        submit(queues[0], &chunks[i], memory, i, TENMIL_OP_READ);
    }
    while (busy > 0) {
        for (int side = 0; side < 2; side++) {
            tenmil_completion completions[DEPTH];
            int count = tenmil_poll(queues[side], completions, DEPTH);

            check("poll", count);
            for (int i = 0; i < count; i++) {
                uint64_t token = completions[i].token;
                struct chunk *chunk = &chunks[token];

                if (completions[i].status_class != TENMIL_STATUS_CLASS_SUCCESS) {
                    char text[80];

                    tenmil_status_text(completions[i].status, text, sizeof text);
                    fprintf(stderr, "%s, block %" PRIu64 ": %s\n", uris[side], chunk->lba, text);
                    return 1;
                }
                if (side == 0) {
                    submit(queues[1], chunk, memory, token, TENMIL_OP_WRITE);
                    continue;
                }
                done += chunk->blocks;
                if (next < infos[0].block_count) {
                    uint64_t rest = infos[0].block_count - next;

                    *chunk = (struct chunk){next, rest < blocks ? (uint32_t)rest : blocks};
                    next += chunk->blocks;
                    submit(queues[0], chunk, memory, token, TENMIL_OP_READ);
                } else {
                    busy--;
                }
            }
        }
    }
    printf("%" PRIu64 " blocks copied from %s to %s\n", done, uris[0], uris[1]);

    for (int i = 0; i < 2; i++) {
        check("destroy a queue", tenmil_queue_destroy(queues[i]));
        check("close", tenmil_close(devices[i]));
    }
    check("unregister", tenmil_memory_unregister(context, memory));
    check("end", tenmil_context_destroy(context));
    free(memory);
    return 0;
}
