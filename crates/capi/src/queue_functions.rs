//! Functions of queues.

use std::mem::MaybeUninit;

use crate::c_string::store;
use crate::device::DeviceHandle;
use crate::failure::{Failure, TENMIL_OK, run};
use crate::io::{Completion, Io};
use crate::queue::{DEPTH_MAX, Queue};
use crate::queue_table::QueueHandle;

/// Depth of a queue if the program does not choose one.
const DEPTH: u32 = 128;

/// Creates a queue for at most `depth` I/Os in flight, and stores it in `*queue`. Zero is a depth of 128, or
/// what the device has if it has less. A device may have as many queues as its `queues_max`.
///
/// The queue belongs to the caller, which destroys it by tenmil_queue_destroy(), and to the calling thread:
/// calls by other threads return TENMIL_ERROR_THREAD. tenmil_queue_detach() and tenmil_queue_attach() move it
/// to another thread.
///
/// # Safety
///
/// `queue` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_queue_create(
    device: DeviceHandle,
    depth: u32,
    queue: *mut QueueHandle,
) -> i32 {
    run("tenmil_queue_create", || {
        // SAFETY: the caller promises that it may be written. Nothing is created without a place for it.
        unsafe { store("queue", queue, QueueHandle { id: 0 }) }?;
        let device = device.get()?;
        let most = device.limits().depth_max.min(DEPTH_MAX);
        if depth > most {
            let name = &device.name;
            return Err(Failure::usage(format_args!(
                "{name}: create a queue: depth is {depth}, expected at most {most}"
            )));
        }
        let depth = if depth == 0 { DEPTH.min(most) } else { depth };
        let channel = device.channel()?;
        let handle = QueueHandle::add(Queue::new(device, channel, depth))?;
        // SAFETY: as above.
        unsafe { store("queue", queue, handle) }?;
        Ok(TENMIL_OK)
    })
}

/// Destroys a queue of the calling thread. I/Os in flight are abandoned: their completions are lost, and
/// whether they are executed is not known. Blocks until the device does not access their memory any more.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_queue_destroy(queue: QueueHandle) -> i32 {
    run("tenmil_queue_destroy", || {
        drop(queue.remove()?);
        Ok(TENMIL_OK)
    })
}

/// Submits the I/Os at `ios` from the front, makes them visible to the device, and returns how many were
/// accepted. Fewer than `count` means that the queue is full, or that the next I/O is invalid: poll, and
/// submit the rest again. If the first I/O is invalid, the result is an error, and nothing was submitted.
///
/// An accepted I/O completes exactly once. Until then its memory may be accessed by the device: do not free
/// it, and do not change it if the device reads it. The array belongs to the caller and is read during the
/// call only.
///
/// I/Os in flight at the same time are not ordered. A flush covers the writes that had completed when it was
/// submitted. The range of blocks is checked by the device: the completion has the status.
///
/// # Safety
///
/// `ios` is valid for reads of `count` structures, and so are their segments.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_submit(queue: QueueHandle, ios: *const Io, count: u32) -> i32 {
    run("tenmil_submit", || {
        queue.with(|queue| {
            if count == 0 {
                return Ok(0);
            }
            check_array("ios", ios)?;
            // SAFETY: not null and aligned, as just checked; the caller promises `count` structures. They are
            // plain data, of which any bytes are valid.
            let ios = unsafe { std::slice::from_raw_parts(ios, count as usize) };
            // SAFETY: the caller promises the same of the segments.
            let taken = unsafe { queue.submit(ios) }?;
            Ok(number(taken))
        })
    })
}

/// Does a bounded amount of work, and writes up to `max` completions to `completions`, which belongs to the
/// caller. Returns their number, zero if none is available. Never blocks.
///
/// # Safety
///
/// `completions` is valid for writes of `max` structures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_poll(
    queue: QueueHandle,
    completions: *mut Completion,
    max: u32,
) -> i32 {
    run("tenmil_poll", || {
        queue.with(|queue| {
            if max == 0 {
                return Ok(0);
            }
            check_array("completions", completions)?;
            let into = completions.cast::<MaybeUninit<Completion>>();
            // SAFETY: not null and aligned, as just checked; the caller promises room for `max` structures.
            let into = unsafe { std::slice::from_raw_parts_mut(into, max as usize) };
            Ok(number(queue.poll(into)))
        })
    })
}

/// Stores the largest number of I/Os in flight in `*depth`.
///
/// # Safety
///
/// `depth` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_queue_depth(queue: QueueHandle, depth: *mut u32) -> i32 {
    run("tenmil_queue_depth", || {
        let found = queue.with(|queue| Ok(queue.depth()))?;
        // SAFETY: the caller promises the same.
        unsafe { store("depth", depth, u32::try_from(found).unwrap_or(u32::MAX)) }?;
        Ok(TENMIL_OK)
    })
}

/// Stores the number of I/Os that were submitted and whose completions have not been polled in `*count`.
///
/// # Safety
///
/// `count` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_queue_in_flight(queue: QueueHandle, count: *mut u32) -> i32 {
    run("tenmil_queue_in_flight", || {
        let found = queue.with(|queue| Ok(queue.in_flight()))?;
        // SAFETY: the caller promises the same.
        unsafe { store("count", count, u32::try_from(found).unwrap_or(u32::MAX)) }?;
        Ok(TENMIL_OK)
    })
}

/// Stores a descriptor in `*fd` that becomes readable when an armed queue has completions, or -1 if the
/// device has none: then tenmil_queue_arm() never lets the thread sleep while I/Os are in flight.
///
/// The descriptor belongs to the library: wait for it by poll() or epoll, and neither read nor close it. It
/// is valid until the queue is destroyed.
///
/// # Safety
///
/// `fd` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_queue_event_fd(queue: QueueHandle, fd: *mut i32) -> i32 {
    run("tenmil_queue_event_fd", || {
        let found = queue.with(|queue| Ok(queue.event_fd()))?;
        // SAFETY: the caller promises the same.
        unsafe { store("fd", fd, found.unwrap_or(-1)) }?;
        Ok(TENMIL_OK)
    })
}

/// Prepares the sleep of the thread, which then waits for the descriptor of tenmil_queue_event_fd(). Returns 1
/// if the thread may sleep until the descriptor is readable or `*timeout_ns` nanoseconds have passed
/// (UINT64_MAX: no limit), or 0 if a completion may be available: then it must poll instead. The next
/// tenmil_submit() or tenmil_poll() disarms the queue.
///
/// # Safety
///
/// `timeout_ns` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tenmil_queue_arm(queue: QueueHandle, timeout_ns: *mut u64) -> i32 {
    run("tenmil_queue_arm", || {
        // SAFETY: the caller promises that it may be written. The queue is not armed without a place for it.
        unsafe { store("timeout_ns", timeout_ns, 0) }?;
        let until = queue.with(|queue| Ok(queue.arm().map(|at| queue.ns_until(at))))?;
        let Some(ns) = until else { return Ok(0) };
        // SAFETY: as above.
        unsafe { store("timeout_ns", timeout_ns, ns) }?;
        Ok(1)
    })
}

/// Ends the ownership of the calling thread, so that another one can attach the queue. I/Os may be in flight.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_queue_detach(queue: QueueHandle) -> i32 {
    run("tenmil_queue_detach", || queue.detach().map(|()| TENMIL_OK))
}

/// Makes the calling thread the owner of a detached queue. The program itself orders this after the detach.
#[unsafe(no_mangle)]
pub extern "C" fn tenmil_queue_attach(queue: QueueHandle) -> i32 {
    run("tenmil_queue_attach", || queue.attach().map(|()| TENMIL_OK))
}

fn check_array<T>(name: &str, array: *const T) -> Result<(), Failure> {
    if array.is_null() || !array.is_aligned() {
        return Err(Failure::usage(format_args!(
            "{name}: the array is at {array:p}, expected an aligned address"
        )));
    }
    Ok(())
}

/// Number of I/Os of a call: at most the depth of a queue.
fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
