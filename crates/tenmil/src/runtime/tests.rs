//! Devices opened by URI: without blocking the reactor, shared according to the access, closed on
//! drop. Runtimes that are dropped while devices are open.

mod dropping;

use std::sync::PoisonError;
use std::sync::mpsc::channel;
use std::time::Duration;

use smol::future::block_on;
use tenmil_base::{Error, ErrorCategory, IoStatus, Operation, Span};

use super::Runtime;
use crate::access::Access;
use crate::device::{Buffer, Device, IoError, IoErrorKind};

/// Longer than any step takes on a busy machine.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// A runtime with one reactor.
struct TestRuntime(Runtime);

impl TestRuntime {
    fn new() -> Self {
        let core = tenmil_linux::CpuList::allowed_cpus().iter().next();
        let builder = Runtime::builder().cores(core).pin(false).buffer_bytes(4 << 20);
        Self(builder.stop_timeout(Duration::from_secs(20)).start().unwrap())
    }

    fn open(&self, name: &str, access: Access) -> Result<Device, Error> {
        block_on(self.0.open(name, access))
    }

    fn thread(&self) -> &tenmil_reactor::ThreadHandle {
        &self.0.0.threads[0].thread
    }

    fn now(&self) -> tenmil_base::Instant {
        self.0.0.services.devices.clock.now()
    }

    fn free_bytes(&self) -> u64 {
        self.0.0.services.buffers.free_bytes()
    }

    /// Waits until the reactor has handled a message.
    fn wait_for_reactor_message(&self) {
        let (send, completion) = channel();
        assert!(self.thread().send_closure(move |_| send.send(()).unwrap()).is_ok());
        completion.recv_timeout(TIME_LIMIT).unwrap();
    }

    fn poller_names(&self) -> Vec<String> {
        let sample = self.0.registry().sample_statistics(self.now());
        let pollers = sample.threads.iter().flat_map(|thread| &thread.pollers);
        pollers.map(|poller| poller.name.clone()).collect()
    }

    /// Number of polls that found work.
    fn busy_poll_count(&self) -> u64 {
        let sample = self.0.registry().sample_statistics(self.now());
        sample.threads.iter().flat_map(|thread| &thread.pollers).map(|poller| poller.found).sum()
    }
}

fn filled_buffer(device: &Device, blocks: u32, byte: u8) -> Buffer {
    let len_bytes = blocks * device.limits().block_size;
    let mut buffer = device.buffer(len_bytes).unwrap();
    buffer.store(0, &vec![byte; len_bytes as usize]);
    buffer
}

fn bytes_or_error_kind(ended: Result<Buffer, IoError>) -> Result<Vec<u8>, IoErrorKind> {
    ended.map(|buffer| buffer.to_vec()).map_err(|not_done| not_done.why)
}

#[test]
fn every_device_kind_opens_and_supports_its_operations() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk").display().to_string();
    let stage = TestRuntime::new();
    for name in [
        "ram:1m",
        "emu:ram?size=1m",
        &format!("file:{disk}?size=1m&block=4k&engine=threads"),
        "model:p4800x?size=1m",
        "delay:[ram:1m]?write=20us",
        "stripe:[ram:1m],[emu:ram?size=1m]",
    ] {
        let device = stage.open(name, Access::ReadWrite).unwrap_or_else(|why| panic!("{why}"));
        let block = device.limits().block_size as usize;
        block_on(async {
            let ones = device.write_fua(3, filled_buffer(&device, 2, 1)).await.unwrap();
            device.flush().await.unwrap();
            device.copy(3, 9, 2).await.unwrap();
            device.verify(9, 2).await.unwrap();
            let ones = device.compare(9, ones).await.unwrap();
            let mut pair = filled_buffer(&device, 2, 1);
            pair.store(u32::try_from(block).unwrap(), &vec![2; block]);
            let pair = device.compare_and_write(9, pair).await.unwrap();
            let again = bytes_or_error_kind(device.compare_and_write(9, pair).await);
            assert_eq!(again, Err(IoErrorKind::Status(IoStatus::COMPARE_FAILURE)), "{name}");
            let read = bytes_or_error_kind(device.read(9, ones).await).unwrap();
            assert_eq!(read, [vec![2; block], vec![1; block]].concat(), "{name}");
            device.write_zeroes(10, 1).await.unwrap();
            let read =
                bytes_or_error_kind(device.read(9, filled_buffer(&device, 2, 7)).await).unwrap();
            assert_eq!(read, [vec![2; block], vec![0; block]].concat(), "{name}");
            device.deallocate(9, 2).await.unwrap();
            let far = device.limits().block_count;
            let beyond = bytes_or_error_kind(device.read(far, filled_buffer(&device, 1, 0)).await);
            assert_eq!(beyond, Err(IoErrorKind::Status(IoStatus::LBA_OUT_OF_RANGE)), "{name}");
        });
        assert!(stage.poller_names().contains(&name.to_owned()), "{name} is polled by its name");
    }
}

#[test]
fn openings_of_one_uri_share_the_device_if_accesses_are_compatible() {
    let stage = TestRuntime::new();
    let writer = stage.open("ram:1m", Access::ReadWrite).unwrap();
    let reader = stage.open("ram:1m", Access::ReadOnly).unwrap();
    block_on(writer.write(5, filled_buffer(&writer, 1, 9))).unwrap();
    let read = block_on(reader.read(5, filled_buffer(&reader, 1, 0)));
    assert_eq!(bytes_or_error_kind(read), Ok(vec![9; 512]));
    let refused = block_on(reader.write(5, filled_buffer(&reader, 1, 0))).unwrap_err();
    assert!(matches!(refused.why, IoErrorKind::Unsupported(Operation::Write)), "{refused}");
    assert!(refused.buffer.is_some());
    assert_eq!(refused.to_string(), "ram:1m: write of block 5: the device has no such operation");

    for access in [Access::ReadWrite, Access::Exclusive] {
        let refused = stage.open("ram:1m", access).unwrap_err();
        assert_eq!(refused.category, ErrorCategory::Usage);
        assert!(refused.text.starts_with(&format!("open ram:1m {access}: ")), "{refused}");
    }
    let other = stage.open("ram:2m", Access::Exclusive).unwrap();
    drop(writer.clone());
    block_on(writer.close());
    block_on(reader.close());
    assert!(!other.is_removed());
    let alone = stage.open("ram:1m", Access::Exclusive).unwrap();
    let read = block_on(alone.read(5, filled_buffer(&alone, 1, 7)));
    assert_eq!(bytes_or_error_kind(read), Ok(vec![0; 512]), "it is another one");
}

#[test]
fn unopenable_device_is_rejected_by_its_name() {
    let stage = TestRuntime::new();
    for (name, said) in [
        ("tape:0", "open tape:0: no devices of kind `tape`, expected one of null:, "),
        ("ram:1000", "open ram:1000: size is 1000 bytes, expected a multiple"),
        ("file:/no/such/directory/disk?size=1m", "open file:/no/such/directory/disk?size=1m: "),
        ("emu:ram?count=2", "open emu:ram?count=2: count is 2, expected 1"),
    ] {
        let refused = stage.open(name, Access::ReadWrite).unwrap_err();
        assert!(refused.text.starts_with(said), "{refused}");
        assert_eq!(refused.category, ErrorCategory::Usage);
    }
    stage.0.registry().end_thread(stage.thread().id()).unwrap();
    while !stage.thread().has_ended() {
        tenmil_linux::named_thread::yield_cpu();
    }
    let refused = stage.open("ram:1m", Access::ReadWrite).unwrap_err();
    let said = "attach 'ram:1m': its light thread has ended, as its runtime was dropped";
    assert_eq!(refused.text, said);
}

#[test]
fn reactor_continues_while_a_device_is_being_opened() {
    let stage = TestRuntime::new();
    let entry = stage.0.0.services.devices.registry_entry("ram:1m");
    let held = entry.lock().unwrap_or_else(PoisonError::into_inner);
    let (send, opened) = channel();
    let rt = stage.0.clone();
    // Opened on the reactor itself, as by a task.
    let ask = move |_: &mut tenmil_reactor::Context<'_>| {
        drop(send.send(rt.open("ram:1m", Access::ReadWrite)));
    };
    assert!(stage.thread().send_closure(ask).is_ok());
    let mut opening = Box::pin(opened.recv_timeout(TIME_LIMIT).unwrap());
    stage.wait_for_reactor_message();
    assert!(block_on(smol::future::poll_once(&mut opening)).is_none(), "its entry is locked");
    drop(held);
    assert_eq!(block_on(opening).unwrap().limits().block_count, 2048);
}

#[test]
fn last_handle_closes_the_device_after_its_requests() {
    let stage = TestRuntime::new();
    let device = stage.open("delay:[ram:1m]?write=50ms", Access::ReadWrite).unwrap();
    let baseline = stage.free_bytes();
    let other = device.clone();
    let (begun, found) = (stage.now(), stage.busy_poll_count());
    let mut write = Box::pin(device.write(0, filled_buffer(&device, 1, 1)));
    assert!(block_on(smol::future::poll_once(&mut write)).is_none());
    let end = begun.after(Span::from_secs(20));
    while stage.busy_poll_count() == found {
        assert!(stage.now() < end, "the write is not executed");
        stage.wait_for_reactor_message();
    }
    drop(write);
    drop(device);
    assert!(!other.is_removed() && stage.poller_names().len() == 1);
    block_on(other.close());
    assert!(stage.now().since(begun) > Span::from_ms(40), "the write was awaited");
    assert_eq!(stage.free_bytes(), baseline, "and its buffer is free");
    stage.wait_for_reactor_message();
    assert_eq!(stage.poller_names(), [""; 0]);
    stage.open("delay:[ram:1m]?write=50ms", Access::Exclusive).unwrap();
}

#[test]
fn abandoned_opening_closes_the_device_again() {
    let stage = TestRuntime::new();
    let entry = stage.0.0.services.devices.registry_entry("ram:1m");
    let held = entry.lock().unwrap_or_else(PoisonError::into_inner);
    drop(stage.0.open("ram:1m", Access::ReadWrite));
    drop(held);
    let end = stage.now().after(Span::from_secs(20));
    while let Err(refused) = stage.open("ram:1m", Access::Exclusive) {
        assert!(stage.now() < end, "{refused}");
    }
}

#[test]
fn write_protected_file_opens_read_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let file = format!("file:{}?engine=threads", path.display());
    let stage = TestRuntime::new();
    let sized = format!("{file}&size=1m");
    let writer = stage.open(&sized, Access::ReadWrite).unwrap();
    let ones = block_on(writer.write(3, filled_buffer(&writer, 1, 1))).unwrap();
    block_on(writer.close());
    drop(ones);

    let reader = stage.open(&file, Access::ReadOnly).unwrap();
    let read = block_on(reader.read(3, filled_buffer(&reader, 1, 0)));
    assert_eq!(bytes_or_error_kind(read), Ok(vec![1; 512]));
    let other = stage.open(&file, Access::ReadOnly).unwrap();
    // Its file is open read-only, so that nothing could be written.
    let refused = stage.open(&file, Access::ReadWrite).unwrap_err();
    let said = format!(
        "open {file} read-write: it is open with its files read-only, expected it to be opened read-write \
         first"
    );
    assert_eq!((refused.category, refused.text), (ErrorCategory::Usage, said));
    assert!(refused.hint.is_some());
    block_on(reader.close());
    block_on(other.close());
    stage.open(&file, Access::ReadWrite).unwrap();
}

#[test]
fn rejected_opening_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let stage = TestRuntime::new();
    let uri = format!("stripe:[file:{}?size=1m],[file:/no/such/disk?size=1m]", path.display());
    let refused = stage.open(&uri, Access::ReadWrite).unwrap_err();
    assert!(refused.text.starts_with(&format!("open {uri}: ")), "{refused}");
    assert!(!path.exists());
}

#[test]
fn claim_conflict_error_names_the_open_and_the_compatible_access() {
    let stage = TestRuntime::new();
    let _writer = stage.open("ram:1m", Access::ReadWrite).unwrap();
    let _reader = stage.open("ram:1m", Access::ReadOnly).unwrap();
    let said = |access| stage.open("ram:1m", access).unwrap_err().text;
    assert_eq!(
        said(Access::ReadWrite),
        "open ram:1m read-write: it is open read-write in this runtime, expected read-only openings \
         at most"
    );
    assert_eq!(
        said(Access::Exclusive),
        "open ram:1m exclusive: it is open read-write and read-only in this runtime, expected no other \
         opening"
    );
    let refused = stage.open("ram:1m", Access::ReadWrite).unwrap_err();
    assert!(refused.hint.is_some_and(|hint| hint.starts_with("Clone the `Device`")));
}

#[test]
fn buffer_larger_than_the_runtime_memory_is_rejected_by_size() {
    let stage = TestRuntime::new();
    let device = stage.open("null:", Access::ReadOnly).unwrap();
    let _all = device.buffer(4 << 20).unwrap();
    let refused = device.buffer(512).unwrap_err();
    let said = "null:: allocate a buffer of 512 bytes: 0 bytes of buffer memory are free, expected as \
                many in one piece";
    assert_eq!((refused.category, refused.text.as_str()), (ErrorCategory::Environment, said));
    assert!(refused.hint.is_some_and(|hint| hint.contains("buffer_bytes")));
}

#[test]
fn unavailable_cores_are_rejected() {
    let refused = Runtime::builder().cores([1023]).start().unwrap_err();
    assert!(refused.text.starts_with("start a runtime on cores 1023: "), "{refused}");
    assert!(Runtime::builder().cores([]).start().is_err());
}
