//! The C library: `libtenmil.so`, `libtenmil.a` and `tenmil.h`.
//!
//! ```text
//!   tenmil_context ─┬─ tenmil_device ─┬─ tenmil_queue    an I/O channel, polled by the thread that owns it
//!                   │                 └─ events
//!                   └─ memory: buffers of the library, memory of the program that is registered
//!   tenmil_server ──── a Runtime of its own ── devices by URI, devices of the program (a table of functions)
//! ```
//!
//! The public functions and types are those of the header, which `cargo xtask c-library` makes from this
//! crate. Handles are numbers, checked by each function, so that a closed or invented handle is an error
//! code. A queue is found by its number and the thread that owns it, without a lock.
//!
//! # Unsafe
//!
//! The C program is trusted for what no library can check: that a pointer refers to as much memory as the
//! function expects, and that registered memory stays mapped. Everything else that it passes is checked.
//! The rest of this crate relies on:
//!
//! - Pointers of the program are accessed only during the call, except registered memory
//!   (`program_memory`), which the region table accesses until it is unregistered.
//! - The contents of a queue are accessed by the thread that owns it only, by one call at a time
//!   (`queue_table`).
//! - Functions of a served device are called as `DeviceFunctions` describes, and only until the server has been
//!   stopped (`program_device`).
//! - A panic ends at the boundary as the error code `TENMIL_ERROR_INTERNAL` (`failure`).

mod c_string;
mod context;
mod device;
mod failure;
mod handles;
mod io;
mod program_device;
mod program_memory;
mod queue;
mod queue_functions;
mod queue_table;
mod server;
mod slot_table;
mod status;

pub use c_string::tenmil_version;
pub use context::{
    ContextHandle, ContextOptions, tenmil_buffer_alloc, tenmil_buffer_free, tenmil_context_create,
    tenmil_context_destroy, tenmil_memory_register, tenmil_memory_unregister,
};
pub use device::{
    DeviceEvent, DeviceHandle, DeviceInfo, TENMIL_DURABILITY_NONE, TENMIL_DURABILITY_PERSISTENT,
    TENMIL_DURABILITY_VOLATILE_CACHE, TENMIL_EVENT_MEDIUM_CHANGED, TENMIL_EVENT_MEDIUM_ERROR,
    TENMIL_EVENT_OVERFLOWED, TENMIL_EVENT_REMOVED, TENMIL_EVENT_RESIZED, TENMIL_OPEN_DIRECT,
    TENMIL_OPEN_READ_ONLY, tenmil_close, tenmil_device_event_fd, tenmil_device_get_info,
    tenmil_device_next_event, tenmil_device_refresh, tenmil_open,
};
pub use failure::{
    TENMIL_ERROR_BUSY, TENMIL_ERROR_ENVIRONMENT, TENMIL_ERROR_HANDLE, TENMIL_ERROR_INTERNAL,
    TENMIL_ERROR_REMOTE, TENMIL_ERROR_THREAD, TENMIL_ERROR_USAGE, TENMIL_OK, tenmil_error_name,
    tenmil_last_error, tenmil_last_hint,
};
pub use io::{
    Completion, Io, IoSegment, TENMIL_IO_DEALLOCATE, TENMIL_IO_FUA, TENMIL_OP_COMPARE,
    TENMIL_OP_COMPARE_AND_WRITE, TENMIL_OP_COPY, TENMIL_OP_DEALLOCATE, TENMIL_OP_FLUSH,
    TENMIL_OP_READ, TENMIL_OP_VERIFY, TENMIL_OP_WRITE, TENMIL_OP_WRITE_UNCORRECTABLE,
    TENMIL_OP_WRITE_ZEROES,
};
pub use program_device::{DeviceFunctions, DeviceProperties};
pub use queue_functions::{
    tenmil_poll, tenmil_queue_arm, tenmil_queue_attach, tenmil_queue_create, tenmil_queue_depth,
    tenmil_queue_destroy, tenmil_queue_detach, tenmil_queue_event_fd, tenmil_queue_in_flight,
    tenmil_submit,
};
pub use queue_table::QueueHandle;
pub use server::{
    ExportedDevice, ServerHandle, ServerOptions, TENMIL_EXPORT_READ_ONLY,
    TENMIL_SERVE_ALLOW_ANY_HOST, TENMIL_SERVE_NBD, TENMIL_SERVE_NVME_TCP, tenmil_server_start,
    tenmil_server_stop, tenmil_server_uri,
};
pub use status::{
    TENMIL_STATUS_CLASS_ABORTED, TENMIL_STATUS_CLASS_COMPARE, TENMIL_STATUS_CLASS_CONFLICT,
    TENMIL_STATUS_CLASS_INVALID, TENMIL_STATUS_CLASS_MEDIUM, TENMIL_STATUS_CLASS_OTHER,
    TENMIL_STATUS_CLASS_PATH, TENMIL_STATUS_CLASS_RETRY, TENMIL_STATUS_CLASS_SUCCESS,
    tenmil_status_text,
};
