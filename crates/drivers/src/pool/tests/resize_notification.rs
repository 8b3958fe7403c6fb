//! Volumes that are extended while they are open.

#![expect(clippy::disallowed_methods, reason = "it extends a file that is served")]

use tenmil_base::{BlockDevice, IoStatus, Operation, Span};

use super::super::VolumeOp;
use super::PoolFixture;
use tenmil_block::{Bdev, BdevEvent, BdevOptions, Claim};

#[test]
fn devices_stacked_on_a_grown_volume_see_its_new_size() {
    let bench = PoolFixture::new("32m");
    bench.create_volume("v", 100);
    let store = bench.open_pool();
    let uri = format!("delay:[volume:[{}]/v]?read=0&write=0", bench.device_uri());
    let opened = bench.opener().open(&uri.parse().unwrap()).unwrap();
    let device = Bdev::new("v", opened.medium.clone(), BdevOptions::new(bench.clock, 1)).unwrap();
    let descriptor = device.open(Claim::WriteOnce, "a test").unwrap();
    let mut hand = bench.volume_client(&descriptor, 0);
    hand.write(99, 1, 1);
    let change = VolumeOp::Resize { name: "v".into(), blocks: 200 };
    store.execute_volume_op(change).unwrap();
    assert_eq!(hand.run_request(Operation::Write, 100, 1), IoStatus::LBA_OUT_OF_RANGE);
    assert_eq!(device.current_limits().block_count, 100);

    // The extension of a plain file does not concern the holders of volumes.
    let path = bench.directory.path().join("side");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let side = format!("file:{}?engine=threads", path.display());
    let side = bench.opener().open(&side.parse().unwrap()).unwrap();
    let side = Bdev::new("side", side.medium, BdevOptions::new(bench.clock, 2)).unwrap();
    std::fs::write(&path, vec![0; 2 << 20]).unwrap();
    let before = side.current_limits().block_count;
    assert_eq!(store.refresh_all_device_sizes(), 1);
    assert_eq!(side.current_limits().block_count, 2 * before);
    assert_eq!(descriptor.next_event(), Some(BdevEvent::Resized { block_count: 200 }));
    assert_eq!((device.current_limits().block_count, descriptor.limits().block_count), (200, 200));
    // A channel handles the change in its next iteration.
    hand.run_request(Operation::Flush, 0, 0);
    tenmil_linux::named_thread::sleep(Span::from_ms(1));
    hand.write(98, 4, 2);
    hand.write(199, 1, 3);
    assert_eq!(hand.read(98, 4), [2; 4]);
    assert_eq!(hand.read(150, 1), [0]);
    assert_eq!(hand.read(199, 1), [3]);
    assert_eq!(hand.run_request(Operation::Write, 200, 1), IoStatus::LBA_OUT_OF_RANGE);
    // A channel that is opened now has the new size, and no holder is notified twice.
    assert_eq!(bench.volume_client(&descriptor, 1).read(199, 1), [3]);
    assert_eq!(store.refresh_all_device_sizes(), 0);
    assert_eq!(descriptor.next_event(), None);
}

#[test]
fn device_that_does_not_forward_resize_keeps_its_size() {
    let bench = PoolFixture::new("32m");
    bench.create_volume("v", 100);
    let store = bench.open_pool();
    let uri = format!("fault:[volume:[{}]/v]", bench.device_uri());
    let opened = bench.opener().open(&uri.parse().unwrap()).unwrap();
    let options = BdevOptions::new(bench.clock, 1);
    let device = Bdev::new("v", opened.medium.clone(), options).unwrap();
    store.execute_volume_op(VolumeOp::Resize { name: "v".into(), blocks: 200 }).unwrap();
    assert_eq!(store.refresh_all_device_sizes(), 0);
    assert_eq!(device.current_limits().block_count, 100);
}
