//! Volumes that become longer while somebody has them open.

#![expect(clippy::disallowed_methods, reason = "it makes a file longer that somebody serves")]

use base::{Medium, Operation, Outcome, Span};

use super::super::Change;
use super::Bench;
use crate::{Claim, Device, DeviceOptions, Event};

#[test]
fn whoever_stands_on_a_volume_that_grew_is_told_and_writes_behind_the_old_end() {
    let bench = Bench::new("32m");
    bench.create("v", 100);
    let store = bench.store();
    let uri = format!("delay:[volume:[{}]/v]?read=0&write=0", bench.device());
    let opened = bench.opener().open(&uri.parse().unwrap()).unwrap();
    let device =
        Device::new("v", opened.medium.clone(), DeviceOptions::new(bench.clock, 1)).unwrap();
    let descriptor = device.open(Claim::WriteOnce, "a test").unwrap();
    let mut hand = bench.hand(&descriptor, 0);
    hand.write(99, 1, 1);
    let change = Change::Resize { name: "v".into(), blocks: 200 };
    store.change(change).unwrap();
    assert_eq!(hand.run(Operation::Write, 100, 1), Outcome::LBA_OUT_OF_RANGE);
    assert_eq!(device.limits().block_count, 100);

    // A file that somebody has made longer is nobody's who has a volume.
    let path = bench.directory.path().join("side");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let side = format!("file:{}?engine=threads", path.display());
    let side = bench.opener().open(&side.parse().unwrap()).unwrap();
    let side = Device::new("side", side.medium, DeviceOptions::new(bench.clock, 2)).unwrap();
    std::fs::write(&path, vec![0; 2 << 20]).unwrap();
    let before = side.limits().block_count;
    assert_eq!(store.tell_of_growth(), 1);
    assert_eq!(side.limits().block_count, 2 * before);
    assert_eq!(descriptor.next_event(), Some(Event::Resized { block_count: 200 }));
    assert_eq!((device.limits().block_count, descriptor.limits().block_count), (200, 200));
    // A channel looks at its next turn.
    hand.run(Operation::Flush, 0, 0);
    host::thread::rest(Span::from_ms(1));
    hand.write(98, 4, 2);
    hand.write(199, 1, 3);
    assert_eq!(hand.read(98, 4), [2; 4]);
    assert_eq!(hand.read(150, 1), [0]);
    assert_eq!(hand.read(199, 1), [3]);
    assert_eq!(hand.run(Operation::Write, 200, 1), Outcome::LBA_OUT_OF_RANGE);
    // One that is opened now is as long, and nobody is told twice.
    assert_eq!(bench.hand(&descriptor, 1).read(199, 1), [3]);
    assert_eq!(store.tell_of_growth(), 0);
    assert_eq!(descriptor.next_event(), None);
}

#[test]
fn what_does_not_pass_it_on_stays_as_long_as_it_was_and_is_not_said_to_be_told() {
    let bench = Bench::new("32m");
    bench.create("v", 100);
    let store = bench.store();
    let uri = format!("fault:[volume:[{}]/v]", bench.device());
    let opened = bench.opener().open(&uri.parse().unwrap()).unwrap();
    let options = DeviceOptions::new(bench.clock, 1);
    let device = Device::new("v", opened.medium.clone(), options).unwrap();
    store.change(Change::Resize { name: "v".into(), blocks: 200 }).unwrap();
    assert_eq!(store.tell_of_growth(), 0);
    assert_eq!(device.limits().block_count, 100);
}
