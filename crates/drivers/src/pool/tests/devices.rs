//! Pools over several devices: extended, moved and missing ones.

#![expect(clippy::disallowed_methods, reason = "it makes, moves and breaks what lies there")]

use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, ErrorCategory, Instant, IoChannel, IoStatus,
    Limits, Operation, Request, Segment,
};
use tenmil_linux::{NamedThread, StopFlag};

use super::{PoolFixture, VolumeOp, VolumeTestChannel};
use crate::pool::{
    CreateResult, DeviceInfo, OpenPool, VolumeRef, check_closed_pool, create_on_devices,
    create_pool, open_and_grow, rescue_pool,
};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceType, OpenedDevice, Opener};

/// A pool of this size on the file `pool`, and other files beside it.
fn pool_fixture(size: &str) -> PoolFixture {
    PoolFixture::new(size)
}

impl PoolFixture {
    pub(super) fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn file_uri(&self, name: &str) -> Uri {
        format!("file:{}?engine=threads", self.path(name).display()).parse().unwrap()
    }

    /// A file that is created when it is opened.
    pub(super) fn new_file_uri(&self, name: &str, size: &str) -> Uri {
        self.file_uri(name).with_option("size", size)
    }

    pub(super) fn pool_ref(&self) -> VolumeRef {
        VolumeRef::pool_on(&self.device_uri().parse().unwrap())
    }

    fn try_open(&self) -> Result<Arc<OpenPool>, Error> {
        OpenPool::open(&self.opener(), &self.pool_ref())
    }

    pub(super) fn add_device(&self, name: &str, size: &str) {
        let added = [self.new_file_uri(name, size)];
        self.open_pool().grow_pool(&self.opener(), &added, false).unwrap();
    }

    /// The error of adding a device.
    fn grow_error(&self, uri: &Uri, overwrite: bool) -> String {
        let error =
            self.open_pool().grow_pool(&self.opener(), std::slice::from_ref(uri), overwrite);
        error.unwrap_err().to_string()
    }

    pub(super) fn set_file_len(&self, name: &str, len: u64) {
        let file = std::fs::OpenOptions::new().write(true).open(self.path(name)).unwrap();
        file.set_len(len).unwrap();
    }

    fn device_sizes(&self) -> Vec<u64> {
        self.open_pool().devices().iter().map(|device| device.blocks).collect()
    }
}

/// Writes each of the blocks with its own byte, 32 at a time.
pub(super) fn write_fill_bytes(hand: &mut VolumeTestChannel, blocks: std::ops::Range<u64>) {
    for block in blocks.step_by(32) {
        hand.write(block, 32, fill_byte_of(block));
    }
}

fn fill_byte_of(block: u64) -> u8 {
    u8::try_from(block / 32 % 250 + 1).unwrap()
}

/// Checks that each block holds its byte.
fn check_fill_bytes(hand: &mut VolumeTestChannel, blocks: std::ops::Range<u64>) {
    for block in blocks.step_by(32) {
        assert_eq!(hand.read(block, 32), [fill_byte_of(block); 32], "from block {block} on");
    }
}

#[test]
fn pool_over_three_files_opens_by_its_first() {
    let bench = pool_fixture("8m");
    let first: Uri = bench.file_uri("one");
    let others = [
        bench.new_file_uri("two", "4m").with_option("block", "4k"),
        bench.new_file_uri("three", "3m"),
    ];
    let of = (&first.clone().with_option("size", "4m"), &others[..]);
    let made = create_on_devices(&bench.opener(), of, "wide", false).unwrap();
    assert_eq!(made, CreateResult { blocks: 1024 + 1023 + 767, was_there: false });
    let again = create_on_devices(&bench.opener(), (&first, &others), "wide", false).unwrap();
    assert_eq!(again, CreateResult { blocks: 2814, was_there: true });
    let place = VolumeRef::pool_on(&first);
    let open = OpenPool::open(&bench.opener(), &place).unwrap();
    let (name, blocks) = ("v".into(), 2400);
    open.execute_volume_op(VolumeOp::Create { name, blocks, unit: 16, uuid: 1, checksums: false })
        .unwrap();
    let opened = bench.opener().open(&place.uri_of_other_volume("v")).unwrap();
    let said = &opened.description;
    assert!(["one", "two", "three"].iter().all(|name| said.contains(name)), "{said}");
    let mut hand = bench.volume_client(&*opened.medium, 0);
    write_fill_bytes(&mut hand, 0..2400);
    check_fill_bytes(&mut hand, 0..2400);
    assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    drop((hand, opened, open));
    let opened = bench.opener().open(&place.uri_of_other_volume("v")).unwrap();
    check_fill_bytes(&mut bench.volume_client(&*opened.medium, 0), 0..2400);
    drop(opened);
    let checked = check_closed_pool(&bench.opener(), &place).unwrap();
    assert!(checked.damaged.is_empty() && checked.report.findings.is_empty());
    let found: Vec<(u32, u64)> =
        checked.devices.iter().map(|device| (device.number, device.blocks)).collect();
    assert_eq!(found, [(0, 1024), (1, 1023), (2, 767)]);
}

#[test]
fn rejected_device_creates_no_pool() {
    let bench = pool_fixture("8m");
    std::fs::write(bench.path("full"), vec![7; 4 << 20]).unwrap();
    let first = bench.new_file_uri("one", "4m");
    let create = |others: &[Uri]| {
        create_on_devices(&bench.opener(), (&first, others), "wide", false).unwrap_err().to_string()
    };
    let refused = create(&[bench.new_file_uri("two", "4m"), bench.file_uri("full")]);
    assert!(
        refused.contains("would destroy what is there") && refused.contains("full"),
        "{refused}"
    );
    let refused = create(&[bench.new_file_uri("small", "2m")]);
    assert!(refused.contains("has 512 blocks of 4 KiB, expected 513 at least"), "{refused}");
    for name in ["one", "two", "full"] {
        let none = OpenPool::open(&bench.opener(), &VolumeRef::pool_on(&bench.file_uri(name)))
            .unwrap_err();
        assert!(none.to_string().contains("no superblock can be read"), "{none}");
    }
}

#[test]
fn pool_grows_under_load() {
    let bench = pool_fixture("8m");
    bench.create_volume("a", 16_000);
    let opened = bench.open_volume("a").unwrap();
    // Each thread writes its own blocks repeatedly, and reads them.
    let body = |number: u32| {
        let mut hand = bench.volume_client(&*opened.medium, number);
        move |stop: &StopFlag| {
            let mut rounds = 0_u64;
            while !stop.is_stopped() {
                let first = u64::from(number) * 64;
                write_fill_bytes(&mut hand, first..first + 64);
                check_fill_bytes(&mut hand, first..first + 64);
                rounds += 1;
            }
            (hand, rounds)
        }
    };
    let workers: Vec<NamedThread<(VolumeTestChannel, u64)>> =
        (0..3).map(|number| NamedThread::spawn("worker", None, body(number)).unwrap()).collect();
    let mut hand = bench.volume_client(&*opened.medium, 4);
    write_fill_bytes(&mut hand, 1000..2280);
    bench.add_device("b", "8m");
    assert_eq!(bench.device_sizes(), [2048, 2047]);
    write_fill_bytes(&mut hand, 3000..4600);
    // The last device is extended, and then the first one.
    bench.set_file_len("b", 12 << 20);
    let grown = bench.open_pool().grow_pool(&bench.opener(), &[], false).unwrap();
    assert_eq!((grown.before, grown.blocks), (4095, 4095 + 1024));
    write_fill_bytes(&mut hand, 5000..5960);
    bench.set_file_len("pool", 14 << 20);
    bench.open_pool().grow_pool(&bench.opener(), &[bench.new_file_uri("c", "4m")], false).unwrap();
    assert_eq!(bench.device_sizes(), [3584, 3071, 1023]);
    write_fill_bytes(&mut hand, 7000..8920);
    for blocks in [1000..2280, 3000..4600, 5000..5960, 7000..8920] {
        check_fill_bytes(&mut hand, blocks);
    }
    let mut hands = Vec::new();
    for worker in workers {
        worker.stop_flag().set();
        let (hand, rounds) = worker.join();
        assert!(rounds > 0);
        hands.push(hand);
    }
    // Channels opened before read the blocks of every device, from their own map and through the pool
    // thread.
    for hand in &mut hands {
        for _ in 0..2 {
            check_fill_bytes(hand, 3000..4600);
            check_fill_bytes(hand, 7000..8920);
        }
    }
    drop((hand, hands, opened));
    assert!(bench.check_finds_nothing());
    let again = bench.open_volume("a").unwrap();
    let mut hand = bench.volume_client(&*again.medium, 0);
    for blocks in [1000..2280, 3000..4600, 5000..5960, 7000..8920] {
        check_fill_bytes(&mut hand, blocks);
    }
}

#[test]
fn parented_volumes_work_while_the_pool_grows() {
    let bench = pool_fixture("4m");
    std::fs::write(bench.path("golden"), vec![5; 4096 * 1200]).unwrap();
    let open = bench.open_pool();
    let golden = bench.file_uri("golden");
    let parent = open.open_and_fingerprint_parent(&bench.opener(), &golden).unwrap();
    let (name, unit, uuid, blocks) = ("g".into(), 16, 3, 1200);
    let change = VolumeOp::CreateOver { name, blocks, unit, uuid, checksums: false, parent };
    open.execute_volume_op(change).unwrap();
    let opened = bench.open_volume("g").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    assert_eq!(hand.read(100, 3), [5; 3]);
    write_fill_bytes(&mut hand, 0..640);
    bench.add_device("b", "8m");
    write_fill_bytes(&mut hand, 640..960);
    check_fill_bytes(&mut hand, 0..960);
    assert_eq!(hand.read(1150, 50), [5; 50], "and its parent is where it was");
    // Decoupling continues, too, while the pool is extended.
    let mut watched = 0;
    let opener = bench.opener();
    open.decouple(&opener, "g", None, &mut |_| {
        watched += 1;
        if watched == 1 {
            open.grow_pool(&opener, &[bench.new_file_uri("c", "4m")], false).unwrap();
        }
        true
    })
    .unwrap();
    check_fill_bytes(&mut hand, 0..960);
    for block in (960..1200).step_by(40) {
        assert_eq!(hand.read(block, 40), [5; 40], "from block {block} on");
    }
    drop((hand, opened, open));
    assert!(bench.check_finds_nothing());
}

#[test]
fn adding_a_present_device_changes_nothing() {
    let bench = pool_fixture("8m");
    bench.add_device("b", "4m");
    let before = bench.open_pool().generation();
    let [b, pool] = [bench.file_uri("b"), bench.file_uri("pool")];
    let grown =
        open_and_grow(&bench.opener(), &bench.pool_ref(), &[b.clone(), pool], false).unwrap();
    assert_eq!((grown.before, grown.blocks, grown.were_there), (3071, 3071, vec![1, 0]));
    let reported = |number, uri: &Uri, blocks| DeviceInfo { number, uri: uri.to_string(), blocks };
    let expected = [reported(0, &bench.device_uri().parse().unwrap(), 2048), reported(1, &b, 1023)];
    assert_eq!(grown.devices, expected);
    assert_eq!(bench.open_pool().generation(), before);
}

#[test]
fn foreign_device_is_rejected_by_name() {
    let bench = pool_fixture("8m");
    bench.add_device("b", "4m");
    std::fs::copy(bench.path("b"), bench.path("b.old")).unwrap();
    let open = || bench.try_open().unwrap_err().to_string();
    let rename = |from: &str, to: &str| std::fs::rename(bench.path(from), bench.path(to)).unwrap();

    rename("b", "gone");
    let error = bench.try_open().unwrap_err();
    assert!(error.to_string().contains("device 1, file:") && error.to_string().contains("/b"));
    assert!(error.hint().unwrap().contains("--device 1=URI"), "{error:?}");
    std::fs::write(bench.path("b"), vec![0; 4 << 20]).unwrap();
    assert!(
        open().contains("its label cannot be read: it does not begin like metadata"),
        "{}",
        open()
    );
    create_pool(&bench.opener(), &bench.file_uri("b"), "other", true).unwrap();
    assert!(open().contains("it is the first device of pool"), "{}", open());
    std::fs::copy(bench.path("gone"), bench.path("b")).unwrap();
    bench.set_file_len("b", 3 << 20);
    assert!(open().contains("it has 3145728 bytes, expected 4194304 at least"), "{}", open());

    // A further device alone is no pool, and names the pool it belongs to.
    let place = VolumeRef::pool_on(&bench.file_uri("gone"));
    let error = OpenPool::open(&bench.opener(), &place).unwrap_err();
    let said = error.to_string();
    assert!(said.contains("it is device 1 of pool `tests`") && said.contains("expected the first"));
    assert!(error.hint().unwrap().contains(&bench.path("pool").display().to_string()));
    rename("gone", "b");

    // A device of another pool, one that is present under another name, and one that is given twice.
    let other = bench.new_file_uri("x", "4m");
    let more = bench.new_file_uri("y", "4m");
    create_on_devices(&bench.opener(), (&other, &[more]), "other", false).unwrap();
    let refused = bench.grow_error(&bench.file_uri("y"), false);
    assert!(refused.contains("would destroy what is there"), "{refused}");
    let refused = bench.grow_error(&bench.file_uri("b.old"), true);
    assert!(
        refused.contains("it is device 1 of pool `tests`") && refused.contains("a copy of that")
    );
    let twice = [bench.new_file_uri("z", "4m"), bench.new_file_uri("z", "4m")];
    let refused =
        bench.open_pool().grow_pool(&bench.opener(), &twice, false).unwrap_err().to_string();
    assert!(refused.contains("given twice") || refused.contains("not open elsewhere"), "{refused}");
    assert_eq!(bench.device_sizes(), [2048, 1023]);
    rename("b", "b.there");
    rename("y", "b");
    assert!(open().contains("it is device 1 of pool `other`"), "{}", open());
}

#[test]
fn device_with_a_stale_label_is_rejected() {
    let bench = pool_fixture("8m");
    std::fs::copy(bench.path("pool"), bench.path("pool.before")).unwrap();
    bench.add_device("b", "4m");
    std::fs::rename(bench.path("b"), bench.path("b.old")).unwrap();
    // The first device is as it was, and another one becomes device 1.
    std::fs::rename(bench.path("pool.before"), bench.path("pool")).unwrap();
    bench.add_device("b", "4m");
    std::fs::rename(bench.path("b.old"), bench.path("b")).unwrap();
    let error = bench.try_open().unwrap_err().to_string();
    assert!(error.contains("its label is an old one"), "{error}");
}

#[test]
fn moved_device_is_found_at_its_new_location() {
    let bench = pool_fixture("8m");
    bench.add_device("b", "4m");
    std::fs::rename(bench.path("b"), bench.path("elsewhere")).unwrap();
    assert!(bench.try_open().is_err());
    let mut place = bench.pool_ref();
    place.moved = vec![(1, bench.file_uri("elsewhere"))];
    let open = OpenPool::open(&bench.opener(), &place).unwrap();
    assert_eq!(open.record_device_uris(), Ok(true));
    assert_eq!(open.record_device_uris(), Ok(false));
    // Again while the pool is open: the file counts, not its name.
    std::fs::rename(bench.path("elsewhere"), bench.path("back")).unwrap();
    std::fs::copy(bench.path("back"), bench.path("copy")).unwrap();
    let note =
        |number, name: &str| open.record_device_uri(&bench.opener(), number, &bench.file_uri(name));
    assert_eq!([(); 2].map(|()| note(1, "back")), [Ok(true), Ok(false)]);
    for (number, name, found) in [
        (1, "copy", "is not device 1 of it"),
        (1, "pool", "is not device 1 of it"),
        (0, "pool", "it has no device 0"),
        (2, "back", "it has no device 2, expected 1 at most"),
    ] {
        let refused = note(number, name).unwrap_err();
        assert!(refused.to_string().contains(found), "{refused}");
    }
    std::fs::rename(bench.path("back"), bench.path("elsewhere")).unwrap();
    assert_eq!(note(1, "elsewhere"), Ok(true));
    drop(open);
    let open = bench.try_open().unwrap();
    assert_eq!(open.devices()[1].uri, bench.file_uri("elsewhere").to_string());
    // A device is identified by its label, not by its place.
    std::fs::write(bench.path("b"), vec![0; 4 << 20]).unwrap();
    drop(open);
    place.moved = vec![(1, bench.file_uri("b"))];
    assert!(OpenPool::open(&bench.opener(), &place).is_err());
    assert!(bench.try_open().is_ok());
}

#[test]
fn failed_label_write_leaves_the_pool_unchanged() {
    let bench = pool_fixture("8m");
    let b = bench.new_file_uri("b", "4m").to_string();
    for rule in ["error:write@0-7", "error:flush", "error:write@8-15"] {
        let broken: Uri = format!("fault:[{b}]?rule={rule}").parse().unwrap();
        let refused = bench.grow_error(&broken, true);
        assert!(refused.contains("write its label: Write Fault"), "{rule}: {refused}");
        assert_eq!(bench.device_sizes(), [2048], "{rule}");
    }
    bench.open_pool().grow_pool(&bench.opener(), &[bench.file_uri("b")], true).unwrap();
    assert_eq!(bench.device_sizes(), [2048, 1023]);
}

#[test]
fn uncommitted_device_label_is_overwritten() {
    let bench = pool_fixture("8m");
    std::fs::copy(bench.path("pool"), bench.path("before")).unwrap();
    bench.add_device("b", "4m");
    // As after a power failure before the commit.
    std::fs::rename(bench.path("before"), bench.path("pool")).unwrap();
    assert_eq!(bench.device_sizes(), [2048]);
    bench.open_pool().grow_pool(&bench.opener(), &[bench.file_uri("b")], false).unwrap();
    assert_eq!(bench.device_sizes(), [2048, 1023]);
    assert!(bench.check_finds_nothing());
}

#[test]
fn device_with_stricter_limits_is_added_only_without_open_volumes() {
    let bench = pool_fixture("8m");
    bench.create_volume("a", 4000);
    let weak: Uri = "ram:8m".parse().unwrap();
    let opened = bench.open_volume("a").unwrap();
    let error = bench
        .open_pool()
        .grow_pool(&bench.opener(), std::slice::from_ref(&weak), false)
        .unwrap_err();
    assert!(error.to_string().contains("while volumes of the pool are open"), "{error}");
    assert_eq!((error.category(), bench.device_sizes()), (ErrorCategory::Usage, vec![2048]));
    drop(opened);
    let store = bench.open_pool();
    store.grow_pool(&bench.opener(), &[weak], false).unwrap();
    let opened = bench.open_volume("a").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    write_fill_bytes(&mut hand, 0..3008);
    check_fill_bytes(&mut hand, 0..3008);
}

/// Opens `log:[URI]`, which records the requests to several devices in order.
#[derive(Clone, Default)]
struct LogDeviceKind(Arc<Mutex<Vec<(String, Operation, u64)>>>);

struct LoggedDevice(LogDeviceKind, String, Arc<dyn BlockDevice>);

struct LoggedChannel(LogDeviceKind, String, Box<dyn IoChannel>);

impl DeviceType for LogDeviceKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let child = uri.single_child()?;
        let below = opener.open(child)?;
        let name = child.path().rsplit('/').next().unwrap().to_owned();
        let logged = LoggedDevice(self.clone(), name, Arc::clone(&below.medium));
        Ok(below.with_device_stacked_on(Arc::new(logged), "logged"))
    }
}

impl BlockDevice for LoggedDevice {
    fn limits(&self) -> Limits {
        self.2.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(LoggedChannel(self.0.clone(), self.1.clone(), self.2.channel()?)))
    }
}

impl IoChannel for LoggedChannel {
    fn limits(&self) -> &Limits {
        self.2.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut log = self.0.0.lock().unwrap();
        let taken = self.2.submit(now, requests, segments);
        let one = |request: &Request| (self.1.clone(), request.operation, request.lba);
        log.extend(requests[..taken].iter().map(one));
        taken
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.2.poll(now, completions)
    }
}

impl ChannelWakeup for LoggedChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.2)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.2)
    }
}

#[test]
fn device_label_is_durable_before_the_superblock() {
    let bench = pool_fixture("8m");
    let log = LogDeviceKind::default();
    let (regions, clock, more) = (&bench.regions, bench.clock, [("log", &log as &dyn DeviceType)]);
    let opener = Opener { regions, clock, seed: 1, kinds: &crate::tests::device_types_with(&more) };
    let [a, b] = ["pool", "b"].map(|name| {
        let file = bench.file_uri(name);
        let file = if name == "b" { file.with_option("size", "4m") } else { file };
        format!("log:[{file}]").parse::<Uri>().unwrap()
    });
    let open = OpenPool::open(&opener, &VolumeRef::pool_on(&a)).unwrap();
    log.0.lock().unwrap().clear();
    open.grow_pool(&opener, &[b], false).unwrap();
    let seen = log.0.lock().unwrap().clone();
    let at = |name: &str, operation, lba| {
        let is_it = |one: &(String, Operation, u64)| *one == (name.into(), operation, lba);
        seen.iter()
            .position(is_it)
            .unwrap_or_else(|| panic!("{name} {operation:?} {lba}: {seen:?}"))
    };
    let label = at("b", Operation::Write, 0);
    let flushed = at("b", Operation::Flush, 0);
    // The superblocks found on opening are rewritten first, so the third superblock counts the device.
    let is_superblock =
        |one: &(String, Operation, u64)| one.0 == "pool" && one.1 == Operation::Write && one.2 <= 8;
    let first = seen.iter().position(is_superblock).unwrap();
    assert!(label < flushed && flushed < first, "{seen:?}");
    log.0.lock().unwrap().clear();
    let change =
        VolumeOp::Create { name: "v".into(), blocks: 8, unit: 1, uuid: 1, checksums: false };
    open.execute_volume_op(change).unwrap();
    // A commit writes pages, a flush, superblocks and a flush; each flush goes to every device.
    let seen = log.0.lock().unwrap().clone();
    let flushes = |name: &str| {
        let is_it = |one: &&(String, Operation, u64)| one.0 == name && one.1 == Operation::Flush;
        seen.iter().filter(is_it).count()
    };
    assert_eq!((flushes("pool"), flushes("b")), (2, 2), "{seen:?}");
    let last_superblock = seen.iter().rposition(is_superblock).unwrap();
    let on_b = |one: &(String, Operation, u64)| one.0 == "b" && one.1 == Operation::Flush;
    let first_flush = seen.iter().position(on_b).unwrap();
    assert!(first_flush < last_superblock && seen[last_superblock..].iter().any(on_b), "{seen:?}");
}

/// A pool with a volume of 96 blocks on its first device, and a volume on both.
fn pool_with_one_and_two_device_volumes() -> PoolFixture {
    let bench = pool_fixture("4m");
    bench.create_volume("small", 96);
    bench.create_volume("large", 1600);
    let write = |name: &str, blocks: u64| {
        let opened = bench.open_volume(name).unwrap();
        write_fill_bytes(&mut bench.volume_client(&*opened.medium, 0), 0..blocks);
    };
    write("small", 96);
    write("large", 640);
    bench.add_device("b", "8m");
    bench.create_volume("late", 320);
    let opened = bench.open_volume("large").unwrap();
    write_fill_bytes(&mut bench.volume_client(&*opened.medium, 0), 640..1600);
    drop(opened);
    write("late", 320);
    create_pool(&bench.opener(), &bench.new_file_uri("target", "32m"), "target", false).unwrap();
    bench
}

/// Result of a rescue: names, lost blocks of each, and what was missing.
pub(super) fn rescue_and_summarize(
    bench: &PoolFixture,
    place: &VolumeRef,
    others: &[Uri],
) -> (Vec<(String, u64)>, Vec<String>) {
    let target =
        OpenPool::open(&bench.opener(), &VolumeRef::pool_on(&bench.file_uri("target"))).unwrap();
    let saved = rescue_pool(&bench.opener(), (place, others), &target, &mut |_| true).unwrap();
    for volume in saved.volumes.iter().filter(|volume| volume.failed.is_none()) {
        let uri =
            VolumeRef::pool_on(&bench.file_uri("target")).uri_of_other_volume(&volume.info.name);
        let opened = bench.opener().open(&uri).unwrap();
        let mut hand = bench.volume_client(&*opened.medium, 0);
        let found = (0..volume.info.blocks).flat_map(|block| hand.read(block, 1));
        let pairs = (0..).zip(found);
        let lost = pairs.filter(|(block, found)| *found != fill_byte_of(*block)).count() as u64;
        assert_eq!(lost, volume.lost_blocks, "`{}`", volume.info.name);
    }
    let volumes = saved.volumes.iter().map(|volume| (volume.info.name.clone(), volume.lost_blocks));
    (volumes.collect(), saved.damaged)
}

#[test]
fn volumes_on_surviving_devices_are_rescued() {
    let bench = pool_with_one_and_two_device_volumes();
    std::fs::rename(bench.path("b"), bench.path("lost")).unwrap();
    let (volumes, missing) = rescue_and_summarize(&bench, &bench.pool_ref(), &[]);
    assert!(missing[0].starts_with("device 1, file:"), "{missing:?}");
    let lost = |name: &str| volumes.iter().find(|(found, _)| found == name).unwrap().1;
    assert_eq!(volumes.len(), 3);
    assert_eq!(lost("small"), 0);
    assert!((600..1600).contains(&lost("large")), "{volumes:?}");
}

#[test]
fn volumes_are_rescued_without_the_first_device() {
    let bench = pool_with_one_and_two_device_volumes();
    // The superblocks of the first device are destroyed, so it does not name the other one.
    let pool = bench.path("pool");
    let mut bytes = std::fs::read(&pool).unwrap();
    for at in [0, 1, 1022, 1023] {
        bytes[at * 4096..][..4096].fill(0xa5);
    }
    std::fs::write(&pool, &bytes).unwrap();
    let (volumes, _) = rescue_and_summarize(&bench, &bench.pool_ref(), &[bench.file_uri("b")]);
    assert!(volumes.iter().all(|(_, lost)| *lost == 0), "{volumes:?}");
    assert_eq!(volumes.len(), 3);
    // Also when it is absent.
    std::fs::remove_file(&pool).unwrap();
    create_pool(&bench.opener(), &bench.file_uri("target"), "target", true).unwrap();
    let place = VolumeRef::pool_on(&bench.file_uri("b"));
    let target =
        OpenPool::open(&bench.opener(), &VolumeRef::pool_on(&bench.file_uri("target"))).unwrap();
    let saved = rescue_pool(&bench.opener(), (&place, &[]), &target, &mut |_| true);
    match saved {
        Ok(saved) => {
            assert!(saved.damaged[0].starts_with("device 0, file:"), "{:?}", saved.damaged)
        }
        Err(error) => assert!(error.to_string().contains("no volume of any pool"), "{error}"),
    }
    let foreign = bench.new_file_uri("x", "4m");
    create_on_devices(
        &bench.opener(),
        (&foreign, &[bench.new_file_uri("y", "4m")]),
        "other",
        false,
    )
    .unwrap();
    let saved =
        rescue_pool(&bench.opener(), (&place, &[bench.file_uri("y")]), &target, &mut |_| true);
    let error = saved.unwrap_err().to_string();
    assert!(error.contains("it is of pool") && error.contains("expected one of"), "{error}");
}
