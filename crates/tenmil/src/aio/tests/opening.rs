//! Devices opened by URI: without blocking the reactor, shared according to the claims, closed on
//! drop.

use std::sync::PoisonError;
use std::sync::mpsc::channel;
use std::time::Duration;

use smol::future::block_on;
use tenmil_base::{Error, ErrorCategory, IoStatus, Span};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{PollMode, ReactorOptions, Reactors, ThreadBuilder, ThreadHandle};

use crate::aio::{Buffer, Claim, Device, IoError, IoErrorKind, Opener, Uri};

/// Longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// A reactor, a lightweight thread on it, and an opener.
struct Stage {
    opener: Opener,
    thread: ThreadHandle,
    reactors: Reactors,
}

impl Stage {
    fn new() -> Self {
        let clock = Clock::start();
        let cores = CpuList::from_iter(CpuList::allowed().iter().take(1));
        let options =
            ReactorOptions { pin: false, poll: PollMode::Adaptive, ..ReactorOptions::default() };
        let reactors = Reactors::start(&cores, &options, &clock).unwrap();
        let thread = reactors.spawn(ThreadBuilder::new("storage")).unwrap();
        Self { opener: Opener::with_buffers(&clock, 4 << 20).unwrap(), thread, reactors }
    }

    fn open(&self, name: &str, claim: Claim) -> Result<Device, Error> {
        self.opener.open(&name.parse::<Uri>().unwrap(), claim, &self.thread).wait()
    }

    /// Waits until the reactor has handled a message.
    fn ask(&self) {
        let (send, answer) = channel();
        assert!(self.thread.call(move |_| send.send(()).unwrap()).is_ok());
        answer.recv_timeout(PATIENCE).unwrap();
    }

    fn pollers(&self) -> Vec<String> {
        let sample = self.reactors.sample();
        let pollers = sample.threads.iter().flat_map(|thread| &thread.pollers);
        pollers.map(|poller| poller.name.clone()).collect()
    }

    /// Number of polls that found work.
    fn found(&self) -> u64 {
        let sample = self.reactors.sample();
        sample.threads.iter().flat_map(|thread| &thread.pollers).map(|poller| poller.found).sum()
    }
}

fn filled(device: &Device, blocks: u32, byte: u8) -> Buffer {
    let len_bytes = blocks * device.limits().block_size;
    let mut buffer = device.buffer(len_bytes).unwrap();
    buffer.store(0, &vec![byte; len_bytes as usize]);
    buffer
}

fn outcome(ended: Result<Buffer, IoError>) -> Result<Vec<u8>, IoErrorKind> {
    ended.map(|buffer| buffer.to_vec()).map_err(|not_done| not_done.why)
}

#[test]
fn every_kind_of_device_is_opened_and_does_all_it_can() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk").display().to_string();
    let stage = Stage::new();
    for name in [
        "ram:1m",
        "emu:ram?size=1m",
        &format!("file:{disk}?size=1m&block=4k&engine=threads"),
        "model:p4800x?size=1m",
        "delay:[ram:1m]?write=20us",
        "stripe:[ram:1m],[emu:ram?size=1m]",
    ] {
        let device = stage.open(name, Claim::WriteOnce).unwrap_or_else(|why| panic!("{why}"));
        let block = device.limits().block_size as usize;
        block_on(async {
            let ones = device.write_fua(3, filled(&device, 2, 1)).await.unwrap();
            device.flush().await.unwrap();
            device.copy(3, 9, 2).await.unwrap();
            device.verify(9, 2).await.unwrap();
            let ones = device.compare(9, ones).await.unwrap();
            let mut pair = filled(&device, 2, 1);
            pair.store(u32::try_from(block).unwrap(), &vec![2; block]);
            let pair = device.compare_and_write(9, pair).await.unwrap();
            let again = outcome(device.compare_and_write(9, pair).await);
            assert_eq!(again, Err(IoErrorKind::Outcome(IoStatus::COMPARE_FAILURE)), "{name}");
            let read = outcome(device.read(9, ones).await).unwrap();
            assert_eq!(read, [vec![2; block], vec![1; block]].concat(), "{name}");
            device.write_zeroes(10, 1).await.unwrap();
            let read = outcome(device.read(9, filled(&device, 2, 7)).await).unwrap();
            assert_eq!(read, [vec![2; block], vec![0; block]].concat(), "{name}");
            device.deallocate(9, 2).await.unwrap();
            let far = device.limits().block_count;
            let beyond = outcome(device.read(far, filled(&device, 1, 0)).await);
            assert_eq!(beyond, Err(IoErrorKind::Outcome(IoStatus::LBA_OUT_OF_RANGE)), "{name}");
        });
        assert!(stage.pollers().contains(&name.to_owned()), "{name} is polled by its name");
    }
}

#[test]
fn whoever_opens_the_same_name_shares_the_device_by_the_claims() {
    let stage = Stage::new();
    let writer = stage.open("ram:1m", Claim::WriteOnce).unwrap();
    let reader = stage.open("ram:1m", Claim::ReadShared).unwrap();
    block_on(writer.write(5, filled(&writer, 1, 9))).unwrap();
    let read = block_on(reader.read(5, filled(&reader, 1, 0)));
    assert_eq!(outcome(read), Ok(vec![9; 512]));
    let refused = block_on(reader.write(5, filled(&reader, 1, 0))).unwrap_err();
    assert!(
        matches!(refused.why, IoErrorKind::Unsupported(tenmil_base::Operation::Write)),
        "{refused}"
    );
    assert!(refused.buffer.is_some());
    assert_eq!(refused.to_string(), "ram:1m: write of block 5: the device has no such operation");

    for claim in [Claim::WriteOnce, Claim::Exclusive] {
        let refused = stage.open("ram:1m", claim).unwrap_err();
        assert_eq!(refused.category, ErrorCategory::Usage);
        assert!(refused.text.starts_with("open ram:1m: "), "{refused}");
    }
    let other = stage.open("ram:2m", Claim::Exclusive).unwrap();
    drop(writer.clone());
    writer.close().wait();
    reader.close().wait();
    assert!(!other.is_gone());
    let alone = stage.open("ram:1m", Claim::Exclusive).unwrap();
    let read = block_on(alone.read(5, filled(&alone, 1, 7)));
    assert_eq!(outcome(read), Ok(vec![0; 512]), "it is another one");
}

#[test]
fn what_cannot_be_opened_is_refused_by_its_name() {
    let stage = Stage::new();
    for (name, said) in [
        ("tape:0", "open tape:0: no devices of kind `tape`, expected one of null:, "),
        ("ram:1000", "open ram:1000: size is 1000 bytes, expected a multiple"),
        ("file:/no/such/directory/disk?size=1m", "open file:/no/such/directory/disk?size=1m: "),
        ("emu:ram?count=2", "open emu:ram?count=2: count is 2, expected 1"),
    ] {
        let refused = stage.open(name, Claim::WriteOnce).unwrap_err();
        assert!(refused.text.starts_with(said), "{refused}");
        assert_eq!(refused.category, ErrorCategory::Usage);
    }
    stage.reactors.registry().end_thread(stage.thread.id()).unwrap();
    while !stage.thread.is_gone() {
        tenmil_linux::thread::yield_now();
    }
    let refused = stage.open("ram:1m", Claim::WriteOnce).unwrap_err();
    assert_eq!(refused.text, "attach 'ram:1m': its thread has ended");
}

#[test]
fn a_reactor_goes_on_while_a_device_is_being_opened() {
    let stage = Stage::new();
    let name: Uri = "ram:1m".parse().unwrap();
    let (place, thread) = (stage.opener.0.shelf.place("ram:1m"), stage.thread.clone());
    let held = place.lock().unwrap_or_else(PoisonError::into_inner);
    let (send, opened) = channel();
    let opener = stage.opener.clone();
    // Opened on the reactor itself, as by a poller.
    let ask = move |_: &mut tenmil_reactor::Context<'_>| {
        drop(send.send(opener.open(&name, Claim::WriteOnce, &thread)));
    };
    assert!(stage.thread.call(ask).is_ok());
    let mut opening = opened.recv_timeout(PATIENCE).unwrap();
    stage.ask();
    assert!(block_on(smol::future::poll_once(&mut opening)).is_none(), "its place is locked");
    drop(held);
    assert_eq!(opening.wait().unwrap().limits().block_count, 2048);
}

#[test]
fn the_last_handle_takes_the_device_along_when_all_has_ended() {
    let stage = Stage::new();
    let device = stage.open("delay:[ram:1m]?write=50ms", Claim::WriteOnce).unwrap();
    let baseline = stage.opener.buffers().free_bytes();
    let other = device.clone();
    let (begun, found) = (stage.reactors.clock().now(), stage.found());
    let mut write = Box::pin(device.write(0, filled(&device, 1, 1)));
    assert!(block_on(smol::future::poll_once(&mut write)).is_none());
    let end = begun.after(Span::from_secs(20));
    while stage.found() == found {
        assert!(stage.reactors.clock().now() < end, "nobody takes the write");
        stage.ask();
    }
    drop(write);
    drop(device);
    assert!(!other.is_gone() && stage.pollers().len() == 1);
    other.close().wait();
    assert!(stage.reactors.clock().now().since(begun) > Span::from_ms(40), "the write was awaited");
    assert_eq!(stage.opener.buffers().free_bytes(), baseline, "and its buffer is free");
    stage.ask();
    assert_eq!(stage.pollers(), [""; 0]);
    stage.open("delay:[ram:1m]?write=50ms", Claim::Exclusive).unwrap();
}

#[test]
fn an_opening_that_nobody_awaits_is_closed_again() {
    let stage = Stage::new();
    let place = stage.opener.0.shelf.place("ram:1m");
    let held = place.lock().unwrap_or_else(PoisonError::into_inner);
    drop(stage.opener.open(&"ram:1m".parse().unwrap(), Claim::WriteOnce, &stage.thread));
    drop(held);
    let end = stage.reactors.clock().now().after(Span::from_secs(20));
    while let Err(refused) = stage.open("ram:1m", Claim::Exclusive) {
        assert!(stage.reactors.clock().now() < end, "{refused}");
    }
}

#[test]
fn a_device_outlives_its_opener() {
    let Stage { opener, thread, reactors } = Stage::new();
    let device = opener.open(&"emu:ram?size=1m".parse().unwrap(), Claim::WriteOnce, &thread);
    let device = device.wait().unwrap();
    drop(opener);
    block_on(device.write(1, filled(&device, 1, 4))).unwrap();
    device.close().wait();
    reactors.stop();
}
