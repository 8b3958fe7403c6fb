/* I/O engine of fio: jobs run on any device URI of tenmil.
 *
 *     queue       add the I/O to the batch
 *     commit      submit the batch                     ─┐
 *     getevents   submit what is left of it, poll       ├─ one tenmil_queue of the job
 *     event       completion ─> io_u, errno            ─┘
 *
 * A job opens its device when it starts, in its own process or thread. The size is read before by a process that
 * ends at once, because the library does not work in a process that was forked after it was used. Jobs that are
 * threads share the device of a URI.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tenmil.h>

#include "fio.h"
#include "optgroup.h"

/* Options of a job. */
struct job_options {
    void *pad; /* fio takes an option at offset 0 for none. */
    char *uri;
    unsigned int bypass;
    unsigned int sleep;
};

/* A device, which all jobs that are threads share. */
struct open_device {
    struct open_device *next;
    char *uri;
    uint32_t flags;
    unsigned int users;
    tenmil_context context;
    tenmil_device device;
    tenmil_device_info info;
};

/* State of a job. */
struct job {
    struct open_device *open;
    tenmil_queue queue;
    uint32_t block_shift;
    /* I/Os that are not submitted yet. */
    tenmil_io *batch;
    unsigned int batch_count;
    /* Completions of the last getevents, and those of I/Os that the library has refused. */
    tenmil_completion *completions;
    tenmil_completion *refused;
    unsigned int refused_count;
    /* Memory of the buffers if it is registered. */
    size_t registered;
};

static struct fio_option options[] = {
    {
        .name = "uri",
        .lname = "Device URI",
        .type = FIO_OPT_STR_STORE,
        .off1 = offsetof(struct job_options, uri),
        .help = "Device of the job, such as emu:null or tcp://HOST:PORT/NQN?ns=1; else `filename` is its URI",
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = "bypass",
        .lname = "Without the block layer",
        .type = FIO_OPT_BOOL,
        .off1 = offsetof(struct job_options, bypass),
        .help = "Use the queue of the driver: faster, but nothing is split or emulated",
        .def = "0",
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = "sleep",
        .lname = "Sleep while waiting",
        .type = FIO_OPT_BOOL,
        .off1 = offsetof(struct job_options, sleep),
        .help = "Wait for completions asleep, where the device has a descriptor for it, instead of polling",
        .def = "0",
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {.name = NULL},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct open_device *devices;

/* Turns of a wait without completions before it looks at the clock or sleeps. */
enum { CONTEXT_BYTES_MIN = 64 << 20, ALIGN = 2 << 20, BUSY_TURNS = 1024 };

static int fail(struct thread_data *td, const char *what)
{
    const char *hint = tenmil_last_hint();

    log_err("tenmil: %s: %s%s%s\n", what, tenmil_last_error(), *hint ? "\n  hint: " : "", hint);
    td_verror(td, EIO, what);
    return 1;
}

static int fail_memory(struct thread_data *td)
{
    td_verror(td, ENOMEM, "tenmil: allocate memory of the job");
    return 1;
}

/* The URI of a job, or NULL. */
static const char *uri_of(struct thread_data *td)
{
    const struct job_options *o = td->eo;

    if (o->uri && *o->uri)
        return o->uri;
    if (td->o.filename && td->o.nr_files <= 1 && td->files_index == 1)
        return td->files[0]->file_name;
    log_err("tenmil: the job `%s` has %s, expected the option `uri`, or one `filename` whose colons are "
            "written \\:\n",
            td->o.name, td->o.filename ? "several files" : "no device");
    td_verror(td, EINVAL, "tenmil: device URI");
    return NULL;
}

static uint32_t flags_of(struct thread_data *td)
{
    const struct job_options *o = td->eo;

    if (o->bypass)
        return TENMIL_OPEN_DIRECT;
    return td_write(td) || td_trim(td) ? 0 : TENMIL_OPEN_READ_ONLY;
}

/* Bytes of the buffers of a job, at most: fio aligns them. */
static uint64_t buffer_bytes(struct thread_data *td)
{
    return td_max_bs(td) * td->o.iodepth + td->o.mem_align + ALIGN;
}

static int open_device(struct thread_data *td, struct open_device *open)
{
    const uint64_t wanted = buffer_bytes(td);
    const tenmil_context_options context_options = {
        .size = sizeof context_options,
        .buffer_bytes = wanted > CONTEXT_BYTES_MIN && wanted < UINT32_MAX
            ? (uint32_t)wanted : CONTEXT_BYTES_MIN,
    };

    open->info.size = sizeof open->info;
    if (tenmil_context_create(&context_options, &open->context) != TENMIL_OK)
        return fail(td, "start");
    if (tenmil_open(open->context, open->uri, open->flags, &open->device) != TENMIL_OK) {
        fail(td, "open the device");
        tenmil_context_destroy(open->context);
        return 1;
    }
    if (tenmil_device_get_info(open->device, &open->info) != TENMIL_OK)
        return fail(td, "describe the device");
    return 0;
}

static void close_device(struct open_device *open)
{
    if (tenmil_close(open->device) != TENMIL_OK
        || tenmil_context_destroy(open->context) != TENMIL_OK)
        log_err("tenmil: close the device: %s\n", tenmil_last_error());
}

static void free_device(struct open_device *open)
{
    if (open)
        free(open->uri);
    free(open);
}

/* A device that is open for the first of its users. NULL is an error. */
static struct open_device *new_device(struct thread_data *td, const char *uri)
{
    struct open_device *new = calloc(1, sizeof *new);

    if (!new || !(new->uri = strdup(uri))) {
        fail_memory(td);
        free_device(new);
        return NULL;
    }
    new->flags = flags_of(td);
    if (open_device(td, new) != 0) {
        free_device(new);
        return NULL;
    }
    return new;
}

/* Opens the device of the job, or returns the one that another job has opened. NULL is an error. */
static struct open_device *acquire_device(struct thread_data *td, const char *uri)
{
    const uint32_t flags = flags_of(td);
    struct open_device *found;

    pthread_mutex_lock(&lock);
    for (found = devices; found; found = found->next)
        if (found->flags == flags && strcmp(found->uri, uri) == 0)
            break;
    if (!found && (found = new_device(td, uri))) {
        found->next = devices;
        devices = found;
    }
    if (found)
        found->users++;
    pthread_mutex_unlock(&lock);
    return found;
}

static void release_device(struct open_device *open)
{
    struct open_device **link = &devices;

    pthread_mutex_lock(&lock);
    if (--open->users == 0) {
        while (*link != open)
            link = &(*link)->next;
        *link = open->next;
        close_device(open);
        free_device(open);
    }
    pthread_mutex_unlock(&lock);
}

/* Bytes of the device, read by another process. Zero is an error. */
static uint64_t size_elsewhere(struct thread_data *td, const char *uri)
{
    uint64_t bytes = 0;
    int ends[2], state;
    pid_t child;

    if (pipe(ends) != 0 || (child = fork()) < 0) {
        td_verror(td, errno, "tenmil: start a process that reads the size");
        return 0;
    }
    if (child == 0) {
        struct open_device open = {.uri = (char *)uri, .flags = flags_of(td)};

        if (open_device(td, &open) == 0) {
            bytes = open.info.block_count * open.info.block_size;
            close_device(&open);
        }
        _exit(write(ends[1], &bytes, sizeof bytes) != sizeof bytes);
    }
    close(ends[1]);
    if (read(ends[0], &bytes, sizeof bytes) != sizeof bytes)
        bytes = 0;
    close(ends[0]);
    waitpid(child, &state, 0);
    if (bytes == 0)
        td_verror(td, EIO, "tenmil: open the device");
    return bytes;
}

/* Called once for each job, before it starts; for jobs that are processes, in their parent. */
static int engine_setup(struct thread_data *td)
{
    const char *uri = uri_of(td);
    struct job *job;
    uint64_t bytes;

    if (!uri)
        return 1;
    if (!td->o.use_thread && devices) {
        log_err("tenmil: the job `%s` is a process beside jobs that are threads, expected `thread` for all "
                "jobs or for none\n", td->o.name);
        td_verror(td, EINVAL, "tenmil: option thread");
        return 1;
    }
    job = calloc(1, sizeof *job);
    if (!job)
        return fail_memory(td);
    td->io_ops_data = job;
    if (td->o.use_thread) {
        job->open = acquire_device(td, uri);
        if (!job->open)
            return 1;
        bytes = job->open->info.block_count * job->open->info.block_size;
    } else {
        bytes = size_elsewhere(td, uri);
        if (bytes == 0)
            return 1;
    }
    if (!td->files_index) {
        add_file(td, "tenmil", 0, 0);
        td->o.nr_files = td->o.nr_files ?: 1;
        td->o.open_files++;
    }
    td->files[0]->filetype = FIO_TYPE_BLOCK;
    td->files[0]->real_file_size = bytes;
    fio_file_set_size_known(td->files[0]);
    return 0;
}

/* Called by the process or thread of the job. */
static int engine_init(struct thread_data *td)
{
    struct job *job = td->io_ops_data;
    const unsigned int depth = td->o.iodepth;
    const char *uri = uri_of(td);
    unsigned int in_flight;

    if (!uri)
        return 1;
    if (!job->open)
        job->open = acquire_device(td, uri);
    if (!job->open)
        return 1;
    job->block_shift = (uint32_t)__builtin_ctz(job->open->info.block_size);
    /* What the device does not accept waits in the batch. */
    in_flight = depth < job->open->info.depth_max ? depth : job->open->info.depth_max;
    if (tenmil_queue_create(job->open->device, in_flight, &job->queue) != TENMIL_OK)
        return fail(td, "create a queue");
    job->batch = calloc(depth, sizeof *job->batch);
    job->completions = calloc(depth, sizeof *job->completions);
    job->refused = calloc(depth, sizeof *job->refused);
    if (!job->batch || !job->completions || !job->refused)
        return fail_memory(td);
    return 0;
}

static void engine_cleanup(struct thread_data *td)
{
    struct job *job = td->io_ops_data;

    if (!job)
        return;
    if (job->queue.id)
        tenmil_queue_destroy(job->queue);
    if (job->open)
        release_device(job->open);
    free(job->batch);
    free(job->completions);
    free(job->refused);
    free(job);
    td->io_ops_data = NULL;
}

/* Allocates the memory of all buffers: of the library, or registered if it has less. */
static int engine_iomem_alloc(struct thread_data *td, size_t bytes)
{
    struct job *job = td->io_ops_data;
    void *memory;

    if (tenmil_buffer_alloc(job->open->context, bytes, &memory) == TENMIL_OK) {
        td->orig_buffer = memory;
        return 0;
    }
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return fail_memory(td);
    if (tenmil_memory_register(job->open->context, memory, bytes) != TENMIL_OK) {
        munmap(memory, bytes);
        return fail(td, "register the buffers");
    }
    job->registered = bytes;
    td->orig_buffer = memory;
    return 0;
}

static void engine_iomem_free(struct thread_data *td)
{
    struct job *job = td->io_ops_data;
    const tenmil_context context = job->open->context;
    void *memory = td->orig_buffer;
    int code;

    /* I/Os that are still in flight end with the queue. */
    tenmil_queue_destroy(job->queue);
    job->queue.id = 0;
    code = job->registered ? tenmil_memory_unregister(context, memory)
                           : tenmil_buffer_free(context, memory);
    if (code != TENMIL_OK)
        log_err("tenmil: free the buffers: %s\n", tenmil_last_error());
    else if (job->registered)
        munmap(memory, job->registered);
    td->orig_buffer = NULL;
}

static enum fio_q_status engine_queue_io(struct thread_data *td, struct io_u *io_u)
{
    struct job *job = td->io_ops_data;
    const uint64_t inside = (1ull << job->block_shift) - 1;
    tenmil_io *io = &job->batch[job->batch_count];

    fio_ro_check(td, io_u);
    *io = (tenmil_io){.token = (uintptr_t)io_u};
    switch (io_u->ddir) {
    case DDIR_READ:
        io->operation = TENMIL_OP_READ;
        io->data = io_u->xfer_buf;
        break;
    case DDIR_WRITE:
        io->operation = TENMIL_OP_WRITE;
        io->data = io_u->xfer_buf;
        break;
    case DDIR_TRIM:
        io->operation = TENMIL_OP_DEALLOCATE;
        break;
    case DDIR_SYNC:
    case DDIR_DATASYNC:
        io->operation = TENMIL_OP_FLUSH;
        job->batch_count++;
        return FIO_Q_QUEUED;
    default:
        io_u->error = EOPNOTSUPP;
        return FIO_Q_COMPLETED;
    }
    if ((io_u->offset | io_u->xfer_buflen) & inside) {
        io_u->error = EINVAL;
        return FIO_Q_COMPLETED;
    }
    io->lba = io_u->offset >> job->block_shift;
    io->blocks = (uint32_t)(io_u->xfer_buflen >> job->block_shift);
    job->batch_count++;
    return FIO_Q_QUEUED;
}

/* Completes an I/O that the library refuses. */
static void refuse_io(struct job *job, const tenmil_io *io)
{
    log_err("tenmil: %s\n", tenmil_last_error());
    job->refused[job->refused_count++] =
        (tenmil_completion){.token = io->token, .status_class = TENMIL_STATUS_CLASS_INVALID};
}

/* Submits as much of the batch as the device accepts. */
static void submit_batch(struct thread_data *td, struct job *job)
{
    const int has_time = fio_fill_issue_time(td);
    struct timespec now;
    unsigned int first = 0;

    if (has_time)
        fio_gettime(&now, NULL);
    while (first < job->batch_count) {
        const unsigned int rest = job->batch_count - first;
        const int taken = tenmil_submit(job->queue, job->batch + first, rest);

        if (taken == 0)
            break;
        if (taken < 0) {
            refuse_io(job, &job->batch[first++]);
            continue;
        }
        io_u_mark_submit(td, (unsigned int)taken);
        for (int i = 0; has_time && i < taken; i++) {
            struct io_u *io_u = (struct io_u *)(uintptr_t)job->batch[first + i].token;

            io_u->issue_time = now;
            io_u_queued(td, io_u);
        }
        first += (unsigned int)taken;
    }
    job->batch_count -= first;
    if (job->batch_count > 0)
        memmove(job->batch, job->batch + first, job->batch_count * sizeof *job->batch);
    if (has_time && td->o.read_iolog_file)
        td->last_issue = now;
}

static int engine_commit(struct thread_data *td)
{
    submit_batch(td, td->io_ops_data);
    return 0;
}

/* Sleeps until a completion may be available, for `left_ns` at most. */
static void sleep_for_completion(struct job *job, uint64_t left_ns)
{
    struct pollfd wait = {.events = POLLIN};
    uint64_t ns;

    if (tenmil_queue_event_fd(job->queue, &wait.fd) != TENMIL_OK
        || tenmil_queue_arm(job->queue, &ns) != 1)
        return;
    if (ns > left_ns)
        ns = left_ns;
    /* Without a descriptor the device names a time. A failed wait is a wait that ends early. */
    poll(&wait, wait.fd >= 0, ns / 1000000 < INT_MAX ? (int)(ns / 1000000) : -1);
}

static int engine_getevents(struct thread_data *td, unsigned int min, unsigned int max,
                            const struct timespec *timeout)
{
    struct job *job = td->io_ops_data;
    const struct job_options *o = td->eo;
    const uint64_t limit_ns = timeout ? timeout->tv_sec * 1000000000ull + timeout->tv_nsec : UINT64_MAX;
    unsigned int count = 0, turns = 0;
    struct timespec start;

    if (timeout)
        fio_gettime(&start, NULL);
    for (;;) {
        uint64_t left_ns = UINT64_MAX;
        int found;

        while (job->refused_count > 0 && count < max)
            job->completions[count++] = job->refused[--job->refused_count];
        found = tenmil_poll(job->queue, job->completions + count, max - count);
        if (found < 0) {
            log_err("tenmil: poll: %s\n", tenmil_last_error());
            return -EIO;
        }
        count += (unsigned int)found;
        if (count >= min)
            return (int)count;
        if (job->batch_count > 0)
            submit_batch(td, job);
        if (found > 0 || ++turns % BUSY_TURNS != 0)
            continue;
        if (timeout) {
            const uint64_t passed_ns = ntime_since_now(&start);

            if (passed_ns >= limit_ns)
                return (int)count;
            left_ns = limit_ns - passed_ns;
        }
        if (o->sleep)
            sleep_for_completion(job, left_ns);
    }
}

/* The error number that Linux has for a status of this class. */
static unsigned int error_of(uint16_t status_class)
{
    switch (status_class) {
    case TENMIL_STATUS_CLASS_INVALID:
        return EINVAL;
    case TENMIL_STATUS_CLASS_MEDIUM:
        return ENODATA;
    case TENMIL_STATUS_CLASS_COMPARE:
        return EILSEQ;
    case TENMIL_STATUS_CLASS_CONFLICT:
        return EBADE;
    case TENMIL_STATUS_CLASS_PATH:
        return ENOLINK;
    case TENMIL_STATUS_CLASS_RETRY:
        return EAGAIN;
    case TENMIL_STATUS_CLASS_ABORTED:
        return ECANCELED;
    default:
        return EIO;
    }
}

static struct io_u *engine_event(struct thread_data *td, int event)
{
    struct job *job = td->io_ops_data;
    const tenmil_completion *done = &job->completions[event];
    struct io_u *io_u = (struct io_u *)(uintptr_t)done->token;

    if (done->status_class != TENMIL_STATUS_CLASS_SUCCESS) {
        io_u->error = error_of(done->status_class);
        io_u->engine_data = (void *)(uintptr_t)done->status;
    }
    return io_u;
}

/* Text of a failed I/O; fio frees it. */
static char *engine_errdetails(struct io_u *io_u)
{
    enum { TEXT = 256 };
    char *text = malloc(TEXT);
    size_t len;

    if (text) {
        len = (size_t)snprintf(text, TEXT, "tenmil: ");
        tenmil_status_text((uint16_t)(uintptr_t)io_u->engine_data, text + len, TEXT - len);
    }
    return text;
}

/* The device is open as long as the job is. */
static int engine_open_file(struct thread_data *td, struct fio_file *file)
{
    return 0;
}

static int engine_close_file(struct thread_data *td, struct fio_file *file)
{
    return 0;
}

static int engine_invalidate(struct thread_data *td, struct fio_file *file)
{
    return 0;
}

/* What fio finds when it loads the engine. */
struct ioengine_ops ioengine = {
    .name = "tenmil",
    .version = FIO_IOOPS_VERSION,
    .flags = FIO_DISKLESSIO | FIO_NOEXTEND | FIO_NO_OFFLOAD | FIO_ASYNCIO_SETS_ISSUE_TIME,
    .setup = engine_setup,
    .init = engine_init,
    .queue = engine_queue_io,
    .commit = engine_commit,
    .getevents = engine_getevents,
    .event = engine_event,
    .errdetails = engine_errdetails,
    .cleanup = engine_cleanup,
    .open_file = engine_open_file,
    .close_file = engine_close_file,
    .invalidate = engine_invalidate,
    .iomem_alloc = engine_iomem_alloc,
    .iomem_free = engine_iomem_free,
    .options = options,
    .option_struct_size = sizeof(struct job_options),
};
