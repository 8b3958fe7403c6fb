/* Runs the cases of conformance.json, which conformance_cases.h has as a table. */
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <tenmil.h>

/* A step of a case; what it does not have is NULL, zero or -1. */
struct step {
    const char *action, *memory, *flags, *expect, *kind, *uri, *text;
    int64_t fill, fill2, check, count, value;
    uint64_t lba, source;
    uint32_t blocks;
};

struct test_case {
    const char *name, *device;
    uint32_t depth;
    uint32_t flags;
    const struct step *steps;
    size_t step_count;
};

#include "conformance_cases.h"

enum { MEMORY = 64 * 1024, BLOCK = 512 };

static const char *name, *directory;
static char file[256];
static tenmil_context context;
static tenmil_device device;
static tenmil_queue queue;
static char *buffer, *registered, *foreign;

static _Noreturn void fail(const struct step *step, const char *what)
{
    fprintf(stderr, "conformance: %s: %s: %s: %s\n", name, step ? step->action : "start", what,
            tenmil_last_error());
    exit(1);
}

static int is(const char *text, const char *expected)
{
    return text != NULL && strcmp(text, expected) == 0;
}

static char *memory_of(const struct step *step)
{
    if (step->memory == NULL || is(step->memory, "buffer") || is(step->memory, "freed"))
        return buffer;
    if (is(step->memory, "registered"))
        return registered;
    return is(step->memory, "foreign") ? foreign : NULL;
}

static tenmil_io read_io(void)
{
    return (tenmil_io){.blocks = 1, .data = buffer, .operation = TENMIL_OP_READ};
}

/* Polls for one completion, 20 seconds at most. */
static tenmil_completion wait_one(const struct step *step)
{
    tenmil_completion done;
    const time_t until = time(NULL) + 20;

    for (;;) {
        int found = tenmil_poll(queue, &done, 1);

        if (found == 1)
            return done;
        if (found < 0)
            fail(step, "poll");
        if (time(NULL) > until)
            fail(step, "no completion in 20 s");
    }
}

/* What another thread does: its action, and the result of its call. */
struct elsewhere {
    const struct step *step;
    int code;
};

static void *run_elsewhere(void *argument)
{
    struct elsewhere *other = argument;
    tenmil_io io = read_io();
    tenmil_completion done;

    if (is(other->step->action, "submit-elsewhere")) {
        other->code = tenmil_submit(queue, &io, 1);
    } else if (is(other->step->action, "poll-elsewhere")) {
        other->code = tenmil_poll(queue, &done, 1);
    } else if (is(other->step->action, "destroy-elsewhere")) {
        other->code = tenmil_queue_destroy(queue);
    } else {
        if (tenmil_queue_attach(queue) != TENMIL_OK || tenmil_submit(queue, &io, 1) != 1
            || wait_one(other->step).status != 0)
            fail(other->step, "another thread reads");
        other->code = tenmil_queue_detach(queue);
    }
    return NULL;
}

static int elsewhere(const struct step *step)
{
    struct elsewhere other = {step, 0};
    pthread_t thread;

    if (pthread_create(&thread, NULL, run_elsewhere, &other) != 0
        || pthread_join(thread, NULL) != 0)
        fail(step, "thread");
    return other.code;
}

static int submit_many(const struct step *step, int are_equal)
{
    tenmil_io ios[16];

    for (uint64_t i = 0; i < 16; i++) {
        ios[i] = read_io();
        ios[i].token = are_equal ? 7 : i;
    }
    if (tenmil_submit(queue, ios, 16) != step->count)
        fail(step, "another number was accepted");
    return TENMIL_OK;
}

static int drain(const struct step *step)
{
    int64_t count = 0;
    uint32_t in_flight;

    while (tenmil_queue_in_flight(queue, &in_flight) == TENMIL_OK && in_flight > 0) {
        if (wait_one(step).status != 0)
            fail(step, "a read has failed");
        count++;
    }
    if (count != step->count)
        fail(step, "another number has completed");
    return TENMIL_OK;
}

static int check_event(const struct step *step)
{
    tenmil_event event = {.size = sizeof event};
    int found = tenmil_device_next_event(device, &event);
    uint32_t expected = is(step->kind, "resized") ? TENMIL_EVENT_RESIZED : 0;

    if (found != (expected != 0) || event.kind != expected || event.size != sizeof event
        || (expected != 0 && event.value != (uint64_t)step->value))
        fail(step, "another event");
    return TENMIL_OK;
}

static int sleep_until_read_completes(const struct step *step)
{
    struct pollfd fd = {.events = POLLIN};
    uint64_t timeout_ns;

    if (tenmil_queue_event_fd(queue, &fd.fd) != TENMIL_OK || fd.fd < 0)
        fail(step, "no descriptor");
    for (int i = 0; i < 100; i++) {
        tenmil_io io = read_io();
        tenmil_completion done;
        int found;

        if (tenmil_submit(queue, &io, 1) != 1)
            fail(step, "submit");
        while ((found = tenmil_poll(queue, &done, 1)) == 0)
            if (tenmil_queue_arm(queue, &timeout_ns) == 1 && poll(&fd, 1, 10000) != 1)
                fail(step, "a completion does not wake the thread");
        if (found != 1)
            fail(step, "poll");
    }
    if (tenmil_queue_arm(queue, &timeout_ns) != 1 || timeout_ns != UINT64_MAX)
        fail(step, "nothing is in flight, and the thread may not sleep");
    return TENMIL_OK;
}

static int grow_file(const struct step *step)
{
    if (truncate(file, step->value) != 0)
        fail(step, file);
    return tenmil_device_refresh(device);
}

static int open_another(const struct step *step)
{
    tenmil_device other;
    int code = tenmil_open(context, step->uri, 0, &other);

    return code == TENMIL_OK ? tenmil_close(other) : code;
}

static int start_read(const struct step *step)
{
    tenmil_io io = read_io();
    int taken;

    io.data = memory_of(step);
    taken = tenmil_submit(queue, &io, 1);
    return taken == 1 ? TENMIL_OK : taken;
}

static const char *class_name(uint16_t status_class)
{
    static const char *const names[] = {"success", "invalid", "medium", "compare", "conflict",
                                        "path",    "retry",   "aborted", "other"};

    return names[status_class < 8 ? status_class : 8];
}

static uint8_t flags_of(const struct step *step)
{
    if (is(step->flags, "fua"))
        return TENMIL_IO_FUA;
    if (is(step->flags, "deallocate"))
        return TENMIL_IO_DEALLOCATE;
    return is(step->flags, "unknown") ? 0x80 : 0;
}

static void check_bytes(const struct step *step, const char *at, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if ((uint8_t)at[i] != step->check)
            fail(step, "other bytes");
}

/* Number of an operation, or -1; how many times its memory holds its blocks. */
static int operation_of(const char *action, size_t *copies)
{
    static const struct {
        const char *action;
        int operation;
        size_t copies;
    } operations[] = {
        {"read", TENMIL_OP_READ, 1},
        {"write", TENMIL_OP_WRITE, 1},
        {"flush", TENMIL_OP_FLUSH, 0},
        {"deallocate", TENMIL_OP_DEALLOCATE, 0},
        {"write-zeroes", TENMIL_OP_WRITE_ZEROES, 0},
        {"compare", TENMIL_OP_COMPARE, 1},
        {"write-uncorrectable", TENMIL_OP_WRITE_UNCORRECTABLE, 0},
        {"verify", TENMIL_OP_VERIFY, 0},
        {"copy", TENMIL_OP_COPY, 0},
        {"compare-and-write", TENMIL_OP_COMPARE_AND_WRITE, 2},
        {"operation-77", 77, 1},
    };

    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (is(action, operations[i].action)) {
            *copies = operations[i].copies;
            return operations[i].operation;
        }
    return -1;
}

/* Submits an operation of the device and waits for it. Returns an error code, or zero and the class. */
static int run_io(const struct step *step, uint8_t operation, size_t copies, const char **found)
{
    const size_t len = (size_t)step->blocks * BLOCK * copies;
    /* Two pieces: the first three blocks of the buffer, and the rest in registered memory. */
    const size_t head = len < 3 * BLOCK ? len : 3 * BLOCK;
    const tenmil_segment segments[2] = {{buffer, head}, {registered, len - head}};
    tenmil_io io = {
        .token = 4711,
        .lba = step->lba,
        .source_lba = step->source,
        .blocks = step->blocks,
        .operation = operation,
        .flags = flags_of(step),
    };
    const int fill = step->fill < 0 ? 0xee : (int)step->fill;
    tenmil_completion done;
    int taken;

    if (!is(step->memory, "freed"))
        memset(buffer, fill, MEMORY);
    memset(registered, fill, MEMORY);
    if (is(step->memory, "segments")) {
        io.segments = segments;
        io.segment_count = 2;
    } else if (copies > 0 || is(step->memory, "foreign")) {
        io.data = memory_of(step);
        if (copies == 2)
            memset((char *)io.data + len / 2, (int)step->fill2, len / 2);
    }
    taken = tenmil_submit(queue, &io, 1);
    if (taken != 1)
        return taken < 0 ? taken : 1;
    done = wait_one(step);
    if (done.token != 4711)
        fail(step, "another token");
    if (step->check >= 0 && io.segment_count == 2) {
        check_bytes(step, buffer, head);
        check_bytes(step, registered, len - head);
    } else if (step->check >= 0) {
        check_bytes(step, io.data, len);
    }
    *found = class_name(done.status_class);
    return TENMIL_OK;
}

static int run_action(const struct step *step, const char **found)
{
    tenmil_completion done;
    size_t copies;
    int operation = operation_of(step->action, &copies);

    if (operation >= 0)
        return run_io(step, (uint8_t)operation, copies, found);
    if (is(step->action, "fill-queue") || is(step->action, "equal-tokens"))
        return submit_many(step, is(step->action, "equal-tokens"));
    if (is(step->action, "drain-queue"))
        return drain(step);
    if (strstr(step->action, "-elsewhere") != NULL)
        return elsewhere(step);
    if (is(step->action, "poll"))
        return tenmil_poll(queue, &done, 1);
    if (is(step->action, "detach"))
        return tenmil_queue_detach(queue);
    if (is(step->action, "attach"))
        return tenmil_queue_attach(queue);
    if (is(step->action, "destroy-queue"))
        return tenmil_queue_destroy(queue);
    if (is(step->action, "close-device"))
        return tenmil_close(device);
    if (is(step->action, "destroy-context"))
        return tenmil_context_destroy(context);
    if (is(step->action, "free-buffer"))
        return tenmil_buffer_free(context, buffer);
    if (is(step->action, "unregister"))
        return tenmil_memory_unregister(context, registered);
    if (is(step->action, "start-read"))
        return start_read(step);
    if (is(step->action, "sleep-until-read-completes"))
        return sleep_until_read_completes(step);
    if (is(step->action, "grow-file"))
        return grow_file(step);
    if (is(step->action, "event"))
        return check_event(step);
    if (is(step->action, "open"))
        return open_another(step);
    fail(step, "unknown action");
}

static void run_step(const struct step *step)
{
    const char *expected = step->expect == NULL ? "success" : step->expect;
    const char *class_found = "success";
    const int code = run_action(step, &class_found);
    char found[64];

    if (code < 0)
        snprintf(found, sizeof found, "refused %s", tenmil_error_name(code));
    else
        snprintf(found, sizeof found, "%s", class_found);
    if (!is(found, expected) && !(is(expected, "refused any") && code < 0))
        fail(step, found);
    if (step->text != NULL && strstr(tenmil_last_error(), step->text) == NULL)
        fail(step, "another text");
}

static void run_case(const struct test_case *test)
{
    const tenmil_context_options options = {.size = sizeof options, .buffer_bytes = 1 << 20};
    char uri[512];
    const char *temp = strstr(test->device, "TEMP");
    void *allocated;

    name = test->name;
    snprintf(file, sizeof file, "%s/disk", directory);
    FILE *new_file = fopen(file, "w");
    if (new_file == NULL || fclose(new_file) != 0 || truncate(file, 1 << 20) != 0)
        fail(NULL, file);
    if (temp == NULL)
        snprintf(uri, sizeof uri, "%s", test->device);
    else
        snprintf(uri, sizeof uri, "%.*s%s%s", (int)(temp - test->device), test->device, file,
                 temp + 4);

    registered = malloc(MEMORY);
    foreign = malloc(MEMORY);
    if (registered == NULL || foreign == NULL)
        fail(NULL, "memory");
    if (tenmil_context_create(&options, &context) != TENMIL_OK
        || tenmil_open(context, uri, test->flags, &device) != TENMIL_OK
        || tenmil_queue_create(device, test->depth == 0 ? 8 : test->depth, &queue) != TENMIL_OK
        || tenmil_buffer_alloc(context, MEMORY, &allocated) != TENMIL_OK
        || tenmil_memory_register(context, registered, MEMORY) != TENMIL_OK)
        fail(NULL, uri);
    buffer = allocated;
    for (size_t i = 0; i < test->step_count; i++)
        run_step(&test->steps[i]);
    /* What a step has closed is closed already. */
    tenmil_queue_destroy(queue);
    tenmil_close(device);
    if (tenmil_context_destroy(context) != TENMIL_OK)
        fail(NULL, "destroy the context");
    free(registered);
    free(foreign);
    unlink(file);
}

int main(int argc, char **argv)
{
    const size_t count = sizeof cases / sizeof *cases;

    if (argc != 2) {
        fprintf(stderr, "usage: conformance DIRECTORY\n");
        return 2;
    }
    directory = argv[1];
    for (size_t i = 0; i < count; i++)
        run_case(&cases[i]);
    printf("%zu cases of conformance passed\n", count);
    return 0;
}
