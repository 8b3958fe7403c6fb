//! Pools on devices that count lost writes: no read returns blocks from before the loss.

use tenmil_base::{IoStatus, Memory, Operation, Random, Span};

use super::{PoolFixture, VolumeTestChannel};
use crate::mirror::tests::simulated_disk::SimulatedDisk;
use crate::pool::{OpenPool, VolumeOp, VolumeRef, create_pool};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// Two disks with a pool on the first or on both.
struct LossyDisks {
    bench: PoolFixture,
    disks: [SimulatedDisk; 2],
}

/// Content of the blocks that another volume had before.
const OTHERS: u8 = 9;
/// Blocks per request.
const RUN: u32 = 8;
const DISK_BLOCKS: u64 = 8 << 20 >> 9;

impl LossyDisks {
    fn new() -> Self {
        let bench = PoolFixture::new("8m");
        let disks =
            [1, 2].map(|seed| SimulatedDisk::new(&bench.regions, DISK_BLOCKS, Random::new(seed)));
        Self { bench, disks }
    }

    /// Runs with an opener for `disk:0` and `disk:1`.
    fn with_opener<T>(&self, run: impl FnOnce(&Opener<'_>) -> T) -> T {
        let disks = self.disks.clone();
        let open = move |_: &Opener<'_>, uri: &Uri| -> Result<OpenedDevice, Error> {
            let disk = disks[usize::from(uri.path() == "1")].clone();
            Ok(OpenedDevice::without_existing_data(
                std::sync::Arc::new(disk),
                "a disk that counts losses",
            ))
        };
        run(&Opener {
            kinds: &crate::tests::device_types_with(&[("disk", &open)]),
            ..self.bench.opener()
        })
    }

    /// Writes blocks of `volume`, which lie where another volume has had its own, and does not flush
    /// them; then loses writes and reads them all. Returns how many reads were interrupted.
    fn interrupted_reads_after_loss(&self, hand: &mut VolumeTestChannel, lost: &[usize]) -> u32 {
        let runs = 60;
        for run in 0..runs {
            hand.write(run * u64::from(RUN), RUN, 1);
            assert_eq!(hand.read(run * u64::from(RUN), RUN), [1; RUN as usize]);
        }
        lost.iter().for_each(|disk| self.disks[*disk].lose_unflushed_counted());
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
fn try_read(hand: &mut VolumeTestChannel, block: u64) -> Result<(), IoStatus> {
    match hand.run_request(Operation::Read, block, RUN) {
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

fn create_volume_op(name: &str, blocks: u64, checksums: bool) -> VolumeOp {
    VolumeOp::Create { name: name.into(), blocks, unit: 1, uuid: 1, checksums }
}

/// A pool on `device` and perhaps `disk:1`, of which almost all blocks have belonged to a deleted volume.
fn create_reused_pool(disks: &LossyDisks, device: &str, is_wide: bool, blocks: u64) {
    disks.with_opener(|opener| {
        let device: Uri = device.parse().unwrap();
        create_pool(opener, &device, "tests", false).unwrap();
        let place = VolumeRef::pool_on(&device);
        let open = OpenPool::open(opener, &place).unwrap();
        if is_wide {
            open.grow_pool(opener, &["disk:1".parse().unwrap()], false).unwrap();
        }
        open.execute_volume_op(create_volume_op("others", blocks, false)).unwrap();
        let opened = opener.open(&place.uri_of_other_volume("others")).unwrap();
        let mut hand = disks.bench.volume_client(&*opened.medium, 0);
        for run in 0..blocks / u64::from(RUN) {
            hand.write(run * u64::from(RUN), RUN, OTHERS);
        }
        assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
        drop((hand, opened));
        let name = "others".into();
        open.execute_volume_op(VolumeOp::Delete { name, orphan: false }).unwrap();
        for name in ["plain", "summed"] {
            open.execute_volume_op(create_volume_op(name, 500, name == "summed")).unwrap();
        }
    });
}

/// Loses writes of each of these sets of disks in turn below a pool on `device`.
fn check_losses_on_pool(device: &str, is_wide: bool, losses: &[&[usize]]) {
    let blocks = if is_wide { 3600 } else { 1800 };
    check_losses_through(&LossyDisks::new(), device, (is_wide, blocks), losses);
}

fn check_losses_through(
    disks: &LossyDisks,
    device: &str,
    (is_wide, blocks): (bool, u64),
    losses: &[&[usize]],
) {
    create_reused_pool(disks, device, is_wide, blocks);
    disks.with_opener(|opener| {
        let place = VolumeRef::pool_on(&device.parse().unwrap());
        let open = OpenPool::open(opener, &place).unwrap();
        let mut interrupted = 0;
        for name in ["plain", "summed"] {
            let opened = opener.open(&place.uri_of_other_volume(name)).unwrap();
            let mut hand = disks.bench.volume_client(&*opened.medium, 0);
            let mut other = disks.bench.volume_client(&*opened.medium, 1);
            for lost in losses {
                let before = open.write_loss_count();
                interrupted += disks.interrupted_reads_after_loss(&mut hand, lost);
                for hand in [&mut hand, &mut other] {
                    assert_eq!(
                        hand.run_request(Operation::Flush, 0, 0),
                        IoStatus::WRITE_FAULT,
                        "{name}"
                    );
                    assert_eq!(
                        hand.run_request(Operation::Flush, 0, 0),
                        IoStatus::SUCCESS,
                        "{name}"
                    );
                }
                assert_eq!(open.write_loss_count(), before + 1, "one loss is handled once");
            }
        }
        assert!(interrupted > 0, "some read was in flight");
    });
}

#[test]
fn no_read_returns_another_volumes_blocks_after_lost_writes() {
    check_losses_on_pool("disk:0", false, &[&[0]]);
}

#[test]
fn losses_are_reported_through_stacked_devices() {
    for device in ["delay:[disk:0]", "fault:[disk:0]", "split:[disk:0]?parts=1&part=0"] {
        check_losses_on_pool(device, false, &[&[0]]);
    }
}

#[test]
fn losses_are_reported_through_a_mirror() {
    let disks = LossyDisks::new();
    let legs = ["disk:0", "disk:1"].map(|leg| leg.parse().unwrap());
    disks.with_opener(|opener| crate::mirror::create_mirror(opener, &legs, false).unwrap());
    check_losses_through(&disks, "mirror:[disk:0],[disk:1]", (false, 1560), &[&[0, 1]]);
}

#[test]
fn losses_are_reported_through_a_nested_pool() {
    let disks = LossyDisks::new();
    disks.with_opener(|opener| {
        let device: Uri = "disk:0".parse().unwrap();
        create_pool(opener, &device, "tests", false).unwrap();
        let open = OpenPool::open(opener, &VolumeRef::pool_on(&device)).unwrap();
        open.execute_volume_op(create_volume_op("inner", 1900, false)).unwrap();
    });
    check_losses_through(&disks, "volume:[disk:0]/inner", (false, 1560), &[&[0]]);
}

#[test]
fn any_device_of_a_pool_may_lose_writes() {
    check_losses_on_pool("disk:0", true, &[&[0], &[1]]);
}

#[test]
fn pool_recovers_from_a_loss_without_client_io() {
    let disks = LossyDisks::new();
    create_reused_pool(&disks, "disk:0", false, 1800);
    disks.with_opener(|opener| {
        let place = VolumeRef::pool_on(&"disk:0".parse().unwrap());
        let open = OpenPool::open(opener, &place).unwrap();
        let opened = opener.open(&place.uri_of_other_volume("plain")).unwrap();
        let mut hand = disks.bench.volume_client(&*opened.medium, 0);
        hand.write(0, RUN, 1);
        disks.disks[0].lose_unflushed_counted();
        let until = disks.bench.clock.now().after(Span::from_secs(60));
        while open.write_loss_count() == 0 || open.stop_reason().is_some() {
            assert!(disks.bench.clock.now() < until, "{:?}", open.stop_reason());
            tenmil_linux::named_thread::yield_cpu();
        }
        assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::WRITE_FAULT);
        assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    });
}

#[test]
fn losses_before_open_interrupt_no_read() {
    let disks = LossyDisks::new();
    create_reused_pool(&disks, "disk:0", false, 1800);
    disks.disks[0].lose_unflushed_counted();
    disks.with_opener(|opener| {
        let place = VolumeRef::pool_on(&"disk:0".parse().unwrap());
        let opened = opener.open(&place.uri_of_other_volume("plain")).unwrap();
        let mut hand = disks.bench.volume_client(&*opened.medium, 0);
        hand.write(0, RUN, 1);
        assert_eq!(hand.read(0, RUN), [1; RUN as usize]);
        assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
        assert_eq!(OpenPool::open(opener, &place).unwrap().write_loss_count(), 0);
    });
}
