//! Volumes on devices that are opened, closed and removed.

mod cached_reads;
mod checks;
mod checksums;
mod devices;
mod grow_rejected;
mod inflate;
mod losses;
mod lost_writes;
mod parented_volumes;
mod pool_identity;
mod pool_volume_type;
mod resize_notification;
mod shrunken_device;
mod streams;

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Memory, Operation, Request,
    RequestFlags, Segment, Span,
};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::{Clock, NamedThread};

pub(crate) use self::pool_volume_type::PoolVolumeType;
use super::{
    CapacityState, CreateResult, OpenPool, VolumeOp, VolumeRef, check_closed_pool, create_pool,
    subscribe_capacity,
};
use tenmil_base::Error;
use tenmil_block::{OpenedDevice, Opener};

/// A file with a pool, and memory for requests.
struct PoolFixture {
    directory: tempfile::TempDir,
    regions: RegionTable,
    memory: Region,
    clock: Clock,
}

/// A channel, and the parts of its requests.
struct VolumeTestChannel {
    backend: Box<dyn IoChannel>,
    regions: RegionTable,
    memory: Segment,
    clock: Clock,
}

const PAGE: u32 = 4096;

impl PoolFixture {
    fn new(size: &str) -> Self {
        let regions = RegionTable::new(400);
        let memory = regions.allocate_region(16 << 20).unwrap();
        let (directory, clock) = (tempfile::tempdir().unwrap(), Clock::start());
        let bench = Self { directory, regions, memory, clock };
        let device = format!("{}&size={size}", bench.device_uri()).parse().unwrap();
        create_pool(&bench.opener(), &device, "tests", false).unwrap();
        bench
    }

    fn device_uri(&self) -> String {
        format!("file:{}?engine=threads", self.directory.path().join("pool").display())
    }

    fn opener(&self) -> Opener<'_> {
        Opener { regions: &self.regions, clock: self.clock, seed: 1, kinds: crate::KINDS }
    }

    fn open_pool(&self) -> Arc<OpenPool> {
        let place = VolumeRef::pool_on(&self.device_uri().parse().unwrap());
        OpenPool::open(&self.opener(), &place).unwrap()
    }

    fn create_volume(&self, name: &str, blocks: u64) {
        let name = name.into();
        self.open_pool()
            .execute_volume_op(VolumeOp::Create {
                name,
                blocks,
                unit: 16,
                uuid: 1,
                checksums: false,
            })
            .unwrap();
    }

    fn open_volume(&self, name: &str) -> Result<OpenedDevice, Error> {
        let uri = format!("volume:[{}]/{name}", self.device_uri());
        self.opener().open(&uri.parse().unwrap())
    }

    /// A channel with its own memory.
    fn volume_client(&self, medium: &dyn BlockDevice, number: u32) -> VolumeTestChannel {
        let memory = self.memory.segment().slice(number << 20, 1 << 20).unwrap();
        let (regions, clock) = (self.regions.clone(), self.clock);
        VolumeTestChannel { backend: medium.channel().unwrap(), regions, memory, clock }
    }

    fn check_finds_nothing(&self) -> bool {
        let place = VolumeRef::pool_on(&self.device_uri().parse().unwrap());
        let checked = check_closed_pool(&self.opener(), &place).unwrap();
        checked.damaged.is_empty() && checked.report.findings.is_empty()
    }
}

impl VolumeTestChannel {
    fn submit(&mut self, operation: Operation, lba: u64, blocks: u32) {
        let moves = matches!(operation, Operation::Read | Operation::Write | Operation::Compare);
        let request = Request {
            lba,
            blocks,
            segment_count: u16::from(moves),
            operation,
            flags: RequestFlags::NONE,
            ..Request::PLACEHOLDER
        };
        let len_bytes = if moves { blocks * PAGE } else { 0 };
        let memory = self.memory.slice(0, len_bytes).unwrap();
        assert_eq!(self.backend.submit(self.clock.now(), &[request], &[memory]), 1);
    }

    fn run_request(&mut self, operation: Operation, lba: u64, blocks: u32) -> IoStatus {
        self.submit(operation, lba, blocks);
        self.poll_for_status()
    }

    /// The outcome of the request that was started.
    fn poll_for_status(&mut self) -> IoStatus {
        let mut completions = CompletionBatch::with_capacity(1);
        let until = self.clock.now().after(Span::from_secs(60));
        loop {
            self.backend.flush_submissions();
            let now: Instant = self.clock.now();
            if self.backend.poll(now, &mut completions) > 0 {
                return completions.as_slice()[0].status;
            }
            assert!(now < until, "it is answered");
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    fn write(&mut self, lba: u64, blocks: u32, byte: u8) {
        self.regions.fill(self.memory, byte).unwrap();
        assert_eq!(self.run_request(Operation::Write, lba, blocks), IoStatus::SUCCESS);
    }

    /// The first byte of each block.
    fn read(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        self.regions.fill(self.memory, 0xee).unwrap();
        assert_eq!(self.run_request(Operation::Read, lba, blocks), IoStatus::SUCCESS);
        let mut bytes = vec![0; (blocks * PAGE) as usize];
        self.regions.load(self.memory.slice(0, blocks * PAGE).unwrap(), &mut bytes).unwrap();
        bytes.chunks(PAGE as usize).map(|block| block[0]).collect()
    }
}

#[test]
fn pool_is_opened_once_and_each_volume_has_one_writer() {
    let bench = PoolFixture::new("8m");
    bench.create_volume("a", 64);
    bench.create_volume("b", 64);
    let (first, second) = (bench.open_volume("a").unwrap(), bench.open_volume("b").unwrap());
    let twice = bench.open_volume("a").unwrap_err().to_string();
    assert!(twice.contains("already open for writing in this process"), "{twice}");
    bench.volume_client(&*first.medium, 0).write(0, 1, 1);
    bench.volume_client(&*second.medium, 0).write(0, 1, 2);
    assert_eq!(bench.volume_client(&*first.medium, 0).read(0, 2), [1, 0]);
    assert_eq!(bench.volume_client(&*second.medium, 0).read(0, 1), [2]);
    drop(first);
    let again = bench.open_volume("a").unwrap();
    assert_eq!(bench.volume_client(&*again.medium, 0).read(0, 1), [1]);
    assert!(again.existing[0].to_string().contains("4096 of 262144 bytes written"));
}

#[test]
fn pools_can_be_nested_and_concurrent_opens_share_one() {
    let bench = PoolFixture::new("64m");
    bench.create_volume("outer", 8192);
    let outer = format!("volume:[{}]/outer", bench.device_uri());
    create_pool(&bench.opener(), &outer.parse().unwrap(), "inner", true).unwrap();
    let place = VolumeRef::pool_on(&outer.parse().unwrap());
    let opened: Vec<NamedThread<Arc<OpenPool>>> = (0..4)
        .map(|_| {
            let (regions, clock, place) = (bench.regions.clone(), bench.clock, place.clone());
            let body = move |_: &tenmil_linux::StopFlag| {
                let opener = Opener { regions: &regions, clock, seed: 1, kinds: crate::KINDS };
                OpenPool::open(&opener, &place).unwrap()
            };
            NamedThread::spawn("opener", None, body).unwrap()
        })
        .collect();
    let opened: Vec<Arc<OpenPool>> = opened.into_iter().map(NamedThread::join).collect();
    assert!(opened.iter().all(|one| Arc::ptr_eq(one, &opened[0])));
    let change =
        VolumeOp::Create { name: "v".into(), blocks: 64, unit: 1, uuid: 1, checksums: false };
    opened[0].execute_volume_op(change).unwrap();
    drop(opened);
    let uri = place.uri_of_other_volume("v");
    bench.volume_client(&*bench.opener().open(&uri).unwrap().medium, 0).write(7, 1, 3);
    let again = bench.opener().open(&uri).unwrap();
    assert_eq!(bench.volume_client(&*again.medium, 0).read(6, 2), [0, 3]);
    let unknown = VolumeRef::pool_on(&"volume:[tape:]/x".parse().unwrap());
    for _ in 0..2 {
        let error = OpenPool::open(&bench.opener(), &unknown).unwrap_err();
        assert!(error.to_string().contains("no devices of kind `tape`"), "{error}");
    }
}

#[test]
fn capacity_events_reach_subscribers() {
    let bench = PoolFixture::new("8m");
    bench.create_volume("a", 4096);
    let (sender, reported) = std::sync::mpsc::channel();
    let device = bench.device_uri();
    subscribe_capacity(move |new_events| {
        // After the test, the receiver is gone.
        let _ = if new_events.device == device { sender.send(new_events.clone()) } else { Ok(()) };
    });
    let opened = bench.open_volume("a").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    let next = || reported.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    // Of 2048 blocks, 128 are reserved.
    let mut at = 0;
    for (end, percent) in [(1600, 80), (1840, 95)] {
        while at < end {
            hand.write(at, 16, 1);
            at += 16;
        }
        let new_events = next();
        assert_eq!((new_events.fill, &*new_events.store), (CapacityState::Above(percent), "tests"));
        assert!(
            new_events.used_bytes * 100 >= new_events.capacity_bytes * u64::from(percent),
            "{new_events}"
        );
    }
    while hand.run_request(Operation::Write, at, 16) == IoStatus::SUCCESS {
        at += 16;
    }
    assert_eq!(hand.run_request(Operation::Write, at, 16), IoStatus::CAPACITY_EXCEEDED);
    assert_eq!(next().fill, CapacityState::Full);
    drop((hand, opened));
    let delete = VolumeOp::Delete { name: "a".into(), orphan: false };
    let store = bench.open_pool();
    store.execute_volume_op(delete).unwrap();
    assert!(store.wait_for_reclaim(Span::from_secs(60)));
    let relieved =
        std::iter::from_fn(|| Some(next().fill)).find(|fill| *fill == CapacityState::Below(80));
    assert!(relieved.is_some());
}

#[test]
fn open_volume_is_not_deleted_shrunk_or_rolled_back() {
    let bench = PoolFixture::new("8m");
    bench.create_volume("a", 64);
    let store = bench.open_pool();
    let snapshot =
        |name: &str| VolumeOp::Snapshot { volume: "a".into(), name: name.into(), uuid: 1 };
    store.execute_volume_op(snapshot("s")).unwrap();
    let opened = bench.open_volume("a").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.write(60, 4, 7);
    let delete = |name: &str| VolumeOp::Delete { name: name.into(), orphan: false };
    let revert = VolumeOp::Rollback { volume: "a".into(), snapshot: "s".into() };
    let resize = |blocks| VolumeOp::Resize { name: "a".into(), blocks };
    for change in [delete("a"), revert.clone(), resize(63)] {
        let refused = store.execute_volume_op(change.clone()).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("it is open in process"), "{change:?}: {text}");
        assert!(refused.hint().is_some_and(|hint| hint.contains("repeat the command")));
    }
    // A snapshot that is not open has no owner.
    let parent = bench.open_volume("s").unwrap();
    assert!(store.execute_volume_op(delete("s")).unwrap_err().to_string().contains("delete `s`"));
    store.execute_volume_op(snapshot("t")).unwrap();
    store.execute_volume_op(delete("t")).unwrap();
    store.execute_volume_op(VolumeOp::Rename { name: "a".into(), to: "b".into() }).unwrap();
    store.execute_volume_op(VolumeOp::Resize { name: "b".into(), blocks: 128 }).unwrap();
    assert_eq!(hand.read(59, 5), [0, 7, 7, 7, 7], "he goes on");
    assert_eq!(
        hand.run_request(Operation::Read, 64, 1),
        IoStatus::LBA_OUT_OF_RANGE,
        "to his old end"
    );
    drop((hand, opened, parent));
    let again = bench.open_volume("b").unwrap();
    assert_eq!(bench.volume_client(&*again.medium, 0).read(63, 2), [7, 0]);
    drop(again);
    let revert = VolumeOp::Rollback { volume: "b".into(), snapshot: "s".into() };
    assert_eq!(store.execute_volume_op(revert).unwrap().unwrap().blocks, 64);
    store.execute_volume_op(delete("b")).unwrap();
    store.execute_volume_op(delete("s")).unwrap();
    drop(store);
    assert!(bench.check_finds_nothing());
}

#[test]
fn wait_for_reclaim_ends_despite_other_io() {
    let bench = PoolFixture::new("64m");
    bench.create_volume("a", 4096);
    bench.create_volume("b", 4096);
    let opened = bench.open_volume("a").unwrap();
    let filled = bench.open_volume("b").unwrap();
    (0..64).for_each(|at| bench.volume_client(&*filled.medium, 1).write(at * 16, 16, 1));
    drop(filled);
    let mut hand = bench.volume_client(&*opened.medium, 0);
    // The request is in flight until its completion is polled.
    hand.submit(Operation::Write, 7, 1);
    let store = bench.open_pool();
    store.execute_volume_op(VolumeOp::Delete { name: "b".into(), orphan: false }).unwrap();
    assert!(store.wait_for_reclaim(Span::from_secs(30)));
    assert!(!store.shared.lock().store.is_idle(), "what is under way is not waited for");
    assert_eq!(hand.poll_for_status(), IoStatus::SUCCESS);
    drop((hand, opened));
    assert!(store.wait_for_reclaim(Span::from_secs(30)));
    assert!(store.shared.lock().store.is_idle());
    drop(store);
    assert!(bench.check_finds_nothing());
}

#[test]
fn existing_pool_is_not_recreated() {
    let bench = PoolFixture::new("8m");
    bench.create_volume("a", 64);
    let device = bench.device_uri().parse().unwrap();
    let again = create_pool(&bench.opener(), &device, "tests", false).unwrap();
    assert_eq!(again, CreateResult { blocks: 2048, was_there: true });
    assert!(bench.open_pool().find_volume("a").is_ok());
    let error = create_pool(&bench.opener(), &device, "other", false).unwrap_err().to_string();
    assert!(error.contains("would destroy"), "{error}");
    let pool = bench.directory.path().join("pool");
    let file = std::fs::OpenOptions::new().write(true).open(pool).unwrap();
    file.set_len(12 << 20).unwrap();
    let error = create_pool(&bench.opener(), &device, "tests", false).unwrap_err().to_string();
    assert!(error.contains("would destroy"), "it is not as large as its device: {error}");
    let anew = create_pool(&bench.opener(), &device, "tests", true).unwrap();
    assert_eq!(anew, CreateResult { blocks: 3072, was_there: false });
    assert!(bench.open_pool().find_volume("a").is_err());
}

#[test]
fn closing_a_pool_flushes_written_data() {
    let bench = PoolFixture::new("8m");
    bench.create_volume("a", 64);
    bench.volume_client(&*bench.open_volume("a").unwrap().medium, 0).write(3, 2, 7);
    assert_eq!(
        bench.volume_client(&*bench.open_volume("a").unwrap().medium, 0).read(2, 4),
        [0, 7, 7, 0]
    );
    assert!(bench.check_finds_nothing());
}

#[test]
fn pool_opened_for_reading_is_not_written() {
    let bench = PoolFixture::new("8m");
    bench.create_volume("a", 64);
    bench.snapshot("a", "s");
    let generation = bench.open_pool().generation();
    let opened = bench.open_volume("s").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    assert_eq!(hand.read(0, 1), [0]);
    assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    drop((hand, opened));
    assert_eq!(bench.open_pool().generation(), generation);
}

#[test]
fn channel_closed_with_requests_in_flight_does_not_block_others() {
    let bench = PoolFixture::new("64m");
    bench.create_volume("a", 4096);
    let opened = bench.open_volume("a").unwrap();
    let mut stays = bench.volume_client(&*opened.medium, 0);
    for round in 0..20 {
        let mut goes = bench.volume_client(&*opened.medium, 1);
        for step in 0..8 {
            goes.submit(Operation::Write, (round * 8 + step) * 16, 16);
        }
        goes.submit(Operation::Flush, 0, 0);
        drop(goes);
        stays.write(4000, 3, 5);
        let name = format!("s{round}");
        let change = VolumeOp::Snapshot { volume: "a".into(), name, uuid: 1 };
        bench.open_pool().execute_volume_op(change).unwrap();
        assert_eq!(stays.read(3999, 5), [0, 5, 5, 5, 0]);
    }
    drop((stays, opened));
    assert!(bench.check_finds_nothing());
}

#[test]
fn snapshots_under_load_are_consistent() {
    let bench = PoolFixture::new("64m");
    bench.create_volume("a", 256);
    let opened = bench.open_volume("a").unwrap();
    // Each thread writes its blocks in order, and then again with the next number: in a snapshot, no
    // block is newer than the one before it.
    let write = |number: u32| {
        let mut hand = bench.volume_client(&*opened.medium, number);
        let body = move |_: &tenmil_linux::StopFlag| {
            for version in 1..=12 {
                (0..32).for_each(|block| hand.write(u64::from(number) * 64 + block, 1, version));
            }
        };
        NamedThread::spawn("writer", None, body).unwrap()
    };
    let writers: Vec<NamedThread<()>> = (0..3).map(write).collect();
    let store = bench.open_pool();
    for round in 0..12 {
        let (volume, name) = ("a".into(), format!("s{round}"));
        store.execute_volume_op(VolumeOp::Snapshot { volume, name, uuid: 1 }).unwrap();
    }
    writers.into_iter().for_each(NamedThread::join);
    for round in 0..12 {
        let snapshot = bench.open_volume(&format!("s{round}")).unwrap();
        let mut hand = bench.volume_client(&*snapshot.medium, 4);
        for number in 0..3 {
            let found = hand.read(number * 64, 32);
            assert!(found.is_sorted_by(|left, right| left >= right), "{found:?}");
            assert!(found[0] - found[31] <= 1, "{found:?}");
        }
        let refused = hand.run_request(Operation::Write, 0, 1);
        assert_eq!(refused, IoStatus::INVALID_OPCODE);
    }
    assert_eq!(bench.volume_client(&*opened.medium, 4).read(64, 32), [12; 32]);
    drop((store, opened));
    assert!(bench.check_finds_nothing());
}

#[test]
fn holes_are_reported_and_trim_frees_space() {
    let bench = PoolFixture::new("8m");
    bench.create_volume("a", 1 << 20);
    let opened = bench.open_volume("a").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    (0..4).for_each(|part| hand.write(100 + part * 50, 50, 1));
    // Equal blocks may be in several runs.
    let extent = |lba: u64| {
        let first = opened.medium.block_status(lba).unwrap();
        let mut blocks = first.blocks;
        while let Ok(next) = opened.medium.block_status(lba + blocks)
            && next.kind == first.kind
            && next.blocks > 0
        {
            blocks += next.blocks;
        }
        (blocks, first.kind == tenmil_base::ExtentKind::Data)
    };
    assert_eq!(extent(0), (100, false));
    assert_eq!(extent(150), (150, true));
    assert_eq!(extent(300), ((1 << 20) - 300, false));
    assert_eq!(hand.run_request(Operation::Deallocate, 0, 1 << 20), IoStatus::SUCCESS);
    assert_eq!(extent(0), (1 << 20, false));
    assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    assert_eq!(bench.open_pool().find_volume("a").unwrap().mapped, 0);
}

#[test]
fn full_pool_reports_no_space_and_loses_nothing() {
    let bench = PoolFixture::new("4m");
    bench.create_volume("a", 4096);
    let opened = bench.open_volume("a").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    let mut written = 0;
    let full = loop {
        match hand.run_request(Operation::Write, written, 16) {
            IoStatus::SUCCESS => written += 16,
            status => break status,
        }
    };
    assert_eq!(full, IoStatus::CAPACITY_EXCEEDED);
    assert!(written > 500, "{written} of 1024 blocks");
    hand.write(written - 16, 16, 9);
    assert_eq!(hand.read(written - 16, 16), [9; 16]);
    drop((hand, opened));
    assert!(bench.check_finds_nothing());
}
