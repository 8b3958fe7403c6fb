//! Devices that a program implements, served and opened through the C interface.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![allow(clippy::disallowed_methods, reason = "a test has deadlines")]

use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tenmil_capi::*;

const BLOCK: usize = 512;
const BLOCKS: usize = 256;

/// A disk in memory, with what its channel functions are to do wrong.
#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    open: AtomicU32,
    closed: AtomicU32,
    /// Submissions fail.
    refuses: bool,
    /// The first completion has a token that is not in flight.
    invents: bool,
}

struct Channel {
    disk: *mut Disk,
    ready: Vec<Completion>,
}

unsafe extern "C" fn open_channel(device: *mut c_void, channel: *mut *mut c_void) -> i32 {
    let disk = device.cast::<Disk>();
    // SAFETY: the test passes a disk that lives until the server has been stopped.
    unsafe { &(*disk).open }.fetch_add(1, Ordering::Relaxed);
    let new = Box::new(Channel { disk, ready: Vec::new() });
    // SAFETY: the library passes an address for the channel.
    unsafe { channel.write(Box::into_raw(new).cast()) };
    0
}

unsafe extern "C" fn close_channel(channel: *mut c_void) {
    // SAFETY: made by `open_channel`, and closed once.
    let channel = unsafe { Box::from_raw(channel.cast::<Channel>()) };
    // SAFETY: the disk lives until the server has been stopped.
    unsafe { &(*channel.disk).closed }.fetch_add(1, Ordering::Relaxed);
}

unsafe extern "C" fn submit(channel: *mut c_void, ios: *const Io, count: u32) -> i32 {
    // SAFETY: made by `open_channel`; one thread uses it.
    let channel = unsafe { &mut *channel.cast::<Channel>() };
    // SAFETY: the only channel that is used at a time: the test submits one I/O after the other.
    let disk = unsafe { &mut *channel.disk };
    if disk.refuses {
        return -1;
    }
    // SAFETY: the library passes an array of as many requests.
    for io in unsafe { std::slice::from_raw_parts(ios, count as usize) } {
        let mut at = usize::try_from(io.lba).unwrap() * BLOCK;
        for index in 0..usize::from(io.segment_count) {
            // SAFETY: a request has as many segments.
            let segment = unsafe { &*io.segments.wrapping_add(index) };
            let len = usize::try_from(segment.len).unwrap();
            let (data, bytes) = (segment.data.cast::<u8>(), &mut disk.bytes[at..at + len]);
            // SAFETY: the segment has `len` bytes until the completion.
            let memory = unsafe { std::slice::from_raw_parts_mut(data, len) };
            match io.operation {
                TENMIL_OP_READ => memory.copy_from_slice(bytes),
                _ => bytes.copy_from_slice(memory),
            }
            at += len;
        }
        // Blocks from 200 on are bad.
        let status = if io.operation == TENMIL_OP_READ && io.lba >= 200 { 0x281 } else { 0 };
        channel.ready.push(Completion { token: io.token, result: 0, status, status_class: 0 });
    }
    i32::try_from(count).unwrap()
}

unsafe extern "C" fn poll(channel: *mut c_void, completions: *mut Completion, max: u32) -> i32 {
    // SAFETY: made by `open_channel`; one thread uses it.
    let channel = unsafe { &mut *channel.cast::<Channel>() };
    // SAFETY: the disk lives until the server has been stopped; the test submits one I/O after the other.
    let disk = unsafe { &mut *channel.disk };
    if !channel.ready.is_empty() && std::mem::take(&mut disk.invents) {
        let invented = Completion { token: u64::MAX, ..channel.ready[0] };
        channel.ready.insert(0, invented);
    }
    let count = channel.ready.len().min(max as usize);
    for (index, completion) in channel.ready.drain(..count).enumerate() {
        // SAFETY: the array has room for `max` completions.
        unsafe { completions.wrapping_add(index).write(completion) };
    }
    i32::try_from(count).unwrap()
}

const FUNCTIONS: DeviceFunctions = DeviceFunctions {
    open_channel: Some(open_channel),
    close_channel: Some(close_channel),
    submit: Some(submit),
    poll: Some(poll),
    event_fd: None,
};

fn properties() -> DeviceProperties {
    DeviceProperties {
        size: u32::try_from(size_of::<DeviceProperties>()).unwrap(),
        block_size: 512,
        block_count: BLOCKS as u64,
        operations: 1 << TENMIL_OP_READ | 1 << TENMIL_OP_WRITE | 1 << TENMIL_OP_FLUSH,
        durability: TENMIL_DURABILITY_NONE,
        ..DeviceProperties::default()
    }
}

fn disk() -> Box<Disk> {
    Box::new(Disk { bytes: vec![0; BLOCK * BLOCKS], ..Disk::default() })
}

fn disk_that(change: impl FnOnce(&mut Disk)) -> Box<Disk> {
    let mut changed = disk();
    change(&mut changed);
    changed
}

fn start(
    protocol: u32,
    disk: *mut Disk,
    functions: &DeviceFunctions,
    properties: &DeviceProperties,
) -> Result<ServerHandle, i32> {
    let export = ExportedDevice {
        name: c"disk".as_ptr(),
        uri: null(),
        functions,
        properties,
        device: disk.cast(),
        flags: 0,
        reserved: 0,
    };
    let options = ServerOptions {
        size: u32::try_from(size_of::<ServerOptions>()).unwrap(),
        protocol,
        address: c"127.0.0.1:0".as_ptr(),
        exports: &raw const export,
        export_count: 1,
        ..ServerOptions::default()
    };
    let mut server = ServerHandle { id: 0 };
    // SAFETY: options and what they point to live during the call, and the disk until the server is stopped.
    match unsafe { tenmil_server_start(&raw const options, &raw mut server) } {
        TENMIL_OK => Ok(server),
        code => Err(code),
    }
}

fn uri_of(server: ServerHandle) -> CString {
    let mut text = [0_u8; 200];
    // SAFETY: the buffer has as many bytes.
    let len = unsafe { tenmil_server_uri(server, 0, text.as_mut_ptr().cast(), text.len()) };
    assert!(len > 0, "{}", last_error());
    CStr::from_bytes_until_nul(&text).unwrap().to_owned()
}

fn last_error() -> String {
    // SAFETY: valid until the next error of this thread.
    unsafe { CStr::from_ptr(tenmil_last_error()) }.to_str().unwrap().to_owned()
}

/// Opens a server's namespace, and runs `work` with a function that runs one I/O on one block.
fn with_host(
    server: ServerHandle,
    work: impl FnOnce(&mut dyn FnMut(u8, u64, &mut [u8; BLOCK]) -> u16),
) {
    let uri = uri_of(server);
    let (mut context, mut device) = (ContextHandle { id: 0 }, DeviceHandle { id: 0 });
    let (mut queue, mut buffer) = (QueueHandle { id: 0 }, null_mut());
    // SAFETY: handles that may be written, in this and the next calls.
    assert_eq!(unsafe { tenmil_context_create(null(), &raw mut context) }, TENMIL_OK);
    // SAFETY: a string and a handle.
    let opened = unsafe { tenmil_open(context, uri.as_ptr(), 0, &raw mut device) };
    assert_eq!(opened, TENMIL_OK, "{}", last_error());
    // SAFETY: as above.
    assert_eq!(unsafe { tenmil_queue_create(device, 0, &raw mut queue) }, TENMIL_OK);
    // SAFETY: as above.
    assert_eq!(unsafe { tenmil_buffer_alloc(context, 512, &raw mut buffer) }, TENMIL_OK);
    work(&mut |operation, lba, bytes| {
        let data = buffer.cast::<u8>();
        // SAFETY: the buffer has 512 bytes, and no I/O is in flight.
        unsafe { data.copy_from(bytes.as_ptr(), BLOCK) };
        let io = Io {
            token: 0,
            lba,
            source_lba: 0,
            data: buffer,
            segments: null(),
            blocks: 1,
            segment_count: 0,
            operation,
            flags: 0,
        };
        // SAFETY: one structure.
        assert_eq!(unsafe { tenmil_submit(queue, &raw const io, 1) }, 1, "{}", last_error());
        let mut done = Completion { token: 0, result: 0, status: 0, status_class: 0 };
        let until = Instant::now() + Duration::from_secs(20);
        // SAFETY: one structure may be written.
        while unsafe { tenmil_poll(queue, &raw mut done, 1) } == 0 {
            assert!(Instant::now() < until, "a completion arrives");
            std::thread::yield_now();
        }
        // SAFETY: the I/O has completed.
        unsafe { bytes.as_mut_ptr().copy_from(data, BLOCK) };
        done.status & 0x7ff
    });
    assert_eq!(tenmil_queue_destroy(queue), TENMIL_OK);
    assert_eq!(tenmil_close(device), TENMIL_OK);
    assert_eq!(tenmil_context_destroy(context), TENMIL_OK);
}

#[test]
fn device_of_the_program_is_served_and_its_channels_are_closed() {
    let disk = Box::into_raw(disk());
    let server = start(TENMIL_SERVE_NVME_TCP, disk, &FUNCTIONS, &properties()).unwrap();
    with_host(server, |run| {
        let mut bytes = [0x5a; BLOCK];
        assert_eq!(run(TENMIL_OP_WRITE, 7, &mut bytes), 0);
        bytes.fill(0);
        assert_eq!(run(TENMIL_OP_READ, 7, &mut bytes), 0);
        assert_eq!(bytes, [0x5a; BLOCK]);
        assert_eq!(run(TENMIL_OP_READ, 200, &mut bytes), 0x281, "the status of the program");
        assert_eq!(run(TENMIL_OP_COMPARE, 7, &mut [0x5a; BLOCK]), 0, "emulated");
        assert_eq!(run(TENMIL_OP_READ, 256, &mut bytes), 0x80, "past the end");
    });
    assert_eq!(tenmil_server_stop(server), TENMIL_OK);
    assert_eq!(tenmil_server_stop(server), TENMIL_ERROR_HANDLE);
    // SAFETY: the server has been stopped: nothing else uses it.
    let disk = unsafe { Box::from_raw(disk) };
    assert_eq!(disk.bytes[7 * BLOCK..8 * BLOCK], [0x5a; BLOCK]);
    let (open, closed) = (disk.open.into_inner(), disk.closed.into_inner());
    assert!(open > 0 && open == closed, "{open} opened, {closed} closed");
}

#[test]
fn device_that_breaks_the_rules_fails_its_requests_only() {
    let disk = Box::into_raw(disk_that(|disk| disk.refuses = true));
    let server = start(TENMIL_SERVE_NVME_TCP, disk, &FUNCTIONS, &properties()).unwrap();
    with_host(server, |run| assert_eq!(run(TENMIL_OP_READ, 0, &mut [0; BLOCK]), 0x06));
    assert_eq!(tenmil_server_stop(server), TENMIL_OK);
    // SAFETY: the server has been stopped.
    drop(unsafe { Box::from_raw(disk) });
    let disk = Box::into_raw(disk_that(|disk| disk.invents = true));
    let server = start(TENMIL_SERVE_NVME_TCP, disk, &FUNCTIONS, &properties()).unwrap();
    with_host(server, |run| assert_eq!(run(TENMIL_OP_READ, 0, &mut [0; BLOCK]), 0));
    assert_eq!(tenmil_server_stop(server), TENMIL_OK);
    // SAFETY: the server has been stopped.
    drop(unsafe { Box::from_raw(disk) });
}

#[test]
fn invalid_devices_and_options_are_refused() {
    let disk = Box::into_raw(disk());
    let none = DeviceFunctions { poll: None, ..FUNCTIONS };
    for (functions, changed, part) in [
        (&none, properties(), "poll is NULL"),
        (&FUNCTIONS, DeviceProperties { block_size: 100, ..properties() }, "blocks of 100 bytes"),
        (&FUNCTIONS, DeviceProperties { operations: 0, ..properties() }, "expected reads"),
        (&FUNCTIONS, DeviceProperties { depth_max: 1 << 20, ..properties() }, "depth_max"),
        (&FUNCTIONS, DeviceProperties { size: 3, ..properties() }, "size is 3"),
    ] {
        let refused = start(TENMIL_SERVE_NBD, disk, functions, &changed);
        assert_eq!(refused, Err(TENMIL_ERROR_USAGE));
        assert!(last_error().contains(part), "{part}: {}", last_error());
    }
    let refused = start(3, disk, &FUNCTIONS, &properties());
    assert_eq!(refused, Err(TENMIL_ERROR_USAGE), "unknown protocol");
    let server = start(TENMIL_SERVE_NBD, disk, &FUNCTIONS, &properties()).unwrap();
    assert!(uri_of(server).to_str().unwrap().starts_with("nbd://127.0.0.1:"));
    assert_eq!(tenmil_server_stop(server), TENMIL_OK);
    // SAFETY: every server has been stopped.
    drop(unsafe { Box::from_raw(disk) });
}
