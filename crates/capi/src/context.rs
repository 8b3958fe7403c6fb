//! Context: memory that devices share, and the functions for it.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use crate::c_string::{SizedStruct, load_sized, store};
use crate::failure::{Failure, TENMIL_OK, run};
use crate::handles::HandleTable;
use crate::program_memory::ProgramMemory;

/// Context: the memory of a program and its open devices. A number: copies refer to the same context.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextHandle {
    /// Zero is no context.
    pub id: u64,
}

/// Options of a context. Set all bytes to zero and `size` to sizeof of the structure; fields that are zero
/// have their defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ContextOptions {
    /// Size of this structure in bytes.
    pub size: u32,
    /// Memory for buffers of tenmil_buffer_alloc(), in bytes; its pages are allocated when they are first
    /// used. Zero means 64 MiB.
    pub buffer_bytes: u32,
}

const _: () = assert!(size_of::<ContextOptions>() == 8);

// SAFETY: integers in the layout of C, the first of which is the size.
unsafe impl SizedStruct for ContextOptions {
    const FIRST_SIZE: usize = 8;
}

/// What the devices of a context share.
pub(crate) struct Context {
    pub(crate) memory: ProgramMemory,
    pub(crate) regions: RegionTable,
    pub(crate) clock: Clock,
}

static CONTEXTS: HandleTable<Context> = HandleTable::new("context");

/// Default memory for buffers.
const BUFFER_BYTES: u32 = 64 << 20;
/// Size of the region table, its largest. A device needs a few regions for each channel.
const REGIONS_MAX: usize = 4096;

impl ContextHandle {
    pub(crate) fn get(self) -> Result<Arc<Context>, Failure> {
        CONTEXTS.get(self.id)
    }
}

/// Creates a context. `options` may be NULL. It takes some 10 ms to calibrate a clock.
///
/// The context belongs to the caller, which destroys it by tenmil_context_destroy().
///
/// # Safety
///
/// `options` is NULL or as long as its field `size`; `context` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_context_create(
    options: *const ContextOptions,
    context: *mut ContextHandle,
) -> i32 {
    run("tenmil_context_create", || {
        // SAFETY: the caller promises the same of the options.
        let options = unsafe { load_sized("options", options) }?;
        let buffer_bytes =
            if options.buffer_bytes == 0 { BUFFER_BYTES } else { options.buffer_bytes };
        // SAFETY: the caller promises that it may be written. No context is created without a place for it.
        unsafe { store("context", context, ContextHandle { id: 0 }) }?;
        let regions = RegionTable::new(REGIONS_MAX);
        let memory = ProgramMemory::new(&regions, buffer_bytes)?;
        let new = Arc::new(Context { memory, regions, clock: Clock::start() });
        let id = CONTEXTS.add(new);
        // SAFETY: as above.
        unsafe { store("context", context, ContextHandle { id }) }?;
        Ok(TENMIL_OK)
    })
}

/// Destroys a context: its buffers are freed, and its memory is unregistered. TENMIL_ERROR_BUSY while one of
/// its devices is open.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_context_destroy(context: ContextHandle) -> i32 {
    run("tenmil_context_destroy", || {
        CONTEXTS.remove_unused(context.id, "devices").map(|_| TENMIL_OK)
    })
}

/// Allocates `len` bytes for the data of I/Os of every device of the context, zeroed and page-aligned, and
/// stores the address in `*buffer`.
///
/// The buffer belongs to the caller, which frees it by tenmil_buffer_free(). It may be used by one I/O after
/// another, and by several at once; from tenmil_submit() until the completion is polled, the device may
/// access it.
///
/// # Safety
///
/// `buffer` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_buffer_alloc(
    context: ContextHandle,
    len: u64,
    buffer: *mut *mut c_void,
) -> i32 {
    run("tenmil_buffer_alloc", || {
        // SAFETY: the caller promises that it may be written. Nothing is allocated without a place for it.
        unsafe { store("buffer", buffer, std::ptr::null_mut()) }?;
        let address = context.get()?.memory.allocate(len)?;
        // SAFETY: as above.
        unsafe { store("buffer", buffer, address.as_ptr().cast()) }?;
        Ok(TENMIL_OK)
    })
}

/// Frees a buffer of tenmil_buffer_alloc(). NULL is ignored. TENMIL_ERROR_BUSY while an I/O in flight uses
/// it; a submission by another thread at the same time is not noticed.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_buffer_free(context: ContextHandle, buffer: *mut c_void) -> i32 {
    run("tenmil_buffer_free", || {
        let context = context.get()?;
        if !buffer.is_null() {
            context.memory.free(buffer.addr())?;
        }
        Ok(TENMIL_OK)
    })
}

/// Registers memory of the program, so that I/Os of every device of the context may use it. Any alignment
/// will do; a device that needs another one copies through buffers of its own. Overlapping memory cannot be
/// registered twice.
///
/// The memory belongs to the caller, which keeps it mapped, readable and writable until
/// tenmil_memory_unregister() has returned TENMIL_OK, or the context is destroyed. A process that is forked
/// must not use it.
///
/// # Safety
///
/// As just described.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_memory_register(
    context: ContextHandle,
    memory: *mut c_void,
    len: usize,
) -> i32 {
    run("tenmil_memory_register", || {
        let context = context.get()?;
        let Some(address) = NonNull::new(memory.cast()) else {
            return Err(Failure::usage("memory: found NULL, expected an address"));
        };
        // SAFETY: the caller keeps it mapped until it has been unregistered.
        unsafe { context.memory.register(address, len) }?;
        Ok(TENMIL_OK)
    })
}

/// Ends the registration of the memory that begins at `memory`. TENMIL_ERROR_BUSY while an I/O in flight uses
/// it; a submission by another thread at the same time is not noticed.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_memory_unregister(context: ContextHandle, memory: *mut c_void) -> i32 {
    run("tenmil_memory_unregister", || {
        context.get()?.memory.unregister(memory.addr())?;
        Ok(TENMIL_OK)
    })
}
