/* Reads blocks one after the other, and sleeps while there is nothing to do.
 *
 *     3_sleep [URI [COUNT]]         default: 1000 blocks of emu:ram
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <tenmil.h>

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

/* Waits until the queue may have a completion, or the device an event. */
static int wait_for(tenmil_queue queue, struct pollfd fds[2])
{
    uint64_t timeout_ns;
    int may_sleep = tenmil_queue_arm(queue, &timeout_ns);

    check("arm", may_sleep);
    if (may_sleep == 0)
        return 0;
    /* Rounded up, so that the thread does not spin for the last millisecond. */
    int timeout_ms = timeout_ns / 1000000 >= 60000 ? 60000 : (int)(timeout_ns / 1000000) + 1;
    if (poll(fds, 2, timeout_ms) < 0 && errno != EINTR) {
        perror("poll");
        exit(1);
    }
    return 1;
}

int main(int argc, char **argv)
{
    const char *uri = argc > 1 ? argv[1] : "emu:ram";
    const long count = argc > 2 ? strtol(argv[2], NULL, 10) : 1000;
    tenmil_context context;
    tenmil_device device;
    tenmil_queue queue;
    tenmil_device_info info = {.size = sizeof info};
    struct pollfd fds[2] = {{.events = POLLIN}, {.events = POLLIN}};
    long sleeps = 0;
    void *buffer;

    check("start", tenmil_context_create(NULL, &context));
    check("open", tenmil_open(context, uri, TENMIL_OPEN_READ_ONLY, &device));
    check("describe", tenmil_device_get_info(device, &info));
    check("create a queue", tenmil_queue_create(device, 1, &queue));
    check("allocate", tenmil_buffer_alloc(context, info.block_size, &buffer));
    check("descriptor", tenmil_queue_event_fd(queue, &fds[0].fd));
    check("descriptor", tenmil_device_event_fd(device, &fds[1].fd));

    for (long i = 0; i < count; i++) {
        tenmil_io io = {
            .lba = (uint64_t)i % info.block_count,
            .blocks = 1,
            .data = buffer,
            .operation = TENMIL_OP_READ,
        };
        tenmil_completion done;
        tenmil_event event = {.size = sizeof event};
        int found;

        check("submit", tenmil_submit(queue, &io, 1));
        while ((found = tenmil_poll(queue, &done, 1)) == 0) {
            sleeps += wait_for(queue, fds);
            while ((found = tenmil_device_next_event(device, &event)) == 1)
                printf("event %u\n", event.kind);
            check("event", found);
        }
        check("poll", found);
        if (done.status_class != TENMIL_STATUS_CLASS_SUCCESS) {
            char text[80];

            tenmil_status_text(done.status, text, sizeof text);
            fprintf(stderr, "block %ld: %s\n", i, text);
            return 1;
        }
    }
    printf("%ld reads of %s, %s\n", count, uri, sleeps > 0 ? "some of them asleep" : "none asleep");

    check("free", tenmil_buffer_free(context, buffer));
    check("destroy the queue", tenmil_queue_destroy(queue));
    check("close", tenmil_close(device));
    check("end", tenmil_context_destroy(context));
    return 0;
}
