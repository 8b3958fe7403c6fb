/* Serves a device that this program implements, a disk in memory, over NVMe/TCP or NBD.
 *
 *     4_serve_own_device [nvme-tcp|nbd [ADDRESS [SECONDS]]]         default: nvme-tcp 127.0.0.1:0, until a test
 *
 * Without SECONDS it opens its own namespace as a host, writes and reads a block, and ends.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tenmil.h>
#include <unistd.h>

enum { BLOCK = 512, BLOCKS = 32768, DEPTH = 64 };

/* The disk, which all channels share. One thread serves it, so that it needs no lock. */
struct disk {
    char bytes[BLOCKS][BLOCK];
};

/* A channel of the disk: completions that have not been polled. */
struct channel {
    struct disk *disk;
    tenmil_completion ready[DEPTH];
    uint32_t first, count;
};

static int32_t disk_open_channel(void *device, void **channel)
{
    struct channel *new_channel = calloc(1, sizeof *new_channel);

    if (new_channel == NULL)
        return 1;
    new_channel->disk = device;
    *channel = new_channel;
    return 0;
}

static void disk_close_channel(void *channel)
{
    free(channel);
}

/* Copies between the disk and the segments of a request. Its range was checked. */
static void transfer(struct disk *disk, const tenmil_io *io)
{
    char *at = disk->bytes[io->lba];

    for (uint16_t i = 0; i < io->segment_count; i++) {
        const tenmil_segment *segment = &io->segments[i];

        if (io->operation == TENMIL_OP_READ)
            memcpy(segment->data, at, segment->len);
        else
            memcpy(at, segment->data, segment->len);
        at += segment->len;
    }
}

static int32_t disk_submit(void *argument, const tenmil_io *ios, uint32_t count)
{
    struct channel *channel = argument;

    /* The library has no more than DEPTH requests in flight, so that each has a place. */
    for (uint32_t i = 0; i < count; i++) {
        uint32_t place = (channel->first + channel->count++) % DEPTH;

        if (ios[i].operation != TENMIL_OP_FLUSH)
            transfer(channel->disk, &ios[i]);
        channel->ready[place] = (tenmil_completion){.token = ios[i].token};
    }
    return (int32_t)count;
}

static int32_t disk_poll(void *argument, tenmil_completion *completions, uint32_t max)
{
    struct channel *channel = argument;
    uint32_t found = 0;

    for (; found < max && channel->count > 0; found++, channel->count--) {
        completions[found] = channel->ready[channel->first];
        channel->first = (channel->first + 1) % DEPTH;
    }
    return (int32_t)found;
}

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

/* Writes a block through the network, and reads it back. */
static void use_as_host(const char *uri)
{
    tenmil_context context;
    tenmil_device device;
    tenmil_queue queue;
    tenmil_completion done;
    void *buffer;

    check("start", tenmil_context_create(NULL, &context));
    check("open", tenmil_open(context, uri, 0, &device));
    check("create a queue", tenmil_queue_create(device, 0, &queue));
    check("allocate", tenmil_buffer_alloc(context, BLOCK, &buffer));
    tenmil_io io = {.lba = 4711, .blocks = 1, .data = buffer, .operation = TENMIL_OP_WRITE};
    strcpy(buffer, "through the network");
    for (int turn = 0; turn < 2; turn++) {
        int found;

        check("submit", tenmil_submit(queue, &io, 1));
        while ((found = tenmil_poll(queue, &done, 1)) == 0)
            ;
        check("poll", found);
        if (done.status != 0) {
            fprintf(stderr, "status %#x\n", done.status);
            exit(1);
        }
        if (turn == 0)
            memset(buffer, 0, BLOCK);
        io.operation = TENMIL_OP_READ;
    }
    printf("%s: block 4711: %s\n", uri, (const char *)buffer);
    check("free", tenmil_buffer_free(context, buffer));
    check("destroy the queue", tenmil_queue_destroy(queue));
    check("close", tenmil_close(device));
    check("end", tenmil_context_destroy(context));
}

int main(int argc, char **argv)
{
    const int is_nbd = argc > 1 && strcmp(argv[1], "nbd") == 0;
    const tenmil_device_functions functions = {
        .open_channel = disk_open_channel,
        .close_channel = disk_close_channel,
        .submit = disk_submit,
        .poll = disk_poll,
    };
    const tenmil_device_properties properties = {
        .size = sizeof properties,
        .block_size = BLOCK,
        .block_count = BLOCKS,
        .segments_max = 16,
        .depth_max = DEPTH,
        .operations = 1 << TENMIL_OP_READ | 1 << TENMIL_OP_WRITE | 1 << TENMIL_OP_FLUSH,
        .durability = TENMIL_DURABILITY_NONE,
    };
    struct disk *disk = calloc(1, sizeof *disk);
    const tenmil_export export_ = {
        .name = "disk",
        .functions = &functions,
        .properties = &properties,
        .device = disk,
    };
    const tenmil_server_options options = {
        .size = sizeof options,
        .protocol = is_nbd ? TENMIL_SERVE_NBD : TENMIL_SERVE_NVME_TCP,
        .address = argc > 2 ? argv[2] : "127.0.0.1:0",
        .exports = &export_,
        .export_count = 1,
    };
    tenmil_server server;
    char uri[256];

    if (disk == NULL)
        return 1;
    check("serve", tenmil_server_start(&options, &server));
    check("URI", tenmil_server_uri(server, 0, uri, sizeof uri));
    printf("serving %s\n", uri);
    fflush(stdout);
    if (argc > 3)
        sleep((unsigned)strtoul(argv[3], NULL, 10));
    else if (!is_nbd)
        use_as_host(uri);
    check("stop", tenmil_server_stop(server));
    free(disk);
    return 0;
}
