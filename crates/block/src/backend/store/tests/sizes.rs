//! Volumes that become longer while somebody has them open.

use base::{Medium, Operation, Outcome, Span};

use super::super::Change;
use super::Bench;
use crate::{Claim, Device, DeviceOptions, Event, notice_sizes};

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

    assert!(notice_sizes() >= 1);
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
    notice_sizes();
    assert_eq!(descriptor.next_event(), None);
}
