//! The conformance cases of `conformance.json`, through the functions of the C interface.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![allow(clippy::disallowed_methods, reason = "a test has files, threads and deadlines")]

use std::ffi::{CStr, CString, c_void};
use std::fs::File;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use serde_json::Value;
use tenmil_capi::*;

const BLOCK: u64 = 512;
const MEMORY_BYTES: usize = 64 << 10;

/// A case that runs: its objects, and the memory of its I/Os.
struct Run<'a> {
    context: ContextHandle,
    device: DeviceHandle,
    queue: QueueHandle,
    buffer: *mut u8,
    registered: Vec<u8>,
    foreign: Vec<u8>,
    file: &'a Path,
}

#[test]
fn every_conformance_case_passes() {
    let cases: Value = serde_json::from_str(include_str!("../conformance.json")).unwrap();
    for case in cases["cases"].as_array().unwrap() {
        run_case(case);
    }
}

fn run_case(case: &Value) {
    let name = case["name"].as_str().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk");
    File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let uri = case["device"].as_str().unwrap().replace("TEMP", file.to_str().unwrap());
    let context = new_context();
    let is_set = |key: &str| case[key].as_bool().unwrap_or(false);
    let flags = match (is_set("read_only"), is_set("direct")) {
        (true, _) => TENMIL_OPEN_READ_ONLY,
        (_, true) => TENMIL_OPEN_DIRECT,
        _ => 0,
    };
    let device = open(context, &uri, flags).unwrap_or_else(|code| {
        panic!("{name}: {uri}: {code}: {}", last_error());
    });
    let mut queue = QueueHandle { id: 0 };
    let depth = u32::try_from(case["depth"].as_u64().unwrap_or(8)).unwrap();
    // SAFETY: the handle may be written.
    assert_eq!(unsafe { tenmil_queue_create(device, depth, &raw mut queue) }, TENMIL_OK);
    let mut buffer = null_mut::<c_void>();
    // SAFETY: the pointer may be written.
    let made = unsafe { tenmil_buffer_alloc(context, MEMORY_BYTES as u64, &raw mut buffer) };
    assert_eq!(made, TENMIL_OK);
    let mut run = Run {
        context,
        device,
        queue,
        buffer: buffer.cast(),
        registered: vec![0; MEMORY_BYTES],
        foreign: vec![0; MEMORY_BYTES],
        file: &file,
    };
    let start = run.registered.as_mut_ptr().cast();
    // SAFETY: the vector lives until the context has been destroyed.
    assert_eq!(unsafe { tenmil_memory_register(context, start, MEMORY_BYTES) }, TENMIL_OK);
    for (number, step) in case["steps"].as_array().unwrap().iter().enumerate() {
        let (found, text) = run.run_step(step);
        let expected = step["expect"].as_str().unwrap_or("success");
        let matches =
            found == expected || expected == "refused any" && found.starts_with("refused");
        assert!(matches, "{name}, step {number} {step}: {found}: {text}");
        let part = step["text"].as_str().unwrap_or_default();
        assert!(text.contains(part), "{name}, step {number}: {text}");
    }
    // What a step has closed is closed already.
    tenmil_queue_destroy(run.queue);
    tenmil_close(run.device);
    assert_eq!(tenmil_context_destroy(run.context), TENMIL_OK, "{name}: {}", last_error());
}

impl Run<'_> {
    /// Runs a step. Returns the class of its completion or `refused CODE`, and the last error.
    fn run_step(&mut self, step: &Value) -> (String, String) {
        let number = |key: &str| step[key].as_u64();
        let code = match step["do"].as_str().unwrap() {
            "fill-queue" => {
                let taken = self.submit_many(|index| index);
                assert_eq!(Some(taken), number("accepted"));
                TENMIL_OK
            }
            "equal-tokens" => {
                let taken = self.submit_many(|_| 7);
                assert_eq!(Some(taken), number("accepted"));
                TENMIL_OK
            }
            "drain-queue" => {
                assert_eq!(Some(self.drain()), number("completions"));
                TENMIL_OK
            }
            "submit-elsewhere" => {
                let (queue, io) = (self.queue, self.read_io());
                let data = io.data.expose_provenance();
                elsewhere(move || {
                    let io = Io { data: std::ptr::with_exposed_provenance_mut(data), ..plain_io() };
                    submit_one(queue, &io)
                })
            }
            "poll-elsewhere" => {
                let queue = self.queue;
                elsewhere(move || poll_one(queue).err().unwrap_or(TENMIL_OK))
            }
            "destroy-elsewhere" => {
                let queue = self.queue;
                elsewhere(move || tenmil_queue_destroy(queue))
            }
            "read-elsewhere" => {
                let (queue, data) = (self.queue, self.buffer.expose_provenance());
                elsewhere(move || {
                    assert_eq!(tenmil_queue_attach(queue), TENMIL_OK);
                    let io = Io { data: std::ptr::with_exposed_provenance_mut(data), ..plain_io() };
                    assert_eq!(submit_one(queue, &io), 1);
                    assert_eq!(wait_one(queue).status, 0);
                    tenmil_queue_detach(queue)
                })
            }
            "poll" => poll_one(self.queue).err().unwrap_or(TENMIL_OK),
            "detach" => tenmil_queue_detach(self.queue),
            "attach" => tenmil_queue_attach(self.queue),
            "destroy-queue" => tenmil_queue_destroy(self.queue),
            "close-device" => tenmil_close(self.device),
            "destroy-context" => tenmil_context_destroy(self.context),
            "free-buffer" => tenmil_buffer_free(self.context, self.buffer.cast()),
            "unregister" => {
                tenmil_memory_unregister(self.context, self.registered.as_mut_ptr().cast())
            }
            "start-read" => {
                let io = Io { data: self.memory(step).cast(), ..plain_io() };
                if submit_one(self.queue, &io) == 1 { TENMIL_OK } else { 1 }
            }
            "sleep-until-read-completes" => self.sleep_until_read_completes(),
            "grow-file" => {
                let file = File::options().write(true).open(self.file).unwrap();
                file.set_len(number("to").unwrap()).unwrap();
                tenmil_device_refresh(self.device)
            }
            "event" => self.check_event(step),
            "open" => match open(self.context, step["uri"].as_str().unwrap(), 0) {
                Ok(device) => tenmil_close(device),
                Err(code) => code,
            },
            operation => return self.run_io(operation, step),
        };
        (name_of_code(code), last_error())
    }

    fn run_io(&mut self, operation: &str, step: &Value) -> (String, String) {
        let number = |key: &str| step[key].as_u64().unwrap_or(0);
        let byte = |key: &str| step[key].as_u64().map(|byte| u8::try_from(byte).unwrap());
        let (operation, copies) = operation_of(operation);
        let blocks = u32::try_from(number("blocks")).unwrap();
        let len = usize::try_from(u64::from(blocks) * BLOCK * copies).unwrap();
        let (buffer, registered) = (self.buffer, self.registered.as_mut_ptr());
        let memory = step["memory"].as_str().unwrap_or("buffer");
        // Two pieces: the first three blocks of the buffer, and the rest in registered memory.
        let head = len.min(3 * 512);
        let pieces = [
            IoSegment { data: buffer.cast(), len: head as u64 },
            IoSegment { data: registered.cast(), len: (len - head) as u64 },
        ];
        let mut io = Io { lba: number("lba"), blocks, operation, token: 4711, ..plain_io() };
        io.source_lba = number("source");
        io.flags = match step["flags"].as_str() {
            Some("fua") => TENMIL_IO_FUA,
            Some("deallocate") => TENMIL_IO_DEALLOCATE,
            Some("unknown") => 0x80,
            _ => 0,
        };
        let areas: Vec<(*mut u8, usize)> = match memory {
            "segments" => {
                (io.data, io.segments, io.segment_count) = (null_mut(), pieces.as_ptr(), 2);
                vec![(buffer, head), (registered, len - head)]
            }
            _ => {
                let at = self.memory(step);
                let is_used = copies > 0 || memory == "foreign";
                io.data = if is_used { at.cast() } else { null_mut() };
                if at.is_null() || len > MEMORY_BYTES || memory == "freed" {
                    vec![]
                } else {
                    vec![(at, len)]
                }
            }
        };
        let halves = if copies == 2 { 2 } else { 1 };
        for (at, len) in &areas {
            let first = byte("fill").unwrap_or(0xee);
            // SAFETY: memory of this run with as many bytes, and no I/O is in flight.
            unsafe { at.write_bytes(first, *len) };
            if halves == 2 {
                // SAFETY: the second half of it.
                unsafe { at.wrapping_add(len / 2).write_bytes(byte("fill2").unwrap(), len / 2) };
            }
        }
        let taken = submit_one(self.queue, &io);
        if taken != 1 {
            return (name_of_code(taken), last_error());
        }
        let completion = wait_one(self.queue);
        assert_eq!(completion.token, 4711);
        if let Some(expected) = byte("check") {
            for (at, len) in areas {
                // SAFETY: memory of this run with as many bytes, and no I/O is in flight.
                let bytes = unsafe { std::slice::from_raw_parts(at, len) };
                assert!(bytes.iter().all(|byte| *byte == expected), "{step}: {:?}", &bytes[..8]);
            }
        }
        (name_of_class(completion.status_class).to_owned(), String::new())
    }

    fn memory(&mut self, step: &Value) -> *mut u8 {
        match step["memory"].as_str().unwrap_or("buffer") {
            "buffer" | "freed" => self.buffer,
            "registered" => self.registered.as_mut_ptr(),
            "foreign" => self.foreign.as_mut_ptr(),
            _ => null_mut(),
        }
    }

    fn read_io(&self) -> Io {
        Io { data: self.buffer.cast(), ..plain_io() }
    }

    /// Submits 16 reads, and returns how many were accepted.
    fn submit_many(&self, token: impl Fn(u64) -> u64) -> u64 {
        let ios: Vec<Io> =
            (0..16).map(|index| Io { token: token(index), ..self.read_io() }).collect();
        // SAFETY: an array of 16 structures.
        let taken = unsafe { tenmil_submit(self.queue, ios.as_ptr(), 16) };
        u64::try_from(taken).unwrap()
    }

    /// Polls until no I/O is in flight, and returns the number of completions.
    fn drain(&self) -> u64 {
        let mut count = 0;
        loop {
            let mut in_flight = 0;
            // SAFETY: the number may be written.
            unsafe { tenmil_queue_in_flight(self.queue, &raw mut in_flight) };
            if in_flight == 0 {
                return count;
            }
            assert_eq!(wait_one(self.queue).status, 0);
            count += 1;
        }
    }

    fn check_event(&self, step: &Value) -> i32 {
        let size = u32::try_from(size_of::<DeviceEvent>()).unwrap();
        let mut event = DeviceEvent { size, ..DeviceEvent::default() };
        // SAFETY: a structure with its size.
        let found = unsafe { tenmil_device_next_event(self.device, &raw mut event) };
        let expected = match step["kind"].as_str().unwrap() {
            "none" => 0,
            "resized" => TENMIL_EVENT_RESIZED,
            other => panic!("unknown event {other}"),
        };
        assert_eq!((found == 1, event.kind, event.size), (expected != 0, expected, size), "{step}");
        assert_eq!(event.value, step["value"].as_u64().unwrap_or(0));
        TENMIL_OK
    }

    /// Reads with the thread asleep whenever the queue permits it.
    fn sleep_until_read_completes(&self) -> i32 {
        let (mut fd, mut timeout_ns) = (-1, 0);
        // SAFETY: the descriptor may be written.
        assert_eq!(unsafe { tenmil_queue_event_fd(self.queue, &raw mut fd) }, TENMIL_OK);
        assert!(fd >= 0, "an emulated SSD has interrupts");
        for _ in 0..100 {
            assert_eq!(submit_one(self.queue, &self.read_io()), 1);
            while poll_one(self.queue).unwrap().is_none() {
                // SAFETY: the number may be written.
                let may_sleep = unsafe { tenmil_queue_arm(self.queue, &raw mut timeout_ns) };
                if may_sleep == 1 {
                    wait_readable(fd);
                }
            }
        }
        // SAFETY: the number may be written.
        assert_eq!(unsafe { tenmil_queue_arm(self.queue, &raw mut timeout_ns) }, 1);
        assert_eq!(timeout_ns, u64::MAX, "nothing is in flight");
        TENMIL_OK
    }
}

/// Waits until a descriptor is readable, for ten seconds at most.
fn wait_readable(fd: i32) {
    use std::os::fd::BorrowedFd;
    use tenmil_linux::poll_set::{Interest, PollSet};
    // SAFETY: the queue is open, and so is its descriptor.
    let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
    let set = PollSet::new().unwrap();
    set.add(descriptor, 0, Interest { readable: true, writable: false }).unwrap();
    let mut found = Vec::new();
    set.wait(Some(tenmil_base::Span::from_secs(10)), &mut found).unwrap();
    assert!(!found.is_empty(), "a completion wakes the thread");
}

fn elsewhere(work: impl FnOnce() -> i32 + Send) -> i32 {
    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
}

fn plain_io() -> Io {
    Io {
        token: 0,
        lba: 0,
        source_lba: 0,
        data: null_mut(),
        segments: null(),
        blocks: 1,
        segment_count: 0,
        operation: TENMIL_OP_READ,
        flags: 0,
    }
}

fn submit_one(queue: QueueHandle, io: &Io) -> i32 {
    // SAFETY: one structure, whose segments are valid during the call.
    unsafe { tenmil_submit(queue, io, 1) }
}

fn poll_one(queue: QueueHandle) -> Result<Option<Completion>, i32> {
    let mut completion = Completion { token: 0, result: 0, status: 0, status_class: 0 };
    // SAFETY: one structure may be written.
    match unsafe { tenmil_poll(queue, &raw mut completion, 1) } {
        0 => Ok(None),
        1 => Ok(Some(completion)),
        code => Err(code),
    }
}

fn wait_one(queue: QueueHandle) -> Completion {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(completion) = poll_one(queue).unwrap() {
            return completion;
        }
        assert!(Instant::now() < until, "a completion arrives");
        std::thread::yield_now();
    }
}

fn new_context() -> ContextHandle {
    let options = ContextOptions { size: 8, buffer_bytes: 1 << 20 };
    let mut context = ContextHandle { id: 0 };
    // SAFETY: options with their size, and a handle that may be written.
    let made = unsafe { tenmil_context_create(&raw const options, &raw mut context) };
    assert_eq!(made, TENMIL_OK, "{}", last_error());
    context
}

fn open(context: ContextHandle, uri: &str, flags: u32) -> Result<DeviceHandle, i32> {
    let (uri, mut device) = (CString::new(uri).unwrap(), DeviceHandle { id: 0 });
    // SAFETY: a string, and a handle that may be written.
    match unsafe { tenmil_open(context, uri.as_ptr(), flags, &raw mut device) } {
        TENMIL_OK => Ok(device),
        code => Err(code),
    }
}

fn last_error() -> String {
    // SAFETY: the string is valid until the next error of this thread.
    unsafe { CStr::from_ptr(tenmil_last_error()) }.to_str().unwrap().to_owned()
}

fn name_of_code(code: i32) -> String {
    if code >= 0 {
        return "success".to_owned();
    }
    // SAFETY: the string is valid until the program ends.
    let name = unsafe { CStr::from_ptr(tenmil_error_name(code)) };
    format!("refused {}", name.to_str().unwrap())
}

fn name_of_class(class: u16) -> &'static str {
    match class {
        TENMIL_STATUS_CLASS_SUCCESS => "success",
        TENMIL_STATUS_CLASS_INVALID => "invalid",
        TENMIL_STATUS_CLASS_MEDIUM => "medium",
        TENMIL_STATUS_CLASS_COMPARE => "compare",
        TENMIL_STATUS_CLASS_CONFLICT => "conflict",
        TENMIL_STATUS_CLASS_PATH => "path",
        TENMIL_STATUS_CLASS_RETRY => "retry",
        TENMIL_STATUS_CLASS_ABORTED => "aborted",
        _ => "other",
    }
}

/// Number of an operation, and how many times its memory holds its blocks.
fn operation_of(name: &str) -> (u8, u64) {
    match name {
        "read" => (TENMIL_OP_READ, 1),
        "write" => (TENMIL_OP_WRITE, 1),
        "flush" => (TENMIL_OP_FLUSH, 0),
        "deallocate" => (TENMIL_OP_DEALLOCATE, 0),
        "write-zeroes" => (TENMIL_OP_WRITE_ZEROES, 0),
        "compare" => (TENMIL_OP_COMPARE, 1),
        "write-uncorrectable" => (TENMIL_OP_WRITE_UNCORRECTABLE, 0),
        "verify" => (TENMIL_OP_VERIFY, 0),
        "copy" => (TENMIL_OP_COPY, 0),
        "compare-and-write" => (TENMIL_OP_COMPARE_AND_WRITE, 2),
        "operation-77" => (77, 1),
        other => panic!("unknown step {other}"),
    }
}
