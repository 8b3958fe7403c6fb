//! The device over a librbd that completes when the test wants it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{
    BlockDevice, CompletionBatch, Error, ErrorCategory, ExtentKind, Instant, IoChannel,
    IoCompletion, IoStatus, Memory, Operation, Request, RequestFlags, Segment, Span, WakeSource,
};
use tenmil_block::uri::Uri;
use tenmil_block::{Bdev, BdevEvent, BdevOptions, Claim, OpenedDevice, Opener};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::Clock;

use crate::librbd::fake::{self, FakeImage, OBJECT_BYTES};
use crate::rbd_uri::RbdUri;

/// An image of the fake, opened as a device.
struct TestedImage {
    fake: Arc<FakeImage>,
    device: Arc<dyn BlockDevice>,
    regions: RegionTable,
    memory: Segment,
}

const IMAGE_BYTES: usize = 4 << 20;
const MEMORY_BYTES: usize = 1 << 20;

fn open(uri: &str) -> Result<(OpenedDevice, RegionTable), Error> {
    let regions = RegionTable::new(8);
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, kinds: &[] };
    let uri: Uri = uri.parse().unwrap();
    let name = RbdUri::from_uri(&uri)?;
    let opened = crate::open_with_functions(&fake::FUNCTIONS, &opener, &uri, &name)?;
    Ok((opened, regions))
}

impl TestedImage {
    fn new(name: &str, options: &str) -> Self {
        let fake = fake::create(name, IMAGE_BYTES);
        let (opened, regions) = open(&format!("rbd:p/{name}{options}")).unwrap();
        let mapping = MemoryMapping::new(MEMORY_BYTES, MemoryBacking::Private).unwrap();
        let memory = regions.add_mapping(mapping).unwrap();
        Self { fake, device: opened.medium, regions, memory }
    }

    fn store(&self, offset: u32, bytes: &[u8]) -> Segment {
        let segment = self.memory.slice(offset, u32::try_from(bytes.len()).unwrap()).unwrap();
        self.regions.store(segment, bytes).unwrap();
        segment
    }

    fn load(&self, segment: Segment) -> Vec<u8> {
        let mut bytes = vec![0; segment.len_bytes as usize];
        self.regions.load(segment, &mut bytes).unwrap();
        bytes
    }
}

fn request(operation: Operation, lba: u64, blocks: u32, segments: usize) -> Request {
    let segment_count = u16::try_from(segments).unwrap();
    Request { token: lba, operation, lba, blocks, segment_count, ..Request::PLACEHOLDER }
}

/// Submits a request and polls until it has completed.
fn complete(channel: &mut dyn IoChannel, request: Request, segments: &[Segment]) -> IoStatus {
    assert_eq!(channel.submit(Instant::default(), &[request], segments), 1);
    channel.flush_submissions();
    let found = poll(channel, 1);
    assert_eq!(found[0].token, request.token);
    found[0].status
}

/// Polls until `count` requests have completed.
fn poll(channel: &mut dyn IoChannel, count: usize) -> Vec<IoCompletion> {
    let mut batch = CompletionBatch::with_capacity(64);
    let mut found = Vec::new();
    for _ in 0..1000 {
        channel.poll(Instant::default(), &mut batch);
        found.extend(batch.drain());
        if found.len() >= count {
            return found;
        }
    }
    panic!("{} of {count} requests completed", found.len());
}

/// Whether the descriptor is readable that the thread of a channel sleeps on.
fn is_readable(channel: &dyn IoChannel) -> bool {
    use tenmil_linux::poll_set::{Interest, PollSet};
    let WakeSource::Descriptor(descriptor) = channel.wake_source() else { panic!("none") };
    let set = PollSet::new().unwrap();
    set.add(descriptor, 0, Interest { readable: true, writable: false }).unwrap();
    let mut found = Vec::new();
    set.wait(Some(Span::default()), &mut found).unwrap();
    !found.is_empty()
}

/// Waits for another thread.
fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if is_true() {
            return;
        }
        tenmil_linux::named_thread::sleep(Span::from_ms(1));
    }
    panic!("{what}: not within 10 s");
}

#[test]
fn data_are_moved_by_one_address_or_by_a_list() {
    let image = TestedImage::new("moved", "");
    let mut channel = image.device.channel().unwrap();
    let (one, two) = (image.store(0, &[1; 512]), image.store(4096, &[2; 1024]));
    let list = [one, two];
    assert_eq!(
        complete(&mut *channel, request(Operation::Write, 5, 3, 2), &list),
        IoStatus::SUCCESS
    );
    let bytes = image.fake.bytes();
    assert_eq!((&bytes[2560..3072], &bytes[3072..4096]), (&[1; 512][..], &[2; 1024][..]));
    let back = [image.store(8192, &[0; 1024]), image.store(16_384, &[0; 512])];
    assert_eq!(
        complete(&mut *channel, request(Operation::Read, 5, 3, 2), &back),
        IoStatus::SUCCESS
    );
    assert_eq!(image.load(back[0]), [[1; 512], [2; 512]].concat());
    assert_eq!(image.load(back[1]), [2; 512]);
    let joined = [image.store(0, &[3; 512]), image.store(512, &[4; 512])];
    complete(&mut *channel, request(Operation::Write, 0, 2, 2), &joined);
    let calls = image.fake.take_calls();
    assert_eq!(calls, [("writev", 2), ("readv", 2), ("write", 1)], "adjacent segments are one");
}

#[test]
fn operations_without_data_reach_librbd() {
    let image = TestedImage::new("without-data", "");
    let mut channel = image.device.channel().unwrap();
    let ones = image.store(0, &[1; 1024]);
    complete(&mut *channel, request(Operation::Write, 0, 2, 1), &[ones]);
    for operation in [Operation::Flush, Operation::Deallocate, Operation::WriteZeroes] {
        assert_eq!(complete(&mut *channel, request(operation, 0, 1, 0), &[]), IoStatus::SUCCESS);
    }
    let calls: Vec<_> = image.fake.take_calls().iter().map(|(name, _)| *name).collect();
    assert_eq!(calls, ["write", "flush", "discard", "write_zeroes"]);
    assert_eq!(image.fake.bytes()[..1024], [[0; 512], [1; 512]].concat());
    let forced = Request { flags: RequestFlags::FUA, ..request(Operation::Write, 9, 1, 1) };
    let one = ones.slice(0, 512).unwrap();
    assert_eq!(complete(&mut *channel, forced, &[one]), IoStatus::SUCCESS, "no cache holds it");
}

#[test]
fn compare_and_write_changes_nothing_if_a_byte_differs() {
    let image = TestedImage::new("compared", "");
    let mut channel = image.device.channel().unwrap();
    let compare = |channel: &mut dyn IoChannel, list: &[Segment]| {
        complete(channel, request(Operation::CompareAndWrite, 4, 1, list.len()), list)
    };
    let zeroes_then_ones = image.store(0, &[[0; 512], [1; 512]].concat());
    assert_eq!(compare(&mut *channel, &[zeroes_then_ones]), IoStatus::SUCCESS);
    assert_eq!(compare(&mut *channel, &[zeroes_then_ones]), IoStatus::COMPARE_FAILURE);
    assert_eq!(image.fake.bytes()[2048..2560], [1; 512]);
    // The expected bytes in two segments, the new ones in two others.
    let pieces = [
        image.store(0, &[1; 256]),
        image.store(8192, &[1; 256]),
        image.store(1024, &[2; 100]),
        image.store(16_384, &[2; 412]),
    ];
    assert_eq!(compare(&mut *channel, &pieces), IoStatus::SUCCESS);
    assert_eq!(image.fake.bytes()[2048..2560], [2; 512]);
    let apart = [image.store(0, &[2; 512]), image.store(8192, &[3; 512])];
    assert_eq!(compare(&mut *channel, &apart), IoStatus::SUCCESS);
    assert_eq!(image.fake.bytes()[2048..2560], [3; 512]);
}

#[test]
fn compare_and_write_across_two_objects_is_rejected() {
    let image = TestedImage::new("crossing", "");
    let mut channel = image.device.channel().unwrap();
    let list = [image.store(0, &[0; 2048])];
    let blocks = OBJECT_BYTES / 512;
    let crossing = request(Operation::CompareAndWrite, blocks - 1, 2, 1);
    assert_eq!(complete(&mut *channel, crossing, &list), IoStatus::INVALID_FIELD);
    let inside = request(Operation::CompareAndWrite, blocks - 2, 2, 1);
    assert_eq!(complete(&mut *channel, inside, &list), IoStatus::SUCCESS);
}

#[test]
fn requests_complete_in_the_order_of_librbd() {
    let image = TestedImage::new("order", "");
    let mut channel = image.device.channel().unwrap();
    image.fake.hold();
    let list = [image.store(0, &[7; 512])];
    let requests: Vec<Request> = (0..40).map(|lba| request(Operation::Write, lba, 1, 1)).collect();
    assert_eq!(channel.submit(Instant::default(), &requests, &list), 40);
    channel.flush_submissions();
    let mut batch = CompletionBatch::with_capacity(64);
    assert_eq!(channel.poll(Instant::default(), &mut batch), 0, "none has completed");
    image.fake.release();
    let tokens: Vec<u64> = poll(&mut *channel, 40).iter().map(|found| found.token).collect();
    assert_eq!(tokens, (0..40).rev().collect::<Vec<_>>(), "the fake completes the last one first");
}

#[test]
fn invalid_requests_are_rejected_without_librbd() {
    let image = TestedImage::new("invalid", "");
    let mut channel = image.device.channel().unwrap();
    let list = [image.store(0, &[0; 1024])];
    let end = IMAGE_BYTES as u64 / 512;
    for (request, status) in [
        (request(Operation::Read, end, 1, 1), IoStatus::LBA_OUT_OF_RANGE),
        (request(Operation::Read, u64::MAX, 1, 1), IoStatus::LBA_OUT_OF_RANGE),
        (request(Operation::Read, 0, 1, 1), IoStatus::INVALID_FIELD),
        (request(Operation::Write, 0, 2, 3), IoStatus::INVALID_FIELD),
        (request(Operation::Copy, 0, 1, 0), IoStatus::INVALID_OPCODE),
    ] {
        assert_eq!(complete(&mut *channel, request, &list), status, "{request:?}");
    }
    let stray = Segment { offset: 1 << 40, ..list[0] };
    let read = request(Operation::Read, 0, 2, 1);
    assert_eq!(complete(&mut *channel, read, &[stray]), IoStatus::DATA_TRANSFER_ERROR);
    assert_eq!(image.fake.take_calls(), []);
}

#[test]
fn full_channel_returns_requests_and_accepts_them_later() {
    let image = TestedImage::new("full", "");
    let mut channel = image.device.channel().unwrap();
    image.fake.hold();
    let list = [image.store(0, &[0; 512])];
    let many: Vec<Request> = (0..2000).map(|lba| request(Operation::Read, lba, 1, 1)).collect();
    let accepted = channel.submit(Instant::default(), &many, &list);
    assert!((1..2000).contains(&accepted), "{accepted}");
    image.fake.release();
    assert_eq!(poll(&mut *channel, accepted).len(), accepted);
    let status = complete(&mut *channel, many[accepted], &list);
    assert_eq!(status, IoStatus::SUCCESS);
}

#[test]
fn sleeping_thread_is_woken_by_a_completion() {
    let image = TestedImage::new("woken", "");
    let mut channel = image.device.channel().unwrap();
    image.fake.hold();
    let list = [image.store(0, &[0; 512])];
    channel.submit(Instant::default(), &[request(Operation::Read, 3, 1, 1)], &list);
    assert!(!channel.arm(), "nothing has completed");
    assert!(!is_readable(&*channel));
    image.fake.release();
    assert!(is_readable(&*channel));
    channel.disarm();
    assert_eq!(poll(&mut *channel, 1)[0].token, 3);
    // The thread looks once more before it sleeps.
    channel.poll(Instant::default(), &mut CompletionBatch::with_capacity(1));
    assert!(!channel.arm() && !is_readable(&*channel), "the signal is consumed");
}

#[test]
fn signal_after_its_completion_was_taken_keeps_no_idle_thread_awake() {
    let image = TestedImage::new("late-signal", "");
    let mut channel = image.device.channel().unwrap();
    image.fake.hold();
    image.fake.delay_signals(true);
    let list = [image.store(0, &[0; 512])];
    channel.submit(Instant::default(), &[request(Operation::Read, 3, 1, 1)], &list);
    channel.flush_submissions();
    image.fake.release();
    let mut batch = CompletionBatch::with_capacity(1);
    assert_eq!(channel.poll(Instant::default(), &mut batch), 1, "found without a signal");
    channel.poll(Instant::default(), &mut batch);
    assert!(!channel.arm());
    channel.disarm();
    image.fake.delay_signals(false);
    batch.clear();
    assert_eq!(channel.poll(Instant::default(), &mut batch), 0);
    assert!(!channel.arm() && !is_readable(&*channel));
}

#[test]
fn two_threads_share_the_channel_of_an_image() {
    let image = TestedImage::new("shared", "");
    let mut channels = [image.device.channel().unwrap(), image.device.channel().unwrap()];
    assert_eq!(image.fake.handles.load(Ordering::Relaxed), 1, "one client of the cluster");
    image.fake.hold();
    let list = [image.store(0, &[0; 512])];
    for (lba, channel) in (1..).zip(&mut channels) {
        channel.submit(Instant::default(), &[request(Operation::Read, lba, 1, 1)], &list);
        channel.flush_submissions();
    }
    image.fake.release();
    for (lba, channel) in (1..).zip(&mut channels) {
        assert_eq!(poll(&mut **channel, 1)[0].token, lba);
    }
}

#[test]
fn dropped_channel_waits_for_late_completions() {
    let image = TestedImage::new("late", "");
    let mut channel = image.device.channel().unwrap();
    image.fake.hold();
    let list = [image.store(0, &[0; 512])];
    channel.submit(Instant::default(), &[request(Operation::Read, 3, 1, 1)], &list);
    channel.flush_submissions();
    assert_eq!(image.fake.held_count(), 1);
    let fake = Arc::clone(&image.fake);
    let releases = tenmil_linux::NamedThread::spawn("late", None, move |_| {
        tenmil_linux::named_thread::sleep(Span::from_ms(50));
        let held = fake.held_count();
        fake.release();
        held
    });
    let releases = releases.unwrap();
    let fake = Arc::clone(&image.fake);
    drop(channel);
    drop(image);
    assert_eq!(releases.join(), 1, "the request was in flight while the channel was dropped");
    assert_eq!(fake.handles.load(Ordering::Relaxed), 0, "and the image is closed after it");
}

#[test]
fn full_pool_fails_a_write_and_keeps_the_device() {
    let image = TestedImage::new("full-pool", "");
    let mut channel = image.device.channel().unwrap();
    let list = [image.store(0, &[0; 512])];
    image.fake.errno.store(libc::ENOSPC, Ordering::Relaxed);
    let write = request(Operation::Write, 0, 1, 1);
    assert_eq!(complete(&mut *channel, write, &list), IoStatus::CAPACITY_EXCEEDED);
    image.fake.errno.store(0, Ordering::Relaxed);
    assert_eq!(complete(&mut *channel, write, &list), IoStatus::SUCCESS);
    assert_eq!(image.device.failure_reason(), None);
}

/// The device is removed from a bdev on it, with a reason that contains `reason`.
fn assert_removed(image: &TestedImage, cause: impl FnOnce(&mut dyn IoChannel), reason: &str) {
    let options = BdevOptions::new(Clock::start(), 7);
    let bdev = Bdev::new("above", Arc::clone(&image.device), options).unwrap();
    let descriptor = bdev.open(Claim::WriteOnce, "test").unwrap();
    let mut channel = descriptor.channel().unwrap();
    cause(&mut *channel);
    wait_until("the device is removed", || descriptor.next_event() == Some(BdevEvent::Removed));
    let found = image.device.failure_reason().unwrap();
    assert!(found.contains(reason), "{found}");
    let read = request(Operation::Read, 0, 1, 1);
    let list = [image.memory.slice(0, 512).unwrap()];
    assert_eq!(complete(&mut *channel, read, &list), IoStatus::NO_DEVICE);
}

#[test]
fn blocklisted_client_loses_its_devices_and_the_next_one_connects_anew() {
    let image = TestedImage::new("blocklisted", "?user=blocklisted");
    fake::create("blocklisted-2", IMAGE_BYTES);
    let fails = |channel: &mut dyn IoChannel| {
        image.fake.errno.store(libc::ESHUTDOWN, Ordering::Relaxed);
        let list = [image.memory.slice(0, 512).unwrap()];
        let write = request(Operation::Write, 0, 1, 1);
        assert_eq!(complete(channel, write, &list), IoStatus::NO_DEVICE);
    };
    assert_removed(&image, fails, "this client is blocklisted");
    let second = open("rbd:p/blocklisted-2?user=blocklisted").unwrap();
    assert!(second.0.medium.failure_reason().is_none());
    assert_eq!(fake::connect_count("client.blocklisted"), 2, "the cluster rejects the first one");
}

#[test]
fn lost_lock_of_an_idle_image_removes_the_device() {
    let image = TestedImage::new("lock-lost", "");
    assert!(image.fake.is_locked());
    assert_removed(&image, |_| image.fake.break_lock(), "exclusive lock of the image is lost");
}

#[test]
fn resize_by_another_client_reaches_the_bdev_above() {
    let image = TestedImage::new("resized", "");
    let options = BdevOptions::new(Clock::start(), 7);
    let bdev = Bdev::new("above", Arc::clone(&image.device), options).unwrap();
    let descriptor = bdev.open(Claim::WriteOnce, "test").unwrap();
    let mut channel = descriptor.channel().unwrap();
    image.fake.resize(2 * IMAGE_BYTES);
    let block_count = 2 * IMAGE_BYTES as u64 / 512;
    wait_until("the device is resized", || {
        descriptor.next_event() == Some(BdevEvent::Resized { block_count })
    });
    let list = [image.store(0, &[5; 512])];
    let last = request(Operation::Write, block_count - 1, 1, 1);
    assert_eq!(complete(&mut *channel, last, &list), IoStatus::SUCCESS);
    image.fake.resize(IMAGE_BYTES);
    wait_until("the device is shortened", || image.device.limits().block_count < block_count);
    assert_eq!(complete(&mut *channel, last, &list), IoStatus::LBA_OUT_OF_RANGE);
}

#[test]
fn device_resizes_its_image() {
    let image = TestedImage::new("grown", "?block=4k");
    assert!(image.device.is_resizable());
    image.device.resize(2048).unwrap();
    assert_eq!(image.fake.bytes().len(), 8 << 20);
    assert_eq!(image.device.limits().block_count, 2048);
}

#[test]
fn snapshot_is_read_only_and_has_an_identity_of_its_own() {
    let image = TestedImage::new("snapped", "");
    let (snapshot, _regions) = open("rbd:p/snapped@s").unwrap();
    let limits = snapshot.medium.limits();
    assert!(!limits.operations.has(Operation::Write) && limits.operations.has(Operation::Read));
    assert!(snapshot.existing.is_empty(), "nothing can be lost");
    let identity = "rbd.11111111-2222-3333-4444-555555555555.3.10a7";
    assert_eq!(image.device.identity().as_deref(), Some(identity));
    assert_eq!(snapshot.medium.identity(), Some(format!("{identity}@9")));
    assert!(snapshot.medium.resize(1).is_err());
}

#[test]
fn allocation_is_that_of_the_image() {
    let image = TestedImage::new("allocated", "");
    let mut channel = image.device.channel().unwrap();
    let list = [image.store(0, &[1; 8192])];
    complete(&mut *channel, request(Operation::Write, 16, 16, 1), &list);
    let status = |lba| {
        let found = image.device.block_status(lba).unwrap();
        (found.kind, found.blocks)
    };
    assert_eq!(status(0), (ExtentKind::Hole, 16));
    assert_eq!(status(16), (ExtentKind::Data, 16));
    assert_eq!(status(32), (ExtentKind::Hole, IMAGE_BYTES as u64 / 512 - 32));
    assert_eq!(status(IMAGE_BYTES as u64 / 512).1, 0);
}

#[test]
fn locked_image_is_refused_to_a_second_writer_and_open_to_readers() {
    let image = TestedImage::new("locked", "");
    let refused = open("rbd:p/locked?user=other").map(drop).unwrap_err();
    assert_eq!(refused.category, ErrorCategory::Remote);
    assert!(refused.text.contains("another client keeps the exclusive lock"), "{refused}");
    assert!(refused.hint().unwrap().contains("read-only=yes"), "{refused:?}");
    open("rbd:p/locked?read-only=yes").unwrap();
    open("rbd:p/locked?lock=auto").unwrap();
    drop(image);
    open("rbd:p/locked?user=other").map(drop).unwrap();
}

#[test]
fn image_whose_options_cache_writes_is_rejected() {
    let fake = fake::create("cached", IMAGE_BYTES);
    fake.set_option(c"rbd_cache", c"true");
    fake.set_option(c"rbd_cache_policy", c"writearound");
    let refused = open("rbd:p/cached").map(drop).unwrap_err();
    assert!(refused.text.contains("rbd_cache_policy is writearound"), "{refused}");
    let through = fake::create("cached-through", IMAGE_BYTES);
    through.set_option(c"rbd_cache", c"true");
    through.set_option(c"rbd_cache_policy", c"writethrough");
    open("rbd:p/cached-through?cache=writethrough").unwrap();
    let local = fake::create("cached-local", IMAGE_BYTES);
    local.set_option(c"rbd_persistent_cache_mode", c"ssd");
    let refused = open("rbd:p/cached-local").map(drop).unwrap_err();
    assert!(refused.text.contains("rbd_persistent_cache_mode is ssd"), "{refused}");
}

#[test]
fn errors_of_opening_name_what_is_missing() {
    fake::create("there", IMAGE_BYTES);
    for (uri, category, expected) in [
        (
            "rbd:none/there",
            ErrorCategory::Usage,
            "open pool none: the cluster has none of that name",
        ),
        ("rbd:p/absent", ErrorCategory::Usage, "open the image: the cluster has none"),
        (
            "rbd:p/there?conf=/missing",
            ErrorCategory::Environment,
            "configuration of Ceph, /missing",
        ),
        ("rbd:p/there?conf-unheard-of=1", ErrorCategory::Usage, "the option unheard_of of Ceph"),
        ("rbd:p/there?conf-no-quorum=1", ErrorCategory::Remote, "no quorum"),
    ] {
        let refused = open(uri).map(drop).unwrap_err();
        assert_eq!(refused.category, category, "{refused}");
        assert!(refused.text.starts_with("open rbd:"), "{refused}");
        assert!(refused.text.contains(expected), "{refused}");
    }
}

#[test]
fn many_images_share_one_connection_and_one_thread() {
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let images: Vec<String> = (0..200).map(|index| format!("many-{index}")).collect();
    let open_one = |name: &String| {
        fake::create(name, 4096);
        open(&format!("rbd:p/{name}?user=many")).unwrap()
    };
    let (first, rest) = images.split_first().unwrap();
    let first = open_one(first);
    let before = threads();
    let rest: Vec<_> = rest.iter().map(open_one).collect();
    assert_eq!(fake::connect_count("client.many"), 1);
    // Other tests run beside this one, with a few threads each.
    assert!(threads() < before + 100, "{} threads were {before}", threads());
    drop((first, rest));
}
