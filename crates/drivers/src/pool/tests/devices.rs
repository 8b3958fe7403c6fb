//! Pools over several devices: extended, moved and missing ones.

#![expect(clippy::disallowed_methods, reason = "it makes, moves and breaks what lies there")]

use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, ErrorCategory, Instant, IoChannel, IoStatus,
    Limits, Operation, Request, Segment,
};
use tenmil_linux::{NamedThread, StopFlag};

use super::{Bench, Hand, VolumeOp};
use crate::pool::{
    CreateResult, DeviceInfo, OpenPool, VolumeRef, check, create, create_over, grow, rescue,
};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceType, OpenedDevice, Opener};

/// A pool of this size on the file `pool`, and other files beside it.
fn pool(size: &str) -> Bench {
    Bench::new(size)
}

impl Bench {
    pub(super) fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn file(&self, name: &str) -> Uri {
        format!("file:{}?engine=threads", self.path(name).display()).parse().unwrap()
    }

    /// A file that is created when it is opened.
    pub(super) fn new_file(&self, name: &str, size: &str) -> Uri {
        self.file(name).with("size", size)
    }

    pub(super) fn place(&self) -> VolumeRef {
        VolumeRef::on(&self.device().parse().unwrap())
    }

    fn try_open(&self) -> Result<Arc<OpenPool>, Error> {
        OpenPool::open(&self.opener(), &self.place())
    }

    pub(super) fn add(&self, name: &str, size: &str) {
        let added = [self.new_file(name, size)];
        self.store().grow(&self.opener(), &added, false).unwrap();
    }

    /// The error of adding a device.
    fn refused(&self, uri: &Uri, overwrite: bool) -> String {
        let error = self.store().grow(&self.opener(), std::slice::from_ref(uri), overwrite);
        error.unwrap_err().to_string()
    }

    pub(super) fn set_len(&self, name: &str, len: u64) {
        let file = std::fs::OpenOptions::new().write(true).open(self.path(name)).unwrap();
        file.set_len(len).unwrap();
    }

    fn sizes(&self) -> Vec<u64> {
        self.store().devices().iter().map(|device| device.blocks).collect()
    }
}

/// Writes each of the blocks with its own byte, 32 at a time.
pub(super) fn write_all(hand: &mut Hand, blocks: std::ops::Range<u64>) {
    for block in blocks.step_by(32) {
        hand.write(block, 32, byte(block));
    }
}

fn byte(block: u64) -> u8 {
    u8::try_from(block / 32 % 250 + 1).unwrap()
}

/// Checks that each block holds its byte.
fn expect_all(hand: &mut Hand, blocks: std::ops::Range<u64>) {
    for block in blocks.step_by(32) {
        assert_eq!(hand.read(block, 32), [byte(block); 32], "from block {block} on");
    }
}

#[test]
fn a_store_over_three_files_is_one_store_and_opens_by_the_first() {
    let bench = pool("8m");
    let first: Uri = bench.file("one");
    let others = [bench.new_file("two", "4m").with("block", "4k"), bench.new_file("three", "3m")];
    let of = (&first.clone().with("size", "4m"), &others[..]);
    let made = create_over(&bench.opener(), of, "wide", false).unwrap();
    assert_eq!(made, CreateResult { blocks: 1024 + 1023 + 767, was_there: false });
    let again = create_over(&bench.opener(), (&first, &others), "wide", false).unwrap();
    assert_eq!(again, CreateResult { blocks: 2814, was_there: true });
    let place = VolumeRef::on(&first);
    let open = OpenPool::open(&bench.opener(), &place).unwrap();
    let (name, blocks) = ("v".into(), 2400);
    open.change(VolumeOp::Create { name, blocks, unit: 16, uuid: 1, checksums: false }).unwrap();
    let opened = bench.opener().open(&place.with_name("v")).unwrap();
    let said = &opened.description;
    assert!(["one", "two", "three"].iter().all(|name| said.contains(name)), "{said}");
    let mut hand = bench.hand(&*opened.medium, 0);
    write_all(&mut hand, 0..2400);
    expect_all(&mut hand, 0..2400);
    assert_eq!(hand.run(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    drop((hand, opened, open));
    let opened = bench.opener().open(&place.with_name("v")).unwrap();
    expect_all(&mut bench.hand(&*opened.medium, 0), 0..2400);
    drop(opened);
    let checked = check(&bench.opener(), &place).unwrap();
    assert!(checked.damaged.is_empty() && checked.report.findings.is_empty());
    let found: Vec<(u32, u64)> =
        checked.devices.iter().map(|device| (device.number, device.blocks)).collect();
    assert_eq!(found, [(0, 1024), (1, 1023), (2, 767)]);
}

#[test]
fn nothing_is_made_if_one_of_the_devices_is_refused() {
    let bench = pool("8m");
    std::fs::write(bench.path("full"), vec![7; 4 << 20]).unwrap();
    let first = bench.new_file("one", "4m");
    let create = |others: &[Uri]| {
        create_over(&bench.opener(), (&first, others), "wide", false).unwrap_err().to_string()
    };
    let refused = create(&[bench.new_file("two", "4m"), bench.file("full")]);
    assert!(
        refused.contains("would destroy what is there") && refused.contains("full"),
        "{refused}"
    );
    let refused = create(&[bench.new_file("small", "2m")]);
    assert!(refused.contains("has 512 blocks of 4 KiB, expected 513 at least"), "{refused}");
    for name in ["one", "two", "full"] {
        let none = OpenPool::open(&bench.opener(), &VolumeRef::on(&bench.file(name))).unwrap_err();
        assert!(none.to_string().contains("no superblock can be read"), "{none}");
    }
}

#[test]
fn a_store_grows_while_threads_read_and_write_and_none_of_them_fails() {
    let bench = pool("8m");
    bench.create("a", 16_000);
    let opened = bench.open("a").unwrap();
    // Each thread writes its own blocks repeatedly, and reads them.
    let body = |number: u32| {
        let mut hand = bench.hand(&*opened.medium, number);
        move |stop: &StopFlag| {
            let mut rounds = 0_u64;
            while !stop.is_stopped() {
                let first = u64::from(number) * 64;
                write_all(&mut hand, first..first + 64);
                expect_all(&mut hand, first..first + 64);
                rounds += 1;
            }
            (hand, rounds)
        }
    };
    let workers: Vec<NamedThread<(Hand, u64)>> =
        (0..3).map(|number| NamedThread::spawn("worker", None, body(number)).unwrap()).collect();
    let mut hand = bench.hand(&*opened.medium, 4);
    write_all(&mut hand, 1000..2280);
    bench.add("b", "8m");
    assert_eq!(bench.sizes(), [2048, 2047]);
    write_all(&mut hand, 3000..4600);
    // The last device is extended, and then the first one.
    bench.set_len("b", 12 << 20);
    let grown = bench.store().grow(&bench.opener(), &[], false).unwrap();
    assert_eq!((grown.before, grown.blocks), (4095, 4095 + 1024));
    write_all(&mut hand, 5000..5960);
    bench.set_len("pool", 14 << 20);
    bench.store().grow(&bench.opener(), &[bench.new_file("c", "4m")], false).unwrap();
    assert_eq!(bench.sizes(), [3584, 3071, 1023]);
    write_all(&mut hand, 7000..8920);
    for blocks in [1000..2280, 3000..4600, 5000..5960, 7000..8920] {
        expect_all(&mut hand, blocks);
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
            expect_all(hand, 3000..4600);
            expect_all(hand, 7000..8920);
        }
    }
    drop((hand, hands, opened));
    assert!(bench.is_clean());
    let again = bench.open("a").unwrap();
    let mut hand = bench.hand(&*again.medium, 0);
    for blocks in [1000..2280, 3000..4600, 5000..5960, 7000..8920] {
        expect_all(&mut hand, blocks);
    }
}

#[test]
fn a_clone_of_an_image_and_copies_of_it_go_on_when_the_store_grows() {
    let bench = pool("4m");
    std::fs::write(bench.path("golden"), vec![5; 4096 * 1200]).unwrap();
    let open = bench.store();
    let golden = bench.file("golden");
    let parent = open.check_parent(&bench.opener(), &golden).unwrap();
    let (name, unit, uuid, blocks) = ("g".into(), 16, 3, 1200);
    let change = VolumeOp::CreateOver { name, blocks, unit, uuid, checksums: false, parent };
    open.change(change).unwrap();
    let opened = bench.open("g").unwrap();
    let mut hand = bench.hand(&*opened.medium, 0);
    assert_eq!(hand.read(100, 3), [5; 3]);
    write_all(&mut hand, 0..640);
    bench.add("b", "8m");
    write_all(&mut hand, 640..960);
    expect_all(&mut hand, 0..960);
    assert_eq!(hand.read(1150, 50), [5; 50], "and its parent is where it was");
    // Decoupling continues, too, while the pool is extended.
    let mut watched = 0;
    let opener = bench.opener();
    open.decouple(&opener, "g", None, &mut |_| {
        watched += 1;
        if watched == 1 {
            open.grow(&opener, &[bench.new_file("c", "4m")], false).unwrap();
        }
        true
    })
    .unwrap();
    expect_all(&mut hand, 0..960);
    for block in (960..1200).step_by(40) {
        assert_eq!(hand.read(block, 40), [5; 40], "from block {block} on");
    }
    drop((hand, opened, open));
    assert!(bench.is_clean());
}

#[test]
fn to_add_what_is_there_changes_nothing_and_the_devices_are_told() {
    let bench = pool("8m");
    bench.add("b", "4m");
    let before = bench.store().generation();
    let [b, pool] = [bench.file("b"), bench.file("pool")];
    let grown = grow(&bench.opener(), &bench.place(), &[b.clone(), pool], false).unwrap();
    assert_eq!((grown.before, grown.blocks, grown.were_there), (3071, 3071, vec![1, 0]));
    let told = |number, uri: &Uri, blocks| DeviceInfo { number, uri: uri.to_string(), blocks };
    let expected = [told(0, &bench.device().parse().unwrap(), 2048), told(1, &b, 1023)];
    assert_eq!(grown.devices, expected);
    assert_eq!(bench.store().generation(), before);
}

#[test]
fn what_is_no_device_of_the_store_is_refused_by_name() {
    let bench = pool("8m");
    bench.add("b", "4m");
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
    create(&bench.opener(), &bench.file("b"), "other", true).unwrap();
    assert!(open().contains("it is the first device of pool"), "{}", open());
    std::fs::copy(bench.path("gone"), bench.path("b")).unwrap();
    bench.set_len("b", 3 << 20);
    assert!(open().contains("it has 3145728 bytes, expected 4194304 at least"), "{}", open());

    // A further device alone is no pool, and names the pool it belongs to.
    let place = VolumeRef::on(&bench.file("gone"));
    let error = OpenPool::open(&bench.opener(), &place).unwrap_err();
    let said = error.to_string();
    assert!(said.contains("it is device 1 of pool `tests`") && said.contains("expected the first"));
    assert!(error.hint().unwrap().contains(&bench.path("pool").display().to_string()));
    rename("gone", "b");

    // A device of another pool, one that is present under another name, and one that is given twice.
    let other = bench.new_file("x", "4m");
    let more = bench.new_file("y", "4m");
    create_over(&bench.opener(), (&other, &[more]), "other", false).unwrap();
    let refused = bench.refused(&bench.file("y"), false);
    assert!(refused.contains("would destroy what is there"), "{refused}");
    let refused = bench.refused(&bench.file("b.old"), true);
    assert!(
        refused.contains("it is device 1 of pool `tests`") && refused.contains("a copy of that")
    );
    let twice = [bench.new_file("z", "4m"), bench.new_file("z", "4m")];
    let refused = bench.store().grow(&bench.opener(), &twice, false).unwrap_err().to_string();
    assert!(refused.contains("given twice") || refused.contains("not open elsewhere"), "{refused}");
    assert_eq!(bench.sizes(), [2048, 1023]);
    rename("b", "b.there");
    rename("y", "b");
    assert!(open().contains("it is device 1 of pool `other`"), "{}", open());
}

#[test]
fn a_device_with_an_old_label_is_not_taken_for_the_one_that_has_its_number() {
    let bench = pool("8m");
    std::fs::copy(bench.path("pool"), bench.path("pool.before")).unwrap();
    bench.add("b", "4m");
    std::fs::rename(bench.path("b"), bench.path("b.old")).unwrap();
    // The first device is as it was, and another one becomes device 1.
    std::fs::rename(bench.path("pool.before"), bench.path("pool")).unwrap();
    bench.add("b", "4m");
    std::fs::rename(bench.path("b.old"), bench.path("b")).unwrap();
    let error = bench.try_open().unwrap_err().to_string();
    assert!(error.contains("its label is an old one"), "{error}");
}

#[test]
fn a_device_that_was_moved_is_found_where_it_is_said_to_be_and_from_then_on() {
    let bench = pool("8m");
    bench.add("b", "4m");
    std::fs::rename(bench.path("b"), bench.path("elsewhere")).unwrap();
    assert!(bench.try_open().is_err());
    let mut place = bench.place();
    place.moved = vec![(1, bench.file("elsewhere"))];
    let open = OpenPool::open(&bench.opener(), &place).unwrap();
    assert_eq!(open.record_locations(), Ok(true));
    assert_eq!(open.record_locations(), Ok(false));
    // Again while the pool is open: the file counts, not its name.
    std::fs::rename(bench.path("elsewhere"), bench.path("back")).unwrap();
    std::fs::copy(bench.path("back"), bench.path("copy")).unwrap();
    let note =
        |number, name: &str| open.record_location(&bench.opener(), number, &bench.file(name));
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
    assert_eq!(open.devices()[1].uri, bench.file("elsewhere").to_string());
    // A device is identified by its label, not by its place.
    std::fs::write(bench.path("b"), vec![0; 4 << 20]).unwrap();
    drop(open);
    place.moved = vec![(1, bench.file("b"))];
    assert!(OpenPool::open(&bench.opener(), &place).is_err());
    assert!(bench.try_open().is_ok());
}

#[test]
fn a_label_that_could_not_be_written_leaves_the_store_as_it_was() {
    let bench = pool("8m");
    let b = bench.new_file("b", "4m").to_string();
    for rule in ["error:write@0-7", "error:flush", "error:write@8-15"] {
        let broken: Uri = format!("fault:[{b}]?rule={rule}").parse().unwrap();
        let refused = bench.refused(&broken, true);
        assert!(refused.contains("write its label: Write Fault"), "{rule}: {refused}");
        assert_eq!(bench.sizes(), [2048], "{rule}");
    }
    bench.store().grow(&bench.opener(), &[bench.file("b")], true).unwrap();
    assert_eq!(bench.sizes(), [2048, 1023]);
}

#[test]
fn a_label_that_no_superblock_counts_is_written_over() {
    let bench = pool("8m");
    std::fs::copy(bench.path("pool"), bench.path("before")).unwrap();
    bench.add("b", "4m");
    // As after a power failure before the commit.
    std::fs::rename(bench.path("before"), bench.path("pool")).unwrap();
    assert_eq!(bench.sizes(), [2048]);
    bench.store().grow(&bench.opener(), &[bench.file("b")], false).unwrap();
    assert_eq!(bench.sizes(), [2048, 1023]);
    assert!(bench.is_clean());
}

#[test]
fn a_device_that_can_do_less_is_added_when_no_volume_is_open() {
    let bench = pool("8m");
    bench.create("a", 4000);
    let weak: Uri = "ram:8m".parse().unwrap();
    let opened = bench.open("a").unwrap();
    let error =
        bench.store().grow(&bench.opener(), std::slice::from_ref(&weak), false).unwrap_err();
    assert!(error.to_string().contains("while volumes of the pool are open"), "{error}");
    assert_eq!((error.category(), bench.sizes()), (ErrorCategory::Usage, vec![2048]));
    drop(opened);
    let store = bench.store();
    store.grow(&bench.opener(), &[weak], false).unwrap();
    let opened = bench.open("a").unwrap();
    let mut hand = bench.hand(&*opened.medium, 0);
    write_all(&mut hand, 0..3008);
    expect_all(&mut hand, 0..3008);
}

/// Opens `log:[URI]`, which records the requests to several devices in order.
#[derive(Clone, Default)]
struct LogKind(Arc<Mutex<Vec<(String, Operation, u64)>>>);

struct Logged(LogKind, String, Arc<dyn BlockDevice>);

struct LoggedChannel(LogKind, String, Box<dyn IoChannel>);

impl DeviceType for LogKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let child = uri.only_child()?;
        let below = opener.open(child)?;
        let name = child.path().rsplit('/').next().unwrap().to_owned();
        let logged = Logged(self.clone(), name, Arc::clone(&below.medium));
        Ok(below.under(Arc::new(logged), "logged"))
    }
}

impl BlockDevice for Logged {
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
fn a_label_is_durable_before_a_superblock_counts_it_and_a_flush_is_for_all() {
    let bench = pool("8m");
    let log = LogKind::default();
    let (regions, clock, more) = (&bench.regions, bench.clock, [("log", &log as &dyn DeviceType)]);
    let opener = Opener { regions, clock, seed: 1, kinds: &crate::tests::kinds_with(&more) };
    let [a, b] = ["pool", "b"].map(|name| {
        let file = bench.file(name);
        let file = if name == "b" { file.with("size", "4m") } else { file };
        format!("log:[{file}]").parse::<Uri>().unwrap()
    });
    let open = OpenPool::open(&opener, &VolumeRef::on(&a)).unwrap();
    log.0.lock().unwrap().clear();
    open.grow(&opener, &[b], false).unwrap();
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
    open.change(change).unwrap();
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
fn for_rescue() -> Bench {
    let bench = pool("4m");
    bench.create("small", 96);
    bench.create("large", 1600);
    let write = |name: &str, blocks: u64| {
        let opened = bench.open(name).unwrap();
        write_all(&mut bench.hand(&*opened.medium, 0), 0..blocks);
    };
    write("small", 96);
    write("large", 640);
    bench.add("b", "8m");
    bench.create("late", 320);
    let opened = bench.open("large").unwrap();
    write_all(&mut bench.hand(&*opened.medium, 0), 640..1600);
    drop(opened);
    write("late", 320);
    create(&bench.opener(), &bench.new_file("target", "32m"), "target", false).unwrap();
    bench
}

/// Result of a rescue: names, lost blocks of each, and what was missing.
pub(super) fn rescued(
    bench: &Bench,
    place: &VolumeRef,
    others: &[Uri],
) -> (Vec<(String, u64)>, Vec<String>) {
    let target = OpenPool::open(&bench.opener(), &VolumeRef::on(&bench.file("target"))).unwrap();
    let saved = rescue(&bench.opener(), (place, others), &target, &mut |_| true).unwrap();
    for volume in saved.volumes.iter().filter(|volume| volume.failed.is_none()) {
        let uri = VolumeRef::on(&bench.file("target")).with_name(&volume.info.name);
        let opened = bench.opener().open(&uri).unwrap();
        let mut hand = bench.hand(&*opened.medium, 0);
        let found = (0..volume.info.blocks).flat_map(|block| hand.read(block, 1));
        let pairs = (0..).zip(found);
        let lost = pairs.filter(|(block, found)| *found != byte(*block)).count() as u64;
        assert_eq!(lost, volume.lost_blocks, "`{}`", volume.info.name);
    }
    let volumes = saved.volumes.iter().map(|volume| (volume.info.name.clone(), volume.lost_blocks));
    (volumes.collect(), saved.damaged)
}

#[test]
fn what_lies_on_the_devices_that_are_left_is_rescued() {
    let bench = for_rescue();
    std::fs::rename(bench.path("b"), bench.path("lost")).unwrap();
    let (volumes, missing) = rescued(&bench, &bench.place(), &[]);
    assert!(missing[0].starts_with("device 1, file:"), "{missing:?}");
    let lost = |name: &str| volumes.iter().find(|(found, _)| found == name).unwrap().1;
    assert_eq!(volumes.len(), 3);
    assert_eq!(lost("small"), 0);
    assert!((600..1600).contains(&lost("large")), "{volumes:?}");
}

#[test]
fn without_the_first_device_the_others_are_looked_through() {
    let bench = for_rescue();
    // The superblocks of the first device are destroyed, so it does not name the other one.
    let pool = bench.path("pool");
    let mut bytes = std::fs::read(&pool).unwrap();
    for at in [0, 1, 1022, 1023] {
        bytes[at * 4096..][..4096].fill(0xa5);
    }
    std::fs::write(&pool, &bytes).unwrap();
    let (volumes, _) = rescued(&bench, &bench.place(), &[bench.file("b")]);
    assert!(volumes.iter().all(|(_, lost)| *lost == 0), "{volumes:?}");
    assert_eq!(volumes.len(), 3);
    // Also when it is absent.
    std::fs::remove_file(&pool).unwrap();
    create(&bench.opener(), &bench.file("target"), "target", true).unwrap();
    let place = VolumeRef::on(&bench.file("b"));
    let target = OpenPool::open(&bench.opener(), &VolumeRef::on(&bench.file("target"))).unwrap();
    let saved = rescue(&bench.opener(), (&place, &[]), &target, &mut |_| true);
    match saved {
        Ok(saved) => {
            assert!(saved.damaged[0].starts_with("device 0, file:"), "{:?}", saved.damaged)
        }
        Err(error) => assert!(error.to_string().contains("no volume of any pool"), "{error}"),
    }
    let foreign = bench.new_file("x", "4m");
    create_over(&bench.opener(), (&foreign, &[bench.new_file("y", "4m")]), "other", false).unwrap();
    let saved = rescue(&bench.opener(), (&place, &[bench.file("y")]), &target, &mut |_| true);
    let error = saved.unwrap_err().to_string();
    assert!(error.contains("it is of pool") && error.contains("expected one of"), "{error}");
}
