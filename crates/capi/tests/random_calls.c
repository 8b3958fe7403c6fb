/* Calls the functions in random order with random arguments: valid, closed and invented handles, memory inside
 * and outside of what is registered, queues of other threads. Every call must return; no result is expected.
 *
 *     random_calls [SEED [CALLS]]         default: the time, 20000
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <tenmil.h>

enum { CONTEXTS = 2, KEPT = 8, OWN = 256 * 1024, IOS = 16 };

static uint64_t state;
static tenmil_context contexts[CONTEXTS];
static tenmil_device devices[KEPT];
static tenmil_queue queues[KEPT];
static void *buffers[KEPT];
static char *own;
static uint64_t calls_ok, calls_refused, completions_found;

/* The upper bits: the lower ones of successive numbers depend on each other. */
static uint64_t draw(uint64_t end)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 20) % end;
}

static int count(int code)
{
    if (code < 0)
        calls_refused++;
    else
        calls_ok++;
    return code;
}

/* A handle that was made, or was once, or never. */
static uint64_t handle(uint64_t kept)
{
    switch (draw(16)) {
    case 0: return 0;
    case 1: return state;
    case 2: return kept ^ ((uint64_t)1 << draw(64));
    default: return kept;
    }
}

static void *address(void)
{
    switch (draw(24)) {
    case 0: return NULL;
    /* An address without memory; nothing accesses it, since it is not registered. */
    case 1: return (void *)(uintptr_t)state;
    case 2: case 3: case 4: return own + draw(OWN);
    case 5: return own;
    default: return buffers[draw(KEPT)];
    }
}

static const char *const uris[] = {
    "ram:1m", "ram:1m", "null:", "ram:64k?block=4k", "delay:[ram:1m]?read=100us", "emu:ram?size=1m",
    "fault:[ram:1m]?rule=error:any/3", "mirror:[ram:1m],[ram:1m]", "ram:", "", "x", "file:/",
};

static void submit(tenmil_queue queue)
{
    static tenmil_segment segments[IOS][4];
    tenmil_io ios[IOS];
    const uint32_t number = (uint32_t)draw(IOS + 1);

    memset(ios, 0, sizeof ios);
    for (uint32_t i = 0; i < number; i++) {
        /* Half of them are valid, if the buffer is. */
        if (draw(2) == 0) {
            ios[i] = (tenmil_io){.lba = draw(16), .blocks = 1, .data = buffers[draw(KEPT)],
                                 .operation = (uint8_t)draw(2)};
            continue;
        }
        ios[i].token = draw(4);
        ios[i].lba = draw(8) == 0 ? state : draw(2048);
        ios[i].source_lba = draw(2) == 0 ? 0 : draw(2048);
        ios[i].blocks = draw(64) == 0 ? (uint32_t)state : (uint32_t)draw(16);
        ios[i].operation = draw(8) == 0 ? (uint8_t)draw(12) : (uint8_t)draw(2);
        ios[i].flags = draw(32) == 0 ? (uint8_t)state : (uint8_t)draw(4);
        ios[i].data = ios[i].operation > TENMIL_OP_WRITE && draw(4) != 0 ? NULL : address();
        if (draw(16) == 0) {
            ios[i].segments = draw(16) == 0 ? NULL : segments[i];
            ios[i].segment_count = (uint16_t)draw(5);
            for (int piece = 0; piece < 4; piece++)
                segments[i][piece] = (tenmil_segment){address(), draw(8) == 0 ? state : 512 * draw(4)};
        }
    }
    count(tenmil_submit(queue, draw(64) == 0 ? NULL : ios, number));
}

static void poll_some(tenmil_queue queue)
{
    tenmil_completion completions[IOS];
    int found = count(tenmil_poll(queue, completions, (uint32_t)draw(IOS + 1)));

    if (found > 0)
        completions_found += (uint64_t)found;
}

static void *other_thread(void *argument)
{
    tenmil_queue queue = *(tenmil_queue *)argument;

    if (draw(4) == 0)
        count(tenmil_queue_attach(queue));
    submit(queue);
    poll_some(queue);
    if (draw(8) != 0)
        count(tenmil_queue_detach(queue));
    return NULL;
}

static void call(void)
{
    const size_t at = draw(KEPT), from = draw(KEPT);
    /* Mostly one context, so that its memory, devices and queues meet. */
    const size_t in = draw(8) == 0;
    const tenmil_context context = {handle(contexts[in].id)};
    const tenmil_device device = {handle(devices[from].id)};
    tenmil_queue queue = {handle(queues[from].id)};
    tenmil_context_options options = {draw(8) == 0 ? (uint32_t)draw(100) : sizeof options, 1 << 20};
    tenmil_device_info info = {.size = draw(4) == 0 ? (uint32_t)draw(sizeof info) : sizeof info};
    tenmil_event event = {.size = draw(4) == 0 ? (uint32_t)draw(sizeof event) : sizeof event};
    tenmil_device new_device;
    tenmil_queue new_queue;
    void *new_buffer;
    uint64_t timeout_ns;
    uint32_t number;
    char text[40];
    pthread_t thread;
    int fd;

    switch (draw(28)) {
    case 0:
        /* Rarely in place of one that lives. */
        if (draw(32) == 0 || tenmil_buffer_free(contexts[in], NULL) != TENMIL_OK)
            count(tenmil_context_create(draw(4) == 0 ? NULL : &options, &contexts[in]));
        break;
    case 1:
        if (draw(32) == 0)
            count(tenmil_context_destroy(context));
        break;
    case 2:
        if (draw(8) == 0
            && count(tenmil_open(context, uris[draw(sizeof uris / sizeof *uris)],
                                 (uint32_t)draw(4), &new_device)) == TENMIL_OK)
            devices[at] = new_device;
        break;
    case 3:
        if (draw(16) == 0)
            count(tenmil_close(device));
        break;
    case 4: count(tenmil_device_get_info(device, draw(16) == 0 ? NULL : &info)); break;
    case 5: count(tenmil_device_next_event(device, &event)); break;
    case 6: count(tenmil_device_event_fd(device, &fd)); break;
    case 7: count(tenmil_device_refresh(device)); break;
    case 8:
    case 9:
        if (draw(4) == 0
            && count(tenmil_queue_create(device, (uint32_t)draw(140), &new_queue)) == TENMIL_OK)
            queues[at] = new_queue;
        break;
    case 10:
        if (draw(4) == 0)
            count(tenmil_queue_destroy(queue));
        break;
    case 11: count(tenmil_queue_arm(queue, &timeout_ns)); break;
    case 12: count(tenmil_queue_event_fd(queue, &fd)); break;
    case 13: count(tenmil_queue_in_flight(queue, &number)); break;
    case 14: count(tenmil_queue_depth(queue, draw(16) == 0 ? NULL : &number)); break;
    case 15:
        if (draw(4) == 0)
            count(tenmil_queue_detach(queue));
        break;
    case 16: count(tenmil_queue_attach(queue)); break;
    case 17:
        if (count(tenmil_buffer_alloc(context, draw(16) == 0 ? state : draw(65536), &new_buffer))
            == TENMIL_OK)
            buffers[at] = new_buffer;
        break;
    case 18: count(tenmil_buffer_free(context, address())); break;
    /* Only memory that stays mapped may be registered: that is what cannot be checked. */
    case 19: count(tenmil_memory_register(context, own + draw(OWN / 2), draw(OWN / 2))); break;
    case 20: count(tenmil_memory_unregister(context, address())); break;
    case 21: tenmil_status_text((uint16_t)state, text, draw(sizeof text)); break;
    case 22: tenmil_error_name((int)state); break;
    case 23:
        if (pthread_create(&thread, NULL, other_thread, &queue) == 0)
            pthread_join(thread, NULL);
        break;
    case 24: case 25: submit(queue); break;
    default: poll_some(queue); break;
    }
}

int main(int argc, char **argv)
{
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    const uint64_t calls = argc > 2 ? strtoull(argv[2], NULL, 0) : 20000;

    state = seed | 1;
    own = aligned_alloc(4096, OWN);
    if (own == NULL)
        return 1;
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
    for (uint64_t i = 0; i < calls; i++)
        call();
    /* What is open stays open: the process ends with threads of devices running. */
    printf("%" PRIu64 " calls returned, %" PRIu64 " of them errors; %" PRIu64 " completions\n",
           calls_ok + calls_refused, calls_refused, completions_found);
    return calls_refused == 0 || completions_found == 0;
}
