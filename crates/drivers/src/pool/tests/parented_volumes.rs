//! Volumes over parents outside their pool.

#![expect(clippy::disallowed_methods, reason = "it makes the images")]

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use tenmil_base::{BlockExtent, ExtentKind, IoStatus, Operation};
use tenmil_linux::NamedThread;
use tenmil_volume::{ParentInfo, PoolRequest};

use super::{PAGE, PoolFixture, VolumeOp, VolumeTestChannel};
use crate::pool::{DecoupleResult, Info, OpenPool, VolumeRef, check_closed_pool, rescue_pool};
use crate::{FaultControl, FaultRule};
use tenmil_base::Error;
use tenmil_block::OpenedDevice;
use tenmil_block::uri::Uri;

/// Blocks of the image; the first byte of each is its number plus one.
const IMAGE: u64 = 150;

/// A pool, and an image beside it.
fn pool_with_image() -> PoolFixture {
    let bench = PoolFixture::new("32m");
    std::fs::write(bench.directory.path().join("golden"), image_contents()).unwrap();
    bench
}

fn image_contents() -> Vec<u8> {
    (0..IMAGE).flat_map(|block| [image_byte(block); PAGE as usize]).collect()
}

/// Fill byte of a block of the image.
fn image_byte(block: u64) -> u8 {
    u8::try_from(block + 1).unwrap()
}

impl PoolFixture {
    fn image_uri(&self) -> String {
        format!("file:{}?engine=threads", self.directory.path().join("golden").display())
    }

    /// Creates a clone of an image.
    fn create_clone_of_image(
        &self,
        name: &str,
        blocks: u64,
        uri: &str,
        checksums: bool,
    ) -> Result<(), Error> {
        let open = self.open_pool();
        let parent = open.open_and_fingerprint_parent(&self.opener(), &uri.parse().unwrap())?;
        let (name, unit, uuid) = (name.into(), 16, 3);
        open.execute_volume_op(VolumeOp::CreateOver {
            name,
            blocks,
            unit,
            uuid,
            checksums,
            parent,
        })?;
        Ok(())
    }

    fn change_volume(&self, change: VolumeOp) -> Option<Info> {
        self.open_pool().execute_volume_op(change).unwrap()
    }

    pub(super) fn snapshot(&self, volume: &str, name: &str) {
        let (volume, name) = (volume.into(), name.into());
        self.change_volume(VolumeOp::Snapshot { volume, name, uuid: 9 });
    }

    fn decouple(&self, name: &str) -> Result<DecoupleResult, Error> {
        self.open_pool().decouple(&self.opener(), name, None, &mut |_| true)
    }

    fn parent_problem(&self) -> Option<String> {
        let place = VolumeRef::pool_on(&self.device_uri().parse().unwrap());
        let checked = check_closed_pool(&self.opener(), &place).unwrap();
        assert!(checked.damaged.is_empty() && checked.report.findings.is_empty());
        checked.parents[0].problem.clone()
    }
}

/// Contents of a volume of this number of blocks.
fn volume_contents(hand: &mut VolumeTestChannel, blocks: u64) -> Vec<u8> {
    let each = |first: u64| (first, u32::try_from((blocks - first).min(16)).unwrap());
    let mut found = Vec::new();
    for (first, count) in (0..blocks).step_by(16).map(each) {
        found.extend(hand.read(first, count));
    }
    found
}

fn image_then_zeroes(blocks: u64) -> Vec<u8> {
    (0..blocks).map(|block| if block < IMAGE { image_byte(block) } else { 0 }).collect()
}

#[test]
fn unwritten_blocks_read_the_parent_and_deallocated_ones_read_zeroes() {
    for checksums in [false, true] {
        let bench = pool_with_image();
        bench.create_clone_of_image("v", 200, &bench.image_uri(), checksums).unwrap();
        let opened = bench.open_volume("v").unwrap();
        assert!(opened.existing[0].to_string().contains("and the rest a clone of file:"));
        let mut hand = bench.volume_client(&*opened.medium, 0);
        let mut expected = image_then_zeroes(200);
        assert_eq!(volume_contents(&mut hand, 200), expected);
        // Inside units, across them, and across the end of the parent.
        for (first, count) in [(3, 2), (30, 5), (147, 6), (199, 1)] {
            hand.write(first, count, 0xaa);
            expected[usize::try_from(first).unwrap()..][..count as usize].fill(0xaa);
        }
        for (first, count) in [(4, 3), (60, 40), (140, 20)] {
            assert_eq!(hand.run_request(Operation::Deallocate, first, count), IoStatus::SUCCESS);
            expected[usize::try_from(first).unwrap()..][..count as usize].fill(0);
        }
        hand.write(70, 1, 0xbb);
        expected[70] = 0xbb;
        assert_eq!(volume_contents(&mut hand, 200), expected);
        let extent = |lba| opened.medium.block_status(lba).unwrap();
        assert_eq!(extent(71), BlockExtent { blocks: 29, kind: ExtentKind::Hole });
        assert_eq!(extent(10).kind, ExtentKind::Data);
        drop(hand);
        bench.snapshot("v", "s");
        let mut hand = bench.volume_client(&*opened.medium, 0);
        (0..15).for_each(|part| hand.write(part * 10, 10, 1));
        assert_eq!(volume_contents(&mut hand, 150), [1; 150]);
        drop((hand, opened));
        let kept = bench.open_volume("s").unwrap();
        assert_eq!(volume_contents(&mut bench.volume_client(&*kept.medium, 0), 200), expected);
        drop(kept);
        assert_eq!(bench.parent_problem(), None);
        assert_eq!(std::fs::read(bench.directory.path().join("golden")).unwrap(), image_contents());
    }
}

#[test]
fn missing_or_changed_parent_is_rejected_by_name() {
    let bench = pool_with_image();
    bench.create_volume("plain", 64);
    bench.create_clone_of_image("v", 200, &bench.image_uri(), false).unwrap();
    bench.volume_client(&*bench.open_volume("v").unwrap().medium, 0).write(5, 1, 0xaa);
    bench.snapshot("v", "s");
    let golden = bench.directory.path().join("golden");
    let longer = [image_contents(), vec![0; 8192]].concat();
    let mut other = image_contents();
    other[PAGE as usize * 149] ^= 1;
    for (bytes, said) in [
        (None, "No such file"),
        (
            Some(&image_contents()[..PAGE as usize * 149]),
            "it has 610304 bytes, expected 614400 at least",
        ),
        (Some(&other), "it is another, or was written to"),
    ] {
        match bytes {
            Some(bytes) => std::fs::write(&golden, bytes).unwrap(),
            None => std::fs::rename(&golden, bench.directory.path().join("away")).unwrap(),
        }
        for name in ["v", "s"] {
            let error = bench.open_volume(name).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(&format!("volume `{name}`: its parent file:")), "{text}");
            assert!(text.contains(said), "{text}");
            assert!(error.hint().unwrap().contains("pool rescue"), "{error:?}");
        }
        bench.open_volume("plain").unwrap();
        assert!(bench.parent_problem().unwrap().contains(said));
        assert!(bench.decouple("v").is_err());
    }
    std::fs::write(&golden, longer).unwrap();
    let opened = bench.open_volume("v").unwrap();
    let found = volume_contents(&mut bench.volume_client(&*opened.medium, 0), 200);
    let mut expected = image_then_zeroes(200);
    expected[5] = 0xaa;
    assert_eq!(found, expected, "what a parent has gained is not read");
}

#[test]
fn parent_with_another_block_size_is_rejected() {
    let bench = pool_with_image();
    let open = bench.open_pool();
    let parent = open
        .open_and_fingerprint_parent(&bench.opener(), &bench.image_uri().parse().unwrap())
        .unwrap();
    for (name, block_bytes) in [("smaller", 256), ("larger", 4096)] {
        let parent = ParentInfo { block_bytes, ..parent.clone() };
        let change = VolumeOp::CreateOver {
            name: name.into(),
            blocks: 200,
            unit: 16,
            uuid: 3,
            checksums: false,
            parent,
        };
        open.execute_volume_op(change).unwrap();
        let error = bench.open_volume(name).unwrap_err().to_string();
        let said = format!("it is another: blocks of 512 bytes, expected {block_bytes}");
        assert!(error.contains(&said), "{error}");
    }
}

#[test]
fn decoupling_does_not_allocate_holes() {
    // In units of 16 blocks: two holes, a single block of data, a hole, data at both ends of a unit.
    let data = [33, 70, 79, 140];
    let block = |block| if data.contains(&block) { image_byte(block) } else { 0 };
    for checksums in [false, true] {
        let bench = pool_with_image();
        let image: Vec<u8> = (0..IMAGE).flat_map(|at| [block(at); PAGE as usize]).collect();
        std::fs::write(bench.directory.path().join("golden"), image).unwrap();
        bench.create_clone_of_image("v", 200, &bench.image_uri(), checksums).unwrap();
        let opened = bench.open_volume("v").unwrap();
        let mut hand = bench.volume_client(&*opened.medium, 0);
        hand.write(50, 1, 0x77);
        bench.snapshot("v", "s");
        bench.decouple("v").unwrap();
        let mut expected: Vec<u8> = (0..200).map(block).collect();
        expected[50] = 0x77;
        assert_eq!(volume_contents(&mut hand, 200), expected);
        // Units 2, 4 and 8, all of which the parent has, and the block that was written.
        let info = bench.open_pool().find_volume("v").unwrap();
        assert_eq!((info.reach, info.mapped), (0, 16 + 16 + 16 + 1), "{info:?}");
        drop((hand, opened));
        assert_eq!(
            volume_contents(
                &mut bench.volume_client(&*bench.open_volume("s").unwrap().medium, 0),
                200
            ),
            expected
        );
        bench.change_volume(VolumeOp::Delete { name: "s".into(), orphan: false });
        std::fs::remove_file(bench.directory.path().join("golden")).unwrap();
        let opened = bench.open_volume("v").unwrap();
        assert_eq!(volume_contents(&mut bench.volume_client(&*opened.medium, 0), 200), expected);
        drop(opened);
        assert!(bench.check_finds_nothing());
    }
}

/// Injects faults below an open volume.
fn set_parent_fault_rules(opened: &OpenedDevice, rules: &str) {
    let handle = opened.handles.iter().find_map(|control| control.downcast::<FaultControl>());
    handle.unwrap().set_rules(FaultRule::parse_all(rules).unwrap());
}

#[test]
fn parent_read_error_fails_only_that_read() {
    let bench = pool_with_image();
    let uri = format!("fault:[{}]", bench.image_uri());
    bench.create_clone_of_image("v", 200, &uri, false).unwrap();
    let opened = bench.open_volume("v").unwrap();
    let mut writer = bench.volume_client(&*opened.medium, 1);
    let load = NamedThread::spawn("load", None, move |stop: &tenmil_linux::StopFlag| {
        let mut round = 0;
        while !stop.is_stopped() {
            round = round % 100 + 1;
            writer.write(100 + u64::from(round % 20), 3, round);
            assert_eq!(writer.read(100 + u64::from(round % 20), 3), [round; 3]);
        }
        round
    })
    .unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.write(8, 8, 7);
    assert_eq!(hand.read(6, 3), [image_byte(6), image_byte(7), 7]);
    set_parent_fault_rules(&opened, "error:read");
    for _ in 0..50 {
        assert_ne!(
            hand.run_request(Operation::Read, 6, 3),
            IoStatus::SUCCESS,
            "a part of it is the parent's"
        );
        assert_eq!(hand.read(8, 8), [7; 8]);
        hand.write(40, 1, 9);
    }
    set_parent_fault_rules(&opened, "");
    let round = load.stop();
    assert_eq!(hand.read(100 + u64::from(round % 20), 3), [round; 3]);
    assert_eq!(hand.read(6, 3), [image_byte(6), image_byte(7), 7]);
    assert_eq!(hand.read(39, 3), [image_byte(39), 9, image_byte(41)]);
    drop((hand, opened));
    assert_eq!(bench.parent_problem(), None);
}

#[test]
fn decoupled_volume_needs_no_parent() {
    for checksums in [false, true] {
        let bench = pool_with_image();
        bench.create_clone_of_image("v", 200, &bench.image_uri(), checksums).unwrap();
        bench.snapshot("v", "s");
        let opened = bench.open_volume("v").unwrap();
        let mut hand = bench.volume_client(&*opened.medium, 0);
        hand.write(17, 2, 0xaa);
        assert_eq!(hand.run_request(Operation::Deallocate, 120, 9), IoStatus::SUCCESS);
        let mut writer = bench.volume_client(&*opened.medium, 1);
        let load = NamedThread::spawn("load", None, move |stop: &tenmil_linux::StopFlag| {
            while !stop.is_stopped() {
                writer.write(30, 2, 5);
                assert_eq!(writer.run_request(Operation::Deallocate, 31, 1), IoStatus::SUCCESS);
                assert_eq!(writer.read(29, 4), [image_byte(29), 5, 0, image_byte(32)]);
            }
        })
        .unwrap();
        let mut steps = 0;
        let store = bench.open_pool();
        let stopped = store.decouple(&bench.opener(), "v", None, &mut |_| {
            steps += 1;
            steps < 2
        });
        assert!(stopped.unwrap_err().to_string().contains("repeat it to resume"));
        let left = store.find_volume("v").unwrap().reach;
        assert!((1..150).contains(&left), "{left}");
        assert_eq!(bench.decouple("v").unwrap().blocks, left);
        assert_eq!(bench.decouple("v").unwrap().blocks, 0, "it was so already");
        load.stop();
        drop((hand, opened, store));
        std::fs::remove_file(bench.directory.path().join("golden")).unwrap();
        let mut expected = image_then_zeroes(200);
        for (block, byte) in [(17, 0xaa), (18, 0xaa), (30, 5), (31, 0)] {
            expected[block] = byte;
        }
        expected[120..129].fill(0);
        let opened = bench.open_volume("v").unwrap();
        assert_eq!(volume_contents(&mut bench.volume_client(&*opened.medium, 0), 200), expected);
        drop(opened);
        assert!(bench.open_volume("s").is_err(), "a snapshot of before keeps its parent");
        assert!(bench.parent_problem().is_some());
        bench.change_volume(VolumeOp::Delete { name: "s".into(), orphan: false });
        assert!(bench.check_finds_nothing());
    }
}

#[test]
fn inflate_copies_the_parent_and_rollback_restores_it() {
    let bench = pool_with_image();
    bench.create_clone_of_image("v", 200, &bench.image_uri(), false).unwrap();
    bench.snapshot("v", "s");
    let store = bench.open_pool();
    let error =
        store.request_and_wait(PoolRequest::ReserveThick("v".into())).unwrap_err().to_string();
    assert!(error.contains("blocks of it are its parent's"), "{error}");
    let inflate = || store.inflate(&bench.opener(), "v", None, &mut |_| true);
    assert!(inflate().unwrap().info.is_thick);
    assert_eq!(store.volume_usage("v").unwrap().exclusive_blocks(), 200);
    let revert = || VolumeOp::Rollback { volume: "v".into(), snapshot: "s".into() };
    assert_eq!(store.execute_volume_op(revert()).unwrap().unwrap().reach, 150);
    let opened = bench.open_volume("v").unwrap();
    assert_eq!(
        volume_contents(&mut bench.volume_client(&*opened.medium, 0), 200),
        image_then_zeroes(200)
    );
    drop(opened);
    assert!(inflate().unwrap().info.is_thick);
    store.execute_volume_op(revert()).unwrap();
    let shrunk = VolumeOp::Resize { name: "v".into(), blocks: 100 };
    assert_eq!(store.execute_volume_op(shrunk).unwrap().unwrap().reach, 100);
    store.execute_volume_op(VolumeOp::Resize { name: "v".into(), blocks: 200 }).unwrap();
    let opened = bench.open_volume("v").unwrap();
    let found = volume_contents(&mut bench.volume_client(&*opened.medium, 0), 200);
    assert_eq!((&found[..100], &found[100..]), (&image_then_zeroes(100)[..], &[0; 100][..]));
    drop((opened, store));
    assert!(bench.check_finds_nothing());
}

#[test]
fn own_pool_and_writable_volumes_are_rejected_as_parents() {
    let (bench, other) = (pool_with_image(), PoolFixture::new("8m"));
    bench.create_volume("a", 64);
    bench.snapshot("a", "s");
    other.create_volume("b", 64);
    other.snapshot("b", "t");
    let link = bench.directory.path().join("link");
    std::os::unix::fs::symlink(bench.directory.path().join("pool"), &link).unwrap();
    let odd = bench.directory.path().join("odd");
    std::fs::write(&odd, vec![1; 6144]).unwrap();
    for (uri, said) in [
        (format!("volume:[{}]/s", bench.device_uri()), "a volume of the same pool"),
        (format!("delay:[volume:[{}]/s]", bench.device_uri()), "a volume of the same pool"),
        (bench.device_uri(), "the device that the pool itself is on"),
        (format!("volume:[file:{}?engine=threads]/s", link.display()), "a volume of the same pool"),
        (format!("volume:[{}]/b", other.device_uri()), "expected a snapshot"),
        (format!("volume:[{}]/none", other.device_uri()), "there is none"),
        (
            format!("file:{}?engine=threads", odd.display()),
            "it has 6144 bytes, expected a multiple",
        ),
        ("tape:x".into(), "no devices of kind `tape`"),
    ] {
        let error = bench.create_clone_of_image("v", 64, &uri, false).unwrap_err().to_string();
        assert!(error.contains(said), "{uri}: {error}");
    }
    let uri = format!("volume:[{}]/t", other.device_uri());
    other.volume_client(&*other.open_volume("b").unwrap().medium, 0).write(3, 1, 3);
    other.snapshot("b", "u");
    let parent = format!("volume:[{}]/u", other.device_uri());
    bench.create_clone_of_image("v", 64, &parent, false).unwrap();
    let opened = bench.open_volume("v").unwrap();
    assert_eq!(bench.volume_client(&*opened.medium, 0).read(2, 3), [0, 3, 0]);
    drop(opened);
    // Another snapshot of that name.
    other.change_volume(VolumeOp::Rename { name: "u".into(), to: "w".into() });
    let (volume, name) = ("b".into(), "u".into());
    other.change_volume(VolumeOp::Snapshot { volume, name, uuid: 77 });
    let error = bench.open_volume("v").unwrap_err().to_string();
    assert!(error.contains("it is another snapshot"), "{error}");
    assert!(uri.parse::<Uri>().is_ok());
}

#[test]
fn parented_volume_is_sent_and_rescued_completely() {
    let (bench, target) = (pool_with_image(), PoolFixture::new("32m"));
    bench.create_clone_of_image("v", 200, &bench.image_uri(), true).unwrap();
    let opened = bench.open_volume("v").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.write(10, 3, 0xaa);
    assert_eq!(hand.run_request(Operation::Deallocate, 50, 9), IoStatus::SUCCESS);
    drop((hand, opened));
    bench.snapshot("v", "one");
    let opened = bench.open_volume("v").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.write(52, 1, 0xbb);
    assert_eq!(hand.run_request(Operation::Deallocate, 100, 5), IoStatus::SUCCESS);
    drop((hand, opened));
    let (volume, name) = ("v".into(), "two".into());
    bench.change_volume(VolumeOp::Snapshot { volume, name, uuid: 10 });
    let mut one = image_then_zeroes(200);
    one[10..13].fill(0xaa);
    one[50..59].fill(0);
    let mut two = one.clone();
    two[52] = 0xbb;
    two[100..105].fill(0);
    let stream = |base: Option<&str>, name: &str| {
        let mut stream = Vec::new();
        bench
            .open_pool()
            .send_stream(&bench.opener(), base, name, &mut stream, &mut |_| true)
            .unwrap();
        target.open_pool().receive_stream(name, &mut &stream[..], &mut |_| true).unwrap()
    };
    assert_eq!(stream(None, "one").data_blocks, 141);
    let rest = stream(Some("one"), "two");
    assert_eq!((rest.data_blocks, rest.hole_blocks), (1, 5));
    let saved = PoolFixture::new("32m");
    let place = VolumeRef::pool_on(&bench.device_uri().parse().unwrap());
    let store: Arc<OpenPool> = saved.open_pool();
    let found = rescue_pool(&bench.opener(), (&place, &[]), &store, &mut |_| true);
    drop(store);
    // The target was opened with its own memory, and rescued data is read with it.
    for volume in found.unwrap().volumes {
        assert!(volume.lost_blocks == 0 && volume.damaged.is_empty(), "{volume:?}");
        assert_eq!(volume.parent.unwrap().uri, bench.image_uri());
    }
    for (name, expected) in [("one", &one), ("two", &two)] {
        for bench in [&bench, &target, &saved] {
            let opened = bench.open_volume(name).unwrap();
            let found = volume_contents(&mut bench.volume_client(&*opened.medium, 0), 200);
            assert_eq!(&found, expected, "{name}");
        }
    }
    let opened = saved.open_volume("v").unwrap();
    assert_eq!(volume_contents(&mut saved.volume_client(&*opened.medium, 0), 200), two);
    drop(opened);
    assert_eq!(saved.parent_problem(), None);

    // Without the block of the parent, written data is restored, and the rest is reported.
    let at = bench.block_of_parent_record();
    let file = std::fs::File::options().write(true).open(bench.directory.path().join("pool"));
    file.unwrap().write_all_at(&[0; 4096], at * u64::from(PAGE)).unwrap();
    let saved = PoolFixture::new("32m");
    let found =
        rescue_pool(&bench.opener(), (&place, &[]), &saved.open_pool(), &mut |_| true).unwrap();
    for volume in &found.volumes {
        assert!(volume.damaged[0].starts_with("parent's block at block"), "{volume:?}");
        assert!(volume.parent.is_none() && volume.lost_blocks > 130, "{volume:?}");
    }
    let opened = saved.open_volume("two").unwrap();
    let kept = |(block, byte): (usize, u8)| match block {
        10..13 | 52 => byte,
        _ => 0,
    };
    let two: Vec<u8> = two.into_iter().enumerate().map(kept).collect();
    assert_eq!(volume_contents(&mut saved.volume_client(&*opened.medium, 0), 200), two);
}

impl PoolFixture {
    /// The block of the pool that records its parent.
    fn block_of_parent_record(&self) -> u64 {
        let image = std::fs::read(self.directory.path().join("pool")).unwrap();
        let blocks = image.as_chunks::<4096>().0.iter();
        let is_it = |block: &&[u8; 4096]| block[4] == 9 && block[8..16] == *b"tenmilVS";
        let found: Vec<usize> =
            (0..).zip(blocks).filter(|(_, one)| is_it(one)).map(|(at, _)| at).collect();
        assert_eq!(found.len(), 1, "it is shared");
        found[0] as u64
    }
}
