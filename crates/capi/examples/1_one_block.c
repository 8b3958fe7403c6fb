/* Writes a block of a device, reads it back, and prints what was read.
 *
 *     1_one_block [URI]         default: ram:16m
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <tenmil.h>

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n%s\n", what, tenmil_last_error(), tenmil_last_hint());
    return 1;
}

/* Submits one I/O and polls until it has completed. */
static int run(tenmil_queue queue, const tenmil_io *io)
{
    tenmil_completion done;
    int found = tenmil_submit(queue, io, 1);

    if (found < 0)
        return found;
    while ((found = tenmil_poll(queue, &done, 1)) == 0)
        ;
    if (found < 0)
        return found;
    if (done.status_class != TENMIL_STATUS_CLASS_SUCCESS) {
        char text[80];

        tenmil_status_text(done.status, text, sizeof text);
        fprintf(stderr, "block %" PRIu64 ": %s\n", io->lba, text);
        return TENMIL_ERROR_REMOTE;
    }
    return TENMIL_OK;
}

int main(int argc, char **argv)
{
    const char *uri = argc > 1 ? argv[1] : "ram:16m";
    tenmil_context context;
    tenmil_device device;
    tenmil_queue queue;
    tenmil_device_info info = {.size = sizeof info};
    void *buffer;

    if (tenmil_context_create(NULL, &context) != TENMIL_OK)
        return fail("start");
    if (tenmil_open(context, uri, 0, &device) != TENMIL_OK)
        return fail("open");
    if (tenmil_device_get_info(device, &info) != TENMIL_OK
        || tenmil_queue_create(device, 0, &queue) != TENMIL_OK
        || tenmil_buffer_alloc(context, info.block_size, &buffer) != TENMIL_OK)
        return fail("prepare");

    tenmil_io io = {.lba = 7, .blocks = 1, .data = buffer, .operation = TENMIL_OP_WRITE};
    strcpy(buffer, "ten million");
    if (run(queue, &io) != TENMIL_OK)
        return fail("write");
    memset(buffer, 0, info.block_size);
    io.operation = TENMIL_OP_READ;
    if (run(queue, &io) != TENMIL_OK)
        return fail("read");
    printf("%s has %" PRIu64 " blocks of %u bytes; block 7: %s\n", uri, info.block_count,
           info.block_size, (const char *)buffer);

    if (tenmil_buffer_free(context, buffer) != TENMIL_OK || tenmil_queue_destroy(queue) != TENMIL_OK
        || tenmil_close(device) != TENMIL_OK || tenmil_context_destroy(context) != TENMIL_OK)
        return fail("close");
    return 0;
}
