//! Two hosts at one target: a pool or a mirror is taken over without force, because the device refuses what
//! the former owner still writes.

use std::sync::mpsc;
use std::time::Duration;

use crate::served::{ServeProcess, run};
use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoStatus, Memory, Operation, Request, Segment, Span,
};
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_dma::RegionTable;
use tenmil_drivers::mirror;
use tenmil_drivers::pool::{self, VolumeRef, subscribe_stops};
use tenmil_linux::Clock;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disk";
const BLOCK: u32 = 4096;
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// A target with a file, and its address.
struct FileTarget {
    _served: ServeProcess,
    _directory: tempfile::TempDir,
    address: String,
}

/// A host with memory of its own.
struct PoolHost {
    regions: RegionTable,
    clock: Clock,
    name: &'static str,
}

impl FileTarget {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("disk");
        let uri = format!("file:{}?size=32m", file.display());
        let served = ServeProcess::start_shell_line(&format!(
            "{TENMIL} serve '{uri}' --listen tcp://127.0.0.1:0"
        ));
        let address = served.ready.trim().strip_prefix("ready ").unwrap().to_owned();
        Self { _served: served, _directory: directory, address }
    }

    fn uri(&self, host: &str) -> String {
        format!("{}/{NQN}?hostnqn=nqn.2026-01.example:{host}", self.address)
    }
}

impl PoolHost {
    fn new(name: &'static str) -> Self {
        Self { regions: RegionTable::new(200), clock: Clock::start(), name }
    }

    fn opener(&self) -> Opener<'_> {
        Opener { regions: &self.regions, clock: self.clock, seed: 1, kinds: tenmil_devices::KINDS }
    }

    fn open(&self, uri: &str) -> Result<OpenedDevice, String> {
        self.opener().open(&uri.parse().unwrap()).map_err(|error| error.to_string())
    }

    fn pool(&self, target: &FileTarget) -> VolumeRef {
        VolumeRef::pool_on(&target.uri(self.name).parse::<Uri>().unwrap())
    }

    fn volume(&self, target: &FileTarget) -> String {
        format!("volume:[{}]/v", target.uri(self.name))
    }

    fn take_over(&self, target: &FileTarget) -> Result<Option<String>, String> {
        pool::take_over_pool(&self.opener(), &self.pool(target)).map_err(|error| error.to_string())
    }

    fn io(
        &self,
        channel: &mut dyn IoChannel,
        operation: Operation,
        lba: u64,
        byte: u8,
    ) -> (IoStatus, u8) {
        let memory = self.regions.allocate_region(BLOCK as usize).unwrap();
        let segment = Segment { len_bytes: BLOCK, ..memory.segment() };
        self.regions.store(segment, &[byte; BLOCK as usize]).unwrap();
        let moves = operation != Operation::Flush;
        let blocks = if moves { BLOCK / channel.limits().block_size } else { 0 };
        let request = Request {
            lba: lba * u64::from(blocks),
            blocks,
            segment_count: u16::from(moves),
            operation,
            ..Request::PLACEHOLDER
        };
        let segments = [segment];
        let mut completions = CompletionBatch::with_capacity(1);
        let (mut is_taken, end) = (false, self.now().after(Span::from_secs(60)));
        while completions.as_slice().is_empty() {
            let now = self.now();
            assert!(now < end, "{operation:?} was not answered");
            is_taken = is_taken || channel.submit(now, &[request], &segments) == 1;
            channel.flush_submissions();
            channel.poll(now, &mut completions);
            tenmil_linux::named_thread::yield_cpu();
        }
        let mut bytes = [0; BLOCK as usize];
        self.regions.load(segment, &mut bytes).unwrap();
        (completions.as_slice()[0].status, bytes[0])
    }

    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn write(&self, channel: &mut dyn IoChannel, lba: u64, byte: u8) -> IoStatus {
        self.io(channel, Operation::Write, lba, byte).0
    }

    fn flush(&self, channel: &mut dyn IoChannel) {
        assert_eq!(self.io(channel, Operation::Flush, 0, 0).0, IoStatus::SUCCESS);
    }

    fn read(&self, channel: &mut dyn IoChannel, lba: u64) -> u8 {
        let (result, byte) = self.io(channel, Operation::Read, lba, 0);
        assert_eq!(result, IoStatus::SUCCESS);
        byte
    }
}

/// A target with a pool and a volume in it, of a host that has flushed twice and goes on to write in place.
fn volume_written_by_host(host: &PoolHost) -> (FileTarget, OpenedDevice, Box<dyn IoChannel>) {
    let target = FileTarget::new();
    run(TENMIL, &["pool", "create", "--overwrite", &target.uri(host.name)]);
    // What another host has closed, this one opens.
    let other = PoolHost::new("other");
    run(TENMIL, &["volume", "create", &other.volume(&target), "--size", "4m"]);
    let opened = host.open(&host.volume(&target)).unwrap();
    let mut channel = opened.medium.channel().unwrap();
    for byte in [1, 2] {
        (0..8).for_each(|lba| assert_eq!(host.write(&mut *channel, lba, byte), IoStatus::SUCCESS));
        host.flush(&mut *channel);
    }
    (target, opened, channel)
}

#[test]
fn former_owner_cannot_write_to_a_pool_taken_over_without_force() {
    let (one, two) = (PoolHost::new("one"), PoolHost::new("two"));
    let (target, opened, mut old) = volume_written_by_host(&one);
    let mut idle = opened.medium.channel().unwrap();
    let (sender, heard) = mpsc::channel();
    let mine = target.address.clone();
    subscribe_stops(move |new_events| {
        if new_events.device.contains(&mine) {
            // After the test the receiver is closed.
            let _ = sender.send(new_events.to_string());
        }
    });
    let owner = format!("process {} on host `", std::process::id());
    let refused = two.open(&two.volume(&target)).err().unwrap();
    assert!(refused.contains(&owner), "{refused}");
    let former = two.take_over(&target).unwrap().expect("it had an owner");
    assert!(former.contains(&owner), "{former}");
    let taken = two.open(&two.volume(&target)).unwrap();
    let mut new = taken.medium.channel().unwrap();

    // The former owner knows nothing of it, and only writes in place.
    for lba in 0..8 {
        let result = one.write(&mut *old, lba, 3);
        assert!(!result.is_success(), "block {lba}: {result:?}");
        assert_eq!(two.read(&mut *new, lba), 2, "block {lba}");
    }
    loop {
        let said = heard.recv_timeout(TIME_LIMIT).unwrap();
        if said.contains(&format!("was taken over by {owner}")) {
            break;
        }
    }
    // It stops for good, on every channel.
    for channel in [&mut old, &mut idle] {
        assert!(one.write(&mut **channel, 1, 4).is_conflict());
        let result = one.io(&mut **channel, Operation::Read, 1, 0).0;
        assert!(result.is_conflict(), "{result:?}");
    }
    (0..8).for_each(|lba| assert_eq!(two.read(&mut *new, lba), 2, "block {lba}"));
    assert_eq!(two.write(&mut *new, 0, 5), IoStatus::SUCCESS);
    two.flush(&mut *new);
    drop((new, taken));

    // The former owner may still run, so the reservation outlives the new one.
    let three = PoolHost::new("three");
    let refused = three.open(&three.volume(&target)).err().unwrap();
    assert!(refused.contains("has reserved it"), "{refused}");
    let taken = two.open(&two.volume(&target)).unwrap();
    drop(taken);
    assert_eq!(three.take_over(&target), Ok(None), "the superblocks name no owner");
    let opened = three.open(&three.volume(&target)).unwrap();
    let mut last = opened.medium.channel().unwrap();
    assert_eq!((three.read(&mut *last, 0), three.read(&mut *last, 1)), (5, 2));
    assert!(two.open(&two.volume(&target)).is_err());
}

#[test]
fn pool_without_reservation_requires_force_for_takeover() {
    let (one, two) = (PoolHost::new("one"), PoolHost::new("two"));
    let (target, _opened, mut old) = volume_written_by_host(&one);
    // The reservation is cleared, as an operator may do.
    let opened = one.open(&target.uri("one")).unwrap();
    let reservations = opened.medium.reservations().unwrap();
    let holder = reservations.holder().unwrap().unwrap();
    assert!(holder.is_this_host && holder.is_write_exclusive, "{holder:?}");
    reservations.release_and_unregister(holder.key).unwrap();
    assert_eq!(reservations.holder(), Ok(None));
    let refused = two.take_over(&target).unwrap_err();
    assert!(refused.contains("do not exclude") && refused.contains("not reserved"), "{refused}");
    assert_eq!(one.write(&mut *old, 0, 3), IoStatus::SUCCESS, "nothing has changed");
    let place = VolumeRef { force: true, ..two.pool(&target) };
    assert!(pool::take_over_pool(&two.opener(), &place).unwrap().is_some());
    // By force it is excluded, too, from then on.
    assert!(one.write(&mut *old, 0, 4).is_conflict());
}

#[test]
fn former_owner_cannot_write_to_a_mirror_taken_over_without_force() {
    let (one, two) = (PoolHost::new("one"), PoolHost::new("two"));
    let targets = [FileTarget::new(), FileTarget::new()];
    let uri = |host: &PoolHost| {
        format!("mirror:[{}],[{}]", targets[0].uri(host.name), targets[1].uri(host.name))
    };
    let legs = targets.each_ref().map(|target| target.uri("other"));
    run(TENMIL, &["mirror", "create", "--overwrite", &legs[0], &legs[1]]);
    let opened = one.open(&uri(&one)).unwrap();
    let (mut old, mut idle) = (opened.medium.channel().unwrap(), opened.medium.channel().unwrap());
    (0..8).for_each(|lba| assert_eq!(one.write(&mut *old, lba, 2), IoStatus::SUCCESS));
    one.flush(&mut *old);
    let refused = two.open(&uri(&two)).err().unwrap();
    assert!(refused.contains("has it open for writing"), "{refused}");
    let mirror_of = |host: &PoolHost| uri(host).parse::<Uri>().unwrap();
    let former = mirror::take_over_mirror(&two.opener(), &mirror_of(&two), false).unwrap();
    assert!(former.is_some());
    let taken = two.open(&uri(&two)).unwrap();
    let mut new = taken.medium.channel().unwrap();
    for lba in 0..8 {
        let result = one.write(&mut *old, lba, 3);
        assert!(!result.is_success(), "block {lba}: {result:?}");
        assert_eq!(two.read(&mut *new, lba), 2, "block {lba}");
    }
    // The look at the superblocks ends soon, and then nothing is read or written any more.
    let end = one.now().after(Span::from_secs(60));
    while !one.io(&mut *idle, Operation::Read, 1, 0).0.is_conflict() {
        assert!(one.now() < end, "the former owner still reads");
    }
    assert!(one.write(&mut *idle, 1, 4).is_conflict());
    assert_eq!(two.write(&mut *new, 1, 5), IoStatus::SUCCESS);
    two.flush(&mut *new);
    drop((new, taken));
    let refused = one.open(&uri(&one)).err().unwrap();
    assert!(refused.contains("has reserved it"), "{refused}");
}
