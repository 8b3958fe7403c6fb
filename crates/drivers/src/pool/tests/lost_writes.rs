//! Pools on devices that count lost writes: no read returns blocks from before the loss.

use tenmil_base::{IoStatus, Memory, Operation, Random, Span};

use super::{Bench, Hand};
use crate::mirror::tests::disk::Disk;
use crate::pool::{OpenPool, VolumeOp, VolumeRef, create};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// Two disks with a pool on the first or on both.
struct Disks {
    bench: Bench,
    disks: [Disk; 2],
}

/// Content of the blocks that another volume had before.
const OTHERS: u8 = 9;
/// Blocks per request.
const RUN: u32 = 8;
const DISK_BLOCKS: u64 = 8 << 20 >> 9;

impl Disks {
    fn new() -> Self {
        let bench = Bench::new("8m");
        let disks = [1, 2].map(|seed| Disk::new(&bench.regions, DISK_BLOCKS, Random::new(seed)));
        Self { bench, disks }
    }

    /// Runs with an opener for `disk:0` and `disk:1`.
    fn with<T>(&self, run: impl FnOnce(&Opener<'_>) -> T) -> T {
        let disks = self.disks.clone();
        let open = move |_: &Opener<'_>, uri: &Uri| -> Result<OpenedDevice, Error> {
            let disk = disks[usize::from(uri.path() == "1")].clone();
            Ok(OpenedDevice::fresh(std::sync::Arc::new(disk), "a disk that counts losses"))
        };
        run(&Opener { kinds: &crate::tests::kinds_with(&[("disk", &open)]), ..self.bench.opener() })
    }

    /// Writes blocks of `volume`, which lie where another volume has had its own, and does not flush
    /// them; then loses writes and reads them all. Returns how many reads were interrupted.
    fn lose_and_read(&self, hand: &mut Hand, lost: &[usize]) -> u32 {
        let runs = 60;
        for run in 0..runs {
            hand.write(run * u64::from(RUN), RUN, 1);
            assert_eq!(hand.read(run * u64::from(RUN), RUN), [1; RUN as usize]);
        }
        lost.iter().for_each(|disk| self.disks[*disk].lose_counted());
        let mut interrupted = 0;
        for run in 0..runs {
            while let Err(status) = try_read(hand, run * u64::from(RUN)) {
                assert_eq!(status, IoStatus::INTERRUPTED);
                interrupted += 1;
                assert!(interrupted < 10_000, "it recovers");
                tenmil_linux::named_thread::yield_cpu();
            }
        }
        interrupted
    }
}

/// Reads a run, in which no block may be of another volume.
fn try_read(hand: &mut Hand, block: u64) -> Result<(), IoStatus> {
    match hand.run(Operation::Read, block, RUN) {
        IoStatus::SUCCESS => {}
        other => return Err(other),
    }
    let mut bytes = vec![0; RUN as usize * 4096];
    let found = hand.memory.slice(0, RUN * 4096).unwrap();
    hand.regions.load(found, &mut bytes).unwrap();
    for (index, page) in bytes.chunks(4096).enumerate() {
        assert!(!page.contains(&OTHERS), "block {} is of another volume", block + index as u64);
    }
    Ok(())
}

fn volume(name: &str, blocks: u64, checksums: bool) -> VolumeOp {
    VolumeOp::Create { name: name.into(), blocks, unit: 1, uuid: 1, checksums }
}

/// A pool on `device` and perhaps `disk:1`, of which almost all blocks have belonged to a deleted volume.
fn used_pool(disks: &Disks, device: &str, is_wide: bool, blocks: u64) {
    disks.with(|opener| {
        let device: Uri = device.parse().unwrap();
        create(opener, &device, "tests", false).unwrap();
        let place = VolumeRef::on(&device);
        let open = OpenPool::open(opener, &place).unwrap();
        if is_wide {
            open.grow(opener, &["disk:1".parse().unwrap()], false).unwrap();
        }
        open.change(volume("others", blocks, false)).unwrap();
        let opened = opener.open(&place.with_name("others")).unwrap();
        let mut hand = disks.bench.hand(&*opened.medium, 0);
        for run in 0..blocks / u64::from(RUN) {
            hand.write(run * u64::from(RUN), RUN, OTHERS);
        }
        assert_eq!(hand.run(Operation::Flush, 0, 0), IoStatus::SUCCESS);
        drop((hand, opened));
        let name = "others".into();
        open.change(VolumeOp::Delete { name, orphan: false }).unwrap();
        for name in ["plain", "summed"] {
            open.change(volume(name, 500, name == "summed")).unwrap();
        }
    });
}

/// Loses writes of each of these sets of disks in turn below a pool on `device`.
fn check_losses(device: &str, is_wide: bool, losses: &[&[usize]]) {
    let blocks = if is_wide { 3600 } else { 1800 };
    check_losses_of(&Disks::new(), device, (is_wide, blocks), losses);
}

fn check_losses_of(
    disks: &Disks,
    device: &str,
    (is_wide, blocks): (bool, u64),
    losses: &[&[usize]],
) {
    used_pool(disks, device, is_wide, blocks);
    disks.with(|opener| {
        let place = VolumeRef::on(&device.parse().unwrap());
        let open = OpenPool::open(opener, &place).unwrap();
        let mut interrupted = 0;
        for name in ["plain", "summed"] {
            let opened = opener.open(&place.with_name(name)).unwrap();
            let mut hand = disks.bench.hand(&*opened.medium, 0);
            let mut other = disks.bench.hand(&*opened.medium, 1);
            for lost in losses {
                let before = open.losses();
                interrupted += disks.lose_and_read(&mut hand, lost);
                for hand in [&mut hand, &mut other] {
                    assert_eq!(hand.run(Operation::Flush, 0, 0), IoStatus::WRITE_FAULT, "{name}");
                    assert_eq!(hand.run(Operation::Flush, 0, 0), IoStatus::SUCCESS, "{name}");
                }
                assert_eq!(open.losses(), before + 1, "one loss is handled once");
            }
        }
        assert!(interrupted > 0, "some read was in flight");
    });
}

#[test]
fn no_read_returns_blocks_of_another_volume_after_the_device_has_lost_writes() {
    check_losses("disk:0", false, &[&[0]]);
}

#[test]
fn losses_are_counted_through_the_devices_between_a_pool_and_its_disk() {
    for device in ["delay:[disk:0]", "fault:[disk:0]", "split:[disk:0]?parts=1&part=0"] {
        check_losses(device, false, &[&[0]]);
    }
}

#[test]
fn losses_of_all_legs_are_counted_through_a_mirror_below_a_pool() {
    let disks = Disks::new();
    let legs = ["disk:0", "disk:1"].map(|leg| leg.parse().unwrap());
    disks.with(|opener| crate::mirror::create(opener, &legs, false).unwrap());
    check_losses_of(&disks, "mirror:[disk:0],[disk:1]", (false, 1560), &[&[0, 1]]);
}

#[test]
fn losses_are_counted_through_a_pool_below_a_pool() {
    let disks = Disks::new();
    disks.with(|opener| {
        let device: Uri = "disk:0".parse().unwrap();
        create(opener, &device, "tests", false).unwrap();
        let open = OpenPool::open(opener, &VolumeRef::on(&device)).unwrap();
        open.change(volume("inner", 1900, false)).unwrap();
    });
    check_losses_of(&disks, "volume:[disk:0]/inner", (false, 1560), &[&[0]]);
}

#[test]
fn each_device_of_a_pool_may_lose_writes() {
    check_losses("disk:0", true, &[&[0], &[1]]);
}

#[test]
fn pool_recovers_from_a_loss_while_nobody_does_io() {
    let disks = Disks::new();
    used_pool(&disks, "disk:0", false, 1800);
    disks.with(|opener| {
        let place = VolumeRef::on(&"disk:0".parse().unwrap());
        let open = OpenPool::open(opener, &place).unwrap();
        let opened = opener.open(&place.with_name("plain")).unwrap();
        let mut hand = disks.bench.hand(&*opened.medium, 0);
        hand.write(0, RUN, 1);
        disks.disks[0].lose_counted();
        let until = disks.bench.clock.now().after(Span::from_secs(60));
        while open.losses() == 0 || open.stopped_because().is_some() {
            assert!(disks.bench.clock.now() < until, "{:?}", open.stopped_because());
            tenmil_linux::named_thread::yield_cpu();
        }
        assert_eq!(hand.run(Operation::Flush, 0, 0), IoStatus::WRITE_FAULT);
        assert_eq!(hand.run(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    });
}

#[test]
fn losses_from_before_a_pool_was_opened_interrupt_nothing() {
    let disks = Disks::new();
    used_pool(&disks, "disk:0", false, 1800);
    disks.disks[0].lose_counted();
    disks.with(|opener| {
        let place = VolumeRef::on(&"disk:0".parse().unwrap());
        let opened = opener.open(&place.with_name("plain")).unwrap();
        let mut hand = disks.bench.hand(&*opened.medium, 0);
        hand.write(0, RUN, 1);
        assert_eq!(hand.read(0, RUN), [1; RUN as usize]);
        assert_eq!(hand.run(Operation::Flush, 0, 0), IoStatus::SUCCESS);
        assert_eq!(OpenPool::open(opener, &place).unwrap().losses(), 0);
    });
}
